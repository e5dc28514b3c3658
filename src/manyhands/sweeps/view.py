"""What a person sees of a sweep while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from manyhands.experiment.progress import duration, number
from manyhands.sweeps.jobs import DONE, Job, many
from manyhands.terminal import Outlet, can_draw


class View:
    """A table that is redrawn in a terminal; elsewhere a line for each run that begins or ends."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._began = quiet, time.monotonic()
        self._live: Any = None
        if not quiet and can_draw(sys.stdout):
            from manyhands.experiment.live import Live

            self._live = Live(Outlet(sys.stdout), lambda jobs, width: self._lines(jobs, width))

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.say(text)
        elif not self._quiet:
            print(text, flush=True)

    def show(self, jobs: list[Job]) -> None:
        if self._live is not None:
            self._live.show(jobs)

    def close(self) -> None:
        if self._live is not None:
            self._live.close(None)

    def started(self, job: Job, resumed: bool) -> None:
        if self._live is None:
            self.say(f"{'resumed' if resumed else 'started':<9} {job.title}")

    def ended(self, job: Job) -> None:
        if job.state == "failed":
            text = f"{'failed':<9} {job.title}: {job.error}"
            print(text, file=sys.stderr) if self._quiet else self.say(text)
        elif self._live is None:
            self.say(f"{job.state:<9} {job.title}: {_so_far(job)}")

    def _lines(self, jobs: list[Job], width: int) -> list[Any]:
        """All runs, where the screen has room for them; else those that go on or have failed."""
        from rich.text import Text

        from manyhands.experiment.live import bar

        seconds = time.monotonic() - self._began
        lines = [Text(f"{counted(jobs)}   {duration(seconds)} so far")]
        room = shutil.get_terminal_size().lines - 4
        shown = [job for job in jobs if len(jobs) <= room or job.state in ("running", "failed")]
        wide = min(max((len(job.title) for job in shown), default=0), max(10, width - 50))
        styles = {"failed": "red", "waiting": "bright_black", "stopped": "yellow"}
        for job in shown[: max(1, room)]:
            line = Text(f"{job.title[:wide]:<{wide}}  ", style=styles.get(job.state, ""))
            line.append(bar(1.0 if job.state in DONE else job.share, 12))
            lines.append(line.append(f"  {job.state:<8}  {_so_far(job)}"[: width - wide - 14]))
        return lines


def _so_far(job: Job) -> str:
    if job.state == "waiting":
        return ""
    if job.state == "failed":
        return job.error
    mean = "-" if job.mean_return is None else f"{job.mean_return:.2f}"
    return f"return {mean} after {number(job.env_steps)} steps"


def counted(jobs: list[Job]) -> str:
    """8 runs: 3 finished, 2 running, 3 waiting"""
    states = [("finished" if job.state in DONE else job.state) for job in jobs]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{many(len(jobs))}: {', '.join(parts)}"
