"""The runs of a sweep: a process each, as many at once as there is room for.

The processes are this machine's, or those of a Ray cluster (cluster.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from manyhands.config import Experiment, save_toml
from manyhands.engines import stopping
from manyhands.engines.process import what_ended
from manyhands.engines.supervisor import die_with_us
from manyhands.run import finished
from manyhands.sweeps.plan import Trial
from manyhands.viewing import scores

if TYPE_CHECKING:
    from manyhands.sweeps.cluster import Cluster
    from manyhands.sweeps.search import Search
    from manyhands.sweeps.view import View

OUTPUT, _PLANNED = "output.txt", "planned.toml"  # in the folder of each run
_LOOK_SECONDS = 1.0  # between two looks at the runs that go on
_STOP_SECONDS = stopping.SECONDS + 10.0  # from asking a run to stop to killing it
_STOP_NOW_SECONDS = 5.0  # the same when it was asked twice
DONE = ("finished", "solved")


class Process(Protocol):
    """A run's process, wherever it is."""

    fd: int  # readable once it has ended; -1 where nothing is
    why: str  # it has ended, where its exit code does not say so

    def poll(self) -> int | None: ...

    def send(self, number: int) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""

    def close(self) -> None: ...


class LocalProcess:
    """A process of this machine, which ends with this one."""

    def __init__(self, words: list[str], output: Path) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "manyhands", *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C reaches us, and we ask the runs
                preexec_fn=die_with_us,
            )
        self.fd = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else -1
        self.why = ""

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:  # its workers are of its group
                    os.killpg(self._process.pid, number)
                else:
                    self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@dataclass
class Job:
    """A trial and the process that trains it."""

    trial: Trial
    folder: Path
    state: str = "waiting"  # running, finished, solved, stopped, pruned, failed
    process: Process | None = None
    began: float = 0.0
    error: str = ""
    env_steps: int = 0
    mean_return: float | None = None
    pruned: bool = False  # given up, as its setting did worse than others

    @property
    def title(self) -> str:
        setting, seed = self.trial.setting, self.trial.seed
        return f"{scores.label(setting)}, seed {seed}" if setting else f"seed {seed}"

    @property
    def cores(self) -> int:
        return cores_of(self.trial.experiment)

    @property
    def share(self) -> float:
        return min(1.0, self.env_steps / self.trial.experiment.run.steps)

    def look(self) -> None:
        """How far the run has come, by its last record."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
                record = json.loads(file.read().splitlines()[-1])
            self.env_steps, self.mean_return = record["env_steps"], record["mean_return"]

    def is_done(self) -> bool:
        """Whether the folder holds a run that needs nothing more; then its numbers are known."""
        summary = finished(str(self.folder), self.trial.experiment)
        if summary is None:
            with contextlib.suppress(OSError, ValueError, LookupError):
                found = json.loads((self.folder / "summary.json").read_bytes())
                summary = found if found["exit"].startswith("stopped by hooks") else None
        if summary is None:
            return False
        self.state = "solved" if summary["solved"] else "finished"
        self.env_steps, self.mean_return = summary["env_steps"], summary["mean_return"]
        return True

    def start(self, cluster: Cluster | None) -> bool:
        """Begin, or go on from the last checkpoint (True)."""
        resumes = any((self.folder / "checkpoints").glob("[0-9]*"))
        if resumes:
            words = ["resume", str(self.folder)]
        else:
            # What an earlier process has left here was killed before its first checkpoint.
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            save_toml(self.folder / _PLANNED, self.trial.experiment)
            words = ["train", "--config", str(self.folder / _PLANNED)]
            words += ["--run-dir", str(self.folder)]
        output = self.folder / OUTPUT
        if cluster is None:
            self.process = LocalProcess(words, output)
        else:
            self.process = cluster.begin(words, output, self.trial.experiment)
        self.state, self.began = "running", time.monotonic()
        return resumes

    def reap(self, asked: bool) -> bool:
        """Whether the process has ended; then how is known."""
        if self.process is None or (code := self.process.poll()) is None:
            return False
        why = self.process.why
        self.close()
        if (self.folder / "config.toml").exists():
            (self.folder / _PLANNED).unlink(missing_ok=True)
        if code == 0 and self.is_done():
            return True
        self.look()
        self.state = "pruned" if self.pruned else "stopped" if asked else "failed"
        if self.state == "failed":
            self.error = why or self._last_words() or f"the process {what_ended(code)}"
        return True

    def _last_words(self) -> str:
        """What its summary says, or else the last line that it printed."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            ended = str(json.loads((self.folder / "summary.json").read_bytes())["exit"])
            if ended.startswith("failed: "):
                return ended.removeprefix("failed: ")
        lines = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        found = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return found.removeprefix("manyhands: ")[:500]

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send(number)

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = None


def cores_of(experiment: Experiment) -> int:
    """That a run keeps busy."""
    return 1 if experiment.run.engine == "inline" else experiment.run.workers


class Signals:
    """`with Signals() as signals: ...`: what was asked of this process, and how often.

    Outside the main thread, where Python hands out no signals, nothing is.
    """

    def __init__(self) -> None:
        self.first = self.times = 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for each in stopping.heard():
                self._handlers[each] = signal.signal(each, self._answer)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        os.close(self._read)
        os.close(self._write)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        self.first, self.times = self.first or number, self.times + 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"!")

    def wait(self, pidfds: Sequence[int], seconds: float) -> None:
        """Until a signal has come or a process has ended, but no longer than that."""
        poll = select.poll()
        for fd in (self._read, *pidfds):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(seconds * 1000):
            if fd == self._read:
                os.read(self._read, 4096)


class Pool:
    """Trains the jobs, as many at once as there is room for."""

    def __init__(
        self,
        jobs: list[Job],
        at_once: int,
        view: View,
        search: Search | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.jobs, self._view, self._search = jobs, view, search
        self._at_once, self._cluster = at_once, cluster

    def run(self) -> int:
        """Until all have ended; the signal by which it was asked to stop, or 0."""
        with Signals() as signals:
            asked = 0
            deadline = float("inf")
            try:
                while True:
                    if signals.times > asked:
                        asked = signals.times
                        deadline = min(deadline, self._ask(signals))
                    if not asked:
                        self._start_what_fits()
                    running = [job for job in self.jobs if job.state == "running"]
                    if not running:
                        return signals.first
                    signals.wait(*self._patience(running, deadline))
                    if time.monotonic() > deadline:
                        for job in running:
                            job.send(signal.SIGKILL)
                    self._look(running, asked=asked > 0)
            finally:
                self._end_all()

    def _patience(self, running: list[Job], deadline: float) -> tuple[list[int], float]:
        """What to wait for, and how long: no longer than until the next look, or the deadline."""
        fds = [job.process.fd for job in running if job.process and job.process.fd >= 0]
        longest = _LOOK_SECONDS if len(fds) == len(running) else 0.2  # elsewhere, or without pidfds
        return fds, max(0.0, min(longest, deadline - time.monotonic()))

    def _start_what_fits(self) -> None:
        cores = self._cluster.cpus() if self._cluster else os.cpu_count() or 1
        for job in self._waiting(cores):
            if not self._has_room(job.cores, cores):
                return
            self._view.started(job, resumed=job.start(self._cluster))

    def _has_room(self, wanted: int, cores: float) -> bool:
        running = [job.cores for job in self.jobs if job.state == "running"]
        if self._at_once and len(running) >= self._at_once:
            return False
        # More than the cores where that was asked for; Ray itself gives no more than it has.
        if self._at_once and self._cluster is None:
            return True
        return sum(running) + wanted <= cores or not running

    def _waiting(self, cores: float) -> Iterator[Job]:
        """In their order; then those of settings that are drawn once there is room for one."""
        yield from [job for job in self.jobs if job.state == "waiting"]
        while self._search is not None and self._has_room(1, cores):
            if not (more := self._search.more()):
                return
            self.jobs += more
            yield from more

    def _look(self, running: list[Job], *, asked: bool) -> None:
        for job in running:
            if job.reap(asked):
                self._view.ended(job)
                if self._search is not None:
                    self._search.ended(job)
                continue
            job.look()
            if self._search is not None and not asked and self._search.gives_up(job):
                for other in running:
                    if other.pruned:
                        other.send(signal.SIGTERM)
        self._view.show(self.jobs)

    def _ask(self, signals: Signals) -> float:
        """Ask the runs to stop; when they must have ended."""
        running = [job for job in self.jobs if job.state == "running"]
        for job in running:
            job.send(signal.SIGTERM)
        now, name = time.monotonic(), signal.Signals(signals.first).name
        if signals.times > 1:
            return now + _STOP_NOW_SECONDS
        again = "; press again to stop now" if signals.first == signal.SIGINT else ""
        if running:
            self._view.say(f"manyhands: {name}: {many(len(running))} save and stop{again}")
        return now + _STOP_SECONDS

    def _end_all(self) -> None:
        """Whatever has gone wrong here: no run is left behind."""
        left = [job for job in self.jobs if job.process is not None]
        for job in left:
            job.send(signal.SIGTERM)
        for job in left:
            if job.process is not None and not job.process.wait(_STOP_SECONDS):
                job.send(signal.SIGKILL)
                job.process.wait(_STOP_NOW_SECONDS)
            job.close()


def many(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"
