"""How often rows are drawn for each row added, held between two bounds.

    surplus = samples_per_insert · inserted - sampled

    the learner may draw B rows while   surplus - B >= samples_per_insert · min_size - error_buffer
    actors may add rows while           surplus     <  samples_per_insert · min_size + error_buffer

A learner that is too fast for its actors waits, and so do actors that are too fast for the learner:
what is learned does not depend on which of them has the faster machine.

The learner alone does the sum. What actors may still add is written into the header of each
shard, in equal parts, whenever the learner looks; an actor reads its own and asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.engines.base import Patience, Roster
from manyhands.errors import CollectiveError, ConfigError
from manyhands.replay.ring import Ring

# (is it there, doing what, waiting for what, seconds): returns, or raises at the deadline
Wait = Callable[[Callable[[], bool], str, str, float], None]


def wait_for(
    ready: Callable[[], bool], doing: str, on: str, timeout: float, roster: Roster | None = None
) -> None:
    """Wait by looking again and again, with longer and longer breaks; 0 seconds: for ever."""
    patience = Patience(timeout)
    while not ready():
        if not patience.pause():
            continue
        if roster is not None:
            roster.raise_if_gone([], doing)  # the run was given up
        if patience.over:
            raise CollectiveError(f"{doing}: waited {patience.waited:.1f} s for {on}")


def wait_of(worker: Any) -> Wait:
    """How to wait on the engine of that `Parallel` or worker.

    Inline has a way of its own: whoever waits hands the baton on. Elsewhere a wait ends early when
    the run has been given up.
    """
    worker = getattr(worker, "worker", worker)
    own: Wait | None = getattr(worker, "wait", None)
    if own is not None:
        return own
    roster = worker.group.transport.roster
    return lambda ready, doing, on, timeout: wait_for(ready, doing, on, timeout, roster)


@dataclass(frozen=True)
class RateLimit:
    """Bounds on samples per insert.

    Args:
        samples_per_insert: how often each row is drawn, on average.
        min_size: rows that must be there before the first is drawn.
        error_buffer: how many samples either side may be ahead; None: the larger of one batch and
            a tenth of `samples_per_insert · min_size`.
    """

    samples_per_insert: float
    min_size: int = 1
    error_buffer: float | None = None


class Pace:
    """The learner's count of what was added and drawn; without a limit, only the count."""

    def __init__(self, limit: RateLimit | None, batch_size: int, rings: Sequence[Ring]) -> None:
        self._rings, self._batch = list(rings), batch_size
        self.sampled = 0
        self.min_size = 1 if limit is None else limit.min_size
        self._ratio = 0.0
        if limit is not None:
            self._ratio = limit.samples_per_insert
            centre = self._ratio * limit.min_size
            slack = limit.error_buffer
            slack = max(batch_size, 0.1 * centre) if slack is None else slack
            self._check(limit, slack)
            self._low, self._high = centre - slack, centre + slack

    def _check(self, limit: RateLimit, slack: float) -> None:
        capacity = sum(ring.capacity for ring in self._rings)
        if not limit.samples_per_insert > 0.0:
            raise ConfigError(f"samples_per_insert {limit.samples_per_insert} must be above 0")
        if not 1 <= limit.min_size <= capacity:
            raise ConfigError(f"min_size {limit.min_size} does not fit a replay of {capacity} rows")
        if 2 * slack < self._batch:
            raise ConfigError(
                f"error_buffer {slack:g} is too small for batches of {self._batch}: the learner "
                f"would wait for the actors and they for it; give at least {self._batch / 2:g}"
            )

    @property
    def inserted(self) -> int:
        return sum(ring.written for ring in self._rings)

    @property
    def surplus(self) -> float:
        return self._ratio * self.inserted - self.sampled

    def may_sample(self) -> bool:
        """Whether a batch may be drawn now; tells the actors how far they may go meanwhile."""
        self.publish()
        if sum(ring.size for ring in self._rings) < self.min_size:
            return False
        return not self._ratio or self.surplus - self._batch >= self._low

    def count(self, rows: int) -> None:
        self.sampled += rows
        self.publish()

    def lift(self) -> None:
        """No bound from here on: nobody is kept waiting for a learner that has stopped."""
        self._ratio = 0.0
        for ring in self._rings:
            ring.allow(None)

    def publish(self) -> None:
        if not self._ratio:
            return
        rows = (self._high - self.surplus) / self._ratio
        # Rounded up: where there is room at all, each actor may add a row.
        share = max(int(-(-rows // len(self._rings))), 0)
        for ring in self._rings:
            ring.allow(ring.written + share)
