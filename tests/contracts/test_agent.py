"""An Agent in the user's own loop learns what `manyhands train` learns, in every role."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import agent_programs as programs
import gymnasium
import numpy as np
import pytest
import second_launch
import torch
from agent_programs import JOBS, LEAVING, REPLAY
from answers import answers
from conftest import PROCESS_ENGINES, engine_params
from five_workers import five_workers
from torch import nn

import manyhands as mh
from manyhands import Agent, ConfigError, WorkerError, launch
from manyhands.algorithms.registry import SPECS
from manyhands.viewing.evaluation import evaluate

pytestmark = [pytest.mark.usefixtures("nothing_left")]

REPLAY_OF_NUMBERS = {"rollout_length": 8, "learning_starts": 64, "batch_size": 16}
SMALL: dict[str, dict[str, Any]] = {
    "ppo": programs.PPO,
    "a2c": {"rollout_length": 8},
    "trpo": {"rollout_length": 32, "normalize_observations": True},
    "impala": {"rollout_length": 10, "unrolls": 2},
    "dqn": {"rollout_length": 8, "normalize_observations": True, **REPLAY},
    "ddpg": {**REPLAY_OF_NUMBERS, "box_actions": "scale"},
}
for _name, _spec in SPECS.items():
    if _spec.actions == "bounded" and _name not in SMALL:
        SMALL[_name] = {**REPLAY_OF_NUMBERS, "hidden": (16, 16)}
MORE: list[tuple[str, dict[str, Any]]] = [
    ("trpo", {"collect": "episodes", "batch_steps": 120}),
    ("impala", {"rollout_length": 10, "collect": "episodes", "unrolls": 3}),
    ("impala", {"rollout_length": 10, "lstm": 8, "replay": 4}),
    ("ppo", {"rollout_length": 32, "minibatch": 32, "epochs": 2, "lstm": 8}),
    ("trpo", {"rollout_length": 32, "lstm": 8}),
    ("dqn", {"rollout_length": 8, "prioritized": False, **REPLAY}),
]
CASES = [*SMALL.items(), *MORE]


def env_of(algorithm: str) -> str:
    return "Pendulum-v1" if SPECS[algorithm].actions == "bounded" else "CartPole-v1"


def trained(
    algorithm: str, folder: Path, mode: str, options: dict[str, Any], workers: int = 1
) -> bytes:
    """The policy that `manyhands train` leaves."""
    kwargs = {"name": env_of(algorithm), "count": 4 // workers, "mode": mode}
    mh.train(
        algorithm, env="agent_programs:vector", env_kwargs=kwargs, num_envs=4, workers=workers,
        engine="inline", steps=600, seed=programs.SEED, run_dir=str(folder), quiet=True,
        tensorboard=False, **options,
    )  # fmt: skip
    return (folder / "policy.safetensors").read_bytes()


# -- alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options"), CASES, ids=["-".join([a, *o][:3]) for a, o in CASES]
)
def test_it_learns_what_train_learns_to_the_bit(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    mode = "SAME_STEP" if algorithm in ("ppo", "dqn", "impala") else "NEXT_STEP"
    envs = programs.vector(env_of(algorithm), mode=mode)
    with Agent(algorithm, envs, steps=600, seed=programs.SEED, **options) as agent:
        reports = programs.play(agent, envs)
        agent.save(tmp_path / "agent")
    assert reports
    assert reports[-1]["env_steps"] >= 600
    assert all(np.isfinite(v) for k, v in reports[-1].items() if v is not None)
    own = (tmp_path / "agent" / "policy.safetensors").read_bytes()
    assert own == trained(algorithm, tmp_path / "train", mode, options)


@pytest.mark.parametrize("algorithm", SMALL)
def test_one_environment_is_a_vector_of_one(algorithm: str) -> None:
    """A single env, and vectors that reset themselves in the same step or not at all: the end of
    an episode, and what follows it, is the same thing."""
    options = SMALL[algorithm] | ({"unrolls": 1} if algorithm == "impala" else {})
    found = []
    for mode in ("", "SAME_STEP"):
        envs = programs.vector(env_of(algorithm), 1, mode or "SAME_STEP")
        given: Any = envs if mode else envs.envs[0]
        with Agent(algorithm, given, steps=200, seed=programs.SEED, **options) as agent:
            if mode:
                programs.play(agent, given)
            else:
                programs.play_one(agent, given)
            found.append(programs.fingerprint(agent))
    assert found[0] == found[1]


def test_a_vector_that_the_user_resets() -> None:
    envs = programs.vector(mode="DISABLED")
    with Agent("a2c", envs, steps=300, rollout_length=8) as agent:
        obs, info = envs.reset(seed=programs.seeds(0, 4))
        while not agent.done:
            obs, reward, terminated, truncated, info = envs.step(agent.act(obs))
            agent.observe(obs, reward, terminated, truncated, info)
            agent.update()
            over = terminated | truncated
            if over.any():
                obs, info = envs.reset(options={"reset_mask": over})
        assert agent.version > 5


class Features(nn.Sequential):
    def __init__(self, observation_space: Any, action_space: Any, width: int = 8) -> None:
        super().__init__(nn.Linear(observation_space.shape[0], width), nn.Tanh(), nn.Dropout(0.5))


@pytest.mark.parametrize("algorithm", SMALL)
def test_a_network_of_the_script_itself_is_saved_and_loaded(algorithm: str, tmp_path: Path) -> None:
    """Even one that no other process could find by its name."""
    env = gymnasium.make(env_of(algorithm), max_episode_steps=30)

    def build(observations: Any, actions: Any, width: int) -> nn.Module:
        return Features(observations, actions, width)

    options = SMALL[algorithm] | {"network": build, "network_kwargs": {"width": 12}, "steps": 128}
    with Agent(algorithm, env, **options) as agent:
        programs.play_one(agent, env)
        agent.save(tmp_path / "policy")
        widths = [m.out_features for m in agent.policy.model.modules() if isinstance(m, nn.Linear)]
        assert 12 in widths
        policy = mh.load(tmp_path / "policy")
        obs, _ = env.reset(seed=9)
        assert agent.policy.model.training  # dropout is at rest in evaluation alone
        for _ in range(5):
            best = agent.act(obs, explore=False)
            assert np.array_equal(best, policy.act(obs))
            obs, *_ = env.step(best)
    assert np.isfinite(evaluate(tmp_path / "policy", 3).mean_return)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_it_goes_on_from_what_it_saved(algorithm: str, tmp_path: Path) -> None:
    """The weights of before, in another process or another environment, too."""
    options = SMALL[algorithm] | {"seed": 1}
    with Agent(algorithm, programs.vector(), **options) as first:
        first.save(tmp_path / "saved")
        before = first.policy.model.state_dict()
    with Agent(algorithm, programs.vector(), **options | {"seed": 2}) as fresh:
        assert fresh.started is None
        assert not same_weights(before, fresh.policy.model.state_dict())
    again = options | {"seed": 2, "start_from": tmp_path / "saved"}
    with Agent(algorithm, programs.vector(), **again) as agent:
        assert same_weights(before, agent.policy.model.state_dict())
        assert agent.started is not None
        assert len(agent.started.taken) >= len(before)
        assert not agent.started.left
    threads = torch.get_num_threads()
    for folder, words in (("nowhere", "holds no config.toml"), ("saved", "no layer fits")):
        wrong = options | {"start_from": tmp_path / folder, "hidden": (3,)}
        with pytest.raises(ConfigError, match=words):
            Agent(algorithm, programs.vector(), **wrong)
    assert torch.get_num_threads() == threads


def same_weights(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_environment_without_a_name(tmp_path: Path) -> None:
    """`load` needs the spaces alone, `evaluate` a name."""
    env = gymnasium.wrappers.FlattenObservation(gymnasium.make("CartPole-v1"))
    env = gymnasium.wrappers.TransformReward(env, lambda r: 2 * r)
    with Agent("a2c", env, steps=64) as agent:
        programs.play_one(agent, env)
        agent.save(tmp_path / "policy")
    assert mh.load(tmp_path / "policy").act(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(ConfigError, match=r"env='package.module:function'"):
        evaluate(tmp_path / "policy", 1)


def test_evaluation_leaves_no_trace() -> None:
    found = []
    for look in (False, True):
        envs = programs.vector()
        with Agent("dqn", envs, seed=3, **SMALL["dqn"]) as agent:
            obs, _ = envs.reset(seed=1)
            for _ in range(60):
                if look:
                    assert agent.act(obs, explore=False).shape == (4,)
                    assert agent.act(obs[0], explore=False) in (0, 1)
                action = agent.act(obs)
                obs, *came, info = envs.step(action)
                agent.observe(obs, *came, info)
                agent.update()
            found.append(programs.fingerprint(agent))
    assert found[0] == found[1]


def test_without_steps_schedules_stay_where_they_begin() -> None:
    envs = programs.vector()
    with Agent("a2c", envs, learning_rate="linear:1e-2") as agent:
        reports = programs.play(agent, envs, most=400)
        assert not agent.done
    assert reports[-1]["learning_rate"] == pytest.approx(1e-2)


def test_the_users_own_generators_and_threads_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    envs = programs.vector()
    envs.single_action_space.seed(7)
    drawn = [envs.single_action_space.sample() for _ in range(20)]
    envs.single_action_space.seed(7)
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(3)
    np.random.seed(3)
    with Agent("ppo", envs, **SMALL["ppo"]) as agent:
        programs.play(agent, envs, most=40)
    assert (torch.rand(1).item(), np.random.rand()) == expected
    assert [envs.single_action_space.sample() for _ in range(20)] == drawn
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


# -- with others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", PROCESS_ENGINES)
def test_replicas_are_equal_and_those_of_train(engine: str, tmp_path: Path) -> None:
    found = second_launch.answers_of(engine, "agents")
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["updates"] == found[1]["updates"] > 2
    if engine == "local":
        trained("ppo", tmp_path / "train", "NEXT_STEP", programs.PPO, workers=2)
        policy = mh.load(tmp_path / "train")
        weights = b"".join(w.numpy().tobytes() for w in policy.model.state_dict().values())
        assert hashlib.sha256(weights).hexdigest() == found[0]["weights"]


@pytest.mark.parametrize("engine", engine_params("inline", "local", "ray", slow="ray"))
def test_the_same_loop_in_every_role(engine: str) -> None:
    """Learner or server, and two that act: all run the same lines, and all of them end."""
    if engine == "local":
        found = answers(engine, "agents")
    else:
        found = launch(programs.in_roles, JOBS, workers=3, engine=engine, timeout=60)
    for job, (algorithm, _, options) in enumerate(JOBS):
        main, *acting = [worker[job] for worker in found]
        assert main["role"] == ("server" if algorithm == "a2c" else "learner")
        assert not main["acts"]
        assert main["version"] > 3
        assert main["reports"] > 1
        assert main["steps"] >= options["steps"]
        for worker in acting:
            assert worker["acts"]
            assert worker["reports"] == 0
            assert worker["version"] > 0
        assert all(worker[job]["finite"] for worker in found)


def test_several_learners() -> None:
    found = [answer["learners"] for answer in five_workers("local", False)]
    for job in range(2):
        roles = [worker[job]["role"] for worker in found]
        assert roles == ["learner", "learner", "actor", "actor", "actor"]
        assert found[0][job]["version"] == found[1][job]["version"] > 1


@pytest.mark.parametrize("algorithm", LEAVING)
def test_a_learner_ends_when_those_that_act_have_left(algorithm: str) -> None:
    learner = answers("local", f"{algorithm} is left")[0]
    assert learner["version"] > 0
    assert learner["seconds"] < 50  # it did not wait for the deadline


@pytest.mark.parametrize(
    ("algorithm", "role", "workers"), [("impala", "actor", 3), ("dqn", "learner", 2)]
)
def test_a_worker_that_is_killed_ends_the_others(algorithm: str, role: str, workers: int) -> None:
    options = REPLAY if algorithm == "dqn" else {}
    with pytest.raises(WorkerError, match="SIGKILL"):
        launch(programs.dies, algorithm, role, options, workers=workers, timeout=60)


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("dpn", {}, "did you mean dqn"),
        ("ppo", {"learning_rat": 1}, "did you mean learning_rate"),
        ("ppo", {"workers": 2}, "manyhands launch -n N"),
        ("ppo", {"num_envs": 2}, "follows from the environments"),
        ("ppo", {"opponents": 3}, "games in turns are played by `manyhands train"),
        ("ppo", {"gamma": 2.0}, "gamma=2 must lie from 0 to 1"),
        ("ddpg", {}, "Discrete"),
        ("ppo", {"minibatch": 100}, "does not go evenly"),
        ("ppo", {"network_kwargs": {"width": 3}}, "give network"),
    ],
)
def test_what_cannot_be_asked_for(what: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Agent(what, programs.vector(), **options)


def test_what_is_no_environment() -> None:
    with pytest.raises(ConfigError, match=r"gymnasium\.Env or a gymnasium\.vector\.VectorEnv"):
        Agent("ppo", "CartPole-v1")  # type: ignore[arg-type]


def test_calls_in_the_wrong_order() -> None:
    envs = programs.vector()
    agent = Agent("dqn", envs, **SMALL["dqn"])
    obs, _ = envs.reset(seed=1)
    with pytest.raises(ConfigError, match=r"observe\(\) without act\(\)"):
        agent.observe(obs, np.zeros(4), np.zeros(4, bool), np.zeros(4, bool), {})
    came = envs.step(agent.act(obs))
    with pytest.raises(ConfigError, match="called twice without observe"):
        agent.act(obs)
    with pytest.raises(ConfigError, match=r"update\(\) between act\(\) and observe\(\)"):
        agent.update()
    agent.observe(*came)
    with pytest.raises(ConfigError, match=r"after every agent\.observe"):
        agent.act(came[0])
    agent.update()
    with pytest.raises(ConfigError, match="another observation of env 2"):
        agent.act(came[0] + np.array([[0], [0], [1], [0]], np.float32))
    agent.close()
    agent.close()
    with pytest.raises(ConfigError, match=r"act\(\) after close\(\)"):
        agent.act(came[0])
    assert agent.act(came[0], explore=False).shape == (4,)


def test_wrong_shapes() -> None:
    envs = programs.vector()
    agent = Agent("a2c", envs)
    obs, _ = envs.reset(seed=1)
    with pytest.raises(ConfigError, match=r"shape \(4, 4\) are expected"):
        agent.act(obs[0])
    obs, reward, *flags, info = envs.step(agent.act(obs))
    with pytest.raises(ConfigError, match=r"reward of shape \(2,\)"):
        agent.observe(obs, reward[:2], *flags, info)
    agent.close()


@pytest.mark.parametrize(
    ("what", "roles", "words"),
    [
        ("options", "", "All workers must ask for the same agent"),
        ("envs", "", "the same number of environments"),
        ("roles", "actor=1,learner=1", "type: --roles learner=1,actor=1"),
    ],
)
def test_workers_that_disagree(what: str, roles: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        launch(programs.disagree, what, workers=2, roles=roles, engine="inline")
