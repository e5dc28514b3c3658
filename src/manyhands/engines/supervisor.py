"""The supervisor: starts processes, sees them fail, says why, and leaves nothing behind.

One shutdown path for every engine and every reason: stop word on the board, SIGTERM, a short
grace, SIGKILL to the whole tree of descendants, all under one deadline.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil

from manyhands import roles, terminal
from manyhands.engines.process import alive
from manyhands.engines.shared import DEAD, DONE, EMPTY, FAILED, RUNNING, Board
from manyhands.errors import Stopped, WorkerError

LineFilter = Callable[[bytes], bytes]
POLL_SECONDS = 0.02
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
LINGER_SECONDS = 1.0  # how long a worker that has failed may take to leave
CAUSE_SECONDS = 0.4  # how long the first failure waits for a deeper cause to show
RESTARTS, RESTART_WINDOW = 5, 60.0  # so often in so many seconds; more is no accident
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # before a restart


@dataclass
class Restart:
    """How to start a worker again that was killed, and how often it was.

    Only where the others do not wait for it: an actor of an asynchronous run. One that raised an
    error is not started again: it would raise it again, and the user is to see it.
    """

    command: list[str]
    env: dict[str, str]
    times: int = 0
    deaths: list[float] = field(default_factory=list)
    filters: tuple[LineFilter | None, LineFilter | None] = (None, None)

    def allowed(self) -> bool:
        """Note a death; whether it is one of few."""
        now = time.monotonic()
        self.deaths = [*(t for t in self.deaths if now - t < RESTART_WINDOW), now]
        return len(self.deaths) <= RESTARTS

    def start(self) -> subprocess.Popen[bytes]:
        """The next process. The more deaths there were, the longer the pause before it."""
        self.times += 1
        time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (len(self.deaths) - 1)))
        # WHY no preexec_fn: threads run by now, and only a plain spawn is safe beside them. The
        # worker itself asks to die with us.
        env = self.env | {"MANYHANDS_RESTARTS": str(self.times)}
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command, env=env, stdout=pipe, stderr=pipe)


@dataclass
class Child:
    """A process we started, and the workers it hosts (mpiexec hosts all)."""

    process: subprocess.Popen[bytes]
    ranks: list[int]
    explain: Callable[[int], tuple[int, str]] | None = None  # exit code -> (rank, what it means)
    gone: bool = False
    restart: Restart | None = None  # for workers that are started again when they are killed
    pumps: list[threading.Thread] = field(default_factory=list)

    def drain(self) -> None:
        """Let the last lines be shown; a grandchild that holds the pipe open is not waited for."""
        for pump in self.pumps:
            pump.join(0.5)


class Supervisor:
    def __init__(self, board: Board, host: str) -> None:
        self.board, self.host = board, host
        self.children: list[Child] = []
        self.keep: Any = None  # shared memory that must live as long as the workers
        self._handlers: dict[int, Any] = {}
        adopt_orphans()

    def start(
        self,
        command: list[str],
        env: dict[str, str],
        ranks: list[int],
        *,
        pass_fds: tuple[int, ...] = (),
        piped: bool = False,
        own_group: bool = False,
        restart: bool = False,
        explain: Callable[[int], tuple[int, str]] | None = None,
    ) -> Child:
        """Start a process that hosts these workers; `piped` output comes through `pass_on`.

        In a group of its own (`own_group`) it does not hear a terminal's Ctrl-C. With `restart` it
        is started again when a signal has killed it.
        """
        pipe = subprocess.PIPE if piped else None
        child = subprocess.Popen(
            command,
            env=env,
            pass_fds=pass_fds,
            stdout=pipe,
            stderr=pipe,
            process_group=0 if own_group else None,
            preexec_fn=_die_with_us,
        )
        again = Restart(command, env) if restart else None
        self.children.append(Child(child, ranks, explain, restart=again))
        return self.children[-1]

    def pass_on(self, child: Child, out: LineFilter | None, err: LineFilter | None) -> None:
        """Show the lines of a piped child as `out` and `err` (bytes -> bytes) want them; None
        shows all as it comes, a line that is being rewritten too.

        WHY only after all have been started: a fork while threads run is asking for trouble.
        """
        if child.restart is not None:
            child.restart.filters = (out, err)
        for source, sink, rewrite in (
            (child.process.stdout, sys.stdout, out),
            (child.process.stderr, sys.stderr, err),
        ):
            pump = threading.Thread(target=_pump, args=(source, sink, rewrite), daemon=True)
            pump.start()
            child.pumps.append(pump)

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: a closed terminal is no reason to stop
            with contextlib.suppress(ValueError):  # not the main thread: the caller has its own way
                self._handlers[number] = signal.signal(number, _raise_stopped)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            # A second Ctrl-C means: now.
            self.stop("the launch has ended" if exc[1] is None else str(exc[1]))
        except Stopped:
            self.kill_all()
        finally:
            if exc[1] is not None:
                terminal.clear_below(sys.stdout)  # a main worker that was killed could not
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Until every child has ended well. WorkerError as soon as one has not."""
        while True:
            running = 0
            for child in self.children:
                code = child.process.poll()
                if code is None or (not child.gone and self._restarted(child, code)):
                    running += 1
                elif not child.gone:
                    child.gone = True
                    self._note_end(child, code)
                    child.drain()
            if any(c.gone and c.process.returncode for c in self.children) or self._lingers():
                raise self._failure()
            if not running:
                return
            time.sleep(POLL_SECONDS)

    def _restarted(self, child: Child, code: int) -> bool:
        """Whether a worker that a signal has killed has a new process."""
        restart, rank = child.restart, child.ranks[0]
        if restart is None or code >= 0 or self.board.aborted or self.board.stop_word:
            return False
        if not restart.allowed():
            return False
        who = f"{roles.from_environment(self.board.workers, restart.env).name(rank)}"
        said = f"{who} {what_ended(code)}; it is started again (restart {restart.times + 1})"
        print(f"manyhands: {said}", file=sys.stderr, flush=True)
        self.board.set_state(rank, EMPTY)
        child.process = restart.start()
        self.pass_on(child, *restart.filters)
        return True

    def _lingers(self) -> bool:
        """Whether a worker has reported its failure but does not end (a thread of the user's)."""
        long_ago = time.monotonic_ns() - int(LINGER_SECONDS * 1e9)
        return any(
            self.board.state(r) == FAILED and self.board.since(r) < long_ago
            for r in range(self.board.workers)
        )

    def _note_end(self, child: Child, code: int) -> None:
        """Put on the board what the dead can no longer say."""
        for rank in child.ranks:
            state = self.board.state(rank)
            if code == 0 and state in (EMPTY, RUNNING):
                self.board.set_state(rank, DONE)
        if code == 0:
            return
        if any(self.board.state(r) == FAILED for r in child.ranks):
            return  # one of them has said why; the others were ended for it
        rank, text = (child.ranks[0], what_ended(code))
        if child.explain is not None:
            rank, text = child.explain(code)
        if self.board.state(rank) not in (EMPTY, RUNNING):
            text += ", after its work was done"
        self.board.set_state(rank, DEAD, text, code=128 - code if code < 0 else code)

    def _failure(self) -> WorkerError:
        """The original failure: not that of a worker who only suffered from it."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while True:
            for child in self.children:
                if not child.gone and (code := child.process.poll()) is not None:
                    child.gone = True
                    self._note_end(child, code)
            ranks = range(self.board.workers)
            failed = [r for r in ranks if self.board.state(r) in (FAILED, DEAD)]
            causes = [r for r in failed if not self.board.secondary(r)]
            if causes or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        rank = min(causes or failed, key=self.board.since, default=0)
        report = self.board.text(rank, "report").rstrip()
        host = self.board.text(rank, "host") or self.host
        pid = f" (pid {self.board.pid(rank)})" if self.board.pid(rank) else ""
        code = self.board.code(rank) or 1
        role = self.board.text(rank, "role")
        named = "" if role in ("", "worker") else f"{role}, "
        who = f"{named}worker {rank} of {self.board.workers} on {host}{pid}"
        return WorkerError(who, report, rank=rank, exit_code=code)

    def stop(self, reason: str) -> None:
        """End everything that is still there, gently first."""
        if all(c.process.poll() is not None for c in self.children) and not descendants():
            return
        self.board.abort(reason)
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if all(c.process.poll() is not None for c in self.children):
                break
            time.sleep(POLL_SECONDS)
        self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL to all descendants, again until none is left (they may be starting more)."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            left = descendants()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for child in self.children:
                child.process.poll()
            _reap_orphans({c.process.pid for c in self.children})
            time.sleep(POLL_SECONDS)


class FirstToGo:
    """Notices which worker ended first, where the processes are not our own children.

    WHY: mpiexec kills the rest within a millisecond and names any of them.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: dict[int, int] = {}  # file descriptor of a process -> rank
        self._first: int | None = None
        self._left = board.workers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        # WHY epoll: it hands out events in the order in which they happened, so that who was first
        # can still be told when all have ended by the time a busy machine lets us look. poll()
        # gives the order of registration.
        self._ended = select.epoll() if hasattr(os, "pidfd_open") else None

    def start(self) -> None:
        if self._ended is not None:
            self._thread.start()

    def rank(self) -> int | None:
        """Who ended first without saying that he would; None if that was not seen."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self.look(0.0)
        for fd in self._known:
            with contextlib.suppress(OSError):  # asked twice
                os.close(fd)
        return self._first

    def _watch(self) -> None:
        while self._left and not self._over.is_set():
            self.look(0.01)

    def look(self, seconds: float) -> None:
        """Watch the workers that have arrived, for so long."""
        if self._ended is None:
            return
        missed = []
        for rank in sorted({*range(self._board.workers)} - {*self._known.values()}):
            if pid := self._board.pid(rank):
                try:
                    fd = os.pidfd_open(pid)
                except OSError:  # it ended, and was waited for, before we could look
                    missed.append(rank)
                    continue
                self._known[fd] = rank
                self._ended.register(fd, select.EPOLLIN)
        for fd, _ in self._ended.poll(seconds):
            self._ended.unregister(fd)
            self._left -= 1
            self._note(self._known[fd])
        if len(missed) == 1:  # of several, nobody knows who was first
            self._note(missed[0])

    def _note(self, rank: int) -> None:
        if self._first is None and self._board.state(rank) in (EMPTY, RUNNING):
            self._first = rank


def label(who: str) -> LineFilter:
    """Put the worker's name before each line."""
    mark = f"[{who}] ".encode()
    return lambda line: mark + line


def _pump(source: Any, sink: Any, rewrite: LineFilter | None) -> None:
    raw = getattr(sink, "buffer", None)
    text = codecs.getincrementaldecoder("utf-8")("replace")
    # The main worker's live view lies below the cursor: cleared here, it is drawn again there.
    clear = b"\x1b[J" if rewrite is not None and terminal.can_draw(sink) else b""
    pieces = source if rewrite is not None else iter(functools.partial(source.read1, 65536), b"")
    for piece in pieces:
        shown = piece if rewrite is None else rewrite(piece)
        shown = clear + shown if shown else b""
        if sink is None:  # closed before we were started
            continue
        with contextlib.suppress(OSError, ValueError):  # our own output has been closed: read on,
            if raw is not None:  # or the worker would block on a full pipe
                raw.write(shown)
            else:
                sink.write(text.decode(shown))
            sink.flush()


def descendants() -> list[int]:
    """Every process below this one that is not a zombie."""
    return [child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)]


def adopt_orphans() -> None:
    """Processes that our workers start and leave behind become our children, so we can end them."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _reap_orphans(ours: set[int]) -> None:
    """Collect adopted processes that have ended; those that Popen started are left to Popen."""
    for child in psutil.Process().children():
        if child.pid not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _die_with_us() -> None:
    if sys.platform.startswith("linux"):
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_LIBC: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def what_ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (kill -9, or out of memory)" if -code == signal.SIGKILL else ""
            return f"was killed by signal {name}{hint}"
        return f"was killed by signal {-code}"
    return f"left with exit code {code}"


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
