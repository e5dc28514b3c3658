"""The inner loops of the sum tree, compiled by numba where that is installed: an option.

numpy pays for every call, so with batches of 32 most of a draw is calls. Compiled, the tree can
have 16 children to a node all the way up, and a batch goes down it in one call.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from manyhands.trees import Array

WIDTH, SHIFT = 16, 4


class Kernels(NamedTuple):
    """All levels of a tree lie in one array, `flat`, from `starts[k]` on; level 0 is the leaves."""

    locate: Callable[[Array, Array, Array], tuple[Array, Array]]
    add_up: Callable[[Array, Array, Array], None]


@functools.cache
def compiled() -> Kernels | None:
    """None without numba, or with one that does not know this numpy."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    try:
        return Kernels(*map(numba.njit(cache=True), (locate, add_up)))
    except RuntimeError:  # no folder where it may keep what it compiled
        return Kernels(*map(numba.njit(), (locate, add_up)))


def in_use() -> str:
    """What compiles the loops, for people."""
    return f"numba {sys.modules['numba'].__version__}" if compiled() else "numpy"


def locate(flat: Array, starts: Array, targets: Array) -> tuple[Array, Array]:
    """The leaf in which each target falls, and its priority. The total must not be 0."""
    index = np.empty(len(targets), np.int64)
    priorities = np.empty(len(targets), np.float64)
    for b in range(len(targets)):
        rest, node = targets[b], 0
        for level in range(len(starts) - 1, -1, -1):
            at = starts[level] + WIDTH * node
            child, found = 0, False
            for j in range(WIDTH):
                share = flat[at + j]
                if share > 0.0:
                    child = j
                    if rest < share:
                        found = True
                        break
                    rest -= share
            if not found:
                rest = np.inf  # rounding led past the end: take the last priority above 0
            node = WIDTH * node + child
        index[b], priorities[b] = node, flat[node]
    return index, priorities


def add_up(flat: Array, starts: Array, indices: Array) -> None:
    """Put the sums above those leaves right, always adding in the same order."""
    for level in range(1, len(starts)):
        for i in range(len(indices)):
            node = indices[i] >> SHIFT * level
            at = starts[level - 1] + WIDTH * node
            total = 0.0
            for j in range(WIDTH):
                total += flat[at + j]
            flat[starts[level] + node] = total
