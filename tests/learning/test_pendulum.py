"""The founding exercise is solved: the pendulum swings up and stays up, dense reward and sparse.

Solved means that of 100 episodes with fresh seeds, played by the policy without chance, at least 80
are upright through their whole second half. The recipes reach 99 or 100.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.config import load_recipe, validate
from manyhands.run import Result, train_experiment
from manyhands.viewing.evaluation import evaluate

pytestmark = [pytest.mark.usefixtures("nothing_left")]

MOST_STEPS = {"pendulum-dense": 400_000, "pendulum-sparse": 800_000}
SOLVED = 0.8


def train(recipe: str, folder: Path, **changes: Any) -> Result:
    experiment = load_recipe(recipe)
    changes |= {"run_dir": str(folder / "run"), "quiet": True, "tensorboard": False}
    experiment = replace(experiment, run=replace(experiment.run, **changes))
    validate.check(experiment)
    return train_experiment(experiment)


def share_upright(result: Result) -> float:
    """Of 100 episodes, those that stay upright through their second half."""
    found = evaluate(result.run_dir, 100, seed=1_000_000).success_rate
    assert found is not None
    return found


def test_dense_with_one_worker_in_a_quarter_of_the_steps(tmp_path: Path) -> None:
    result = train("pendulum-dense", tmp_path, seed=1, steps=100_000, workers=1, strategy="single")
    assert share_upright(result) >= SOLVED, result.summary


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("recipe", sorted(MOST_STEPS))
def test_recipe_solves_it(recipe: str, seed: int, tmp_path: Path) -> None:
    result = train(recipe, tmp_path, seed=seed)
    assert result.summary["workers"] == 2
    assert result.summary["env_steps"] <= MOST_STEPS[recipe]
    assert share_upright(result) >= SOLVED, result.summary


def test_a_policy_that_has_not_learned_does_not_pass(tmp_path: Path) -> None:
    """The measure can fail: two updates are not enough to stay up by luck."""
    result = train("pendulum-sparse", tmp_path, steps=4096, workers=1, strategy="single")
    assert share_upright(result) < 0.2
