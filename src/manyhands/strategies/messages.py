"""What travels between the workers of an asynchronous run.

    actor ──► learner    messages: plain dicts, in channels that hold a few of each sender
    learner ──► actor    the newest weights, with the word to stop

A message says who made it (`actor`, `restarts`, `number`), with which policy (`version`), what
happened meanwhile (`steps`, `episodes`, `seen`), and carries its load: an unroll, a gradient. The
last one says `goodbye`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from manyhands.engines import stopping
from manyhands.engines.base import Channel, WeightStore, wait_of
from manyhands.errors import CollectiveError, WorkerError
from manyhands.math.optimiser import check_weights
from manyhands.math.running_stats import Moments
from manyhands.strategies.context import Context
from manyhands.strategies.progress import episode_rows

Message = dict[str, Any]
POLICY, MESSAGES = "manyhands: policy", "manyhands: messages"
_FIRST_TRY, _LONGEST_TRY = 0.005, 0.5  # seconds at one of several channels, before the next


class Outbox(Protocol):
    """Where messages are put: a channel, or what does as one does."""

    def put(self, tree: Any, /) -> None: ...


# -- to those that learn ---------------------------------------------------------------------------


def channel_to(context: Context, rank: int) -> Channel:
    """The channel that the worker of that rank reads."""
    capacity = context.experiment.run.queue
    return context.worker.channel(f"{MESSAGES} {rank}", reader=rank, capacity=capacity)


def send(
    context: Context,
    channel: Outbox,
    load: Message,
    *,
    steps: int,
    episodes: Any = (),
    otherwise: Sequence[Channel] = (),
) -> int:
    """Put a message into a channel; its number. Waits while there is no room.

    Where the channel stays full, one of the `otherwise` is tried.
    """
    context.sent += 1
    seen = {}
    for name, stats in context.statistics.items():
        seen[name] = stats.delta()
        stats.pending = Moments.empty(stats.shape)  # handed over, once
    message = load | {
        "actor": context.rank,
        "restarts": context.restarts,
        "number": context.sent,
        "steps": steps,
        "episodes": episode_rows(context, episodes),
        "seen": seen,
    }
    with context.phases("waiting for room"):
        put_to_any([channel, *otherwise], message, context.worker.timeout)
    return context.sent


def goodbye(context: Context, *channels: Outbox) -> None:
    """The last message, to each that reads; with where this worker's time went."""
    last = {"goodbye": True, "actor": context.rank, "restarts": context.restarts}
    for channel in channels:
        channel.put(last | {"sent": context.sent, "phases": context.phases.totals()})


def put_to_any(channels: Sequence[Any], message: Message, timeout: float) -> None:
    """To the first that has room, before the deadline.

    WHY not to one alone: of several learners that step together, one may have refused more than
    the others, and waits for data; the others are full, and wait for it. Whoever waited for room
    at a full one would keep all of them waiting.
    """
    if len(channels) == 1:
        channels[0].put(message)
        return
    waited, patience = 0.0, _FIRST_TRY
    while True:
        for channel in channels:
            try:
                channel.put(message, timeout=patience)
                return
            except CollectiveError:
                waited += patience  # counted so, a reader that is gone, which fails at once, is not
                if 0 < timeout <= waited:  # asked for ever
                    raise
        patience = min(2 * patience, _LONGEST_TRY)  # every try copies the message anew


class Inbox:
    """The messages that one learner or server gets, in order of arrival."""

    def __init__(self, context: Context, channel: Channel, senders: list[int]) -> None:
        self._context, self._channel = context, channel
        self._room = max(1, context.experiment.run.queue * len(senders))
        self._looks, self._seen = 0, 0.0
        self.left: dict[int, Message] = {}  # the last messages of those that have gone
        self.senders = senders

    def get(self) -> Message | None:
        """The next message; None when it was a good-bye."""
        with self._context.phases("waiting for data"):
            message: Message = self._channel.get(timeout=self._context.worker.timeout)
        if self._looks % 16 == 0:  # a look costs a call on some engines
            self._seen += len(self._channel)
        self._looks += 1
        if "goodbye" in message:
            self.left[int(message["actor"])] = message
            return None
        return message

    @property
    def all_left(self) -> bool:
        """Whether everybody has said good-bye, or is lost."""
        if len(self.left) == len(self.senders):
            return True
        return not self.senders_left - self._context.worker.lost()

    @property
    def waiting(self) -> int:
        """Messages that can be had at once."""
        return len(self._channel)

    @property
    def senders_left(self) -> set[int]:
        """Those that have not said good-bye."""
        return set(self.senders) - self.left.keys()

    def wait(self, ready: Callable[[], bool], doing: str, more: float = 0.0) -> None:
        """Until there is a message, or it is ready; a CollectiveError at the deadline, or so many
        seconds after it."""
        context = self._context
        with context.phases("waiting for data"):
            wait_of(context.worker)(
                lambda: self.waiting > 0 or ready(),
                doing,
                ", ".join(context.roles.name(rank) for rank in sorted(self.senders_left)),
                context.worker.timeout and context.worker.timeout + more,
            )

    @property
    def lost(self) -> int:
        """Messages of writers that died before these could be read."""
        return int(getattr(self._channel, "lost", 0))

    @property
    def fill(self) -> float:
        """How full the queue was on average, from 0 to 1."""
        looks = -(-self._looks // 16)
        return min(1.0, self._seen / self._room / looks) if looks else 0.0

    def drain(self) -> list[Message]:
        """Until everybody has said good-bye: messages that came too late to be learned from."""
        late = []
        while not self.all_left:
            try:
                self.wait(lambda: self.all_left, "the last messages")
                message = self.get() if self.waiting else None
            except CollectiveError as error:
                not_heard_of(self._context, self.senders_left, error)
                break
            if message is not None:
                late.append(message)
        return late


def not_heard_of(context: Context, missing: set[int], error: CollectiveError) -> None:
    """The run has ended, and these have not said good-bye: an error, or they are done without."""
    names = ", ".join(context.roles.name(rank) for rank in sorted(missing))
    said = f"the run has ended, but {names} did not say that they had finished"
    if context.experiment.run.recovery == "stop" or stopping.reason():
        raise CollectiveError(f"{said}: {error}") from None
    print(f"manyhands: {said}; it ends without them", file=sys.stderr, flush=True)


# -- to those that act -----------------------------------------------------------------------------


class Weights:
    """The newest weights: the main worker publishes them, the others take them over."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store: WeightStore = context.worker.weights(POLICY, writer=0)
        self._newest = 0  # of the store's own count

    def publish(self, **news: Any) -> None:
        """The main worker's weights for all, with whatever else they are to know."""
        context = self._context
        if context.is_main:
            check_weights(context.algorithm)
            tree = {
                "weights": context.algorithm.flat.data.cpu(),
                "version": context.algorithm.version,
                "session": context.session,
                "normaliser": {k: s.agreed.state() for k, s in context.statistics.items()},
                "stop": context.stop,
            }
            if context.changes is not None:
                tree["changes"] = context.changes.state()
            self._store.publish(tree | news)

    def pull(self, *, wait_for_newer: bool = False, more: float = 0.0) -> dict[str, Any] | None:
        """Take over the newest weights, if there are newer ones; waits for the very first, until
        the deadline or so many seconds after it."""
        context, wait = self._context, None
        if self._newest == 0 or wait_for_newer:
            wait = context.worker.timeout and context.worker.timeout + more
        try:
            found = self._store.pull(newer_than=self._newest, timeout=wait)
        except (CollectiveError, FileNotFoundError):  # the weights' memory goes with their writer
            if not context.run_is_over:
                raise
            context.stop, found = True, None
        if found is None:
            return None
        self._newest, news = found
        self.take(news)
        return dict(news)

    def take(self, news: dict[str, Any]) -> None:
        context = self._context
        flat, weights = context.algorithm.flat.data, news["weights"]
        if flat.shape != weights.shape:
            raise WorkerError(
                f"{context.name} has a network of {flat.numel():,} parameters, and the weights "
                f"that came from {context.roles.name(0)} are {weights.numel():,}: both must see "
                "the same environment and configuration"
            )
        flat.copy_(weights)
        context.algorithm.version, context.session = int(news["version"]), int(news["session"])
        context.stop = bool(news["stop"])
        if "changes" in news:
            context.take_changes(news["changes"])
        for name, stats in context.statistics.items():
            own = {f"pending_{k}": v for k, v in stats.pending.state().items()}
            stats.load_state(news["normaliser"][name] | own)
