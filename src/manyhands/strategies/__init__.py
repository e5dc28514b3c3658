"""Who acts, who learns, what moves between them: one flat program each."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.strategies import allreduce, gather
from manyhands.strategies.team import Team

# `single` is all-reduce with nobody else: the seam is the identity.
STRATEGIES: dict[str, Callable[[Team], None]] = {
    "single": allreduce.run,
    "gather": gather.run,
    "allreduce": allreduce.run,
}

__all__ = ["STRATEGIES", "Team"]
