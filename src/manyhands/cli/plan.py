"""`manyhands plan ALGORITHM --env ID`: what N workers on given hosts would do, on paper.

Costs are measured here, in about a minute (`--measure`), and kept in a file; everything else is
simulated (strategies/simulate.py).

    one worker     the whole batch, half of it, and half of it twice at once: what a call of
                   the policy costs, a step, an update, a row; and how processors share
    two workers    how long they take to meet, to sum gradients, to hand over rows
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from manyhands import support
from manyhands.config import Experiment, build, names_of
from manyhands.errors import ConfigError
from manyhands.strategies import registry as strategies
from manyhands.strategies.simulate import Cluster, Costs, Load, Outcome

MOST = 4096
_SECONDS = 5.0  # of each run that is measured
_PROBE_UPDATES = 4

Row = tuple[str, int, Load, Outcome]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="manyhands plan",
        usage="manyhands plan ALGORITHM --env ID [options of train] [options below]",
        description="What 1 to 4,096 workers would do, by simulation from costs measured here.",
        epilog="example: manyhands plan ppo --env CartPole-v1 --num-envs 64 --measure --hosts 4 "
        "--cores 16 --rate 50000",
        allow_abbrev=False,
    )
    p.add_argument("--measure", action="store_true", help="measure first (about a minute)")
    p.add_argument("--costs", default="costs.json", metavar="FILE",
                   help="where measured costs are kept (default: %(default)s)")  # fmt: skip
    p.add_argument("--hosts", type=int, default=1, metavar="H", help="machines (default: 1)")
    p.add_argument("--cores", type=int, default=os.cpu_count() or 1, metavar="C",
                   help="processors of each (default: as here, %(default)s)")  # fmt: skip
    p.add_argument("--link-mbit", type=float, default=1000.0, metavar="X",
                   help="of a machine's network, each way (default: %(default)g)")  # fmt: skip
    p.add_argument("--link-latency-us", type=float, default=100.0, metavar="X",
                   help="from machine to machine (default: %(default)g)")  # fmt: skip
    p.add_argument("--rate", type=float, metavar="X",
                   help="steps a second: who reaches so many with the fewest workers")  # fmt: skip
    p.add_argument("--picture", metavar="FILE", help="draw it: a .png, .svg or .pdf")
    p.add_argument("--json", metavar="FILE", help="write the numbers to this file too")
    return p


def plan(argv: list[str]) -> int:
    from manyhands.cli.train import parse
    from manyhands.config import validate

    if not argv or argv[0] in ("-h", "--help"):
        parser().print_help()
        return 0 if argv else 2
    options, words = parser().parse_known_args(argv)
    if min(options.hosts, options.cores) < 1 or options.link_mbit <= 0:
        raise ConfigError("--hosts, --cores and --link-mbit must be positive")
    one = parse([*words, "--workers", "1", "--strategy", "", "--engine", "inline"])
    validate.check(one)
    costs = measured_costs(one, options.costs) if options.measure else load(one, options.costs)
    cluster = Cluster(options.hosts, options.cores, options.link_latency_us * 1e-6,
                      options.link_mbit * 125e3)  # fmt: skip
    rows = simulate(one, costs, cluster)
    print("\n".join(table(one, cluster, rows, options.rate)))
    if options.json:
        facts = [dataclasses.asdict(o) | {"strategy": s, "workers": n} for s, n, _, o in rows]
        with open(options.json, "w") as file:
            json.dump({"costs": dataclasses.asdict(costs), "rows": facts}, file, indent=2)
    if options.picture:
        draw(one, rows, cluster, options.picture)
        print(f"drawn in {options.picture}")
    return 0


# -- simulation ------------------------------------------------------------------------------------


def simulate(one: Experiment, costs: Costs, cluster: Cluster) -> list[Row]:
    """Every strategy of the algorithm, for 1, 2, 4 … workers."""
    rows: list[Row] = []
    for name in support.strategies_of(one.algorithm):
        spec = strategies.SPECS[name]
        model = spec.load_model()
        for workers in [1] if spec.one_worker else [2**k for k in range(1, MOST.bit_length())]:
            load = load_of(one, spec.name, workers)
            if load is not None:
                rows.append((spec.name, workers, load, model(costs, load, cluster)))
    return rows


def load_of(one: Experiment, strategy: str, workers: int) -> Load | None:
    """Environments are divided among those that act; one each where there are more of these."""
    run = dataclasses.replace(one.run, strategy=strategy, workers=workers)
    actors, length = run.actors, run.rollout_length or 1
    if actors < 1:
        return None
    envs = max(1, run.num_envs // actors)
    whole = dataclasses.replace(run, num_envs=envs * actors, rollout_length=length)
    messages = max(1, strategies.SPECS[strategy].batch(whole) // (envs * length))
    return Load(workers, actors, envs, length, messages, run.queue, run.max_lag)


def table(one: Experiment, cluster: Cluster, rows: Sequence[Row], rate: float | None) -> list[str]:
    wire = f", {cluster.bandwidth / 125e3:g} Mbit/s and {cluster.latency * 1e6:g} µs between them"
    lines = [
        f"{one.algorithm} on {one.run.env}, {cluster.hosts} host{'s' * (cluster.hosts > 1)} of "
        f"{cluster.cores} processors{wire if cluster.hosts > 1 else ''}",
        "",
        f"{'strategy':<16}{'workers':>8}{'steps/s':>12}{'an update':>11}{'lag':>7}{'MB/s':>9}  "
        "bottleneck",
    ]
    for name, workers, load, out in rows:
        batch = load.rows * (load.actors if strategies.SPECS[name].synchronous else load.unrolls)
        lines.append(
            f"{name:<16}{workers:>8,}{out.steps_per_second:>12,.0f}{batch:>11,}{out.lag:>7.1f}"
            f"{out.bytes_per_second / 1e6:>9.2f}  {out.bottleneck}"
        )
    grown = [n for _, n, load, _ in rows if load.actors > one.run.num_envs]
    if grown:
        lines += ["", f"from {min(grown):,} workers on there are more of them than --num-envs "
                  f"{one.run.num_envs}: each is given one, and updates grow"]  # fmt: skip
    if cluster.hosts * cluster.cores < MOST:
        lines.append(f"beyond {cluster.hosts * cluster.cores:,} workers they share processors")
    if rate:
        lines += ["", cheapest(rows, rate)]
    return lines


def cheapest(rows: Sequence[Row], rate: float) -> str:
    """The fewest workers that make so many steps a second; of several strategies, the fastest."""
    enough = [row for row in rows if row[3].steps_per_second >= rate]
    if not enough:
        best = max(rows, key=lambda row: row[3].steps_per_second)
        return (
            f"nobody reaches {rate:,.0f} steps/s: the most is {best[3].steps_per_second:,.0f}, by "
            f"{best[0]} with {best[1]:,} workers; the bottleneck there: {best[3].bottleneck}"
        )
    name, workers, _, out = min(enough, key=lambda row: (row[1], -row[3].steps_per_second))
    return (
        f"{rate:,.0f} steps/s: --strategy {name} --workers {workers} is enough "
        f"({out.steps_per_second:,.0f})"
    )


def draw(one: Experiment, rows: Sequence[Row], cluster: Cluster, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == name]
        axes.plot([r[1] for r in mine], [r[3].steps_per_second for r in mine], "o-", label=name)
    axes.axvline(cluster.hosts * cluster.cores, color="grey", linestyle=":", label="processors")
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="steps a second, simulated",
             title=f"{one.algorithm} on {one.run.env}")  # fmt: skip
    axes.legend()
    figure.savefig(file, bbox_inches="tight", dpi=120)
    pyplot.close(figure)


# -- measurement -----------------------------------------------------------------------------------


def load(one: Experiment, file: str) -> Costs:
    """Costs that were measured before, of this very run."""
    try:
        with open(file, encoding="utf-8") as text:
            facts = json.load(text)
        if facts["of"] != _key(one):
            raise ConfigError(
                f"{file} was measured for {facts['of']}, and this is {_key(one)}; add --measure"
            )
        return Costs(**facts["costs"])
    except FileNotFoundError:
        raise ConfigError(
            f"nothing has been measured ({file} is not there); add --measure"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no file of costs ({error}); add --measure") from error


def measured_costs(one: Experiment, file: str) -> Costs:
    from manyhands.bench._tools import others_now

    began, others = time.monotonic(), others_now()
    costs = _measure(one)
    with open(file, "w", encoding="utf-8") as text:
        json.dump({"of": _key(one), "costs": dataclasses.asdict(costs)}, text, indent=2)
        text.write("\n")
    print(f"measured in {time.monotonic() - began:.0f} s, kept in {file}\n")
    if others is not None and others > 0.2:
        print(f"other programs kept {others:.1f} processors busy: measure again when they rest\n")
    return costs


def _key(one: Experiment) -> str:
    run = one.run
    return f"{one.algorithm} {run.env} num_envs={run.num_envs} length={run.rollout_length}"


def _measure(one: Experiment) -> Costs:
    from manyhands.bench.scaling import measured
    from manyhands.engines.launch import launch

    whole, half = _copies(one, 1), _copies(one, 2)
    rate = measured([_of_length(whole, _PROBE_UPDATES * one.run.batch)])["steps_per_second"]
    runs = []
    for experiments in ([whole], [half], [half, half]):
        steps = max(_PROBE_UPDATES * one.run.batch, int(rate * _SECONDS / len(experiments)))
        seeded = [_of_length(e, steps, seed=1 + i) for i, e in enumerate(experiments)]
        runs.append(measured(seeded))
    big, small, both = (_seconds(run, len_) for run, len_ in zip(runs, (1, 1, 2), strict=True))
    envs, batch = whole.run.num_envs, whole.run.batch
    fewer, rows = half.run.num_envs, half.run.batch
    # Seconds of one row of environments, and of one update: two sizes give the part that is fixed.
    act, step = _line(big["rollout"] * envs, envs, small["rollout"] * fewer, fewer)
    update, row = _line(big["learn"] * batch, batch, small["learn"] * rows, rows)
    alone = small["rollout"] + small["learn"]
    sizes = _sizes(one)
    between = launch(_meet, sizes["weight_bytes"], workers=2, engine="local", timeout=60)[0]
    return Costs(
        act=act,
        step=step,
        update=update,
        update_row=row,
        other=big["other"] * batch,
        apply=_apply_seconds(sizes["weight_bytes"]),
        crowd=max(1.0, (both["rollout"] + both["learn"]) / alone),
        **sizes,
        **between,
    )


def _copies(one: Experiment, parts: int) -> Experiment:
    """One worker's part of the run, if there were so many: its rows, its part of minibatches."""
    run = one.run
    plain: dict[str, Any] = {n: getattr(run, n) for n in names_of(type(run))}
    own = {n: getattr(one.options, n) for n in names_of(type(one.options))}
    plain["num_envs"] = max(1, run.num_envs // parts)
    for name in ("minibatch", "value_minibatch"):
        if name in own:
            own[name] = max(1, own[name] // parts)
    return build(one.algorithm, **plain | own)


def _of_length(one: Experiment, steps: int, seed: int = 1) -> Experiment:
    run = dataclasses.replace(one.run, steps=steps, seed=seed, quiet=True, tensorboard=False,
                              target_return=None, run_dir="")  # fmt: skip
    return dataclasses.replace(one, run=run)


def _seconds(run: dict[str, Any], runs: int) -> dict[str, float]:
    """Of one step, by phase; of the first of several runs at once."""
    steps = run["steps_per_second"] / runs * run["seconds"]
    phases = run["phases"]
    other = run["seconds"] - phases["rollout"] - phases["optimisation"]
    return {
        "rollout": phases["rollout"] / steps,
        "learn": phases["optimisation"] / steps,
        "other": max(0.0, other) / steps,
    }


def _line(y1: float, x1: int, y2: float, x2: int) -> tuple[float, float]:
    """Seconds that are always spent, and seconds for each more; neither is negative."""
    if x1 == x2:
        return 0.0, y1 / x1
    slope = min(max(0.0, (y1 - y2) / (x1 - x2)), y1 / x1)
    return y1 - slope * x1, slope


def _sizes(one: Experiment) -> dict[str, int]:
    """Bytes of a row and of the weights, and how often workers would meet in an update."""
    from gymnasium.spaces.utils import flatdim

    from manyhands.envs import make_vec

    backend: Any = one.run.env_backend
    envs = make_vec(one.run.env, 1, seed=1, backend=backend, **one.run.env_kwargs)
    try:
        observed, acted = flatdim(envs.observation_space), flatdim(envs.action_space)
    finally:
        envs.close()
    widths = [observed, *(one.run.hidden or (64, 64)), acted]
    weights = 2 * sum((a + 1) * b for a, b in itertools.pairwise(widths))
    own = one.options
    batch = one.run.batch
    meetings = 1
    if minibatch := getattr(own, "minibatch", 0):
        meetings = own.epochs * math.ceil(batch / minibatch)
    elif hasattr(own, "cg_iterations"):
        meetings = own.cg_iterations + 4 + own.value_epochs * math.ceil(batch / own.value_minibatch)
    return {"row_bytes": 4 * (observed + acted + 6), "weight_bytes": 4 * weights,
            "meetings": meetings, "batch": batch}  # fmt: skip


def _meet(size: int) -> dict[str, float]:
    """In each of two workers: a barrier, and the mean of so many bytes."""
    import numpy as np

    from manyhands.bench._tools import median, seconds_of
    from manyhands.parallel import Parallel

    par = Parallel()
    array, large = np.zeros(size // 4, np.float32), np.zeros(1 << 22, np.uint8)
    seconds_of(lambda: par.mean(array), 20)
    mean = median(seconds_of(lambda: par.mean(array), 200))
    moved = median(seconds_of(lambda: par.gather(large), 20))
    bandwidth = 2 * large.nbytes / moved
    return {"latency": max(1e-6, mean - 2 * size / bandwidth), "bandwidth": bandwidth}


def _apply_seconds(size: int) -> float:
    """A step of Adam over so many bytes of parameters."""
    import numpy as np

    from manyhands.bench._tools import median, seconds_of

    w, g, m, v = (np.ones(size // 4, np.float32) for _ in range(4))

    def adam() -> None:
        m[:] = 0.9 * m + 0.1 * g
        v[:] = 0.999 * v + 0.001 * g * g
        w[:] -= 1e-3 * m / (np.sqrt(v) + 1e-5)

    return float(median(seconds_of(adam, 50)))
