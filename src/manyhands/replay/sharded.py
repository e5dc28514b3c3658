"""Replay for many actors and one learner: a shard an actor, drawn from as if it were one buffer.

        actor 0 ──append──> shard 0 ─┐  rows, and the priorities the actor gave
        actor 1 ──append──> shard 1 ─┼──────────> learner: one sum tree over all shards,
        actor 2 ──append──> shard 2 ─┘            draws, copies, updates priorities

Each shard is a ring in shared memory with one writer (ring.py). The tree is kept by the learner,
which takes in new rows by looking at the shards' counters. So appending never waits for another
actor or for the learner, a change of priority is local to the learner, and between processes there
is no lock at all: whoever dies, nobody is stuck. Probabilities, importance weights and their
maximum are those of one buffer, to the bit, because there is one tree.

An actor on another machine sends its rows to the learner instead, which writes them for it.

How often rows are drawn for each row added is held between two bounds (`RateLimit`):

    surplus = samples_per_insert · inserted - sampled

    the learner may draw B rows while   surplus - B >= samples_per_insert · min_size - error_buffer
    actors may add rows while           surplus     <  samples_per_insert · min_size + error_buffer

A learner that is too fast for its actors waits, and so do actors that are too fast for the learner:
what is learned does not depend on which of them has the faster machine.

The learner alone does the sum. What actors may still add is written into the header of each
shard, in equal parts, whenever the learner looks; an actor reads its own and asks nobody.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from manyhands import trees
from manyhands.engines.base import DEFAULT_TIMEOUT, Patience, Wait, answer, wait_for, wait_of
from manyhands.errors import CollectiveError, ConfigError
from manyhands.replay.buffer import frames_of
from manyhands.replay.frames import FramedRing, Frames, make_ring
from manyhands.replay.ring import Ring
from manyhands.replay.sampling import Batch, EmptyError, Prefetcher, Proportional, Uniform, assemble
from manyhands.trees import Array, Tree

__all__ = ["Batch", "Frames", "RateLimit", "ShardWriter", "ShardedReplay"]

OnLoss = Literal["keep", "drop"]


class ShardedReplay:
    """The learner's side. Actors write through `ShardWriter`s.

    Args:
        example: one row: a nested dict of numbers and arrays, without the batch dimension.
        shards: how many actors write.
        capacity: rows in all; each shard has an equal part.
        batch_size: rows of each batch.
        prioritized: False draws uniformly and keeps no tree.
        alpha, eps: priority is (|TD error| + eps) ** alpha.
        seed: of the draws.
        shared: lay shards in memory that other processes can open.
        frames: columns that are stacks of frames, to be stored once; see frames.py.
        limit: bounds on samples per insert; None: nobody waits for the other.
        prefetch: batches that a thread assembles ahead; 0: none, and draws repeat to the bit.
        on_loss: what becomes of the rows of an actor that is lost.
        timeout: seconds that any wait may take.
        wait: how to wait, for engines that have their own way (inline hands over its baton).
    """

    def __init__(
        self,
        example: Tree,
        *,
        shards: int,
        capacity: int,
        batch_size: int,
        prioritized: bool = True,
        alpha: float = 0.6,
        eps: float = 0.01,
        seed: int | None = 0,
        shared: bool = True,
        frames: Frames | None = None,
        limit: RateLimit | None = None,
        prefetch: int = 0,
        on_loss: OnLoss = "keep",
        timeout: float = DEFAULT_TIMEOUT,
        wait: Wait | None = None,
    ) -> None:
        if shards < 1 or batch_size < 1:
            raise ConfigError(f"replay: shards {shards} and batch_size {batch_size}: at least 1")
        if capacity // shards < 1 or capacity < batch_size:
            raise ConfigError(
                f"replay: capacity {capacity} is too small for {shards} shards and batches of "
                f"{batch_size}; give at least {max(shards, batch_size)}"
            )
        if prefetch < 0:
            raise ConfigError(f"replay: prefetch {prefetch}: 0 or more batches")
        if on_loss not in ("keep", "drop"):
            raise ConfigError(f"replay: on_loss {on_loss!r} is neither 'keep' nor 'drop'")
        each = capacity // shards
        self._rings = [
            make_ring(each, example, frames, shared=shared, priorities=prioritized)
            for _ in range(shards)
        ]
        self.batch_size, self.on_loss, self.timeout = batch_size, on_loss, timeout
        self._sampler: Uniform | Proportional = (
            Proportional(self._rings, alpha, eps, seed)
            if prioritized
            else Uniform(self._rings, seed)
        )
        self._wait = wait or wait_for
        self._pace = Pace(limit, batch_size, self._rings)
        self._pace.publish()
        # Between the learner and its own prefetching thread; no other process ever sees it.
        self._lock = threading.Lock()
        self._counters = {"lost_shards": 0, "kept_rows": 0, "dropped_rows": 0}
        self._beta = 0.4
        self._released = False
        self._prefetcher = Prefetcher(self._next, prefetch) if prefetch else None

    # -- how much there is ---------------------------------------------------------------------

    @property
    def shards(self) -> int:
        return len(self._rings)

    @property
    def capacity(self) -> int:
        return sum(ring.capacity for ring in self._rings)

    def _ring(self, shard: int) -> Ring:
        if not 0 <= shard < len(self._rings):
            raise ConfigError(f"replay: there is no shard {shard}, but 0 to {self.shards - 1}")
        return self._rings[shard]

    def size(self, shard: int) -> int:
        """Rows of one shard that are there now; `all_size` has those of all."""
        return self._ring(shard).size

    @property
    def all_size(self) -> int:
        return sum(ring.size for ring in self._rings)

    def clear(self, shard: int) -> None:
        """Forget the rows of one shard. Its actor may go on writing meanwhile."""
        self._ring(shard).drop()

    def all_clear(self) -> None:
        """Forget all rows. Batches that were assembled ahead go with them."""
        with self._lock:
            for ring in self._rings:
                ring.drop()
            self._sampler.take_in()
        if self._prefetcher is not None:
            self._prefetcher.discard()

    @property
    def counters(self) -> dict[str, float]:
        """What happened so far: rows added and drawn, updates that came too late, rows drawn again
        because a writer had taken them back, actors lost."""
        pace = self._pace
        ratio = pace.sampled / max(pace.inserted, 1)
        totals = {"inserted": pace.inserted, "sampled": pace.sampled, "samples_per_insert": ratio}
        return {**totals, **self._sampler.counters, **self._counters}

    # -- the learner ---------------------------------------------------------------------------

    def sample(self, beta: float = 0.4, timeout: float | None = None) -> Batch:
        """The next batch; waits until there are rows enough, and until the rate allows it.

        With prefetch it was drawn a little earlier, with the beta of then.
        """
        self._check_there()
        limit = self.timeout if timeout is None else timeout
        self._beta = beta
        if self._prefetcher is not None:
            batch: Batch = self._prefetcher.take(self._doing, self._needs(), limit)
            return batch
        patience = Patience(limit)
        while True:
            left = patience.left if limit else 0.0
            self._wait(self._ready, self._doing, self._needs(), left)
            made = self._try()
            if made is not None:
                return made
            if patience.over:
                raise CollectiveError(f"{self._doing}: waited {limit:.1f} s for {self._needs()}")
            time.sleep(1e-3)  # it was cleared just now

    def update_priorities(self, ids: Array, priorities: Array) -> int:
        """New TD errors of rows that were drawn; how many were dropped, being overwritten."""
        with self._lock:
            return self._sampler.update(ids, priorities)

    def _check_there(self) -> None:
        if self._released:
            raise ConfigError("replay: its memory has been given back by release()")

    def lose(self, shard: int) -> int:
        """The actor of that shard is gone: keep or drop its rows (`on_loss`), and count them.

        A new actor may open the same shard afterwards and write on where the old one stopped.
        """
        rows = self._ring(shard).size
        self._counters["lost_shards"] += 1
        self._counters["kept_rows" if self.on_loss == "keep" else "dropped_rows"] += rows
        if self.on_loss == "drop":
            self.clear(shard)
        return rows

    def _ready(self) -> bool:
        with self._lock:
            return self._pace.may_sample()

    def _try(self) -> Batch | None:
        """A batch; None where all rows have been cleared meanwhile."""
        try:
            with self._lock:
                beta = self._beta
                self._sampler.take_in()
                draw = self._sampler.draw(self.batch_size, beta)
            batch = assemble(self._sampler, draw, beta, self._lock)
        except EmptyError:
            return None
        with self._lock:
            self._pace.count(self.batch_size)
        return batch

    def _next(self, stopped: Callable[[], bool]) -> Batch | None:
        """For the prefetching thread: the next batch, or None when it is to look again."""
        wait_for(lambda: stopped() or self._ready(), self._doing, "rows", 0.0)
        return None if stopped() else self._try()

    _doing = "replay: sample"

    def _needs(self) -> str:
        return (
            f"{self._pace.min_size} rows (there are {self.all_size}), and actors that keep up: "
            f"{self._pace.inserted} rows were added, {self._pace.sampled} drawn"
        )

    # -- the actors' door ----------------------------------------------------------------------

    def writer(self, shard: int, **options: Any) -> ShardWriter:
        """For an actor of this process."""
        return ShardWriter(self._ring(shard), shard, wait=self._wait, **options)

    def describe(self, shard: int) -> dict[str, Any]:
        """Plain data from which an actor of another process makes its `ShardWriter.open(...)`."""
        self._check_there()
        return {"shard": shard, "host": socket.gethostname(), "ring": self._ring(shard).describe()}

    def serve(self, worker: Any, name: str = "replay") -> None:
        """Let actors find their shards: `ShardWriter.connect(worker, name, shard)` over there.

        `worker` is a `Parallel`, or anything else with `serve` and `service`; from now on this
        replay waits in the way of its engine.
        """
        self._wait = wait_of(worker)
        worker.serve(name, Door(self))

    # -- for checkpoints -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it as plain data and arrays. Rows added meanwhile may or may not be in it."""
        self._check_there()
        with self._lock:
            self._sampler.take_in()
            return {
                "sampler": self._sampler.state(),
                "sampled": self._pace.sampled,
                "counters": dict(self._counters),
                "shards": [ring.state() for ring in self._rings],
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Before any actor writes."""
        if len(state["shards"]) != self.shards:
            raise ConfigError(
                f"replay of {self.shards} shards cannot take a state of {len(state['shards'])}"
            )
        with self._lock:
            for ring, saved in zip(self._rings, state["shards"], strict=True):
                ring.load_state(saved)
            self._sampler.load_state(state["sampler"])
            self._pace.sampled = int(state["sampled"])
            self._counters.update({k: int(v) for k, v in state["counters"].items()})
            self._pace.publish()

    def share_out(self) -> None:
        """What may still be added, in equal parts anew: an actor that is down leaves its own."""
        with self._lock:
            self._pace.publish()

    def lift(self) -> None:
        """No bound on the rate from here on: nobody will add rows any more."""
        with self._lock:
            self._pace.lift()

    def close(self) -> None:
        """End the prefetching thread, and let actors go on without bounds. Safe to call twice."""
        if self._prefetcher is not None:
            self._prefetcher.close(self.timeout)
        self.lift()

    def release(self) -> None:
        """`close`, and give the shared memory back: nothing can be added or drawn from here on.

        Counters stay. Actors of other processes hold their shard's memory until they end; what they
        still write is lost. Safe to call twice.
        """
        self.close()
        with self._lock:
            self._released = True
            for ring in self._rings:
                ring.release()

    def __enter__(self) -> ShardedReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Door:
    """What actors may ask of the learner's process; served under the replay's name."""

    def __init__(self, replay: ShardedReplay) -> None:
        self._replay = replay

    def describe(self, shard: int) -> dict[str, Any]:
        ring = self._replay._ring(shard)
        stacked = hasattr(ring, "frames")
        return {
            **self._replay.describe(shard),
            "written": ring.written,
            "frames_written": frames_of(ring).written if stacked else -1,
        }

    def append(self, shard: int, rows: Tree, priorities: Array | None, frames: Array | None) -> int:
        """Rows of an actor that cannot reach the memory; how far it may go."""
        ring = self._replay._ring(shard)
        if frames is not None:
            frames_of(ring).append({"frame": frames})
        ring.append(rows, priorities)
        return ring.limit

    def limit(self, shard: int) -> int:
        return self._replay._ring(shard).limit

    def size(self, shard: int) -> int:
        return self._replay.size(shard)

    def all_size(self) -> int:
        return self._replay.all_size

    def clear(self, shard: int) -> None:
        self._replay.clear(shard)


# -- the rate --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RateLimit:
    """Bounds on samples per insert.

    Args:
        samples_per_insert: how often each row is drawn, on average.
        min_size: rows that must be there before the first is drawn.
        error_buffer: how many samples either side may be ahead; None: the larger of one batch and
            a tenth of `samples_per_insert · min_size`.
    """

    samples_per_insert: float
    min_size: int = 1
    error_buffer: float | None = None


class Pace:
    """The learner's count of what was added and drawn; without a limit, only the count."""

    def __init__(self, limit: RateLimit | None, batch_size: int, rings: Sequence[Ring]) -> None:
        self._rings, self._batch = list(rings), batch_size
        self.sampled = 0
        self.min_size = 1 if limit is None else limit.min_size
        self._ratio = 0.0
        if limit is not None:
            self._ratio = limit.samples_per_insert
            centre = self._ratio * limit.min_size
            slack = limit.error_buffer
            slack = max(batch_size, 0.1 * centre) if slack is None else slack
            self._check(limit, slack)
            self._low, self._high = centre - slack, centre + slack

    def _check(self, limit: RateLimit, slack: float) -> None:
        capacity = sum(ring.capacity for ring in self._rings)
        if not limit.samples_per_insert > 0.0:
            raise ConfigError(f"samples_per_insert {limit.samples_per_insert} must be above 0")
        if not 1 <= limit.min_size <= capacity:
            raise ConfigError(f"min_size {limit.min_size} does not fit a replay of {capacity} rows")
        if 2 * slack < self._batch:
            raise ConfigError(
                f"error_buffer {slack:g} is too small for batches of {self._batch}: the learner "
                f"would wait for the actors and they for it; give at least {self._batch / 2:g}"
            )

    @property
    def inserted(self) -> int:
        return sum(ring.written for ring in self._rings)

    @property
    def surplus(self) -> float:
        return self._ratio * self.inserted - self.sampled

    def may_sample(self) -> bool:
        """Whether a batch may be drawn now; tells the actors how far they may go meanwhile."""
        self.publish()
        if sum(ring.size for ring in self._rings) < self.min_size:
            return False
        return not self._ratio or self.surplus - self._batch >= self._low

    def count(self, rows: int) -> None:
        self.sampled += rows
        self.publish()

    def lift(self) -> None:
        """No bound from here on: nobody is kept waiting for a learner that has stopped."""
        self._ratio = 0.0
        for ring in self._rings:
            ring.allow(None)

    def publish(self) -> None:
        if not self._ratio:
            return
        rows = (self._high - self.surplus) / self._ratio
        # Rounded up: where there is room at all, each actor may add a row.
        share = max(int(-(-rows // len(self._rings))), 0)
        for ring in self._rings:
            ring.allow(ring.written + share)


# -- an actor's end: straight into shared memory, or sent where that is far ------------------------


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
            self._limit = int(answer(self._sent, self._service.timeout))
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
