"""Stopping by signal: first asked, then forced.

The first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C asks: the run ends its update, writes a checkpoint and
leaves. The second one tells, and so does the deadline: everything ends at once.

    launcher    owns the signals; puts the number of the first on the board (or here, inline)
    workers     pass a signal of their own on to the board: a job manager may signal every process
    main worker looks at the board once an update, and tells the others
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from manyhands.engines import process
from manyhands.engines.shared import Board
from manyhands.errors import ConfigError, Stopped

SECONDS = 20.0  # from asking to telling; SLURM gives 30 between SIGTERM and SIGKILL
ECHO_SECONDS = 1.0  # within which another launcher hands on what a terminal sent already
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPED = 128 + signal.SIGTERM

_asked_here = [0]  # the inline engine: launcher and workers are one process
_boards: dict[str, Board | None] = {}  # by token; opened once
_mine: list[Board] = []  # in a worker process: the one it was started with


def asked() -> int:
    """The signal by which this run was asked to stop, 0 if it was not; in the main worker."""
    board = _board()
    return _asked_here[0] or (board.stop_word if board is not None else 0)


def reason() -> str:
    """Why the launcher ends this worker, in its words; "" if it has not said."""
    board = _board()
    return board.aborted if board is not None else ""


def _board() -> Board | None:
    if _mine:
        return _mine[0]
    token = os.environ.get("MANYHANDS_BOARD", "")
    if token and token not in _boards:
        _boards[token] = process.open_board(int(os.environ.get("MANYHANDS_SIZE", "1")))
    return _boards.get(token)


def answer_in_worker(board: Board) -> None:
    """In a worker process of a job that is asked first."""
    _mine[:] = [board]

    def answer(number: int, frame: FrameType | None) -> None:
        if board.aborted:
            raise SystemExit(STOPPED)
        board.ask_stop(number)

    for number in heard():
        if number != signal.SIGINT:  # ignored in workers: the launcher alone answers it
            signal.signal(number, answer)


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """What anybody's code does here has a deadline: ConfigError with the place where it was.

    It ends what waits or runs in Python, in the main thread, where signals are handed out.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        where = "".join(traceback.format_stack(frame)[-3:]).rstrip()
        raise ConfigError(f"{what} within {seconds:g} s. It was here:\n{where}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def asked_for(error: BaseException) -> bool:
    """Whether this end is one that we were asked for, by a signal.

    Anybody's code may raise the rest; its sys.exit(0), not caught, would look like success.
    """
    stopped = isinstance(error, SystemExit) and error.code == STOPPED
    return stopped or isinstance(error, (Stopped, KeyboardInterrupt))


@contextlib.contextmanager
def spared(seconds: float, what: str) -> Iterator[None]:
    """What goes wrong here, or takes longer (0: no deadline), is said and costs nothing else.

    For the end of things: the work is done and saved, or has failed for a reason that must not be
    hidden behind this one.
    """
    try:
        with within(seconds, f"{what} did not end") if seconds > 0 else contextlib.nullcontext():
            yield
    except BaseException as error:
        if asked_for(error):
            raise
        said = "".join(traceback.format_exception(error, limit=-2)).rstrip()
        print(f"manyhands: {what} failed when all else was done:\n{said}", file=sys.stderr)


class SoftStop:
    """`with SoftStop(board): ...` in the launcher; Stopped is raised inside when it must end.

    Without a board the word stays in this process. Outside the main thread, where Python hands out
    no signals, it does nothing. `through_ray`: SystemExit is raised instead, because Ray's own code
    lets nothing else through. `joined`: in a worker of mpiexec or torchrun, which pass a terminal's
    Ctrl-C on, so that it comes twice; only the main worker (`speaks`) answers in words.
    """

    def __init__(
        self,
        board: Board | None = None,
        *,
        through_ray: bool = False,
        joined: bool = False,
        speaks: bool = True,
    ) -> None:
        self.asked = 0
        self.over = False
        self._board, self._through_ray = board, through_ray
        self._echo, self._speaks = ECHO_SECONDS if joined else 0.0, speaks
        self._asked_at = 0.0
        self._handlers: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._open = False
        self._lock = threading.Lock()

    def __enter__(self) -> SoftStop:
        _asked_here[0] = 0
        self._open = True
        if threading.current_thread() is threading.main_thread():
            for number in heard():
                self._handlers[number] = signal.signal(number, self._answer)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # so that the deadline cannot strike once the handlers are gone
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        _asked_here[0] = 0

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Stopped for whatever it became on its way through the workers of this process."""
        try:
            yield
        except BaseException:
            if self.over:
                raise Stopped(self.asked) from None
            raise

    def _answer(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = self.asked, self.asked or number
        if first and time.monotonic() - self._asked_at < self._echo:
            return
        if first or not self._open:
            self.over = True
            raise SystemExit(128 + self.asked) if self._through_ray else Stopped(self.asked)
        if self._board is not None:
            self._board.ask_stop(number)
        else:
            _asked_here[0] = number
        self._asked_at = time.monotonic()
        again = "; press again to stop now" if number == signal.SIGINT else ""
        if self._speaks:
            _say(f"{signal.Signals(number).name}: finishing this update, then saving{again}")
        self._timer = threading.Timer(SECONDS, self._strike)
        self._timer.daemon = True
        self._timer.start()

    def _strike(self) -> None:
        with self._lock:
            if self._open:
                _say(f"the update did not end within {SECONDS:g} s: stops now")
                os.kill(os.getpid(), self.asked)


def graceful(
    on: bool, board: Board, *, through_ray: bool = False
) -> contextlib.AbstractContextManager[SoftStop | None]:
    """A SoftStop for jobs that are asked first; for others the launcher's own handlers stay."""
    return SoftStop(board, through_ray=through_ray) if on else contextlib.nullcontext()


def heard() -> list[signal.Signals]:
    """The signals to answer; not SIGHUP where somebody (nohup) has it ignored."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (deaf and number == signal.SIGHUP)]


def _say(text: str) -> None:
    # WHY not print: a signal may come while the stream is being written to.
    with contextlib.suppress(OSError):
        clear = "\x1b[J" if os.isatty(2) else ""  # what is left of the live view
        os.write(2, f"\n{clear}manyhands: {text}\n".encode())
