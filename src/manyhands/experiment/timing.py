"""Where the time of a run went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class Phases:
    """Wall time by name: `with phases("rollout"): ...`, about half a microsecond each.

    A phase inside another is taken out of the outer one, so that the totals never count a second
    twice and add up to the time spent in any phase.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._open: list[_Phase] = []
        self._mark = 0.0  # up to here, time has been given to a phase

    def __call__(self, name: str) -> _Phase:
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self)
        return phase

    def totals(self) -> dict[str, float]:
        """Seconds by name, the phases that are still open included."""
        if self._open:
            self._give_time(time.perf_counter())
        return {name: phase.seconds for name, phase in self._phases.items()}

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self(name).seconds += seconds

    def _give_time(self, now: float) -> None:
        self._open[-1].seconds += now - self._mark
        self._mark = now


class _Phase:
    """One name's total; entered and left any number of times, itself nested included."""

    __slots__ = ("_owner", "seconds")

    def __init__(self, owner: Phases) -> None:
        self._owner = owner
        self.seconds = 0.0

    def __enter__(self) -> None:
        owner, now = self._owner, time.perf_counter()
        if owner._open:
            owner._open[-1].seconds += now - owner._mark
        owner._open.append(self)
        owner._mark = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        owner, now = self._owner, time.perf_counter()
        self.seconds += now - owner._mark
        owner._open.pop()
        owner._mark = now


def shares(totals: Mapping[str, float], wall_seconds: float) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of the wall time), the longest first; what is left comes last."""
    rows: list[tuple[str, float]] = sorted(totals.items(), key=lambda row: -row[1])
    rest = wall_seconds - sum(totals.values())
    if rest > 0.0005 * wall_seconds:
        rows.append(("everything else", rest))
    whole = max(wall_seconds, sum(totals.values())) or 1.0
    return [(name, seconds, seconds / whole) for name, seconds in rows]


def merged(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over workers of each phase: they run side by side, so it compares with wall time."""
    names = dict.fromkeys(name for phases in workers for name in phases)
    return {n: sum(p.get(n, 0.0) for p in workers) / len(workers) for n in names}
