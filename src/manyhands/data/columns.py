"""Columns of preallocated memory: how rows get into them, and memory for what is read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from manyhands.trees import Array

FRESH_BELOW = 1 << 22  # bytes: smaller results are not worth keeping their memory
_KEEP = 4


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


class Pool:
    """Large result arrays, used again once the last view of them is gone.

    WHY: the first touch of fresh memory costs several times the copy itself, and a learner draws
    batches of the same size for hours.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < FRESH_BELOW:
            return np.empty(shape, dtype)
        free = self._free.setdefault(nbytes, [])
        if free:
            memory = free.pop()
        else:
            fresh: Any = np.empty(nbytes, np.uint8)  # numpy asks for huge pages
            # CRUCIAL: views of an array on an array hold the latter only, and would not keep the
            # memory from being used again; on a memoryview they hold the array below.
            memory = memoryview(fresh)
        array: Array = np.frombuffer(memory, dtype, count)
        weakref.finalize(array, self._give_back, nbytes, memory).atexit = False
        return array.reshape(shape)

    def _give_back(self, nbytes: int, memory: Any) -> None:
        free = self._free.setdefault(nbytes, [])
        if len(free) < _KEEP:
            free.append(memory)
