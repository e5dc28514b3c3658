"""One run that faults happen to, and one fault: injected, noticed, got over. For `chaos.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_env import NUMBER, OBEYED, ORDER, ORDERS, PID, STEPS, Slots

HERE = Path(__file__).parent
MARK = f"{os.getpid()}-{time.time_ns()}"
TARGET = 60.0  # mean return that a run must reach in spite of all; chance alone gives 22
AT_ONCE = 3  # workers of a run that are down: with all of them gone, it would wait in vain
LIMIT = 90.0  # seconds that anything may take on a busy machine; longer is a hang
COMMON = [
    "--env", "chaos_env:Chaos", "--hidden", "16", "--quiet", "--no-tensorboard", "--steps", "1e9",
"--checkpoint-seconds", "0.5", "--log-every", "20",
]  # fmt: skip
ASYNC = ["--max-restarts", "1000000", "-n", "5", "--num-envs", "4"]
Words = tuple[list[str], tuple[int, ...]]
RECOVERING: dict[str, Words] = {  # strategy -> words, workers that may fail
    "actor_learner": (["impala", *COMMON, *ASYNC], (1, 2, 3, 4)),
    "gradient_server": (
        ["a2c", *COMMON, *ASYNC, "--strategy", "gradient_server"],
        (1, 2, 3, 4),
    ),
    "apex": (
        ["dqn", *COMMON, *ASYNC, "--learning-starts", "500", "--batch-size", "32",
         "--updates-per-step", "0.1", "--replay-size", "20000"],
        (1, 2, 3, 4),
    ),
    "gather": (
        ["a2c", *COMMON, *ASYNC, "--strategy", "gather", "--on-worker-failure", "restart"],
        (1, 2, 3, 4),
    ),
}  # fmt: skip
ENDING: dict[str, Words] = {
    "allreduce": (["a2c", *COMMON, "-n", "2", "--num-envs", "4"], (0, 1)),
    "single": (["a2c", *COMMON, "--num-envs", "4"], (0,)),
}
WORKER_FAULTS = {"kill": 4, "segfault": 2, "exit": 2, "raise": 3, "oom": 1, "stop": 1, "hang": 1,
                 "slow": 4}  # fmt: skip
DISK_FAULTS = {"full disk": 3, "I/O error": 1}
ENDING_SHARE = 0.03  # of all faults: each takes a start of its own
# A worker that hangs alone looks like one that works: nobody waits for it.
NOT_ALONE = ("stop", "hang", "slow")


@dataclass
class Fault:
    strategy: str
    kind: str
    worker: int
    at: float = field(default_factory=time.time)
    detected: float | None = None  # seconds from the injection
    recovered: float | None = None
    said: str = ""

    @property
    def well(self) -> bool:
        return self.recovered is not None and (self.detected is not None or self.kind == "slow")


class Run:
    """One training run in a process of its own, and what it says of itself."""

    def __init__(self, strategy: str, folder: Path, timeout: float) -> None:
        self.strategy, self.folder, self.timeout = strategy, folder, timeout
        self.slots = Slots(str(folder.with_suffix(".slots")))
        self.output = folder.with_suffix(".txt")
        self.disk = Disk(folder / "checkpoints")
        words, self.ranks = (RECOVERING | ENDING)[strategy]
        words = [*words, "--timeout", f"{timeout:g}"]
        self._events: list[dict[str, Any]] = []
        self._read, self._lock = 0, threading.Lock()
        self.process = self._start("train", *words, "--env-kwargs",
                                   f"slots={folder.with_suffix('.slots')}",
                                   "--run-dir", str(folder))  # fmt: skip

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        with open(self.output, "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "manyhands.cli.main", *words],
                stdout=output, stderr=output, start_new_session=True,
                env=os.environ | {"PYTHONPATH": path, "MANYHANDS_CHAOS": MARK},
            )  # fmt: skip

    def resume(self) -> None:
        self.process = self._start("resume", str(self.folder))

    def events(self) -> list[dict[str, Any]]:
        """All whole lines so far; only what is new is read."""
        with self._lock, suppress(OSError), open(self.folder / "events.jsonl", "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._events.append(json.loads(line))
        return self._events

    def mean_return(self) -> float:
        with suppress(OSError, ValueError, IndexError, TypeError):
            last = (self.folder / "metrics.jsonl").read_bytes().splitlines()[-1]
            return float(json.loads(last)["mean_return"])
        return 0.0

    def main_pid(self) -> int:
        """The process of the main worker; the launcher's while it has none."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if child.name() == "manyhands-0":
                    return int(child.pid)
        return self.process.pid

    def wait_until(self, true: Callable[[], Any], what: str, limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while not true():
            if self.process.poll() is not None:
                raise Hang(f"{self.strategy}: {what}: the run has ended")
            if time.monotonic() > deadline:
                raise Hang(f"{self.strategy}: {what}: not within {limit:g} s")
            time.sleep(0.02)

    def goes_on(self) -> None:
        """Until every worker that acts has stepped: from then on faults can be found apart."""
        before = self.slots.words[:, STEPS].copy()
        self.wait_until(
            lambda: (
                self.process.poll() is not None
                or all(self.slots.words[r, STEPS] > before[r] for r in self.ranks)
            ),
            "no steps",
        )

    def stop(self) -> str:
        """Asked to end, as by a job manager; what is wrong with how it ended, or ""."""
        try:
            return self._stop()
        finally:
            self.disk.close()
            del self.slots  # and with it the file that it keeps open

    def _stop(self) -> str:
        if self.process.poll() is not None:
            return f"{self.strategy}: had ended with exit code {self.process.returncode}"
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return f"{self.strategy}: did not end when it was asked to"
        return "" if code == 143 else f"{self.strategy}: ended with exit code {code}, not 143"


class Hang(Exception):
    """Something took longer than it may."""


class Disk:
    """The folder of checkpoints as a disk of its own, where that can be had (it takes root)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.filler = folder, folder / "filler"
        words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
        self.own = subprocess.run(words, capture_output=True).returncode == 0

    def fill(self) -> None:
        with suppress(OSError), open(self.filler, "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()

    def empty(self) -> None:
        self.filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.own:
            subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True)
            self.own = False


# -- one fault -------------------------------------------------------------------------------------


def order(run: Run, worker: int, kind: str) -> None:
    slot = run.slots.words[worker]
    slot[ORDER] = ORDERS.index(kind)
    slot[NUMBER] += 1


def limit_memory(pid: int) -> Callable[[], None]:
    """So that what it allocates next is too much: a control group, in which the kernel kills it, or
    a limit that makes Python raise. What undoes it."""
    group = Path(f"/sys/fs/cgroup/memory/manyhands-chaos-{pid}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        import resource

        most = psutil.Process(pid).memory_info().vms + (64 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
        return lambda: None

    def undo() -> None:
        with suppress(OSError):
            group.rmdir()

    return undo


def inject(run: Run, kind: str, worker: int) -> Callable[[], None]:
    """Let it happen; what is to be cleared away afterwards."""
    pid = int(run.slots.words[worker, PID])
    if kind in ("kill", "stop"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return lambda: None
    undo = limit_memory(pid) if kind == "oom" else lambda: None
    order(run, worker, kind)
    return undo


def worker_fault(run: Run, kind: str, worker: int) -> Fault:
    """A fault in a worker that may fail: one event, and a process in its place."""
    fault = Fault(run.strategy, kind, worker)
    slot = run.slots.words[worker]
    pid, known = int(slot[PID]), seen(run, worker)
    undo = inject(run, kind, worker)
    if kind == "slow":
        obeyed, steps = int(slot[NUMBER]), int(slot[STEPS])
        run.wait_until(lambda: slot[OBEYED] == obeyed and slot[STEPS] > steps + 1, kind)
        fault.recovered = time.time() - fault.at
        return fault
    run.wait_until(lambda: len(seen(run, worker)) > len(known), f"{kind} of worker {worker}")
    event = seen(run, worker)[len(known)]
    fault.detected = max(0.0, event["time"] - fault.at)
    fault.said = event["kind"]
    steps = int(slot[STEPS])
    run.wait_until(
        lambda: slot[PID] != pid and slot[STEPS] > steps, f"worker {worker} after {kind}"
    )
    fault.recovered = time.time() - fault.at
    undo()
    return fault


def seen(run: Run, worker: int) -> list[dict[str, Any]]:
    return [e for e in run.events() if e["event"] == "worker_fault" and e["worker"] == worker]


def disk_fault(run: Run, kind: str) -> Fault:
    """Checkpoints that cannot be written: found, and the training goes on; then they can again."""
    fault = Fault(run.strategy, kind, 0)

    def count(name: str) -> int:
        return sum(e["event"] == name for e in run.events())

    failed, tracer = count("checkpoint_failed"), None
    if kind == "full disk":
        run.disk.fill()
    else:
        tracer = subprocess.Popen(
            ["strace", "-f", "-p", str(run.main_pid()), "-o", "/dev/null", "-e", "trace=fsync",
             "-e", "inject=fsync:error=EIO"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        run.wait_until(lambda: count("checkpoint_failed") > failed, kind)
    finally:
        run.disk.empty()
        if tracer is not None:
            tracer.terminate()
            tracer.wait(LIMIT)
    events = [e for e in run.events() if e["event"] == "checkpoint_failed"]
    fault.detected, fault.said = (
        max(0.0, events[failed]["time"] - fault.at),
        events[failed]["error"],
    )
    made = count("checkpoint")
    run.wait_until(lambda: count("checkpoint") > made, f"a checkpoint after {kind}")
    fault.recovered = time.time() - fault.at
    return fault


def ending_fault(run: Run, kind: str, worker: int) -> Fault:
    """A fault that ends the run: soon, in words, and it can be resumed."""
    fault = Fault(run.strategy, kind, worker)
    known = len(run.events())
    undo = inject(run, kind, worker)
    try:
        run.process.wait(run.timeout + LIMIT)
    except subprocess.TimeoutExpired:
        raise Hang(f"{run.strategy}: did not end after {kind}") from None
    found = [e for e in run.events()[known:] if e["event"] in ("worker_fault", "fault")]
    last = run.output.read_text(errors="replace").strip().splitlines()[-40:]
    named = any(f"worker {worker} of" in line for line in last)
    if run.process.returncode and found and named:
        fault.detected, fault.said = max(0.0, found[0]["time"] - fault.at), found[0].get("kind", "")
    undo()
    run.resume()
    run.goes_on()
    fault.recovered = time.time() - fault.at
    return fault
