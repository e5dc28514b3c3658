"""Environments that say themselves what their state is, and how a checkpoint keeps it.

An environment that has `get_state()` and `set_state(state)` is put back by these, which also brings
back what it remembers from one episode to the next. All others play their running episode again:
see `ActionLog`.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np

from manyhands import trees, wire
from manyhands.errors import ConfigError
from manyhands.types import Obs

# Wrappers whose own state is known: they count steps, or remember that there was a reset.
_KNOWN_WRAPPERS = ("OrderEnforcing", "PassiveEnvChecker", "TimeLimit")


def own_state(env: gymnasium.Env[Any, Any]) -> dict[str, Any] | None:
    """What the environment itself says its state is; None where its actions must do.

    These are environments that do not say, that are wrapped too far, or whose state is no plain
    data and arrays.
    """
    if not keeps_itself(env):
        return None
    inner = env.unwrapped
    generator = getattr(inner, "_np_random", None)
    rng = generator.bit_generator.state if isinstance(generator, np.random.Generator) else None
    kept = {"state": inner.get_state(), "rng": rng}
    try:
        wire.encode(kept)
    except ConfigError:
        return None
    return kept


def put_back(env: gymnasium.Env[Any, Any], kept: dict[str, Any], seed: int | None,
             length: int) -> None:  # fmt: skip
    """Put an environment where `own_state` found it, `length` steps into its episode."""
    env.reset(seed=seed)
    inner = env.unwrapped
    inner.set_state(kept["state"])
    if kept["rng"] is not None:
        inner.np_random.bit_generator.state = kept["rng"]
    for wrapper in _wrappers(env):
        if type(wrapper).__name__ == "TimeLimit":
            wrapper._elapsed_steps = length


def keeps_itself(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether `get_state()` and `set_state(state)` are there, and no wrapper hides more state."""
    inner = env.unwrapped
    if any(type(wrapper).__name__ not in _KNOWN_WRAPPERS for wrapper in _wrappers(env)):
        return False
    return _takes(inner, "get_state", 0) and _takes(inner, "set_state", 1)


def same(one: Obs, other: Obs) -> bool:
    """Whether two observations are equal to the bit."""
    equal: list[bool] = []
    trees.map(lambda a, b: equal.append(np.array_equal(a, b)), one, other)
    return all(equal)


def _wrappers(env: gymnasium.Env[Any, Any]) -> list[Any]:
    found = []
    while isinstance(env, gymnasium.Wrapper):
        found.append(env)
        env = env.env
    return found


def _takes(inner: Any, name: str, count: int) -> bool:
    """Whether there is a method of that name with so many arguments that must be given."""
    method = getattr(inner, name, None)
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # written in C, and silent about itself
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    return len(needed) == count
