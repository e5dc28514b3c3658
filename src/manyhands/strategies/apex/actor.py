"""An Ape-X actor: environments, a shard to write to, an inbox to report to."""

from __future__ import annotations

from typing import Any

from manyhands.algorithms.off_policy import OffPolicy
from manyhands.engines.base import answer
from manyhands.errors import CollectiveError
from manyhands.replay.frames import HeldFrames
from manyhands.replay.sharded import ShardWriter
from manyhands.strategies import experience
from manyhands.strategies.context import Context, Part
from manyhands.strategies.messages import Message, Weights, goodbye, send
from manyhands.trees import Array
from manyhands.types import Batch

REPLAY, REPORTS = "manyhands: replay", "manyhands: reports"


class Actor(Part):
    """Everything that one actor has. Freely: the replay's limit alone keeps it from running away
    from the learner."""

    transitions: experience.Transitions

    def __init__(self, context: Context) -> None:
        self.context, self.options = context, context.experiment.options
        self.outbox = ReportsOutbox(context)
        self.writer = ShardWriter.connect(
            context.worker, REPLAY, context.part.rank, timeout=context.worker.timeout
        )
        framed, room = experience.frames_of(context) is not None, experience.held_room
        self._held = HeldFrames(self.writer.frames, room(context)) if framed else None
        self.weights = Weights(context)
        self.news = self.weights.pull()
        # Once the session is known, which decides the seeds.
        self.stepper = self.transitions = experience.Transitions(
            context, self._held, self.options.pull_every
        )
        self._hear()

    def _hear(self) -> None:
        """How much is explored depends on the steps of all actors."""
        if self.news is not None:
            self.transitions.steps_of_all = int(self.news["steps"])

    def goes_on(self) -> bool:
        return not self.context.stop

    def update(self) -> None:
        self.append(*self.take())
        self.report()
        self.pull()

    def pull(self) -> None:
        self.news = self.weights.pull()
        self._hear()

    def take(self) -> tuple[Batch | None, Array | None]:
        """The transitions since the weights were last looked for, and their first priorities."""
        rows = self.transitions.take()
        if rows is None or not self.options.prioritized:
            return rows, None
        with self.context.phases("first priorities"):
            return rows, first_errors(self.context, self.transitions.whole(rows))

    def append(self, rows: Batch | None, errors: Array | None) -> None:
        if self._held is not None:
            self._held.release()
        if rows is not None:
            waited = self.writer.seconds_waited
            self.writer.append(rows, errors)
            self.context.phases.add("waiting for room", self.writer.seconds_waited - waited)

    def report(self) -> None:
        """The main learner hears of steps and finished episodes."""
        steps, episodes = self.transitions.taken()
        send(self.context, self.outbox, {}, steps=steps, episodes=episodes)

    def close(self) -> None:
        self.writer.flush()
        goodbye(self.context, self.outbox)
        self.outbox.flush()


class ReportsOutbox:
    """To the main learner's inbox: one message under way, so that they arrive in order."""

    def __init__(self, context: Context) -> None:
        self.service = context.worker.service(REPORTS)
        self._timeout = context.worker.timeout
        self._sent: Any = None

    def put(self, message: Message) -> None:
        self.flush()
        self._sent = self.service.call_async("put", message)

    def flush(self) -> None:
        if self._sent is None:
            return
        try:
            answer(self._sent, self._timeout)
        except TimeoutError:
            raise CollectiveError(
                f"{self.service.name}: not confirmed within {self._timeout:g} s"
            ) from None
        self._sent = None


def first_errors(context: Context, rows: Batch) -> Array:
    """TD errors by the weights that are here: no row waits for the learner to look at it."""
    see, algorithm = context.normaliser.apply, context.algorithm
    assert isinstance(algorithm, OffPolicy)
    seen = rows | {"obs": see(rows["obs"]), "next_obs": see(rows["next_obs"])}
    return algorithm.td_errors(seen, own_target=True)
