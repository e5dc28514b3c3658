"""Games of several agents: every reward, end and observation in the right row.

Against games whose outcomes can be worked out by hand, and some of PettingZoo's own.
"""

from __future__ import annotations

import csv
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import manyhands as mh
from manyhands.cli.main import main
from manyhands.config import build, validate
from manyhands.envs import make_vec
from manyhands.errors import ConfigError, SupportError
from manyhands.viewing.evaluation import evaluate

pettingzoo = pytest.importorskip("pettingzoo")

BOX = spaces.Box(-1.0, 100.0, (2,), np.float32)


class Race(pettingzoo.ParallelEnv):
    """Agent k ends in its own step k + 2: the first terminated, the last truncated. Each step pays
    1 and its action; once gone, the game goes on to pay 100, which nobody may be given."""

    metadata = {"name": "race"}  # noqa: RUF012
    render_mode = None

    def __init__(self, agents: int = 3, unequal: bool = False) -> None:
        self.possible_agents = [f"runner{k}" for k in range(agents)]
        self.unequal = unequal

    @functools.cache  # noqa: B019
    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(2) if self.unequal and agent == "runner1" else BOX

    @functools.cache  # noqa: B019
    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = self.possible_agents[:], 0
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        self.t += 1
        ended = {a: self.t == self.possible_agents.index(a) + 2 for a in self.agents}
        last = self.possible_agents[-1]
        rewards = {a: 1.0 + actions[a] if a in actions else 100.0 for a in self.possible_agents}
        result = (
            self._seen(self.agents),
            rewards,
            {a: ended[a] and a != last for a in self.agents},
            {a: ended[a] and a == last for a in self.agents},
            {a: {} for a in self.agents},
        )
        self.agents = [a for a in self.agents if not ended[a]]
        return result

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        places = {a: self.possible_agents.index(a) for a in agents}
        return {a: np.array([k, self.t], np.float32) for a, k in places.items()}


class Duel(pettingzoo.AECEnv):
    """In turns. Acting pays 1, and ten times the action to the other: a transition is worth 1 and
    ten times what the other does next. Over after `turns` turns of each, or, where one resigns
    (action 2), at once."""

    metadata = {"name": "duel", "is_parallelizable": False}  # noqa: RUF012
    render_mode = None

    def __init__(self, turns: int = 3, masks: bool = False) -> None:
        super().__init__()
        self.turns, self.masks = turns, masks
        self.possible_agents = ["left", "right"]

    @functools.cache  # noqa: B019
    def observation_space(self, agent: str) -> Any:
        if not self.masks:
            return BOX
        return spaces.Dict({"observation": BOX, "action_mask": spaces.MultiBinary(3)})

    @functools.cache  # noqa: B019
    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.t = self.possible_agents[:], 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {a: {} for a in self.agents}
        self.agent_selection = "left"

    def observe(self, agent: str) -> Any:
        seen = np.array([self.possible_agents.index(agent), self.t], np.float32)
        if not self.masks:
            return seen
        return {"observation": seen, "action_mask": np.array([1, 1, 0], np.int8)}

    def step(self, action: Any) -> None:
        me = self.agent_selection
        if self.terminations[me] or self.truncations[me]:
            self._was_dead_step(action)
            return
        assert not self.masks or action != 2, "impossible"
        other = "right" if me == "left" else "left"
        self._cumulative_rewards[me] = 0.0
        self.rewards = {me: 1.0, other: 10.0 * float(action)}
        self.t += 1
        if self.t == 2 * self.turns or action == 2:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
        self._accumulate_rewards()


class Script:
    """The others' actions, one after the other."""

    def __init__(self, *actions: int) -> None:
        self.actions, self.seen = list(actions), []

    def __call__(self, obs: Any, games: Any) -> Any:
        self.seen += [(*game, *row) for game, row in zip(games, obs.tolist(), strict=True)]
        return np.array([self.actions.pop(0) for _ in games])

    def state(self) -> dict[str, Any]:
        return {"left": list(self.actions)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.actions = list(state["left"])


RACE, DUEL = f"{__name__}:Race", f"{__name__}:Duel"
SMALL = ("--rollout-length", "16", "--minibatch", "48", "--hidden", "4", "--engine", "inline",
         "--no-tensorboard", "--quiet", "--env-backend", "pettingzoo")  # fmt: skip


# -- all act at once -------------------------------------------------------------------------------


def test_agents_that_end_early_wait_and_earn_nothing() -> None:
    envs = make_vec(Race, 6, backend="pettingzoo", seed=1)
    first = envs.reset().copy()
    np.testing.assert_array_equal(first[:, 0], [0, 1, 2, 0, 1, 2])
    actions = np.array([0, 1, 2, 0, 1, 2])
    steps = []
    for _ in range(8):
        step = envs.step(actions)
        arrays = step.reward, step.valid, step.terminated, step.truncated, step.obs
        steps.append((*(x.copy() for x in arrays), step.finals, step.episodes))
    pay, alive = np.array([1.0, 2.0, 3.0]), []
    for t in range(4):
        alive.append([t < 2, t < 3, True])  # ends in steps 2, 3 and 4
    for t, (reward, valid, terminated, truncated, obs, finals, episodes) in enumerate(steps):
        k = t % 4
        np.testing.assert_array_equal(valid, alive[k] * 2)
        np.testing.assert_array_equal(reward, (pay * alive[k]).tolist() * 2)
        np.testing.assert_array_equal(terminated, [k == 1, k == 2, False] * 2)
        np.testing.assert_array_equal(truncated, [False, False, k == 3] * 2)
        assert [(e.total_return, e.length) for e in episodes[:1]] == {
            1: [(2.0, 2)], 2: [(6.0, 3)], 3: [(12.0, 4)]
        }.get(k, [])  # fmt: skip
        for final in finals:
            np.testing.assert_array_equal(final.obs, [final.env % 3, k + 1])
        if k == 3:
            np.testing.assert_array_equal(obs, first)  # the next game, for all
        else:
            np.testing.assert_array_equal(obs[2], [2, k + 1])
    envs.close()


def test_nothing_is_learned_from_rows_that_wait() -> None:
    """The rows of a batch are those of agents that were there."""
    from manyhands.collect.rollout import rows_of

    envs = make_vec(Race, 3, backend="pettingzoo", seed=1)
    envs.reset()
    kept, valid = [], []
    for _ in range(8):
        step = envs.step(np.zeros(3, int))
        kept.append(step.reward.copy())
        valid.append(step.valid.copy())
    rows = rows_of(np.array(kept), np.array(valid))
    assert rows.tolist() == [1.0] * (2 * (2 + 3 + 4))


@pytest.mark.parametrize("algorithm", ["ppo", "impala", "dqn"])
def test_a_race_is_trained_evaluated_and_resumed(algorithm: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [o for o in SMALL if algorithm == "ppo" or o not in ("--minibatch", "48")]
    asked = ["train", algorithm, "--env", RACE, "--num-envs", "6", "--run-dir", str(run)]
    more = ["--learning-starts", "64"] if algorithm == "dqn" else []
    assert main([*asked, *options, *more, "--steps", "400"]) == 0
    assert main(["resume", str(run), "--steps", "600", "--quiet"]) == 0
    found = evaluate(run, episodes=6)
    assert sorted(found.lengths) == [2, 2, 3, 3, 4, 4]
    assert mh.load(run).act(np.zeros(2, np.float32)) in (0, 1, 2)


def test_statistics_leave_out_rows_that_wait(tmp_path: Path) -> None:
    """A game of 4 steps: 2 + 3 + 4 observations, the agent's number and the step."""
    from safetensors.numpy import load_file

    asked = ["train", "ppo", "--env", RACE, "--num-envs", "6", "--steps", "144", "--run-dir",
             str(tmp_path / "run"), "--normalize-observations", "--normalize-rewards"]  # fmt: skip
    assert main([*asked, *SMALL]) == 0
    found = load_file(tmp_path / "run" / "policy.safetensors")
    seen = np.array([[k, t] for k in range(3) for t in range(k + 2)], float)
    updates = 2  # of 16 steps of 6 agents, of which 72 are transitions
    for name in ("obs", "returns"):
        assert found[f"normaliser/{name}/count"] == updates * 72
    np.testing.assert_allclose(found["normaliser/obs/mean"], seen.mean(0), rtol=1e-6)


def test_two_workers_learn_what_one_learns(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    runs = []
    for workers in (1, 2):
        runs.append(tmp_path / f"{workers}")
        asked = ["train", "ppo", "--env", RACE, "--num-envs", "6", "-n", str(workers), "--steps",
                 "288", "--run-dir", str(runs[-1])]  # fmt: skip
        assert main([*asked, *SMALL]) == 0
    one, two = (load_file(run / "policy.safetensors") for run in runs)
    for name, weights in one.items():
        np.testing.assert_allclose(two[name], weights, rtol=1e-4, atol=1e-5, err_msg=name)


# -- in turns --------------------------------------------------------------------------------------


def test_what_comes_between_two_turns_belongs_to_the_last_action() -> None:
    envs: Any = make_vec(Duel, 1, backend="pettingzoo", seed=1, turns=3)
    envs.others = others = Script(0, 1, 2, 1, 0, 1)
    obs = envs.reset()  # left, which begins
    np.testing.assert_array_equal(obs, [[0, 0]])
    step = envs.step(np.array([1]))  # answered with 0
    assert step.reward[0] == 1.0
    np.testing.assert_array_equal(step.obs, [[0, 2]])
    step = envs.step(np.array([1]))  # answered with 1
    assert step.reward[0] == 11.0
    step = envs.step(np.array([0]))  # answered with 2, the end; then right, second, is shown 1
    assert step.reward[0] == 21.0
    assert step.terminated[0]
    assert step.episodes[0].total_return == 33.0
    assert step.episodes[0].length == 3
    np.testing.assert_array_equal(step.finals[0].obs, [0, 6])
    np.testing.assert_array_equal(step.obs, [[1, 1]])  # the sides alternate
    step = envs.step(np.array([0]))  # answered with 0
    assert step.reward[0] == 1.0
    step = envs.step(np.array([2]))  # resigns: 1 for acting, the end
    assert step.reward[0] == 1.0
    assert step.terminated[0]
    assert step.episodes[0].total_return == 2.0
    np.testing.assert_array_equal(step.obs, [[0, 0]])
    assert [row[:2] for row in others.seen] == [(0, 0)] * 3 + [(0, 1)] * 2
    assert [row[2:] for row in others.seen] == [(1, 1), (1, 3), (1, 5), (0, 0), (0, 2)]


def test_games_go_on_where_they_were() -> None:
    def play(envs: Any, steps: int) -> list[Any]:
        found = []
        for _ in range(steps):
            step = envs.step(np.zeros(2, int))
            found.append((step.obs.tolist(), step.reward.tolist(), step.terminated.tolist()))
        return found

    def made() -> Any:
        envs: Any = make_vec(Duel, 2, backend="pettingzoo", seed=1, turns=3)
        envs.others = Script(*[0, 1, 1, 0, 1, 0, 0, 1, 1, 0] * 4)
        return envs

    whole, halved = made(), made()
    whole.reset()
    halved.reset()
    expected = play(whole, 9)
    assert play(halved, 4) == expected[:4]
    again = made()
    obs = np.array(expected[3][0], np.float32)
    restored = again.load_state(halved.state(obs))
    assert restored.restarted == []
    np.testing.assert_array_equal(restored.obs, obs)
    assert play(again, 5) == expected[4:]


def test_only_possible_moves_are_made_in_any_seat(tmp_path: Path) -> None:
    asked = ["train", "ppo", "--env", DUEL, "--env-kwargs", "masks=true", "--num-envs", "6",
             "--opponents", "2", "--run-dir", str(tmp_path / "run"), "--steps", "192"]  # fmt: skip
    assert main([*asked, *SMALL]) == 0  # the duel refuses any other
    seen = {"observation": np.zeros(2, np.float32), "action_mask": np.array([0, 1, 0], np.int8)}
    assert mh.load(tmp_path / "run").act(seen) == 1


@pytest.mark.parametrize(("opponents", "lstm"), [(0, 0), (3, 0), (0, 3), (2, 3)])
def test_a_duel_is_trained_with_itself_and_with_its_past(
    opponents: int, lstm: int, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    runs = [tmp_path / name for name in ("whole", "half", "two")]
    for run, steps in zip(runs, ("480", "192", "480"), strict=True):
        asked = ["train", "ppo", "--env", DUEL, "--num-envs", "6", "--run-dir", str(run),
                 "--opponents", str(opponents), "--opponent-every", "1", "--learning-rate", "0.01",
                 "--checkpoint-seconds", "0", "--steps", steps, "--lstm", str(lstm),
                 "-n", "2" if run.name == "two" else "1"]  # fmt: skip
        assert main([*asked, *SMALL]) == 0
    assert main(["resume", str(runs[1]), "--steps", "480", "--quiet"]) == 0
    whole, half, two = (load_file(run / "policy.safetensors") for run in runs)
    for name, weights in whole.items():
        np.testing.assert_array_equal(half[name], weights, err_msg=name)
        np.testing.assert_allclose(two[name], weights, rtol=1e-3, atol=1e-5, err_msg=name)
    assert _episodes(runs[0]) == _episodes(runs[2])  # two workers play the games of one
    assert len(evaluate(runs[0], episodes=4).returns) == 4


def _episodes(run: Path) -> list[str]:
    """Return and length of every game, whoever played it."""
    rows = list(csv.DictReader((run / "episodes.csv").open()))
    return sorted(f"{row['return']} {row['length']}" for row in rows)


def test_whoever_sits_in_another_seat_remembers_that_game_alone() -> None:
    """Against a policy that plays each game by itself."""
    import torch

    from manyhands.policy import Policy, Seat, build_model, build_normaliser

    experiment = build("ppo", env=DUEL, env_backend="pettingzoo", lstm=4, num_envs=6)
    actions = spaces.Discrete(3)
    model = build_model(experiment, BOX, actions)
    policy = Policy(
        model, build_normaliser(experiment, BOX), actions, "clip", observation_space=BOX
    )
    rng = np.random.default_rng(1)
    games = [rng.random((4, 2)).astype(np.float32) for _ in range(3)]
    alone = []
    for k, game in enumerate(games):
        seat = Seat(np.random.default_rng(k))
        alone.append([int(policy.act_in([seat], x[None])[0]) for x in game])
    together = [Seat(np.random.default_rng(k)) for k in range(3)]
    own = policy.act_batch(games[0][:2])  # what `act_batch` remembers is not touched
    before = policy.value(games[0][0]), policy._memory.clone()
    found: list[list[int]] = [[], [], []]
    for turn in range(4):
        asked = [2, 0, 1] if turn % 2 else [0, 1, 2]  # rows come in any order
        chosen = policy.act_in([together[k] for k in asked],
                               np.stack([games[k][turn] for k in asked]))  # fmt: skip
        for k, action in zip(asked, chosen, strict=True):
            found[k].append(int(action))
    assert found == alone
    assert all(seat.memory is not None and seat.memory.any() for seat in together)
    assert torch.equal(policy._memory, before[1])
    assert len(own) == 2


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": RACE, "env_kwargs": {"unequal": True}}, "one policy for all needs equal ones"),
        ({"env": RACE, "num_envs": 4}, "has 3 agents, each of them a row, and num_envs=4"),
        ({"env": RACE, "opponents": 2}, "an AECEnv"),
        ({"env": "CartPole-v1", "env_backend": "auto", "opponents": 2}, "leave --opponents out"),
        ({"env": "pettingzoo.classic.connect_for_v3"}, "there is no environment"),
        ({"env": "classic/rps_v1"}, "Did you mean pettingzoo.classic.rps_v2"),
        (
            {"env": "classic/rps_v2", "env_backend": "auto"},
            "it looks like a game of PettingZoo: type: --env-backend pettingzoo",
        ),
        (
            {"env": "pettingzoo.classic.tictactoe_v3:env", "env_backend": "auto"},
            "gives an object of type OrderEnforcingWrapper, and a gymnasium.Env is expected; for a "
            "game of PettingZoo, type: --env-backend pettingzoo",
        ),
        ({"env": f"{__name__}:make_nothing"}, "needs a ParallelEnv or an AECEnv"),
        (
            {"env": f"{__name__}:make_nothing", "env_backend": "auto"},
            "gives an object of type object, and a gymnasium.Env is expected",
        ),
    ],
)
def test_faults_are_said_before_anything_starts(options: dict[str, Any], said: str) -> None:
    asked = {"env_backend": "pettingzoo", "num_envs": 6, "minibatch": 256} | options
    (fault,) = validate.faults(build("ppo", **asked))
    assert said in fault


def test_what_a_game_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlcard", None)  # as where it is not installed
    of_it = ("pettingzoo.classic.rlcard_envs", "pettingzoo.classic.leduc_holdem_v4")
    for name in [module for module in sys.modules if module.startswith(of_it)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SupportError, match=r"needs rlcard, .* pip install 'pettingzoo\[classic\]'"):
        make_vec("pettingzoo.classic.leduc_holdem_v4", 2, backend="pettingzoo")


def make_nothing() -> object:
    return object()


def test_the_other_seats_need_somebody() -> None:
    with pytest.raises(ConfigError, match="other seats"):
        make_vec(Duel, 2, backend="pettingzoo", seed=1).reset()


# -- PettingZoo's own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "agents", "kwargs"),
    [
        ("pettingzoo.butterfly.knights_archers_zombies_v11", 4, {"max_cycles": 30}),
        ("classic/rps_v2", 2, {"max_cycles": 5}),
    ],
)
def test_their_parallel_games_play(env: str, agents: int, kwargs: dict[str, Any]) -> None:
    envs = make_vec(env, 2 * agents, backend="pettingzoo", seed=1, **kwargs)
    envs.reset()
    ended = 0
    for _ in range(40):
        step = envs.step(np.array([envs.action_space.sample() for _ in range(envs.num_envs)]))
        assert not step.reward[~step.valid].any()
        assert len(step.finals) == int((step.terminated | step.truncated).sum())
        ended += len(step.episodes)
    assert ended
    envs.close()
