"""Workers that `mpiexec` started: how they meet, and how they part.

No end without MPI_Finalize and then C's exit(), unless by Abort: when one rank leaves without them,
even with exit code 0, MPICH's mpiexec kills the others, and may report success.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from manyhands.engines import process
from manyhands.engines.base import Patience, Place, Roster
from manyhands.engines.group import Group
from manyhands.engines.mpi.transport import LOST, MpiTransport
from manyhands.engines.shared import DEAD, FAILED, Board
from manyhands.errors import CollectiveError, ConfigError, SupportError


def attach(place: Place, timeout: float) -> MpiWorker:
    """Meet the other ranks of this mpiexec: hosts, and a board when all are on one host."""
    mpi = _initialised(timeout)
    world = mpi.COMM_WORLD
    if world.size == 1 and place.size > 1:
        raise ConfigError(
            f"mpiexec started {place.size} processes, but each sees itself alone: this mpiexec is "
            "not of mpi4py's MPI. Type: python -m mpi4py --mpi-lib-version, and use its mpiexec"
        )
    process.wake_precisely()
    rank, size = world.rank, world.size
    unknown = Roster([f"worker {r} of {size}" for r in range(size)])
    transport = MpiTransport(mpi, _duplicate(mpi, timeout), unknown, timeout)
    board = process.open_board(size)
    if board is None and rank == 0:
        board = Board(size)
    given = [place.host, Board.token(board.address) if rank == 0 and board is not None else ""]
    met = [json.loads(n) for n in transport.exchange(json.dumps(["Parallel()", given]).encode())]
    hosts = [str(m[1][0]) for m in met]
    if board is None:
        board = Board.open(str(met[0][1][1]), size)
    reached = transport.exchange(json.dumps(["Parallel()", board is not None]).encode())
    if not all(json.loads(n)[1] for n in reached):
        board = None  # seen by some only, it would tell half the truth
    _unname_shared_memory()
    # MPI's word instead of the launcher's variables: not every mpiexec sets them.
    near, here = hosts.count(hosts[rank]), hosts[:rank].count(hosts[rank])
    place = dataclasses.replace(place, rank=rank, size=size, local_rank=here, local_size=near)
    return MpiWorker(place, timeout, board, transport, hosts, _duplicate(mpi, timeout))


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
            f"the mpi engine needs mpi4py and an MPI library ({reason}); type: pip install "
            "'manyhands[mpi]' (mpi4py + mpich), or load your cluster's MPI module"
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
                 hosts: Sequence[str], farewell: Any) -> None:  # fmt: skip
        self._mpi = transport.mpi
        # WHY a communicator for the end alone: after a call that was given up, the others count
        # their calls differently, and a barrier among them would meet something else.
        self._farewell = farewell
        self._failed = False
        atexit.register(self._leave)  # before `close` is registered: runs after it
        super().__init__(place, timeout, board)
        transport.introduce(self.roster(hosts))
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
        request = self._farewell.Ibarrier()
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
