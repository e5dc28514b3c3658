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
from manyhands.algorithms.base import Across, Alone
from manyhands.algorithms.impala import IMPALA
from manyhands.collect.unroll import Unroll, UnrollCollector, joined
from manyhands.engines.base import Channel
from manyhands.experiment.records import Records
from manyhands.strategies.across import OverGroup
from manyhands.strategies.allreduce import CHECK_EVERY
from manyhands.strategies.crew import PARCELS, Crew, Inbox
from manyhands.strategies.ledger import Ledger


def run(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    if crew.experiment.strategy == "single":
        return alone(crew, records, state)
    if crew.part.role == "actor":
        act(crew)
        return {}
    return learn(crew, Ledger(crew, records, crew.group), state)


def channels(crew: Crew) -> list[Channel]:
    """One for each learner, which reads it."""
    capacity = crew.experiment.run.queue
    return [
        crew.worker.channel(f"{PARCELS} {rank}", reader=rank, capacity=capacity)
        for rank in crew.roles.ranks("learner")
    ]


# -- actors ----------------------------------------------------------------------------------------


def act(crew: Crew) -> None:
    outboxes = channels(crew)
    crew.pull()
    collector = collector_of(crew)
    sent = crew.part.rank  # so that actors do not all begin with the same learner
    while not crew.stop:
        with crew.phases("rollout"):
            unrolls = collector.collect(crew.algorithm.version)
        steps = int(collector.valid_steps)
        for unroll in unrolls:
            done, collector.finished = collector.finished, []
            turn = sent % len(outboxes)
            next_one, others = outboxes[turn], [*outboxes[turn + 1 :], *outboxes[:turn]]
            crew.send(next_one, unroll, steps=steps, episodes=done, otherwise=others)
            sent, steps = sent + 1, 0
        collector.carry(steps)
        crew.pull()
    crew.say_bye(*outboxes)


def collector_of(crew: Crew) -> UnrollCollector:
    run, algorithm = crew.experiment.run, crew.algorithm
    envs, noise = crew.make_envs()
    return UnrollCollector(
        envs,
        algorithm.actor,
        run.rollout_length,
        noise,
        crew.normaliser,
        whole_episodes=run.collect == "episodes",
        state_size=getattr(algorithm.model, "state_size", 0),
    )


# -- learners --------------------------------------------------------------------------------------


def learn(crew: Crew, ledger: Ledger, state: dict[str, Any] | None) -> dict[str, Any]:
    algorithm, group = crew.algorithm, ledger.group
    assert isinstance(algorithm, IMPALA)
    across: Across = Alone() if group is None else OverGroup(group, crew.phases)
    inbox = Inbox(crew, channels(crew)[crew.part.rank], crew.acting)
    replay = Replay(crew)
    if state is None:
        ledger.checkpoint()  # of step 0: from here on the run can always be gone on with
    else:
        ledger.restore(state)
    crew.publish()
    while ledger.goes_on():
        unrolls = replay.mixed_with(_fresh(crew, ledger, inbox, replay.fresh_share), ledger)
        with crew.phases("optimisation"):
            batch = algorithm.prepare_unroll(joined(unrolls))
            info = algorithm.update(batch, across, ledger.progress)
        crew.publish()
        ledger.close_update(info, inbox)
        if group is not None and algorithm.version % CHECK_EVERY == 0:
            with crew.phases("synchronisation"):
                group.check_equal("learners", {"weights": algorithm.flat.data})
    return farewell(crew, ledger, inbox)


def _fresh(crew: Crew, ledger: Ledger, inbox: Inbox, count: int) -> list[Unroll]:
    """The next unrolls that are not too old, in order of arrival."""
    found: list[Unroll] = []
    while len(found) < count:
        parcel = inbox.get()
        if parcel is not None and ledger.accept(parcel):
            found.append(parcel)
    return found


def farewell(crew: Crew, ledger: Ledger, inbox: Inbox) -> dict[str, Any]:
    """The word to stop; then everything that is still under way, until all have said good-bye."""
    crew.stop = True
    crew.publish()
    ledger.late = len(inbox.drain())  # played, and not learned from: the run was over
    ledger.gone(inbox)
    times = {rank: dict(last["phases"]) for rank, last in inbox.left.items()}
    mine = [crew.phases.totals()]
    if ledger.group is not None:
        ledger.lost = int(ledger.group.sum(float(ledger.lost)))
        mine = ledger.group.exchange(mine[0])
    everyone = [*mine, *times.values()]
    return {"times": everyone, "table": ledger.table(inbox, times), "ledger": ledger}


class Replay:
    """A few recent unrolls to learn from again; never ones that are older than max_lag."""

    def __init__(self, crew: Crew) -> None:
        run, options = crew.experiment.run, crew.experiment.options
        learners = max(1, len(crew.roles.ranks("learner")))
        share = run.unrolls_per_update // learners
        self._size = int(options.replay)
        self._old_share = round(share * options.replay_share) if self._size else 0
        self._old_share = min(self._old_share, share - 1)  # something new in every update
        self.fresh_share = share - self._old_share
        self._kept: list[Unroll] = []
        self._rng = seeding.generator(run.seed, "replay", crew.rank)

    def mixed_with(self, fresh: list[Unroll], ledger: Ledger) -> list[Unroll]:
        if not self._size:
            return fresh
        oldest = ledger.crew.experiment.run.max_lag
        self._kept = [u for u in self._kept if ledger.lag(int(u["version"])) <= oldest]
        count = min(self._old_share, len(self._kept))
        chosen = self._rng.permutation(len(self._kept))[:count]
        old = [self._kept[int(i)] for i in chosen]
        for unroll in old:
            ledger.learned(ledger.lag(int(unroll["version"])))
        self._kept = [*self._kept, *fresh][-self._size :]
        return [*fresh, *old]


# -- one worker ------------------------------------------------------------------------------------


def alone(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    """Strategy single: the same collector and the same update, in turn. No lag, no channel."""
    algorithm, ledger = crew.algorithm, Ledger(crew, records)
    assert isinstance(algorithm, IMPALA)
    if state is None:
        ledger.checkpoint()
    else:
        ledger.restore(state)
    collector, replay = collector_of(crew), Replay(crew)
    waiting: list[Unroll] = []
    while ledger.goes_on():
        steps = 0
        while len(waiting) < replay.fresh_share:
            with crew.phases("rollout"):
                waiting += collector.collect(algorithm.version)
            steps += int(collector.valid_steps)
        fresh, waiting = waiting[: replay.fresh_share], waiting[replay.fresh_share :]
        done, collector.finished = collector.finished, []
        rows = [[crew.first_env + e.env, e.total_return, e.length, 0] for e in done]
        ledger.taken(steps, np.array(rows, np.float64).reshape(-1, 4))
        for unroll in fresh:
            ledger.learned(ledger.lag(int(unroll["version"])))
        with crew.phases("optimisation"):
            batch = algorithm.prepare_unroll(joined(replay.mixed_with(fresh, ledger)))
            info = algorithm.update(batch, Alone(), ledger.progress)
        ledger.close_update(info)
    return {"times": [crew.phases.totals()], "table": "", "ledger": ledger}
