"""Emulators on the host and all else on the device: the same rollouts, updates and runs as when
everything goes through the host. No GPU is needed: without one the device is the CPU."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from training_programs import as_in_a_worker

from manyhands import devices, resume, train
from manyhands.algorithms.base import Alone
from manyhands.algorithms.registry import SPECS
from manyhands.collect.emulators import EmulatorCollector, Stacks
from manyhands.collect.rollout import Collector
from manyhands.config import RunConfig, build, validate
from manyhands.engines import stopping
from manyhands.engines.base import Place
from manyhands.envs import make_vec
from manyhands.envs.make import shows_frames
from manyhands.errors import ConfigError
from manyhands.math.running_stats import Normaliser
from manyhands.networks.build import build_actor_critic, to_tensor
from manyhands.networks.heads import Categorical
from manyhands.networks.numpy_distributions import sample
from manyhands.policy import build_model, build_normaliser
from manyhands.run import Paused
from manyhands.strategies import context
from manyhands.streams import EnvNoise
from manyhands.types import Acted

pytest.importorskip("ale_py")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENVS, CUT = 3, 60  # frames, which are 15 steps
PONG = {"seed": 5, "max_num_frames_per_episode": CUT}


@pytest.fixture(autouse=True)
def all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions on a GPU take ten bits of each factor otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def assert_same_weights(found: Any, expected: Any, words: str = "") -> None:
    """But for rounding. WHY more on a GPU: Adam takes whole steps on gradients that are next to
    nothing, and those have another sign there now and then."""
    off = np.abs(np.asarray(found) - np.asarray(expected))
    most, mean = (3e-5, 3e-6) if DEVICE.type == "cpu" else (4e-4, 2e-5)
    assert off.max() < most, words
    assert off.mean() < mean, words


class Acts:
    """As `TorchActor`, on the CPU whatever there is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def act(self, obs: Any, noise: Any) -> Acted:
        parameters, values = self.model(to_tensor(obs, torch.device("cpu")))
        actions, logp = sample(self.model.head, parameters.numpy(), noise)
        return Acted(actions, logp, values.numpy(), parameters.numpy())

    @torch.no_grad()
    def value(self, obs: Any) -> Any:
        return self.model.value(to_tensor(obs, torch.device("cpu"))).numpy()


def model_of(envs: Any) -> Any:
    spaces = envs.observation_space, envs.action_space
    return build_actor_critic(*spaces, shared=True, hidden=(), seed=1)


def plain(length: int, rewards: bool = False) -> Collector:
    envs = make_vec("ALE/Pong-v5", ENVS, **PONG)
    normaliser = Normaliser(envs.observation_space, False, rewards, 0.99)
    return Collector(envs, Acts(model_of(envs)), length, EnvNoise(5, 0, ENVS), normaliser)


def on_device(length: int, groups: int = 2, rewards: bool = False) -> EmulatorCollector:
    envs: Any = make_vec("ALE/Pong-v5", ENVS, groups=groups, **PONG)
    normaliser = Normaliser(envs.observation_space, False, rewards, 0.99)
    model = model_of(envs).to(DEVICE)
    noise = EnvNoise(5, 0, ENVS)
    return EmulatorCollector(envs, model, length, noise, normaliser, DEVICE, say=pytest.fail)


def stacks_of(stacks: Stacks) -> Any:
    rows = torch.arange((stacks.length + 1) * ENVS, device=DEVICE)
    return stacks[rows].unflatten(0, (-1, ENVS)).cpu().numpy()


@pytest.mark.parametrize("length", [18, 3])  # longer and shorter than a stack; ends in both
def test_a_rollout_is_that_of_the_ordinary_collector(length: int) -> None:
    ordinary, collector = plain(length, True), on_device(length, rewards=True)
    ended = cut = 0
    for _ in range(54 // length):
        expected, (found, episodes) = ordinary.collect(), collector.collect()
        ordinary.normaliser.synchronise(None)
        collector._normaliser.synchronise(None)
        np.testing.assert_array_equal(stacks_of(found.obs)[:-1], expected.obs)
        np.testing.assert_array_equal(stacks_of(found.obs)[-1], ordinary.current)
        for name in ("action", "reward", "terminated", "truncated"):
            column = getattr(found, name).cpu().numpy()
            np.testing.assert_array_equal(column, getattr(expected, name), name)
        for name in ("logp", "value", "next_value"):
            column = getattr(found, name).cpu().numpy()
            np.testing.assert_allclose(column, getattr(expected, name), atol=1e-4, err_msg=name)
        assert [e._replace(seed=None) for e in episodes] == [
            e._replace(seed=None) for e in expected.episodes
        ]
        ended, cut = ended + len(episodes), cut + int(expected.truncated.sum())
    assert ended == cut == 3 * ENVS
    for envs in (ordinary.envs, collector.envs):
        envs.close()


def test_two_groups_are_one_group_and_starting_early_changes_nothing() -> None:
    one, two = on_device(10, groups=1), on_device(10, groups=2)
    for _ in range(3):
        (found, _), (other, _) = one.collect(), two.collect()
        assert torch.equal(found.obs.frames, other.obs.frames)
        assert torch.equal(found.action, other.action)
        torch.testing.assert_close(found.logp, other.logp, atol=1e-5, rtol=0)
        assert torch.equal(found.truncated, other.truncated)
        two.start()
    for collector in (one, two):
        collector.envs.close()


def test_groups_step_as_one_where_nobody_takes_them_apart() -> None:
    whole, parts = (make_vec("ALE/Pong-v5", ENVS, groups=n, **PONG) for n in (0, 2))
    np.testing.assert_array_equal(whole.reset(), parts.reset())
    rng = np.random.default_rng(1)
    episodes = 0
    for actions in rng.integers(6, size=(20, ENVS)):
        expected, found = whole.step(actions), parts.step(actions)
        for name in ("obs", "reward", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.episodes == expected.episodes
        for one, other in zip(found.finals, expected.finals, strict=True):
            assert one.env == other.env
            np.testing.assert_array_equal(one.obs, other.obs)
        episodes += len(found.episodes)
    assert episodes == ENVS
    assert whole.state(None) == parts.state(None)
    for envs in (whole, parts):
        envs.close()


@pytest.mark.parametrize(
    ("acting", "local", "given", "threads"),
    [(1, 1, {}, 16), (4, 4, {}, 4), (15, 16, {}, 1), (8, 2, {}, 8), (32, 32, {}, 1),
     (1, 1, {"num_threads": 3}, 3), (1, 1, {"num_threads": 0}, 16), (2, 2, {"obs_type": "ram"}, 0)],
)  # fmt: skip
def test_the_cores_are_divided_among_those_that_act(
    acting: int, local: int, given: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "cores", lambda: 16)
    run = RunConfig(env="ALE/Pong-v5", env_kwargs=given)
    worker = SimpleNamespace(place=Place(local_size=local))
    here: Any = SimpleNamespace(
        experiment=SimpleNamespace(run=run), acting=range(acting), worker=worker
    )
    assert context.Context.env_threads.fget(here) == threads  # type: ignore[attr-defined]


def test_choices_by_given_chance_are_those_of_numpy() -> None:
    rng = np.random.default_rng(2)
    logits, chance = rng.normal(size=(500, 7)).astype(np.float32) * 3, rng.random(500, np.float32)

    class Given:
        def random(self, size: Any) -> Any:
            return chance[:, None]

    head = Categorical(7, 2)
    expected, _ = sample(head, logits, Given())  # type: ignore[arg-type]
    found = head.choose(torch.from_numpy(logits), torch.from_numpy(chance))
    assert (found.numpy() == expected).mean() > 0.995  # rounding may move a border
    assert set(found.tolist()) == set(range(2, 9))


@pytest.mark.parametrize(
    ("kwargs", "shows"),
    [({}, True), ({"frame_stack": 2}, True), ({"frame_stack": 1}, False),
     ({"obs_type": "ram"}, False), ({"continuous": True}, False), ({"grayscale": False}, False),
     ({"episodic_life": True}, False)],
)  # fmt: skip
def test_what_shows_stacks_of_frames(kwargs: dict[str, Any], shows: bool) -> None:
    assert shows_frames("ALE/Pong-v5", "auto", kwargs) is shows
    assert not shows_frames("CartPole-v1", "auto", kwargs)


# -- runs ------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "env": "ALE/Pong-v5", "num_envs": ENVS, "rollout_length": 16, "workers": 1, "hidden": [],
    "strategy": "single", "engine": "inline", "shared_network": True, "tensorboard": False,
    "env_kwargs": {"max_num_frames_per_episode": CUT}, "steps": 3 * 16 * ENVS,
}  # fmt: skip
ONE_PASS = {"minibatch": 0, "epochs": 2}
KINDS: list[Any] = [
    ("ppo", ONE_PASS), ("impala", {"normalize_advantages": True, "clip": 0.2}),
]  # fmt: skip


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv(devices.SIMULATED, "1")


def weights(folder: Any) -> dict[str, Any]:
    return load_file(folder / "policy.safetensors")


def episodes(folder: Any) -> list[str]:
    lines = (folder / "episodes.csv").read_text().splitlines()
    return [line.rpartition(",")[0] for line in lines]  # without seconds


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("algorithm", "options"), KINDS)
def test_a_run_ends_with_the_weights_of_one_on_the_cpu(
    algorithm: str, options: dict[str, Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RUN | options | {"learning_rate": 1e-4}
    here, there = (
        train(algorithm, device=device, run_dir=str(tmp_path / device), **run)
        for device in ("cpu", "cuda")
    )
    assert "environments  in C++, " in capsys.readouterr().out
    expected, found = weights(tmp_path / "cpu"), weights(tmp_path / "cuda")
    for name, value in expected.items():
        assert_same_weights(found[name], value, name)
    assert episodes(tmp_path / "cuda") == episodes(tmp_path / "cpu")
    assert len(episodes(tmp_path / "cuda")) == 1 + 3 * ENVS
    assert there.summary["env_steps"] == here.summary["env_steps"] == RUN["steps"]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("algorithm", "options"), [("ppo", {"minibatch": 16, "epochs": 2}), ("impala", {})]
)
def test_a_run_repeats_to_the_bit_and_is_resumed(
    algorithm: str, options: dict[str, Any], tmp_path: Any
) -> None:
    run = RUN | options | {"device": "cuda", "quiet": True, "steps": 2 * 16 * ENVS}
    for name in ("a", "b"):
        train(algorithm, run_dir=str(tmp_path / name), **run)
    assert (tmp_path / "a/policy.safetensors").read_bytes() == (
        tmp_path / "b/policy.safetensors"
    ).read_bytes()
    for name in ("a", "b"):
        result = resume(tmp_path / name, steps=RUN["steps"])
        assert result.summary["env_steps"] == RUN["steps"]
    assert (tmp_path / "a/policy.safetensors").read_bytes() == (
        tmp_path / "b/policy.safetensors"
    ).read_bytes()
    assert episodes(tmp_path / "a") == episodes(tmp_path / "b")
    events = (tmp_path / "a/events.jsonl").read_text()
    assert "resumes at an episode boundary" in events


# -- overlap ---------------------------------------------------------------------------------------


def with_one_update_of_lag(algorithm: str, updates: int, options: dict[str, Any]) -> Any:
    """The serial program: two sets of weights, those that act and those that learn."""
    experiment = build(algorithm, **options)
    envs = make_vec(options["env"], ENVS, seed=experiment.run.seed, **options["env_kwargs"])
    envs.number_from(0)
    spaces = envs.observation_space, envs.action_space
    learner, actor = (
        SPECS[algorithm].load()(build_model(experiment, *spaces), experiment.options, seed=1)
        for _ in range(2)
    )
    normaliser = build_normaliser(experiment, spaces[0])
    noise = EnvNoise(experiment.run.seed, 0, ENVS)
    collector = Collector(envs, actor.actor, 16, noise, normaliser)
    waiting = None
    for k in range(updates + 1):
        actor.flat.data.copy_(learner.flat.data)
        batch = None
        if k < updates:
            rows = actor.prepare(collector.collect())
            batch = {name: np.array(column) for name, column in rows.items()}
            normaliser.synchronise(None)
        if waiting is not None:
            learner.update(waiting, Alone(), k / updates)
        waiting = batch
    envs.close()
    return learner.flat.data


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("algorithm", "options"), [("ppo", ONE_PASS)])
def test_with_overlap_every_rollout_is_learned_from_one_update_late(
    algorithm: str, options: dict[str, Any], tmp_path: Any
) -> None:
    updates = 3
    run = RUN | options | {"learning_rate": "linear:1e-4"}
    with as_in_a_worker():
        expected = with_one_update_of_lag(algorithm, updates, run)
    late = run | {"device": "cuda", "overlap": True, "quiet": True}
    result = train(algorithm, run_dir=str(tmp_path / "a"), **late)
    found = torch.cat([
        torch.from_numpy(value).flatten() for value in in_order(tmp_path / "a", algorithm, run)
    ])  # fmt: skip
    assert_same_weights(found, expected)
    lines = [json.loads(x) for x in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["lag"] for line in lines] == [0.0, 1.0, 1.0]
    assert result.summary["updates"] == updates
    assert result.summary["env_steps"] == RUN["steps"]


def in_order(folder: Any, algorithm: str, run: dict[str, Any]) -> list[Any]:
    """A run's weights as they lie in the flat parameters."""
    envs = make_vec(run["env"], 1)
    experiment = build(algorithm, **run)
    model = build_model(experiment, envs.observation_space, envs.action_space)
    envs.close()
    found = weights(folder)
    return [found[f"model/{name}"] for name, _ in model.named_parameters()]


@pytest.mark.usefixtures("simulated")
def test_a_rollout_that_waits_is_in_the_checkpoint(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUN | ONE_PASS | {"device": "cuda", "overlap": True, "quiet": True}
    looks, folder, steps = [0, 0], tmp_path / "a", 4 * 16 * ENVS
    with monkeypatch.context() as stopped:
        signals = iter([*looks, signal.SIGINT])
        stopped.setattr(stopping, "asked", lambda: next(signals, 0))
        with pytest.raises(Paused):
            train("ppo", run_dir=str(folder), **run | {"steps": steps})
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(looks)  # of three rollouts two have been learned from
    result = resume(folder)
    assert (result.summary["updates"], result.summary["env_steps"]) == (4, steps)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["lag"] for line in lines] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("ppo", {"device": "cpu"}), ("ppo", {"kl_penalty": True}), ("impala", {}),
     ("ppo", {"env": "CartPole-v1", "env_kwargs": {}, "shared_network": False})],
)  # fmt: skip
@pytest.mark.usefixtures("simulated")
def test_what_cannot_overlap_on_one_worker_is_refused(
    algorithm: str, options: dict[str, Any]
) -> None:
    asked = RUN | {"device": "cuda", "overlap": True} | options
    with pytest.raises(ConfigError, match=r"overlap on one worker is for ppo and a2c"):
        validate.check(build(algorithm, **asked))
