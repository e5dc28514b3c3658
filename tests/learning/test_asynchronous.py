"""A3C and IMPALA to their thresholds. `make test-slow`."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.config import load_recipe
from manyhands.run import train_experiment

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SEEDS = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", SEEDS)
def test_impala_cartpole(seed: int, tmp_path: Path) -> None:
    result = mh.train(
        "impala", env="CartPole-v1", workers=3, seed=seed, steps=300_000, target_return=475.0,
        run_dir=str(tmp_path / "run"), quiet=True,
    )  # fmt: skip
    assert result.solved, result.summary


def by_recipe(name: str, seed: int, folder: Path) -> mh.run.Result:  # type: ignore[name-defined]
    experiment = load_recipe(name)
    run = replace(experiment.run, seed=seed, run_dir=str(folder / str(seed)), quiet=True)
    return train_experiment(replace(experiment, run=run))


@pytest.mark.parametrize("seed", SEEDS)
def test_a3c_cartpole(seed: int, tmp_path: Path) -> None:
    result = by_recipe("a3c-cartpole", seed, tmp_path)
    assert result.solved, result.summary


@pytest.mark.parametrize("seed", SEEDS)
def test_impala_pendulum(seed: int, tmp_path: Path) -> None:
    result = by_recipe("impala-pendulum", seed, tmp_path)
    assert result.solved, result.summary


@pytest.mark.parametrize(
    ("script", "how", "most"),
    [
        ("a3c.py", ["-n", "3"], 500),
        ("impala.py", ["--roles", "actor=2,learner=2"], 100),
    ],
)
def test_example_solves_cartpole(script: str, how: list[str], most: int) -> None:
    """The tutorial's measure; episodes of the worker that solved it, median of five seeds."""
    episodes = []
    for seed in SEEDS:
        command = [sys.executable, "-m", "manyhands.cli.main", "launch", *how]
        command += [str(ROOT / "examples" / script), "--seed", str(seed)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stderr
        found = re.search(r"solved by .* in episode (\d+)", said.stdout)
        episodes.append(int(found.group(1)) if found else 10_000)
    assert statistics.median(episodes) <= most, episodes
