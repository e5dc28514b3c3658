"""A sum tree over any number of priorities, worked on a batch at a time.

    priorities   p0 p1 ... p15 | p16 ... p31 | ...        16 to a node
    sums            s0         |     s1      | ...        16 to a node again, until few are left
    top                        cumulative sums, searched by bisection

WHY 16 and not 2: numpy pays for every call, not for every number. A million priorities then need
two steps below the top; two children to a node would need twenty.

A sum is never corrected by a difference: it is added up again from its children, always in the same
order, so rounding cannot pile up, and a tree that was built at once equals one that grew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.errors import ConfigError
from manyhands.trees import Array

_WIDTH = 16
_TOP = 4096  # sums that the top may have: to add up more costs more than another step down
_BLOCK = _WIDTH * _WIDTH  # priorities that share one bound on their smallest and largest
# rows @ _PREFIX are the running sums of each row, at a tenth of the price of numpy's cumsum
_PREFIX = np.triu(np.ones((_WIDTH, _WIDTH)))
_PATIENCE = 4  # blocks are put right one by one this often, then all at once


class SumTree:
    """Priorities 0 .. capacity-1, all 0 at the start; each is a finite number, 0 or more."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"sum tree: capacity {capacity}, but it must be 1 or more")
        self.capacity = capacity
        room = -(-capacity // _BLOCK) * _BLOCK
        self._levels = [np.zeros(room)]
        while len(self._levels[-1]) > _TOP:
            nodes = len(self._levels[-1]) // _WIDTH
            self._levels.append(np.zeros(-(-nodes // _WIDTH) * _WIDTH))
        self._rows = [level.reshape(-1, _WIDTH) for level in self._levels[:-1]]
        self._largest = _Bound(self._levels[0], np.maximum, 0.0)
        self._smallest = _Bound(self._levels[0], np.minimum, np.inf)
        self._starts = np.arange(0, 1024 * _WIDTH, _WIDTH)
        self._top: Array | None = None  # cumulative sums of the last level, until something changes

    @property
    def values(self) -> Array:
        """All priorities [capacity]: read them, but change them by `set`."""
        return self._levels[0][: self.capacity]

    @property
    def total(self) -> float:
        return float(self._running()[-1])

    def get(self, indices: Array) -> Array:
        return self._levels[0].take(indices)

    def set(self, indices: Array, priorities: Array) -> None:
        """Give `indices` [B] these priorities [B]; where an index comes twice, the last wins."""
        indices = np.asarray(indices, np.int64).reshape(-1)
        priorities = np.asarray(priorities, np.float64).reshape(-1)
        if len(indices) != len(priorities):
            raise ConfigError(f"sum tree: {len(indices)} indices, {len(priorities)} priorities")
        if not len(indices):
            return
        if indices.min() < 0 or indices.max() >= self.capacity:
            raise ConfigError(
                f"sum tree: indices {indices.min()} to {indices.max()}, "
                f"but there are 0 to {self.capacity - 1}"
            )
        # NaN fails the first comparison
        if not (priorities.min() >= 0.0 and priorities.max() < np.inf):
            raise ConfigError("sum tree: every priority must be a finite number, 0 or more")
        self._top = None
        self._levels[0][indices] = priorities
        self._largest.widen(indices, priorities)
        self._smallest.widen(indices, np.where(priorities > 0.0, priorities, np.inf))
        if len(indices) * _WIDTH > self.capacity:
            self._add_all_up()
        else:
            self._add_up(indices)

    def clear(self) -> None:
        self._top = None
        for level in self._levels:
            level[:] = 0.0
        self._largest.reset()
        self._smallest.reset()

    def max(self) -> float:
        """The largest priority."""
        return self._largest.exact()

    def min_positive(self) -> float:
        """The smallest priority above 0; infinity when there is none."""
        return self._smallest.exact()

    def find(self, targets: Array) -> Array:
        """The index i with p0 + ... + p(i-1) <= target < p0 + ... + pi, for each target [B].

        A priority of 0 is never found. The total must not be 0.
        """
        top = self._running()
        if not top[-1] > 0.0:
            raise ConfigError("sum tree: all priorities are 0, so there is nothing to find")
        # A target may round up to the total itself: it means the last priority above 0.
        rest = np.minimum(targets, np.nextafter(top[-1], 0.0))
        node: Array = top.searchsorted(rest, "right")
        rest = rest - np.where(node > 0, top[node - 1], 0.0)
        for rows in reversed(self._rows):
            node, rest = _step_down(rows, node, rest)
        return node

    def _running(self) -> Array:
        if self._top is None:
            self._top = np.cumsum(self._levels[-1])
        return self._top

    def _add_up(self, indices: Array) -> None:
        nodes = indices
        for rows, sums in zip(self._rows, self._levels[1:], strict=True):
            nodes = nodes // _WIDTH
            if len(nodes) > len(self._starts):
                self._starts = np.arange(0, 2 * len(nodes) * _WIDTH, _WIDTH)
            sums[nodes] = np.add.reduceat(rows.take(nodes, 0).ravel(), self._starts[: len(nodes)])

    def _add_all_up(self) -> None:
        for level, rows, sums in zip(self._levels, self._rows, self._levels[1:], strict=False):
            starts = np.arange(0, len(level), _WIDTH)
            sums[: len(rows)] = np.add.reduceat(level, starts)


def _step_down(rows: Array, node: Array, rest: Array) -> tuple[Array, Array]:
    """From a node and what is left of the target to its child, and what is left then."""
    children = rows.take(node, 0)  # [B, 16]
    running = children @ _PREFIX
    child = (running > rest[:, None]).argmax(1)
    at = np.arange(0, running.size, _WIDTH) + child
    share = children.take(at)
    left = rest - (running.take(at) - share)
    # Rounding can leave a target just past its node, or at a child of 0: then look closely.
    wrong = (share <= 0.0) | (running[:, -1] <= rest)
    if wrong.any():
        for i in np.flatnonzero(wrong):
            positive = np.flatnonzero(children[i] > 0.0)
            before = np.cumsum(children[i])[positive] - children[i][positive]
            k = max(int(np.searchsorted(before, rest[i], "right")) - 1, 0)
            child[i], left[i] = positive[k], rest[i] - before[k]
    return node * _WIDTH + child, np.maximum(left, 0.0)


class _Bound:
    """The largest (or smallest) of all priorities, from one bound for each block of 256.

    A write can only widen a block's bound, which costs next to nothing. Whether the widest bound
    is still reached is looked up when somebody asks: that block alone is gone through.
    """

    def __init__(self, leaves: Array, better: Any, nothing: float) -> None:
        self._blocks = leaves.reshape(-1, _BLOCK)
        self._better, self._nothing = better, nothing
        self._bounds = np.full(len(self._blocks), nothing)
        self._loose = np.zeros(len(self._blocks), bool)

    def widen(self, indices: Array, values: Array) -> None:
        blocks = indices // _BLOCK
        self._better.at(self._bounds, blocks, values)
        self._loose[blocks] = True

    def exact(self) -> float:
        for attempt in range(_PATIENCE + 1):
            tied = np.flatnonzero(self._bounds == self._better.reduce(self._bounds))
            suspects = tied[self._loose[tied]]
            if len(suspects) < len(tied):  # one of them is known to reach it
                break
            self._tighten(np.flatnonzero(self._loose) if attempt == _PATIENCE else suspects)
        return float(self._better.reduce(self._bounds))

    def _tighten(self, which: Array) -> None:
        rows = self._blocks[which]
        if self._nothing > 0.0:  # of the smallest: 0 means that nothing is there
            rows = np.where(rows > 0.0, rows, self._nothing)
        self._bounds[which] = self._better.reduce(rows, axis=1)
        self._loose[which] = False

    def reset(self) -> None:
        self._bounds[:] = self._nothing
        self._loose[:] = False
