"""Replay: add, uniform and prioritized sampling beside cpprb, SB3 and TorchRL; the Ape-X rates

First part: batches of 512 and of 32 out of a million rows (4,000 with pictures), rows added one by
one and 64 at a time. Every library has a process of its own, and they take turns task by task,
round after round, so that whatever else the machine does hits all of them alike. What counts is the
median over the rounds of our rate to a peer's in the same round, whoever is ahead.

Second part: the rates of the Ape-X paper, 12,500 rows added and 9,700 drawn a second, with 84 x 84
frames, batches of 512 and priority updates. Four actors write into their shards; the learner draws.
Contention is what either side loses of the paper's rate when the other comes in at its own. What
each reaches flat out is printed too, alone and at once: there they share the memory's bandwidth.

The peers belong to the repository (benchmarks/), not to the package: in a copy of the repository
they are installed on demand into virtual environments of their own. Elsewhere, and without a
network, the benchmark measures our own buffers only, and says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.bench import _replay_programs
from manyhands.bench._replay_programs import BATCHES, BLOCK, CASES, LIBRARIES
from manyhands.bench._tools import (
    Claim,
    fingerprint,
    in_repository,
    median,
    peers,
    read_line,
    send_line,
    verdicts,
)
from manyhands.errors import ConfigError, SupportError, WorkerError
from manyhands.replay import in_use
from manyhands.replay.frames import Frames
from manyhands.replay.sharded import ShardedReplay

OURS = list(LIBRARIES)
COUNTED = [name for name in OURS if "numpy" not in name]  # as it is installed here
PEERS = {  # libraries -> the option that names their virtual environment
    ("cpprb", "stable-baselines3"): "peer_venv",
    ("torchrl",): "torchrl_venv",
}
TASKS = (
    "add 1",
    f"add {BLOCK}",
    *(f"{way} {batch}" for way in ("uniform", "prioritized") for batch in BATCHES),
)
Rounds = dict[str, dict[str, dict[str, list[float]]]]  # case -> library -> task -> rows a second

ADDS, SAMPLES = 12_500, 9_700  # a second, in the Ape-X paper
ACTORS, ROWS_AT_ONCE, BATCH = 4, 50, 512
CAPACITY = 100_000  # 84 x 84 frames: 0.8 GB
FILL_SECONDS = 4.0
# adds and draws a second; 0: as many as possible, None: not at all
SETTINGS: dict[str, tuple[float | None, float | None]] = {
    "adding at the paper's rate, alone": (ADDS, None),
    "drawing at the paper's rate, alone": (None, SAMPLES),
    "both at the paper's rate, at once": (ADDS, SAMPLES),
    "adding flat out, alone": (0.0, None),
    "drawing flat out, alone": (None, 0.0),
    "adding flat out, draws at the paper's rate": (0.0, SAMPLES),
    "drawing flat out, adds at the paper's rate": (ADDS, 0.0),
    "both flat out": (0.0, 0.0),
}
_READY_SECONDS = 60.0
_ACTOR = "an actor of the benchmark"


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.4,
        metavar="S",
        help="length of each task in each round (default: %(default)s)",
    )
    parser.add_argument("--peer-venv", metavar="DIR", help="with cpprb and stable-baselines3")
    parser.add_argument("--torchrl-venv", metavar="DIR", help="with TorchRL, and its own torch")
    parser.add_argument("--no-peer", action="store_true", help="measure our own buffers only")
    parser.add_argument("--no-apex", action="store_true", help="leave out the second part")


def measure(options: Namespace) -> dict[str, Any]:
    if options.repeats < 1 or not options.seconds > 0:
        raise ConfigError(
            f"--repeats {options.repeats} --seconds {options.seconds}: at least 1 round of more "
            "than 0 seconds is needed"
        )
    facts: dict[str, Any] = {
        "benchmark": "replay",
        "machine": fingerprint(),
        "batches": list(BATCHES),
        "repeats": options.repeats,
        "missing": {},
        "versions": {},
    }
    pythons = dict.fromkeys(OURS, sys.executable)
    for names, folder in PEERS.items():
        try:
            if options.no_peer:
                raise SupportError("not asked for")
            packages = peers().REPLAY[names]
            python = peers().python_with(packages, f"replay-{names[0]}", vars(options)[folder])
            pythons |= dict.fromkeys(names, str(python))
        except SupportError as error:
            facts["missing"][" and ".join(names)] = str(error)
            print(f"going on without {' and '.join(names)}: {error}", flush=True)
    facts["rounds"] = _take_turns(pythons, options, facts)
    facts["apex"] = {} if options.no_apex else apex(options.repeats, 5 * options.seconds)
    facts["claims"] = [c.facts for c in [*claims(facts["rounds"]), *apex_claims(facts["apex"])]]
    facts["machine"]["load_at_end"] = round(os.getloadavg()[0], 2)
    return facts


# -- one process -----------------------------------------------------------------------------------


def _take_turns(pythons: dict[str, str], options: Namespace, facts: dict[str, Any]) -> Rounds:
    found: Rounds = {case: {} for case in CASES}
    for case in CASES:
        print(f"{case}: filling buffers", flush=True)
        with ExitStack() as running:
            libraries: dict[str, Buffers] = {}
            for name, python in pythons.items():
                if name in facts["missing"] or not _applies(name, case):
                    continue
                try:
                    one = Buffers(python, name, case, options.seconds)
                    running.enter_context(one)
                    said = one.start()
                except WorkerError as error:
                    facts["missing"][name] = error.what
                    continue
                libraries[name] = one
                facts["versions"][name] = said["version"]
                facts["missing"] |= {f"{name}: {t}": why for t, why in said["missing"].items()}
            for number in range(options.repeats):
                print(f"{case}: round {number + 1} of {options.repeats}", flush=True)
                for task in TASKS:
                    for name in [name for name, one in libraries.items() if task in one.tasks]:
                        try:
                            rate = round(libraries[name].rate(task))
                        except WorkerError as error:
                            facts["missing"][f"{name}, from {task} on"] = error.what
                            del libraries[name]
                            continue
                        found[case].setdefault(name, {}).setdefault(task, []).append(rate)
    return found


class Buffers:
    """A process with one library's buffers, filled, which does one task at a time."""

    def __init__(self, python: str, library: str, case: str, seconds: float) -> None:
        asked = json.dumps({"library": library, "case": case, "seconds": seconds})
        ours = Path(_replay_programs.__file__)
        script = ours if library in OURS else in_repository("replay_buffers.py")
        one_thread = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        self.name, self.tasks = library, frozenset[str]()
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by __exit__
        self._process = subprocess.Popen(
            [python, str(script), asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=os.environ | dict.fromkeys(one_thread, "1"),
        )

    def start(self) -> dict[str, Any]:
        """Wait until they are full; tasks, version, and what is missing."""
        said: dict[str, Any] = json.loads(self._line())
        self.tasks = frozenset(said["tasks"])
        return said

    def rate(self, task: str) -> float:
        """Rows a second."""
        send_line(self._process, task)
        return float(self._line())

    def _line(self) -> str:
        try:
            return read_line(self._process, self.name)
        except WorkerError as error:
            self._process.kill()
            self._complaints.seek(0)
            said = self._complaints.read().strip().splitlines()
            raise WorkerError(self.name, said[-1] if said else error.what) from error

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=_READY_SECONDS)
        self._complaints.close()


def _applies(library: str, case: str) -> bool:
    if "frames" in library:
        return len(CASES[case][0]) > 1
    return "numpy" not in library or in_use() != "numpy"


def claims(rounds: Rounds) -> list[Claim]:
    """Ahead of each peer in each task; of our two ways to keep pictures the better one counts."""
    made = []
    for case, libraries in rounds.items():
        for task in TASKS:
            ours = [libraries[name][task] for name in COUNTED if task in libraries.get(name, {})]
            best = max(ours, key=median, default=[])
            ratios = {
                name: median([o / p for o, p in zip(best, tasks[task], strict=False)])
                for name, tasks in libraries.items()
                if name not in OURS and task in tasks and best
            }
            if ratios:
                nearest = min(ratios, key=lambda name: ratios[name])
                made.append(Claim(f"{task}, {case}: times {nearest}", ratios[nearest], 1.0))
    return made


# -- the Ape-X paper's rates -----------------------------------------------------------------------


def apex(repeats: int, seconds: float) -> dict[str, Any]:
    """Rows added and drawn a second in each of `SETTINGS`, which take turns."""
    example = {
        "obs": np.zeros((4, 84, 84), np.uint8),
        "next_obs": np.zeros((4, 84, 84), np.uint8),
        "action": np.int64(0),
        "reward": np.float32(0),
        "discount": np.float32(0),
    }
    replay = ShardedReplay(
        example, shards=ACTORS, capacity=CAPACITY, batch_size=BATCH, frames=Frames()
    )
    # Fills it, and touches the memory: first use of a page costs more than the copy.
    at_once(replay, adds=1e9, samples=None, seconds=FILL_SECONDS)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for number in range(repeats):
        print(f"Ape-X, round {number + 1} of {repeats}", flush=True)
        for name, (adds, samples) in SETTINGS.items():
            rounds[name].append(at_once(replay, adds, samples, seconds))
    replay.release()
    return {
        name: {key: median([r[key] for r in found if key in r]) for key in found[0]}
        for name, found in rounds.items()
    }


def at_once(
    replay: ShardedReplay, adds: float | None, samples: float | None, seconds: float
) -> dict[str, float]:
    """Rows added and drawn a second; rates as in `SETTINGS`."""
    # At full speed one actor adds: more of them than free cores would measure the scheduler.
    actors = 0 if adds is None else ACTORS if adds else 1
    writers = [_start(replay, k, (adds or 0.0) / actors, seconds) for k in range(actors)]
    for writer in writers:
        read_line(writer, _ACTOR)  # it is ready
    for writer in writers:
        send_line(writer, "begin")
    found = {} if samples is None else _draw(replay, samples, seconds)
    if writers:
        found["adds"] = sum(float(read_line(writer, _ACTOR)) for writer in writers)
    for writer in writers:
        writer.communicate(timeout=_READY_SECONDS)
    return found


def _draw(replay: ShardedReplay, rate: float, seconds: float) -> dict[str, float]:
    errors = np.random.default_rng(0).random(BATCH)
    taken: list[float] = []
    start = time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        ahead = len(taken) * BATCH - rate * passed
        if rate and ahead > 0:
            time.sleep(ahead / rate)
            continue
        began = time.perf_counter()
        batch = replay.sample()
        replay.update_priorities(batch.ids, errors)
        taken.append(time.perf_counter() - began)
    p99 = sorted(taken)[int(0.99 * len(taken))]
    return {
        "samples": len(taken) * BATCH / passed,
        "median_ms": 1e3 * median(taken),
        "p99_ms": 1e3 * p99,
    }


def _start(replay: ShardedReplay, shard: int, rate: float, seconds: float) -> subprocess.Popen[str]:
    asked = {"shard": replay.describe(shard), "rate": rate, "seconds": seconds,
             "rows": ROWS_AT_ONCE}  # fmt: skip
    words = [sys.executable, "-m", "manyhands.bench._replay_programs", json.dumps(asked)]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def apex_claims(found: dict[str, Any]) -> list[Claim]:
    if not found:
        return []
    adding, drawing, both, *_ = (found[name] for name in SETTINGS)
    kept = both["adds"] / adding["adds"], both["samples"] / drawing["samples"]
    return [
        Claim("adds a second, times the Ape-X paper's, while drawing", both["adds"] / ADDS, 0.99),
        Claim(
            "draws a second, times the Ape-X paper's, while adding", both["samples"] / SAMPLES, 0.99
        ),
        Claim("share of its rate that adding keeps at once", kept[0], 0.9),
        Claim("share of its rate that drawing keeps at once", kept[1], 0.9),
    ]


# -- for people ------------------------------------------------------------------------------------


def table(facts: dict[str, Any]) -> list[str]:
    lines = []
    for case, libraries in facts["rounds"].items():
        lines.append(f"rows a second, {case:<14}" + "".join(f"{task:>16}" for task in TASKS))
        for library, tasks in libraries.items():
            cells = (f"{median(tasks[t]):>16,.0f}" if t in tasks else f"{'-':>16}" for t in TASKS)
            lines.append(f"  {library:<27}{''.join(cells)}")
        lines.append("")
    for name, found in facts["apex"].items():
        words = [f"{found['adds']:,.0f} added/s"] if "adds" in found else []
        if "samples" in found:
            words.append(
                f"{found['samples']:,.0f} drawn/s, a batch within {found['median_ms']:.1f} ms, "
                f"99 % within {found['p99_ms']:.1f} ms"
            )
        lines.append(f"{name:<44}{', '.join(words)}")
    lines += ["", *(f"not measured: {what}: {why}" for what, why in facts["missing"].items())]
    lines += verdicts(facts["claims"])
    machine = facts["machine"]
    lines.append(
        f"on {machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start, "
        f"{machine['load_at_end']} at the end; "
        f"versions: {', '.join(f'{n} {v}' for n, v in facts['versions'].items())}"
    )
    if machine["load"] > 0.5:
        lines.append("the machine was not idle: run it again on an idle one")
    return lines
