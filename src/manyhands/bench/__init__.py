"""Benchmarks: one file each, found by name.

A file `NAME.py` here is `manyhands bench NAME`. Its first docstring line is its line in the help;
it has

    add_options(parser)      its own options
    measure(options) -> dict what was measured, ready for JSON; "claims" is a list of `Claim.facts`
    table(facts) -> lines    the same for people

Files that begin with an underscore are shared tools.
"""

from __future__ import annotations

import difflib
import importlib
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
