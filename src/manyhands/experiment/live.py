"""The live view of a run: a few lines in a terminal, redrawn in place, with rich.

The cursor rests on an empty line at the top of the view, not below it, and stays visible. So
whatever another process prints (a worker, the launcher, a C library) lands on that line and moves
the cursor down; the next drawing starts wherever the cursor is, and overwrites what is below.
Nothing that was printed is lost, no old view is left behind, and a run that is killed leaves a
terminal that works. No thread: the view is drawn by the update that finds it is time to.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from manyhands.experiment.bottleneck import Phases
from manyhands.experiment.progress import State, duration, lag_of, number
from manyhands.terminal import Outlet, Relay, Standing, can_draw

_ERASE_DOWN, _ERASE_RIGHT = "\x1b[J", "\x1b[K"
_LABEL = 9  # columns of the names on the left
_GAP = "   "


class Live:
    """Draws into a terminal. What this process prints meanwhile appears above the view.

    `lines` makes a view of so many columns from what there is to show.
    """

    def __init__(
        self, outlet: Outlet, lines: Callable[[Any, int], list[Text]] | None = None
    ) -> None:
        self._outlet, self._lines = outlet, lines or view_lines
        self._page = io.StringIO()  # rich writes here, and we to the terminal, all at once
        self._console = Console(file=self._page, force_terminal=True, highlight=False)
        self._lock = threading.RLock()  # threads of the user's may print while we draw
        self._last: Any = None
        self._up = False  # whether the view is on the screen, below the cursor
        self._open_line = False  # whether somebody has printed half a line
        self._standing = Standing()

    def show(self, state: Any) -> None:
        with self._lock:
            if self._last is None:
                self._relay()
            self._last = state
            self._draw(state)

    def say(self, text: str) -> None:
        with self._lock:
            self._make_room()
            self._outlet.write(self._fresh() + text + "\n")
            if self._last is not None:
                self._draw(self._last)

    def close(self, state: State | None) -> None:
        """Replace the view by one line that stays."""
        with self._lock:
            self._standing.remove()
            self._make_room()
            if state is not None:
                width = self._size()[0]
                self._outlet.write(self._fresh() + self._rendered([last_line(state, width)])[0])
                self._outlet.write("\n")
            self._last = None

    def _make_room(self) -> None:
        """Take the view off the screen until it is drawn again."""
        if self._up:
            self._up = False
            self._outlet.write("\r" + _ERASE_DOWN)

    def _make_way(self, text: str) -> None:
        """Somebody prints this."""
        self._make_room()
        self._open_line = not text.endswith("\n")

    def _draw(self, state: Any) -> None:
        width, height = self._size()
        # Never more than the screen has: the cursor could not come back to the top.
        lines = ["", *self._rendered(self._lines(state, width))][: max(1, height - 1)]
        text = (_ERASE_RIGHT + "\r\n").join(lines) + _ERASE_DOWN
        back = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        # One write: a terminal shows it all at once, so nothing flickers.
        self._outlet.write(f"{self._fresh()}\r{text}{back}\r")
        self._up = True

    def _fresh(self) -> str:
        was_open, self._open_line = self._open_line, False
        return "\n" if was_open else ""

    def _size(self) -> tuple[int, int]:
        columns, rows = shutil.get_terminal_size()
        return max(20, columns - 1), rows  # a full line would wrap

    def _rendered(self, lines: list[Text]) -> list[str]:
        """Lines with their colours as this terminal knows them."""
        self._page.seek(0)
        self._page.truncate()
        page = Text("\n").join(lines)
        self._console.print(page, end="", no_wrap=True, overflow="ignore", crop=False)
        return self._page.getvalue().split("\n")

    def _relay(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is self._outlet.stream:
                self._standing.put(name, Relay(self._outlet, self._make_way, self._lock))
            elif name == "stderr" and can_draw(stream):
                self._standing.put(name, Relay(Outlet(stream), self._make_way, self._lock))


def view_lines(state: State, width: int) -> list[Text]:
    """The view: how far, how fast, how good, what it learns, where time goes, who works."""
    facts = state.facts
    ahead = "? left" if state.left is None else f"{duration(state.left)} left"
    rows = [("", [f"{state.share:4.0%}", ahead]), ("steps", _steps(state))]
    rows.append(("return", _returns(state)))
    names = sorted(facts.info, key=lambda name: not name.endswith("_loss"))
    shown = [n for n in names if not n.startswith("lag")]  # that one is with the workers
    rows.append(("update", [f"{_words(n)} {facts.info[n]:.3g}" for n in shown]))
    rows.append(("time", _time(state)))
    rows.append(("workers", _workers(state)))
    tail = "  ".join(rows[0][1])
    lines = [bar(state.share, width - len(tail) - 1).append(f" {tail}")]
    for label, parts in rows[1:]:
        if parts:
            line = Text(label.ljust(_LABEL), style="dim")
            lines.append(line.append(fitting(parts, width - _LABEL), style="not dim"))
    return lines


def last_line(state: State, width: int) -> Text:
    """What is left of the view when the run is over."""
    mean = state.facts.mean_return
    parts = [
        f"{state.share:4.0%}",
        f"{number(state.facts.env_steps)} steps",
        *([] if mean is None else [f"return {mean:.2f}"]),
        duration(state.seconds),
    ]
    tail = fitting(parts, width - 10, gap="  ")
    return bar(state.share, min(40, width - len(tail) - 1)).append(f" {tail}")


def fitting(parts: list[str], width: int, gap: str = _GAP) -> str:
    """As many of the parts as a line has room for; each is whole or left out."""
    line = parts[0][:width]
    for part in parts[1:]:
        if len(line) + len(gap) + len(part) <= width:
            line += gap + part
    return line


def bar(share: float, width: int) -> Text:
    """Heavy for what is done, thin for the rest: it reads without colours too."""
    width = max(4, width)
    full = int(share * width)
    done = Text("━" * full, style="green" if share >= 1 else "cyan")
    return done.append("─" * (width - full), style="bright_black")


def _steps(state: State) -> list[str]:
    return [
        f"{number(state.facts.env_steps)} of {number(state.steps)}",
        f"{number(state.speed)} steps/s",
        f"{duration(state.seconds)} so far",
    ]


def _returns(state: State) -> list[str]:
    mean = state.facts.mean_return
    parts = ["no episode has finished"] if mean is None else [f"{mean:.2f}"]
    if state.target is not None:
        parts.append(f"target {state.target:g}")
    if state.best is not None:
        parts.append(f"best {state.best:.2f}")
    return parts


def _time(state: State) -> list[str]:
    phases = state.facts.phases
    totals = phases.totals() if isinstance(phases, Phases) else phases
    whole = sum(totals.values())
    longest = sorted(totals.items(), key=lambda row: -row[1])
    return [f"{_words(name)} {seconds / whole:.0%}" for name, seconds in longest if whole > 0]


def _workers(state: State) -> list[str]:
    facts = state.facts
    lag = lag_of(facts)
    alive = state.workers if facts.alive is None else facts.alive
    parts = []
    if state.workers > 1 or alive != state.workers or facts.restarts:
        parts.append(f"{alive} of {state.workers} at work")
    if facts.restarts:
        parts.append(f"{facts.restarts} restarted")
    if lag is not None:
        parts.append(f"lag {lag:.3g}")
    return [*parts, facts.note] if facts.note else parts


def _words(name: str) -> str:
    return name.replace("_", " ")
