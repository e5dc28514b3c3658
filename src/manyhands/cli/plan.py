"""`manyhands plan ALGORITHM --env ID`: what N workers on given hosts would do, on paper.

Costs are measured here, in less than a minute (`--measure`, bench/_costs.py), and kept in a file;
everything else is simulated (strategies/simulate.py).
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

from manyhands import support
from manyhands.config import Experiment, join_faults
from manyhands.errors import ConfigError
from manyhands.strategies import registry as strategies
from manyhands.strategies.simulate import Cluster, Costs, Load, Outcome, load_of

MOST = 4096

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
    p.add_argument("--measure", action="store_true", help="measure first (less than a minute)")
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
    check(options, words)
    one = parse([*words, "--workers", "1", "--strategy", "", "--engine", "inline"], "plan")
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


def check(options: argparse.Namespace, words: Sequence[str]) -> None:
    """ConfigError with every fault, before anything is measured."""
    faults = [
        f"--{name} {getattr(options, name)}: at least 1 is needed"
        for name in ("hosts", "cores")
        if getattr(options, name) < 1
    ]
    for name, zero in (("link_mbit", False), ("link_latency_us", True), ("rate", False)):
        value = getattr(options, name)
        if value is not None and not (0 < value < math.inf or (zero and value == 0)):
            faults.append(
                f"--{name.replace('_', '-')} {value:g}: a number {'from' if zero else 'above'} 0 "
                f"{'on ' if zero else ''}is needed"
            )
    for word in words:
        if (name := word.split("=")[0]) in ("-n", "--workers", "--strategy", "--engine"):
            faults.append(
                f"{name}: plan goes through every strategy with 1 to {MOST:,} workers; leave it out"
            )
    if options.picture and os.path.splitext(options.picture)[1] not in (".png", ".svg", ".pdf"):
        faults.append(f"--picture {options.picture}: a .png, .svg or .pdf is expected")
    for file in (options.costs if options.measure else "", options.json, options.picture):
        folder = os.path.dirname(os.path.abspath(file)) if file else ""
        if folder and (os.path.isdir(file) or not os.access(folder, os.W_OK)):
            faults.append(f"{file} cannot be written; give a file in a folder that is there")
    if faults:
        raise ConfigError(join_faults(faults))


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
        tables = {"meet", "crowd"} & facts["costs"].keys()
        rows = {name: tuple(map(tuple, facts["costs"][name])) for name in tables}
        costs = Costs(**facts["costs"] | rows)
        for name, value in dataclasses.asdict(costs).items():
            numbers = itertools.chain(*value) if name in ("meet", "crowd") else [value]
            least = 1 if name in ("batch", "bandwidth") else 0
            if not all(least <= number < math.inf for number in numbers):
                raise ValueError(f"{name} is {value}")
        return costs
    except FileNotFoundError:
        raise ConfigError(
            f"nothing has been measured ({file} is not there); add --measure"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no file of costs ({error}); add --measure") from error


def measured_costs(one: Experiment, file: str) -> Costs:
    from manyhands.bench._costs import measure
    from manyhands.bench._tools import others_now

    began, others = time.monotonic(), others_now()
    costs = measure(one)
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
