"""A sum tree over any number of priorities, worked on a batch at a time.

    priorities   p0 p1 ... p15 | p16 ... p31 | ...        16 to a node
    sums            s0         |     s1      | ...        16 to a node again, until few are left
    top                        cumulative sums, searched by bisection

WHY 16 and not 2: numpy pays for every call, not for every number. A million priorities then need
two steps below the top; two children to a node would need twenty.

A sum is never corrected by a difference: it is added up again from its children, always in the same
order, so rounding cannot pile up, and a tree that was built at once equals one that grew.

This one needs numpy only. Where numba is installed, compiled loops do the same faster:

    priorities   p0 ... p15 | p16 ... p31 | ...       16 to a node, all the way up
    sums            s0      |     s1      | ...       with the largest and the smallest above 0
    summary      total, largest, smallest             of the whole tree

With batches of 32 most of a draw by numpy is calls. Here a whole draw is one call, and so is a
whole change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np

from manyhands.errors import ConfigError
from manyhands.replay import compiled_loops
from manyhands.trees import Array

WIDTH, SHIFT = 16, 4
TOTAL, LARGEST, SMALLEST = 0, 1, 2  # places in the summary of a compiled tree
_TOP = 4096  # sums that the top may have: to add up more costs more than another step down
_BLOCK = WIDTH * WIDTH  # priorities that share one bound on their smallest and largest
# children @ _BEFORE: what lies before each of 16 children, the last child first, so that the first
# number that is not above the target belongs to the child in question. It is always there: 0.
_BEFORE = np.ascontiguousarray(np.triu(np.ones((WIDTH, WIDTH)), 1)[:, ::-1])
_RUNNING = np.triu(np.ones((WIDTH, WIDTH)))  # children @ _RUNNING: their running sums
_WAITING = 64  # batches of changes that are looked through for the largest and smallest at once


class SumTree:
    """Priorities 0 .. capacity-1, all 0 at the start; each is a finite number, 0 or more."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"sum tree: capacity {capacity}, but it must be 1 or more")
        self.capacity = capacity
        self._make()

    def _make(self) -> None:
        top, steps = -(-self.capacity // _BLOCK) * _BLOCK, 0
        while top > _TOP:
            top, steps = -(-top // WIDTH), steps + 1
        top = -(-top // WIDTH) * WIDTH
        # Rounded up, so that every sum has its 16 children; those beyond the capacity stay 0
        self._levels = [np.zeros(top * WIDTH**k) for k in range(steps, -1, -1)]
        self._leaves = self._levels[0]
        self._rows = [level.reshape(-1, WIDTH) for level in self._levels[:-1]]
        self._largest = _Extreme(self._leaves, np.maximum, 0.0)
        self._smallest = _Extreme(self._leaves, np.minimum, np.inf)
        self._numbers = np.arange(1024.0)
        self._starts = np.arange(0, 1024 * WIDTH, WIDTH)
        # What lies before each sum of the last level, and the total; right until something changes
        self._before = np.zeros(top + 1)
        self._changed = False

    @property
    def values(self) -> Array:
        """All priorities [capacity]: read them, but change them by `set`."""
        return self._leaves[: self.capacity]

    @property
    def total(self) -> float:
        return float(self._running()[-1])

    def get(self, indices: Array) -> Array:
        return self._leaves.take(indices)

    def set(self, indices: Array, priorities: Array) -> None:
        """Give `indices` [B] these priorities [B]; where an index comes twice, the last wins."""
        indices = np.array(indices, np.int64).reshape(-1)
        priorities = np.array(priorities, np.float64).reshape(-1)
        if len(indices) != len(priorities):
            raise ConfigError(f"sum tree: {len(indices)} indices, {len(priorities)} priorities")
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= self.capacity:
            raise ConfigError(
                f"sum tree: indices {indices.min()} to {indices.max()}, "
                f"but there are 0 to {self.capacity - 1}"
            )
        # NaN fails the first comparison
        if not (priorities.min(initial=0.0) >= 0.0 and priorities.max(initial=0.0) < np.inf):
            raise ConfigError("sum tree: every priority must be a finite number, 0 or more")
        self.put(indices, priorities)

    def put(self, indices: Array, priorities: Array) -> None:
        """`set` for somebody who has checked both, and leaves the array of indices alone."""
        if not len(indices):
            return
        self._changed = True
        self._leaves[indices] = priorities
        self._largest.note(indices)
        self._smallest.note(indices)
        if len(indices) * WIDTH > self.capacity:
            self._add_all_up()
        else:
            self._add_up(indices)

    def put_where(self, marks: Array, wanted: Array, indices: Array, priorities: Array) -> int:
        """`put`, only where marks[index] is the one wanted [B]; how many are not."""
        right = marks.take(indices) == wanted
        refused = len(indices) - int(np.count_nonzero(right))
        if refused:
            indices, priorities = indices[right], priorities[right]
        self.put(indices, priorities)
        return refused

    def clear(self) -> None:
        self._changed = True
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
        return self._locate(np.asarray(targets, np.float64))[0]

    def draw(self, numbers: Array, beta: float) -> tuple[Array, Array, Array]:
        """One index from each of B equal parts of the total, at `numbers` [B] in [0, 1) of it.

        Returns:
            Indices [B]; weights [B] float32, (p / smallest p above 0)^-beta; and p / total [B].
            The array of numbers is used up.
        """
        count, total = len(numbers), self.total
        if count > len(self._numbers):
            self._numbers = np.arange(2.0 * count)
        numbers += self._numbers[:count]
        numbers *= total / count
        indices, priorities = self._locate(numbers)
        weights = priorities / self.min_positive()
        weights **= -beta
        priorities /= total
        return indices, weights.astype(np.float32), priorities

    def _check_total(self) -> None:
        if not self.total > 0.0:
            raise ConfigError("sum tree: all priorities are 0, so there is nothing to find")

    def _locate(self, targets: Array) -> tuple[Array, Array]:
        """The indices of those targets, and their priorities."""
        self._check_total()
        before = self._before
        # Without both ends: a target that rounds up to the total means the last priority.
        node: Array = before[1:-1].searchsorted(targets, "right")
        rest = targets - before.take(node)
        starts = self._starts_of(len(node))
        for rows in reversed(self._rows):
            sums = rows.take(node, 0) @ _BEFORE  # [B, 16]
            child = (sums <= rest[:, None]).argmax(1)
            rest = rest - sums.take(starts + child)
            node = (node << SHIFT | WIDTH - 1) - child
        priorities = self._leaves.take(node)
        if np.count_nonzero(priorities) < len(node):
            self._repair(node)
            priorities = self._leaves.take(node)
        return node, priorities

    def _repair(self, node: Array) -> None:
        """Rounding left a target just past its node, at a 0: take the last priority before it."""
        positive = np.flatnonzero(self._leaves)
        wrong = np.flatnonzero(self._leaves.take(node) <= 0.0)
        place = np.maximum(positive.searchsorted(node[wrong]) - 1, 0)
        node[wrong] = positive[place]

    def _running(self) -> Array:
        if self._changed:
            # 16 at a time, and then what lies before each 16: half the price of numpy's cumsum
            sums = self._before[1:].reshape(-1, WIDTH)
            np.matmul(self._levels[-1].reshape(-1, WIDTH), _RUNNING, out=sums)
            sums[1:] += sums[:-1, -1].cumsum()[:, None]
            self._changed = False
        return self._before

    def _starts_of(self, count: int) -> Array:
        """0, 16, 32, ..."""
        if count > len(self._starts):
            self._starts = np.arange(0, 2 * count * WIDTH, WIDTH)
        return self._starts[:count]

    def _add_up(self, indices: Array) -> None:
        nodes = indices
        starts = self._starts_of(len(indices))
        for rows, sums in zip(self._rows, self._levels[1:], strict=True):
            nodes = nodes >> SHIFT
            sums[nodes] = np.add.reduceat(rows.take(nodes, 0).ravel(), starts)

    def _add_all_up(self) -> None:
        for level, sums in itertools.pairwise(self._levels):
            np.add.reduceat(level, np.arange(0, len(level), WIDTH), out=sums)


class _Extreme:
    """The largest (or smallest positive) of all priorities, and where it is.

    Changes are only noted, which costs nothing. When somebody asks, the changed ones are compared
    with the last answer. If that was taken away, it is looked for: each block of 256 has its
    own largest (or smallest), which is put right where something has changed.
    """

    def __init__(self, leaves: Array, better: Any, empty: float) -> None:
        self._leaves, self._blocks = leaves, leaves.reshape(-1, _BLOCK)
        self._better, self._empty = better, empty
        self._best = methodcaller("argmax" if better is np.maximum else "argmin")
        self._bounds = np.full(len(self._blocks), empty)
        self._stale = np.zeros(len(self._blocks), bool)
        self.reset()

    def reset(self) -> None:
        """All priorities are 0."""
        self._bounds[:] = self._empty
        self._stale[:] = False
        self._noted: list[Array] = []
        self._index, self._value = 0, self._empty

    def note(self, indices: Array) -> None:
        """Those have changed."""
        self._noted.append(indices)
        if len(self._noted) >= _WAITING:
            self._look()

    def exact(self) -> float:
        if self._noted:
            self._look()
        if self._index < 0:
            self._search()
        return self._value

    def _look(self) -> None:
        """Compare what has changed with the last answer."""
        changed = self._noted[0] if len(self._noted) == 1 else np.concatenate(self._noted)
        self._noted = []
        self._stale[changed >> 2 * SHIFT] = True
        if self._index < 0:
            return
        values = self._counted(self._leaves.take(changed))
        at = int(self._best(values))
        value = values.item(at)
        if value == self._value or (value > self._value) is (self._empty == 0.0):
            self._index, self._value = changed.item(at), value
        elif self._leaves.item(self._index) != self._value:
            self._index = -1  # it was taken away, and nothing as good has come

    def _search(self) -> None:
        which = np.flatnonzero(self._stale)
        self._bounds[which] = self._better.reduce(self._counted(self._blocks[which]), axis=1)
        self._stale[which] = False
        block = int(self._best(self._bounds))
        self._value = self._bounds.item(block)
        place = int(self._best(self._counted(self._blocks[block])))
        self._index = block * _BLOCK + place

    def _counted(self, values: Array) -> Array:
        """Of the smallest: 0 means that nothing is there."""
        if self._empty > 0.0 and np.count_nonzero(values) < values.size:
            return np.where(values > 0.0, values, self._empty)
        return values


# -- by compiled loops -----------------------------------------------------------------------------


def sum_tree(capacity: int) -> SumTree:
    """The fastest that can be had here."""
    loops = compiled_loops()
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
        return float(self._summary[TOTAL])

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
        return float(self._summary[LARGEST])

    def min_positive(self) -> float:
        return float(self._summary[SMALLEST])

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


def draw_leaves(
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


def put_leaves(
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
