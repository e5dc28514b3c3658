"""Collectives over torch.distributed (c10d): gloo for host memory, nccl for GPU tensors.

Used by the torch and ray engines. Each call begins with one all_gather of small frames of fixed
size that hold everybody's note (and small payloads with it: one round trip instead of two). The
lengths in the frames tell all workers alike whether a second round is needed.

Nothing waits inside torch for longer than one slice: between slices the deadline, the board and
Ctrl-C get their turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manyhands.engines.base import Check, Patience, Roster, Sizes, Transport
from manyhands.engines.roster import BoardRoster
from manyhands.engines.shared import RUNNING, Board
from manyhands.errors import CollectiveError
from manyhands.trees import Array

_FRAME = 256  # bytes; a barrier, a scalar mean and most notes fit
_HEAD = 8  # two 4-byte lengths: note, payload
_SLICE = timedelta(seconds=0.05)
_GRACE = 0.5  # seconds that the board gets to say who it was, once a connection is lost
_SHOW_UP = 1.0  # seconds of waiting after which a worker without a board says that it waits
_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# What gloo adds up itself. It has no int16, uint16, uint32, uint64, and its max and min lose NaN.
_GLOO_SUMS = {"int8", "uint8", "int32", "int64", "float32", "float64", "complex64", "complex128"}


def group_timeout(timeout: float) -> timedelta:
    """What to give torch as the timeout of a process group: ours must always fire first."""
    return timedelta(seconds=timeout + 60 if timeout > 0 else 10 * 365 * 86400)


class C10dTransport(Transport):
    """Bytes between the workers of one process group.

    Args:
        process_group: a group with a gloo backend for CPU tensors; None for a group of one.
        ranks: rank in torch's default group of each worker of this group, in order.
        rank: this worker's rank in this group.
        roster: the names of the workers of this group, by rank in it.
        timeout: seconds that any call may take; 0 means for ever.
        board: where all workers report, if they share a host; `ranks` are also ranks on it.
        store: where workers that share no host say that they wait.
    """

    def __init__(
        self,
        process_group: Any,
        ranks: Sequence[int],
        rank: int,
        roster: Roster,
        timeout: float,
        board: Board | None = None,
        store: Any = None,
    ) -> None:
        self._group, self._ranks = process_group, list(ranks)
        self.rank, self.size, self.roster = rank, len(self._ranks), roster
        self._timeout, self._store = timeout, store
        self._progress = _Progress(self._ranks, rank, board, store)
        self._calls = 0
        self._frame: Any = torch.zeros(_FRAME, dtype=torch.uint8)
        self._frames: Any = torch.zeros(self.size, _FRAME, dtype=torch.uint8)
        self._nccl = dist.is_nccl_available() and _has_nccl(process_group)

    # -- the calls -----------------------------------------------------------------------------

    def exchange(self, note: bytes) -> list[bytes]:
        return [theirs for theirs, _ in self._swap(note, b"")]

    def reduce(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        if _HEAD + len(note) + sum(a.nbytes for a in arrays) > _FRAME:
            return super().reduce(note, arrays, op, check)
        swapped = self._swap(note, b"".join(a.tobytes() for a in arrays))
        check([theirs for theirs, _ in swapped])
        # WHY no further look: notes that agree mean equal shapes, so all payloads are laid alike.
        return _fold([_cut(payload, arrays) for _, payload in swapped], op)

    def _reduce(self, arrays: list[Array], op: str) -> list[Array]:
        results: list[Array] = [a.copy() for a in arrays]
        works = []
        others = []
        for i, result in enumerate(results):
            if op == "sum" and result.dtype.name in _GLOO_SUMS:
                works.append(self._start(dist.all_reduce, torch.from_numpy(result)))
            else:  # everybody gets all parts and folds them in order of rank
                parts = torch.empty(self.size, result.nbytes, dtype=torch.uint8)
                mine = _tensor(result.reshape(-1).view(np.uint8))
                works.append(self._start(dist.all_gather, list(parts), mine))
                others.append((i, parts))
        self._finish(works)
        for i, parts in others:
            rows = [[row.view(results[i].dtype)] for row in parts.numpy()]
            results[i] = _fold(rows, op)[0]
        return results

    def _broadcast(self, arrays: list[Array], root: int) -> None:
        source = self._ranks[root]
        self._finish([self._start(dist.broadcast, _tensor(a), source) for a in arrays if a.size])

    def _gather(self, parts: list[Array], sizes: Sizes, root: int | None) -> list[Array] | None:
        receives = root is None or root == self.rank
        joined: list[Array] = []
        works = []
        for leaf, part in enumerate(parts):
            lengths = [row[leaf] for row in sizes]
            joined.append(np.empty(sum(lengths) if receives else 0, np.uint8))
            if not sum(lengths):
                continue
            if root is None:
                works += self._everywhere(part, lengths, joined[-1])
            else:
                works.append(self._to_root(part, lengths, joined[-1], root))
        self._finish(works)
        return joined if receives else None

    def _to_root(self, part: Array, lengths: list[int], joined: Array, root: int) -> Any:
        # WHY all_to_all: it is gloo's only call that takes unequal lengths straight to their place
        # and, unlike send and recv, can be waited for in slices.
        send = [0] * self.size
        send[root] = lengths[self.rank]
        receive = lengths if root == self.rank else [0] * self.size
        return self._start(
            dist.all_to_all_single, torch.from_numpy(joined), _tensor(part), receive, send
        )

    def _everywhere(self, part: Array, lengths: list[int], joined: Array) -> list[Any]:
        """Each worker broadcasts its part from, and into, its place in the result."""
        ends = np.cumsum(lengths)
        joined[ends[self.rank] - lengths[self.rank] : ends[self.rank]] = part
        return [
            self._start(dist.broadcast, torch.from_numpy(joined[end - n : end]), self._ranks[r])
            for r, (n, end) in enumerate(zip(lengths, ends, strict=True))
            if n
        ]

    def split(self, members: Sequence[int]) -> C10dTransport:
        ranks = [self._ranks[m] for m in members]
        group = None
        if len(ranks) > 1:
            # WHY local: only the members meet, so that a part of a part can be split again.
            group = dist.new_group(
                ranks, timeout=group_timeout(self._timeout), use_local_synchronization=True
            )
        names = [self.roster.names[m] for m in members]
        if isinstance(self.roster, BoardRoster):
            worlds = [self.roster.members[m] for m in members]
            roster: Roster = BoardRoster(self.roster.board, worlds, names)
        else:
            roster = Roster(names)
        rank = ranks.index(self._ranks[self.rank])
        board = self._progress.board
        return C10dTransport(group, ranks, rank, roster, self._timeout, board, self._store)

    def takes(self, tensor: Any) -> bool:
        return bool(self._nccl and tensor.is_cuda and tensor.is_floating_point())

    def reduce_tensor(self, tensor: Any) -> None:
        work = self._start(dist.all_reduce, tensor)
        patience = Patience(self._timeout)
        # WHY poll: wait() of an nccl work only orders streams; a lost peer would show much later.
        while not work.is_completed():
            if patience.pause():
                self._look_around(patience)
        work.wait()

    # -- inside --------------------------------------------------------------------------------

    def _swap(self, note: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        """Everybody's (note, payload), by rank. One round when all fit the frame, else two."""
        self._calls += 1
        if self.size == 1:
            return [(note, payload)]
        mine = np.frombuffer(note + payload, np.uint8)
        frame = self._frame.numpy()
        frame[:_HEAD].view(np.uint32)[:] = len(note), len(payload)
        if mine.size <= _FRAME - _HEAD:
            frame[_HEAD : _HEAD + mine.size] = mine
        self._finish([self._start(dist.all_gather, list(self._frames), self._frame)])
        frames = self._frames.numpy()
        heads = frames[:, :_HEAD].copy().view(np.uint32).astype(int)
        longest = int(heads.sum(axis=1).max())
        bodies = frames[:, _HEAD:]
        if longest > _FRAME - _HEAD:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded.numpy()[: mine.size] = mine
            rows = torch.empty(self.size, longest, dtype=torch.uint8)
            self._finish([self._start(dist.all_gather, list(rows), padded)])
            bodies = rows.numpy()
        return [
            (body[:n].tobytes(), body[n : n + m].tobytes())
            for body, (n, m) in zip(bodies, heads, strict=True)
        ]

    def _start(self, operation: Any, *args: Any) -> Any:
        try:
            return operation(*args, group=self._group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from None

    def _finish(self, works: list[Any]) -> None:
        """Wait for all of them; CollectiveError at the deadline or when somebody is gone."""
        self._progress.step()
        patience = Patience(self._timeout)
        for work in works:
            while True:
                try:
                    work.wait(_SLICE)
                    break
                except RuntimeError as error:
                    if work.is_completed() and "Operation timed out" not in str(error):
                        raise self._lost(error) from None
                self._look_around(patience)

    @property
    def _doing(self) -> str:
        return f"collective call {self._calls}"

    def _look_around(self, patience: Patience) -> None:
        """Between two slices of a wait: is somebody gone, or the time over?"""
        if patience.waited > _SHOW_UP:
            self._progress.tell()
        self._raise_if_gone()
        if patience.over:
            self._progress.tell()
            late = self._progress.behind() or self._progress.others
            raise self.roster.late(late, self._doing, patience.waited)

    def _raise_if_gone(self) -> None:
        behind = self._progress.behind()
        try:
            self.roster.raise_if_gone(behind, self._doing)
        except CollectiveError:
            # WHY look again: who came in between and then finished has done his part.
            if self._progress.behind() == behind:
                raise
        dead = [r for r in behind if self._progress.dead(r)]
        if dead:
            raise CollectiveError(
                f"{self._doing}: {', '.join(self.roster.name(r) for r in dead)} died "
                "(its process is gone)"
            )

    def _lost(self, error: Exception) -> CollectiveError:
        """A connection broke: say whose, if that can be known."""
        patience = Patience(_GRACE)
        self._progress.step()  # everybody who did not come to this very moment is a candidate
        while not patience.over:
            try:
                self._raise_if_gone()
            except CollectiveError as known:
                return known
            time.sleep(0.01)
        candidates = self._progress.behind() or self._progress.others
        who = ", ".join(self.roster.name(r) for r in candidates)
        first_line = str(error).strip().split("\n", 1)[0]
        return CollectiveError(f"{self._doing}: lost the connection to one of {who} ({first_line})")


class _Progress:
    """How far each worker of a group has come, as far as that can be known.

    With a board everybody writes it there at each step. Without one a worker that has waited for
    a while says so in the store; who has not said so is taken to be behind.
    """

    def __init__(self, ranks: list[int], rank: int, board: Board | None, store: Any) -> None:
        self.board = board if len(ranks) > 1 else None
        self.others = [r for r in range(len(ranks)) if r != rank]
        self._ranks, self._rank, self._store = ranks, rank, store
        self._key = "-".join(map(str, ranks))  # groups of one worker count their own steps
        self._step = 0
        self._told = 0

    def step(self) -> None:
        self._step += 1
        if self.board is not None:
            self.board.set_text(self._ranks[self._rank], "call", f"{self._step}:{self._key}")

    def tell(self) -> None:
        if self.board is None and self._store is not None and self._told < self._step:
            self._told = self._step
            self._store.set(self._store_key(self._rank), str(self._step))

    def behind(self) -> list[int]:
        return [r for r in self.others if self._step_of(r) < self._step]

    def dead(self, rank: int) -> bool:
        """Whether that worker's process has ended without a word."""
        if self.board is None or self.board.state(self._ranks[rank]) != RUNNING:
            return False
        return not _alive(self.board.pid(self._ranks[rank]))

    def _step_of(self, rank: int) -> int:
        if self.board is not None:
            step, _, key = self.board.text(self._ranks[rank], "call").partition(":")
            return int(step) if key == self._key else 0
        return 0

    def _store_key(self, rank: int) -> str:
        return f"manyhands/waits/{self._key}/{rank}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as stat:  # a zombie answers signals too
            return stat.read().rsplit(")", 1)[-1].split()[0] not in ("Z", "X")
    except OSError:
        return True


def _has_nccl(group: Any) -> bool:
    if group is None or not torch.cuda.is_available():
        return False
    return "nccl" in str(dist.get_backend_config(group))


def _tensor(array: Array) -> Any:
    """A tensor on the array's own memory; read-only memory is copied, as torch cannot hold it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _cut(payload: bytes, like: list[Array]) -> list[Array]:
    """The arrays that lie end to end in a payload."""
    out, at = [], 0
    for a in like:
        out.append(np.frombuffer(payload, a.dtype, a.size, at))
        at += a.nbytes
    return out


def _fold(everyone: list[list[Array]], op: str) -> list[Array]:
    """Reduce the arrays of all workers, in order of rank."""
    results = [a.copy() for a in everyone[0]]
    for theirs in everyone[1:]:
        for result, array in zip(results, theirs, strict=True):
            _UFUNCS[op](result, array, out=result)
    return results
