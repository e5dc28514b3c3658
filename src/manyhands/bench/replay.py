"""Replay: add, uniform and prioritized sampling beside cpprb, SB3 and TorchRL; the Ape-X rates

First part: one process, batches of 512 out of a million rows (10,000 with pictures), rows added one
by one and 64 at a time. Every library takes its turn in a process of its own, round after round, so
that whatever else the machine does hits all of them alike; the median of the rounds counts, and who
is ahead in each task is printed, whoever that is.

Second part: the rates of the Ape-X paper, 12,500 rows added and 9,700 drawn a second at once, with
84 x 84 frames, batches of 512 and priority updates. Four actors write into their shards; the
learner draws. Contention is what one side loses at full speed when the other comes in at the
paper's rate.

The peers live in virtual environments of their own, made on demand: `python -m venv`, then pip.
Without a network the benchmark goes on without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.bench._peers import output_of, python_with
from manyhands.bench._tools import Claim, fingerprint, median, verdicts
from manyhands.bench.peers.replay_buffers import CASES, LIBRARIES
from manyhands.data.frames import Frames
from manyhands.data.sharded_replay import ShardedReplay
from manyhands.errors import ConfigError, SupportError, WorkerError

_SCRIPT = Path(__file__).parent / "peers" / "replay_buffers.py"
PACKAGES = {"cpprb": ["cpprb"], "stable_baselines3": ["stable-baselines3"]}
# The compiled part of a TorchRL release loads with one torch release only.
TORCHRL = {"torchrl._torchrl": ["torchrl==0.14.1", "torch==2.14.1"]}
OURS = [name for name in LIBRARIES if name.startswith("manyhands")]
TASKS = ("add 1", "add 64", "uniform", "prioritized")

ADDS, SAMPLES = 12_500, 9_700  # a second, in the Ape-X paper
ACTORS, ROWS_AT_ONCE, BATCH = 4, 50, 512
CAPACITY = 100_000  # 84 x 84 frames: 0.8 GB
_READY_SECONDS = 60.0


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
            f"--repeats {options.repeats} --seconds {options.seconds}: more is needed"
        )
    facts: dict[str, Any] = {
        "benchmark": "replay",
        "machine": fingerprint(),
        "batch": BATCH,
        "repeats": options.repeats,
        "missing": {},
        "versions": {},
    }
    pythons = dict.fromkeys(OURS, sys.executable)
    for names, packages, folder in (
        (("cpprb", "stable-baselines3"), PACKAGES, options.peer_venv),
        (("torchrl",), TORCHRL, options.torchrl_venv),
    ):
        try:
            if options.no_peer:
                raise SupportError("not asked for")
            python = str(python_with(packages, f"replay-{names[0]}", folder))
            pythons |= dict.fromkeys(names, python)
        except SupportError as error:
            facts["missing"][" and ".join(names)] = str(error)
            print(f"going on without {' and '.join(names)}: {error}", flush=True)
    facts["rates"] = _take_turns(pythons, options, facts)
    facts["apex"] = {} if options.no_apex else apex(options.repeats, 4 * options.seconds)
    facts["claims"] = [c.facts for c in [*claims(facts["rates"]), *apex_claims(facts["apex"])]]
    return facts


# -- one process -----------------------------------------------------------------------------------


def _take_turns(
    pythons: dict[str, str], options: Namespace, facts: dict[str, Any]
) -> dict[str, dict[str, dict[str, float]]]:
    """case -> library -> task -> median rows a second."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {case: {} for case in CASES}
    for number in range(options.repeats):
        print(f"round {number + 1} of {options.repeats}", flush=True)
        for case in CASES:
            for library, python in pythons.items():
                pictures = len(CASES[case][0]) > 1
                if library in facts["missing"] or ("frames" in library and not pictures):
                    continue
                try:
                    run = _run(python, library, case, options.seconds)
                except WorkerError as error:
                    facts["missing"][library] = error.what
                    continue
                facts["versions"][library] = run["version"]
                facts["missing"] |= {f"{library}: {t}": why for t, why in run["missing"].items()}
                for task, rate in run["rates"].items():
                    found[case].setdefault(library, {}).setdefault(task, []).append(rate)
    return {
        case: {
            library: {task: median(rates) for task, rates in tasks.items()}
            for library, tasks in libraries.items()
        }
        for case, libraries in found.items()
    }


def _run(python: str, library: str, case: str, seconds: float) -> dict[str, Any]:
    asked = json.dumps({"library": library, "case": case, "seconds": seconds})
    printed = output_of(
        [python, str(_SCRIPT), asked],
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )
    run: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return run


def claims(rates: dict[str, dict[str, dict[str, float]]]) -> list[Claim]:
    """Ahead of each peer in each task; of our two ways to keep pictures the better one counts."""
    made = []
    for case, libraries in rates.items():
        for task in TASKS:
            ours = max((libraries[n][task] for n in OURS if n in libraries), default=0.0)
            peers = {n: t[task] for n, t in libraries.items() if n not in OURS and task in t}
            if peers:
                best = max(peers, key=lambda name: peers[name])
                made.append(Claim(f"{task}, {case}: times {best}", ours / peers[best], 1.0))
    return made


# -- the Ape-X paper's rates -----------------------------------------------------------------------


def apex(repeats: int, seconds: float) -> dict[str, Any]:
    """Rows added and drawn a second: each side alone and with the other, in turns."""
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
    at_once(replay, adds=1e9, samples=None, seconds=4.0)
    settings: dict[str, tuple[float | None, float | None]] = {
        "both at the paper's rate": (ADDS, SAMPLES),
        "drawing alone": (None, 0.0),
        "drawing, adds at the paper's rate": (ADDS, 0.0),
        "adding alone": (0.0, None),
        "adding, draws at the paper's rate": (0.0, SAMPLES),
        "both at full speed": (0.0, 0.0),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for _ in range(repeats):
        for name, (adds, samples) in settings.items():
            rounds[name].append(at_once(replay, adds, samples, seconds))
    replay.close()
    return {
        name: {key: median([r[key] for r in found if key in r]) for key in found[0]}
        for name, found in rounds.items()
    }


def at_once(
    replay: ShardedReplay, adds: float | None, samples: float | None, seconds: float
) -> dict[str, float]:
    """Rows added and drawn a second. 0: as fast as possible; None: not at all."""
    # At full speed one actor adds: more of them than free cores would measure the scheduler.
    actors = 0 if adds is None else ACTORS if adds else 1
    writers = [_start(replay, k, (adds or 0.0) / actors, seconds) for k in range(actors)]
    for writer in writers:
        _line(writer)  # it is ready
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("begin\n")
        writer.stdin.flush()
    found = {} if samples is None else _draw(replay, samples, seconds)
    if writers:
        found["adds"] = sum(float(_line(writer)) for writer in writers)
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
    return {"samples": len(taken) * BATCH / passed, "p99_ms": 1e3 * p99}


def _start(replay: ShardedReplay, shard: int, rate: float, seconds: float) -> subprocess.Popen[str]:
    asked = {"shard": replay.describe(shard), "rate": rate, "seconds": seconds,
             "rows": ROWS_AT_ONCE}  # fmt: skip
    words = [sys.executable, "-m", "manyhands.bench._replay_writer", json.dumps(asked)]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def _line(writer: subprocess.Popen[str]) -> str:
    assert writer.stdout is not None
    line = writer.stdout.readline()
    if not line:
        raise WorkerError("an actor of the benchmark", f"left with {writer.wait(_READY_SECONDS)}")
    return line


def apex_claims(found: dict[str, Any]) -> list[Claim]:
    if not found:
        return []
    both = found["both at the paper's rate"]
    draws = (
        found["drawing, adds at the paper's rate"]["samples"] / found["drawing alone"]["samples"]
    )
    adds = found["adding, draws at the paper's rate"]["adds"] / found["adding alone"]["adds"]
    return [
        Claim("adds a second with draws at once, times the paper's", both["adds"] / ADDS, 0.99),
        Claim(
            "draws a second with adds at once, times the paper's", both["samples"] / SAMPLES, 0.99
        ),
        Claim("draws at full speed, with adds at the paper's rate: share kept", draws, 0.9),
        Claim("adds at full speed, with draws at the paper's rate: share kept", adds, 0.9),
    ]


# -- for people ------------------------------------------------------------------------------------


def table(facts: dict[str, Any]) -> list[str]:
    lines = []
    for case, libraries in facts["rates"].items():
        lines.append(f"rows a second, {case:<14}" + "".join(f"{task:>14}" for task in TASKS))
        for library, tasks in libraries.items():
            cells = "".join(f"{tasks[t]:>14,.0f}" if t in tasks else f"{'-':>14}" for t in TASKS)
            lines.append(f"  {library:<28}{cells}")
        lines.append("")
    for name, found in facts["apex"].items():
        words = ", ".join(
            f"{found[key]:,.0f} {label}" if key != "p99_ms" else f"99 % within {found[key]:.1f} ms"
            for key, label in (("adds", "added/s"), ("samples", "drawn/s"), ("p99_ms", ""))
            if key in found
        )
        lines.append(f"{name:<36}{words}")
    lines += ["", *(f"not measured: {what}: {why}" for what, why in facts["missing"].items())]
    lines += verdicts(facts["claims"])
    machine = facts["machine"]
    lines.append(
        f"on {machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start; "
        f"versions: {', '.join(f'{n} {v}' for n, v in facts['versions'].items())}"
    )
    if machine["load"] > 0.5:
        lines.append("the machine was not idle: run it again when it is")
    return lines
