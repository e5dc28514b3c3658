"""Which rows to draw: uniformly, or in proportion to priority, over one ring or many as if one.

    PAPER (prioritized replay, arXiv:1511.05952):
    p_i = (|δ_i| + ε)^α      P(i) = p_i / Σ p      w_i = (N · P(i))^-β / max_j w_j

The maximum is over all rows that are there, not over the batch, so w_i = (p_i / min_j p_j)^-β: the
number of rows and the sum of priorities cancel out.

An id names a row for ever: the number of its ring, and its ticket there (see ring.py). A sampler
belongs to one thread at a time; rings may be written by other processes all the while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from manyhands.engines.base import Patience
from manyhands.errors import CollectiveError, ConfigError
from manyhands.replay.ring import Ring
from manyhands.replay.sum_tree import sum_tree
from manyhands.trees import Array, Tree

_SHIFT = 44  # bits of an id that hold the ticket
_TICKET = (1 << _SHIFT) - 1
_ATTEMPTS = 50  # times that rows lost to a writer are replaced before we say that it is too fast


class EmptyError(ConfigError):
    """There is nothing to draw from."""

    def __init__(self) -> None:
        super().__init__("replay: it is empty, so nothing can be drawn")


@dataclass
class Batch:
    """What was drawn. `ids` go back with the new priorities."""

    rows: Tree  # nested dict of arrays [B, ...]
    ids: Array  # [B] int64
    weights: Array  # [B] float32: importance weights, at most 1; all 1 where drawn uniformly
    probabilities: Array  # [B] float64: of each draw


class Draw(NamedTuple):
    """Rows picked but not yet copied, those of one ring side by side."""

    ids: Array
    weights: Array
    probabilities: Array


class Uniform:
    """Every row alike."""

    prioritized = False

    def __init__(self, rings: Sequence[Ring], seed: int | None = 0) -> None:
        self.rings = list(rings)
        self._generator = np.random.default_rng(seed)
        self._ones = np.ones(0, np.float32)
        self.counters = {"redrawn": 0}

    def take_in(self) -> None:
        """Nothing to do: what is there is read off the rings at every draw."""

    def draw(self, count: int, beta: float = 0.0) -> Draw:
        if len(self.rings) == 1:
            ring = self.rings[0]
            first = ring.first
            total = ring.written - first
            numbers = self._up_to(total, count)
            ids = numbers.astype(np.int64)
            ids += first
        else:
            firsts = np.array([ring.first for ring in self.rings])
            sizes = np.maximum([ring.written for ring in self.rings] - firsts, 0)
            ends = sizes.cumsum()
            total = ends.item(-1)
            numbers = self._up_to(total, count)
            numbers.sort()  # those of one ring side by side
            ids = numbers.astype(np.int64)
            which = ends.searchsorted(ids, "right")
            ids += (firsts - (ends - sizes))[which] + (which << _SHIFT)
        numbers.fill(1.0 / total)
        if len(self._ones) < count:
            self._ones = np.ones(count, np.float32)
        return Draw(ids, self._ones[:count].copy(), numbers)

    def _up_to(self, total: int, count: int) -> Array:
        if total < 1:
            raise EmptyError
        # Half the price of `integers`; the product is below the total also when it is rounded.
        numbers: Array = self._generator.random(count)
        numbers *= total
        return numbers

    def forget(self, ids: Array) -> None:
        """Those rows are gone."""
        self.counters["redrawn"] += len(ids)

    def update(self, ids: Array, priorities: Array) -> int:
        raise ConfigError("replay: it draws uniformly and keeps no priorities")

    def state(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state, "counters": dict(self.counters)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]
        self.counters.update({k: int(v) for k, v in state["counters"].items()})


class Proportional:
    """In proportion to priority, one draw from each of B equal parts of the total (stratified).

    The tree over all rings is here, with the one who draws. What a writer has appended is taken
    in by looking at its ring's counters: appending never waits, and an update of priorities is a
    local affair.
    """

    prioritized = True

    def __init__(
        self, rings: Sequence[Ring], alpha: float = 0.6, eps: float = 0.01, seed: int | None = 0
    ) -> None:
        if not (alpha >= 0.0 and eps >= 0.0):
            raise ConfigError(f"replay: alpha {alpha} and eps {eps} must be 0 or more")
        self.rings, self.alpha, self.eps = list(rings), alpha, eps
        self._generator = np.random.default_rng(seed)
        self._capacities = np.array([ring.capacity for ring in rings])
        self._offsets = np.cumsum([0, *self._capacities[:-1]])
        self.tree = sum_tree(int(self._capacities.sum()))
        self._tickets = np.full(self.tree.capacity, -1, np.int64)  # of the row each leaf stands for
        self._seen = [0] * len(self.rings)
        self._floors = [0] * len(self.rings)
        self.counters = {"redrawn": 0, "stale_updates": 0, "uniform_draws": 0}

    # -- what writers did ----------------------------------------------------------------------

    def take_in(self) -> None:
        """Enter what has been appended since the last call, and strike out what was cleared."""
        leaves, tickets, given = [], [], []
        for k, ring in enumerate(self.rings):
            written, seen = ring.written, self._seen[k]
            floor = ring.floor
            if floor > self._floors[k]:
                self._strike_out(k, floor)
            if written > seen:
                new, priorities = ring.given(seen, written)
                leaves.append(int(self._offsets[k]) + new % ring.capacity)
                tickets.append(new)
                given.append(priorities)
                self._seen[k] = written
        if leaves:
            self._enter(_joined(leaves), _joined(tickets), _joined(given))

    def _enter(self, leaves: Array, tickets: Array, given: Array) -> None:
        given = np.abs(given)
        unknown = np.isnan(given)
        if not unknown.any():
            self.tree.put(leaves, self._power(given))
        else:
            before = self.tree.max()
            self.tree.put(leaves, np.where(unknown, 0.0, self._power(given)))
            # A new row without a priority gets the largest of those that are there now.
            largest = self.tree.max() or before or 1.0
            which = leaves[unknown]
            self.tree.put(which, np.full(len(which), largest))
        self._tickets[leaves] = tickets

    def _strike_out(self, k: int, floor: int) -> None:
        self._floors[k] = floor
        start = int(self._offsets[k])
        mine = self._tickets[start : start + int(self._capacities[k])]
        gone = np.flatnonzero((mine >= 0) & (mine < floor)) + start
        self.tree.put(gone, np.zeros(len(gone)))
        self._tickets[gone] = -1

    def _power(self, priorities: Array) -> Array:
        """(|δ| + ε)^α of absolute errors."""
        raised: Array = priorities + self.eps
        if self.alpha <= 1.0:
            raised **= self.alpha
            return raised
        with np.errstate(over="ignore"):
            raised **= self.alpha
        if np.isinf(raised).any():
            raise ConfigError(f"replay: a TD error to the power of alpha {self.alpha} is too large")
        return raised

    # -- drawing -------------------------------------------------------------------------------

    def draw(self, count: int, beta: float = 0.4) -> Draw:
        if self.tree.total > 0.0:
            leaves, weights, chances = self.tree.draw(self._generator.random(count), beta)
            return Draw(self._ids(leaves), weights, chances)
        there = np.flatnonzero(self._tickets >= 0)
        if not len(there):
            raise EmptyError
        # All priorities are 0: none stands out, so each is drawn alike. It is counted.
        self.counters["uniform_draws"] += count
        leaves = there[np.sort(self._generator.integers(0, len(there), count))]
        return Draw(self._ids(leaves), np.ones(count, np.float32), np.full(count, 1.0 / len(there)))

    def _ids(self, leaves: Array) -> Array:
        tickets = self._tickets.take(leaves)
        if len(self.rings) > 1:
            tickets += (self._offsets.searchsorted(leaves, "right") - 1) << _SHIFT
        return tickets

    def forget(self, ids: Array) -> None:
        """Those rows are gone: never draw them again."""
        self.counters["redrawn"] += len(ids)
        leaves, tickets = self._leaves(ids)
        gone = leaves[self._tickets[leaves] == tickets]
        self.tree.put(gone, np.zeros(len(gone)))
        self._tickets[gone] = -1

    def update(self, ids: Array, priorities: Array) -> int:
        """Give rows new priorities (TD errors); how many came too late, and were dropped."""
        # A copy: somebody's ids may be every second of an array, or not to be written to, and the
        # compiled tree takes neither.
        ids, priorities = np.array(ids, np.int64), np.asarray(priorities, np.float64)
        if ids.ndim != 1 or priorities.ndim != 1:
            ids, priorities = ids.reshape(-1), priorities.reshape(-1)
        if len(ids) != len(priorities):
            raise ConfigError(f"replay: {len(ids)} ids, but {len(priorities)} priorities")
        priorities = np.abs(priorities)
        if np.count_nonzero(priorities < np.inf) < len(ids):  # NaN fails too
            raise ConfigError("replay: a priority (TD error) is not a finite number")
        self.take_in()  # a slot that was overwritten belongs to its new row from here on
        leaves, tickets = self._leaves(ids)
        stale = self.tree.put_where(self._tickets, tickets, leaves, self._power(priorities))
        self.counters["stale_updates"] += stale
        return stale

    def _leaves(self, ids: Array) -> tuple[Array, Array]:
        """Where those rows would stand in the tree, and their tickets."""
        if len(self.rings) == 1:
            return ids % self.tree.capacity, ids
        rings, tickets = ids >> _SHIFT, ids & _TICKET
        try:
            return self._offsets.take(rings) + tickets % self._capacities.take(rings), tickets
        except IndexError:
            raise ConfigError("replay: these are not ids that this replay has given out") from None

    # -- for checkpoints -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "generator": self._generator.bit_generator.state,
            "priorities": self.tree.values.copy(),
            "tickets": self._tickets.copy(),
            "seen": list(self._seen),
            "floors": list(self._floors),
            "counters": dict(self.counters),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The rings' own states must have been loaded before."""
        priorities = np.asarray(state["priorities"], np.float64)
        if len(priorities) != self.tree.capacity:
            raise ConfigError(
                f"replay of {self.tree.capacity} rows cannot take a state of {len(priorities)}"
            )
        self._generator.bit_generator.state = state["generator"]
        self.tree.clear()
        self.tree.set(np.arange(len(priorities)), priorities)
        self._tickets[:] = state["tickets"]
        self._seen = [int(n) for n in state["seen"]]
        self._floors = [0] * len(self.rings)  # what is not in the rings is struck out
        self.counters.update({k: int(v) for k, v in state["counters"].items()})


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def copy_rows(rings: Sequence[Ring], ids: Array) -> tuple[list[Array], Array]:
    """The rows of those ids, and which of them are whole. Ids of one ring stand side by side."""
    if len(rings) == 1:
        return rings[0].read(ids)
    out = rings[0].room(len(ids))
    whole = np.empty(len(ids), bool)
    starts = (ids >> _SHIFT).searchsorted(np.arange(len(rings) + 1))
    for ring, start, end in zip(rings, starts[:-1], starts[1:], strict=True):
        if end > start:
            part = slice(int(start), int(end))
            _, whole[part] = ring.read(ids[part] & _TICKET, [column[part] for column in out])
    return out, whole


def assemble(sampler: Uniform | Proportional, draw: Draw, beta: float, lock: Any = None) -> Batch:
    """Copy what was drawn. Rows that a writer took back meanwhile are replaced by other draws.

    `lock` guards the sampler, and is not held while rows are copied.
    """
    out, whole = copy_rows(sampler.rings, draw.ids)
    for _ in range(_ATTEMPTS):
        if np.count_nonzero(whole) == len(whole):
            rows = sampler.rings[0].tree(out)
            return Batch(rows, draw.ids, draw.weights, draw.probabilities)
        lost = np.flatnonzero(~whole)
        with lock or _NO_LOCK:
            sampler.forget(draw.ids[lost])
            sampler.take_in()
            again = sampler.draw(len(lost), beta)
        for all_of_them, new in zip(draw, again, strict=True):
            all_of_them[lost] = new
        columns, whole_again = copy_rows(sampler.rings, again.ids)
        for column, new in zip(out, columns, strict=True):
            column[lost] = new
        whole[lost] = whole_again
    raise ConfigError(
        "replay: rows are overwritten faster than they can be copied; give it a larger capacity"
    )


class _NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NO_LOCK = _NoLock()


# -- ahead of time ---------------------------------------------------------------------------------


class Prefetcher:
    """Keeps up to `depth` results of `make` ready.

    `make(stopped)` gives the next result; it may wait, but returns soon after `stopped()` is True.
    The thread starts with the first `take`. What it raises is raised by the next `take`.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Any], depth: int) -> None:
        self._make, self._depth = make, depth
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        self._era = 0  # what was begun before a `discard` is thrown away
        self._thread: threading.Thread | None = None

    def take(self, doing: str, on: str, timeout: float) -> Any:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
                self._thread.start()
            patience = Patience(timeout)
            while not (self._ready or self._error or self._stopped or patience.over):
                # In slices: a deadline of the kernel's would be over when a machine wakes up again.
                self._changed.wait(min(patience.left, Patience.LONGEST_LOOK))
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise CollectiveError(
                f"{doing}: it is closed"
                if self._stopped
                else f"{doing}: waited {timeout:.1f} s for {on}"
            )

    def discard(self) -> None:
        """Throw away what is ready and what is being made."""
        with self._changed:
            self._ready.clear()
            self._era += 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout or None)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    # Given up only by `close`: this thread may wait as long as nobody takes.
                    self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                    era = self._era
                if self._stopped:
                    return
                made = self._make(lambda: self._stopped)
                with self._changed:
                    if era == self._era and made is not None:
                        self._ready.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # told to whoever takes next
            with self._changed:
                self._error = error
                self._changed.notify_all()
