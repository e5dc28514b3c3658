"""The folder of a run. Its files are a contract:

config.toml      the resolved configuration; `manyhands train --config` on it repeats the run
metrics.jsonl    one record an update; metrics.csv has the same numbers
episodes.csv     one row a finished episode
events.jsonl     starts, stops, faults, restarts, checkpoints
checkpoints/     step-numbered, complete or absent; `manyhands resume` goes on from the newest
best/            with --eval-every: the best policy by evaluation
summary.json     how it ended
live.json        how it is, once a second; only while it runs
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands import __version__
from manyhands.config import Experiment, holds_a_run, save_toml
from manyhands.errors import ConfigError
from manyhands.experiment.metrics import (
    Csv,
    JsonLines,
    cut_lines,
    to_disk,
    to_json,
    write_json,
)

if TYPE_CHECKING:
    from manyhands.experiment.hooks import FinishedEpisode

EPISODE_COLUMNS = ("global_step", "worker", "env", "return", "length", "wall_seconds")

# What a resume cuts back: part -> (file, lines of its header)
_ROWS = {
    "metrics": ("metrics.jsonl", 0),
    "table": ("metrics.csv", 1),
    "episodes": ("episodes.csv", 1),
}
# Files that are written beside and then put in place: a killed writer leaves NAME.tmp
_REPLACED = ("config.toml", "metrics.csv", "summary.json", "policy.safetensors")

# Every key of summary.json, with what it is when a run had nothing to say
SUMMARY: dict[str, Any] = {
    "env_steps": 0,
    "episodes": 0,
    "updates": 0,
    "wall_seconds": 0.0,
    "steps_per_second": 0.0,
    "mean_return": None,
    "best_return": None,
    "solved": False,
    "algorithm": "",
    "strategy": "",
    "engine": "",
    "workers": 1,
    "seed": 0,
    "restarts": 0,
    "lost_fragments": 0,
    "phase_seconds": {},
    "exit": "finished",
    "versions": {},
    "cpu": "",
    "gpu": "",
    "commit": "",
}
_LIVE_SECONDS = 1.0
_ENV_PACKAGES = {"ale_py": "ale-py", "mujoco": "mujoco", "envpool": "envpool", "Box2D": "box2d"}


def short_env(env: str) -> str:
    """For people: in a script, its file without the folders; in a notebook, its name alone."""
    return env.rpartition("/")[2] if ".py:" in env else env.removeprefix("__main__:")


def default_run_dir(experiment: Experiment) -> Path:
    """runs/ENV/ALGORITHM-STRATEGY/SEED-TIME, a name that is not taken yet."""
    run = experiment.run
    env = short_env(run.env)
    env = "".join(c if c.isalnum() or c in "-_." else "-" for c in env).strip(".") or "env"
    parent = Path("runs", env, f"{experiment.spec.name}-{experiment.strategy}")
    name = f"{run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = [parent / name, *(parent / f"{name}-{i}" for i in range(2, 1000))]
    return next(path for path in tries if not path.exists())


def _ran_on(env: str) -> dict[str, Any]:
    """Versions and machine, for whoever wants to repeat a run or doubts it."""
    loaded = {module: name for module, name in _ENV_PACKAGES.items() if module in sys.modules}
    own = env.partition(":")[0].partition(".")[0] if ":" in env else ""
    versions = {"manyhands": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "gymnasium", *loaded.values(), *([own] if own else [])):
        with contextlib.suppress(Exception):  # a module of the user's own belongs to no package
            versions[name] = importlib.metadata.version(name)
    torch = sys.modules.get("torch")
    gpus = 0 if torch is None else torch.cuda.device_count()
    return {
        "versions": versions,
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "gpu": ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) if torch else "",
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit(folder: Path) -> str:
    """What is checked out there; empty where there is no repository. Read without git: a process
    that has met others by MPI had better start none."""
    with contextlib.suppress(OSError, StopIteration):
        git = next(p / ".git" for p in (folder, *folder.parents) if (p / ".git").exists())
        if git.is_file():  # a worktree or submodule: the file says where
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name, common = head.removeprefix("ref: "), git
        if (git / "commondir").is_file():
            common = git / (git / "commondir").read_text(encoding="utf-8").strip()
        if (common / name).is_file():
            return (common / name).read_text(encoding="utf-8").strip()
        for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line.partition(" ")[0]
    return ""


class LiveFile:
    """How a run is right now, written once a second by a thread: when an update takes minutes, or a
    worker is stuck, it is the only sign. Gone when the run has ended; a killed run leaves it."""

    def __init__(self, path: Path, look: Callable[[], dict[str, Any]]) -> None:
        self._path, self._look = path, look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beside = self._path.with_name(".live.json.tmp")
        while not self._stop.wait(_LIVE_SECONDS):
            # A full disk, or records that change while they are read: the next second is another.
            with contextlib.suppress(Exception):
                record = {"time": round(time.time(), 3), "pid": os.getpid(), **self._look()}
                beside.write_text(to_json(record) + "\n", encoding="utf-8")
                os.replace(beside, self._path)  # no fsync: it is old in a second

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        for name in ("live.json", ".live.json.tmp"):
            self._path.with_name(name).unlink(missing_ok=True)


class RunFolder:
    """Writes what a run leaves behind. With path None it writes nothing: other workers' folder."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._experiment: Experiment | None = None
        self._files: dict[str, Any] = {}
        self._live: LiveFile | None = None
        self._started = time.time()
        self.lost_rows = 0  # that the disk had no room for
        # Now: at the end of a long run something else may be checked out.
        self._commit = "" if path is None else _commit(Path.cwd())

    @classmethod
    def of(cls, experiment: Experiment) -> RunFolder:
        """The folder that the experiment names, or a new one under runs/; opened."""
        folder = cls(experiment.run.run_dir or default_run_dir(experiment))
        folder.open(experiment)
        return folder

    @classmethod
    def for_summary(cls, path: Path, experiment: Experiment) -> RunFolder:
        """A folder to which only a summary is written, for a run whose own writer is gone."""
        folder = cls(path)
        folder._experiment = experiment
        return folder

    def open(self, experiment: Experiment) -> None:
        """Make the folder and write config.toml. A folder that holds a run is left alone."""
        self._experiment, self._started = experiment, time.time()
        if self.path is None:
            return
        if holds_a_run(self.path):
            raise ConfigError(
                f"{self.path} already holds a run; to continue it, type: manyhands resume "
                f"{self.path}; for a new one, give another --run-dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write_config(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        self._open_files(self.path, {})

    def reopen(
        self, experiment: Experiment, rows: Mapping[str, int], wall_seconds: float
    ) -> list[str]:
        """Go on in the folder of a run, from where its files had so many rows.

        Later rows are cut off; events are a log of what happened, and stay. Gives back, in words,
        rows that are missing.
        """
        self._experiment, self._started = experiment, time.time() - wall_seconds
        if self.path is None:
            return []
        for name in ("summary.json", *(f"{n}.tmp" for n in _REPLACED)):
            (self.path / name).unlink(missing_ok=True)
        self._write_config(self.path)
        lost = []
        for part, (name, head) in _ROWS.items():
            wanted = rows[part] + head if rows[part] else 0
            found = cut_lines(self.path / name, wanted)
            if found < wanted:
                lost.append(f"{name} has lost {wanted - found:,} of {rows[part]:,} rows")
        cut_lines(self.path / "events.jsonl", None)
        self._open_files(self.path, rows)
        return lost

    def rows(self) -> dict[str, int]:
        """How many rows each file has that a resumed run would cut back."""
        return {part: self._files[part].rows for part in _ROWS if self._files}

    def sync(self) -> None:
        """Force all rows to the disk: a checkpoint must not know of rows that are not there."""
        for file in self._files.values():
            file.sync()

    def _open_files(self, path: Path, rows: Mapping[str, int]) -> None:
        self._files = {
            "metrics": JsonLines(path / "metrics.jsonl", rows.get("metrics", 0)),
            "table": Csv(path / "metrics.csv", rows=rows.get("table", 0)),
            "episodes": Csv(path / "episodes.csv", EPISODE_COLUMNS, rows.get("episodes", 0)),
            "events": JsonLines(path / "events.jsonl"),
        }

    def _write_config(self, path: Path) -> None:
        """config.toml, whole or not at all."""
        assert self._experiment is not None
        # WHY without run_dir: a repeated run must not write over the one that it repeats.
        run = dataclasses.replace(
            self._experiment.run, run_dir="", strategy=self._experiment.strategy
        )
        beside = path / "config.toml.tmp"
        save_toml(beside, dataclasses.replace(self._experiment, run=run))
        with open(beside, "rb+") as file:
            to_disk(file)
        os.replace(beside, path / "config.toml")

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One record an update: a line of metrics.jsonl and a row of metrics.csv."""
        self._put("metrics", record)
        self._put("table", record)

    def episodes(
        self, global_step: int, wall_seconds: float, finished: Iterable[FinishedEpisode]
    ) -> None:
        """The episodes that an update has seen end: rows of episodes.csv, written in one stroke,
        while all workers wait; with --log-info its values come last."""
        rows = []
        for e in finished:
            values = (
                global_step,
                e.worker,
                e.env,
                e.total_return,
                e.length,
                round(wall_seconds, 3),
            )
            row = dict(zip(EPISODE_COLUMNS, values, strict=True))
            rows.append(row | {f"info/{key}": value for key, value in e.info.items()})
        if rows:
            self._put("episodes", *rows)

    def event(self, kind: str, **facts: Any) -> None:
        """Something happened: a line of events.jsonl with the time of day and of the run."""
        now = time.time()
        clock = {"time": round(now, 3), "wall_seconds": round(now - self._started, 3)}
        self._put("events", {"event": kind, **clock, **facts})

    def _put(self, part: str, *records: Mapping[str, Any]) -> None:
        """Rows. A full disk does not stop a training: they are lost, and that is reported."""
        if not self._files:
            return
        try:
            self._files[part].write(*records)
        except OSError as error:
            before, self.lost_rows = self.lost_rows, self.lost_rows + len(records)
            # From 1, 2, 4, 8 on: heard, not drowned in
            if self.lost_rows.bit_length() > before.bit_length():
                text = f"{self.lost_rows} rows of metrics, episodes or events are lost: {error}"
                with contextlib.suppress(OSError, ValueError):  # whoever read has gone
                    print(f"manyhands: {text}", file=sys.stderr, flush=True)

    def summary(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json, whole or not at all; what was written, every key of the contract."""
        known: dict[str, Any] = {}
        if self._experiment is not None:
            run = self._experiment.run
            known = {
                "algorithm": self._experiment.algorithm,
                "strategy": self._experiment.strategy,
                "engine": run.engine,
                "workers": int(run.workers),
                "seed": run.seed,
            }
        if self.path is not None and self._experiment is not None:
            known |= _ran_on(self._experiment.run.env) | {"commit": self._commit}
        record = {**SUMMARY, **known, **facts}
        if "steps_per_second" not in facts and record["wall_seconds"] > 0:
            record["steps_per_second"] = record["env_steps"] / record["wall_seconds"]
        if self.path is not None:
            write_json(self.path / "summary.json", record)
        return record

    def live(self, look: Callable[[], dict[str, Any]]) -> None:
        """Keep live.json, until the folder is closed."""
        if self.path is not None:
            self._live = LiveFile(self.path / "live.json", look)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- one process at a time -------------------------------------------------------------------------

# A file `.lock`, held by flock for as long as the process runs, says who: process, host, and which
# start of that machine. The kernel lets go when the process ends, however it ends; what the file
# says is for the message, and for file systems whose locks do not reach other machines.
#
# By hand, and not with filelock: before version 4 that empties the file of whoever holds it when
# another only asks, so that nobody could say who; and it gives up where a file system has no locks.
LOCK = ".lock"
LEAVING_SECONDS = 3.0  # for a process that was killed to be gone


class RunLock:
    """`with RunLock(run_dir): ...`; ConfigError when another live process is in the folder."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir, LOCK)
        self._fd = -1
        self._made = False

    def __enter__(self) -> RunLock:
        try:
            self._made = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(
                f"{self.path.parent} cannot be written: {error.strerror or error}"
            ) from error
        data = json.dumps(_me()).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # before the lock goes: whoever waits finds a fresh file
        os.close(self._fd)
        self._fd = -1
        if self._made:
            with contextlib.suppress(OSError):  # not empty, as it should be
                os.rmdir(self.path.parent)  # a run that could not begin leaves nothing

    def _open(self) -> int:
        deadline = time.monotonic() + LEAVING_SECONDS
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            free, holder = _take(fd), _holder(fd)
            # A process that was killed lets go of its files and then leaves the list of processes;
            # the other way round if a thread has a write to finish. With one gone, wait for both.
            leaving = _here(holder) and free == _is_alive(holder)
            if leaving and time.monotonic() < deadline:
                os.close(fd)
                time.sleep(0.02)
                continue
            if not free or _is_alive(holder):
                os.close(fd)
                raise ConfigError(self._in_use(holder))
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)  # its holder removed it while we waited: look again

    def _in_use(self, holder: dict[str, Any]) -> str:
        folder, host = self.path.parent, holder.get("host", "this machine")
        text = f"{folder} is in use by process {holder.get('pid', '?')} on {host}"
        if host not in (socket.gethostname(), "this machine"):
            text += f"; if that machine no longer runs it, remove {self.path}"
        return text


def _take(fd: int) -> bool:
    """Whether nobody else holds the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: what the file says must do
        return True
    return True


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "host": socket.gethostname(),
        "boot": _boot(),
    }


def _here(holder: dict[str, Any]) -> bool:
    """Whether it is another process of this machine."""
    return holder.get("host") == socket.gethostname() and holder.get("pid") != os.getpid()


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process that the file names may still be there."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True  # another machine: we cannot know
    if holder.get("boot") != _boot() or holder.get("pid") == os.getpid():
        return False
    started = _started(int(holder.get("pid", 0)))
    return bool(started) and started == holder.get("started")


def _holder(fd: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(fd, 4096, 0) or b"{}"))
    except (ValueError, TypeError):  # its writer died in the middle of it
        return {}


def _boot() -> str:
    """Which start of this machine it is; "" where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine's start: numbers of processes come again.
    "" where it has ended, also if nobody has waited for it: not every container's first one does.
    """
    with contextlib.suppress(OSError, IndexError):
        state, *more = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else more[18]
    return ""
