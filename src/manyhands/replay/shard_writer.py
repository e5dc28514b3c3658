"""An actor's end of a sharded replay: straight into shared memory, or sent where that is far."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from manyhands import trees
from manyhands.engines.base import DEFAULT_TIMEOUT, Wait, wait_for, wait_of
from manyhands.errors import CollectiveError
from manyhands.replay.buffer import frames_of
from manyhands.replay.frames import FramedRing
from manyhands.replay.ring import Ring
from manyhands.trees import Array, Tree


class ShardWriter:
    """The one writer of one shard.

    Args:
        ring: the shard's memory, or a `FarRing`.
        shard: its number.
        timeout: seconds that the learner may keep it waiting (bounds on samples per insert).
        wait: how to wait, for engines that have their own way.
    """

    def __init__(
        self, ring: Ring | FarRing, shard: int, *, timeout: float = DEFAULT_TIMEOUT,
        wait: Wait | None = None,
    ) -> None:  # fmt: skip
        self._ring, self.shard, self.timeout = ring, shard, timeout
        self._wait = wait or wait_for
        self.seconds_waited = 0.0

    @classmethod
    def open(cls, description: dict[str, Any], **options: Any) -> ShardWriter:
        """From `ShardedReplay.describe(shard)`; OSError where that memory is out of reach."""
        if description["host"] != socket.gethostname():
            raise OSError(f"that shard lies in the memory of {description['host']}")
        kind = FramedRing if "frames" in description["ring"] else Ring
        return cls(kind.open(description["ring"]), int(description["shard"]), **options)

    @classmethod
    def connect(cls, worker: Any, name: str, shard: int, **options: Any) -> ShardWriter:
        """From the name under which the learner serves its replay: in its memory where that can be
        reached, else by sending. `worker` is a `Parallel`, or anything with `service`."""
        options.setdefault("wait", wait_of(worker))
        service = worker.service(name)
        description = service.call("describe", shard)
        try:
            return cls.open(description, **options)
        except OSError:
            return cls(FarRing(service, shard, description), shard, **options)

    def append(self, rows: Tree, priorities: Array | None = None) -> None:
        """Add rows [N, ...] with their TD errors [N]; without, they get the largest priority.

        Waits only where the learner has set a bound on samples per insert.
        """
        if self._ring.written >= self._ring.limit:
            started = time.perf_counter()
            self._wait(
                lambda: self._ring.written < self._ring.limit,
                f"replay: append to shard {self.shard}",
                "the learner, which has not drawn enough yet",
                self.timeout,
            )
            self.seconds_waited += time.perf_counter() - started
        self._ring.append(rows, priorities)

    @property
    def frames(self) -> Any:
        """Where a `FrameStacker` puts frames."""
        return self._ring.frames if isinstance(self._ring, FarRing) else frames_of(self._ring)

    @property
    def written(self) -> int:
        """Rows ever added to this shard, by this writer and those before it."""
        return self._ring.written

    @property
    def size(self) -> int:
        return self._ring.size

    def clear(self) -> None:
        """Forget the rows of this shard."""
        self._ring.clear()

    def flush(self) -> None:
        """Return when everything appended has arrived (at once, where it is in memory)."""
        if isinstance(self._ring, FarRing):
            self._ring.flush()


class FarRing:
    """A shard in the memory of another machine: rows are sent to the process that holds it.

    CRUCIAL: one message at a time, frames together with the rows that show them. Engines do not
    promise that two calls on their way arrive in order.
    """

    def __init__(self, service: Any, shard: int, description: dict[str, Any]) -> None:
        self._service, self._shard = service, shard
        self.written = int(description["written"])
        self.frames = _FarFrames(int(description["frames_written"]))
        self._limit = 0
        self._sent: Future[Any] | None = None

    @property
    def limit(self) -> int:
        if self.written >= self._limit:
            self.flush()
            self._limit = int(self._service.call("limit", self._shard))
        return self._limit

    @property
    def size(self) -> int:
        self.flush()
        return int(self._service.call("size", self._shard))

    def append(self, rows: Tree, priorities: Array | None = None) -> int:
        """Goes on as soon as it is sent; the next one waits until this has arrived."""
        ticket = self.written
        self.flush()
        frames = self.frames.take()
        self._sent = self._service.call_async("append", self._shard, rows, priorities, frames)
        self.written += trees.rows(rows)
        return ticket

    def clear(self) -> None:
        self.flush()
        self._service.call("clear", self._shard)

    def flush(self) -> None:
        """Wait until what was sent has arrived."""
        if self._sent is None:
            return
        try:
            self._limit = int(self._sent.result(self._service.timeout or None))
        except TimeoutError:
            raise CollectiveError(
                f"replay: shard {self._shard}: rows sent to {self._service.name} were not "
                f"confirmed within {self._service.timeout:g} s"
            ) from None
        self._sent = None


class _FarFrames:
    """Frames that go with the next rows. Tickets are known without asking: nobody else writes."""

    def __init__(self, written: int) -> None:
        self.written = written
        self._waiting: list[Array] = []

    def append(self, rows: dict[str, Array]) -> int:
        first = self.written
        self._waiting.append(np.array(rows["frame"]))  # the caller may use its memory again
        self.written += len(rows["frame"])
        return first

    def take(self) -> Array | None:
        frames = np.concatenate(self._waiting) if self._waiting else None
        self._waiting.clear()
        return frames
