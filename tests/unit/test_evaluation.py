"""Evaluation: which episodes count, with which seeds, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands import seeding
from manyhands.cli.main import main
from manyhands.policy import save_policy
from manyhands.viewing.evaluation import evaluate

TINY = {"steps": 64, "num_envs": 2, "rollout_length": 32, "engine": "inline", "quiet": True}


class Countdown(gymnasium.Env[Any, Any]):
    """An episode whose length is drawn from its seed; its return is that length.

    It succeeds when the length is even. `SEEDS` keeps what reset was given.
    """

    SEEDS: list[int] = []  # noqa: RUF012 (the test reads it)

    def __init__(self, longest: int = 30, tells: bool = True) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 100.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.longest, self.tells, self.left, self.length = longest, tells, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.SEEDS.append(seed)
        self.left = self.length = int(self.np_random.integers(1, self.longest + 1))
        return np.array([self.left], np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        over = self.left == 0
        info = {"is_success": self.length % 2 == 0} if over and self.tells else {}
        return np.array([self.left], np.float32), 1.0, over, False, info


class Recall(Countdown):
    """Always the same to see, and a reward of 1 for action 1: a policy that counts is seen to."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        _, _, over, cut, info = super().step(action)
        return np.ones(1, np.float32), float(action), over, cut, info


def several(longest: int = 30) -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: Recall(longest)] * 2)


def lengths_of(seed: int, count: int, longest: int = 30) -> list[int]:
    """What episodes 0, 1, ... of the evaluation's branch last, straight from their seeds."""
    env = Countdown(longest)
    found = []
    for i in range(count):
        env.reset(seed=seeding.integer(seed, "evaluate", i))
        found.append(env.length)
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    mh.train("a2c", env="test_evaluation:Countdown", run_dir=str(folder), seed=3, **TINY)
    return folder


def counting(env: str, folder: Path) -> Path:
    """A policy with an LSTM that takes action 0 five times after its memory was cleared, then 1."""
    mh.train("impala", env=env, run_dir=str(folder), seed=3, lstm=4, **TINY)
    policy = mh.load(folder)
    model: Any = policy.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        gates = model.lstm.bias_ih.view(4, -1)  # in, forget, cell, out: the cell adds 0.1 a step
        gates[:] = torch.tensor([20.0, 20.0, 0.1, 20.0])[:, None]
        model.policy_out.weight[1] = 0.25
        model.policy_out.bias[1] = -np.tanh(0.55)
    save_policy(folder, model, policy.normaliser)
    return folder


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_the_first_begun_count_not_the_first_ended(run_dir: Path, num_envs: int) -> None:
    """The first to end would be the short ones: a mean of 6 instead of 15."""
    found = evaluate(run_dir, 20, num_envs=num_envs)
    assert found.lengths == lengths_of(3, 20)
    assert found.returns == [float(n) for n in found.lengths]


@pytest.mark.parametrize("env", ["Recall", "several"])
def test_memory_begins_with_the_episode(env: str, tmp_path: Path) -> None:
    """Whatever an LSTM remembers of the episode before, or of its neighbour, would show."""
    folder = counting(f"test_evaluation:{env}", tmp_path / "run")
    for num_envs in (1, 3, 8) if env == "Recall" else (2,):
        found = evaluate(folder, 20, num_envs=num_envs)
        assert found.returns == [max(0.0, n - 5.0) for n in found.lengths]
    if env == "Recall":
        assert found.lengths == lengths_of(3, 20)
    assert len(set(found.lengths)) > 5


def test_seeds_are_never_those_of_training(run_dir: Path) -> None:
    import test_evaluation  # the module that the run itself has imported

    played = test_evaluation.Countdown.SEEDS
    played.clear()
    evaluate(run_dir, 50)
    training = {
        seeding.integer(3, "env", worker, env, episode)
        for worker in range(2)
        for env in range(8)
        for episode in range(200)
    }
    assert len(set(played)) == 50
    assert not training & set(played)


def test_other_seed_other_episodes(run_dir: Path) -> None:
    assert evaluate(run_dir, 10, seed=9).lengths == lengths_of(9, 10)
    assert evaluate(run_dir, 10, seed=9).lengths != evaluate(run_dir, 10).lengths


def test_success_is_counted_where_the_environment_tells(run_dir: Path, tmp_path: Path) -> None:
    found = evaluate(run_dir, 40)
    assert found.success_rate == np.mean([n % 2 == 0 for n in lengths_of(3, 40)])
    silent = tmp_path / "silent"
    mh.train(
        "a2c",
        env="test_evaluation:Countdown",
        env_kwargs={"tells": False},
        run_dir=str(silent),
        **TINY,
    )
    assert evaluate(silent, 5).success_rate is None
    assert "\nsuccess" not in evaluate(silent, 5).table()


def test_env_kwargs_hold(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    mh.train(
        "a2c",
        env="test_evaluation:Countdown",
        env_kwargs={"longest": 3},
        run_dir=str(folder),
        seed=3,
        **TINY,
    )
    assert evaluate(folder, 30).lengths == lengths_of(3, 30, longest=3)


def test_max_length_cuts(run_dir: Path) -> None:
    found = evaluate(run_dir, 10, max_length=4)
    assert found.lengths == [min(n, 4) for n in lengths_of(3, 10)]


def test_stochastic_repeats_and_differs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    mh.train("ppo", env="CartPole-v1", run_dir=str(folder), minibatch=32, **TINY)
    drawn = [evaluate(folder, 10, deterministic=False).returns for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != evaluate(folder, 10).returns


def test_vector_environments_have_fixed_shares(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    mh.train(
        "ppo", env="CartPole-v1", env_backend="vector", run_dir=str(folder), minibatch=32, **TINY
    )
    found = evaluate(folder, 11, num_envs=4)
    assert len(found.returns) == len(found.lengths) == 11
    assert found.returns == [float(n) for n in found.lengths]
    assert found.success_rate is None


def test_command_prints_a_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run_dir), "--episodes", "20"]) == 0
    out, err = capsys.readouterr()
    lengths = np.array(lengths_of(3, 20))
    assert f"{lengths.mean():.2f} ± {lengths.std():.2f}" in out
    assert (
        f"median {np.median(lengths):.2f}, min {lengths.min():.2f}, max {lengths.max():.2f}" in out
    )
    assert "\nsuccess" in out
    assert err == ""


def test_json_is_one_object_and_nothing_else(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run_dir), "--episodes", "6", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["lengths"] == lengths_of(3, 6)
    assert found["mean_return"] == np.mean(found["returns"])
    assert found["std_return"] == pytest.approx(np.std(found["returns"]))
    assert found["env"] == "test_evaluation:Countdown"
    assert found["episodes"] == 6
    assert found["seed"] == 3
    assert found["run_dir"] == str(run_dir)
    assert 0 <= found["success_rate"] <= 1
    assert err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/no/such/folder"], "holds no config.toml"),
        (["RUN", "--episodes", "0"], "at least 1 is needed"),
        (["RUN", "--max-length", "-1"], "--max-length -1"),
    ],
)
def test_wrong_use_is_one_line(
    run_dir: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *(str(run_dir) if w == "RUN" else w for w in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
