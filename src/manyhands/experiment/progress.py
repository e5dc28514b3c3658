"""One line that says how far a run is: rewritten in a terminal, a new one at times elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

from manyhands.experiment.report_lines import number

_TERMINAL_SECONDS, _FILE_SECONDS = 0.2, 10.0


class Progress:
    """Progress of a run on standard output. A reader that goes away is no reason to stop.

    Args:
        steps: environment steps of the whole run.
        quiet: print nothing.
        stream: instead of standard output.
        interval: seconds between lines; by default 0.2 in a terminal and 10 elsewhere.
    """

    def __init__(
        self,
        steps: int,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        interval: float | None = None,
    ) -> None:
        self._steps = steps
        self._stream = sys.stdout if stream is None else stream
        self._silent = quiet or self._stream is None
        self._terminal = not self._silent and _is_terminal(self._stream)
        usual = _TERMINAL_SECONDS if self._terminal else _FILE_SECONDS
        self._interval = usual if interval is None else interval
        self._started = time.perf_counter()
        self._last = self._started
        self._line_open = False  # a rewritten line waits for its end

    def update(self, env_steps: int, mean_return: float | None = None, note: str = "") -> None:
        """Print a line if it is time for one; cheap when it is not."""
        now = time.perf_counter()
        if self._silent or now - self._last < self._interval:
            return
        self._last = now
        self._print(self._line(env_steps, mean_return, note, now - self._started))

    def say(self, text: str) -> None:
        """Lines that stay, such as the tables at the start and the end."""
        if not self._silent:
            self._write(self._fresh() + text + "\n")

    def close(self) -> None:
        """End the rewritten line."""
        if not self._silent:
            self._write(self._fresh())

    def _line(self, env_steps: int, mean: float | None, note: str, seconds: float) -> str:
        speed = env_steps / seconds if seconds > 0 else 0.0
        left = max(0, self._steps - env_steps) / speed if speed > 0 else 0.0
        parts = [
            f"{env_steps / max(1, self._steps):4.0%}",
            f"{number(env_steps)} steps",
            f"{number(speed)} steps/s",
            "return -" if mean is None else f"return {mean:.2f}",
            *([note] if note else []),
            f"{duration(left)} left",
        ]
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        if not self._terminal:
            self._write(line + "\n")
            return
        # A line longer than the terminal would wrap, and could not be rewritten.
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[K{line[:width]}")
        self._line_open = True

    def _fresh(self) -> str:
        """What brings the cursor to the start of a line of its own."""
        was_open, self._line_open = self._line_open, False
        return "\n" if was_open else ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the pipe is closed, or the stream is
            self._silent = True
            _forget(self._stream)


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 65 -> 1m05s; 5 -> 5s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
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
