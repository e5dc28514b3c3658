"""Classic tasks to their thresholds, five seeds out of five, with two workers. `make test-slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

import manyhands as mh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUDGET = {"ppo": 100_000, "trpo": 150_000, "a2c": 500_000}


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
@pytest.mark.parametrize("algorithm", sorted(BUDGET))
def test_cartpole(algorithm: str, strategy: str, seed: int, tmp_path: Path) -> None:
    result = mh.train(
        algorithm,
        env="CartPole-v1",
        workers=2,
        strategy=strategy,
        seed=seed,
        steps=BUDGET[algorithm],
        target_return=475.0,
        run_dir=str(tmp_path / "run"),
        quiet=True,
    )
    assert result.solved, result.summary


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_pendulum(seed: int, tmp_path: Path) -> None:
    result = mh.train(
        "ppo",
        env="Pendulum-v1",
        workers=2,
        seed=seed,
        steps=400_000,
        target_return=-200.0,
        gamma=0.95,
        normalize_observations=True,
        normalize_rewards=True,
        run_dir=str(tmp_path / "run"),
        quiet=True,
    )
    assert result.solved, result.summary
