"""A user's own vector environments: told how many to make; SuperSuit's too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import manyhands as mh
from manyhands.cli.main import main
from manyhands.config import build, validate
from manyhands.envs import make_vec
from manyhands.envs.registry import takes_num_envs
from manyhands.envs.toys import Counter, TimeLimit
from manyhands.viewing.evaluation import evaluate

SMALL = ("--rollout-length", "16", "--minibatch", "32", "--hidden", "4", "--steps", "128",
         "--engine", "inline", "--no-tensorboard", "--quiet")  # fmt: skip


def make(num_envs: int, longest: int = 7) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Counter(longest)] * num_envs)


def make_pairs(num_envs: int) -> SyncVectorEnv:
    return make(2 * (num_envs // 2))


class HowMany(gymnasium.Env):
    """A single environment with an argument of that name."""

    def __init__(self, num_envs: int = 3) -> None:
        self.observation_space = gymnasium.spaces.Discrete(num_envs)
        self.action_space = gymnasium.spaces.Discrete(2)


def test_who_is_told() -> None:
    assert takes_num_envs(make)
    assert not takes_num_envs(HowMany)
    assert not takes_num_envs(lambda: make(2))
    assert not takes_num_envs("CartPole-v1")
    assert make_vec(HowMany, 2).observation_space.n == 3
    assert make_vec(make, 5, longest=2).num_envs == 5


def test_each_worker_gets_its_share(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = ["train", "ppo", "--env", f"{__name__}:make", "--env-kwargs", "longest=5", "-n", "2",
             "--num-envs", "6", "--run-dir", str(run), *SMALL[:3], "24", *SMALL[4:]]  # fmt: skip
    assert main(asked) == 0
    assert evaluate(run, episodes=3).lengths
    assert mh.load(run).act(np.zeros(3)) in (0, 1, 2)


def test_a_count_that_cannot_be_is_said_with_its_arithmetic() -> None:
    experiment = build("ppo", env=f"{__name__}:make_pairs", num_envs=6, workers=2)
    (fault,) = validate.faults(experiment)
    assert "num_envs=3 (6 envs / 2 workers that act) and made 2" in fault


@pytest.mark.parametrize("name", ["env", "num_envs", "check_finite"])
def test_arguments_that_are_the_runs_own_are_refused(name: str) -> None:
    experiment = build("ppo", env=f"{__name__}:make", env_kwargs={name: 1})
    (fault,) = validate.faults(experiment)
    assert fault == f"env_kwargs has {name}, which the run itself decides"


# -- SuperSuit -------------------------------------------------------------------------------------


def rock_paper_scissors(num_envs: int, rounds: int = 4) -> Any:
    """Two players a game, each a row."""
    import supersuit
    from pettingzoo.classic import rps_v2

    games = supersuit.pettingzoo_env_to_vec_env_v1(rps_v2.parallel_env(max_cycles=rounds))
    return supersuit.concat_vec_envs_v1(games, num_envs // 2)


def test_supersuits_rows_are_transitions() -> None:
    pytest.importorskip("supersuit")
    envs = make_vec(rock_paper_scissors, 4, seed=1, rounds=3)
    assert envs.num_envs == 4
    envs.reset()
    lengths, returns = [], []
    paper_beats_rock = np.array([1, 0, 0, 0])
    for t in range(1, 10):
        step = envs.step(paper_beats_rock)
        np.testing.assert_array_equal(step.reward, [1, -1, 0, 0])
        assert step.valid.all()
        ended = t % 3 == 0
        assert (step.terminated | step.truncated).all() == ended
        for final in step.finals:  # what the opponent has played; a new game has shown nothing yet
            assert final.obs == [0, 1, 0, 0][final.env]
        assert (step.obs == 3).all() == ended
        lengths += [episode.length for episode in step.episodes]
        returns += [episode.total_return for episode in step.episodes]
    assert lengths == [3] * 12
    assert returns == [3, -3, 0, 0] * 3


def test_supersuit_trains(tmp_path: Path) -> None:
    pytest.importorskip("supersuit")
    run = tmp_path / "run"
    env = f"{__name__}:rock_paper_scissors"
    asked = ["train", "ppo", "--env", env, "-n", "2", "--num-envs", "8", "--run-dir", str(run)]
    assert main([*asked, *SMALL]) == 0
    assert len(evaluate(run, episodes=4).returns) == 4


def test_a_truncated_end_keeps_its_last_observation() -> None:
    """The last observation is the old episode's, and the value of it is asked for."""

    class Theirs(gymnasium.vector.VectorEnv):
        num_envs, metadata = 1, {}
        observation_space = TimeLimit().observation_space
        action_space = TimeLimit().action_space

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.t = 0
            return np.full((1, *self.observation_space.shape), 0.25, np.float32), [{}]

        def step(self, actions: Any) -> Any:
            self.t += 1
            seen = np.full((1, *self.observation_space.shape), 0.5, np.float32)
            infos: list[dict[str, Any]] = [{"score": 5.0}]
            truncated = np.array([self.t == 2], np.uint8)
            if truncated:
                infos[0]["terminal_observation"] = seen[0]
                seen, _ = self.reset()
            return seen, np.ones(1), np.zeros(1, np.uint8), truncated, infos

    envs = make_vec(Theirs(), 1)
    envs.reset()
    envs.step(np.zeros(1, int))
    step = envs.step(np.zeros(1, int))
    assert step.truncated[0]
    assert not step.terminated[0]
    assert (step.finals[0].obs == 0.5).all()
    assert (step.obs == 0.25).all()
