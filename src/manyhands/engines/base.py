"""What a strategy may ask of an engine. Keep it this small.

    Transport   moves bytes between the workers of a group; one per engine
    Group       collectives over nested arrays, written once on top of Transport (group.py)
    Channel     bounded many-to-one queue, with back-pressure
    WeightStore versioned publish / pull of parameters
    Service     a named object in one worker, its methods called from the others
    Worker      who am I (role, rank, size, host), and the door to all of the above

Every wait has a deadline and names whom it waits for. Nothing here is ever unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands import roles
from manyhands.errors import CollectiveError, ConfigError, SupportError
from manyhands.trees import Array, Tree

if TYPE_CHECKING:
    from manyhands.engines.group import Group

DEFAULT_TIMEOUT = 60.0  # seconds that any wait may take; 0 means for ever, by explicit choice
LONGEST_TIMEOUT = 1e9  # seconds; the clocks of Python, torch and the kernel take little more

# sizes[rank][leaf] in bytes, computed by Group from the notes of all workers
Sizes = list[list[int]]
Check = Callable[[list[bytes]], Sizes]


def seconds(name: str, timeout: Any) -> float:
    """A deadline that a user has given.

    CRUCIAL: every comparison with NaN is false, so that it would pass for 0: for ever, unasked.
    """
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not number or not 0 <= timeout <= LONGEST_TIMEOUT:
        shown = f"{timeout:g}" if isinstance(timeout, float) else repr(timeout)
        most = f"; {LONGEST_TIMEOUT:g} at the most" if number and timeout > 0 else ""
        raise ConfigError(f"{name} {shown}: seconds, or 0 to wait for ever{most}")
    return float(timeout)


class Patience:
    """How to wait: spin, then give the core away in turns, then sleep an eighth of the time waited.

    WHY: a wake-up through the kernel costs 50-90 µs, a spin on shared memory 1 µs; but a spinning
    waiter steals the core that the other side may need. In proportion to the wait, the sleep adds
    at most an eighth to it, whatever its length, with no lost wake-ups and nothing to leak. Whoever
    has waited for seconds looks less often: a thousand looks a second are a thirtieth of a core.

    Time asleep is not time waited: between two looks no more than a second counts. A machine that
    was suspended, or a process group that was stopped, goes on where it was.
    """

    SPIN_SECONDS = 20e-6
    YIELD_SECONDS = 120e-6
    LONGEST_SLEEP = 1e-3  # of a wait up to half a second; then a 500th of it
    LONGEST_OF_ALL = 20e-3
    LONGEST_LOOK = 1.0  # that is counted between two looks

    def __init__(self, timeout: float) -> None:
        if not timeout >= 0:  # what somebody has worked out as left: it must not mean for ever
            seconds("timeout", timeout)
        self.start = self._looked = time.perf_counter()
        self.timeout = timeout if timeout > 0 else float("inf")
        self._asleep = 0.0

    @property
    def waited(self) -> float:
        now = time.perf_counter()
        if now - self._looked > self.LONGEST_LOOK:
            self._asleep += now - self._looked - self.LONGEST_LOOK
        self._looked = now
        return now - self.start - self._asleep

    @property
    def over(self) -> bool:
        return self.waited > self.timeout

    @property
    def left(self) -> float:
        """Seconds; never less than a millisecond."""
        return max(self.timeout - self.waited, 1e-3)

    def pause(self) -> bool:
        """Wait a little. True when it really slept: the moment to look at deadlines and deaths."""
        waited = self.waited
        if waited < self.SPIN_SECONDS and not _OVERSUBSCRIBED:
            return False
        if waited < self.YIELD_SECONDS:
            os.sched_yield()
            return False
        longest = min(max(waited / 500, self.LONGEST_SLEEP), self.LONGEST_OF_ALL)
        time.sleep(min(waited / 8, longest))
        return True


def cores() -> int:
    """Cores that this process may use: a container or a pinned job may have fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# With fewer cores than workers a spin keeps the other side from running at all.
_OVERSUBSCRIBED = int(os.environ.get("MANYHANDS_LOCAL_SIZE", "1")) > cores()


class Roster:
    """Who the workers are, in words. Engines that know more (a pid, a heartbeat) override it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    def name(self, rank: int) -> str:
        return self.names[rank]

    def status(self, rank: int) -> str:
        """What is known of that worker right now: ' (at train.py:8, heartbeat 0.1 s ago)'."""
        return ""

    def is_there(self, rank: int) -> bool:
        """Whether that worker still runs, as far as is known."""
        return True

    def raise_if_gone(self, ranks: Sequence[int], doing: str) -> None:
        """CollectiveError when one of `ranks` can no longer come. Called while waiting."""

    def late(self, ranks: Sequence[int], doing: str, waited: float) -> CollectiveError:
        who = "; ".join(f"{self.name(r)}{self.status(r)}" for r in ranks)
        return CollectiveError(
            f"{doing}: waited {waited:.1f} s for {who}. If it needs that long, allow it more "
            "time: Parallel(timeout=SECONDS) or `manyhands launch --timeout SECONDS`"
        )


# (is it there, doing what, waiting for what, seconds): returns, or raises at the deadline
Wait = Callable[[Callable[[], bool], str, str, float], None]


def wait_for(
    ready: Callable[[], bool], doing: str, on: str, timeout: float, roster: Roster | None = None
) -> None:
    """Look until it is ready, with longer and longer breaks; 0 seconds: for ever."""
    patience = Patience(timeout)
    while not ready():
        if not patience.pause():
            continue
        if roster is not None:
            roster.raise_if_gone([], doing)  # the run was given up
        if patience.over:
            raise CollectiveError(f"{doing}: waited {patience.waited:.1f} s for {on}")


def wait_of(worker: Any) -> Wait:
    """How to wait on the engine of that `Parallel` or worker.

    Inline has a way of its own: whoever waits passes the baton on. Elsewhere a wait ends early when
    the run has been given up.
    """
    worker = getattr(worker, "worker", worker)
    own: Wait | None = getattr(worker, "wait", None)
    if own is not None:
        return own
    roster = worker.group.transport.roster
    return lambda ready, doing, on, timeout: wait_for(ready, doing, on, timeout, roster)


class Transport(ABC):
    """Bytes between the `size` workers of one group. All of them make the same calls in order.

    A `note` is a few bytes that say what this worker believes it is doing. It travels with (or
    before) the data, and `check` sees the notes of all workers before any data is used: workers
    that disagree get an error instead of garbage or a hang.
    """

    rank: int
    size: int
    roster: Roster
    timeout: float

    @abstractmethod
    def exchange(self, note: bytes) -> list[bytes]:
        """Every worker's note, by rank."""

    @abstractmethod
    def reduce(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        """Element-wise sum, max or min of flat arrays, added up in an order that never varies."""

    @abstractmethod
    def broadcast(self, note: bytes, arrays: list[Array], root: int, check: Check) -> None:
        """Fill everybody's flat `arrays` in place with those of `root`."""

    @abstractmethod
    def gather(
        self, note: bytes, parts: list[Array], root: int | None, check: Check
    ) -> list[Array] | None:
        """Per leaf, the uint8 parts of all workers end to end: on `root`, or on all if None."""

    @abstractmethod
    def split(self, members: Sequence[int]) -> Transport:
        """A transport among `members` (ranks of this one, sorted, this worker included).

        Called by every worker of this transport at the same time, each with its own set; the sets
        do not overlap.
        """

    def split_off(self, members: Sequence[int], name: str) -> Transport:
        """As `split`, but only the members call it; the name is that of no other group."""
        return self.split(members)

    def takes(self, tensor: Any) -> bool:
        """Whether `reduce_tensor` can work on this tensor where it is (a GPU, with nccl)."""
        return False

    def reduce_tensor(self, tensor: Any) -> None:
        """Sum a tensor over all workers, in place, on its own device."""
        raise SupportError("this transport moves host memory only")

    @abstractmethod
    def close(self) -> None:
        """Let go of what this transport holds. Never waits for others; safe to call twice."""


class TwoStepTransport(Transport):
    """Notes first, then the data: for engines that cannot move both in one meeting."""

    def reduce(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        check(self.exchange(note))
        return self._reduce(arrays, op)

    def broadcast(self, note: bytes, arrays: list[Array], root: int, check: Check) -> None:
        check(self.exchange(note))
        self._broadcast(arrays, root)

    def gather(
        self, note: bytes, parts: list[Array], root: int | None, check: Check
    ) -> list[Array] | None:
        return self._gather(parts, check(self.exchange(note)), root)

    @abstractmethod
    def _reduce(self, arrays: list[Array], op: str) -> list[Array]: ...

    @abstractmethod
    def _broadcast(self, arrays: list[Array], root: int) -> None: ...

    @abstractmethod
    def _gather(self, parts: list[Array], sizes: Sizes, root: int | None) -> list[Array] | None: ...


def add_up(parts: Sequence[Array] | Array, op: str) -> Array:
    """Rank 0's with rank 1's, that with rank 2's, and so on: one order, so the same bits."""
    if len(parts) == 1:
        return parts[0].copy()
    result: Array = _OPS[op](parts[0], parts[1])
    for part in parts[2:]:
        _OPS[op](result, part, out=result)
    return result


def total(parts: Array, op: str) -> Array:
    """`add_up` of the rows of [workers, n], to the same bits; in one call where that is faster."""
    if len(parts) < 5:
        return add_up(parts, op)
    if parts.shape[1] == 1:  # CRUCIAL: `reduce` adds up numbers in one line by pairs
        last: Array = _OPS[op].accumulate(parts, axis=0, dtype=parts.dtype)[-1]
        return last
    # CRUCIAL: numpy begins a sum with 0, and 0 + -0 is not -0
    first = {"initial": parts.dtype.type(complex(-0.0, -0.0) if parts.dtype.kind == "c" else -0.0)}
    result: Array = _OPS[op].reduce(
        parts, axis=0, dtype=parts.dtype, **(first if op == "sum" else {})
    )
    return result


def worker_names(size: int, hosts: Sequence[str]) -> list[str]:
    """Every worker in words, with the role it plays where the launcher has given out roles."""
    given = roles.from_environment(size)
    return [f"{given.name(rank)} on {host}" for rank, host in enumerate(hosts)]


_OPS: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def doing(note: bytes) -> str:
    """`gather (call 12)`: what a note says its worker was doing."""
    try:
        call, number = json.loads(note)[:2]
    except (ValueError, TypeError):
        return "a collective call"
    return f"{call} (call {number})" if isinstance(number, int) else str(call)


class Channel(ABC):
    """Bounded many-to-one queue of trees. Any worker may put; only the reader gets."""

    @abstractmethod
    def put(self, tree: Tree, timeout: float | None = None) -> None:
        """Hand over a tree; waits while the channel is full (CollectiveError at the deadline)."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> Tree:
        """The next tree in order of arrival (CollectiveError at the deadline)."""

    @abstractmethod
    def __len__(self) -> int:
        """How many trees wait to be read (reader only)."""


class WeightStore(ABC):
    """Versioned parameters: one worker publishes, all may pull."""

    @abstractmethod
    def publish(self, tree: Tree) -> int:
        """Make these the newest weights. Versions are 1, 2, 3, ..."""

    @abstractmethod
    def pull(self, newer_than: int = 0, timeout: float | None = None) -> tuple[int, Tree] | None:
        """(version, tree) of the newest weights, or None when there is nothing newer.

        With a timeout, wait that long for something newer (CollectiveError at the deadline).
        """


def answer(future: Future[Any], timeout: float) -> Any:
    """The result of a call, with TimeoutError at the deadline; 0 seconds: for ever."""
    patience = Patience(timeout)
    while True:
        # In slices: a deadline of the kernel's would be over when a machine wakes up again.
        done, _ = wait([future], min(patience.left, Patience.LONGEST_LOOK))
        if done or patience.over:
            return future.result(0 if done else 1e-3)


class Service(ABC):
    """A handle on a named object in another worker. Its public methods can be called."""

    @abstractmethod
    def call_async(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call; `.result(timeout)` gives its value or raises the remote error."""

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call and wait for the value; a remote error arrives as WorkerError with its traceback."""
        future = self.call_async(method, *args, **kwargs)
        limit = self.timeout if timeout is None else timeout
        try:
            return answer(future, limit)
        except TimeoutError:
            raise CollectiveError(
                f"call {method!r}: no answer within {limit:g} s from {self.name}"
            ) from None

    timeout: float
    name: str


@dataclass(frozen=True)
class Place:
    """Where this worker stands."""

    engine: str = "inline"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    role: str = "worker"
    role_rank: int = 0
    role_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that writes and speaks for all: the first, of any role."""
        return self.rank == 0

    @property
    def name(self) -> str:
        if self.role == "worker":
            return f"worker {self.rank} of {self.size} on {self.host}"
        return f"{self.role} {self.role_rank} (worker {self.rank} of {self.size}) on {self.host}"


class Parts(ABC):
    """Channels, weight stores and services, as one worker has them."""

    @abstractmethod
    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        """The channel of that name; each writer may have `capacity` trees waiting in it.

        Every worker names the same reader and capacity.
        """

    @abstractmethod
    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        """The weight store of that name; every worker names the same writer."""

    @abstractmethod
    def serve(self, name: str, target: object) -> None:
        """Offer an object to the other workers; one call runs at a time."""

    @abstractmethod
    def service(self, name: str, timeout: float | None = None) -> Service:
        """A handle on the object served under that name; waits for it to appear."""


class Worker(Parts):
    """One worker's door to its engine."""

    place: Place
    timeout: float
    group: Group  # all workers together

    def hand_out(self, weights: Tree) -> Tree:
        """The main worker's weights, on all; every worker calls it, as for a collective."""
        return self.group.broadcast(weights)

    def breathe(self) -> None:
        """Where all workers share one process: let the others have their turn."""

    @property
    def restarts(self) -> int:
        """How often this worker was killed and started again."""
        return 0

    def alive(self) -> int | None:
        """How many workers are there now; None where a run does not outlast one that is gone."""
        return None

    def show(self, look: Callable[[], dict[str, float]]) -> None:
        """Let others see this worker's seconds by phase. `look` is asked from another thread."""

    def moves(self, sign: Callable[[], object]) -> None:
        """Let the launcher see that this worker gets on: `sign` gives another object whenever its
        main thread has done something. Asked from another thread."""

    def lost(self) -> set[int]:
        """Ranks of workers that have failed, or are not there, and that the run goes on without."""
        return set()

    def later(self) -> set[int]:
        """Ranks of workers that were not there at the beginning, and may come. To come counts as a
        restart, so that no seed is used twice."""
        return set()

    def away(self) -> set[int]:
        """Ranks of workers that do not run now: lost, being started again, not there yet."""
        return set()

    def peers(self) -> list[dict[str, Any]]:
        """What is known of each worker now: rank, role, state, seconds since its last heartbeat,
        where it is, its seconds by phase. Empty where none of it can be known."""
        return []

    def main_has_left(self) -> bool:
        """Whether the main worker is known to have finished: nobody waits for this one any more."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Leave: tell the others that no further call will come. Safe to call twice."""
