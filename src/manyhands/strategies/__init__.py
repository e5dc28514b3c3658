"""Who acts, who learns, what moves between them: one flat program each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.experiment.records import Records
from manyhands.strategies import (
    actor_learner,
    allreduce,
    apex,
    gather,
    gradient_server,
    off_policy,
)
from manyhands.strategies.crew import Crew
from manyhands.strategies.team import Team

# Synchronous: all workers do the same. `single` is all-reduce with nobody else: the seam is the
# identity.
STRATEGIES: dict[str, Callable[[Team], None]] = {
    "single": allreduce.run,
    "gather": gather.run,
    "allreduce": allreduce.run,
}

# Over a Crew, each worker in its role: (crew, records, state of a checkpoint) -> "ledger", "times"
# and "table" on the main worker, nothing elsewhere
Program = Callable[[Crew, Records, dict[str, Any] | None], dict[str, Any]]
PROGRAMS: dict[tuple[str, str], Program] = {  # (what the algorithm learns from, strategy)
    ("rollout", "gradient_server"): gradient_server.run,
    ("unroll", "single"): actor_learner.run,
    ("unroll", "actor_learner"): actor_learner.run,
    ("replay", "single"): off_policy.run,
    ("replay", "apex"): apex.run,
}

__all__ = ["PROGRAMS", "STRATEGIES", "Program", "Team"]
