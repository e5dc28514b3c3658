"""What a terminal, a notebook or a pipe can show, and how to write to one that may go away."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO


class Outlet:
    """A stream that may go away: from then on what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.gone = False

    def write(self, text: str) -> None:
        if self.gone or not text:
            return
        try:
            try:
                self.stream.write(text)
            except UnicodeEncodeError as error:  # better a question mark than no view at all
                self.stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
            self.stream.flush()
        except (OSError, ValueError):  # the pipe is closed, or the stream is
            self.gone = True
            _forget(self.stream)


class Relay:
    """Stands for sys.stdout or sys.stderr during a run: hands on what is printed, line by line.

    WHY: a `print` of the user's own must not end the run either when its reader has gone; and
    print() writes a line and its end separately, so another process could get in between.
    """

    def __init__(
        self,
        outlet: Outlet,
        ready: Callable[[str], None] = lambda text: None,
        lock: threading.RLock | None = None,
    ) -> None:
        self._outlet, self._ready = outlet, ready
        self._lock = threading.RLock() if lock is None else lock
        self._held = ""

    def write(self, text: str) -> int:
        with self._lock:
            self._held += text
            if text.endswith("\n"):
                self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lock:
            held, self._held = self._held, ""
            if held:
                self._ready(held)
                self._outlet.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outlet.stream, name)


class Labelled(Relay):
    """The same for a worker whose lines appear among those of others: each says whose it is."""

    def __init__(self, stream: TextIO, who: str) -> None:
        super().__init__(Outlet(stream))
        self._mark, self._inside = f"[{who}] ", False  # whether a line has begun and not ended

    def flush(self) -> None:
        with self._lock:
            held, self._held = self._held, ""
            if held:
                text = "".join(self._mark + line for line in held.splitlines(keepends=True))
                self._outlet.write(text[len(self._mark) :] if self._inside else text)
                self._inside = not held.endswith("\n")


def whole_lines() -> None:
    """Write line by line: workers share a terminal. Under PYTHONUNBUFFERED, too, where `print`
    writes text and newline apart, and another worker's line may come between them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def label_lines(who: str) -> None:
    """From now on, and for good, what this process prints begins with its name."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Relay):
            labelled = Labelled(stream, who)
            setattr(sys, name, labelled)
            atexit.register(labelled.flush)


class Standing:
    """Puts relays in the place of standard streams, and takes them away again."""

    def __init__(self) -> None:
        self._instead: list[tuple[str, TextIO, Relay]] = []

    def put(self, name: str, relay: Relay) -> None:
        self._instead.append((name, getattr(sys, name), relay))
        setattr(sys, name, relay)

    def remove(self) -> None:
        for name, stream, relay in self._instead:
            relay.flush()
            if getattr(sys, name) is relay:  # else somebody has put his own there since
                setattr(sys, name, stream)
        self._instead = []


def can_draw(stream: TextIO | None) -> bool:
    """Whether this is a terminal that moves its cursor as it is asked, and nobody minds."""
    able = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return able and not os.environ.get("NO_COLOR") and is_terminal(stream)


def clear_below(stream: TextIO | None) -> None:
    """Remove what the view of a killed process has left below the cursor."""
    if stream is not None and can_draw(stream):
        Outlet(stream).write("\x1b[J")


def in_notebook(stream: object) -> bool:
    """Whether what is written here appears under a notebook's cell.

    The launcher tells its main worker by MANYHANDS_NOTEBOOK: that is a process of its own.
    """
    kernel = type(stream).__module__.partition(".")[0] == "ipykernel"
    return kernel or os.environ.get("MANYHANDS_NOTEBOOK") == "1"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may sit there; a stream that is closed has nobody."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def _forget(stream: TextIO) -> None:
    """Send what is still buffered to nowhere: Python flushes at exit, and would complain then."""
    try:
        target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, stream.fileno())
        os.close(target)
    except (OSError, ValueError):
        return  # no file behind the stream: nothing to send anywhere
