"""Who acts, who learns, what moves between them: one flat program each."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.strategies import (
    actor_learner,
    allreduce,
    apex,
    gather,
    gradient_server,
    single,
)
from manyhands.strategies.context import Context
from manyhands.strategies.progress import RunProgress

# On every worker, in its role.
Program = Callable[[Context, RunProgress], None]
PROGRAMS: dict[str, Program] = {
    "single": single.run,
    "gather": gather.run,
    "allreduce": allreduce.run,
    "gradient_server": gradient_server.run,
    "actor_learner": actor_learner.run,
    "apex": apex.run,
}

__all__ = ["PROGRAMS", "Context", "Program", "RunProgress"]
