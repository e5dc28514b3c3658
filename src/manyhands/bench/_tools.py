"""Shared by the benchmarks: the machine, how quiet it is, programs they run, claims that may fail.

Other libraries are measured by `benchmarks/peers.py`, which is part of the repository and not of
the package: `peers` finds it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from manyhands import __version__
from manyhands.errors import ConfigError, SupportError, WorkerError

QUIET = 0.05  # of the cores may be busy with something else
_LOOK_SECONDS = 2.0
_RUN_SECONDS = 600.0  # the longest that one run may take
_END_SECONDS = 30.0  # the longest that a run may take to end when it is asked to
_NEEDS = {"ray": "ray", "mpi": "mpi4py"}  # engine -> package
_REPOSITORY = Path(__file__).parents[3]  # where manyhands runs from its sources

# -- the machine -----------------------------------------------------------------------------------


def fingerprint() -> dict[str, Any]:
    """The machine and versions, without which a number means nothing."""
    return {
        "manyhands": __version__,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "load": round(os.getloadavg()[0], 2),  # what else ran on the machine at the start
    }


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux: platform knows something
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class OtherPrograms:
    """Cores that were busy with something else than this process and the children that have ended.

    Only the cores that this process may use are looked at; what a virtual machine's host took away
    ("steal") counts as somebody else's, too.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), busy_seconds(), own_seconds()

    def cores(self) -> float | None:
        """Their average number since the start; None where the system does not say."""
        busy = busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (own_seconds() - self._ours)
        return max(0.0, others / max(time.monotonic() - self._began, 1e-9))


def others_now() -> float | None:
    """Cores that other programs keep busy at this moment."""
    watch = OtherPrograms()
    time.sleep(_LOOK_SECONDS)
    return watch.cores()


def busy_seconds(path: str = "/proc/stat") -> float | None:
    """Seconds that the usable cores have been busy since the machine began."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    ticks = 0
    for row in (row for row in rows if row and row[0] in names):
        # user nice system idle iowait irq softirq steal; guests are part of user
        user, nice, system, _, _, irq, softirq, steal = map(int, row[1:9])
        ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


def why_not_judged(
    cores: int, workers: int, before: float | None, meanwhile: float | None
) -> list[str]:
    """Why a claim about so many workers cannot be judged here; empty when it can.

    Args:
        cores: that may be used.
        workers: the most that the claim speaks of.
        before, meanwhile: cores that other programs kept busy.
    """
    reasons = []
    if cores < workers:
        reasons.append(f"{workers} workers need as many cores, and there are {cores}")
    if before is None or meanwhile is None:
        return [*reasons, "this system does not say what else runs on it"]
    allowed = QUIET * cores
    for busy, when in ((before, "before it began"), (meanwhile, "meanwhile")):
        if busy > allowed:
            reasons.append(
                f"other programs kept {busy:.2f} of {cores} cores busy {when} "
                f"(quiet is at most {allowed:.2f})"
            )
    return reasons


# -- engines ---------------------------------------------------------------------------------------


def add_engines(parser: ArgumentParser, engines: tuple[str, ...]) -> None:
    parser.add_argument(
        "--engines",
        default=",".join(engines),
        metavar="A,B,...",
        help="which engines (default: all that are installed: %(default)s)",
    )


def engines_in(text: str, known: tuple[str, ...]) -> list[str]:
    """The engines of an option such as local,mpi."""
    chosen = [e.strip() for e in text.split(",") if e.strip()]
    for engine in chosen:
        if engine not in known:
            raise ConfigError(f"--engines {engine!r}: engines are {', '.join(known)}")
    return chosen


def missing_package(engine: str) -> str:
    """Why an engine cannot be measured here; "" where it can."""
    package = _NEEDS.get(engine)
    missing = package is not None and importlib.util.find_spec(package) is None
    return f"{package} is not installed" if missing else ""


# -- programs --------------------------------------------------------------------------------------


def output_of(words: list[str], limit: float = _RUN_SECONDS, **environment: str) -> str:
    """What a program prints; WorkerError with the end of its complaint when it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, env=os.environ | environment
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(Path(words[0]).name, f"took more than {limit:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        last = said[-1].strip()[:300] if said else f"exit code {done.returncode}"
        raise WorkerError(" ".join(words[:5]) + " failed:", last)
    return done.stdout


def send_line(process: subprocess.Popen[str], words: str) -> None:
    """One line to a program that waits for it."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{words}\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended; `read_line` says why


def read_line(process: subprocess.Popen[str], name: str, limit: float = _RUN_SECONDS) -> str:
    """The program's next line; WorkerError when it ends instead, or takes too long."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit)[0]:
        raise WorkerError(name, f"took more than {limit:g} s")
    line = process.stdout.readline()
    if not line:
        raise WorkerError(name, f"ended with exit code {process.wait(limit)}")
    return line


def train(home: Path, toml: Path) -> subprocess.Popen[bytes]:
    """`manyhands train` with that configuration, into the folder `home`; complaints go beside."""
    words = ["train", "--config", str(toml), "--run-dir", str(home)]
    with open(complaints(home), "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "manyhands.cli.main", *words],
            cwd=home.parent,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def complaints(home: Path) -> Path:
    return home.parent / f"{home.name}.errors"


def why_it_failed(home: Path, code: int) -> WorkerError:
    said = complaints(home).read_text(errors="replace").strip().splitlines()
    return WorkerError("manyhands train", said[-1] if said else f"left with {code}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Whatever it is doing."""
    if process.poll() is None:
        process.terminate()  # its supervisor ends its workers
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)


def records_of(home: Path) -> list[dict[str, Any]]:
    """The records of a run, with the time of day at which each was written as "at"."""
    events = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    began = next(event["time"] for event in events if event["event"] == "start")
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    return [row | {"at": began + row["wall_seconds"]} for row in rows]


# -- other libraries -------------------------------------------------------------------------------


def in_repository(name: str) -> Path:
    """A file of the repository's `benchmarks/`; SupportError where there is no repository."""
    for root in (_REPOSITORY, Path.cwd()):
        path = root / "benchmarks" / name
        if path.exists() and (root / "src" / "manyhands").is_dir():
            return path
    raise SupportError(
        "other libraries are measured from a copy of the repository; "
        "type this command again in its folder, where benchmarks/ is"
    )


@cache
def peers() -> Any:
    """`benchmarks/peers.py` as a module."""
    path = in_repository("peers.py")
    spec = importlib.util.spec_from_file_location("manyhands_benchmarks_peers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- figures and claims ----------------------------------------------------------------------------


def seconds_of(action: Callable[[], Any], repeats: int) -> list[float]:
    """Wall time of each of several calls."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken


def median(values: list[float]) -> float:
    return statistics.median(values)


@dataclass(frozen=True)
class Claim:
    """What we say of ourselves, what was measured, and whether that holds."""

    words: str
    measured: float
    limit: float
    at_most: bool = False  # that, and not at least

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "claim": self.words,
            "measured": round(self.measured, 3),
            "at_most" if self.at_most else "at_least": self.limit,
            "holds": self.holds,
        }


def verdicts(claims: list[dict[str, Any]]) -> list[str]:
    """One line a claim: HOLDS or FAILS, with both numbers."""
    return [
        f"{'HOLDS' if c['holds'] else 'FAILS'}  {c['claim']}: {c['measured']:.2f} (claimed: "
        + (f"at most {c['at_most']:g})" if "at_most" in c else f"at least {c['at_least']:g})")
        for c in claims
    ]
