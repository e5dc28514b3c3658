"""Actors act and send unrolls; learners learn from them as they arrive.

    actor 0   envs ─► unroll ─┐                    ┌─► learner 0: V-trace, gradient ─┐
    actor 1   envs ─► unroll ─┼─ bounded channels ─┤                               sum ─► step
    actor 2   envs ─► unroll ─┘                    └─► learner 1: V-trace, gradient ─┘
       ▲                                                     │
       └──────────────── newest weights ─────────────────────┘

Who holds what: learners hold equal weights and optimisers (checked every so often), actors copies
of the weights that may be some versions old. What moves: every unroll once, into memory that its
learner reads; the weights once an update, pulled by whoever wants them. Asynchronous: unrolls are
taken in order of arrival, so a slow actor keeps nobody waiting; the lag of each is known, logged,
and bounded by max_lag. It wins when acting is slow or uneven; its price is data older than the
policy.

Each actor sends to the learners in turn, so that all get the same mixture; where one stays full,
to the next. All learners take the same number of unrolls an update: two learners are one with twice
the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands import seeding
from manyhands.algorithms.impala import IMPALA
from manyhands.collect.unroll import Unroll, joined
from manyhands.engines.base import Channel
from manyhands.strategies.allreduce import CHECK_EVERY
from manyhands.strategies.context import Context, Part
from manyhands.strategies.experience import unroll_collector
from manyhands.strategies.messages import Inbox, Weights, channel_to, goodbye, send
from manyhands.strategies.progress import RunProgress


def run(context: Context, progress: RunProgress) -> None:
    part(context, progress).run()


def part(context: Context, progress: RunProgress) -> Part:
    return Actor(context) if context.part.role == "actor" else Learner(context, progress)


def channels(context: Context) -> list[Channel]:
    """One for each learner, which reads it."""
    return [channel_to(context, rank) for rank in context.roles.ranks("learner")]


class Actor(Part):
    """Plays with the newest weights, and sends what it has played."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._weights, self._outboxes = Weights(context), channels(context)
        self._weights.pull()
        self.stepper = self._collector = unroll_collector(context)
        self._sent = context.part.rank  # so that actors do not all begin with the same learner

    def goes_on(self) -> bool:
        return not self.context.stop

    def update(self) -> None:
        context, collector, outboxes = self.context, self._collector, self._outboxes
        with context.phases("rollout"):
            unrolls = collector.take(context.algorithm.version)
        steps = int(collector.valid_steps)
        for unroll in unrolls:
            done, collector.finished = collector.finished, []
            turn = self._sent % len(outboxes)
            next_one, others = outboxes[turn], [*outboxes[turn + 1 :], *outboxes[:turn]]
            send(context, next_one, unroll, steps=steps, episodes=done, otherwise=others)
            self._sent, steps = self._sent + 1, 0
        collector.carry(steps)
        self._weights.pull()

    def close(self) -> None:
        goodbye(self.context, *self._outboxes)


class Learner(Part):
    """Learns from unrolls as they arrive, in step with the other learners."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        self._weights, self._replay = Weights(context), UnrollReplay(context)
        self._inbox = Inbox(context, channels(context)[context.part.rank], context.acting)
        self._deserted = False  # whether the actors have left on their own
        progress.begin()
        self._weights.publish()

    def goes_on(self) -> bool:
        return self.progress.goes_on() and not self._deserted

    def update(self) -> None:
        """One update; none where the actors have left before there was enough for one."""
        context, progress, algorithm = self.context, self.progress, self.context.algorithm
        assert isinstance(algorithm, IMPALA)
        new = fresh(progress, self._inbox, self._replay.fresh_share)
        missing = len(new) < self._replay.fresh_share
        self._deserted = missing if context.group is None else context.group.any(missing)
        if self._deserted:
            return
        unrolls = self._replay.mixed_with(new, progress)
        with context.phases("optimisation"):
            batch = algorithm.prepare_unroll(joined(unrolls))
            info = algorithm.update(batch, context.across, progress.fraction)
        self._weights.publish()
        progress.close_update(info, inbox=self._inbox)
        if algorithm.version % CHECK_EVERY == 0:
            context.check_equal("learners")

    def close(self) -> None:
        self.context.stop = True
        self._weights.publish()
        self.progress.late = len(self._inbox.drain())  # played, and not learned from
        self.progress.all_left(self._inbox)


def fresh(progress: RunProgress, inbox: Inbox, count: int) -> list[Unroll]:
    """The next unrolls that are not too old, in order of arrival; fewer where all have left."""
    found: list[Unroll] = []
    while len(found) < count and not inbox.all_left:
        message = inbox.get()
        if message is not None and progress.accept(message):
            found.append(message)
    return found


class UnrollReplay:
    """A few recent unrolls to learn from once more; never ones that are older than max_lag."""

    def __init__(self, context: Context) -> None:
        run, options = context.experiment.run, context.experiment.options
        learners = max(1, len(context.roles.ranks("learner")))
        share = run.unrolls_per_update // learners
        self._size, self._max_lag = int(options.replay), run.max_lag
        self._old_share = round(share * options.replay_share) if self._size else 0
        self._old_share = min(self._old_share, share - 1)  # something new in every update
        self.fresh_share = share - self._old_share
        self._kept: list[Unroll] = []
        self._rng: np.random.Generator = seeding.generator(run.seed, "replay", context.rank)

    def mixed_with(self, new: list[Unroll], progress: RunProgress) -> list[Unroll]:
        if not self._size:
            return new
        self._kept = [u for u in self._kept if progress.lag(int(u["version"])) <= self._max_lag]
        count = min(self._old_share, len(self._kept))
        chosen = self._rng.permutation(len(self._kept))[:count]
        old = [self._kept[int(i)] for i in chosen]
        for unroll in old:
            progress.learned(progress.lag(int(unroll["version"])))
        self._kept = [*self._kept, *new][-self._size :]
        return [*new, *old]

    def state(self) -> dict[str, Any]:
        return {"kept": self._kept, "chance": self._rng.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self._kept = list(state["kept"])
        self._rng.bit_generator.state = state["chance"]
