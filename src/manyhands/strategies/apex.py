"""Ape-X: actors fill a replay, each its own shard; learners draw from all of it. arXiv:1803.00933.

    actor 0   envs ─► n-step rows, first priorities ─► shard 0 ─┐
    actor 1   envs ─► n-step rows, first priorities ─► shard 1 ─┼─► main learner: draws by priority
    actor 2   envs ─► n-step rows, first priorities ─► shard 2 ─┘   │            ▲ new priorities
       ▲                                                            ├─► learner 0: its part ─┐
       └─────────── newest weights, every so many steps ────────────└─► learner 1: its part ─┴ sum

Who holds what: the shards lie in memory that actors write and the main learner reads; the tree of
priorities is the main learner's. Several learners share each batch and take the same step: they are
one learner with the whole batch. What moves: every transition once, into shared memory; the weights
when actors look for them; a few numbers about steps and episodes. Asynchronous, but bounded: a
learner that is ahead of its actors waits, and so do actors that are ahead of their learner, so that
each transition is drawn updates_per_step × batch_size times in the mean whoever is faster.

Each environment explores with its own ε, or its own noise. An actor that dies is started again
(local engine); what it had collected is kept or dropped, as lost_shard says, and counted.

On inline, and on local with one actor, actor and learner take turns instead (apex_turns.py): there
a run repeats to the bit, and a resumed one goes on to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from manyhands.algorithms.base import Across, Alone
from manyhands.experiment.records import Records
from manyhands.replay.rate_limit import wait_of
from manyhands.replay.sharded import ShardedReplay
from manyhands.strategies import apex_turns
from manyhands.strategies.across import OverGroup
from manyhands.strategies.apex_parts import (
    DESK,
    REPLAY,
    ApexLedger,
    Desk,
    Hand,
    Nothing,
    agreed,
    check_learners,
    farewell,
    learn,
    learn_along,
    make_replay,
    ready_size,
    told,
)
from manyhands.strategies.crew import Crew
from manyhands.strategies.off_policy import Lesson, example_row


def run(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    if apex_turns.fits(crew):
        return apex_turns.run(crew, records, state)
    if crew.part.role == "actor":
        act(crew)
        return {}
    if crew.is_main:
        return lead(crew, records, state)
    follow(crew, ApexLedger(crew, records, None), state)
    return {}


def act(crew: Crew) -> None:
    hand = Hand(crew)
    news = crew.pull()
    hand.begin()
    steps = 0
    while not crew.stop:
        steps = steps if news is None else int(news["steps"])
        hand.append(*hand.act(steps))
        hand.tell()
        news = crew.pull()
    hand.leave()


def lead(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    """The main learner."""
    across: Across = Alone() if crew.group is None else OverGroup(crew.group, crew.phases)
    desk, lesson = Desk(), Lesson(crew)
    session = 0 if state is None else int(state["crew"]["session"]) + 1
    with make_replay(crew, session=session, in_turns=False) as replay:
        ledger = ApexLedger(crew, records, replay)
        if state is None:
            ledger.checkpoint()
        else:
            ledger.restore(state)
        replay.serve(crew.worker, REPLAY)
        crew.worker.serve(DESK, desk)
        crew.publish(steps=ledger.steps)
        learned = 0
        while ledger.goes_on():
            times = steps_of_a_round(crew) if filled(crew, replay) else 0
            for _ in range(agreed(crew, times)):
                learn(crew, lesson, replay, across, ledger.progress)
                learned += 1
                if learned % looks_of(crew) == 0:
                    crew.publish(steps=ledger.steps)
            for parcel in desk._take():
                ledger.heard(parcel)
            ledger.close_update(lesson.report() | told(replay))
            check_learners(crew)
            if not times:
                crew.publish(steps=ledger.steps)  # how much is explored depends on them
        return farewell(crew, ledger, desk, replay)


def follow(crew: Crew, ledger: ApexLedger, state: dict[str, Any] | None) -> None:
    """Another learner."""
    assert crew.group is not None
    lesson, across = Lesson(crew), OverGroup(crew.group, crew.phases)
    if state is not None:
        ledger.restore(state)
    nothing = lesson.rows(Nothing(example_row(crew)))
    while ledger.goes_on():
        for _ in range(agreed(crew, 0)):
            learn_along(crew, lesson, nothing, across, ledger.progress)
        ledger.close_update(lesson.report())
        check_learners(crew)
    crew.group.exchange(crew.phases.totals())


def filled(crew: Crew, replay: ShardedReplay) -> bool:
    """Whether learning can start. Until then it waits for a round's worth of rows at a time: so
    long as some come, no deadline passes, and a word to stop is heard."""
    ready, enough = ready_size(crew), replay.all_size + crew.experiment.run.batch
    wait = wait_of(crew.worker)
    with crew.phases("waiting for data"):
        while (there := replay.all_size) < min(ready, enough):
            needs = f"{ready:,} transitions in the replay (there are {there:,})"
            more = partial(_larger, replay, there)
            wait(more, "the start of learning", needs, crew.worker.timeout)
    return replay.all_size >= ready


def _larger(replay: ShardedReplay, than: int) -> bool:
    return replay.all_size > than


def steps_of_a_round(crew: Crew) -> int:
    """Gradient steps between two records: those that belong to rollout_length steps of each
    environment."""
    ratio: float = crew.experiment.options.updates_per_step
    return max(1, round(ratio * crew.experiment.run.batch))


def looks_of(crew: Crew) -> int:
    """Gradient steps between two publications: as often as actors look."""
    run, o = crew.experiment.run, crew.experiment.options
    steps: float = o.updates_per_step * o.pull_every * run.num_envs
    return max(1, int(steps))
