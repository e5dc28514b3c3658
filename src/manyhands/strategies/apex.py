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
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from manyhands import seeding
from manyhands.algorithms.base import Across, Alone, Batch, take
from manyhands.algorithms.off_policy import OffPolicy
from manyhands.data.rate_limit import RateLimit, wait_of
from manyhands.data.shard_writer import ShardWriter
from manyhands.data.sharded_replay import ShardedReplay
from manyhands.engines.group import Group
from manyhands.errors import CollectiveError
from manyhands.experiment.records import Records
from manyhands.experiment.report_lines import number
from manyhands.strategies.across import OverGroup
from manyhands.strategies.allreduce import CHECK_EVERY
from manyhands.strategies.crew import Crew, Parcel
from manyhands.strategies.ledger import Ledger
from manyhands.strategies.off_policy import Experience, Lesson, example_row
from manyhands.trees import Array

REPLAY, DESK = "manyhands: replay", "manyhands: desk"


def run(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    if crew.part.role == "actor":
        act(crew)
        return {}
    if crew.rank == 0:
        return lead(crew, records, state)
    follow(crew, ApexLedger(crew, records, None), state)
    return {}


# -- actors ----------------------------------------------------------------------------------------


def act(crew: Crew) -> None:
    o, algorithm = crew.experiment.options, crew.algorithm
    assert isinstance(algorithm, OffPolicy)
    desk = Outbox(crew)
    writer = ShardWriter.connect(crew.worker, REPLAY, crew.part.rank, timeout=crew.worker.timeout)
    news = crew.pull()
    experience = Experience(crew)
    steps = 0  # of all actors, as far as is known here
    while not crew.stop:
        steps = steps if news is None else int(news["steps"])
        with crew.phases("rollout"):
            rows = joined([experience.step(steps) for _ in range(o.pull_every)])
        if rows is not None:
            with crew.phases("first priorities"):
                errors = first_errors(crew, algorithm, rows) if o.prioritized else None
            waited = writer.seconds_waited
            writer.append(rows, errors)
            crew.phases.add("waiting for room", writer.seconds_waited - waited)
        done, experience.episodes = experience.episodes, []
        crew.send(desk, {}, steps=experience.steps, episodes=done)  # type: ignore[arg-type]
        experience.steps = 0
        news = crew.pull()
    writer.flush()
    crew.say_bye(desk)  # type: ignore[arg-type]
    desk.flush()


def first_errors(crew: Crew, algorithm: OffPolicy, rows: Batch) -> Array:
    """TD errors by the weights that are here: no row waits for the learner to look at it."""
    see = crew.normaliser.apply
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
        self._service = crew.worker.service(DESK)
        self._timeout = crew.worker.timeout
        self._sent: Any = None

    def put(self, parcel: Parcel) -> None:
        self.flush()
        self._sent = self._service.call_async("put", parcel)

    def flush(self) -> None:
        if self._sent is None:
            return
        try:
            self._sent.result(self._timeout or None)
        except TimeoutError:
            raise CollectiveError(
                f"{self._service.name}: not confirmed within {self._timeout:g} s"
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


def lead(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    o, group = crew.experiment.options, crew.group
    across: Across = Alone() if group is None else OverGroup(group, crew.phases)
    desk, lesson = Desk(), Lesson(crew)
    with make_replay(crew) as replay:
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
            for _ in range(steps_of_a_round(crew)):
                with crew.phases("waiting for data"):
                    drawn = replay.sample(lesson.beta(ledger.progress))
                with crew.phases("optimisation"):
                    rows = shared_out(lesson.rows(drawn), group)
                    errors = lesson.learn(rows, across, ledger.progress)
                    errors = collected(errors, group)
                    if o.prioritized:
                        replay.update_priorities(drawn.ids, errors)
                learned += 1
                if learned % looks_of(crew) == 0:
                    crew.publish(steps=ledger.steps)
            for parcel in desk._take():
                ledger.heard(parcel)
            ledger.close_update(lesson.report() | told(replay))
            check_learners(crew)
        return farewell(crew, ledger, desk, replay)


def make_replay(crew: Crew) -> ShardedReplay:
    run, o = crew.experiment.run, crew.experiment.options
    inline = run.engine == "inline"
    return ShardedReplay(
        example_row(crew),
        shards=len(crew.acting),
        capacity=o.replay_size,
        batch_size=o.batch_size,
        prioritized=o.prioritized,
        alpha=o.priority_alpha,
        eps=o.priority_epsilon,
        seed=seeding.integer(run.seed, "replay", crew.session),
        limit=RateLimit(
            o.updates_per_step * o.batch_size, max(o.learning_starts, o.batch_size), slack(crew)
        ),
        prefetch=0 if inline else o.prefetch,
        on_loss=o.lost_shard,
        timeout=crew.worker.timeout,
        wait=wait_of(crew.worker),
    )


def slack(crew: Crew) -> float:
    """How many samples either side may be ahead: two messages of all actors, or two batches."""
    run, o = crew.experiment.run, crew.experiment.options
    message = o.updates_per_step * o.batch_size * o.pull_every * run.num_envs
    return float(max(2 * message, 2 * o.batch_size * (1 + o.prefetch)))


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


def told(replay: ShardedReplay) -> dict[str, float]:
    names = ("inserted", "samples_per_insert", "stale_updates", "redrawn", "lost_shards")
    counters = replay.counters
    return {"replay_size": float(replay.all_size)} | {
        name: float(counters[name]) for name in names if name in counters
    }


def farewell(crew: Crew, ledger: ApexLedger, desk: Desk, replay: ShardedReplay) -> dict[str, Any]:
    """The word to stop, and nobody is kept waiting for a rate any more; until all have gone."""
    crew.stop = True
    replay.close()
    for ring in replay._rings:
        ring.allow(None)
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
    return {"times": times, "table": table(crew, ledger, replay, desk), "ledger": ledger}


def table(crew: Crew, ledger: ApexLedger, replay: ShardedReplay, desk: Desk) -> str:
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
            self.lives[actor] = life
            self.records.folder.event("restart", worker=actor, life=life)

    def checkpoint(self) -> None:
        if self.crew.rank != 0:
            return
        keep = self.crew.experiment.options.checkpoint_replay
        with self.crew.phases("checkpoint"):
            state = {
                "algorithm": self.crew.algorithm.state(),
                "crew": {
                    "steps": self.steps,
                    "updates": self.updates,
                    "refused": self.refused,
                    "session": self.crew.session,
                },
                "normaliser": self.crew.normaliser.training_state(),
                "replay": self._replay.state() if keep and self._replay is not None else None,
            }
            self.records.checkpoint(state, self.steps, self.updates)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self._replay is not None and state["replay"] is not None:
            self._replay.load_state(state["replay"])
        elif self._replay is not None:
            self.records.note(
                ["the replay was not saved (--checkpoint-replay saves it): it is filled anew "
                 "before learning goes on"]
            )  # fmt: skip


# -- several learners ------------------------------------------------------------------------------


def follow(crew: Crew, ledger: ApexLedger, state: dict[str, Any] | None) -> None:
    """A learner that has no replay: its part of every batch comes from the main one."""
    group, lesson = crew.group, Lesson(crew)
    assert group is not None
    across = OverGroup(group, crew.phases)
    if state is not None:
        ledger.restore(state)
    nothing = lesson.rows(Nothing(example_row(crew)))
    while ledger.goes_on():
        for _ in range(steps_of_a_round(crew)):
            with crew.phases("waiting for data"):
                rows = shared_out(nothing, group)
            with crew.phases("optimisation"):
                errors = lesson.learn(rows, across, ledger.progress)
                collected(errors, group)
        ledger.close_update(lesson.report())
        check_learners(crew)
    group.exchange(crew.phases.totals())


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
