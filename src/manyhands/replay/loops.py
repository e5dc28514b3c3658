"""What numpy cannot do in one call, as loops that numba compiles: importing this needs numba.

`compiled.loops()` is the door; it gives None where numba is not installed. Types are given, so all
is compiled when this is imported, or read from the cache of the last time, and never in the middle
of a run. No loop holds the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core.cgutils import raw_memcpy
from numba.extending import intrinsic

from manyhands.replay.sum_tree import SHIFT, WIDTH
from manyhands.trees import Array

TOTAL, LARGEST, SMALLEST = 0, 1, 2  # places in a summary
_AHEAD = 2048  # bytes: two looks into every page of memory of 4096


def _fast(signature: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        try:
            return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError:  # no folder where it may keep what it compiled
            return numba.njit(signature, nogil=True, error_model="numpy")(function)

    return decorate


# -- the sum tree: `sums` has all levels one after the other, level k from `starts[k]` on ----------


@_fast("(f8[::1], i8[::1], f8[::1], f8[::1], f8, f8, f8)")
def draw(
    sums: Array, starts: Array, summary: Array, numbers: Array, step: float, scale: float,
    beta: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """For target b = (step·b + numbers[b])·scale: its leaf, (p / smallest p)^-beta, p / total.

    Level by level and not row by row: the rows of a batch do not depend on each other, so the
    processor gets what they need from memory at the same time. The total must not be 0.
    """
    count = len(numbers)
    leaves = np.zeros(count, np.int64)
    rests = np.empty(count, np.float64)
    weights = np.empty(count, np.float32)
    for b in range(count):
        rests[b] = (step * b + numbers[b]) * scale
    for level in range(len(starts) - 1, -1, -1):
        for b in range(count):
            at = starts[level] + WIDTH * leaves[b]
            rest, running, before, child = rests[b], 0.0, 0.0, 0
            for j in range(WIDTH):  # to the end: where to leave early cannot be foretold
                running += sums[at + j]
                if running <= rest:
                    child, before = j + 1, running
            if child == WIDTH:
                # Rounding led past the end: it is the last priority above 0, here and below
                child, before = WIDTH - 1, -np.inf
                while child > 0 and sums[at + child] <= 0.0:
                    child -= 1
            rests[b] = rest - before
            leaves[b] = WIDTH * leaves[b] + child
    for b in range(count):
        priority = sums[leaves[b]]
        weights[b] = (priority / summary[SMALLEST]) ** -beta
        rests[b] = priority / summary[TOTAL]
    return leaves, weights, rests


@_fast("(f8[::1], i8[::1], f8[::1], f8[::1], f8[::1], i8[::1], f8[::1], i8[::1], i8[::1])")
def put(
    sums: Array, starts: Array, summary: Array, largest: Array, smallest: Array, indices: Array,
    priorities: Array, marks: Array, wanted: Array,
) -> int:  # fmt: skip
    """Give those leaves these priorities, and put right what stands above them.

    Only where marks[index] is the one wanted: how many are not? An empty `marks` asks for nothing.
    Sums are added up always in the same order.
    """
    count, levels = len(indices), len(starts)
    leaves = starts[1] if levels > 1 else 0  # how many there are: the others lie behind them
    refused = 0
    for i in range(count):
        if len(marks) == 0 or marks[indices[i]] == wanted[i]:
            sums[indices[i]] = priorities[i]
        else:
            refused += 1
    for level in range(1, levels + 1):
        shift = SHIFT * level
        below = starts[level - 1]
        for i in range(count):
            node = indices[i] >> shift
            if i + 1 < count and indices[i + 1] >> shift == node:
                continue  # the next one has the same node: neighbours are put right once
            at = below + WIDTH * node
            most, least = 0.0, np.inf
            if level == 1:
                for j in range(WIDTH):
                    value = sums[at + j]
                    most = max(most, value)
                    least = min(least, value if value > 0.0 else np.inf)
            else:
                for j in range(WIDTH):
                    most = max(most, largest[at - leaves + j])
                    least = min(least, smallest[at - leaves + j])
            a, b, c, d = 0.0, 0.0, 0.0, 0.0  # four sums at a time: one would wait for itself
            for j in range(0, WIDTH, 4):
                a += sums[at + j]
                b += sums[at + j + 1]
                c += sums[at + j + 2]
                d += sums[at + j + 3]
            total = (a + b) + (c + d)
            if level == levels:
                summary[TOTAL], summary[LARGEST], summary[SMALLEST] = total, most, least
            else:
                to = starts[level] + node
                sums[to] = total
                largest[to - leaves], smallest[to - leaves] = most, least
    return refused


# -- large rows ------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(_: Any, address: Any) -> Any:
    """Ask the processor to bring what lies there nearer, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(prefetch, [place, number(0), number(2), number(1)])  # to read; data
        return context.get_dummy_value()

    return numba.void(numba.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _copy(_: Any, to: Any, source: Any, nbytes: Any) -> Any:
    """C's memcpy between addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        there, here = (builder.inttoptr(place, pointer) for place in arguments[:2])
        raw_memcpy(builder, there, here, arguments[2], 1)
        return context.get_dummy_value()

    return numba.void(numba.intp, numba.intp, numba.intp), generate


@_fast("(u1[:, ::1], i8[::1], u1[:, ::1])")
def gather(rows: Array, slots: Array, out: Array) -> None:
    """out[i] = rows[slots[i]], of any number of bytes each.

    While one row is copied, the next is on its way from memory: the processor runs ahead by itself
    within a page only, so at every page of a row somewhere else it would stand and wait.
    """
    nbytes, count = rows.shape[1], len(slots)
    here, there = rows.ctypes.data, out.ctypes.data
    for i in range(count):
        if i + 1 < count:
            following = here + slots[i + 1] * nbytes
            for k in range(0, nbytes, _AHEAD):
                _fetch(following + k)
        _copy(there + i * nbytes, here + slots[i] * nbytes, nbytes)
