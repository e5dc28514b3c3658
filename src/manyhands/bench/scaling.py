"""training speed with 1, 2, 4 … workers, beside N independent runs and what a serial learner allows

Every run learns the same thing: the batch of all workers together is the same, so only the speed
may change. Runs take turns, round after round, and a speed-up is the ratio of two runs of one
round: whatever else the machine does then hits both. Reported are medians over rounds. Start-up and
the first update are not counted.

"independent" is the limit of the machine: N one-worker runs at the same time, which share nothing
but cores, caches and memory. Their speed together, over that of one alone, is the limit(N) that no
N workers can pass. Beside gather stands what its serial part leaves of it (Amdahl), from the phases
of the one-worker run:

    bound(N) = (collect + learn) / (collect / limit(N) + learn)

Claims are judged only on a quiet machine that has the cores; elsewhere the figures are printed with
the reason.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.bench._tools import (
    Claim,
    OtherPrograms,
    end,
    fingerprint,
    median,
    others_now,
    records_of,
    train,
    verdicts,
    why_it_failed,
    why_not_judged,
)
from manyhands.config import Experiment, build, save_toml
from manyhands.config.validate import check
from manyhands.errors import ConfigError, WorkerError

STRATEGIES = ("allreduce", "gather")
BATCH, ENVS = 8192, 32  # many environments: a call of the policy costs the same for few
UPDATES, ROUNDS = 8, 5
BAR = 24  # characters of a perfect speed-up
INDEPENDENT = "independent"  # N runs that know nothing of each other
_RUN_SECONDS = 600.0  # the longest that one turn may take
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
    counts = [n for n in _worker_counts(options) if n > 1]
    envs = math.lcm(ENVS, *counts)
    length = max(1, round(options.batch / envs))
    common = {
        "env": options.env,
        "engine": options.engine,
        "num_envs": envs,
        "rollout_length": length,
        "steps": options.updates * envs * length,
    }
    facts: dict[str, Any] = {
        "benchmark": "scaling",
        "machine": fingerprint(),
        "settings": {"algorithm": options.algorithm, "rounds": options.rounds, **common},
    }
    plan = [("single", 1), *((s, n) for n in counts for s in (*STRATEGIES, INDEPENDENT))]
    turns = {part: _experiments(options.algorithm, *part, common) for part in plan}
    machine = facts["machine"]
    machine["others_before"] = others_now()
    watch = OtherPrograms()
    rounds = [{part: measured(turns[part]) for part in plan} for _ in range(options.rounds)]
    machine["others_meanwhile"] = watch.cores()
    facts["runs"] = [_medians(rounds, strategy, workers) for strategy, workers in plan]
    facts |= judgement(facts["runs"], machine, options.engine)
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


def _experiments(
    algorithm: str, strategy: str, workers: int, common: dict[str, Any]
) -> list[Experiment]:
    """What runs at the same time in one turn: one run, or as many independent ones."""
    alone = strategy == INDEPENDENT
    found = []
    for copy in range(workers if alone else 1):
        name, count = ("single", 1) if alone else (strategy, workers)
        experiment = build(
            algorithm, strategy=name, workers=count, seed=1 + copy, quiet=True, **common
        )
        check(experiment)
        found.append(experiment)
    return found


def measured(experiments: Sequence[Experiment]) -> Run:
    """A turn: steps per second of all its runs together, seconds by phase of the first's main."""
    with tempfile.TemporaryDirectory() as folder:
        homes = _train_at_once(experiments, Path(folder))
        records = [records_of(home) for home in homes]
    first, last = records[0][0], records[0][-1]

    def between(name: str) -> float:
        return float(last.get(name, 0.0)) - float(first.get(name, 0.0))

    return {
        "steps_per_second": speed_together(records),
        "seconds": between("wall_seconds"),
        "phases": {name: between(f"seconds/{name}") for name in PHASES},
    }


def _train_at_once(experiments: Sequence[Experiment], folder: Path) -> list[Path]:
    """Run them side by side, as `manyhands train` does; their folders."""
    processes: list[subprocess.Popen[bytes]] = []
    homes = [folder / str(i) for i in range(len(experiments))]
    try:
        for home, experiment in zip(homes, experiments, strict=True):
            toml = folder / f"{home.name}.toml"
            save_toml(toml, experiment)
            processes.append(train(home, toml))
        deadline = time.monotonic() + _RUN_SECONDS
        for home, process in zip(homes, processes, strict=True):
            code = process.wait(max(0.0, deadline - time.monotonic()))
            if code:
                raise why_it_failed(home, code)
    except subprocess.TimeoutExpired:
        raise WorkerError("manyhands train", f"took more than {_RUN_SECONDS:g} s") from None
    finally:
        for process in processes:
            end(process)
    return homes


def speed_together(runs: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Steps per second of all runs while all of them were between first and last update."""
    begin = max(float(run[0]["at"]) for run in runs)
    end = min(float(run[-1]["at"]) for run in runs)
    if end <= begin:
        raise ConfigError(
            f"the {len(runs)} independent runs were over before all had begun; use more --updates"
        )
    steps = 0.0
    for run in runs:
        at, count = [row["at"] for row in run], [row["env_steps"] for row in run]
        steps += float(np.diff(np.interp([begin, end], at, count))[0])
    return steps / (end - begin)


def bound(one: Run, limit: float) -> float:
    """The speed-up that remains when only collecting is shared, by workers who make `limit`."""
    collect = float(one["phases"]["rollout"])
    serial = float(one["seconds"]) - collect
    return float(one["seconds"]) / (collect / limit + serial)


def _medians(
    rounds: list[dict[tuple[str, int], Run]], strategy: str, workers: int
) -> dict[str, Any]:
    def speed_ups(of: tuple[str, int]) -> list[float]:
        return [r[of]["steps_per_second"] / r[("single", 1)]["steps_per_second"] for r in rounds]

    mine = [r[(strategy, workers)] for r in rounds]
    ups = speed_ups((strategy, workers))
    limits = speed_ups((INDEPENDENT, workers)) if workers > 1 else ups
    bounds = limits
    if strategy == "gather":
        ones = [r[("single", 1)] for r in rounds]
        bounds = [bound(one, limit) for one, limit in zip(ones, limits, strict=True)]
    return {
        "strategy": strategy,
        "workers": workers,
        "steps_per_second": round(median([m["steps_per_second"] for m in mine]), 1),
        "speed_up": round(median(ups), 3),
        "efficiency": round(median(ups) / workers, 3),
        "limit": round(median(limits), 3),
        "of_limit": round(median([u / m for u, m in zip(ups, limits, strict=True)]), 3),
        "bound": round(median(bounds), 3),
        "of_bound": round(median([u / b for u, b in zip(ups, bounds, strict=True)]), 3),
        "speed_up_by_round": [round(up, 3) for up in ups],
        "phase_shares": {
            name: round(median([m["phases"][name] / m["seconds"] for m in mine]), 3)
            for name in PHASES
        },
    }


def judgement(
    runs: list[dict[str, Any]], machine: dict[str, Any], engine: str
) -> dict[str, list[Any]]:
    """ "claims", judged, or none of them and the reasons as "not_judged"."""
    most = max(run["workers"] for run in runs)
    others = machine["others_before"], machine["others_meanwhile"]
    reasons = why_not_judged(machine["cores"], most, *others)
    if engine == "ray":  # they outlive their parents, and are counted as other programs
        reasons = ["Ray's own processes look the same as other programs"]
    if reasons:
        return {"claims": [], "not_judged": reasons}
    return {"claims": [claim.facts for claim in claims(runs)], "not_judged": []}


def claims(runs: list[dict[str, Any]]) -> list[Claim]:
    found = {(r["strategy"], r["workers"]): r for r in runs}
    made = []
    if ("allreduce", 2) in found:
        words = "allreduce with two workers, share of two independent runs"
        made.append(Claim(words, found[("allreduce", 2)]["of_limit"], 0.9))
    gathers = [r["of_bound"] for r in runs if r["strategy"] == "gather"]
    if gathers:
        made.append(Claim("gather, share of what its serial learner allows", min(gathers), 0.95))
    return made


def table(facts: dict[str, Any]) -> list[str]:
    settings, machine = facts["settings"], facts["machine"]
    titles = ["workers", "steps/s", "speed-up", "efficiency", "limit", "of limit", "bound",
              "of bound", *PHASES]  # fmt: skip
    rows = [["", *titles]]
    for run in facts["runs"]:
        rows.append([
            run["strategy"],
            str(run["workers"]),
            f"{run['steps_per_second']:,.0f}",
            f"{run['speed_up']:.2f}",
            f"{run['efficiency']:.0%}",
            f"{run['limit']:.2f}",
            f"{run['of_limit']:.0%}",
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
    lines += [f"NOT JUDGED  {reason}" for reason in facts["not_judged"]]
    lines.append(
        f"on {machine['cores']} cores of {machine['cpu']}; other programs kept "
        f"{_cores(machine['others_before'])} of them busy before, "
        f"{_cores(machine['others_meanwhile'])} meanwhile; phases are the main worker's"
    )
    return lines


def _cores(busy: float | None) -> str:
    return "an unknown number" if busy is None else f"{busy:.2f}"


def _bars(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for run in runs:
        filled = min(BAR, round(BAR * run["speed_up"] / run["workers"]))
        bar = list("█" * filled + "·" * (BAR - filled))
        bar[min(BAR - 1, round(BAR * run["bound"] / run["workers"]))] = "|"
        name = f"{run['strategy']} {run['workers']}"
        lines.append(f"  {name:<15}{''.join(bar)} {run['speed_up']:.2f} of {run['workers']}")
    return lines
