"""Ape-X by turns: the same actors, replay and learners, in an order that no clock decides.

    turn t   actors    act with the weights after turn t − 2 ── wait for the learner ── append, tell
             learner   learns from the rows up to turn t − 1 ── hears all actors ── publishes

Both sides still work at the same time: while the learner learns from the rows of one turn, actors
make those of the next. But rows reach the replay only between two turns of learning, weights reach
actors only between two turns of acting, and the number of gradient steps follows from the steps
made. So the run repeats to the bit. Between hearing and publishing nothing is under way: a
checkpoint that is made there, with the replay and each actor's state in it, is gone on with as if
the run had never stopped.

WHY not everywhere: every turn waits for the slowest actor. With one actor nothing is lost by it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from manyhands.algorithms.base import Across, Alone
from manyhands.experiment.records import Records
from manyhands.replay.rate_limit import wait_of
from manyhands.replay.sharded import ShardedReplay
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
from manyhands.strategies.crew import Crew, Parcel
from manyhands.strategies.off_policy import Lesson, example_row, load_own_state, own_state

TURNS = "manyhands: turns"
_LAST = 2**62  # a turn that never comes


def fits(crew: Crew) -> bool:
    """Where turns cost nothing, or are what the engine is for."""
    engine = crew.experiment.run.engine
    return engine == "inline" or (engine == "local" and len(crew.acting) == 1)


def run(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    if crew.part.role == "actor":
        act(crew)
        return {}
    if crew.is_main:
        return lead(crew, records, state)
    follow(crew, TurnsLedger(crew, records, None, TurnsDesk({}), None), state)
    return {}


def turns_of_a_round(crew: Crew) -> int:
    """Turns between two records: those that rollout_length steps of each environment take."""
    run, o = crew.experiment.run, crew.experiment.options
    return max(1, round(run.rollout_length / int(o.pull_every)))


# -- actors ----------------------------------------------------------------------------------------


def act(crew: Crew) -> None:
    hand, signs = Hand(crew), Signs(crew)
    news = crew.pull()
    hand.begin()
    resume_from(hand, hand.desk.service.call("state_of", crew.rank, crew.life), news)
    turn, steps = signs.turn, 0
    while not signs.over():
        steps = steps if news is None else int(news["steps"])
        rows = hand.act(steps)
        with crew.phases("waiting for room"):
            while signs.learned < turn:
                signs.next()
        if signs.over():
            break
        hand.append(*rows)
        hand.writer.flush()
        hand.tell()
        turn += 1
        with crew.phases("waiting for room"):
            while signs.turn < turn:
                signs.next()
                if signs.asked == turn:
                    hand.desk.service.call("keep", state_of(hand))
        news = crew.pull()
    hand.leave()


def state_of(hand: Hand) -> dict[str, Any]:
    crew = hand.crew
    return {
        "actor": crew.rank,
        "life": crew.life,
        "experience": hand.experience.state(),
        "normaliser": crew.normaliser.training_state(),
    } | own_state(crew)


def resume_from(hand: Hand, state: dict[str, Any] | None, news: dict[str, Any] | None) -> None:
    """Go on with the episodes of a checkpoint; without one, begin new ones."""
    if state is None:
        return
    crew = hand.crew
    crew.normaliser.load_training_state(state["normaliser"])
    if news is not None:
        crew.take(news)
    notes = hand.experience.load_state(state["experience"])
    load_own_state(crew, state)  # last: environments may have drawn from the generators
    if notes:
        hand.desk.service.call("note", [f"{crew.name}: {text}" for text in notes])


class Signs:
    """What the learner has put up for actors: how far it is."""

    def __init__(self, crew: Crew) -> None:
        self._store, self._timeout = crew.worker.weights(TURNS, writer=0), crew.worker.timeout
        self._seen = 0
        self.next()

    def next(self) -> None:
        """Wait for a sign that was not there before."""
        found = self._store.pull(newer_than=self._seen, timeout=self._timeout)
        assert found is not None
        self._seen, signs = found
        self.turn, self.learned, self.asked = (int(signs[k]) for k in ("turn", "learned", "asked"))

    def over(self) -> bool:
        """Whether the run has ended."""
        return self.turn == _LAST


# -- the main learner ------------------------------------------------------------------------------


class TurnsDesk(Desk):
    """Parcels by actor, and the states of actors: those to go on from, and those that were asked
    for."""

    def __init__(self, resumed: dict[int, Any]) -> None:
        super().__init__()
        self._resumed = resumed
        self._by_actor: dict[int, deque[Parcel]] = {}
        self._kept: dict[int, Any] = {}
        self._notes: list[str] = []
        self._mine = threading.Lock()

    def put(self, parcel: Parcel) -> None:
        if "bye" in parcel:
            super().put(parcel)
            return
        with self._mine:
            self._by_actor.setdefault(int(parcel["actor"]), deque()).append(parcel)

    def state_of(self, actor: int, life: int) -> Any:
        """For an actor that starts: where its episodes stood. Not for one that starts again."""
        return self._resumed.get(actor) if life == 0 else None

    def keep(self, state: dict[str, Any]) -> None:
        with self._mine:
            self._kept[int(state["actor"])] = state

    def note(self, texts: list[str]) -> None:
        with self._mine:
            self._notes += texts

    def _has_all(self, actors: list[int]) -> bool:
        with self._mine:
            return all(self._by_actor.get(actor) for actor in actors)

    def _of(self, actor: int) -> Parcel:
        with self._mine:
            return self._by_actor[actor].popleft()

    def _take_notes(self) -> list[str]:
        with self._mine:
            notes, self._notes = self._notes, []
        return notes


class TurnsLedger(ApexLedger):
    """Books whose checkpoints hold the actors too."""

    def __init__(
        self, crew: Crew, records: Records, replay: ShardedReplay | None, desk: TurnsDesk,
        store: Any,
    ) -> None:  # fmt: skip
        super().__init__(crew, records, replay)
        self._desk, self._store = desk, store
        self.turn = 0
        self.owed = 0.0  # gradient steps that the environment steps so far have a right to

    def put_up(self, *, turn: int, learned: int, asked: int = 0) -> None:
        self._store.publish({"turn": turn, "learned": learned, "asked": asked})

    def wait_for(self, ready: Any, what: str) -> None:
        crew = self.crew
        wait_of(crew.worker)(ready, f"turn {self.turn}", what, crew.worker.timeout)

    def state(self) -> dict[str, Any]:
        actors = self._states()
        turns = None if actors is None else {"turn": self.turn, "owed": self.owed, "actors": actors}
        return super().state() | {"turns": turns}

    def _states(self) -> list[Any] | None:
        """Of all actors, which wait for the next turn. None where the run cannot be gone on with
        exactly: without its replay, or where an actor had been started again."""
        crew, desk = self.crew, self._desk
        if self.turn == 0:
            return []  # nothing has begun: new episodes are the same episodes
        if not crew.experiment.options.checkpoint_replay:
            return None
        desk._kept.clear()
        self.put_up(turn=self.turn - 1, learned=self.turn - 1, asked=self.turn)
        self.wait_for(lambda: len(desk._kept) == len(crew.acting), "the states of all actors")
        states = [desk._kept[rank] for rank in crew.acting]
        return None if any(state["life"] for state in states) else states

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        turns = state["turns"]
        if turns is not None:
            self.turn, self.owed = int(turns["turn"]), float(turns["owed"])
            self.crew.session = int(state["crew"]["session"])  # the same episodes go on


def lead(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    across: Across = Alone() if crew.group is None else OverGroup(crew.group, crew.phases)
    kept = None if state is None else state["turns"]
    desk = TurnsDesk({} if kept is None else {int(s["actor"]): s for s in kept["actors"]})
    session = 0 if state is None else int(state["crew"]["session"]) + 1
    lesson = Lesson(crew)
    with make_replay(crew, session=session, in_turns=True) as replay:
        store = crew.worker.weights(TURNS, writer=0)
        ledger = TurnsLedger(crew, records, replay, desk, store)
        if state is None:
            ledger.checkpoint()
        else:
            ledger.restore(state)
        replay.serve(crew.worker, REPLAY)
        crew.worker.serve(DESK, desk)
        while ledger.goes_on():
            crew.publish(steps=ledger.steps)
            ledger.put_up(turn=ledger.turn, learned=ledger.turn - 1)
            for _ in range(agreed(crew, int(ledger.owed))):
                learn(crew, lesson, replay, across, ledger.progress)
            ledger.owed -= int(ledger.owed)
            ledger.put_up(turn=ledger.turn, learned=ledger.turn)
            hear(crew, ledger, desk, replay)
            if ledger.turn % turns_of_a_round(crew) == 0:
                ledger.close_update(lesson.report() | told(replay))
                check_learners(crew)
            records.note(desk._take_notes())
        ledger.put_up(turn=_LAST, learned=_LAST)
        return farewell(crew, ledger, desk, replay)


def hear(crew: Crew, ledger: TurnsLedger, desk: TurnsDesk, replay: ShardedReplay) -> None:
    """What all actors did in this turn; its rows are in the replay now."""
    with crew.phases("waiting for data"):
        ledger.wait_for(lambda: desk._has_all(crew.acting), "the steps of all actors")
    ledger.turn += 1
    steps = 0
    for actor in crew.acting:
        parcel = desk._of(actor)
        ledger.heard(parcel)
        steps += int(parcel["steps"])
    if replay.all_size >= ready_size(crew):
        ledger.owed += crew.experiment.options.updates_per_step * steps


def follow(crew: Crew, ledger: TurnsLedger, state: dict[str, Any] | None) -> None:
    """Another learner."""
    assert crew.group is not None
    lesson, across = Lesson(crew), OverGroup(crew.group, crew.phases)
    if state is not None:
        ledger.restore(state)
    nothing = lesson.rows(Nothing(example_row(crew)))
    while ledger.goes_on():
        for _ in range(agreed(crew, 0)):
            learn_along(crew, lesson, nothing, across, ledger.progress)
        ledger.turn += 1
        if ledger.turn % turns_of_a_round(crew) == 0:
            ledger.close_update(lesson.report())
            check_learners(crew)
    crew.group.exchange(crew.phases.totals())
