"""Faults, one after the other, into real training runs; each must be noticed, and got over.

    python benchmarks/chaos.py --faults 1000 --seed 1 --minutes 30 --keep      (make chaos)
    python benchmarks/chaos.py --faults 0 --minutes 30                         (make soak)

Strategies whose workers may fail (actor_learner, apex, gradient_server, gather with
--on-worker-failure restart) take many faults in one run, three workers at a time, and must learn in
spite of them. Where every worker takes part in each update (single, allreduce), a
fault ends the run: then it must end soon, say who it was and why, and `manyhands resume` goes on.

A fault counts as detected by one line of events.jsonl, as recovered when the worker's next process
steps its environments again (or the next checkpoint is written; or the run is resumed). What is
noticed but was not injected is a false alarm. At the end nothing may be left: no process, no file
in shared memory, no open file here. Exit code 1 when anything is not so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from chaos_env import STEPS
from chaos_faults import (
    AT_ONCE,
    DISK_FAULTS,
    ENDING,
    ENDING_SHARE,
    HERE,
    LIMIT,
    MARK,
    NOT_ALONE,
    RECOVERING,
    TARGET,
    WORKER_FAULTS,
    Fault,
    Hang,
    Run,
    disk_fault,
    ending_fault,
    worker_fault,
)

# -- many faults -----------------------------------------------------------------------------------


@dataclass
class Audit:
    """What was done and what came of it, over all runs."""

    faults: list[Fault] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # hangs, false alarms, leftovers, bad ends
    returns: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, fault: Fault) -> None:
        with self.lock:
            self.faults.append(fault)
            if not fault.well:
                self.wrong.append(f"not detected or not recovered: {fault}")


def drawn(weights: dict[str, int], count: int, chance: random.Random) -> list[str]:
    """Kinds of faults in random order; each at least once where there is room."""
    kinds = [*weights, *chance.choices([*weights], [*weights.values()], k=count)][:count]
    chance.shuffle(kinds)
    return kinds


def torment(run: Run, count: int, audit: Audit, chance: random.Random, deadline: float) -> None:
    """Many faults into one run: one thread a worker, and one for the disk."""
    strategy, ranks = run.strategy, run.ranks
    kinds = {k: v for k, v in DISK_FAULTS.items() if possible(k, run)}
    disk = drawn(kinds, count // 3 if kinds else 0, chance)
    left = drawn(WORKER_FAULTS, count - len(disk), chance)
    stop = threading.Event()

    room = threading.Semaphore(AT_ONCE)

    def on_worker(rank: int) -> None:
        with room:
            audit.note(worker_fault(run, left.pop(), rank))

    def attend(work: list[str], act: Callable[[], None], pause: random.Random) -> None:
        try:
            while work and not stop.is_set() and time.monotonic() < deadline:
                time.sleep(pause.uniform(0.0, 0.2))
                with suppress(IndexError):  # another thread has taken the last
                    act()
        except (Hang, psutil.Error) as error:
            audit.wrong.append(f"{error}; exit code {run.process.poll()}")
            stop.set()

    try:
        run.goes_on()
        threads = [
            threading.Thread(
                target=attend, args=(left, partial(on_worker, rank), random.Random(rank))
            )
            for rank in ranks
        ]
        act = lambda: audit.note(disk_fault(run, disk.pop()))  # noqa: E731
        threads.append(threading.Thread(target=attend, args=(disk, act, random.Random(0))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        injected = sum(f.strategy == strategy and f.kind in DETECTED for f in audit.faults)
        noticed = sum(e["event"] == "worker_fault" for e in run.events())
        if noticed != injected:
            audit.wrong.append(f"{strategy}: {injected} faults of workers, {noticed} events")
        with suppress(Hang):  # what is not reached is seen in the table
            run.wait_until(lambda: run.mean_return() >= TARGET, "its return", 2 * LIMIT)
        audit.returns[strategy] = run.mean_return()
        if audit.returns[strategy] < TARGET:
            audit.wrong.append(f"{strategy}: reached {run.mean_return():.0f}, not {TARGET:g}")
    except Hang as error:
        audit.wrong.append(str(error))
    finally:
        if said := run.stop():
            tail = run.output.read_text(errors="replace")[-1500:]
            audit.wrong.append(f"{said}; its last words: {tail}")


DETECTED = [kind for kind in WORKER_FAULTS if kind != "slow"]


def possible(kind: str, run: Run) -> bool:
    return run.disk.own if kind == "full disk" else shutil.which("strace") is not None


def end_and_resume(
    run: Run, count: int, audit: Audit, chance: random.Random, deadline: float
) -> None:
    """Faults that end a run, which is resumed each time."""
    ranks, folder = run.ranks, run.folder
    weights = {k: v for k, v in WORKER_FAULTS.items() if len(ranks) > 1 or k not in NOT_ALONE}
    weights.pop("slow", None)
    try:
        run.goes_on()
        for kind in drawn(weights, count, chance):
            if time.monotonic() > deadline:
                break
            # Whoever is silent is named by those that wait for it, and all wait for worker 1.
            worker = max(ranks) if kind in NOT_ALONE else chance.choice(ranks)
            run.wait_until(lambda: any((folder / "checkpoints").glob("0*")), "a checkpoint")
            audit.note(ending_fault(run, kind, worker))
    except Hang as error:
        audit.wrong.append(str(error))
    finally:
        if said := run.stop():
            tail = run.output.read_text(errors="replace")[-1500:]
            audit.wrong.append(f"{said}; its last words: {tail}")


def chaos(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All strategies, several at a time."""
    audit, began = Audit(), time.monotonic()
    before = left_over()
    many = [name for name in RECOVERING if name in options.strategies]
    few = [name for name in ENDING if name in options.strategies]
    ending = max(1, round(ENDING_SHARE * options.faults)) if many else options.faults // len(few)
    shares = dict.fromkeys(few, ending)
    rest = options.faults - sum(shares.values())
    shares |= {n: rest // len(many) + (i < rest % len(many)) for i, n in enumerate(many)}
    queue = [name for name in (*ENDING, *many) if shares.get(name)]
    lock, deadline = threading.Lock(), began + 60 * options.minutes

    def work() -> None:
        while True:
            with lock:
                if not queue:
                    return
                name = queue.pop(0)
            chance = random.Random(f"{options.seed} {name}")
            act = torment if name in RECOVERING else end_and_resume
            run = Run(name, folder / name, options.timeout)
            act(run, shares[name], audit, chance, deadline)

    threads = [threading.Thread(target=work) for _ in range(options.runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    missing = options.faults - len(audit.faults)
    if missing:
        audit.wrong.append(f"{missing} of {options.faults} faults were not injected")
    audit.wrong += leftovers(before)
    return {
        "faults": len(audit.faults),
        "detected": sum(f.detected is not None for f in audit.faults),
        "to_detect": sum(f.kind != "slow" for f in audit.faults),
        "recovered": sum(f.recovered is not None for f in audit.faults),
        "rows": rows(audit.faults),
        "returns": audit.returns,
        "wrong": audit.wrong,
        "seed": options.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "machine": machine(),
    }


def rows(faults: list[Fault]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[Fault]] = {}
    for fault in sorted(faults, key=lambda f: (f.strategy, f.kind)):
        found.setdefault((fault.strategy, fault.kind), []).append(fault)
    return [
        {
            "strategy": strategy,
            "fault": kind,
            "injected": len(some),
            "detected": None if kind == "slow" else sum(f.detected is not None for f in some),
            "recovered": sum(f.recovered is not None for f in some),
            "median_detection_ms": _ms(statistics.median, [f.detected for f in some]),
            "worst_detection_ms": _ms(max, [f.detected for f in some]),
            "worst_recovery_ms": _ms(max, [f.recovered for f in some]),
        }
        for (strategy, kind), some in found.items()
    ]


def _ms(how: Callable[[list[float]], float], seconds: list[float | None]) -> int | None:
    known = [s for s in seconds if s is not None]
    return round(1000 * how(known)) if known else None


# -- nothing is left -------------------------------------------------------------------------------


def marked() -> list[int]:
    """Processes that were started from here, however far they ran away."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if f"MANYHANDS_CHAOS={MARK}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def left_over() -> tuple[set[str], int]:
    """(names in shared memory but for those of other programs, open files here)"""
    names = {n for n in os.listdir("/dev/shm") if not n.startswith(("mpich", "ray", "plasma"))}
    return names, len(os.listdir("/proc/self/fd"))


def leftovers(before: tuple[set[str], int]) -> list[str]:
    deadline = time.monotonic() + 20
    while marked() and time.monotonic() < deadline:
        time.sleep(0.1)
    gc.collect()
    files, open_files = left_over()
    wrong = [f"process {pid} is left" for pid in marked()]
    wrong += [f"/dev/shm/{name} is left" for name in sorted(files - before[0])]
    if open_files > before[1]:
        wrong.append(f"{open_files - before[1]} files are still open")
    return wrong


# -- a soak ----------------------------------------------------------------------------------------


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run, left alone: memory, open files and speed stay as they are. Speed is steps in a
    second of processor time: what else the machine does is none of the run's business."""
    before = left_over()
    run = Run("actor_learner", folder / "soak", options.timeout)
    samples, wrong = [], []
    try:
        run.goes_on()
        began = time.monotonic()
        while time.monotonic() - began < 60 * options.minutes and run.process.poll() is None:
            time.sleep(5.0)
            samples.append([time.monotonic() - began, *sample(run)])
    except Hang as error:
        wrong.append(str(error))
    finally:
        wrong += [said] if (said := run.stop()) else []
    tail = samples[len(samples) // 5 :]  # what is loaded late, and caches that fill, come first
    seconds, memory, files, steps, cpu = (list(column) for column in zip(*tail, strict=True))
    slope, mean = statistics.linear_regression(seconds, memory)[0], statistics.mean(memory)
    half = len(tail) // 2
    halves = ((0, half), (half, -1))
    speed = [(steps[b] - steps[a]) / (cpu[b] - cpu[a]) for a, b in halves]
    on_the_wall = [(steps[b] - steps[a]) / (seconds[b] - seconds[a]) for a, b in halves]
    growth = slope * (seconds[-1] - seconds[0]) / mean
    if growth > 0.03:
        wrong.append(f"memory grew by {growth:.1%}")
    if max(files) - min(files) > 8 or files[-1] > files[0] + 4:
        wrong.append(f"open files: {files[0]} at first, {files[-1]} at last")
    if speed[1] < 0.8 * speed[0]:
        wrong.append(f"steps a CPU second fell from {speed[0]:.0f} to {speed[1]:.0f}")
    wrong += [f"a fault: {e['what']}" for e in run.events() if e["event"] == "worker_fault"]
    return {
        "minutes": round(samples[-1][0] / 60, 1),
        "megabytes": round(mean / 2**20, 1),
        "memory_growth": round(growth, 4),
        "open_files": [files[0], files[-1], max(files)],
        "steps": steps[-1],
        "steps_per_cpu_second": [round(s) for s in speed],
        "steps_per_second": [round(s) for s in on_the_wall],
        "cpu_share": round((cpu[-1] - cpu[0]) / (seconds[-1] - seconds[0]), 2),
        "mean_return": run.mean_return(),
        "wrong": wrong + leftovers(before),
        "machine": machine(),
    }


def sample(run: Run) -> tuple[float, int, int, float]:
    """(bytes of memory, open files, steps, seconds of processor time) of all processes of a run."""
    memory, files, cpu = 0, 0, 0.0
    for pid in [run.process.pid, *(c.pid for c in psutil.Process(run.process.pid).children(True))]:
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            memory += memory_of(pid)
            files += process.num_fds()
            cpu += sum(process.cpu_times()[:2])
    return memory, files, int(run.slots.words[:, STEPS].sum()), cpu


def memory_of(pid: int) -> int:
    """Bytes, but for libraries, whose pages are anybody's. Each of several processes that share
    a page counts its part of it, so that their sum has it once."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = dict(line.split(":") for line in text.splitlines() if line.startswith("Pss_"))
    return sum(int(sizes[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


# -- what is written -------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    from manyhands.bench._tools import fingerprint

    return fingerprint()


COLUMNS = ("strategy", "fault", "injected", "detected", "recovered", "median_detection_ms",
           "worst_detection_ms", "worst_recovery_ms")  # fmt: skip


def page(facts: dict[str, Any]) -> Iterator[str]:
    """docs/results/chaos.md, from what was measured."""
    yield f"# {facts['faults']:,} faults"
    yield ""
    yield "Written by `make chaos` (`benchmarks/chaos.py`, whose first lines say how it counts)."
    yield ""
    m = facts["machine"]
    yield (
        f"{facts['faults']:,} faults in {facts['minutes']:g} minutes on {m['cores']} cores of "
        f"{m['cpu']}, load average {m['load']:.0f} at the end, seed {facts['seed']}, manyhands "
        f"{m['manyhands']}. Of {facts['to_detect']:,} that had to be noticed "
        f"{facts['detected']:,} were, {facts['recovered']:,} of all were got over."
    )
    yield ""
    yield (
        "Times are from the injection. A kill and a stop happen at once, and a stop is noticed at "
        "the deadline (`--timeout 15`), a hang 5 seconds after it; all others, and a hang, begin "
        "with the worker's next step, which in gather may have to wait for a worker that is down. "
        "Recovery is the first step of the worker's next process, which has to import torch: that "
        "is what it takes on a busy machine."
    )
    yield ""
    yield (
        "| " + " | ".join(name.replace("_ms", ", ms").replace("_", " ") for name in COLUMNS) + " |"
    )
    yield "|" + "---|" * len(COLUMNS)
    for row in facts["rows"]:
        cells = ["-" if row[name] is None else str(row[name]) for name in COLUMNS]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    for strategy, reached in facts["returns"].items():
        yield f"- {strategy}: mean return {reached:.0f} (at least {TARGET:g} is asked; chance: 22)"
    yield ""
    yield (
        "What was not as it should be:" if facts["wrong"] else "Nothing hung, and nothing was left."
    )
    yield from (f"- {text}" for text in facts["wrong"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="how many; 0 for a soak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0, help="no new fault after that")
    parser.add_argument("--timeout", type=float, default=15.0, help="of the runs, in seconds")
    parser.add_argument("--runs", type=int, default=3, help="at a time (default: %(default)s)")
    parser.add_argument("--strategies", nargs="+", default=[*RECOVERING, *ENDING])
    parser.add_argument(
        "--keep", action="store_true", help="in benchmarks/results and docs/results"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="manyhands-chaos-"))
    facts = chaos(options, folder) if options.faults else soak(options, folder)
    name = "chaos" if options.faults else "soak"
    print("\n".join(page(facts)) if options.faults else json.dumps(facts, indent=1))
    if options.keep:
        kept = HERE / "results" / f"{name}.json"
        kept.write_text(json.dumps(facts, indent=1) + "\n")
        if options.faults:
            written = HERE.parent / "docs" / "results" / "chaos.md"
            written.parent.mkdir(exist_ok=True)
            written.write_text("\n".join(page(facts)) + "\n")
    if facts["wrong"]:
        print(f"{len(facts['wrong'])} things are not as they should be; see {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
