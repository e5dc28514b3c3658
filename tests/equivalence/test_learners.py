"""Two learners are one learner with twice the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import async_programs
import numpy as np
import pytest
from safetensors.numpy import load_file
from second_launch import answers_of

import manyhands as mh
from manyhands import launch
from manyhands.algorithms.registry import SPECS

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_two_learners_are_one_with_twice_the_batch(engine: str) -> None:
    one = launch(async_programs.learn_from_the_same, 40, 1, workers=1, engine="inline")[0]
    two = (
        answers_of("local", "learners, 40")
        if engine == "local"
        else launch(async_programs.learn_from_the_same, 40, 2, workers=2, engine=engine)
    )
    assert np.array_equal(two[0], two[1])
    start = launch(async_programs.learn_from_the_same, 0, 1, workers=1, engine="inline")[0]
    assert np.abs(one - start).max() > 0.01  # something was learned
    np.testing.assert_allclose(two[0], one, rtol=1e-3, atol=1e-4)


def test_replicas_are_equal_after_a_thousand_updates() -> None:
    two = answers_of("local", "learners, 1000")
    assert np.isfinite(two[0]).all()
    assert np.array_equal(two[0], two[1])


@pytest.mark.parametrize(
    "algorithm", [name for name, spec in SPECS.items() if spec.learns_from == "replay"]
)
def test_two_learners_of_apex_are_one(algorithm: str, tmp_path: Path) -> None:
    """Whole runs, with the same two actors: the same episodes, the same draws, the same weights."""
    env = "Pendulum-v1" if SPECS[algorithm].actions == "bounded" else "CartPole-v1"
    options: dict[str, Any] = {
        "env": env, "engine": "inline",
        "num_envs": 4, "steps": 640, "hidden": (16, 16), "learning_starts": 200,
        "batch_size": 33, "updates_per_step": 0.25, "rollout_length": 16, "quiet": True,
        "tensorboard": False, "max_grad_norm": 1e6,
    }  # fmt: skip
    left = []
    for learners in (1, 2):
        folder = tmp_path / str(learners)
        mh.train(algorithm, run_dir=str(folder), workers=2 + learners, learners=learners, **options)
        left.append((load_file(folder / "policy.safetensors"), lengths(folder / "episodes.csv")))
    (one, episodes), (two, same) = left
    assert episodes == same
    for name, weights in one.items():
        np.testing.assert_allclose(two[name], weights, rtol=1e-3, atol=1e-4)


def lengths(file: Path) -> list[str]:
    """Environments and lengths of the episodes, in order."""
    rows = [row.split(",") for row in file.read_text().splitlines()]
    names = rows[0]
    return [f"{row[names.index('env')]}: {row[names.index('length')]}" for row in rows[1:]]
