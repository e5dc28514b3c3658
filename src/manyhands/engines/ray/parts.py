"""Channel, WeightStore and Service between Ray actors: one coordinator a run.

    worker ── put / get / publish / pull / call ──> Coordinator (an asyncio actor without a CPU)
    worker <── letters: calls to serve, answers, news of the gone ── ear (a thread a worker)

WHY not call the workers' actors directly: Ray hands out the calls of a threaded actor from the
process's main thread (measured: a call waits until the main thread is idle), so a worker could
serve calls only if its program ran in a side thread, where signal handlers cannot be set. The
coordinator costs one more hop (about 1 ms) and leaves the main thread to the user's program.

Only references to large data pass through the coordinator; the data lies in the object store.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray

from manyhands import wire
from manyhands.engines.base import Channel, Roster, Service, WeightStore
from manyhands.engines.calls import invoke, remote_error
from manyhands.errors import CollectiveError, ConfigError, WorkerError
from manyhands.trees import Tree

_SMALL = 64 * 1024  # bytes that travel inside a call; above, the object store is cheaper
_POLL = 5.0  # seconds an ear listens before it asks again
_MARGIN = 10.0  # seconds beyond a wait's own deadline after which the coordinator counts as lost
OK, LATE, GONE = "ok", "late", "gone"
Reply = tuple[str, Any]
Message = Any  # bytes, or [ObjectRef]: a list, so that Ray passes the reference and not the data


class DataLost(CollectiveError):
    """What a message referred to went with the process, or the host, of its writer."""


class _Queue:
    def __init__(self) -> None:
        self.items: list[list[Message]] = []  # each in a list of its own: an identity

    def admitted(self, item: list[Message], capacity: int) -> bool:
        return all(waiting is not item for waiting in self.items[capacity:])


class Coordinator:
    """What all workers share. Replies say ok, late or gone; the worker that asked raises."""

    def __init__(self, size: int, begin: int) -> None:
        self._size = size
        self._first = range(begin)  # who is there from the beginning
        self._absent = set(range(begin, size))  # who is not there, and may come
        self._queues: dict[str, _Queue] = {}
        self._weights: dict[str, tuple[int, Message]] = {}
        self._offers: dict[str, int] = {}
        self._mail = [self._first_mail() for _ in range(size)]
        self._restarts = [0] * size  # how often each was started again
        self._met: dict[str, dict[int, Any]] = {}
        self._gone: dict[int, str] = {}  # rank -> why it can no longer come
        self._bells: dict[str, list[asyncio.Future[None]]] = {}

    async def ready(self) -> bool:
        return True

    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    async def meet(self, what: str, rank: int, value: Any, timeout: float) -> Reply:
        """The values of all that begin together, by rank, once they have come; else the ranks that
        have not. Whoever comes later gives one, and sees theirs."""
        met = self._met.setdefault(what, {})
        met[rank] = value
        self._ring(what)
        others = [r for r in self._first if r != rank]
        reply = await self._until(what, lambda: met.keys() >= set(others), timeout, others)
        if reply[0] == OK:
            return OK, [met[r] for r in self._first]
        return reply if reply[0] == GONE else (LATE, [r for r in others if r not in met])

    async def gone(self, rank: int, why: str, final: bool) -> None:
        """That worker is dead or failed (final), or has finished and only serves from now on."""
        self._gone[rank] = why
        for mail in self._mail if final else []:
            mail.append(["gone", rank, why])
        for topic in list(self._bells):
            self._ring(topic)

    async def is_there(self, rank: int, there: bool) -> None:
        """That worker has joined, or left; the others hear of it."""
        (self._absent.discard if there else self._absent.add)(rank)
        for other, mail in enumerate(self._mail):
            mail.append(["there", rank, there])
            self._ring(f"mail/{other}")

    def _first_mail(self) -> list[list[Any]]:
        return [["there", rank, False] for rank in sorted(self._absent)]

    # -- channels and weights --------------------------------------------------------------------

    async def put(self, name: str, capacity: int, reader: int, message: Message,
                  timeout: float) -> Reply:  # fmt: skip
        box, item, topic = self._queues.setdefault(name, _Queue()), [message], f"channel/{name}"
        box.items.append(item)  # at once: the order of arrival is the order of reading
        self._ring(topic)
        reply = await self._until(topic, lambda: box.admitted(item, capacity), timeout, [reader])
        if reply[0] != OK:
            box.items = [waiting for waiting in box.items if waiting is not item]
        return reply

    async def get(self, name: str, timeout: float) -> Reply:
        box, topic = self._queues.setdefault(name, _Queue()), f"channel/{name}"
        reply = await self._until(topic, lambda: bool(box.items), timeout, [])
        if reply[0] != OK:
            return reply
        (message,) = box.items.pop(0)
        self._ring(topic)
        return OK, message

    async def length(self, name: str) -> int:
        return len(self._queues[name].items) if name in self._queues else 0

    async def publish(self, name: str, message: Message) -> int:
        version = self._weights.get(name, (0, None))[0] + 1
        self._weights[name] = (version, message)
        self._ring(f"weights/{name}")
        return version

    async def pull(self, name: str, newer_than: int, writer: int, timeout: float | None) -> Reply:
        def newest() -> tuple[int, Message]:
            return self._weights.get(name, (0, None))

        if timeout is not None:
            reply = await self._until(
                f"weights/{name}", lambda: newest()[0] > newer_than, timeout, [writer]
            )
            if reply[0] != OK:
                return reply
        return OK, newest() if newest()[0] > newer_than else None

    # -- letters ---------------------------------------------------------------------------------

    async def offer(self, name: str, rank: int) -> int:
        """Who offers that name now: `rank`, or whoever was first."""
        owner = self._offers.setdefault(name, rank)
        self._ring("offers")
        return owner

    async def find(self, name: str, timeout: float) -> Reply:
        reply = await self._until("offers", lambda: name in self._offers, timeout, [])
        return (OK, self._offers[name]) if reply[0] == OK else (LATE, sorted(self._offers))

    async def post(self, rank: int, letter: list[Any]) -> None:
        self._mail[rank].append(letter)
        self._ring(f"mail/{rank}")

    async def collect(self, rank: int, restarts: int) -> list[Any]:
        """All letters for that worker; waits a while for the first.

        CRUCIAL: what is for a worker that was restarted must not go to its old process: that may
        still be asking here, and answers to what it had asked are nobody's.
        """
        if restarts > self._restarts[rank]:
            self._restarts[rank], self._mail[rank] = restarts, self._first_mail()
            self._ring(f"mail/{rank}")
        await self._until(
            f"mail/{rank}",
            lambda: bool(self._mail[rank]) or restarts < self._restarts[rank],
            _POLL,
            [],
        )
        if restarts < self._restarts[rank]:
            return []
        letters, self._mail[rank] = self._mail[rank], []
        return letters

    async def has_left(self, rank: int) -> bool:
        return rank in self._gone

    # -- inside ----------------------------------------------------------------------------------

    def _ring(self, topic: str) -> None:
        for bell in self._bells.pop(topic, []):
            if not bell.done():
                bell.set_result(None)

    async def _until(self, topic: str, ready: Callable[[], bool], timeout: float,
                     needed: Sequence[int]) -> Reply:  # fmt: skip
        """Wait for `ready()`; give up when time is over or one of `needed` is gone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout if timeout > 0 else float("inf")
        while not ready():
            for rank in needed:
                if rank in self._gone:
                    return GONE, self._gone[rank]
            left = deadline - loop.time()
            if left <= 0:
                return LATE, None
            bell: asyncio.Future[None] = loop.create_future()
            self._bells.setdefault(topic, []).append(bell)
            await asyncio.wait([bell], timeout=min(left, 3600.0))
            bell.cancel()
        return OK, None


# -- a worker's side -------------------------------------------------------------------------------


class Client:
    """A worker's door to the coordinator: calls with deadlines, and a thread that listens."""

    def __init__(self, coordinator: Any, rank: int, size: int, restarts: int = 0) -> None:
        self.coordinator, self.rank, self.size = coordinator, rank, size
        self.restarts = restarts  # how often this worker was started again
        self.names = [f"worker {r} of {size}" for r in range(size)]
        self.gone: dict[int, str] = {}
        self.absent: set[int] = set()  # who is not there, and may come
        self._ids = itertools.count(restarts << 32)  # no number twice, restarts or not
        self._pending: dict[int, tuple[int, str, Future[Any]]] = {}
        self._counters: dict[str, _Counter] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="manyhands-ear", daemon=True).start()

    def ask(self, doing: str, method: str, *args: Any, wait: float | None = 0.0) -> Any:
        """The coordinator's answer. `wait` is how long it may take its time (0: for ever)."""
        limit = None if wait == 0 else (wait or 0.0) + _MARGIN
        try:
            return ray.get(getattr(self.coordinator, method).remote(*args), timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise CollectiveError(f"{doing}: no answer from Ray within {limit:g} s") from None
        except ray.exceptions.RayError as error:
            raise CollectiveError(f"{doing}: the coordinator is gone ({_first(error)})") from None

    def pack(self, tree: Tree, *, store: bool = False) -> Message:
        data = wire.encode(tree)
        if len(data) <= _SMALL and not store:
            return bytes(data)
        return [ray.put(np.frombuffer(data, np.uint8))]

    def unpack(self, message: Message, doing: str, timeout: float) -> Tree:
        if isinstance(message, bytes):
            return wire.decode(message)
        try:
            # WHY copies: memory of the object store is read-only and shared by all.
            return wire.decode(ray.get(message[0], timeout=timeout or None))
        except ray.exceptions.GetTimeoutError:
            raise CollectiveError(f"{doing}: its data did not come within {timeout:g} s") from None
        except ray.exceptions.RayError as error:
            raise DataLost(
                f"{doing}: its data is lost, with the worker that made it ({_first(error)})"
            ) from None

    # -- services --------------------------------------------------------------------------------

    def serve(self, name: str, target: object) -> None:
        counter = _Counter(self, name, target)
        with self._lock:
            taken = name in self._counters
            if not taken:
                self._counters[name] = counter  # before the offer: a call may follow at once
        owner = self.rank if taken else self.ask(f"serve {name!r}", "offer", name, self.rank)
        if taken or owner != self.rank:
            if not taken:
                del self._counters[name]
            raise ConfigError(f"a service named {name!r} is already offered by worker {owner}")
        counter.open()

    def send_call(self, rank: int, name: str, message: Message) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # see sockets.Caller
        number = next(self._ids)
        with self._lock:
            self._pending[number] = (rank, name, future)
            if rank in self.gone:
                self._fail_calls(rank)
                return future
        self.coordinator.post.remote(rank, ["call", name, number, self.rank, message])
        return future

    def _listen(self) -> None:
        while True:
            try:
                letters = ray.get(
                    self.coordinator.collect.remote(self.rank, self.restarts),
                    timeout=_POLL + _MARGIN,
                )
            except Exception as error:  # it is gone: so is everybody that it speaks for
                with self._lock:
                    for rank in range(self.size):
                        self.gone.setdefault(rank, f"is out of reach ({_first(error)})")
                        self._fail_calls(rank)
                return
            for letter in letters:
                self._take(letter)

    def _take(self, letter: list[Any]) -> None:
        kind = letter[0]
        if kind == "call":
            _, name, number, caller, message = letter
            self._counters[name].calls.put((number, caller, message))
        elif kind == "answer":
            _, number, worked, message = letter
            with self._lock:
                asked = self._pending.pop(number, None)
            if asked is None:  # by this worker before it was restarted
                return
            rank, name, future = asked
            try:
                value = self.unpack(message, f"answer of service {name!r}", 0.0)
            except (CollectiveError, ConfigError) as error:
                future.set_exception(error)
                return
            if worked:
                future.set_result(value)
            else:
                future.set_exception(WorkerError(value, rank=rank))
        elif kind == "there":
            _, rank, there = letter
            self.absent = self.absent - {rank} if there else self.absent | {rank}
        else:
            _, rank, why = letter
            with self._lock:
                self.gone[rank] = why
                self._fail_calls(rank)

    def _fail_calls(self, rank: int) -> None:
        for number, (to, name, future) in list(self._pending.items()):
            if to == rank:
                del self._pending[number]
                future.set_exception(
                    CollectiveError(f"service {name!r}: {self.names[rank]} {self.gone[rank]}")
                )


class _Counter:
    """Serves the calls on one object, one at a time, in a thread of its own."""

    def __init__(self, client: Client, name: str, target: object) -> None:
        self.calls: queue.Queue[tuple[int, int, Message]] = queue.Queue()
        self._client, self._name, self._target = client, name, target

    def open(self) -> None:
        threading.Thread(target=self._run, name=f"service-{self._name}", daemon=True).start()

    def _run(self) -> None:
        me = f"service {self._name!r} of worker {self._client.rank}"
        while True:
            number, caller, message = self.calls.get()
            method = "call"
            try:
                method, args, kwargs = self._client.unpack(message, me, 0.0)
                answer, worked = self._client.pack(invoke(self._target, method, args, kwargs)), True
            except Exception as error:
                answer = self._client.pack(str(remote_error(me, method, error)))
                worked = False
            self._client.coordinator.post.remote(caller, ["answer", number, worked, answer])


class RayService(Service):
    def __init__(self, client: Client, name: str, rank: int, timeout: float) -> None:
        self._client, self._key, self._rank, self.timeout = client, name, rank, timeout
        self.name = f"service {name!r} of {client.names[rank]}"

    def call_async(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        message = self._client.pack([method, list(args), kwargs])
        return self._client.send_call(self._rank, self._key, message)


class RayChannel(Channel):
    def __init__(
        self, client: Client, name: str, reader: int, capacity: int, timeout: float
    ) -> None:
        self._client, self._name, self._timeout = client, name, timeout
        self._reader, self._capacity = reader, capacity
        self.lost = 0  # messages whose data went with a writer that died

    def put(self, tree: Tree, timeout: float | None = None) -> None:
        limit = self._timeout if timeout is None else timeout
        doing = f"channel {self._name!r}: put"
        state, why = self._client.ask(
            doing, "put", self._name, self._capacity, self._reader, self._client.pack(tree), limit,
            wait=limit,
        )  # fmt: skip
        reader = self._client.names[self._reader]
        if state == GONE:
            raise CollectiveError(f"{doing}: the reader, {reader}, {why}")
        if state == LATE:
            raise CollectiveError(f"{doing}: full for {limit:g} s; the reader is {reader}")

    def get(self, timeout: float | None = None) -> Tree:
        if self._client.rank != self._reader:
            raise ConfigError(f"channel {self._name!r}: only worker {self._reader} reads")
        limit = self._timeout if timeout is None else timeout
        doing = f"channel {self._name!r}: get"
        while True:  # each wait has its deadline, and what is lost was there once
            state, message = self._client.ask(doing, "get", self._name, limit, wait=limit)
            if state == LATE:
                raise CollectiveError(f"{doing}: nothing came for {limit:g} s")
            try:
                return self._client.unpack(message, doing, limit)
            except DataLost:
                self.lost += 1

    def __len__(self) -> int:
        size = self._client.ask(f"channel {self._name!r}", "length", self._name, wait=_MARGIN)
        return min(int(size), self._capacity)


class RayWeights(WeightStore):
    def __init__(self, client: Client, name: str, writer: int, timeout: float) -> None:
        self._client, self._name, self._writer, self._timeout = client, name, writer, timeout

    def publish(self, tree: Tree) -> int:  # one ray.put a version, however many pull
        doing = f"weights {self._name!r}: publish"
        if self._client.rank != self._writer:
            raise ConfigError(f"weights {self._name!r}: only worker {self._writer} publishes")
        message = self._client.pack(tree, store=True)
        return int(self._client.ask(doing, "publish", self._name, message, wait=_MARGIN))

    def pull(self, newer_than: int = 0, timeout: float | None = None) -> tuple[int, Tree] | None:
        doing, writer = f"weights {self._name!r}: pull", self._client.names[self._writer]
        wait = _MARGIN if timeout is None else timeout
        state, found = self._client.ask(
            doing, "pull", self._name, newer_than, self._writer, timeout, wait=wait
        )
        if state == GONE:
            raise CollectiveError(f"{doing}: {writer} {found}")
        if state == LATE:
            raise CollectiveError(
                f"{doing}: no version {newer_than + 1} from {writer} within {wait:g} s"
            )
        if found is None:
            return None
        version, message = found
        return int(version), self._client.unpack(message, doing, self._timeout)


class NewsRoster(Roster):
    """Workers on several hosts: who is gone, as the driver reported to the coordinator."""

    def __init__(self, client: Client, names: Sequence[str]) -> None:
        super().__init__(names)
        self._client = client

    def raise_if_gone(self, ranks: Sequence[int], doing: str) -> None:
        for rank in ranks:
            if rank in self._client.gone:
                raise CollectiveError(f"{doing}: {self.name(rank)} {self._client.gone[rank]}")


def _first(error: BaseException) -> str:
    return (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:200]
