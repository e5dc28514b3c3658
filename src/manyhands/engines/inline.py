"""Every worker in this process, exactly one at a time: deterministic, and pdb works.

Each worker is a thread, but only the holder of the baton runs. A worker passes the baton on only
where it would wait; then the next worker that can go on, counting upwards, gets it. Python's,
numpy's and torch's random states change hands with the baton, so that each worker draws the
numbers it would draw in a process of its own; at the end they are what they were before.

When nobody can go on, time jumps to the earliest deadline: a deadlock shows at once, by name.

Channels, weight stores and services are plain objects. What is put, published or passed is encoded
and decoded, so that the same copies are made, and the same things refused, as between processes.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from manyhands import roles, streams, wire
from manyhands.engines.base import (
    Channel,
    Place,
    Roster,
    Service,
    Sizes,
    Transport,
    TwoStepTransport,
    WeightStore,
    Worker,
    add_up,
    doing,
)
from manyhands.engines.calls import invoke, remote_error
from manyhands.engines.group import Group
from manyhands.engines.process import trim
from manyhands.errors import CollectiveError, ConfigError, ManyhandsError, WorkerError, described
from manyhands.trees import Array, Tree

_HERE = threading.local()


def current() -> InlineWorker | None:
    """The inline worker that runs in this thread."""
    return getattr(_HERE, "worker", None)


def solo(timeout: float) -> InlineWorker:
    """The one worker of a plain `python script.py`."""
    world = World(1, timeout)
    _HERE.worker = world.workers[0]
    return world.workers[0]


def run(
    program: Callable[[], Any], workers: int, timeout: float, given: roles.Roles | None = None
) -> list[Any]:
    """Run `program` once for each worker; their results by rank. Raises WorkerError."""
    return World(workers, timeout, given).run(program)


class World:
    """The baton, and what the workers share."""

    def __init__(self, size: int, timeout: float, given: roles.Roles | None = None) -> None:
        self.size, self.timeout = size, timeout
        self.roles = given or roles.from_environment(size)
        self.turn = 0
        self.turns = 0  # hand-overs so far: a watchdog sees whether the baton moves
        self.on_turn: Callable[[int], None] = lambda rank: None
        self.failures: list[tuple[int, BaseException]] = []
        self.boards: dict[tuple[int, ...], _Meeting] = {}
        self.channels: dict[str, InlineChannel] = {}
        self.stores: dict[str, InlineWeights] = {}
        self.services: dict[str, tuple[int, object]] = {}
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._waits: list[_Wait | None] = [None] * size
        self._finished = [False] * size
        self.threads: list[int | None] = [None] * size  # for a watchdog to look into
        self._streams: list[dict[str, Any]] = [{} for _ in range(size)]
        self._main: list[Any] = [None] * size
        self.looks: list[Callable[[], dict[str, float]] | None] = [None] * size
        self.workers = [InlineWorker(self, rank) for rank in range(size)]

    def state(self, rank: int) -> str:
        if self._finished[rank]:
            return "finished"
        return "running" if self.turn == rank else "waiting"

    # -- running -------------------------------------------------------------------------------

    def run(self, program: Callable[[], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        if self.size > 1:
            self._streams = [streams.copy_all(streams.take_all()) for _ in range(self.size)]
        with streams.given_back():
            self._run(program, results)
        if self.failures:
            raise self._failure()
        return results

    def _run(self, program: Callable[[], Any], results: list[Any]) -> None:
        threads = [
            threading.Thread(
                target=self._work,
                args=(rank, program, results),
                name=f"worker-{rank}",
                daemon=True,
            )
            for rank in range(1, self.size)
        ]
        for thread in threads:
            thread.start()
        outside, _HERE.worker = current(), None
        try:
            self._work(0, program, results)  # WHY: worker 0 in the main thread, for pdb and Ctrl-C
            for thread in threads:
                thread.join(5.0)  # all have failed or finished by now; a stuck one is a daemon
        finally:
            _HERE.worker = outside

    def _work(self, rank: int, program: Callable[[], Any], results: list[Any]) -> None:
        _HERE.worker = self.workers[rank]
        self.threads[rank] = threading.get_ident()
        try:
            if rank:
                self._gates[rank].acquire()  # until worker 0 waits for the first time
                self._raise_if_failed(rank)
            self._restore(rank)
            results[rank] = program()
        except SystemExit as leave:
            if leave.code not in (None, 0):
                self.failures.append((rank, leave))
        except BaseException as error:
            self.failures.append((rank, error))
        finally:
            self._finished[rank] = True
            self._waits[rank] = None
            self._hand_on(rank)
            if rank == 0:
                self._see_the_others_out()

    def _see_the_others_out(self) -> None:
        """Worker 0 is the main thread: it stays until the others have finished."""
        while not all(self._finished):
            if not self._gates[0].acquire(timeout=1.0) and self.failures:
                return  # one of them does not react; its thread ends with the process

    def _failure(self) -> ManyhandsError | BaseException:
        causes = [f for f in self.failures if not isinstance(f[1], CollectiveError)]
        rank, error = (causes or self.failures)[0]
        who = self.workers[rank].place.name
        if isinstance(error, KeyboardInterrupt):
            return error
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            return WorkerError(who, f"left with exit code {error.code}", rank=rank, exit_code=code)
        text = "".join(traceback.format_exception(trim(error))).rstrip()
        return WorkerError(who, f"failed:\n{text}", rank=rank)

    # -- the baton -----------------------------------------------------------------------------

    def wait_until(self, rank: int, ready: Callable[[], bool], doing: str, on: str,
                   timeout: float) -> None:  # fmt: skip
        """Return when `ready()`; CollectiveError when that can no longer come true in time."""
        if ready():
            return
        wait = _Wait(ready, doing, on, timeout or float("inf"))
        self._waits[rank] = wait
        self._save(rank)
        self._hand_on(rank)
        self._gates[rank].acquire()
        self._waits[rank] = None
        self._restore(rank)
        if ready():
            return
        self._raise_if_failed(rank)
        others = "; ".join(
            f"{self.workers[r].place.name} "
            + ("has finished" if self._finished[r] else f"waits in {w.doing}" if w else "runs")
            for r, w in enumerate(self._waits)
            if r != rank
        )
        raise CollectiveError(f"{doing}: {on} can no longer come ({others})")

    def breathe(self, rank: int) -> None:
        """Let the others have their turn, where a worker of another engine would wait for one."""
        if self.size == 1:
            return
        self._save(rank)
        self._hand_on(rank)
        self._gates[rank].acquire()
        self._restore(rank)
        self._raise_if_failed(rank)

    def _hand_on(self, rank: int) -> None:
        self.turns += 1
        order = [(rank + i) % self.size for i in range(1, self.size + 1)]
        alive = [r for r in order if not self._finished[r]]
        if not alive:
            if rank != 0:
                self._gates[0].release()
            return
        if self.failures:  # everybody gets the baton once more, to fail in his turn
            nxt = alive[0]
        else:
            nxt = next((r for r in alive if self._can_go_on(r)), -1)
            if nxt < 0:  # all wait: let the one whose deadline is nearest have it
                nxt = min(alive, key=lambda r: self._waits[r].timeout)  # type: ignore[union-attr]
        self.turn = nxt
        self.on_turn(nxt)
        self._gates[nxt].release()

    def _can_go_on(self, rank: int) -> bool:
        wait = self._waits[rank]
        return wait is None or wait.ready()

    def _raise_if_failed(self, rank: int) -> None:
        for other, error in self.failures:
            if other != rank:
                raise CollectiveError(
                    f"{self.workers[other].place.name} failed: {described(error)}"
                )

    # -- random states change hands with the baton ----------------------------------------------

    def _save(self, rank: int) -> None:
        if self.size == 1:
            return
        self._streams[rank] = streams.take_all()
        self._main[rank] = sys.modules.get("__main__")

    def _restore(self, rank: int) -> None:
        if self.size == 1:
            return
        streams.put_all(self._streams[rank])
        if self._main[rank] is not None:
            sys.modules["__main__"] = self._main[rank]


class _Wait:
    def __init__(self, ready: Callable[[], bool], doing: str, on: str, timeout: float) -> None:
        self.ready, self.doing, self.on, self.timeout = ready, doing, on, timeout


class InlineWorker(Worker):
    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        n = world.size
        role, role_rank, role_size = world.roles.of(rank)
        self.place = Place(
            "inline", rank, n, rank, n, role=role, role_rank=role_rank, role_size=role_size
        )
        self.group = Group(InlineTransport(world, rank, range(n)))

    @property
    def timeout(self) -> float:
        return self.world.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.world.timeout = seconds  # all workers wait, and are watched, in one process

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        return InlineChannel(self, name, reader, capacity)

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        return InlineWeights(self, name, writer)

    def serve(self, name: str, target: object) -> None:
        if name in self.world.services:
            raise ConfigError(f"a service named {name!r} is already offered")
        self.world.services[name] = (self.place.rank, target)

    def service(self, name: str, timeout: float | None = None) -> Service:
        limit = self.timeout if timeout is None else timeout
        self.wait(lambda: name in self.world.services, f"service {name!r}", "its offer", limit)
        return InlineService(self, name)

    def breathe(self) -> None:
        self.world.breathe(self._who().place.rank)

    def _who(self) -> InlineWorker:
        """Whose thread this is. A service's code runs in its caller's, with its owner's handles."""
        return current() or self

    def show(self, look: Callable[[], dict[str, float]]) -> None:
        self.world.looks[self.place.rank] = look

    def peers(self) -> list[dict[str, Any]]:
        """All are threads of this process: where one beats, all do."""
        return [
            {
                "rank": rank,
                "role": self.world.workers[rank].place.role,
                "state": self.world.state(rank),
                "phases": {} if look is None else look(),
            }
            for rank, look in enumerate(self.world.looks)
        ]

    def close(self) -> None:
        pass  # a thread that returns has left

    def wait(self, ready: Callable[[], bool], doing: str, on: str, timeout: float) -> None:
        self.world.wait_until(self._who().place.rank, ready, doing, on, timeout)


# -- collectives -----------------------------------------------------------------------------------


class _Meeting:
    """Where the members of one group lay down what they bring, call after call."""

    def __init__(self) -> None:
        self.laid: dict[int, dict[int, Any]] = {}  # call -> rank -> what
        self.taken: dict[int, int] = {}


class InlineTransport(TwoStepTransport):
    def __init__(self, world: World, world_rank: int, members: Sequence[int]) -> None:
        self._world, self._me, self._members = world, world_rank, tuple(members)
        self.rank, self.size = self._members.index(world_rank), len(self._members)
        self.roster = Roster([f"{world.roles.name(m)} (inline)" for m in self._members])
        self._meeting = world.boards.setdefault(self._members, _Meeting())
        self._call = 0
        self._doing = ""
        self.timeout = world.timeout

    def exchange(self, note: bytes) -> list[bytes]:
        self._doing = doing(note)
        return self._meet(note)

    def _meet(self, mine: Any) -> list[Any]:
        call, self._call = self._call, self._call + 1
        laid = self._meeting.laid.setdefault(call, {})
        laid[self.rank] = mine
        missing = [self.roster.name(r) for r in range(self.size) if r not in laid]
        self._world.wait_until(
            self._me,
            lambda: len(laid) == self.size,
            self._doing,
            ", ".join(missing),
            self.timeout,
        )
        self._meeting.taken[call] = self._meeting.taken.get(call, 0) + 1
        if self._meeting.taken[call] == self.size:
            del self._meeting.laid[call], self._meeting.taken[call]
        return [laid[r] for r in range(self.size)]

    def _reduce(self, arrays: list[Array], op: str) -> list[Array]:
        everyone = self._meet([a.copy() for a in arrays])
        return [add_up(parts, op) for parts in zip(*everyone, strict=True)]

    def _broadcast(self, arrays: list[Array], root: int) -> None:
        sent = self._meet([a.copy() for a in arrays] if self.rank == root else None)[root]
        for mine, theirs in zip(arrays, sent, strict=True):
            mine[:] = theirs

    def _gather(self, parts: list[Array], sizes: Sizes, root: int | None) -> list[Array] | None:
        everyone = self._meet([p.copy() for p in parts])
        if root is not None and root != self.rank:
            return None
        return [np.concatenate(leaf) for leaf in zip(*everyone, strict=True)]

    def split(self, members: Sequence[int]) -> Transport:
        return InlineTransport(self._world, self._me, [self._members[m] for m in members])

    def close(self) -> None:
        pass  # nothing is held but memory


# -- channels, weights and services ----------------------------------------------------------------


class InlineChannel(Channel):
    """All handles of one name share the queue; what is put is encoded, so that it is a copy."""

    def __init__(self, worker: InlineWorker, name: str, reader: int, capacity: int) -> None:
        self._worker, self._name, self._reader = worker, name, reader
        first = worker.world.channels.setdefault(name, self)
        if first is self:
            self._queue: deque[tuple[int, bytearray]] = deque()  # (writer, tree)
            self._capacity = capacity
        self._first = first

    def put(self, tree: Tree, timeout: float | None = None) -> None:
        first, me = self._first, self._worker.place.rank
        self._worker.wait(
            lambda: sum(writer == me for writer, _ in first._queue) < first._capacity,
            f"channel {self._name!r}: put",
            f"room (the reader is worker {self._reader})",
            self._worker.timeout if timeout is None else timeout,
        )
        first._queue.append((me, wire.encode(tree)))

    def get(self, timeout: float | None = None) -> Tree:
        first = self._first
        self._worker.wait(
            lambda: bool(first._queue),
            f"channel {self._name!r}: get",
            "something to read",
            self._worker.timeout if timeout is None else timeout,
        )
        return wire.decode(first._queue.popleft()[1])

    def __len__(self) -> int:
        return len(self._first._queue)


class InlineWeights(WeightStore):
    def __init__(self, worker: InlineWorker, name: str, writer: int) -> None:
        self._worker, self._name, self._writer = worker, name, writer
        self._first = worker.world.stores.setdefault(name, self)
        self._version, self._data = 0, b""

    def publish(self, tree: Tree) -> int:
        if self._worker.place.rank != self._writer:
            raise ConfigError(f"weights {self._name!r}: only worker {self._writer} publishes")
        self._first._data = bytes(wire.encode(tree))
        self._first._version += 1
        return self._first._version

    def pull(self, newer_than: int = 0, timeout: float | None = None) -> tuple[int, Tree] | None:
        first = self._first
        if timeout is not None:
            self._worker.wait(
                lambda: first._version > newer_than,
                f"weights {self._name!r}: pull",
                f"version {newer_than + 1} from worker {self._writer}",
                timeout,
            )
        if first._version <= newer_than:
            return None
        return first._version, wire.decode(first._data)


class InlineService(Service):
    def __init__(self, worker: InlineWorker, name: str) -> None:
        self._worker, self._key, self.timeout = worker, name, worker.timeout
        self._rank, self._target = worker.world.services[name]
        self.name = f"service {name!r} of worker {self._rank}"

    def call_async(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._worker.breathe()  # a call waits for an answer: the others go on meanwhile
        # WHY encode both ways: the same copies, and the same refusals, as between processes.
        given, named = wire.decode(wire.encode([list(args), kwargs]))
        try:
            value = invoke(self._target, method, given, named)
            future.set_result(wire.decode(wire.encode(value)))
        except Exception as error:
            future.set_exception(remote_error(self.name, method, error))
        return future
