"""`manyhands doctor [--json]`: what works on this machine. `manyhands support [--json]`: what runs
with what."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from manyhands import __version__, devices
from manyhands.engines.base import ENGINES
from manyhands.engines.launch import launch
from manyhands.errors import ManyhandsError
from manyhands.support import ALGORITHMS, LAUNCHERS, OK, PARTS, STRATEGIES

PACKAGES = {
    "torch": "pip install torch",
    "gymnasium": "pip install gymnasium",
    "ray": "pip install 'manyhands[ray]'",
    "mpi4py": "pip install 'manyhands[mpi]'",
    "envpool": "pip install 'manyhands[envpool]'",
    "ale_py": "pip install 'manyhands[atari]'",
    "mujoco": "pip install 'manyhands[mujoco]'",
    "numba": "pip install 'manyhands[compiled]'",
}
_NEEDS = {"ray": "ray", "mpi": "mpi4py", "torch": "torch"}


def doctor(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands doctor",
        description="Look at this machine and run a two-worker test of each engine found.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--engine", choices=ENGINES, help="test this engine only")
    options = parser.parse_args(argv)
    say = (lambda *a: None) if options.json else print
    facts: dict[str, Any] = {"machine": machine(), "packages": packages(), "engines": {}}
    for name, value in facts["machine"].items():
        say(f"{name:<10} {value}")
    say()
    for name, version in facts["packages"].items():
        say(f"{name:<10} {version or 'not installed; type: ' + PACKAGES[name]}")
    say()
    for engine in [options.engine] if options.engine else ENGINES:
        facts["engines"][engine] = result = examine(engine)
        say(f"{engine:<10} {result['words']}")
    if options.json:
        print(json.dumps(facts, indent=2))
    broken = [e for e, r in facts["engines"].items() if r["state"] == "broken"]
    say()
    say(f"broken: {', '.join(broken)}" if broken else "all engines that are installed work")
    return 1 if broken else 0


def machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = devices.present()
    return {
        "manyhands": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "gpus": str(gpus) if gpus else "none found (workers use the CPU)",
    }


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        there = importlib.util.find_spec(name) is not None
        found[name] = importlib.metadata.version(name.replace("_", "-")) if there else ""
    return found


def examine(engine: str) -> dict[str, Any]:
    """Start two workers on the engine and let them gather and average."""
    package = _NEEDS.get(engine)
    if package is not None and importlib.util.find_spec(package) is None:
        return {"state": "missing", "words": f"not installed; type: {PACKAGES[package]}"}
    start = time.perf_counter()
    try:
        answers = launch(probe, workers=2, engine=engine, timeout=30)
    except ManyhandsError as error:
        return {"state": "broken", "words": f"does not work: {error}"}
    seconds = time.perf_counter() - start
    if answers[0] != [[0.0, 1.0], 0.5]:
        return {"state": "broken", "words": f"gives wrong answers: {answers[0]}"}
    words = f"works: two workers met, gathered and averaged in {seconds:.1f} s"
    return {"state": "works", "seconds": round(seconds, 2), "words": words}


def probe() -> list[Any]:
    """What each worker of the self-test does."""
    from manyhands.parallel import Parallel

    par = Parallel()
    gathered = par.all_gather([float(par.rank)])[0]
    return [list(map(float, gathered)), par.mean(float(par.rank))]


if __name__ == "__main__":
    sys.exit(doctor(sys.argv[1:]))


# -- what runs with what ---------------------------------------------------------------------------


def support(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands support", description="What runs with what, and why not with the rest."
    )
    parser.add_argument("--json", action="store_true", help="the same table for programs")
    options = parser.parse_args(argv)
    if options.json:
        tables = {"algorithms": ALGORITHMS, "parts": PARTS, "launchers": LAUNCHERS}
        print(json.dumps(tables, indent=2))
    else:
        print("\n".join(table()))
    return 0


def table() -> list[str]:
    wide = max(map(len, LAUNCHERS))
    return [
        "algorithm and strategy:",
        *_grid(ALGORITHMS, STRATEGIES),
        "",
        "part and engine:",
        *_grid(PARTS, ENGINES),
        "",
        "how a script was started, and the engine it gets:",
        *(f"  {how:<{wide}}  {engine}" for how, (engine, _) in LAUNCHERS.items()),
    ]


def _grid(rows: dict[str, dict[str, str]], columns: Sequence[str]) -> list[str]:
    """One line a row, OK or the number of a reason in each cell, and the reasons below."""
    width = max(map(len, rows))
    reasons: list[str] = []
    lines = ["  " + "".ljust(width) + "".join(f"  {c:>6}" for c in columns)]
    for name, cells in rows.items():
        row = "  " + name.ljust(width)
        for column in columns:
            cell = cells[column]
            if cell != OK and cell not in reasons:
                reasons.append(cell)
            mark = OK if cell == OK else f"({reasons.index(cell) + 1})"
            row += f"  {mark:>{max(6, len(column))}}"
        lines.append(row)
    return lines + [f"  ({i}) {reason}" for i, reason in enumerate(reasons, 1)]
