"""`manyhands plot DIR...`: learning curves of one or many runs."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """Draw learning curves: against environment steps, and against time.

Runs that differ in nothing but their seed become one curve: the mean over seeds, a band of one
standard deviation over them, and a thin line for each. Runs that differ in anything else are curves
of their own, and the legend says in what. A single run's band is the deviation of its episodes.
"""

EXAMPLES = """examples:
  manyhands plot runs/CartPole-v1/ppo-allreduce/*             all seeds as one curve
  manyhands plot runs/CartPole-v1/*/* --out cartpole.pdf      strategies compared, for a paper
  manyhands plot RUN --metric entropy --x steps               any column of metrics.csv
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    from manyhands.viewing.curves import plot
    from manyhands.viewing.runs import read_run

    runs = [read_run(path) for path in options.dirs]
    name = "curves.png" if options.metric == "return" else f"{options.metric.replace('/', '-')}.png"
    out = Path(options.out or (runs[0].path / name if len(runs) == 1 else name))
    plot(runs, out, x=options.x, metric=options.metric, window=options.window)
    print(f"written to {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="manyhands plot",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dirs", metavar="DIR", nargs="+", help="folders of runs, finished or not")
    parser.add_argument(
        "--x",
        choices=("steps", "time", "both"),
        default="both",
        help="what to draw against (default: both, side by side)",
    )
    parser.add_argument(
        "--metric",
        default="return",
        metavar="NAME",
        help="return (default), or a name of metrics.jsonl",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=100,
        metavar="N",
        help="episodes in the rolling mean of returns (default: 100)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="FILE.png, .svg or .pdf (default: curves.png, in DIR if there is one DIR)",
    )
    return parser
