"""Ape-X learners: the main one owns the replay and hears the actors; all share its batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from manyhands import seeding, trees
from manyhands.engines.base import wait_of
from manyhands.engines.group import Group
from manyhands.errors import CollectiveError
from manyhands.experiment.progress import number
from manyhands.replay.sharded import RateLimit, ShardedReplay
from manyhands.strategies import experience
from manyhands.strategies.allreduce import CHECK_EVERY
from manyhands.strategies.apex.actor import REPLAY, REPORTS
from manyhands.strategies.context import Context, Part
from manyhands.strategies.experience import ReplayLearner
from manyhands.strategies.messages import Message, Weights, not_heard_of
from manyhands.strategies.progress import (
    Keeper,
    RunProgress,
    load_process_state,
    process_state,
)
from manyhands.trees import Array
from manyhands.types import Batch

_OVER = -1  # in the place of a number of gradient steps: there will be none any more


class MainLearner(Part):
    """Owns the replay and hears the actors; the other learners take part in its steps."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        self._weights, self._learner = Weights(context), ReplayLearner(context)
        self._replay = make_replay(context, progress, in_turns=False)
        # Once nobody adds rows any more, learning must not wait for them.
        self._inbox = ReportsInbox(context.acting, self._replay.lift, context.worker.lost)
        self._learned = 0
        progress.begin(KeptReplay(context, self._replay))
        self._replay.serve(context.worker, REPLAY)
        context.worker.serve(REPORTS, self._inbox)
        self._weights.publish(steps=progress.steps)

    def goes_on(self) -> bool:
        return self.progress.goes_on() and not self._inbox.all_left

    def update(self) -> None:
        context, progress, replay = self.context, self.progress, self._replay
        if self._inbox.all_left:
            agreed(context, _OVER)
            return
        there = filled(context, replay, self._inbox)
        times = agreed(context, steps_of_a_round(context) if there else 0)
        for _ in range(times):
            learn(context, self._learner, replay, progress.fraction)
            self._learned += 1
            if self._learned % steps_between_publications(context) == 0:
                self._weights.publish(steps=progress.steps)
        for message in self._inbox._take():
            heard(progress, replay, message)
        progress.close_update(self._learner.report() | counters(replay))
        check_learners(context)
        if not times:
            self._weights.publish(steps=progress.steps)  # how much is explored depends on them

    def close(self) -> None:
        finish(self.context, self.progress, self._weights, self._inbox, self._replay)

    def release(self) -> None:
        self._replay.close()


class Follower(Part):
    """Another learner: its part of each batch comes from the main one.

    `turn` is the first of those that it learns in, so many of which are a round (turns.py).
    """

    def __init__(
        self, context: Context, progress: RunProgress, *, turn: int = 0, turns_of_a_round: int = 1
    ) -> None:
        self.context, self.progress = context, progress
        self._turn, self._turns_of_a_round = turn, turns_of_a_round
        self._learner = ReplayLearner(context)
        self._over = False
        progress.begin()
        self._no_rows = self._learner.rows(NoRows(experience.example_row(context)))

    def goes_on(self) -> bool:
        return self.progress.goes_on() and not self._over

    def update(self) -> None:
        context, progress, group = self.context, self.progress, self.context.group
        assert group is not None
        times = agreed(context, 0)
        self._over = times == _OVER
        if self._over:
            return
        for _ in range(times):
            with context.phases("waiting for data"):
                rows = shared_out(self._no_rows, group)
            with context.phases("optimisation"):
                collected(self._learner.learn(rows, context.across, progress.fraction), group)
        self._turn += 1
        if self._turn % self._turns_of_a_round == 0:
            progress.close_update(self._learner.report())
            check_learners(context)

    def close(self) -> None:
        assert self.context.group is not None
        self.context.group.exchange(self.context.phases.totals())


def learn(context: Context, learner: ReplayLearner, replay: ShardedReplay, fraction: float) -> None:
    """The main learner's gradient step, in which the others take part."""
    with context.phases("waiting for data"):
        drawn = replay.sample(learner.beta(fraction))
    with context.phases("optimisation"):
        rows = shared_out(learner.rows(drawn), context.group)
        errors = collected(learner.learn(rows, context.across, fraction), context.group)
        if context.experiment.options.prioritized:
            replay.update_priorities(drawn.ids, errors)


def finish(
    context: Context,
    progress: RunProgress,
    weights: Weights,
    inbox: ReportsInbox,
    replay: ShardedReplay,
) -> None:
    """The word to stop, and nobody is kept waiting for a rate any more; until all have gone."""
    context.stop = True
    replay.close()
    weights.publish(steps=progress.steps)
    missing = [rank for rank in context.acting if rank not in inbox.left]
    try:
        wait_of(context.worker)(
            lambda: inbox.all_left,
            "the end of the run",
            f"the last message of {', '.join(context.roles.name(rank) for rank in missing)}",
            context.worker.timeout,
        )
    except CollectiveError as error:
        not_heard_of(context, {rank for rank in missing if rank not in inbox.left}, error)
    progress.late = len(inbox._take())
    for last in inbox.left.values():
        count_loss(progress, replay, last)
    mine = [context.phases.totals()]
    if context.group is not None:
        mine = context.group.exchange(mine[0])
    progress.times = [*mine, *(dict(last["phases"]) for last in inbox.left.values())]
    progress.table = table(context, replay, inbox)


def table(context: Context, replay: ShardedReplay, inbox: ReportsInbox) -> str:
    c, phases = replay.counters, context.phases.totals()
    waited = [dict(last["phases"]).get("waiting for room", 0.0) for last in inbox.left.values()]
    return "\n".join(
        [
            f"replay: {number(replay.all_size)} transitions, {number(c['inserted'])} added, each "
            f"drawn {c['samples_per_insert']:.1f} times; priorities that came too late: "
            f"{number(c.get('stale_updates', 0))}",
            f"waiting: the learner {phases.get('waiting for data', 0.0):.1f} s, an actor "
            f"{sum(waited) / max(1, len(waited)):.1f} s on average; actors lost: "
            f"{number(c['lost_shards'])}",
        ]
    )


# -- what actors report ----------------------------------------------------------------------------


class ReportsInbox:
    """Where actors say how far they are. Calls come from another thread than the learner's."""

    def __init__(
        self,
        senders: list[int],
        deserted: Callable[[], None] = lambda: None,
        lost: Callable[[], set[int]] = set,
    ) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Message] = deque()
        self._senders, self._deserted, self._lost = set(senders), deserted, lost
        self.left: dict[int, Message] = {}

    def put(self, message: Message) -> None:
        with self._lock:
            if "goodbye" in message:
                self.left[int(message["actor"])] = message
            else:
                self._waiting.append(message)
        if self.all_left:
            self._deserted()

    @property
    def all_left(self) -> bool:
        """Whether all actors have said good-bye, or are lost."""
        missing = self._senders - self.left.keys()
        return not missing or not missing - self._lost()

    def _take(self) -> list[Message]:
        with self._lock:
            found = list(self._waiting)
            self._waiting.clear()
        return found


def heard(progress: RunProgress, replay: ShardedReplay, message: Message) -> None:
    """Count what an actor reports."""
    count_loss(progress, replay, message)
    progress.arrived(message)


def count_loss(progress: RunProgress, replay: ShardedReplay, message: Message) -> None:
    """An actor that was restarted: what did the one before it leave?"""
    actor, restarts = int(message["actor"]), int(message["restarts"])
    if not progress.is_new(actor, restarts):
        return
    rows = replay.lose(progress.context.acting.index(actor))
    progress.records.folder.event("shard_lost", worker=actor, rows=rows, what=replay.on_loss)
    if "goodbye" in message:  # it came back too late to do anything
        progress.count_restarts(message)


# -- the replay ------------------------------------------------------------------------------------


class KeptReplay:
    """What the main learner adds to a checkpoint: the replay, where that is asked for, and the
    state of actors that take turns with it (`turns`)."""

    def __init__(
        self, context: Context, replay: ShardedReplay, turns: Keeper | None = None
    ) -> None:
        self._context, self._replay, self._turns = context, replay, turns

    def state(self) -> dict[str, Any]:
        turns = {"turns": None} if self._turns is None else self._turns.state()
        keep = self._context.experiment.options.checkpoint_replay
        kept = self._replay.state() if keep else None
        return {"replay": kept} | turns | process_state(self._context)

    @staticmethod
    def for_actors(state: dict[str, Any], actors: int) -> dict[str, Any]:
        """A checkpoint that so many actors can go on from. Where there were more of them or fewer,
        the shards of the replay, and the episodes of turns, fit nobody and are left out."""
        replay, turns = state.get("replay"), state.get("turns")
        were = {len(replay["shards"])} if replay else set()
        were |= {len(turns["actors"])} if turns and turns["actors"] else set()
        if were <= {actors}:
            return state
        return state | {"replay": None, "turns": None, "actors": were.pop()}

    def load_state(self, state: dict[str, Any]) -> list[str]:
        notes = []
        load_process_state(self._context, state)
        if state["replay"] is not None:
            self._replay.load_state(state["replay"])
        elif "actors" in state:
            notes = [f"the replay was that of {state['actors']} actors, and cannot be divided "
                     "anew: a new one is filled before learning goes on"]  # fmt: skip
        elif state["crew"]["steps"]:
            notes = ["the replay was not saved (--checkpoint-replay saves it): a new one is "
                     "filled before learning goes on"]  # fmt: skip
        return notes if self._turns is None else notes + self._turns.load_state(state)


def make_replay(context: Context, progress: RunProgress, *, in_turns: bool) -> ShardedReplay:
    run, o, shards = context.experiment.run, context.experiment.options, len(context.acting)
    # Who takes turns waits for the other anyway, and batches that are drawn early do not repeat.
    limit = None if in_turns else RateLimit(
        o.updates_per_step * o.batch_size, ready_size(context), slack(context)
    )  # fmt: skip
    session = 0 if progress.resumed is None else int(progress.resumed["crew"]["session"]) + 1
    threaded = run.engine != "inline"  # a thread that draws there could not hand over to actors
    return ShardedReplay(
        experience.example_row(context),
        shards=shards,
        capacity=o.replay_size,
        batch_size=o.batch_size,
        prioritized=o.prioritized,
        alpha=o.priority_alpha,
        eps=o.priority_epsilon,
        seed=seeding.integer(run.seed, "replay", session),
        frames=experience.frames_of(context, shards),
        limit=limit,
        prefetch=o.prefetch if threaded and not in_turns else 0,
        on_loss=o.lost_shard,
        timeout=context.worker.timeout,
        wait=wait_of(context.worker),
    )


def ready_size(context: Context) -> int:
    """Transitions with which learning starts; never more than equal shards can hold."""
    o, shards = context.experiment.options, len(context.acting)
    return int(min(max(o.learning_starts, o.batch_size), o.replay_size // shards * shards))


def slack(context: Context) -> float:
    """How many samples either side may be early: two messages of all actors, or two batches."""
    run, o = context.experiment.run, context.experiment.options
    message = o.updates_per_step * o.batch_size * o.pull_every * run.num_envs
    return float(max(2 * message, 2 * o.batch_size * (1 + o.prefetch)))


def filled(context: Context, replay: ShardedReplay, inbox: ReportsInbox) -> bool:
    """Whether learning can start. Until then it waits for a round's worth of rows at a time: so
    long as some come, no deadline passes, and a word to stop is heard."""
    ready, enough = ready_size(context), replay.all_size + context.experiment.run.batch
    wait = wait_of(context.worker)
    with context.phases("waiting for data"):
        while (there := replay.all_size) < min(ready, enough) and not inbox.all_left:
            needs = f"{ready:,} transitions in the replay (there are {there:,})"
            more = partial(_larger, replay, there, inbox)
            wait(more, "the start of learning", needs, context.worker.timeout)
    return replay.all_size >= ready


def _larger(replay: ShardedReplay, than: int, inbox: ReportsInbox) -> bool:
    replay.share_out()  # nothing is drawn yet, which does it later
    return replay.all_size > than or inbox.all_left


def steps_of_a_round(context: Context) -> int:
    """Gradient steps between two records: those that belong to rollout_length steps of each
    environment."""
    ratio: float = context.experiment.options.updates_per_step
    return max(1, round(ratio * context.experiment.run.batch))


def steps_between_publications(context: Context) -> int:
    """Gradient steps; as often as actors look."""
    run, o = context.experiment.run, context.experiment.options
    steps: float = o.updates_per_step * o.pull_every * run.num_envs
    return max(1, int(steps))


def counters(replay: ShardedReplay) -> dict[str, float]:
    names = ("inserted", "samples_per_insert", "stale_updates", "redrawn", "lost_shards",
             "kept_rows", "dropped_rows")  # fmt: skip
    found = replay.counters
    return {"replay_size": float(replay.all_size)} | {
        name: float(found[name]) for name in names if name in found
    }


# -- several learners ------------------------------------------------------------------------------


def agreed(context: Context, times: int) -> int:
    """The main learner's number on all learners."""
    return times if context.group is None else int(context.group.exchange(times)[0])


class NoRows:
    """A batch without rows, which shows what kind of rows there are."""

    def __init__(self, example: Batch) -> None:
        def none(x: Any) -> Any:
            return np.zeros((0, *np.shape(x)), np.asarray(x).dtype)

        self.rows: Batch = trees.map(none, example)
        self.weights = np.zeros(0, np.float32)


def shared_out(rows: Batch, group: Group | None) -> Batch:
    """The main learner's batch, each learner's part of it; parts differ by one row at most."""
    if group is None:
        return rows
    whole: Batch = group.all_gather(rows)  # only the main learner has any
    count = len(whole["reward"])
    ends = [count * i // group.size for i in range(group.size + 1)]
    return trees.take(whole, slice(ends[group.rank], ends[group.rank + 1]))


def collected(errors: Array, group: Group | None) -> Array:
    """All learners' TD errors in the order of the batch, on the main one."""
    if group is None:
        return errors
    found = group.gather({"errors": np.asarray(errors, np.float32)})
    return errors if found is None else np.asarray(found["errors"])


def check_learners(context: Context) -> None:
    """Every so often: are the learners' weights still equal?"""
    if context.algorithm.version % CHECK_EVERY == 0:
        context.check_equal("learners")
