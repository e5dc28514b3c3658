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

Where the run is to outlive its workers (on_worker_failure), or not to wait for the slowest
(wait_for), rows come through a channel: nobody is met by name. The main worker only learns, so that
no environment can hurt it. It learns once all that are there have answered to its weights, or that
share of the rows has come. What comes later is in the next batch, with the version of its policy.

    worker 1   ── collect ─► rows of version k ─────┐                     ┌─ version k + 1
    worker 2   ── collect ──────── late ────────────┼─ channel ─► main: update
    worker 3   ── killed, started again ────────────┘                     └─ version k + 1
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from manyhands import trees
from manyhands.algorithms.base import Alone, recentred
from manyhands.collect.rollout import Collector, Rollout
from manyhands.policy import build_normaliser
from manyhands.strategies.context import Context, Part
from manyhands.strategies.experience import rollout_collector
from manyhands.strategies.messages import Inbox, Message, Weights, channel_to, goodbye, send
from manyhands.strategies.progress import EveryWorker, RunProgress
from manyhands.trees import take
from manyhands.types import Batch


def run(context: Context, progress: RunProgress) -> None:
    if context.experiment.run.overlap:
        return overlapped(context, progress)
    if context.experiment.run.elastic:
        return (Learns(context, progress) if context.is_main else Acts(context)).run()
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


# -- where workers may fail, or be late ------------------------------------------------------------

# Seconds. A worker that hangs is found a little after the deadline of waits (engines/recovery.py):
# whoever waits for it waits longer than that, and whoever waits for the main worker longer still.
_FOUND = 15.0


class Acts(Part):
    """Plays one rollout with each version of the weights that it sees, and sends it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._weights, self._outbox = Weights(context), channel_to(context, 0)
        self._weights.pull()
        envs, noise = context.make_envs()
        length, actor = context.experiment.run.rollout_length, context.algorithm.actor
        self.stepper = self._collector = Collector(envs, actor, length, noise, context.normaliser)

    def goes_on(self) -> bool:
        return not self.context.stop

    def update(self) -> None:
        context = self.context
        with context.phases("rollout"):
            rollout = self._collector.take()
            load: Message = {"rows": context.algorithm.prepare(rollout)}
        load["version"] = context.algorithm.version
        send(context, self._outbox, load, steps=rollout.steps, episodes=rollout.episodes)
        with context.phases("synchronisation"):
            longer = 2 * _FOUND + context.worker.timeout
            self._weights.pull(wait_for_newer=True, more=longer)

    def close(self) -> None:
        goodbye(self.context, self._outbox)


class Learns(Part):
    """Learns from whatever has come by the time that it need not wait any more."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress, run = context, progress, context.experiment.run
        self._weights = Weights(context)
        self._inbox = Inbox(context, channel_to(context, 0), context.acting)
        self._enough = math.ceil(run.wait_for * len(context.acting) - 1e-9)  # rollouts
        self._heard: set[int] = set()  # who has ever sent something
        self._away: set[int] = set()  # who was seen to be gone, and has not sent anything since
        progress.begin()
        self._weights.publish()

    def goes_on(self) -> bool:
        return self.progress.goes_on() and not self._inbox.all_left

    def update(self) -> None:
        """One update; none where everybody has left."""
        context, progress, algorithm = self.context, self.progress, self.context.algorithm
        messages = self._batch()
        if not messages:
            return
        with context.phases("optimisation"):
            rows = _joined(messages)
            if any(int(m["version"]) < algorithm.version for m in messages):
                rows = recentred(rows, algorithm.actor)
            info = algorithm.update(rows, Alone(), progress.fraction)
        self._weights.publish()
        progress.close_update(info, inbox=self._inbox)

    def close(self) -> None:
        self.context.stop = True
        self._weights.publish()
        self.progress.late = len(self._inbox.drain())  # played, and not learned from
        self.progress.all_left(self._inbox)

    def _batch(self) -> list[Message]:
        """The messages of this update. Whoever is gone is not waited for."""
        inbox, now = self._inbox, self.context.algorithm.version
        found: list[Message] = []
        answered: set[int] = set()  # to the weights of now

        def ready() -> bool:
            self._look_who_is_gone()
            return bool(found) and not inbox.senders_left - answered - self._away

        while not inbox.all_left:
            if not inbox.waiting and (len(found) >= self._enough or ready()):
                break
            inbox.wait(lambda: ready() or inbox.all_left, "the rows of this update", _FOUND)
            message = inbox.get() if inbox.waiting else None
            if message is None:
                continue
            actor = int(message["actor"])
            self._heard.add(actor)
            self._away.discard(actor)
            if int(message["version"]) == now:
                answered.add(actor)
            if self.progress.accept(message):
                found.append(message)
        return found

    def _look_who_is_gone(self) -> None:
        """What one that is gone has not sent is lost, and counted."""
        gone = (self.context.worker.away() & self._heard) - self._away - self._inbox.left.keys()
        self._away |= gone
        self.progress.lost += len(gone)


def _joined(messages: list[Message]) -> Batch:
    """The rows of all, in order of the workers, whoever came first."""
    parts = [m["rows"] for m in sorted(messages, key=lambda m: (int(m["actor"]), m["number"]))]
    joined: Batch = trees.map(lambda *columns: np.concatenate(columns), *parts)
    return joined
