"""What numpy cannot do in one call, as loops that numba compiles: importing this needs numba.

    draw, put   the sum tree's, written in sum_tree.py
    gather      rows of a page of memory and more, written here

`replay.compiled_loops()` is the door; it gives None where numba is not installed. Types are given,
so all is compiled when this is imported, or read from the cache of the last time, and never in the
middle of a run. No loop holds the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core.cgutils import raw_memcpy
from numba.extending import intrinsic

from manyhands.replay.sum_tree import draw_leaves, put_leaves
from manyhands.trees import Array

_PREFETCH_STEP = 2048  # bytes: two looks into every page of memory of 4096


def _fast(signature: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        try:
            return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function)
        except RuntimeError:  # no folder where it may keep what it compiled
            return numba.njit(signature, nogil=True, error_model="numpy")(function)

    return decorate


draw = _fast("(f8[::1], i8[::1], f8[::1], f8[::1], f8, f8, f8)")(draw_leaves)
put = _fast("(f8[::1], i8[::1], f8[::1], f8[::1], f8[::1], i8[::1], f8[::1], i8[::1], i8[::1])")(
    put_leaves
)

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
            for k in range(0, nbytes, _PREFETCH_STEP):
                _fetch(following + k)
        _copy(there + i * nbytes, here + slots[i] * nbytes, nbytes)
