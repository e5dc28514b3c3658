"""Columns of preallocated memory: how rows get in and out, and memory for what is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np

from manyhands.replay import compiled_loops
from manyhands.trees import Array

# bytes: from here on malloc may get memory from the system each time, and give it back each time
FRESH_BELOW = 1 << 17
_LARGE_ROW = 4096  # bytes: a page of memory


class Strokes(NamedTuple):
    """What it takes to add rows to certain columns, written out for just these columns.

    WHY: what it costs to add a row is the interpreter, not the copy. Written out, without a loop
    over the columns, it costs half.
    """

    look: Callable[[Any], Sequence[Array] | None]  # a batch of rows -> its arrays, if all is usual
    put: Callable[[slice, Sequence[Array]], None]  # [N, ...] each
    put_one: Callable[[int, Sequence[Array]], None]  # [1, ...] each


def strokes(paths: Sequence[str], columns: Sequence[Array]) -> Strokes:
    """The functions for columns that lie at those paths of a row.

    `look` gives None, or raises a LookupError, TypeError or AttributeError, unless each path holds
    an array of the column's own dtype and there is nothing besides. It compares sizes, not shapes:
    `put` raises a ValueError where these do not fit.
    """
    keys: dict[str, set[str]] = {}  # of each dict in a row
    known: dict[str, Any] = {}
    places, right = [], []
    for k, (path, column) in enumerate(zip(paths, columns, strict=True)):
        place = "rows"
        for key in path.split("/"):
            keys.setdefault(place, set()).add(key)
            place = f"{place}[{key!r}]"
        places.append(place)
        # Columns of numbers as columns of one-number rows: item i then takes a batch of one row.
        single = column if column.ndim > 1 else column[:, None]
        known |= {f"column{k}": column, f"single{k}": single, f"dtype{k}": column.dtype}
        size = math.prod(column.shape[1:])
        right.append(f"a{k}.dtype is dtype{k} and a{k}.size == count * {size}")
    arrays = "".join(f"a{k}, " for k in range(len(places)))
    lengths = [f"len({place}) == {len(names)}" for place, names in keys.items()]
    source = [
        "def look(rows):",
        f"    {arrays}= {', '.join(places)},",
        "    count = len(a0)",
        f"    return ({arrays}) if {' and '.join([*lengths, *right])} else None",
    ]
    for name, column_name in (("put", "column"), ("put_one", "single")):
        source += [f"def {name}(at, arrays):", f"    {arrays}= arrays"]
        source += [f"    {column_name}{k}[at] = a{k}" for k in range(len(places))]
    # Keys stand in it as quoted strings only, so that no name of a column can be code.
    exec("\n".join(source), known)
    # Taken out, or memory and functions would hold each other until the garbage is collected
    return Strokes(*(known.pop(name) for name in Strokes._fields))


def gatherer(column: Array) -> Callable[[Array, Array], Any]:
    """How rows get out of a column: a call (slots, out) with out[i] = column[slots[i]]."""
    nbytes = column.itemsize * math.prod(column.shape[1:])
    compiled = compiled_loops() if nbytes >= _LARGE_ROW else None
    if compiled is None:
        # "clip" writes straight into `out`; the default would go through a copy
        return lambda slots, out: column.take(slots, 0, out, "clip")
    rows = column.view(np.uint8).reshape(len(column), nbytes)
    return lambda slots, out: compiled.gather(
        rows, slots, out.view(np.uint8).reshape(len(out), nbytes)
    )


class Pool:
    """Large result arrays, used again once the last view of them is gone.

    WHY: the first touch of fresh memory costs several times the copy itself, and a learner draws
    batches of the same size for hours.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._arrays: list[Array] = []

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if math.prod(shape) * dtype.itemsize < FRESH_BELOW:
            return np.empty(shape, dtype)
        for i in range(len(self._arrays)):
            # Whoever has a view of it, or a view of a view, or a tensor on one, holds the array.
            if _holders(self._arrays, i) == _NOBODY:
                array = self._arrays[i]
                if array.shape == shape and array.dtype is dtype:
                    return array[:]
        array = np.empty(shape, dtype)  # numpy asks for huge pages
        self._arrays.append(array)
        if len(self._arrays) > self._keep:
            del self._arrays[0]
        return array[:]


def _holders(arrays: Sequence[Any], i: int) -> int:
    return getrefcount(arrays[i])


# Measured and not known: what a variable counts for differs between versions of Python.
_NOBODY = _holders([np.empty(0)], 0)
