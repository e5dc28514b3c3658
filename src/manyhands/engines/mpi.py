"""Workers that `mpiexec` started: how they meet, and how they part.

No end without MPI_Finalize and then C's exit(), unless by Abort: when one rank leaves without them,
even with exit code 0, MPICH's mpiexec kills the others, and may report success.

Collectives on mpi4py buffers, unpickled. No blocking MPI call while others may be missing: a
blocked call ignores deadlines, Ctrl-C and the board, and with more ranks than cores it spins on the
core the missing rank needs (measured with 3 ranks on 2 cores: 17 µs polled, 8 ms blocked). Every
collective is started, then polled.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from manyhands.engines import hosts, process
from manyhands.engines.base import (
    Check,
    Patience,
    Place,
    Roster,
    Sizes,
    Transport,
    TwoStepTransport,
    add_up,
    doing,
)
from manyhands.engines.group import Group
from manyhands.engines.process import BoardRoster
from manyhands.engines.shared import DEAD, FAILED, Board
from manyhands.errors import CollectiveError, ConfigError, SupportError, install
from manyhands.trees import Array


def attach(place: Place, timeout: float) -> MpiWorker:
    """Meet the other ranks of this mpiexec: hosts, and a board when all are on one host."""
    mpi = _initialised(timeout)
    world = mpi.COMM_WORLD
    if world.size == 1 and place.size > 1:
        raise ConfigError(
            f"mpiexec started {place.size} processes, but each sees only itself: this mpiexec "
            "does not belong to mpi4py's MPI. Type: python -m mpi4py --mpi-lib-version, and use "
            "its mpiexec"
        )
    process.wake_precisely()
    rank, size = world.rank, world.size
    star = _Star(mpi, timeout)
    near_and_far = star.tell("host", place.host)
    _unname_shared_memory()
    hosts.meet(place, near_and_far, star.tell, reach=lambda: star.unheard(near_and_far))
    unknown = Roster([f"worker {r} of {size}" for r in range(size)])
    transport = MpiTransport(mpi, _duplicate(mpi, timeout), unknown, timeout)
    board = process.open_board(size)
    if board is None and rank == 0:
        board = Board(size)
    given = [place.host, Board.token(board.address) if rank == 0 and board is not None else ""]
    met = [json.loads(n) for n in transport.exchange(json.dumps(["Parallel()", given]).encode())]
    names = [str(m[1][0]) for m in met]
    if board is None:
        board = Board.open(str(met[0][1][1]), size)
    reached = transport.exchange(json.dumps(["Parallel()", board is not None]).encode())
    if not all(json.loads(n)[1] for n in reached):
        board = None  # seen by some only, it would tell half the truth

    def say(what: str, mine: Any) -> list[Any]:
        said = transport.exchange(json.dumps([what, mine]).encode())
        return [json.loads(n)[1] for n in said]

    # MPI's word instead of the launcher's variables: not every mpiexec sets them.
    near, here = names.count(names[rank]), names[:rank].count(names[rank])
    place = dataclasses.replace(place, rank=rank, size=size, local_rank=here, local_size=near)
    worker = MpiWorker(place, timeout, board, transport, names, _duplicate(mpi, timeout))
    transport.introduce(worker.meet(names, say))
    return worker


def _initialised(timeout: float) -> Any:
    """The module mpi4py.MPI, with MPI initialised."""
    try:
        import mpi4py

        # WHY: the beginning needs a watchdog, and the end is `_leave`.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as cause:  # RuntimeError: mpi4py finds no MPI library
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise SupportError(
            f"the mpi engine needs mpi4py and an MPI library ({reason}); type: {install('mpi')} "
            "(mpi4py + mpich), or load your cluster's MPI module"
        ) from cause
    if not MPI.Is_initialized():
        _initialise_when_all_workers_have_come_to_parallel(MPI, timeout)
    return MPI


def _initialise_when_all_workers_have_come_to_parallel(mpi: Any, timeout: float) -> None:
    """MPI_Init. The long name is what a user sees in the traceback when a worker does not come.

    It waits for every rank, for ever, and holds the interpreter's lock: only a watchdog in C, such
    as faulthandler's, can end it. mpiexec itself does not notice a rank that ended before.
    """
    if timeout > 0:
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    # WHY serialized: the one level that asks for no locks and does not care which thread calls.
    mpi.Init_thread(mpi.THREAD_SERIALIZED)
    faulthandler.cancel_dump_traceback_later()


def _unname_shared_memory() -> None:
    """Take MPICH's shared memory out of its folder, now that every rank has it open.

    WHY: MPICH removes it in MPI_Finalize only, so that a killed run would leave it for good.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for name in {line.split()[5] for line in maps if "/dev/shm/mpich_shm_" in line}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


class _Star:
    """Words between all ranks by way of rank 0, before any call that all of them make together.

    WHY: such a call waits for ever where two hosts do not reach each other, and cannot say which.
    """

    SECONDS = 12.0  # all have come through MPI_Init when it begins: a message takes milliseconds
    TAG = 31_990

    def __init__(self, mpi: Any, timeout: float) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self._limit = min(timeout, self.SECONDS) if timeout > 0 else 0.0

    def tell(self, what: str, mine: str) -> list[str]:
        """What each rank says under a heading, by rank, on all."""
        rank, size = self._world.rank, self._world.size
        said = [mine] * size
        for other in range(1, size) if rank == 0 else ():
            said[other] = self._receive(other, what)
        if rank == 0:
            for other in range(1, size):
                self._send(json.dumps(said), other)
            return said
        self._send(mine, 0)
        return [str(text) for text in json.loads(self._receive(0, what))]

    def unheard(self, hosts: Sequence[str]) -> list[str]:
        """The first rank of each host calls those of all others: a line for each that is silent."""
        rank, firsts = self._world.rank, sorted({hosts.index(host) for host in hosts})
        if rank not in firsts:
            return []
        others = [r for r in firsts if r != rank]
        heard, byte, tag = {r: bytearray(1) for r in others}, self._mpi.BYTE, self.TAG + 1
        pending = {r: self._world.Irecv([heard[r], byte], r, tag) for r in others}
        sent = [self._world.Isend([b"!", byte], r, tag) for r in others]
        patience = Patience(self._limit)
        while pending and not patience.over:
            pending = {r: request for r, request in pending.items() if not request.Test()}
            patience.pause()
        given_up = [*pending.values(), *(s for s in sent if not s.Test())]
        LOST.extend([*given_up, heard] if given_up else [])
        return [
            f"{hosts[rank]} has not heard from {hosts[r]} by MPI within {patience.waited:.0f} s"
            for r in pending
        ]

    def _send(self, text: str, to: int) -> None:
        data, patience = text.encode(), Patience(self._limit)
        request = self._world.Isend([data, self._mpi.BYTE], to, self.TAG)
        while not request.Test():
            if patience.pause() and patience.over:  # who waits for an answer will say so
                LOST.append((data, request))
                return

    def _receive(self, source: int, what: str) -> str:
        patience, status = Patience(self._limit), self._mpi.Status()
        while not self._world.Iprobe(source, self.TAG, status):
            if patience.pause() and patience.over:
                raise CollectiveError(
                    f"start of the mpi engine ({what}): nothing came from worker {source} to "
                    f"worker {self._world.rank} ({socket.gethostname()}) within "
                    f"{patience.waited:.0f} s, though both were started; can their hosts reach "
                    "each other? UCX_NET_DEVICES=eth0 (MPICH) names the interface to use"
                )
        data = bytearray(status.Get_count(self._mpi.BYTE))
        self._world.Recv([data, self._mpi.BYTE], source, self.TAG)
        return data.decode()


def _duplicate(mpi: Any, timeout: float) -> Any:
    """A communicator of our own, so that the user's own MPI calls cannot meet ours."""
    comm, request = mpi.COMM_WORLD.Idup()
    patience = Patience(timeout)
    while not request.Test():
        if patience.pause() and patience.over:
            LOST.append(request)
            raise CollectiveError(f"Parallel(): waited {patience.waited:.1f} s for other workers")
    return comm


class MpiWorker(process.ProcessWorker):
    def __init__(self, place: Place, timeout: float, board: Board | None, transport: MpiTransport,
                 hosts: Sequence[str], at_the_end: Any) -> None:  # fmt: skip
        self._mpi = transport.mpi
        # WHY a communicator for the end alone: after a call that was given up, the others count
        # their calls differently, and a barrier among them would meet something else.
        self._at_the_end = at_the_end
        self._failed = False
        atexit.register(self._leave)  # before `close` is registered: runs after it
        super().__init__(place, timeout, board)
        self.group = Group(transport)

    def fail(self, error: BaseException) -> None:
        self._failed = True
        super().fail(error)

    def abandon(self) -> None:
        """End all ranks by MPI's own means: mpiexec returns 1 at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.2)  # mpiexec drops what it has not read by then: half of a traceback, say
        self._mpi.COMM_WORLD.Abort(1)

    def _leave(self) -> None:
        """At exit: MPI_Finalize when all have come to their end, else Abort.

        No deadline, as in MPI itself: worker 0 may save and evaluate for as long as it likes after
        the last call. A worker that waits in a call for one that is here fails at its own deadline.
        """
        if self._mpi.Is_finalized():
            return
        if self._failed:
            self.abandon()
        patience, board, everyone = Patience(0.0), self.board, range(self.place.size)
        request = self._at_the_end.Ibarrier()
        while not request.Test():
            if not patience.pause() or board is None:
                continue
            if any(board.state(r) in (FAILED, DEAD) for r in everyone):
                time.sleep(1.0)  # it speaks and aborts; this is only in case it cannot
                self.abandon()
        # WHY a watchdog: by the standard, MPI_Finalize may wait for requests that were given up.
        if LOST:
            faulthandler.dump_traceback_later(5.0, exit=True, file=2)
        self._mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()


# -- transport -------------------------------------------------------------------------------------


_FRAME = 1024  # bytes every worker gives to an exchange; 256 would save 0.1 µs
_HEAD = struct.Struct("<qq")  # length of the note; length of the arrays behind it, or -1
_FEW, _GATHER_LIMIT = 8, 1 << 20  # workers and bytes up to which each adds up everything itself
_SCRATCH_LIMIT = 64 << 20  # bytes of work space kept between calls
_AWAKE = 1e-3  # seconds to poll, giving the core away in between, before the first sleep
_SLOWEST = 1e8  # bytes a second that any network moves: how long a transfer may honestly take

# Requests that were given up. MPI may write to their buffers at any time: they are kept for good.
LOST: list[Any] = []


class MpiTransport(TwoStepTransport):
    """Bytes between the ranks of one communicator."""

    def __init__(self, mpi: Any, comm: Any, roster: Roster, timeout: float,
                 key: str = "all") -> None:  # fmt: skip
        self.mpi, self._comm, self.timeout, self._key = mpi, comm, timeout, key
        self.rank, self.size = comm.rank, comm.size
        self._others = [r for r in range(self.size) if r != self.rank]
        self._splits, self._note, self._broken = 0, b"", ""
        self._mine = bytearray(_FRAME)
        self._frames = bytearray(_FRAME * self.size)
        self._scratch: Array = np.empty(0, dtype=np.uint8)
        self.introduce(roster)

    def introduce(self, roster: Roster) -> None:
        """Who the others are. Calls are counted from here on."""
        self.roster = roster
        self._board = roster.board if isinstance(roster, BoardRoster) else None
        self._pages = roster.members if isinstance(roster, BoardRoster) else []
        self._calls = 0

    # -- notes ---------------------------------------------------------------------------------

    def exchange(self, note: bytes) -> list[bytes]:
        return self._meet(note, [])[0]

    def reduce(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        notes, carried = self._meet(note, arrays)
        check(notes)
        if carried is None:
            return self._reduce(arrays, op)
        starts = accumulate([a.nbytes for a in arrays], initial=0)
        return [
            add_up([np.frombuffer(c, a.dtype, a.size, at) for c in carried], op)
            for a, at in zip(arrays, starts, strict=False)
        ]

    def _meet(self, note: bytes, arrays: list[Array]) -> tuple[list[bytes], list[bytes] | None]:
        """All notes; and all workers' arrays, when they were small enough to come along."""
        if self._broken:
            raise CollectiveError(f"this group can make no more calls: {self._broken}")
        self._calls, self._note = self._calls + 1, note
        if self._board is not None:
            self._board.set_text(self._pages[self.rank], "call", f"{self._key} {self._calls}")
        mine, room = self._mine, _FRAME - _HEAD.size
        size = sum(a.nbytes for a in arrays)
        along = bool(arrays) and len(note) + size <= room
        _HEAD.pack_into(mine, 0, len(note), size if along else -1)
        if len(note) <= room:
            at = _HEAD.size + len(note)
            mine[_HEAD.size : at] = note
            if along:
                mine[at : at + size] = b"".join([a.tobytes() for a in arrays])
        byte, frames = self.mpi.BYTE, memoryview(self._frames)
        self._wait([self._comm.Iallgather([mine, byte], [frames, byte])])
        heads = [_HEAD.unpack_from(frames, r * _FRAME) for r in range(self.size)]
        if max(length for length, _ in heads) > room:
            lengths = [length for length, _ in heads]
            joined = np.empty(sum(lengths), np.uint8)
            self._wait([self._share(np.frombuffer(note, np.uint8), joined, lengths)], sum(lengths))
            return [p.tobytes() for p in np.split(joined, [*accumulate(lengths[:-1])])], None
        notes, carried = [], []
        for r, (length, size) in enumerate(heads):
            at = r * _FRAME + _HEAD.size
            notes.append(bytes(frames[at : at + length]))
            carried.append(bytes(frames[at + length : at + length + max(size, 0)]))
        return notes, carried if all(size >= 0 for _, size in heads) else None

    # -- data: all workers are known to be here, only bytes are awaited ---------------------------

    def _reduce(self, arrays: list[Array], op: str) -> list[Array]:
        # WHY not Iallreduce: its order of additions is the library's affair (MPICH's is not that of
        # the ranks from 4 ranks on). This order gives the bits of inline, on any MPI.
        return [self._reduce_one(a, op) for a in arrays]

    def _reduce_one(self, array: Array, op: str) -> Array:
        n, item, size, byte = array.size, array.itemsize, self.size, self.mpi.BYTE
        if size <= _FEW and n * item * (size - 2) <= _GATHER_LIMIT:
            # WHY not Iallgather: 10,000 floats between two take it 12-29 µs, and this way 8.
            parts = list(self._space(n * size, array.dtype).reshape(size, n))
            parts[self.rank] = array
            requests = [self._comm.Irecv([parts[r], byte], r) for r in self._others]
            requests += [self._comm.Isend([array, byte], r) for r in self._others]
            self._wait(requests, n * item * size)
            return add_up(parts, op)
        # Each worker adds up one slice of it for all.
        cuts = [n * r // size for r in range(size + 1)]
        sizes = [(b - a) * item for a, b in pairwise(cuts)]
        mine = sizes[self.rank]
        slices = self._space(mine // item * size, array.dtype)
        sent = self._message(array, sizes)
        self._wait([self._comm.Ialltoallv(sent, self._message(slices, [mine] * size))], n * item)
        done = add_up(list(slices.reshape(size, -1)), op)
        result = np.empty_like(array)
        self._wait([self._share(done, result, sizes)], n * item)
        return result

    def _share(self, mine: Array, everyone: Array, sizes: list[int]) -> Any:
        """Start: everybody's part, end to end, on all workers.

        WHY not Iallgatherv: mpi4py (4.1) lets go of its buffers and counts before it is done.
        """
        whole = [mine, ([mine.nbytes] * self.size, [0] * self.size), self.mpi.BYTE]
        return self._comm.Ialltoallv(whole, self._message(everyone, sizes))

    def _broadcast(self, arrays: list[Array], root: int) -> None:
        requests = [self._comm.Ibcast([a, self.mpi.BYTE], root) for a in arrays]
        self._wait(requests, sum(a.nbytes for a in arrays))

    def _gather(self, parts: list[Array], sizes: Sizes, root: int | None) -> list[Array] | None:
        receive = root is None or root == self.rank
        joined: list[Array] = []
        requests = []
        for leaf, part in enumerate(parts):
            counts = [s[leaf] for s in sizes]
            if receive:
                joined.append(np.empty(sum(counts), dtype=np.uint8))
            if root is None:
                requests.append(self._share(part, joined[leaf], counts))
            else:
                message = self._message(joined[leaf], counts) if receive else None
                requests.append(self._comm.Igatherv([part, self.mpi.BYTE], message, root))
        self._wait(requests, sum(map(sum, sizes)))
        return joined if receive else None

    def _message(self, array: Array, sizes: list[int]) -> list[Any]:
        return [array, (sizes, [0, *accumulate(sizes[:-1])]), self.mpi.BYTE]

    def _space(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Work space, kept between calls: fresh memory costs a page fault every 4 KiB."""
        need = count * dtype.itemsize
        if need > _SCRATCH_LIMIT:
            return np.empty(count, dtype)
        if need > self._scratch.size:
            self._scratch = np.empty(need, dtype=np.uint8)
        return self._scratch[:need].view(dtype)

    def split(self, members: Sequence[int]) -> Transport:
        self._splits += 1
        alone = len(members) == 1
        # MPI has no split that can be polled; but all workers have just exchanged their sets, and
        # so are here. A worker alone needs no communicator: MPICH has 2,000 and no more.
        comm = self._comm.Split(self.mpi.UNDEFINED if alone else members[0], self.rank)
        roster = Roster([self.roster.names[m] for m in members])
        if self._board is not None:
            roster = BoardRoster(self._board, [self._pages[m] for m in members], roster.names)
        key = f"{self._key}/{members[0]}.{self._splits}"
        own = self.mpi.COMM_SELF if alone else comm
        return MpiTransport(self.mpi, own, roster, self.timeout, key)

    def split_off(self, members: Sequence[int], name: str) -> Transport:
        self._splits += 1
        roster = Roster([self.roster.names[m] for m in members])
        if self._board is not None:
            roster = BoardRoster(self._board, [self._pages[m] for m in members], roster.names)
        comm = self._comm.Create_group(self._comm.Get_group().Incl(list(members)))
        return MpiTransport(self.mpi, comm, roster, self.timeout, f"{self._key}/{name}")

    def close(self) -> None:
        """Give a subgroup's communicator back: a local act when nothing is under way on it."""
        if not self._broken and self._key != "all" and self.size > 1:
            self._comm.Free()
        self._broken = self._broken or "it was closed"

    # -- waiting -------------------------------------------------------------------------------

    def _wait(self, requests: list[Any], moving: int = 0) -> None:
        """Until all requests are done. `moving`: bytes under way, and nobody is missing."""
        transfer = moving / _SLOWEST
        patience = Patience(self.timeout + transfer if self.timeout > 0 else 0.0)
        # WHY not sleep at once: a transfer goes on only while both sides poll, and one that sleeps
        # makes the other wait, and sleep, in the next call. A yield costs the missing ones nothing.
        awake = patience.start + transfer + _AWAKE
        try:
            while not self.mpi.Request.Testall(requests):
                if time.perf_counter() < awake:
                    os.sched_yield()
                elif patience.pause():
                    self._look_around(requests, patience)
        except BaseException as error:
            LOST.append((requests, self._mine, self._frames, self._scratch))
            self._broken = f"{self._doing()} was given up"
            if isinstance(error, self.mpi.Exception):
                raise CollectiveError(f"{self._doing()}: MPI reports: {error}") from error
            raise

    def _look_around(self, requests: list[Any], patience: Patience) -> None:
        """Raise when somebody is gone or late."""
        try:
            self.roster.raise_if_gone(self._others, self._doing())
        except CollectiveError:
            # WHY: one who has done his part of this call may be gone already; what he sent is here.
            grace = Patience(0.2)
            while not self.mpi.Request.Testall(requests):
                if grace.pause() and grace.over:
                    raise
            return
        if patience.over:
            behind = [r for r in self._others if not self._has_come(r)]
            raise self.roster.late(behind or self._others, self._doing(), patience.waited)

    def _has_come(self, rank: int) -> bool:
        """Whether that worker is in this call too. MPI does not tell; the board does."""
        if self._board is None:
            return False
        key, _, calls = self._board.text(self._pages[rank], "call").rpartition(" ")
        return key == self._key and int(calls) >= self._calls

    def _doing(self) -> str:
        return doing(self._note)
