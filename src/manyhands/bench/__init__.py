"""Benchmarks: one file each, found by name.

A file `NAME.py` here is `manyhands bench NAME`. Its first docstring line is its line in the help;
it has

    add_options(parser)      its own options
    measure(options) -> dict what was measured, ready for JSON; "claims" is a list of `Claim.facts`
    table(facts) -> lines    the same for people

Files that begin with an underscore are shared tools.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import pkgutil
from argparse import ArgumentParser, Namespace
from typing import Any, Protocol

from manyhands.errors import ConfigError


class Benchmark(Protocol):
    """What a benchmark's file offers."""

    __doc__: str | None

    def add_options(self, parser: ArgumentParser) -> None: ...

    def measure(self, options: Namespace) -> dict[str, Any]: ...

    def table(self, facts: dict[str, Any]) -> list[str]: ...


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find(name: str) -> Benchmark:
    """The benchmark of that name; ConfigError with the nearest when there is none."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean `manyhands bench {near[0]}`?" if near else _LIST
        raise ConfigError(f"there is no benchmark {name!r}; {hint}")
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return module  # type: ignore[no-any-return]


def summary(name: str) -> str:
    """The first line of the benchmark's own words."""
    return (find(name).__doc__ or "").strip().partition("\n")[0]


_LIST = "type: manyhands bench --help"


# -- the command ----------------------------------------------------------------------------------

HELP = """usage: manyhands bench NAME [--json FILE] [options of NAME]

Measure speeds on this machine. `manyhands bench NAME --help` explains each:

{rows}
"""


def bench(argv: list[str]) -> int:
    """0 also when a claim fails: a benchmark reports, it does not judge the machine."""
    if argv and argv[0] not in ("-h", "--help"):
        return _run(argv[0], argv[1:])
    print(HELP.format(rows="\n".join(f"  {n:<12} {summary(n)}" for n in names())))
    return 0 if argv else 2


def _run(name: str, argv: list[str]) -> int:
    benchmark = find(name)
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
