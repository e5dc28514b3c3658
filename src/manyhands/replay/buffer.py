"""Replay in one process: uniform, or in proportion to priority.

    replay = PrioritizedReplay(100_000, example={"obs": obs, "action": 0, "reward": 0.0, ...})
    replay.append(rows)                              rows [N, ...]; N may be 1
    batch = replay.sample(512, beta=0.4)             batch.rows, batch.weights, batch.ids
    replay.update_priorities(batch.ids, td_errors)

For many actors and one learner see sharded.py.
"""

from __future__ import annotations

from typing import Any

from manyhands.errors import ConfigError
from manyhands.replay.frames import FramedRing, Frames, make_ring
from manyhands.replay.ring import Ring
from manyhands.replay.sampling import Batch, Proportional, Uniform, assemble
from manyhands.trees import Array, Tree

__all__ = ["Batch", "Frames", "PrioritizedReplay", "Replay"]


class Replay:
    """The newest `capacity` rows, each as likely to be drawn as any other.

    Args:
        capacity: how many rows are kept.
        example: one row: a nested dict of numbers and arrays, without the batch dimension.
        seed: of the draws.
        frames: columns that are stacks of frames, to be stored once; see frames.py.
    """

    def __init__(
        self, capacity: int, example: Tree, *, seed: int | None = 0, frames: Frames | None = None
    ) -> None:
        self._ring = make_ring(capacity, example, frames, shared=False, priorities=False)
        self._sampler: Uniform | Proportional = Uniform([self._ring], seed)

    @property
    def capacity(self) -> int:
        return self._ring.capacity

    @property
    def size(self) -> int:
        return self._ring.size

    def __len__(self) -> int:
        """Rows that are there now."""
        return self._ring.size

    @property
    def frames(self) -> Ring:
        """Where a `FrameStacker` puts frames."""
        return frames_of(self._ring)

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._sampler.counters)

    def append(self, rows: Tree) -> None:
        """Add rows [N, ...], over the oldest when it is full."""
        self._ring.append(rows)

    def sample(self, count: int) -> Batch:
        """Rows drawn with replacement."""
        return self._sample(count, 0.0)

    def clear(self) -> None:
        """Forget all rows. Ids that were handed out stay invalid for ever."""
        self._ring.clear()

    def _sample(self, count: int, beta: float) -> Batch:
        if not 1 <= count <= self._ring.capacity:
            raise ConfigError(
                f"replay: a batch of {count} rows from a buffer for {self._ring.capacity}; "
                f"give 1 to {self._ring.capacity}, or a larger capacity"
            )
        self._sampler.take_in()
        return assemble(self._sampler, self._sampler.draw(count, beta), beta)

    def state(self) -> dict[str, Any]:
        """All of it as plain data and arrays, for a checkpoint."""
        self._sampler.take_in()
        return {"ring": self._ring.state(), "sampler": self._sampler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self._ring.load_state(state["ring"])
        self._sampler.load_state(state["sampler"])


class PrioritizedReplay(Replay):
    """Rows drawn in proportion to (|δ| + ε)^α, with importance weights for the correction.

    Args:
        capacity, example, seed, frames: as for `Replay`.
        alpha: how much priority counts; 0 draws uniformly.
        eps: what is added to every |δ|, so that a row with no error is still drawn now and then.
    """

    def __init__(
        self, capacity: int, example: Tree, *, alpha: float = 0.6, eps: float = 0.01,
        seed: int | None = 0, frames: Frames | None = None,
    ) -> None:  # fmt: skip
        self._ring = make_ring(capacity, example, frames, shared=False, priorities=True)
        self._priorities = Proportional([self._ring], alpha, eps, seed)
        self._sampler = self._priorities

    def append(self, rows: Tree, priorities: Array | None = None) -> None:
        """Add rows [N, ...] with their TD errors [N]; without, they get the largest priority."""
        self._ring.append(rows, priorities)

    def sample(self, count: int, beta: float = 0.4) -> Batch:
        """One row from each of `count` equal parts of the sum of priorities."""
        return self._sample(count, beta)

    def update_priorities(self, ids: Array, priorities: Array) -> int:
        """New TD errors of rows that were drawn; how many were dropped, being overwritten."""
        return self._priorities.update(ids, priorities)


def frames_of(ring: Ring) -> Ring:
    if not isinstance(ring, FramedRing):
        raise ConfigError("replay: it was made without frames=Frames(...)")
    return ring.frames
