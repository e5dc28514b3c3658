"""Channel, WeightStore and Service among workers of one process: plain objects, and the baton.

What is put, published or passed is encoded and decoded, so that the same copies are made, and the
same things refused, as between processes.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from manyhands import wire
from manyhands.engines.base import Channel, Service, WeightStore
from manyhands.engines.calls import invoke, remote_error
from manyhands.errors import ConfigError
from manyhands.trees import Tree

if TYPE_CHECKING:
    from manyhands.engines.inline.world import InlineWorker


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
