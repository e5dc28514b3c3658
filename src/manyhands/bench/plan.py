"""`manyhands plan` beside what really happens: each strategy with 1, 2, 4 … workers

For each algorithm costs are measured as `manyhands plan --measure` does, and then each strategy
runs, with the environments that the plan gave it; round after round. The table has both in steps a
second, and plan over measurement: the median over rounds, the least and the most. Start-up and the
first update are not counted.

The claim is judged only on a quiet machine; elsewhere the figures are printed with the reason. A
run that others slow down has a ratio above 1.
"""

from __future__ import annotations

import dataclasses
import math
import os
from argparse import ArgumentParser, Namespace
from typing import Any

from manyhands.bench import _costs
from manyhands.bench._tools import (
    Claim,
    OtherPrograms,
    fingerprint,
    median,
    others_now,
    verdicts,
    why_not_judged,
)
from manyhands.bench.scaling import measured
from manyhands.config import Experiment, build
from manyhands.config.validate import check
from manyhands.config.values import Workers
from manyhands.errors import ConfigError
from manyhands.strategies import registry as strategies
from manyhands.strategies.simulate import Cluster, Load, load_of

ALGORITHMS = {  # name -> strategies
    "ppo": ("single", "gather", "allreduce"),
    "a2c": ("single", "gradient_server"),
    "impala": ("single", "actor_learner"),
    "ddpg": ("single", "apex"),
}
WITHIN = 0.85  # plan over measurement, or the other way round
_UPDATES = 4  # at least, of a run

Pairs = dict[tuple[str, str, int], list[tuple[float, float]]]  # planned, measured


def add_options(parser: ArgumentParser) -> None:
    most = max(4, len(os.sched_getaffinity(0)))
    default = ",".join(str(2**k) for k in range(most.bit_length()))
    words = "(default: %(default)s)"
    parser.add_argument("--env", default="Pendulum-v1", metavar="ID", help=words)
    parser.add_argument("--num-envs", type=int, default=48, metavar="N", help=words)
    parser.add_argument("--workers", default=default, metavar="N,N,...", help=words)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), metavar="A,A,...", help=words)
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help=words)
    parser.add_argument("--seconds", type=float, default=2.0, metavar="X",
                        help=f"of each run, as planned {words}")  # fmt: skip


def measure(options: Namespace) -> dict[str, Any]:
    chosen, counts = _chosen(options)
    machine = fingerprint() | {"others_before": others_now()}
    watch = OtherPrograms()
    rows: Pairs = {}
    for number in range(options.rounds):
        for algorithm in chosen:
            _round(algorithm, options, counts, number, rows)
    machine["others_meanwhile"] = watch.cores()
    facts: dict[str, Any] = {"benchmark": "plan", "machine": machine, "env": options.env,
                             "num_envs": options.num_envs, "rounds": options.rounds}  # fmt: skip
    facts["rows"] = [_row(*name, pairs) for name, pairs in rows.items()]
    others = machine["others_before"], machine["others_meanwhile"]
    facts["not_judged"] = why_not_judged(machine["cores"], 1, *others)
    facts["claims"] = [] if facts["not_judged"] else [c.facts for c in claims(facts["rows"])]
    return facts


def _chosen(options: Namespace) -> tuple[list[str], list[int]]:
    chosen = [name for name in options.algorithms.split(",") if name]
    if unknown := set(chosen) - ALGORITHMS.keys():
        raise ConfigError(f"--algorithms {min(unknown)}: there are {', '.join(ALGORITHMS)}")
    try:
        counts = sorted({int(n) for n in options.workers.split(",") if n})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise ConfigError(f"--workers {options.workers}: numbers are needed, as 1,2,4")
    return chosen, counts


def _round(
    algorithm: str,
    options: Namespace,
    counts: list[int],
    number: int,
    rows: Pairs,
) -> None:
    common = {"env": options.env, "num_envs": options.num_envs, "quiet": True}
    one = build(algorithm, **common, workers=1, engine="inline")
    check(one)
    costs = _costs.measure(one)
    here = Cluster(hosts=1, cores=len(os.sched_getaffinity(0)))
    for name in ALGORITHMS[algorithm]:
        spec = strategies.SPECS[name]
        for workers in [n for n in counts if (n == 1) == spec.one_worker]:
            load = load_of(one, name, workers)
            if load is None:
                continue
            planned = spec.load_model()(costs, load, here).steps_per_second
            run = _real(one, name, load, planned * options.seconds, 1 + number)
            pair = planned, measured([run])["steps_per_second"]
            rows.setdefault((algorithm, name, workers), []).append(pair)
            said = f"round {number + 1}  {algorithm:<8}{name:<16}{workers:>3} workers"
            print(f"{said}  planned {pair[0]:>9,.0f}  measured {pair[1]:>9,.0f}", flush=True)


def _real(one: Experiment, strategy: str, load: Load, steps: float, seed: int) -> Experiment:
    """The run that was planned."""
    engine = "local" if load.workers > 1 else "inline"
    run = dataclasses.replace(
        one.run, strategy=strategy, workers=Workers(load.workers), engine=engine,
        num_envs=load.envs * load.actors, seed=seed, tensorboard=False,
    )  # fmt: skip
    whole = dataclasses.replace(one, run=run)
    batch = strategies.SPECS[strategy].batch(run)
    length = max(_UPDATES, math.ceil(steps / batch)) * batch + batch
    whole = dataclasses.replace(whole, run=dataclasses.replace(run, steps=length))
    check(whole)
    return whole


def _row(
    algorithm: str, strategy: str, workers: int, pairs: list[tuple[float, float]]
) -> dict[str, Any]:
    ratios = [planned / real for planned, real in pairs]
    return {
        "algorithm": algorithm,
        "strategy": strategy,
        "workers": workers,
        "planned": round(median([p for p, _ in pairs]), 1),
        "measured": round(median([m for _, m in pairs]), 1),
        "ratio": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    worst = min(rows, key=lambda row: min(row["ratio"], 1 / row["ratio"]))
    words = (f"plan over measurement or the other way round, at worst "
             f"({worst['strategy']}, {worst['workers']} workers)")  # fmt: skip
    return [Claim(words, min(worst["ratio"], 1 / worst["ratio"]), WITHIN)]


def table(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"{facts['env']}, {facts['num_envs']} environments; {facts['rounds']} rounds",
        "",
        f"{'algorithm':<11}{'strategy':<16}{'workers':>8}{'planned':>11}{'measured':>11}{'ratio':>8}"
        f"{'least':>8}{'most':>8}",
    ]
    for row in facts["rows"]:
        lines.append(
            f"{row['algorithm']:<11}{row['strategy']:<16}{row['workers']:>8}{row['planned']:>11,.0f}"
            f"{row['measured']:>11,.0f}{row['ratio']:>8.2f}{row['least']:>8.2f}{row['most']:>8.2f}"
        )
    machine = facts["machine"]
    lines += ["", *verdicts(facts["claims"])]
    lines += [f"NOT JUDGED  {reason}" for reason in facts["not_judged"]]
    lines.append(f"on {machine['cores']} cores of {machine['cpu']}")
    return lines
