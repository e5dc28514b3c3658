"""What the two ways to run Ape-X have in common: the replay, the desk, the books, shared batches.

See apex.py for the picture, and apex_turns.py for the way in which everybody takes turns.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from manyhands import seeding
from manyhands.algorithms.base import Across
from manyhands.algorithms.off_policy import OffPolicy
from manyhands.engines.group import Group
from manyhands.errors import CollectiveError
from manyhands.experiment.records import Records
from manyhands.experiment.report_lines import number
from manyhands.replay.frames import HeldFrames
from manyhands.replay.rate_limit import RateLimit, wait_of
from manyhands.replay.shard_writer import ShardWriter
from manyhands.replay.sharded import ShardedReplay
from manyhands.strategies.allreduce import CHECK_EVERY
from manyhands.strategies.crew import Crew, Parcel
from manyhands.strategies.ledger import Ledger
from manyhands.strategies.off_policy import (
    Experience,
    Lesson,
    example_row,
    frames_of,
    held_room,
    load_own_state,
    own_state,
)
from manyhands.trees import Array, take
from manyhands.types import Batch

REPLAY, DESK = "manyhands: replay", "manyhands: desk"


# -- actors ----------------------------------------------------------------------------------------


class Hand:
    """An actor's end of it all: environments, a shard to write to, a desk to tell."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.options = crew, crew.experiment.options
        self.desk = Outbox(crew)
        self.writer = ShardWriter.connect(
            crew.worker, REPLAY, crew.part.rank, timeout=crew.worker.timeout
        )
        framed = frames_of(crew) is not None
        self._held = HeldFrames(self.writer.frames, held_room(crew)) if framed else None

    def begin(self) -> None:
        """Once the session is known, which decides the seeds."""
        self.experience = Experience(self.crew, self._held)

    def act(self, steps: int) -> tuple[Batch | None, Array | None]:
        """Steps until it is time for newer weights; the transitions, and their first priorities.

        `steps` of all actors, as far as is known here, decide how much is explored.
        """
        crew, o = self.crew, self.options
        with crew.phases("rollout"):
            rows = joined([self.experience.step(steps) for _ in range(o.pull_every)])
        if rows is None or not o.prioritized:
            return rows, None
        with crew.phases("first priorities"):
            return rows, first_errors(crew, self.experience.whole(rows))

    def append(self, rows: Batch | None, errors: Array | None) -> None:
        if self._held is not None:
            self._held.release()
        if rows is not None:
            waited = self.writer.seconds_waited
            self.writer.append(rows, errors)
            self.crew.phases.add("waiting for room", self.writer.seconds_waited - waited)

    def tell(self) -> None:
        """The desk hears of steps and finished episodes."""
        experience = self.experience
        done, experience.episodes = experience.episodes, []
        self.crew.send(self.desk, {}, steps=experience.steps, episodes=done)  # type: ignore[arg-type]
        experience.steps = 0

    def leave(self) -> None:
        self.writer.flush()
        self.crew.say_bye(self.desk)  # type: ignore[arg-type]
        self.desk.flush()


def first_errors(crew: Crew, rows: Batch) -> Array:
    """TD errors by the weights that are here: no row waits for the learner to look at it."""
    see, algorithm = crew.normaliser.apply, crew.algorithm
    assert isinstance(algorithm, OffPolicy)
    seen = rows | {"obs": see(rows["obs"]), "next_obs": see(rows["next_obs"])}
    return algorithm.td_errors(seen, own_target=True)


def joined(parts: list[Batch]) -> Batch | None:
    """The rows of several steps end to end; None where there are none."""
    parts = [part for part in parts if len(part["reward"])]
    if len(parts) < 2:
        return parts[0] if parts else None

    def join(columns: list[Any]) -> Any:
        if isinstance(columns[0], dict):
            return {k: join([c[k] for c in columns]) for k in columns[0]}
        return np.concatenate(columns)

    return {name: join([part[name] for part in parts]) for name in parts[0]}


class Outbox:
    """To the main learner's desk: one message under way, so that they arrive in order."""

    def __init__(self, crew: Crew) -> None:
        self.service = crew.worker.service(DESK)
        self._timeout = crew.worker.timeout
        self._sent: Any = None

    def put(self, parcel: Parcel) -> None:
        self.flush()
        self._sent = self.service.call_async("put", parcel)

    def flush(self) -> None:
        if self._sent is None:
            return
        try:
            self._sent.result(self._timeout or None)
        except TimeoutError:
            raise CollectiveError(
                f"{self.service.name}: not confirmed within {self._timeout:g} s"
            ) from None
        self._sent = None


# -- the main learner ------------------------------------------------------------------------------


class Desk:
    """Where actors say how far they are. Calls come from another thread than the learner's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Parcel] = deque()
        self.left: dict[int, Parcel] = {}

    def put(self, parcel: Parcel) -> None:
        with self._lock:
            if "bye" in parcel:
                self.left[int(parcel["actor"])] = parcel
            else:
                self._waiting.append(parcel)

    def _take(self) -> list[Parcel]:
        with self._lock:
            found = list(self._waiting)
            self._waiting.clear()
        return found


def make_replay(crew: Crew, *, session: int, in_turns: bool) -> ShardedReplay:
    run, o, shards = crew.experiment.run, crew.experiment.options, len(crew.acting)
    # Who takes turns waits for the other anyway, and batches drawn ahead do not repeat.
    limit = None if in_turns else RateLimit(
        o.updates_per_step * o.batch_size, ready_size(crew), slack(crew)
    )  # fmt: skip
    return ShardedReplay(
        example_row(crew),
        shards=shards,
        capacity=o.replay_size,
        batch_size=o.batch_size,
        prioritized=o.prioritized,
        alpha=o.priority_alpha,
        eps=o.priority_epsilon,
        seed=seeding.integer(run.seed, "replay", session),
        frames=frames_of(crew, shards),
        limit=limit,
        prefetch=0 if in_turns else o.prefetch,
        on_loss=o.lost_shard,
        timeout=crew.worker.timeout,
        wait=wait_of(crew.worker),
    )


def ready_size(crew: Crew) -> int:
    """Transitions with which learning starts; never more than equal shards can hold."""
    o, shards = crew.experiment.options, len(crew.acting)
    return int(min(max(o.learning_starts, o.batch_size), o.replay_size // shards * shards))


def slack(crew: Crew) -> float:
    """How many samples either side may be ahead: two messages of all actors, or two batches."""
    run, o = crew.experiment.run, crew.experiment.options
    message = o.updates_per_step * o.batch_size * o.pull_every * run.num_envs
    return float(max(2 * message, 2 * o.batch_size * (1 + o.prefetch)))


def learn(crew: Crew, lesson: Lesson, replay: ShardedReplay, across: Across, done: float) -> None:
    """The main learner's gradient step; the others do `learn_along`."""
    with crew.phases("waiting for data"):
        drawn = replay.sample(lesson.beta(done))
    with crew.phases("optimisation"):
        rows = shared_out(lesson.rows(drawn), crew.group)
        errors = collected(lesson.learn(rows, across, done), crew.group)
        if crew.experiment.options.prioritized:
            replay.update_priorities(drawn.ids, errors)


def told(replay: ShardedReplay) -> dict[str, float]:
    names = ("inserted", "samples_per_insert", "stale_updates", "redrawn", "lost_shards",
             "kept_rows", "dropped_rows")  # fmt: skip
    counters = replay.counters
    return {"replay_size": float(replay.all_size)} | {
        name: float(counters[name]) for name in names if name in counters
    }


def farewell(crew: Crew, ledger: ApexLedger, desk: Desk, replay: ShardedReplay) -> dict[str, Any]:
    """The word to stop, and nobody is kept waiting for a rate any more; until all have gone."""
    crew.stop = True
    replay.close()
    crew.publish(steps=ledger.steps)
    missing = [rank for rank in crew.acting if rank not in desk.left]
    wait_of(crew.worker)(
        lambda: len(desk.left) == len(crew.acting),
        "the end of the run",
        f"the good-bye of {', '.join(crew.roles.name(rank) for rank in missing)}",
        crew.worker.timeout,
    )
    ledger.late = len(desk._take())
    for last in desk.left.values():
        ledger.seen_alive(last)
    mine = [crew.phases.totals()]
    if crew.group is not None:
        mine = crew.group.exchange(mine[0])
    times = [*mine, *(dict(last["phases"]) for last in desk.left.values())]
    return {"times": times, "table": table(crew, replay, desk), "ledger": ledger}


def table(crew: Crew, replay: ShardedReplay, desk: Desk) -> str:
    c, phases = replay.counters, crew.phases.totals()
    held = [dict(last["phases"]).get("waiting for room", 0.0) for last in desk.left.values()]
    return "\n".join(
        [
            f"replay: {number(replay.all_size)} transitions, {number(c['inserted'])} added, each "
            f"drawn {c['samples_per_insert']:.1f} times; priorities that came too late: "
            f"{number(c.get('stale_updates', 0))}",
            f"waiting: the learner {phases.get('waiting for data', 0.0):.1f} s, an actor "
            f"{sum(held) / max(1, len(held)):.1f} s in the mean; actors lost: "
            f"{number(c['lost_shards'])}",
        ]
    )


class ApexLedger(Ledger):
    """The books of the learners. The replay is there on the main one only."""

    def __init__(self, crew: Crew, records: Records, replay: ShardedReplay | None) -> None:
        super().__init__(crew, records, crew.group)
        self._replay = replay

    def heard(self, parcel: Parcel) -> None:
        """Count what an actor says."""
        self.seen_alive(parcel)
        self.arrived(parcel)

    def seen_alive(self, parcel: Parcel) -> None:
        """By its life an actor that was started again is known: what did the one before leave?"""
        assert self._replay is not None
        actor, life = int(parcel["actor"]), int(parcel["life"])
        if life <= self.lives.get(actor, 0):
            return
        rows = self._replay.lose(self.crew.acting.index(actor))
        what = self._replay.on_loss
        self.records.folder.event("shard_lost", worker=actor, rows=rows, what=what)
        if "bye" in parcel:  # it came back too late to do anything
            self.count_life(parcel)

    def state(self) -> dict[str, Any]:
        keep, replay = self.crew.experiment.options.checkpoint_replay, self._replay
        kept = replay.state() if keep and replay is not None else None
        return super().state() | {"replay": kept, "turns": None} | own_state(self.crew)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.crew.is_main:
            load_own_state(self.crew, state)
        if self._replay is not None and state["replay"] is not None:
            self._replay.load_state(state["replay"])
        elif self._replay is not None and self.steps:
            self.records.note(
                ["the replay was not saved (--checkpoint-replay saves it): it is filled anew "
                 "before learning goes on"]
            )  # fmt: skip


# -- several learners ------------------------------------------------------------------------------


def learn_along(crew: Crew, lesson: Lesson, nothing: Batch, across: Across, done: float) -> None:
    """The gradient step of a learner that has no replay: its part comes from the main one."""
    with crew.phases("waiting for data"):
        rows = shared_out(nothing, crew.group)
    with crew.phases("optimisation"):
        collected(lesson.learn(rows, across, done), crew.group)


def agreed(crew: Crew, times: int) -> int:
    """The main learner's number on all learners."""
    return times if crew.group is None else int(crew.group.exchange(times)[0])


class Nothing:
    """A batch without rows, which shows what kind of rows there are."""

    def __init__(self, example: Batch) -> None:
        def none(x: Any) -> Any:
            if isinstance(x, dict):
                return {k: none(v) for k, v in x.items()}
            return np.zeros((0, *np.shape(x)), np.asarray(x).dtype)

        self.rows = {name: none(value) for name, value in example.items()}
        self.weights = np.zeros(0, np.float32)


def shared_out(rows: Batch, group: Group | None) -> Batch:
    """The main learner's batch, each learner's part of it; parts differ by one row at most."""
    if group is None:
        return rows
    whole: Batch = group.all_gather(rows)  # only the main learner has any
    count = len(whole["reward"])
    ends = [count * i // group.size for i in range(group.size + 1)]
    return take(whole, slice(ends[group.rank], ends[group.rank + 1]))


def collected(errors: Array, group: Group | None) -> Array:
    """All learners' TD errors in the order of the batch, on the main one."""
    if group is None:
        return errors
    found = group.gather({"errors": np.asarray(errors, np.float32)})
    return errors if found is None else np.asarray(found["errors"])


def check_learners(crew: Crew) -> None:
    """Every so often: are the learners' weights still equal?"""
    if crew.group is not None and crew.algorithm.version % CHECK_EVERY == 0:
        with crew.phases("synchronisation"):
            crew.group.check_equal("learners", {"weights": crew.algorithm.flat.data})
