"""A worker that is a process of its own: its page on the board, its heartbeat, its last words.

Shared by the local, mpi, torch and ray engines.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import TracebackType

from manyhands.engines.base import Place, Roster, Worker, worker_names
from manyhands.engines.liveness import BoardRoster, Heartbeat
from manyhands.engines.shared import DONE, FAILED, RUNNING, Board
from manyhands.errors import CollectiveError

_CURRENT: list[ProcessWorker] = []  # at most one a process


class ProcessWorker(Worker):
    """Everything about a worker but the way it moves bytes. Engines add `group` and the rest."""

    def __init__(self, place: Place, timeout: float, board: Board | None) -> None:
        self.place, self.timeout, self.board = place, timeout, board
        self._heartbeat: Heartbeat | None = None
        self._left = False
        if board is not None:
            board.enter(place.rank, place.role)
            self._heartbeat = Heartbeat(board, place.rank)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._last_words
        atexit.register(self.close)
        _CURRENT.append(self)

    def roster(self, hosts: Sequence[str]) -> Roster:
        """The roster of all workers, given the host of each."""
        size = self.place.size
        names = worker_names(size, hosts)
        if self.board is not None and len(set(hosts)) == 1:
            return BoardRoster(self.board, range(size), names)
        return Roster(names)

    def fail(self, error: BaseException) -> None:
        """Leave the original traceback where the supervisor and the others find it."""
        self._left = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self.board is not None and self.board.state(self.place.rank) == RUNNING:
            text = "failed:\n" + "".join(traceback.format_exception(trim(error)))
            secondary = isinstance(error, (CollectiveError, KeyboardInterrupt))
            self.board.set_state(self.place.rank, FAILED, text, code=1, secondary=secondary)

    @property
    def restarts(self) -> int:
        return int(os.environ.get("MANYHANDS_RESTARTS", "0"))

    def main_has_left(self) -> bool:
        return self.board is not None and self.board.state(0) == DONE

    def abandon(self) -> None:
        """End the other workers too, where no supervisor does it (plain mpiexec)."""

    def close(self) -> None:
        if self._left:
            return
        self._left = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self.board is not None and self.board.state(self.place.rank) == RUNNING:
            self.board.set_state(self.place.rank, DONE)

    def _last_words(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        """Uncaught exception without our own launcher: say who it was, then end all.

        One worker tells the story; its end is the end of those who would tell it again.
        """
        self.fail(error)
        if isinstance(error, (CollectiveError, KeyboardInterrupt)) and self._another_speaks():
            time.sleep(1.0)
        print(f"\nmanyhands: {self.place.name} (pid {os.getpid()}) failed:", file=sys.stderr)
        self._previous_hook(kind, error, where)
        sys.stderr.flush()
        self.abandon()

    def _another_speaks(self) -> bool:
        time.sleep(0.1)  # the others fail of the same thing, within a moment
        board, me = self.board, self.place.rank
        if board is None:
            return me > 0
        failed = [r for r in range(self.place.size) if r != me and board.state(r) == FAILED]
        return any(r < me or not board.secondary(r) for r in failed)


def current() -> ProcessWorker | None:
    return _CURRENT[-1] if _CURRENT else None


def forget() -> None:
    """For a process that hosts one worker after another (a Ray actor, a test)."""
    if _CURRENT:
        worker = _CURRENT.pop()
        sys.excepthook = worker._previous_hook
        atexit.unregister(worker.close)


def trim(error: BaseException) -> BaseException:
    """Drop the launcher's own frames from the top of a traceback: the user did not write them."""
    here = os.path.dirname(os.path.abspath(__file__))
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        name = tb.tb_frame.f_code.co_filename
        if not (name.startswith(here) or name.startswith("<frozen")):
            break
        tb = tb.tb_next
    return error.with_traceback(tb)


def open_board(size: int) -> Board | None:
    """The board of the launcher that started this process, if there is one and it is in reach."""
    token = os.environ.get("MANYHANDS_BOARD", "")
    return Board.open(token, size) if token else None


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def wake_precisely() -> None:
    """Sleep no longer than asked: the default timer slack adds 50 µs to each short sleep."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK, nanoseconds
