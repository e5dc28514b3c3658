"""Image frames stored once, and stacked when they are read.

A stack of four frames shares three with the stack before it and, in a transition, three with the
stack after: kept whole, every frame lies in memory eight times. Here a frame goes into a ring of
its own, once, and a transition keeps the tickets of its frames (see ring.py), 8 bytes each.

The tickets of a stack are put together when the frames arrive, by `FrameStacker`: at the start of
an episode the first frame stands for those before it, so no stack ever reaches over a start, and
nothing is worked out from positions in the ring, so no stack is mixed up where it wraps around.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.errors import ConfigError
from manyhands.replay.ring import Ring, build, layout_of
from manyhands.trees import Array, Tree


@dataclass(frozen=True)
class Frames:
    """Which columns of a replay are stacks of frames, and how much room frames have.

    Args:
        columns: their paths in a row: `("obs", "next_obs")`.
        capacity: frames kept. None: a tenth more than there are rows. Each step takes one frame,
            each end of an episode one more; a row whose frames are gone is not drawn any more.
    """

    columns: tuple[str, ...] = ("obs", "next_obs")
    capacity: int | None = None

    def room(self, rows: int) -> int:
        return self.capacity if self.capacity is not None else rows + rows // 10 + 64


def make_ring(
    capacity: int, example: Tree, frames: Frames | None, *, shared: bool, priorities: bool
) -> Ring:
    """A plain ring, or one that stacks frames on reading; `example` shows a row as it is read."""
    if frames is None:
        return Ring(capacity, example, shared=shared, priorities=priorities)
    return FramedRing(capacity, example, frames, shared=shared, priorities=priorities)


class FramedRing(Ring):
    """Rows whose frame columns hold tickets [S] when written, and stacks [S, H, W] when read."""

    def __init__(
        self, capacity: int, example: Tree, frames: Frames, *, shared: bool = False,
        priorities: bool = False,
    ) -> None:  # fmt: skip
        layout = layout_of(example)
        stacks = {path: (dtype, shape) for path, dtype, shape in layout if path in frames.columns}
        missing = set(frames.columns) - set(stacks)
        kinds = {(dtype, tuple(shape)) for dtype, shape in stacks.values()}
        if missing or len(kinds) != 1:
            raise ConfigError(
                f"frames: columns {list(frames.columns)} must all be in the example, with one "
                f"shape [stack, ...] and dtype; it has {layout}"
            )
        dtype, shape = kinds.pop()
        if len(shape) < 2:
            raise ConfigError(f"frames: a stack has shape [stack, ...], not {list(shape)}")
        rows: dict[str, Any] = {}
        for path, kind, size in layout:
            ticket = path in stacks
            rows[path] = np.zeros(shape[0] if ticket else size, np.int64 if ticket else kind)
        super().__init__(capacity, _nested(rows), shared=shared, priorities=priorities)
        frame = {"frame": np.zeros(shape[1:], dtype)}
        self._join(Ring(frames.room(capacity), frame, shared=shared), list(stacks))

    def _join(self, frames: Ring, columns: list[str]) -> None:
        self.frames, self.stacked = frames, columns
        self._stacks = {i for i, path in enumerate(self._paths) if path in columns}
        (self._frame,) = frames.columns

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "frames": self.frames.describe(), "stacked": self.stacked}

    @classmethod
    def open(cls, description: dict[str, Any]) -> FramedRing:
        ring = super().open(description)
        assert isinstance(ring, FramedRing)
        ring._join(Ring.open(description["frames"]), [str(c) for c in description["stacked"]])
        return ring

    def release(self) -> None:
        super().release()
        self.frames.release()
        self._frame = self._frame[:0].copy()  # the last array on that memory

    def room(self, count: int) -> list[Array]:
        shapes = [
            ((count, *shape, *self._frame.shape[1:]), self._frame.dtype)
            if i in self._stacks
            else ((count, *shape), dtype)
            for i, (shape, dtype) in enumerate(self._wanted)
        ]
        return [self._pool.take(shape, dtype) for shape, dtype in shapes]

    def read(self, tickets: Array, out: list[Array] | None = None) -> tuple[list[Array], Array]:
        out = self.room(len(tickets)) if out is None else out
        small = [
            np.empty((len(tickets), *self._wanted[i][0]), np.int64) if i in self._stacks else to
            for i, to in enumerate(out)
        ]
        _, whole = super().read(tickets, small)
        oldest = np.full(len(tickets), np.iinfo(np.int64).max)
        for i in self._stacks:
            # A torn row may hold any ticket: the remainder keeps the copy within the ring.
            references = small[i].reshape(-1)
            self.frames.read(references, [out[i].reshape(-1, *self._frame.shape[1:])])
            np.minimum(oldest, small[i].min(axis=1), out=oldest)
        return out, whole & (oldest >= self.frames.first)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "frames": self.frames.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.frames.load_state(state["frames"])


class FrameStacker:
    """The writer's side: frames of several environments in, tickets of their stacks out.

    Args:
        frames: where frames go: `writer.frames`, or `FramedRing.frames`.
        num_envs: how many environments step together.
        stack: frames in a stack.
    """

    def __init__(self, frames: Any, num_envs: int, stack: int) -> None:
        self._frames, self.num_envs, self.stack = frames, num_envs, stack
        self._current = np.zeros((num_envs, stack), np.int64)

    def start(self, frames: Array) -> Array:
        """All environments begin an episode with these frames [E, ...]; tickets [E, S]."""
        self._current = np.repeat(self._add(frames)[:, None], self.stack, axis=1)
        return self._current

    def step(self, frames: Array, ended: Array, finals: Array) -> tuple[Array, Array]:
        """One step of all environments.

        Args:
            frames: [E, ...] the newest frame of what the policy sees next: where an episode has
                ended, the first of the next one.
            ended: [E] whether the step ended an episode.
            finals: [K, ...] the last frame of each of those episodes, in order of environment.

        Returns:
            Tickets [E, S] of the stacks that the step led to, and of those to act on next. They
            differ where an episode ended. Do not change them: the next step builds on them.
        """
        ends = int(np.count_nonzero(ended))
        if len(finals) != ends:
            raise ConfigError(f"frames: {ends} episodes ended, but {len(finals)} last frames")
        new = self._add(frames)
        reached = np.empty((self.num_envs, self.stack), np.int64)
        reached[:, :-1] = self._current[:, 1:]
        reached[:, -1] = new
        self._current = reached
        if ends:
            which = np.flatnonzero(ended)
            self._current = reached.copy()
            self._current[which] = new[which, None]
            reached[which, -1] = self._add(finals)
        return reached, self._current

    def _add(self, frames: Array) -> Array:
        first = self._frames.append({"frame": frames})
        return np.arange(first, first + len(frames))

    def state(self) -> dict[str, Any]:
        return {"current": self._current.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._current = np.array(state["current"])


class StackLog:
    """For environments that give whole stacks [E, S, ...]: which of their frames are new?

    It is found by looking: where a stack shows the frames of the one before, moved on by one, only
    its newest is added. Any other stack (an episode's first; whatever else an environment does) is
    added whole. So what is read back is what was seen, always, at the price of a comparison.
    """

    def __init__(self, frames: Any, num_envs: int, stack: int) -> None:
        self._frames = frames
        self.current = np.zeros((num_envs, stack), np.int64)

    def start(self, stacks: Array) -> None:
        """Nothing is known of what was before: all of these are added whole."""
        self.current = np.stack([self._whole(stack) for stack in stacks])

    def step(self, before: Array, after: Array, finals: Any) -> Array:
        """One step of all environments; tickets [E, S] of the stacks that it led to.

        Args:
            before, after: [E, S, ...] what was acted on, and what is acted on next.
            finals: (env, stack) of each episode that has ended, its true last one. Where an
                environment has begun the next episode already, `after` does not show it.
        """
        moved = _moved_on(before, after)
        reached = np.empty_like(self.current)
        reached[moved, :-1] = self.current[moved, 1:]
        reached[moved, -1] = self._add(after[moved, -1])
        for env in np.flatnonzero(~moved).tolist():
            reached[env] = self._whole(after[env])
        last, self.current = self.current, reached
        for env, stack in finals:
            if np.array_equal(stack, after[env]):
                continue
            if reached is self.current:
                reached = reached.copy()
            if np.array_equal(stack[:-1], before[env, 1:]):
                reached[env] = [*last[env, 1:], *self._add(stack[-1:])]
            else:
                reached[env] = self._whole(stack)
        return reached

    def _whole(self, stack: Array) -> Array:
        """All frames of one stack; those that are the same stand there once."""
        tickets = np.empty(len(stack), np.int64)
        for i, frame in enumerate(stack):
            again = i > 0 and np.array_equal(frame, stack[i - 1])
            tickets[i] = tickets[i - 1] if again else self._add(frame[None])[0]
        return tickets

    def _add(self, frames: Array) -> Array:
        first = self._frames.append({"frame": frames}) if len(frames) else 0
        return np.arange(first, first + len(frames))


class HeldFrames:
    """Frames on an actor's side until the rows that show them are sent; the newest can be read.

    WHY held: a replay from which the learner draws must not change while it does not expect it.

    Args:
        frames: where they go: `writer.frames`.
        room: how many of the newest are kept here.
    """

    def __init__(self, frames: Any, room: int) -> None:
        self._frames, self._room = frames, room
        self.written = self._released = int(frames.written)
        self._newest: Array | None = None

    def append(self, rows: dict[str, Array]) -> int:
        frames, first = rows["frame"], self.written
        if self._newest is None:
            self._newest = np.zeros((self._room, *frames.shape[1:]), frames.dtype)
        if first + len(frames) - self._released > self._room:
            raise ConfigError(f"frames: {self._room} cannot be held back until rows are sent")
        self._newest[np.arange(first, first + len(frames)) % self._room] = frames
        self.written += len(frames)
        return first

    def release(self) -> None:
        """To where they go; before the rows that show them."""
        if self._newest is not None and self.written > self._released:
            held = np.arange(self._released, self.written) % self._room
            self._frames.append({"frame": self._newest[held]})
            self._released = self.written

    def stacks(self, tickets: Array) -> Array:
        """Stacks [N, S, ...] of tickets [N, S]; all of them among the newest."""
        if self._newest is None or (tickets.size and tickets.min() < self.written - self._room):
            raise ConfigError(f"frames: older than the {self._room} newest, which are kept here")
        return np.asarray(self._newest[tickets % self._room])


def _moved_on(before: Array, after: Array) -> Array:
    """[E] whether a stack shows the frames of the one before, moved on by one."""
    return np.array([
        np.array_equal(new[:-1], old[1:]) for old, new in zip(before, after, strict=True)
    ])  # fmt: skip


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    return build(list(flat), list(flat.values()))
