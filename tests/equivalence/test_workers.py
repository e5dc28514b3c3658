"""N workers with b rows each learn what one worker learns from N·b rows: parameters compared."""

from __future__ import annotations

import functools
from typing import Any

import programs
import pytest
import torch
from conftest import ALL_ENGINES
from second_launch import answers_of
from training_programs import WAYS, told

from manyhands import launch

pytestmark = [pytest.mark.usefixtures("nothing_left")]

NAMES = ["averaged", "unequal", "gathered"]


@functools.cache
def learned(engine: str, workers: int) -> list[dict[str, dict[str, Any]]]:
    """What each worker has learned in each way."""
    if workers == 2:
        return answers_of(engine, "ways")
    return launch(programs.train_all_ways, *WAYS, workers=workers, engine=engine, timeout=60)


def serial() -> dict[str, Any]:
    return learned("inline", 1)[0]["averaged"]


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def test_one_worker_learns_and_repeats() -> None:
    """It does learn: otherwise all that follows would compare nothing with nothing."""
    answer = learned("inline", 1)[0]
    for way in ("averaged again", "gathered"):
        assert difference(answer[way], serial()) == 0
    torch.manual_seed(0)
    start = torch.nn.Linear(5, 16).weight.detach()
    assert float((serial()["0.weight"] - start).abs().max()) > 0.01


@pytest.mark.parametrize("way", NAMES)
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_two_workers_equal_one(engine: str, way: str) -> None:
    for answer in learned(engine, 2):
        for name, value in serial().items():
            assert torch.allclose(answer[way][name], value, atol=1e-5, rtol=1e-5), name


@pytest.mark.parametrize("way", ["unequal", "gathered"])
@pytest.mark.parametrize("workers", [3, 5])
def test_odd_numbers_of_workers_equal_one(workers: int, way: str) -> None:
    """32 rows do not divide: the mean of gradients has to be weighted by rows."""
    for answer in learned("inline", workers):
        for name, value in serial().items():
            assert torch.allclose(answer[way][name], value, atol=1e-5, rtol=1e-5), name


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_replicas_are_equal_to_the_bit(engine: str) -> None:
    first, second = learned(engine, 2)
    for way in first:
        assert difference(first[way], second[way]) == 0


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_the_same_again_is_the_same_to_the_bit(engine: str) -> None:
    """In the same workers, and in another launch, after other work."""
    first = learned(engine, 2)[0]
    assert difference(first["averaged"], first["averaged again"]) == 0
    second = told(engine, "ways")[0]
    for way in first:
        for name, value in first[way].items():
            assert torch.equal(value, second[way][name]), (way, name)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_gathering_on_main_is_serial_to_the_bit(engine: str) -> None:
    """The main worker sees the very rows, in the very order, that one worker would see."""
    assert difference(learned(engine, 2)[0]["gathered"], serial()) == 0
