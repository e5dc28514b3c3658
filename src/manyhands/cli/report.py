"""`manyhands report DIR`: one HTML page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from manyhands.errors import ConfigError

DESCRIPTION = """Write one HTML page about a run: numbers, learning curves, measures, maps of policy
and value over the states, an episode and its film, where the time went, workers, events, how to
repeat it.

Everything is inside the file: it can be sent, and opened without a network. Runs that failed or go
on get a page, too. More folders are compared with the first one: in the curves, and in the table of
times by number of workers.
"""

EXAMPLES = """examples:
  manyhands report runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands report RUN-WITH-1-WORKER RUN-WITH-2 RUN-WITH-4 --out scaling.html
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.out and Path(options.out).suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {options.out}: give a name that ends in .html")
    from manyhands.viewing.video import go_headless

    go_headless()  # before the environment is made for the first time
    from manyhands.viewing.report import write_report

    path = write_report(options.dirs, options.out, video=not options.no_video)
    print(f"written to {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="manyhands report",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "dirs", metavar="DIR", nargs="+", help="folder of the run, and of others to compare"
    )
    parser.add_argument(
        "--out", metavar="FILE.html", help="(default: report.html in the first DIR)"
    )
    parser.add_argument("--no-video", action="store_true", help="no film of an episode")
    return parser
