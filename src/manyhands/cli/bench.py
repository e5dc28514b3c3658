"""`manyhands bench NAME [--json FILE]`: measure it on this machine."""

from __future__ import annotations

import argparse
import json
import os

from manyhands import bench as benchmarks
from manyhands.errors import ConfigError

HELP = """usage: manyhands bench NAME [--json FILE] [options of NAME]

Measure speeds on this machine. `manyhands bench NAME --help` explains each:

{rows}
"""


def bench(argv: list[str]) -> int:
    """0 also when a claim fails: a benchmark reports, it does not judge the machine."""
    if argv and argv[0] not in ("-h", "--help"):
        return _run(argv[0], argv[1:])
    print(
        HELP.format(
            rows="\n".join(f"  {n:<12} {benchmarks.summary(n)}" for n in benchmarks.names())
        )
    )
    return 0 if argv else 2


def _run(name: str, argv: list[str]) -> int:
    benchmark = benchmarks.find(name)
    parser = argparse.ArgumentParser(
        prog=f"manyhands bench {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write what was measured to this file too")
    benchmark.add_options(parser)
    options = parser.parse_args(argv)
    if options.json:  # before minutes of measuring, not after
        folder = os.path.dirname(os.path.abspath(options.json))
        if not os.path.isdir(folder):
            raise ConfigError(f"--json {options.json}: there is no folder {folder}")
    facts = benchmark.measure(options)
    print("\n".join(benchmark.table(facts)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(facts, file, indent=2, ensure_ascii=False)
            file.write("\n")
        print(f"written to {options.json}")
    return 0
