"""training speed with 1, 2, 4 … workers, and the bound that a serial learner sets

Every run learns the same thing: the batch of all workers together is the same, so only the speed
may change. Runs take turns, round after round, and a speed-up is the ratio of two runs of one
round: whatever else the machine does then hits both. Reported are medians over rounds. Start-up and
the first update are not counted.

Beside gather stands what its serial part allows (Amdahl), from the phases of the one-worker run:

    bound(N) = (collect + learn) / (collect / N + learn)
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from manyhands.bench._tools import Claim, fingerprint, median, verdicts
from manyhands.errors import ConfigError

STRATEGIES = ("allreduce", "gather")
BATCH, ENVS = 8192, 32  # many environments: a call of the policy costs the same for few
UPDATES, ROUNDS = 8, 5
BAR = 24  # characters of a perfect speed-up
PHASES = ("rollout", "optimisation", "synchronisation", "logging")

Run = dict[str, Any]


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--env", default="Walker2d-v5", metavar="ID", help="default: %(default)s")
    parser.add_argument("--algorithm", default="trpo", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--engine", default="local", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--workers",
        default=",".join(map(str, _powers(len(os.sched_getaffinity(0))))),
        metavar="N,N,...",
        help="worker counts; 1 is always run too (default: up to the cores: %(default)s)",
    )
    for name, default, words in (
        ("batch", BATCH, "steps of one update, of all workers together"),
        ("updates", UPDATES, "updates of each run; the first is not counted"),
        ("rounds", ROUNDS, "how often each run gets its turn"),
    ):
        words += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)


def measure(options: Namespace) -> dict[str, Any]:
    counts = _worker_counts(options)
    envs = math.lcm(ENVS, *counts)
    length = max(1, round(options.batch / envs))
    common = {
        "env": options.env,
        "engine": options.engine,
        "num_envs": envs,
        "rollout_length": length,
        "steps": options.updates * envs * length,
        "quiet": True,
    }
    facts: dict[str, Any] = {
        "benchmark": "scaling",
        "machine": fingerprint(),
        "settings": {"algorithm": options.algorithm, "rounds": options.rounds, **common},
    }
    plan = [("single", 1), *((s, n) for n in counts if n > 1 for s in STRATEGIES)]
    rounds: list[dict[tuple[str, int], Run]] = []
    for _ in range(options.rounds):
        rounds.append({p: _train(options.algorithm, *p, common) for p in plan})
    facts["runs"] = [_medians(rounds, strategy, workers) for strategy, workers in plan]
    facts["machine"]["load_at_end"] = round(os.getloadavg()[0], 2)
    facts["claims"] = [c.facts for c in claims(facts["runs"])]
    return facts


def _powers(cores: int) -> list[int]:
    return [2**k for k in range(cores.bit_length()) if 2**k <= cores]


def _worker_counts(options: Namespace) -> list[int]:
    try:
        counts = sorted({int(n) for n in options.workers.split(",") if n.strip()})
    except ValueError:
        raise ConfigError(f"--workers {options.workers}: numbers are needed, as 1,2,4") from None
    if not counts or counts[0] < 1:
        raise ConfigError(f"--workers {options.workers}: at least 1 is needed, as 1,2,4")
    for name, least in (("batch", 1), ("updates", 2), ("rounds", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least {least} is needed")
    return counts


def _train(algorithm: str, strategy: str, workers: int, common: dict[str, Any]) -> Run:
    """One short training run: its steps per second, and the main worker's seconds by phase."""
    from manyhands.run import train

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        train(algorithm, strategy=strategy, workers=workers, run_dir=str(run_dir), **common)
        text = (run_dir / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    first, last = records[0], records[-1]

    def between(name: str) -> float:
        return float(last.get(name, 0.0)) - float(first.get(name, 0.0))

    return {
        "steps_per_second": between("env_steps") / between("wall_seconds"),
        "seconds": between("wall_seconds"),
        "phases": {name: between(f"seconds/{name}") for name in PHASES},
    }


def bound(one: Run, workers: int) -> float:
    """The speed-up that remains when only collecting is shared."""
    collect = float(one["phases"]["rollout"])
    serial = float(one["seconds"]) - collect
    return float(one["seconds"]) / (collect / workers + serial)


def _medians(
    rounds: list[dict[tuple[str, int], Run]], strategy: str, workers: int
) -> dict[str, Any]:
    mine = [r[(strategy, workers)] for r in rounds]
    ones = [r[("single", 1)] for r in rounds]
    ups = [m["steps_per_second"] / o["steps_per_second"] for m, o in zip(mine, ones, strict=True)]
    bounds = [bound(o, workers) if strategy == "gather" else float(workers) for o in ones]
    of_bound = [up / b for up, b in zip(ups, bounds, strict=True)]
    return {
        "strategy": strategy,
        "workers": workers,
        "steps_per_second": round(median([m["steps_per_second"] for m in mine]), 1),
        "speed_up": round(median(ups), 3),
        "efficiency": round(median(ups) / workers, 3),
        "bound": round(median(bounds), 3),
        "of_bound": round(median(of_bound), 3),
        "speed_up_by_round": [round(up, 3) for up in ups],
        "phase_shares": {
            name: round(median([m["phases"][name] / m["seconds"] for m in mine]), 3)
            for name in PHASES
        },
    }


def claims(runs: list[dict[str, Any]]) -> list[Claim]:
    found = {(r["strategy"], r["workers"]): r for r in runs}
    made = []
    if ("allreduce", 2) in found:
        words = "allreduce with two workers, times as fast as one"
        made.append(Claim(words, found[("allreduce", 2)]["speed_up"], 1.8))
    gathers = [r["of_bound"] for r in runs if r["strategy"] == "gather"]
    if gathers:
        made.append(Claim("gather, part of what its serial learner allows", min(gathers), 0.95))
    return made


def table(facts: dict[str, Any]) -> list[str]:
    settings, machine = facts["settings"], facts["machine"]
    titles = ["workers", "steps/s", "speed-up", "efficiency", "bound", "of bound", *PHASES]
    rows = [["", *titles]]
    for run in facts["runs"]:
        rows.append([
            run["strategy"],
            str(run["workers"]),
            f"{run['steps_per_second']:,.0f}",
            f"{run['speed_up']:.2f}",
            f"{run['efficiency']:.0%}",
            f"{run['bound']:.2f}",
            f"{run['of_bound']:.0%}",
            *(f"{run['phase_shares'][name]:.0%}" for name in PHASES),
        ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"{settings['algorithm']} on {settings['env']}, {settings['engine']} engine: "
        f"{settings['num_envs']} envs × {settings['rollout_length']} steps an update",
        "",
    ]
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    lines += ["", "speed-up of the number of workers (| is the bound)", *_bars(facts["runs"]), ""]
    lines += verdicts(facts["claims"])
    lines.append(
        f"on {machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start, "
        f"{machine['load_at_end']} at the end; phases are the main worker's"
    )
    if machine["load"] > 0.5:  # before the first run: none of it is ours
        lines.append(
            f"WARNING  the load was {machine['load']:.1f} before this began: other programs had "
            "the cores, and the speed-ups say little"
        )
    return lines


def _bars(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for run in runs:
        filled = min(BAR, round(BAR * run["speed_up"] / run["workers"]))
        bar = list("█" * filled + "·" * (BAR - filled))
        bar[min(BAR - 1, round(BAR * run["bound"] / run["workers"]))] = "|"
        name = f"{run['strategy']} {run['workers']}"
        lines.append(f"  {name:<14}{''.join(bar)} {run['speed_up']:.2f} of {run['workers']}")
    return lines
