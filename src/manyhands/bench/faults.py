"""from the SIGKILL of a worker to the launcher's word, on every engine

Two workers meet; one notes the time and kills itself, the other waits for it. What is measured is
the time until the launcher's error names who it was: the others have been ended by then, and
nothing is left. Each kill is a launch of its own; on Ray a launch takes seconds, not counted here.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from manyhands.bench._tools import (
    Claim,
    add_engines,
    engines_in,
    fingerprint,
    median,
    missing_package,
    verdicts,
)
from manyhands.engines.launch import launch
from manyhands.errors import ConfigError, ManyhandsError, WorkerError

ENGINES = ("local", "mpi", "torch", "ray")  # inline has one process, which nobody outlives
TIMES = 5
MOST_MS = 100.0  # what we promise of local


def add_options(parser: ArgumentParser) -> None:
    add_engines(parser, ENGINES)
    parser.add_argument(
        "--times",
        type=int,
        default=TIMES,
        metavar="N",
        help="how many workers are killed on each engine (default: %(default)s)",
    )


def measure(options: Namespace) -> dict[str, Any]:
    chosen = engines_in(options.engines, ENGINES)
    if options.times < 1:
        raise ConfigError(f"--times {options.times}: at least 1 is needed")
    facts: dict[str, Any] = {"benchmark": "faults", "machine": fingerprint(), "engines": {}}
    for engine in chosen:
        facts["engines"][engine] = _engine(engine, options.times)
    facts["claims"] = [c.facts for c in claims(facts["engines"])]
    return facts


def _engine(engine: str, times: int) -> dict[str, Any]:
    """Milliseconds on one engine, or the reason why there are none."""
    if reason := missing_package(engine):
        return {"missing": reason}
    try:
        taken = [_one_kill(engine) for _ in range(times)]
    except ManyhandsError as error:
        return {"missing": " ".join(str(error).split())[-300:]}  # its end says what it was
    return {
        "median_ms": round(median(taken), 1),
        "worst_ms": round(max(taken), 1),
        "kills": times,
        "all_ms": [round(ms, 1) for ms in taken],
    }


def _one_kill(engine: str) -> float:
    """Milliseconds from a kill to the word that names it; another error is not the launcher's."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "killed")
        try:
            launch(doomed, str(note), workers=2, engine=engine, timeout=60)
        except WorkerError as error:
            ended = time.monotonic_ns()
            if not note.exists() or "worker 1 of 2" not in str(error):
                raise
            return (ended - int(note.read_text())) / 1e6
    raise WorkerError(f"{engine} did not notice that a worker was killed")


def doomed(note: str) -> None:
    """What each worker does."""
    from manyhands.parallel import Parallel

    par = Parallel()
    par.barrier()
    if not par.is_main:
        Path(note).write_text(str(time.monotonic_ns()))  # one clock for the whole machine
        os.kill(os.getpid(), signal.SIGKILL)
    par.barrier()


def claims(engines: dict[str, Any]) -> list[Claim]:
    local = engines.get("local", {})
    if "median_ms" not in local:
        return []
    words = f"local names a killed worker, times sooner than {MOST_MS:g} ms"
    return [Claim(words, MOST_MS / local["median_ms"], 1)]


def table(facts: dict[str, Any]) -> list[str]:
    lines = [f"{'SIGKILL to word':<16} {'median ms':>10} {'worst ms':>10} {'kills':>6}"]
    for engine, row in facts["engines"].items():
        if "missing" in row:
            lines.append(f"{engine:<16} not measured: {row['missing']}")
        else:
            cells = f"{row['median_ms']:>10,.0f} {row['worst_ms']:>10,.0f} {row['kills']:>6}"
            lines.append(f"{engine:<16} {cells}")
    return [*lines, "", *verdicts(facts["claims"])]
