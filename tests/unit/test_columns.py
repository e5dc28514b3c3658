"""How rows get out of columns, and that no memory is used again while somebody looks at it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manyhands.engines.shared import FRESH_BELOW, Pool
from manyhands.replay import compiled_loops
from manyhands.replay import ring as columns
from manyhands.replay.ring import gatherer


@pytest.mark.parametrize("way", ["numpy", "loops"])
@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(), (3,), (1023,), (4096,), (4, 84, 84), (1, 8193)])
def test_gathering_is_indexing(
    way: str, dtype: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_loops() is not None, "the loops need numba: pip install 'manyhands[compiled]'"
    if way == "numpy":
        monkeypatch.setattr(columns, "compiled_loops", lambda: None)
    rng = np.random.default_rng(0)
    column = rng.integers(0, 2**40, (40, *shape)).astype(dtype)
    gather = gatherer(column)
    for count in (0, 1, 2, 33):
        slots = rng.integers(0, 40, count)
        out = np.zeros((count + 2, *shape), dtype)
        gather(slots, out[1 : count + 1])
        np.testing.assert_array_equal(out[1 : count + 1], column[slots])
        assert not out[[0, -1]].any()  # nothing beside it was touched


SHAPE, KIND = (FRESH_BELOW // 4,), np.dtype(np.float32)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_that_nobody_has_is_used_again() -> None:
    pool = Pool(4)
    first = pool.take(SHAPE, KIND)
    at = address(first)
    del first
    assert address(pool.take(SHAPE, KIND)) == at


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[5:],
        lambda array: array.reshape(2, -1)[1, ::3],
        lambda array: memoryview(array),
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[3:].reshape(-1),
        lambda array: {"obs": [array.T]},
    ],
    ids=["itself", "part", "view of a view", "memoryview", "tensor", "part of a tensor", "nested"],
)
def test_memory_that_somebody_has_is_left_alone(hold: Any) -> None:
    pool = Pool(4)
    taken = pool.take(SHAPE, KIND)
    at = address(taken)
    held = hold(taken)
    del taken
    others = [pool.take(SHAPE, KIND) for _ in range(6)]
    assert at not in [address(other) for other in others]
    assert len({address(other) for other in others}) == 6
    del held


def test_another_shape_or_kind_does_not_share() -> None:
    pool = Pool(4)
    at = address(pool.take(SHAPE, KIND))
    again = pool.take(SHAPE, np.dtype(np.int32))
    assert again.dtype == np.int32
    assert pool.take((2 * SHAPE[0],), KIND).shape == (2 * SHAPE[0],)
    assert address(pool.take(SHAPE, KIND)) == at


def test_a_pool_keeps_no_more_than_it_may() -> None:
    """Batches of ever other sizes must not pile up."""
    pool = Pool(3)
    for extra in range(20):
        pool.take((SHAPE[0] + extra,), KIND)
    assert len(pool._arrays) == 3
