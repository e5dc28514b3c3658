"""Ape-X by turns: the same actors, replay and learners, in an order that no clock decides.

    turn t   actors    act with the weights after turn t − 2 ── wait for it ── append, report
             learner   learns from the rows up to turn t − 1 ── hears all actors ── publishes

Both sides still work at the same time: while the learner learns from the rows of one turn, actors
make those of the next. But rows reach the replay only between two turns of learning, weights reach
actors only between two turns of acting, and the number of gradient steps follows from the steps
made. So the run repeats to the bit. Between hearing and publishing no row and no message is under
way: a run that is resumed from a checkpoint made there, with the replay and each actor's state in
it, goes on as if it had never stopped.

WHY not everywhere: every turn waits for the slowest actor. With one actor that is free.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from manyhands.engines.base import wait_of
from manyhands.replay.sharded import ShardedReplay
from manyhands.strategies.apex import learner as apex
from manyhands.strategies.apex.actor import REPLAY, REPORTS, Actor
from manyhands.strategies.context import Context
from manyhands.strategies.experience import ReplayLearner
from manyhands.strategies.messages import Message, Weights
from manyhands.strategies.progress import RunProgress, load_process_state, process_state

TURNS = "manyhands: turns"
_LAST = 2**62  # a turn that never comes


def fits(context: Context) -> bool:
    """Where turns are free, or are what the engine is for."""
    engine = context.experiment.run.engine
    return engine == "inline" or (engine == "local" and len(context.acting) == 1)


def turns_of_a_round(context: Context) -> int:
    """Turns between two records: those that rollout_length steps of each environment take."""
    run, o = context.experiment.run, context.experiment.options
    return max(1, round(run.rollout_length / int(o.pull_every)))


# -- actors ----------------------------------------------------------------------------------------


def act(context: Context) -> None:
    actor, clock = Actor(context), Signs(context)
    service = actor.outbox.service
    resume_from(actor, service.call("state_of", context.rank, context.restarts))
    turn = clock.turn
    while not clock.over():
        with context.phases("rollout"):
            actor.transitions.fill()
        rows = actor.take()
        with context.phases("waiting for room"):
            while clock.learned < turn:
                clock.next()
        if clock.over():
            break
        actor.append(*rows)
        actor.writer.flush()
        actor.report()
        turn += 1
        with context.phases("waiting for room"):
            while clock.turn < turn:
                clock.next()
                if clock.asked == turn:
                    service.call("keep", state_of(actor))
        actor.pull()
    actor.close()


def state_of(actor: Actor) -> dict[str, Any]:
    context = actor.context
    return {
        "actor": context.rank,
        "life": context.restarts,
        "experience": actor.transitions.state(),
        "normaliser": context.normaliser.training_state(),
    } | process_state(context)


def resume_from(actor: Actor, state: dict[str, Any] | None) -> None:
    """Continue the episodes of a checkpoint; without one, begin new ones."""
    if state is None:
        return
    context = actor.context
    context.normaliser.load_training_state(state["normaliser"])
    if actor.news is not None:
        actor.weights.take(actor.news)
    notes = actor.transitions.load_state(state["experience"])
    load_process_state(context, state)
    if notes:
        actor.outbox.service.call("note", [f"{context.name}: {text}" for text in notes])


class Signs:
    """How far the learner is, as actors see it."""

    def __init__(self, context: Context) -> None:
        self._store = context.worker.weights(TURNS, writer=0)
        self._timeout = context.worker.timeout
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


# -- learners --------------------------------------------------------------------------------------


def lead(context: Context, progress: RunProgress) -> None:
    """The main learner."""
    weights, learner = Weights(context), ReplayLearner(context)
    kept = None if progress.resumed is None else progress.resumed["turns"]
    states = {} if kept is None else {int(s["actor"]): s for s in kept["actors"]}
    inbox = TurnsInbox(context.acting, states)
    with apex.make_replay(context, progress, in_turns=True) as replay:
        clock = Clock(context, inbox)
        progress.begin(apex.KeptReplay(context, replay, clock))
        replay.serve(context.worker, REPLAY)
        context.worker.serve(REPORTS, inbox)
        while progress.goes_on():
            weights.publish(steps=progress.steps)
            clock.show(turn=clock.turn, learned=clock.turn - 1)
            for _ in range(apex.agreed(context, int(clock.owed))):
                apex.learn(context, learner, replay, progress.fraction)
            clock.owed -= int(clock.owed)
            clock.show(turn=clock.turn, learned=clock.turn)
            hear(context, progress, clock, inbox, replay)
            if clock.turn % turns_of_a_round(context) == 0:
                progress.close_update(learner.report() | apex.counters(replay))
                apex.check_learners(context)
            progress.records.note(inbox._take_notes())
        clock.show(turn=_LAST, learned=_LAST)
        apex.finish(context, progress, weights, inbox, replay)


def follow(context: Context, progress: RunProgress) -> None:
    """Another learner."""
    kept = None if progress.resumed is None else progress.resumed["turns"]
    turn = 0 if kept is None else int(kept["turn"])
    apex.Follower(context, progress, turn=turn, turns_of_a_round=turns_of_a_round(context)).run()


def hear(
    context: Context,
    progress: RunProgress,
    clock: Clock,
    inbox: TurnsInbox,
    replay: ShardedReplay,
) -> None:
    """What all actors did in this turn; its rows are in the replay now."""
    with context.phases("waiting for data"):
        clock.wait_for(lambda: inbox._has_all(context.acting), "the steps of all actors")
    clock.turn += 1
    steps = 0
    for actor in context.acting:
        message = inbox._of(actor)
        apex.heard(progress, replay, message)
        steps += int(message["steps"])
    if replay.all_size >= apex.ready_size(context):
        clock.owed += context.experiment.options.updates_per_step * steps


class Clock:
    """Which turn it is, what learning is owed to it; a checkpoint holds the actors too."""

    def __init__(self, context: Context, inbox: TurnsInbox) -> None:
        self._context, self._inbox = context, inbox
        self._store = context.worker.weights(TURNS, writer=0)
        self.turn = 0
        self.owed = 0.0  # gradient steps that the environment steps so far have a right to

    def show(self, *, turn: int, learned: int, asked: int = 0) -> None:
        self._store.publish({"turn": turn, "learned": learned, "asked": asked})

    def wait_for(self, ready: Any, what: str) -> None:
        worker = self._context.worker
        wait_of(worker)(ready, f"turn {self.turn}", what, worker.timeout)

    def state(self) -> dict[str, Any]:
        actors = self._states()
        if actors is None:
            return {"turns": None}
        return {"turns": {"turn": self.turn, "owed": self.owed, "actors": actors}}

    def _states(self) -> list[Any] | None:
        """Of all actors, which wait for the next turn. None where the run cannot be resumed
        exactly: without its replay, or where an actor had been restarted."""
        context, inbox = self._context, self._inbox
        if self.turn == 0:
            return []  # no step was taken: new episodes are the same episodes
        if not context.experiment.options.checkpoint_replay:
            return None
        inbox._kept.clear()
        self.show(turn=self.turn - 1, learned=self.turn - 1, asked=self.turn)
        self.wait_for(lambda: len(inbox._kept) == len(context.acting), "the states of all actors")
        states = [inbox._kept[rank] for rank in context.acting]
        return None if any(state["life"] for state in states) else states

    def load_state(self, state: dict[str, Any]) -> list[str]:
        turns = state["turns"]
        if turns is not None:
            self.turn, self.owed = int(turns["turn"]), float(turns["owed"])
            self._context.session = int(state["crew"]["session"])  # the same episodes continue
        return []


class TurnsInbox(apex.ReportsInbox):
    """Messages by actor, and the states of actors: those to resume from, and those that were asked
    for."""

    def __init__(self, senders: list[int], resumed: dict[int, Any]) -> None:
        super().__init__(senders)
        self._resumed = resumed
        self._by_actor: dict[int, deque[Message]] = {}
        self._kept: dict[int, Any] = {}
        self._notes: list[str] = []
        self._mine = threading.Lock()

    def put(self, message: Message) -> None:
        if "goodbye" in message:
            super().put(message)
            return
        with self._mine:
            self._by_actor.setdefault(int(message["actor"]), deque()).append(message)

    def state_of(self, actor: int, restarts: int) -> Any:
        """For an actor that starts: where its episodes stood. Not for one that was restarted."""
        return self._resumed.get(actor) if restarts == 0 else None

    def keep(self, state: dict[str, Any]) -> None:
        with self._mine:
            self._kept[int(state["actor"])] = state

    def note(self, texts: list[str]) -> None:
        with self._mine:
            self._notes += texts

    def _has_all(self, actors: list[int]) -> bool:
        with self._mine:
            return all(self._by_actor.get(actor) for actor in actors)

    def _of(self, actor: int) -> Message:
        with self._mine:
            return self._by_actor[actor].popleft()

    def _take_notes(self) -> list[str]:
        with self._mine:
            notes, self._notes = self._notes, []
        return notes
