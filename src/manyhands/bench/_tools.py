"""Shared by the benchmarks: the machine they ran on, medians, and claims that may fail."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands import __version__


def fingerprint() -> dict[str, Any]:
    """The machine and versions, without which a number means nothing."""
    return {
        "manyhands": __version__,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "load": round(os.getloadavg()[0], 2),  # what else ran on the machine at the start
    }


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux: platform knows something
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def seconds_of(action: Callable[[], Any], repeats: int) -> list[float]:
    """Wall time of each of several calls."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken


def median(values: list[float]) -> float:
    return statistics.median(values)


@dataclass(frozen=True)
class Claim:
    """What we say of ourselves, what was measured, and whether that holds."""

    words: str
    measured: float
    at_least: float

    @property
    def holds(self) -> bool:
        return self.measured >= self.at_least

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "claim": self.words,
            "measured": round(self.measured, 3),
            "at_least": self.at_least,
            "holds": self.holds,
        }


def verdicts(claims: list[dict[str, Any]]) -> list[str]:
    """One line a claim: HOLDS or FAILS, with both numbers."""
    return [
        f"{'HOLDS' if c['holds'] else 'FAILS'}  {c['claim']}: "
        f"{c['measured']:.2f} (claimed: at least {c['at_least']:g})"
        for c in claims
    ]
