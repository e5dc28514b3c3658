"""N workers train as one does: the same weights, the same episodes; and a run repeats itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import training_programs
from conftest import ALL_ENGINES
from training_programs import Trained, as_in_a_worker, cells, trained

from manyhands import launch

pytestmark = [pytest.mark.usefixtures("nothing_left")]

PARALLEL = [pytest.param(*cell, id="-".join(cell)) for cell in cells(workers=2)]
ALGORITHMS = sorted({algorithm for algorithm, _ in cells(workers=2)})


def alone(algorithm: str, how: str = "") -> Trained:
    """The run that all others are measured against: one worker, no engine."""
    return trained("inline", 1)[f"{algorithm}-single{how}"]


def close(policy: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(policy) == set(expected)
    for name, weights in expected.items():
        np.testing.assert_allclose(policy[name], weights, rtol=1e-4, atol=1e-5, err_msg=name)


def same(policy: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(policy) == set(expected)
    for name, weights in expected.items():
        assert np.array_equal(policy[name], weights), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_one_worker_learns(algorithm: str) -> None:
    """Otherwise all that follows would compare nothing with nothing."""
    run = alone(algorithm)
    other = training_programs.initial_weights(run)
    moved = [float(np.abs(run.policy[name] - other[name]).max()) for name in other]
    assert min(moved) > 1e-4


@pytest.mark.parametrize(("algorithm", "strategy"), PARALLEL)
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_two_workers_learn_what_one_learns(engine: str, algorithm: str, strategy: str) -> None:
    close(trained(engine, 2)[f"{algorithm}-{strategy}"].policy, alone(algorithm).policy)


@pytest.mark.parametrize(("algorithm", "strategy"), PARALLEL)
def test_three_workers_learn_what_one_learns(algorithm: str, strategy: str) -> None:
    close(trained("inline", 3)[f"{algorithm}-{strategy}"].policy, alone(algorithm).policy)


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_normalisers_are_those_of_one_worker(engine: str, strategy: str) -> None:
    """Statistics of observations and returns, in the policy file, and what was learned by them."""
    policy = trained(engine, 2)[f"ppo-{strategy}-normalised"].policy
    assert any(name.startswith("normaliser/") for name in policy)
    close(policy, alone("ppo", "-normalised").policy)


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_masks_and_memory_are_those_of_one_worker(engine: str, strategy: str) -> None:
    policy = trained(engine, 2)[f"ppo-{strategy}-masked"].policy
    assert any("lstm" in name for name in policy)
    close(policy, alone("ppo", "-masked").policy)


@pytest.mark.parametrize(("algorithm", "strategy"), PARALLEL)
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_run_repeats_to_the_bit(engine: str, algorithm: str, strategy: str) -> None:
    name = f"{algorithm}-{strategy}"
    first, again = trained(engine, 2)[name], trained(engine, 2)[f"{name}-again"]
    same(again.policy, first.policy)
    assert _played(again) == _played(first)


def test_a_second_launch_repeats_to_the_bit() -> None:
    first, second = trained("inline", 2), trained("inline", 2, launched=1)
    for name, run in first.items():
        same(second[name].policy, run.policy)


@pytest.mark.parametrize(("algorithm", "strategy"), PARALLEL)
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_the_episodes_are_those_of_one_worker(engine: str, algorithm: str, strategy: str) -> None:
    """When each ended, in which environment, its return and its length."""
    run = trained(engine, 2)[f"{algorithm}-{strategy}"]
    assert _played(run) == _played(alone(algorithm))
    assert {row["worker"] for row in run.episodes} == {"0", "1"}


def _played(run: Trained) -> list[tuple[str, ...]]:
    columns = ("global_step", "env", "return", "length")
    return sorted(tuple(row[c] for c in columns) for row in run.episodes)


@pytest.mark.parametrize("parts", [[50, 13, 33], [0, 95, 1], [96, 0, 0]], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_unequal_parts_weigh_by_their_rows(algorithm: str, parts: list[int]) -> None:
    """Whole episodes, and vector envs whose resets are steps, give workers unequal numbers."""
    program = training_programs.learn_from_parts
    with as_in_a_worker():
        (expected,) = launch(program, algorithm, [sum(parts)], 3, workers=1, engine="inline")
        replicas = launch(program, algorithm, parts, 3, workers=3, engine="inline", timeout=30)
    for weights in replicas:
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)
        assert np.array_equal(weights, replicas[0])
