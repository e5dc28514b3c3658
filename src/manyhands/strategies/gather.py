"""Every worker acts; the main worker learns from all rows and sends the weights back.

    worker 0   envs ─► rows ─┐
    worker 1   envs ─► rows ─┼─ gather ─► main: update ─► weights to all
    worker 2   envs ─► rows ─┘

Who holds what: the optimiser is on the main worker; weights on all, the same while acting.
What moves: every row once, the weights once an update. Synchronous, no staleness. It wins when
minibatches are many and observations small; its limit is the one worker that learns.

With overlap nobody waits for that one: it only learns, while the others collect the next batch
with the weights that it starts from. Rows are then exactly one update old when they are learned
from, and the run still repeats to the bit.

    main       ── learn batch k−1 ──┐   ┌── learn batch k ──────┐
    worker 1   ── collect batch k ──┼─ gather, weights to all ──┼─ ...
    worker 2   ── collect batch k ──┘   └── collect batch k+1 ──┘
"""

from __future__ import annotations

from typing import Any

from manyhands.algorithms.base import Alone, recentred
from manyhands.collect.rollout import Collector, Rollout
from manyhands.policy import build_normaliser
from manyhands.strategies.context import Context
from manyhands.strategies.experience import rollout_collector
from manyhands.strategies.progress import EveryWorker, RunProgress
from manyhands.trees import take
from manyhands.types import Batch


def run(context: Context, progress: RunProgress) -> None:
    if context.experiment.run.overlap:
        return overlapped(context, progress)
    collector = rollout_collector(context)
    algorithm, group, alone = context.algorithm, context.worker.group, Alone()
    progress.begin(EveryWorker(context, collector))
    while progress.goes_on():
        with context.phases("synchronisation"):
            context.share_weights()
        with context.phases("rollout"):
            rollout = collector.collect()
            batch = algorithm.prepare(rollout)
        with context.phases("synchronisation"):
            rows = group.gather(batch)
        info = {}
        if rows is not None:
            with context.phases("optimisation"):
                info = algorithm.update(rows, alone, progress.fraction)
        progress.close_update(info, rollout)
    context.share_weights()


def overlapped(context: Context, progress: RunProgress) -> None:
    collector = rollout_collector(context)
    algorithm, group = context.algorithm, context.worker.group
    keeper = EveryWorker(context, collector)
    progress.begin(keeper)
    waiting = _Waiting(context, keeper)
    no_rows = None if context.acts else _no_rows(context, collector)
    while progress.goes_on():
        with context.phases("synchronisation"):
            context.share_weights()
        rollout: Rollout | None = None
        version, info = algorithm.version, {}
        learned = waiting.there
        if no_rows is None:
            with context.phases("rollout"):
                rollout = collector.collect()
                batch = algorithm.prepare(rollout)
        else:
            batch, info = no_rows, waiting.learn(progress.fraction)
        with context.phases("synchronisation"):
            rows = group.gather(batch)
        waiting.take(rows, version)
        progress.close_update(info, rollout, learned=learned)
    if not progress.stopped and waiting.there:
        progress.close_update(waiting.learn(progress.fraction))
    context.share_weights()


class _Waiting:
    """The batch that has been gathered and not yet learned from. Rows are on the main worker only,
    but all workers know whether there is one."""

    def __init__(self, context: Context, keeper: EveryWorker) -> None:
        self._context = context
        self._rows: Batch | None = None
        self.version = -1  # of the policy that made it
        self.there = False
        keeper.extra = self._state
        if keeper.loaded is not None:
            self._rows, self.there = keeper.loaded["rows"], keeper.loaded["there"]
            self.version = keeper.loaded["version"]

    def take(self, rows: Batch | None, version: int) -> None:
        self._rows, self.version, self.there = rows, version, True

    def learn(self, fraction: float) -> dict[str, float]:
        rows, self._rows, algorithm = self._rows, None, self._context.algorithm
        self.there = False
        if rows is None:
            return {}
        with self._context.phases("optimisation"):
            lag = float(algorithm.version - self.version)
            rows = recentred(rows, algorithm.actor) if lag else rows
            return algorithm.update(rows, Alone(), fraction) | {"lag": lag}

    def _state(self) -> dict[str, Any]:
        return {"rows": self._rows, "there": self.there, "version": self.version}


def _no_rows(context: Context, collector: Any) -> Batch:
    """The main worker's part of every batch: the right columns, and none of them filled."""
    normaliser = build_normaliser(context.experiment, collector.envs.observation_space)
    actor = context.algorithm.actor
    probe = Collector(collector.envs, actor, 1, collector.noise, normaliser)
    return take(context.algorithm.prepare(probe.collect()), slice(0, 0))
