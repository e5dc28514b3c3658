"""The seam over a group of workers."""

from __future__ import annotations

from typing import Any

from manyhands.engines.group import Group
from manyhands.experiment.timing import Phases


class OverGroup:
    """Sums and moments over the rows of all workers; the time it takes is `synchronisation`."""

    def __init__(self, group: Group, phases: Phases) -> None:
        self._group, self._phases = group, phases

    def sum(self, x: Any) -> Any:
        with self._phases("synchronisation"):
            return self._group.sum(x)

    def moments(self, x: Any) -> tuple[float, float, int]:
        with self._phases("synchronisation"):
            return self._group.moments(x)

    def place(self, rows: int) -> tuple[int, int]:
        with self._phases("synchronisation"):
            counts = self._group.exchange(rows)
        return sum(counts[: self._group.rank]), sum(counts)
