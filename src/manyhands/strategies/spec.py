"""What a strategy is, for everything that asks before torch is loaded.

One row a strategy (registry.py): the command line, its help, the checks, who plays which part, the
batch arithmetic, the table of what runs with what, the docs and the workers all read it. Nobody
else compares names of strategies (tests/unit/test_house.py).

    kind of algorithm   what it is given (`learns_from` of its own row)
    rollout             T steps of each environment, of the newest policy
    unroll              the same, from a policy some updates old
    replay              transitions of any age, drawn from a replay
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from manyhands.roles import Roles

if TYPE_CHECKING:
    from manyhands.algorithms.registry import AlgorithmSpec
    from manyhands.config import Experiment, RunConfig

OK = "ok"
Kind = Literal["rollout", "unroll", "replay"]


def all_alike(run: RunConfig) -> Roles:
    """Every worker does the same."""
    return Roles({"worker": run.workers})


def all_environments(run: RunConfig) -> int:
    """One update learns from rollout_length steps of every environment."""
    return run.num_envs * run.rollout_length


def nobody(run: RunConfig) -> int:
    return 0


def no_faults(experiment: Experiment) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """One strategy. Its program is given by name, so that torch is loaded late."""

    name: str
    """As it is typed after --strategy."""
    about: str
    """One line for the help."""
    program: str
    """package.module:function, which every worker calls with its Context and its RunProgress."""
    part: str = ""
    """The same a piece at a time, for loops of the user's own: makes a `Part` (context.py)."""
    synchronous: bool = True
    """Whether all workers act and count together, so that none is ahead of another."""
    one_worker: bool = False
    """Whether it is for one worker, and so the default of one."""
    default_for: tuple[Kind, ...] = ()
    """The kinds of algorithm whose default it is with several workers."""
    refuses: Mapping[Kind, str] = field(default_factory=dict)
    """Kind of algorithm -> why not; reads on after the algorithm's name."""
    unless: str = ""
    """A switch of an algorithm's row that lifts the refusal."""
    engine_parts: tuple[str, ...] = ()
    """What it needs of an engine besides collectives: rows of `support.PARTS`."""
    options: tuple[str, ...] = ()
    """The fields of RunConfig that are for it, and mean nothing to most others."""
    roles: Callable[[RunConfig], Roles] = all_alike
    """How the workers are divided. Who writes the records is always worker 0."""
    not_acting: Callable[[RunConfig], int] = nobody
    """Workers that step no environment: they learn or serve, and come on top of those that act."""
    restarts: str = ""
    """The role for whose workers nobody waits: one that is killed can be started again."""
    batch: Callable[[RunConfig], int] = all_environments
    """Steps of one update, of all workers together, where whole episodes are not asked for."""
    all_learn: bool = False
    """Whether every worker takes its part of the learning, so that more workers learn faster."""
    faults: Callable[[Experiment], Iterable[str]] = no_faults
    """What can be wrong with a run of it, in plain words, with what to type."""
    on_times: str = ""
    """What a reader of its seconds by phase should know."""

    def load(self) -> Callable[[Any, Any], None]:
        """The program; loads torch."""
        return self._named(self.program)

    def load_part(self) -> Callable[[Any, Any], Any]:
        """What makes one worker's part; loads torch."""
        return self._named(self.part)

    def _named(self, path: str) -> Callable[[Any, Any], Any]:
        module, _, name = path.partition(":")
        found: Callable[[Any, Any], Any] = getattr(importlib.import_module(module), name)
        return found

    def cell(self, algorithm: AlgorithmSpec) -> str:
        """OK, or why not with this algorithm; reads on after the algorithm's name."""
        if self.name in algorithm.refuses:
            return algorithm.refuses[self.name]
        if self.unless and getattr(algorithm, self.unless):
            return OK
        return self.refuses.get(algorithm.learns_from, OK)
