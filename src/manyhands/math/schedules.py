"""Numbers that change over a run, from a spec that fits on a command line.

    3e-4                     constant
    "linear:3e-4"            from 3e-4 to zero over the run
    "linear:3e-4:1e-5"       from 3e-4 to 1e-5
    "warmup:3e-4:0.1"        from zero to 3e-4 over the first tenth, then constant
    "warmup-linear:3e-4:0.1" the same rise, then down to zero at the end

A schedule is a function of progress, from 0 to 1. CRUCIAL: progress is env steps of *all* workers
over the steps of the whole run; a count of one's own would give each worker its own learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from manyhands.errors import ConfigError

Schedule = Callable[[float], float]
Spec = float | int | str

_FORMS = (
    "a number, linear:START, linear:START:END, warmup:VALUE:FRACTION, warmup-linear:VALUE:FRACTION"
)


def constant(value: float) -> Schedule:
    return lambda progress: value


def linear(start: float, end: float = 0.0) -> Schedule:
    def at(progress: float) -> float:
        p = _within(progress)
        return (1.0 - p) * start + p * end  # exact at both ends

    return at


def warmup(fraction: float, then: Schedule) -> Schedule:
    """`then`, scaled from zero up to one over the first `fraction` of the run."""

    def at(progress: float) -> float:
        p = _within(progress)
        return then(p) * (min(1.0, p / fraction) if fraction > 0 else 1.0)

    return at


def make_schedule(spec: Spec) -> Schedule:
    """The schedule a spec stands for; ConfigError with the known forms if it is none."""
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return constant(float(spec))
    name, *numbers = str(spec).split(":")
    try:
        if not numbers:
            return constant(_number(name))
        values = [_number(x) for x in numbers]
    except ValueError as fault:
        raise _unknown(spec) from fault
    match name, values:
        case "constant", [value]:
            return constant(value)
        case "linear", [start]:
            return linear(start)
        case "linear", [start, end]:
            return linear(start, end)
        case "warmup", [value, fraction] if 0.0 <= fraction <= 1.0:
            return warmup(fraction, constant(value))
        case "warmup-linear", [value, fraction] if 0.0 <= fraction < 1.0:
            # The fall begins where the rise ends: the peak is the value that was asked for.
            fall = linear(value)
            return warmup(fraction, lambda p: fall((p - fraction) / (1.0 - fraction)))
    raise _unknown(spec)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _within(progress: float) -> float:
    return min(1.0, max(0.0, progress))


def _unknown(spec: Spec) -> ConfigError:
    return ConfigError(f"{spec!r} is no schedule; give {_FORMS}")
