"""Collectives over torch.distributed (c10d): gloo for host memory, nccl for GPU tensors.

Each call begins with one all_gather of small frames of fixed size that hold everybody's note (and
a small payload with it). Their lengths tell all workers alike whether a second round is needed.
Nothing waits inside torch for longer than a slice: then deadline, board and Ctrl-C get their turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# WHY here: its functions take the default group that there is at this moment for a default argument
# and keep it. Imported later, by torch's compiler with the first optimiser, they would keep ours
# alive for ever, and gloo's threads with it.
import torch.distributed.nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from manyhands.engines.base import (
    Check,
    Patience,
    Roster,
    Sizes,
    TwoStepTransport,
    add_up,
    doing,
)
from manyhands.engines.process import BoardRoster, HowFar
from manyhands.engines.shared import Board
from manyhands.errors import CollectiveError
from manyhands.trees import Array

_FRAME = 256  # bytes, at the least; a barrier, a scalar mean and most notes fit
_LARGE = 1 << 17  # bytes of all workers together up to which data travels beside the notes
_HEAD = 8  # two 4-byte lengths: note, payload
_SLICE = timedelta(seconds=0.05)
_LINGER = 1.0  # seconds after which somebody who left in the middle of a call counts as gone
_GRACE = 0.5  # seconds that the board gets to say who it was, once a connection is lost
# What gloo adds up itself. It has no int16, uint16, uint32, uint64, and its max and min lose NaN.
_GLOO_SUMS = {"int8", "uint8", "int32", "int64", "float32", "float64", "complex64", "complex128"}


class C10dTransport(TwoStepTransport):
    """Bytes between the workers of one process group (None for a group of one).

    `ranks` are the members' ranks in torch's default group and on the board; `rank` is this
    worker's place among them. The board is for workers on one host; without it, workers that have
    waited for a while say so in the store. Without a store the group cannot be split.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, roster: Roster,
                 timeout: float, board: Board | None = None, store: Any = None,
                 name: str = "") -> None:  # fmt: skip
        self._group, self._ranks, self._name = group, list(ranks), name
        self.rank, self.size, self.roster = rank, len(self._ranks), roster
        self.timeout, self._store = timeout, store
        self._progress = HowFar(self._ranks, rank, board, store, name)
        self._calls, self._splits, self._doing = 0, 0, "no call yet"
        self._works: list[Any] = []  # of the last call
        # The frame of the next call, by what the last ones took: all saw the same lengths.
        self._needed = deque([_FRAME], maxlen=16)
        self._nccl = isinstance(group, dist.ProcessGroup) and has_nccl(group)
        _OPEN.add(self)

    def exchange(self, note: bytes) -> list[bytes]:
        return [theirs for theirs, _ in self._swap(note, b"")]

    def reduce(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        if len(arrays) != 1 or arrays[0].nbytes * self.size > _LARGE:
            return super().reduce(note, arrays, op, check)
        swapped = self._swap(note, arrays[0].tobytes())
        check([theirs for theirs, _ in swapped])
        parts = [np.frombuffer(payload, arrays[0].dtype) for _, payload in swapped]
        return [add_up(parts, op)]

    def _reduce(self, arrays: list[Array], op: str) -> list[Array]:
        results: list[Array] = [a.copy() for a in arrays]
        works = []
        for i, result in enumerate(results):
            if op == "sum" and result.dtype.name in _GLOO_SUMS:
                works.append(self._start("allreduce", [torch.from_numpy(result)]))
            else:  # everybody gets all parts and folds them in order of rank
                rows = self._all_gather(result.view(np.uint8)).view(result.dtype)
                results[i] = add_up(rows, op)
        self._finish(works)
        return results

    def _broadcast(self, arrays: list[Array], root: int) -> None:
        self._finish([self._start("broadcast", _tensor(a), root) for a in arrays if a.size])

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
        return self._start("alltoall_base", torch.from_numpy(joined), _tensor(part), receive, send)

    def _everywhere(self, part: Array, lengths: list[int], joined: Array) -> list[Any]:
        """Each worker broadcasts its part from, and into, its place in the result."""
        ends = np.cumsum(lengths)
        joined[ends[self.rank] - lengths[self.rank] : ends[self.rank]] = part
        return [
            self._start("broadcast", torch.from_numpy(joined[end - n : end]), r)
            for r, (n, end) in enumerate(zip(lengths, ends, strict=True))
            if n
        ]

    def split(self, members: Sequence[int]) -> C10dTransport:
        self._splits += 1  # parts of one split do not overlap
        return self.split_off(members, f"part{self._splits}.{self._ranks[members[0]]}")

    def split_off(self, members: Sequence[int], name: str) -> C10dTransport:
        ranks = [self._ranks[m] for m in members]
        rank = list(members).index(self.rank)
        name = f"{self._name}/{name}"
        group = None
        if len(ranks) > 1:
            # WHY not dist.new_group: all workers of the run would have to call it, so that a part
            # could not be split again. The price: tensors on a GPU go through host memory.
            with recorded():
                inside, limit = PrefixStore(name, self._store), group_timeout(self.timeout)
                group = ProcessGroupGloo(inside, rank, len(ranks), limit)
        roster = Roster([self.roster.names[m] for m in members])
        if isinstance(self.roster, BoardRoster):
            roster = BoardRoster(self.roster.board, ranks, roster.names)
        board = self._progress.board
        return C10dTransport(group, ranks, rank, roster, self.timeout, board, self._store, name)

    def close(self) -> None:
        self._group = None
        for work in self._works:
            # CRUCIAL: never freed. A thread of gloo lets go of a work a moment after it is done,
            # and as its last owner asks for Python's lock; while the interpreter ends, that aborts
            # the process ("terminate called without an active exception"). Where the script itself
            # keeps the group, as by a DistributedDataParallel, such threads live on until then.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        self._works = []

    def takes(self, tensor: Any) -> bool:
        return bool(self._nccl and tensor.is_cuda and tensor.is_floating_point())

    def reduce_tensor(self, tensor: Any) -> None:
        self._progress.step()
        work = self._start("allreduce", [tensor])
        patience = Patience(self.timeout)
        # WHY poll: wait() of an nccl work only orders streams; a lost peer would show much later.
        while not work.is_completed():
            if patience.pause():
                self._look_around(patience)
        work.wait()

    def _swap(self, note: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        """Everybody's (note, payload), by rank. One round when all fit the frame, else two."""
        self._calls += 1
        self._doing = doing(note)
        if self.size == 1:
            return [(note, payload)]
        mine = np.frombuffer(note + payload, np.uint8)
        # WHY fresh memory each time: a call that was given up may still write to its own.
        room = max(self._needed)
        frame = np.zeros(room, np.uint8)
        frame[:_HEAD].view(np.uint32)[:] = len(note), len(payload)
        if mine.size <= room - _HEAD:
            frame[_HEAD : _HEAD + mine.size] = mine
        bodies = self._all_gather(frame)
        heads = bodies[:, :_HEAD].copy().view(np.uint32).astype(int)
        longest = int(heads.sum(axis=1).max())
        needed = max(_FRAME, _HEAD + longest)
        self._needed.append(needed if needed * self.size <= 2 * _LARGE else _FRAME)
        if needed > room:
            bodies = self._all_gather(np.pad(mine, (_HEAD, longest - mine.size)))
        return [
            (body[_HEAD : _HEAD + n].tobytes(), body[_HEAD + n : _HEAD + n + m].tobytes())
            for body, (n, m) in zip(bodies, heads, strict=True)
        ]

    def _all_gather(self, mine: Array) -> Array:
        """Everybody's bytes, as many on each, one row a worker."""
        rows = torch.empty(self.size, mine.nbytes, dtype=torch.uint8)
        self._finish([self._start("allgather", [list(rows)], [torch.from_numpy(mine)])])
        return rows.numpy()

    def _start(self, operation: str, *args: Any) -> Any:
        if self._group is None:
            raise CollectiveError(f"{self._doing}: this worker has left its group")
        try:
            return getattr(self._group, operation)(*args)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _finish(self, works: list[Any]) -> None:
        """Wait for all of them; CollectiveError at the deadline or when somebody is gone."""
        self._progress.step()
        self._works = works
        patience = Patience(self.timeout)
        for work in works:
            while (fault := _wait_a_slice(work)) is not None:
                if work.is_completed() and "Operation timed out" not in str(fault):
                    raise self._lost(fault)
                self._look_around(patience)

    def _look_around(self, patience: Patience) -> None:
        """Between two slices of a wait: is somebody gone, or the time over?"""
        self._progress.tell()
        self._raise_if_gone(_LINGER)
        if patience.over:
            raise self.roster.late(self._progress.late(), self._doing, patience.waited)

    def _raise_if_gone(self, linger: float) -> None:
        behind = self._progress.behind()
        try:
            self.roster.raise_if_gone(behind, self._doing)
        except CollectiveError:
            # WHY look again: who came in between and then finished has done his part.
            if self._progress.behind() == behind:
                raise
        for r in self._progress.others:
            if self._progress.dead(r):
                raise CollectiveError(
                    f"{self._doing}: {self.roster.name(r)} died without leaving a message"
                )
        self.roster.raise_if_gone(self._progress.left(linger), self._doing)

    def _lost(self, fault: RuntimeError) -> CollectiveError:
        """A connection broke: say whose, if that can be known."""
        patience = Patience(_GRACE)
        try:
            while not patience.over:
                self._raise_if_gone(_LINGER)
                time.sleep(0.01)
            self._raise_if_gone(0.0)
        except CollectiveError as known:
            return known
        who = ", ".join(self.roster.name(r) for r in self._progress.late())
        reason = str(fault).split("] ", 1)[-1].split(". ")[0].strip()  # gloo's own, less its source
        return CollectiveError(f"{self._doing}: lost the connection to one of: {who} ({reason})")


def _wait_a_slice(work: Any) -> RuntimeError | None:
    try:
        work.wait(_SLICE)
    except RuntimeError as fault:
        return fault.with_traceback(None)
    return None


def has_nccl(group: Any) -> bool:
    return "nccl" in str(dist.get_backend_config(group))


def _tensor(array: Array) -> Any:
    """A tensor on the array's own memory; read-only memory is copied, as torch cannot hold it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


_OPEN: weakref.WeakSet[C10dTransport] = weakref.WeakSet()
_SOCKETS: dict[int, str] = {}  # file descriptor -> identity of each connection that gloo made


def wrap_ddp(module: torch.nn.Module, device: Any) -> torch.nn.Module:
    """CRUCIAL: call the wrapper, never its `.module`: that skips the averaging without a word."""
    on_gpu = [device] if torch.device(device).type == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(module, device_ids=on_gpu)


def group_timeout(timeout: float) -> timedelta:
    """What to give torch as the timeout of a process group: ours must always fire first."""
    return timedelta(seconds=timeout + 60 if timeout > 0 else 10 * 365 * 86400)


def init_process_group(rank: int, size: int, store: Any, timeout: float, *,
                       gpu: int | None = None, one_host: bool = False) -> Any:  # fmt: skip
    """A process group of all workers, who call this at the same time with a store all can reach.

    With `gpu` (this worker's own; None on all unless every worker has one) it has nccl too. When
    all are on `one_host`, gloo listens on the loopback only.
    """
    if one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if gpu is not None:
        torch.cuda.set_device(gpu)
    backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
    limit = group_timeout(timeout)
    with recorded():
        if dist.is_initialized():
            # WHY one of our own: the script's calls on its group and ours must not mix.
            return dist.new_group(backend=backend, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    # WHY wait: gloo is up here before it is up there, and a worker that leaves at once would cut
    # off one that still connects.
    if store.add("connected", 1) == size:
        store.set("all connected", "1")
    store.wait(["all connected"], limit)
    return dist.group.WORLD


def leave_process_group(group: Any) -> None:
    """Let go of a process group and its parts at once, whatever still runs on it.

    WHY cut the connections first: gloo has no abort, and its destructor waits for operations that
    nobody will ever complete. A cut connection ends them, here and on the other side.
    """
    for fd, identity in _connections().items():
        if _SOCKETS.get(fd) == identity:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)  # OSError: already cut by the peer
    _SOCKETS.clear()
    for transport in list(_OPEN):
        transport.close()  # gloo's threads must end before the interpreter does
    if dist.is_initialized():
        if has_nccl(group):
            group.abort()  # never waits for kernels that a lost peer keeps from ending
        dist.destroy_process_group(group)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Remember the connections made in this block as gloo's, for `leave_process_group`."""
    before = _connections()
    yield
    _SOCKETS.update({fd: who for fd, who in _connections().items() if before.get(fd) != who})


def _connections() -> dict[int, str]:
    """Descriptor and identity of every socket of this process (Linux; empty elsewhere)."""
    names = os.listdir("/proc/self/fd") if sys.platform.startswith("linux") else []
    found = {}
    for name in names:
        with contextlib.suppress(OSError):  # closed since it was listed
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: who for fd, who in found.items() if who.startswith("socket:")}
