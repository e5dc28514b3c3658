"""Sums in shared memory: the same bits as adding up rank after rank, however the work is shared."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from manyhands.engines.base import Roster, add_up, total
from manyhands.engines.local import transport as local
from manyhands.engines.shared import Segment
from manyhands.trees import Array

OPS = ("sum", "max", "min")


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "c":
        return numbers((*shape, 2), dtype.replace("complex128", "float64")).view(dtype)[..., 0]
    if np.dtype(dtype).kind != "f":
        return rng.integers(0, 100, shape).astype(dtype)
    # Magnitudes far apart, so that another order gives other bits; zeros of both signs
    found = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 7, shape)).astype(dtype)
    found[rng.random(shape) < 0.1] = -0.0
    found[..., 1::3] = -0.0  # of all workers: only then is the sum -0, too
    return found


def same_bits(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int32", "int64", "uint8"])
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 16, 17, 5377])
def test_a_total_has_the_bits_of_adding_up(op: str, dtype: str, columns: int) -> None:
    for workers in (1, 2, 3, 5, 8, 9, 16, 64):
        rows = numbers((workers, 2 * columns), dtype, workers)
        strided = rows[:, :columns]  # a share of longer rows, as it is in the segment
        assert same_bits(total(strided, op), add_up(strided, op))


def test_another_order_would_be_seen() -> None:
    """The numbers above are such that it matters."""
    rows = numbers((9, 1), "float32")
    assert not same_bits(add_up(rows, "sum"), add_up(rows[::-1], "sum"))


@pytest.fixture(autouse=True)
def threads_take_turns_quickly() -> Iterator[None]:
    """Whoever waits spins for a while, and keeps the interpreter's lock."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def meet(workers: int, program: Any) -> list[Any]:
    """A transport for each of so many threads; what the program made of it."""
    control = Segment(local.control_size(workers))
    roster = Roster([f"worker {rank}" for rank in range(workers)])
    found: list[Any] = [None] * workers

    def run(rank: int) -> None:
        try:
            found[rank] = program(local.LocalTransport(control, rank, workers, roster, 20.0))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [x for x in found if isinstance(x, BaseException)]
    if failed:
        raise failed[0]
    return found


# In the rows and read by all, in the rows and shared out, and too large for the rows
SIZES = [(1,), (3, 5), (300,), (5377,), (40_000, 7), (70_000,), (200_000, 1)]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_all_get_the_same_bits_in_calls_of_all_sizes(workers: int) -> None:
    given = [
        [[numbers((n,), "float32", 100 * call + rank) for n in sizes] for rank in range(workers)]
        for call, sizes in enumerate(SIZES * 2)
    ]

    def program(transport: local.LocalTransport) -> list[list[Array]]:
        chance = np.random.default_rng(transport.rank)
        found = []
        for parts in given:
            if chance.random() < 0.3:  # sometimes late, so that others are a call ahead
                time.sleep(0.002)
            mine = parts[transport.rank]
            found.append(transport.reduce(b"[]", mine, "sum", lambda notes: []))
            transport.exchange(b"[]")
        return found

    for found in meet(workers, program):
        for results, parts in zip(found, given, strict=True):
            for i, result in enumerate(results):
                assert same_bits(result, add_up([part[i] for part in parts], "sum"))


def test_which_sums_are_shared_out_depends_on_the_number_of_workers() -> None:
    value_network = np.zeros(5377, np.float32)

    def program(transport: local.LocalTransport) -> bool:
        return transport._shared_out(value_network)

    assert meet(2, program) == [False] * 2
    assert meet(8, program) == [True] * 8


def test_a_result_is_the_workers_own() -> None:
    """Neither does the next call change it, nor does writing to it change another's."""

    def program(transport: local.LocalTransport) -> list[float]:
        results = []
        for call in range(4):
            for n in (3, 60_000):
                given = np.full(n, call, np.float32)
                (result,) = transport.reduce(b"[]", [given], "sum", lambda notes: [])
                result[0] += transport.rank
                results.append(result)
        return [float(result[i]) for result in results for i in (0, -1)]

    for rank, found in enumerate(meet(3, program)):
        sums = [3 * call for call in range(4) for _ in range(2)]
        assert found == [x for s in sums for x in (s + rank, s)]
