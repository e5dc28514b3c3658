"""Channel, WeightStore and Service between processes of one machine that share a board.

What is put or published lies in shared memory, without locks: a writer that dies blocks nobody.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands import wire
from manyhands.engines.base import Channel, Parts, Patience, Place, Roster, Service, WeightStore
from manyhands.engines.parts import sockets
from manyhands.engines.shared import DONE, Board, Pool, Segment, fence
from manyhands.errors import ConfigError
from manyhands.trees import Tree

_BYTES = np.dtype(np.uint8)
DRAIN_SECONDS = 10.0  # for a reader to take what was put


class MemoryParts(Parts):
    """One worker's channels, weights and services; addresses are notes on the board."""

    def __init__(self, board: Board, roster: Roster, place: Place, timeout: float) -> None:
        self._board, self._roster, self._place, self._timeout = board, roster, place, timeout
        self._listener: sockets.UnixListener | None = None
        self._server: sockets.Server | None = None
        self._channels: list[MemoryChannel] = []

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        channel = MemoryChannel(
            self._board, self._roster, self._place.rank, name, reader, capacity, self._timeout
        )
        self._channels.append(channel)
        return channel

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        return MemoryWeights(
            self._board, self._roster, self._place.rank, name, writer, self._timeout
        )

    def serve(self, name: str, target: object) -> None:
        if self._server is None or self._listener is None:
            self._listener = sockets.UnixListener()
            self._server = sockets.Server(
                self._place.name, self._listener.listener, sockets.same_user
            )
        self._server.offer(name, target)
        self._board.set_note(self._place.rank, f"service/{name}", self._listener.address)

    def service(self, name: str, timeout: float | None = None) -> Service:
        patience = Patience(self._timeout if timeout is None else timeout)
        others = range(self._place.size)
        while True:
            for rank in others:
                address = self._board.note(rank, f"service/{name}")
                if not address:
                    continue
                try:
                    sock = sockets.connect(address, self._timeout)
                except OSError:
                    if self._board.state(rank) == DONE:
                        raise
                    continue  # it has been killed, and is started again perhaps
                owner = self._roster.name(rank)
                caller = sockets.Caller(sock, f"service {name!r} of {owner}")
                return sockets.SocketService(name, owner, caller, self._timeout)
            patience.pause()
            if patience.over:
                raise self._roster.late(list(others), f"service {name!r}", patience.waited)
            self._roster.raise_if_gone([], f"service {name!r}")

    def drain(self) -> None:
        for channel in self._channels:
            channel.drain(min(self._timeout or DRAIN_SECONDS, DRAIN_SECONDS))

    def close(self, words: str) -> None:
        if self._server is not None and self._listener is not None:
            self._server.close()
            self._listener.close()
            self._server = self._listener = None


# -- channels and weights --------------------------------------------------------------------------


_LOOK_AGAIN = 0.005  # seconds between looks at the board for writers not seen yet


def _wait(
    ready: Callable[[], bool], timeout: float, roster: Roster, on: list[int], doing: str
) -> None:
    if ready():
        return
    patience = Patience(timeout)
    while not ready():
        if patience.pause():
            roster.raise_if_gone(on, doing)
            if patience.over:
                raise roster.late(on, doing, patience.waited)


class _Slots:
    """Numbered blocks of shared memory, each replaced by a larger one when its data outgrows it.

    Words of slot i: file descriptor, generation, bytes used, time stamp.
    """

    FIELDS = 4

    def __init__(self, words: memoryview, first: int, pid_word: int) -> None:
        self._words, self._first, self._pid = words, first, pid_word
        self._own: dict[int, Segment] = {}
        self._seen: dict[int, tuple[int, Segment]] = {}

    def write(self, i: int, packed: wire.Packed) -> None:
        base = self._first + i * self.FIELDS
        segment = self._own.get(i)
        if segment is None or segment.size < packed.nbytes:
            if segment is not None:
                segment.close()
            segment = self._own[i] = Segment(packed.nbytes + packed.nbytes // 4 + 256)
            self._words[base + 1] += 1
        self._words[base] = segment.number  # each time: so what was written over mends itself
        packed.write_into(segment.view)
        self._words[base + 2] = packed.nbytes
        self._words[base + 3] = time.monotonic_ns()

    def read(self, i: int) -> memoryview:
        base = self._first + i * self.FIELDS
        generation = self._words[base + 1]
        known = self._seen.get(i)
        if known is None or known[0] != generation:
            address = Segment.address_of(self._words[self._pid], self._words[base])
            known = self._seen[i] = (generation, Segment(address=address))
        return known[1].view[: self._words[base + 2]]

    def stamp(self, i: int) -> int:
        return int(self._words[self._first + i * self.FIELDS + 3])


class _Ring:
    """One writer's queue to the reader: only indices move, the data stays where it was written.

    Words: process id of the writer, trees put so far, trees taken so far, then the slots.
    """

    _PID, _PUT, _TAKEN, _SLOTS = 0, 1, 2, 8

    def __init__(self, capacity: int, segment: Segment) -> None:
        self.segment, self.capacity = segment, capacity
        self.words = segment.view.cast("Q")
        self.slots = _Slots(self.words, self._SLOTS, self._PID)

    @classmethod
    def size(cls, capacity: int) -> int:
        return (cls._SLOTS + capacity * _Slots.FIELDS) * 8

    @property
    def waiting(self) -> int:
        return int(self.words[self._PUT] - self.words[self._TAKEN])

    @property
    def pid(self) -> int:
        return int(self.words[self._PID])

    def skip(self) -> int:
        """Give up what waits: its memory has gone with its writer. How many trees that were."""
        lost = self.waiting
        self.words[self._TAKEN] = self.words[self._PUT]
        return lost

    def drop(self) -> int:
        """Give up the next tree alone."""
        self.words[self._TAKEN] += 1
        return 1

    def put(self, packed: wire.Packed) -> None:
        self.slots.write(int(self.words[self._PUT] % self.capacity), packed)
        fence()
        self.words[self._PUT] += 1

    def stamp(self) -> int:
        return self.slots.stamp(int(self.words[self._TAKEN] % self.capacity))

    def take(self) -> Tree:
        fence()
        tree = wire.decode(self.slots.read(int(self.words[self._TAKEN] % self.capacity)))
        fence()
        self.words[self._TAKEN] += 1
        return tree


class MemoryChannel(Channel):
    """A ring from each writer; the reader takes the oldest tree of all of them.

    A writer that was killed and started again makes a new ring. A tree counts as put only once it
    is whole: what the old ring holds is whole, or gone with its writer's memory, and then `lost`.
    """

    def __init__(
        self, board: Board, roster: Roster, rank: int, name: str, reader: int, capacity: int,
        timeout: float,
    ) -> None:  # fmt: skip
        if capacity < 1:
            raise ConfigError(f"channel {name!r}: capacity {capacity}, but it must be 1 or more")
        self._board, self._roster, self._rank, self._timeout = board, roster, rank, timeout
        self._name, self._reader, self._capacity = name, reader, capacity
        self._key = f"channel/{name}"
        self._mine: _Ring | None = None
        self._rings: dict[int, _Ring] = {}
        self._orphans: list[_Ring] = []  # of writers that were started again
        self._looked = 0.0
        self.lost = 0

    def put(self, tree: Tree, timeout: float | None = None) -> None:
        packed = wire.Packed(tree)
        ring = self._ring()
        _wait(
            lambda: ring.waiting < self._capacity,
            self._timeout if timeout is None else timeout,
            self._roster,
            [self._reader],
            f"channel {self._name!r}: put (it is full)",
        )
        ring.put(packed)

    def get(self, timeout: float | None = None) -> Tree:
        if self._rank != self._reader:
            raise ConfigError(f"channel {self._name!r}: only worker {self._reader} reads it")
        found: list[_Ring] = []

        def ready() -> bool:
            found[:] = [ring for ring in self._writers() if ring.waiting]
            return bool(found)

        limit = self._timeout if timeout is None else timeout
        doing = f"channel {self._name!r}: get (it is empty)"
        others = [r for r in range(self._board.workers) if r != self._rank]
        patience = Patience(limit)
        while True:
            if ready():
                oldest = min(found, key=lambda ring: ring.stamp())
                try:
                    return oldest.take()
                except FileNotFoundError:  # the writer was killed before it could be read
                    self.lost += oldest.skip()
                    continue
                except (ConfigError, OSError, ValueError):  # somebody has written over it
                    self.lost += oldest.drop()
                    continue
            if patience.pause():
                self._roster.raise_if_gone([], doing)
                if patience.over:
                    raise self._roster.late(others, doing, patience.waited)

    def __len__(self) -> int:
        return sum(ring.waiting for ring in self._writers())

    def drain(self, seconds: float) -> None:
        """Before this writer leaves: let the reader take what is still in its memory."""
        patience = Patience(seconds)
        ring = self._mine
        while ring is not None and ring.waiting and self._roster.is_there(self._reader):
            if patience.over:
                print(
                    f"manyhands: channel {self._name!r}: {ring.waiting} trees were never read",
                    file=sys.stderr,
                )
                return
            patience.pause()

    def _ring(self) -> _Ring:
        if self._mine is None:
            segment = Segment(_Ring.size(self._capacity))
            self._mine = _Ring(self._capacity, segment)
            self._mine.words[_Ring._PID] = self._board.pid(self._rank)
            fence()
            self._board.set_note(self._rank, self._key, [segment.address, self._capacity])
        return self._mine

    def _writers(self) -> list[_Ring]:
        now = time.monotonic()
        if now - self._looked > _LOOK_AGAIN:
            self._looked = now
            self._orphans = [ring for ring in self._orphans if ring.waiting]
            for rank in range(self._board.workers):
                ring = self._rings.get(rank)
                if ring is not None and ring.pid != self._board.pid(rank):
                    self._orphans.append(self._rings.pop(rank))
                    ring = None
                if ring is None:
                    self._look_for(rank)
        return [*self._orphans, *self._rings.values()]

    def _look_for(self, rank: int) -> None:
        note: Any = self._board.note(rank, self._key)
        # The page of a writer that was started again still has its old notes for a while.
        if note and str(note[0]).startswith(f"/proc/{self._board.pid(rank)}/"):
            with contextlib.suppress(FileNotFoundError):  # killed since
                self._rings[rank] = _Ring(int(note[1]), Segment(address=str(note[0])))


class MemoryWeights(WeightStore):
    """Two buffers in turn and a version number: one copy of the weights, whatever the number of
    workers that read them.

    Words: process id of the writer, newest version, version being written, then the two buffers.
    """

    _PID, _VERSION, _WRITING, _SLOTS = 0, 1, 2, 8

    def __init__(
        self, board: Board, roster: Roster, rank: int, name: str, writer: int, timeout: float
    ) -> None:
        self._board, self._roster, self._rank, self._timeout = board, roster, rank, timeout
        self._name, self._writer, self._key = name, writer, f"weights/{name}"
        self._held: _Held | None = None
        self._pulled = Pool(keep=2)

    def publish(self, tree: Tree) -> int:
        if self._rank != self._writer:
            raise ConfigError(f"weights {self._name!r}: only worker {self._writer} publishes")
        if self._held is None:
            self._held = _Held(Segment((self._SLOTS + 2 * _Slots.FIELDS) * 8), self)
            self._held.words[self._PID] = self._board.pid(self._rank)
            fence()
            self._board.set_note(self._rank, self._key, self._held.segment.address)
        words, slots = self._held.words, self._held.slots
        version = int(words[self._VERSION]) + 1
        packed = wire.Packed(tree)
        words[self._WRITING] = version
        fence()
        slots.write(version & 1, packed)
        fence()
        words[self._VERSION] = version
        return version

    def pull(self, newer_than: int = 0, timeout: float | None = None) -> tuple[int, Tree] | None:
        if timeout is not None:
            _wait(
                lambda: self._version() > newer_than,
                timeout,
                self._roster,
                [self._writer],
                f"weights {self._name!r}: pull of version {newer_than + 1}",
            )
        while True:
            version = self._version()
            if version <= newer_than:
                return None
            assert self._held is not None
            words, slots = self._held.words, self._held.slots
            fence()
            shared = slots.read(version & 1)
            data = self._pulled.take((len(shared),), _BYTES)
            data[:] = shared  # the only copy: the tree that is given out lies in it
            fence()
            # The buffer is written again by version + 2: good only if that has not begun.
            if int(words[self._WRITING]) <= version + 1:
                return version, wire.decode(data.data, copy=False)

    def _version(self) -> int:
        if self._held is None:
            address = self._board.note(self._writer, self._key)
            if not address:
                return 0
            self._held = _Held(Segment(address=str(address)), self)
        return int(self._held.words[self._VERSION])


class _Held:
    """The header of a weight store, made or opened."""

    def __init__(self, segment: Segment, store: MemoryWeights) -> None:
        self.segment = segment
        self.words = segment.view.cast("Q")
        self.slots = _Slots(self.words, store._SLOTS, store._PID)
