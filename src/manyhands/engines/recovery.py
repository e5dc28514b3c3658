"""What becomes of a run when a worker fails that only acts: it is replaced, done without, or all
end.

    fault    killed by a signal · left with an exit code · raised · silent (no heartbeat) · stuck
             (heartbeats, but no step for longer than any wait may take)
    action   restart, after a pause that doubles; a crash loop ends the run
             continue without it, as long as enough are left
             stop: WorkerError with the original traceback

Every fault that is noticed is one line of events.jsonl, whatever was done about it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.engines.base import Patience
from manyhands.engines.shared import Board

Policy = Literal["restart", "continue", "stop"]
LineFilter = Callable[[bytes], bytes]
RESTART_WINDOW = 60.0  # seconds in which so many restarts are no accident
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # before a restart
GRACE = 5.0  # waits have deadlines of their own, and their errors say more: they come first
DUMP_SECONDS = 1.0  # for a silent worker to write where it is
DUMP_SIGNAL = signal.SIGRTMIN + 7 if sys.platform.startswith("linux") else signal.SIGUSR2


@dataclass(frozen=True)
class Recovery:
    """The policy of a job, and the file in which faults are recorded."""

    policy: Policy = "stop"
    ranks: tuple[int, ...] = ()  # workers that may fail: nobody waits for one of them in particular
    minimum: int = 1  # of them that must be left
    least: int = 0  # workers of any kind that must be there, where others come and go; 0: all
    restarts: int = 5  # of one worker within RESTART_WINDOW
    silence: float = 0.0  # seconds without a heartbeat or a step; 0: never mind
    log: str = ""  # events.jsonl
    began: float = field(default_factory=time.time)

    def event(self, event: str, /, **facts: Any) -> None:
        """A line of its own in the file that the main worker writes to as well: one call of the
        kernel that appends, so that lines of both never mix."""
        now = time.time()
        clock = {"time": round(now, 3), "wall_seconds": round(now - self.began, 3)}
        line = json.dumps({"event": event, **clock, **facts}) + "\n"
        # No folder yet, or a disk that is full: what is said on standard error has to do.
        with contextlib.suppress(OSError):
            fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)


@dataclass
class Restart:
    """How to start a worker again, how often it was, and when it is due."""

    command: list[str]
    env: dict[str, str]
    times: int = 0
    deaths: list[tuple[float, float]] = field(default_factory=list)  # (when, when it was heard of)
    silent: float = 0.0  # seconds in which nothing was heard of any of its processes
    due: float | None = None  # when to start it; None: it runs, or is not started again
    filters: tuple[LineFilter | None, LineFilter | None] = (None, None)

    def allowed(self, limit: int, silent: float = 0.0) -> bool:
        """Note a death; whether it is one of few. If so, the next process is due after a pause.

        WHY silent: one that hangs at every start dies once a deadline, which is longer than the
        window: the seconds for which it was silent are not seconds in which all went well.
        """
        now = time.monotonic()
        self.silent += silent
        heard = now - self.silent
        recent = [death for death in self.deaths if heard - death[1] < RESTART_WINDOW]
        self.deaths = [*recent, (now, heard)]
        if len(self.deaths) > limit:
            return False
        self.due = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (len(self.deaths) - 1))
        return True

    @property
    def span(self) -> float:
        """Seconds from the first of the deaths that count to the last."""
        return self.deaths[-1][0] - self.deaths[0][0] if self.deaths else 0.0

    def start(self) -> subprocess.Popen[bytes]:
        self.times, self.due = self.times + 1, None
        # WHY no preexec_fn: threads run by now, and only a plain spawn is safe beside them. The
        # worker itself asks to die with us.
        env = self.env | {"MANYHANDS_RESTARTS": str(self.times)}
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command, env=env, stdout=pipe, stderr=pipe)


class Watch:
    """Whether a worker is heard of and gets on, and where it is when it does not."""

    def __init__(self, board: Board, rank: int, pid: int, silence: float) -> None:
        self._board, self._rank, self._pid, self._silence = board, rank, pid, silence
        self._beat = self._moved = -1
        self._silent, self._stuck = Patience(silence), Patience(silence + GRACE)
        self._stacks = -1

    def look(self) -> tuple[str, str] | None:
        """(kind of fault, in words) once its time is over. Looked at often, also while it is well:
        what its last words are written to must be open before it dies."""
        if self._stacks < 0:
            self._open()
        beat, moved = self._board.signs(self._rank)
        if beat != self._beat:
            self._beat, self._silent = beat, Patience(self._silence)
        if moved != self._moved:
            self._moved, self._stuck = moved, Patience(self._silence + GRACE)
        if self._silence <= 0 or not beat:  # 0: what it imports takes its time
            return None
        if self._silent.over:
            said = f"was silent for {self._silence:g} s (stopped, or stuck in native code)"
            return "silent", said
        if self._stuck.over:
            return "stuck", f"made no step for {self._silence + GRACE:g} s"
        return None

    def stacks(self, *, ask: bool = False) -> str:
        """The Python stacks that it has written: `ask` it now, or what a fatal signal left."""
        if self._stacks < 0:
            return ""
        before = self._size()
        if ask:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, DUMP_SIGNAL)
                os.kill(self._pid, signal.SIGCONT)  # a stopped process takes no other signal
            patience, seen = Patience(DUMP_SECONDS), before
            while not patience.over:
                time.sleep(0.02)
                size = self._size()
                if size > before and size == seen:
                    break
                seen = size
        data = os.pread(self._stacks, 1 << 16, before if ask else 0)
        return data.decode(errors="replace").strip()

    def close(self) -> None:
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1

    def _size(self) -> int:
        return os.fstat(self._stacks).st_size

    def _open(self) -> None:
        address = str(self._board.note(self._rank, "stacks") or "")
        if address.startswith(f"/proc/{self._pid}/"):  # not that of the process before it
            with contextlib.suppress(OSError):
                self._stacks = os.open(address, os.O_RDONLY | os.O_CLOEXEC)


def leave_stacks(board: Board, rank: int) -> None:
    """In a worker: its Python stacks go where the launcher finds them, when it asks for them and
    when a fatal signal ends this process. Neither needs the interpreter's lock."""
    if not sys.platform.startswith("linux"):
        return
    fd = os.memfd_create("manyhands-stacks")
    faulthandler.enable(fd)
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True)
    board.set_note(rank, "stacks", f"/proc/{os.getpid()}/fd/{fd}")
