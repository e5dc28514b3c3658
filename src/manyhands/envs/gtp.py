"""A Go engine in a process of its own, over GTP: the Go Text Protocol, version 2.

A command is a line; the answer begins with "=" (done) or "?" (refused) and ends with an empty line.
Every answer has a deadline, and an engine that dies, refuses or falls silent is named in the error
with the last it said. The process ends with `close`, and by itself when ours is killed: its
standard input is then at its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any

from manyhands.errors import ConfigError, SupportError, WorkerError

_COLUMNS = "ABCDEFGHJKLMNOPQRST"  # no I
_SIDE = 9
_LEAVES_SECONDS = 2.0

# Rules as those of Go9x9, and dead stones are taken off the board before it passes: ours counts
# what stands there.
GNUGO = (
    "gnugo --mode gtp --level 1 --chinese-rules --positional-superko --play-out-aftermath "
    "--capture-all-dead"
)
_GAMES = "/usr/games"  # where Debian has gnugo, and which the PATH of services lacks


def to_vertex(action: int) -> str:
    """The name of a point, such as E5; the action after the last point is a pass."""
    if action == _SIDE * _SIDE:
        return "pass"
    if not 0 <= action < _SIDE * _SIDE:
        return f"no point (0 to {_SIDE * _SIDE - 1})"
    row, column = divmod(action, _SIDE)
    return f"{_COLUMNS[column]}{_SIDE - row}"


def to_action(vertex: str) -> int:
    """The other way; ConfigError for what is no point of the board."""
    name = vertex.strip().upper()
    if name == "PASS":
        return _SIDE * _SIDE
    column, row = _COLUMNS.find(name[:1]), name[1:]
    if not name or not 0 <= column < _SIDE or not row.isdigit() or not 1 <= int(row) <= _SIDE:
        raise ConfigError(f"{vertex!r} is no point of a board of {_SIDE} lines, such as E5 or pass")
    return (_SIDE - int(row)) * _SIDE + column


class GtpEngine:
    """`begin` a game, tell it moves with `play`, ask for one with `move`."""

    def __init__(self, command: str, timeout: float = 60.0) -> None:
        self.command = GNUGO if command == "gnugo" else command
        self.timeout = timeout
        self._words = shlex.split(self.command)
        if not self._words or not timeout > 0:
            raise ConfigError(
                f"opponent={command!r}, timeout={timeout}: an opponent is 'random', 'gnugo' or the "
                "command line of an engine, and the timeout a positive number of seconds"
            )
        found = shutil.which(self._words[0]) or shutil.which(self._words[0], path=_GAMES)
        if found is None:
            how = (
                "type: apt-get install gnugo"
                if self._words[0] == "gnugo"
                else "install it, or give its full path: opponent='/path/to/engine --its-options'"
            )
            raise SupportError(f"the Go engine {self._words[0]!r} is not here; {how}")
        self._words[0] = found
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def __str__(self) -> str:
        return f"the Go engine {self.command!r}"

    def begin(self, side: int, komi: float, seed: int) -> None:
        """A new game; engines that have a random seed are given it."""
        if self._process is None:
            self._start()
        self.ask(f"boardsize {side}")
        self.ask("clear_board")
        self.ask(f"komi {komi:g}")
        if self._seeds:
            self.ask(f"set_random_seed {seed}")

    def play(self, color: str, action: int) -> None:
        self.ask(f"play {color} {to_vertex(action)}")

    def move(self, color: str) -> int | None:
        """Its own move, which it has then made; None: it resigns."""
        answer = self.ask(f"genmove {color}")
        if answer.lower() == "resign":
            return None
        try:
            return to_action(answer)
        except ConfigError as error:
            raise WorkerError(f"{self} answered genmove with {error}") from error

    def ask(self, line: str) -> str:
        """The answer to a command; WorkerError if it is refused or none comes in time."""
        process = self._process
        if process is None or process.stdin is None:
            raise WorkerError(f"{self} is not running; call begin() first")
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise self._gone(line) from error
        answer = self._read(process, line)
        if not answer.startswith("="):
            raise WorkerError(
                f"{self} refused {line!r}: {answer.lstrip('? ') or 'no reason given'}"
            )
        return answer.lstrip("=").strip()

    def close(self) -> None:
        """Ask it to leave, and end it if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(b"quit\n", timeout=_LEAVES_SECONDS)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            process.kill()
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started itself
            for stream in (process.stdin, process.stdout):
                if stream is not None and not stream.closed:
                    stream.close()
            self._errors.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def _start(self) -> None:
        self._errors: Any = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            self._words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            process_group=0,  # also: a terminal's Ctrl-C is for us
        )
        self._unread = b""
        self._seeds = self.ask("known_command set_random_seed") == "true"

    def _read(self, process: subprocess.Popen[bytes], line: str) -> str:
        """Up to the empty line that ends the answer."""
        assert process.stdout is not None
        deadline = time.monotonic() + self.timeout
        number = process.stdout.fileno()
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while b"\n\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise WorkerError(
                    f"{self} did not answer {line!r} within {self.timeout:g} s; for more time set "
                    "--env-kwargs timeout=SECONDS"
                )
            piece = os.read(number, 65536)
            if not piece:
                raise self._gone(line)
            self._unread = (self._unread + piece).replace(b"\r", b"").lstrip(b"\n")
        answer, _, self._unread = self._unread.partition(b"\n\n")
        return answer.decode(errors="replace").strip()

    def _gone(self, line: str) -> WorkerError:
        process = self._process
        assert process is not None
        try:
            code: Any = process.wait(timeout=_LEAVES_SECONDS)
        except subprocess.TimeoutExpired:
            code = "unknown, it still runs"
        self._errors.seek(0)
        said = self._errors.read()[-500:].decode(errors="replace").strip()
        return WorkerError(
            f"{self} has ended (exit code {code}) on the command {line!r}"
            + (f"; it said: {said}" if said else "")
        )
