"""The sum tree by compiled loops; what needs numpy only is in sum_tree.py.

    priorities   p0 ... p15 | p16 ... p31 | ...       16 to a node, all the way up
    sums            s0      |     s1      | ...       with the largest and the smallest above 0
    summary      total, largest, smallest             of the whole tree

numpy pays for every call, so with batches of 32 most of a draw is calls. Here a whole draw is one
call, and so is a whole change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands.replay import compiled
from manyhands.replay.sum_tree import WIDTH, SumTree
from manyhands.trees import Array


def sum_tree(capacity: int) -> SumTree:
    """The fastest that can be had here."""
    loops = compiled.loops()
    return SumTree(capacity) if loops is None else CompiledTree(capacity, loops)


class CompiledTree(SumTree):
    """What `SumTree` does, by these loops."""

    def __init__(self, capacity: int, loops: Any) -> None:
        self._loops = loops
        super().__init__(capacity)

    def _make(self) -> None:
        sizes = [-(-self.capacity // WIDTH) * WIDTH]
        while sizes[-1] > WIDTH:
            sizes.append(-(-sizes[-1] // WIDTH**2) * WIDTH)
        # Rounded up, so that every sum has its 16 children; those beyond the capacity stay 0
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._sums = np.zeros(sum(sizes))
        # Without those of the leaves, which are the leaves
        self._most = np.zeros(sum(sizes[1:]))
        self._least = np.full(sum(sizes[1:]), np.inf)
        self._summary = np.array([0.0, 0.0, np.inf])
        self._leaves = self._sums[: sizes[0]]

    @property
    def total(self) -> float:
        return float(self._summary[self._loops.TOTAL])

    def put(self, indices: Array, priorities: Array) -> None:
        self.put_where(_NO_MARKS, indices, indices, priorities)

    def put_where(self, marks: Array, wanted: Array, indices: Array, priorities: Array) -> int:
        return int(
            self._loops.put(
                self._sums, self._starts, self._summary, self._most, self._least,
                indices, priorities, marks, wanted,
            )
        )  # fmt: skip

    def clear(self) -> None:
        self._sums[:], self._most[:], self._least[:] = 0.0, 0.0, np.inf
        self._summary[:] = 0.0, 0.0, np.inf

    def max(self) -> float:
        return float(self._summary[self._loops.LARGEST])

    def min_positive(self) -> float:
        return float(self._summary[self._loops.SMALLEST])

    def find(self, targets: Array) -> Array:
        self._check_total()
        return self._draw(np.array(targets, np.float64), 0.0, 1.0, 0.0)[0]

    def draw(self, numbers: Array, beta: float) -> tuple[Array, Array, Array]:
        self._check_total()
        return self._draw(numbers, 1.0, self.total / len(numbers), beta)

    def _draw(
        self, numbers: Array, step: float, scale: float, beta: float
    ) -> tuple[Array, Array, Array]:
        draw: Callable[..., tuple[Array, Array, Array]] = self._loops.draw
        return draw(self._sums, self._starts, self._summary, numbers, step, scale, beta)


_NO_MARKS = np.zeros(0, np.int64)
