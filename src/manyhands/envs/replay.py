"""How a running episode is gone on with after a resume.

Every episode has its own seed, so `reset(seed)` and the same actions play it again: what has to be
kept is the actions of the running episodes. One row of a preallocated array is written for each
step of all environments together, about 0.3 µs (a step of one CartPole takes 10).

An environment that has `get_state()` and `set_state(state)` itself is put back by these, which also
brings back what it remembers from one episode to the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from manyhands import wire
from manyhands.errors import ConfigError
from manyhands.trees import Array
from manyhands.types import Obs

LONGEST = 100_000  # steps of an episode that is played again; a longer one is not gone on with
SECONDS = 30.0  # that playing again may take on a worker; the others wait for it
_ROOM, _MOST_BYTES = 256, 256 << 20

# Wrappers whose own state is known: they count steps, or remember that there was a reset.
_KNOWN_WRAPPERS = ("OrderEnforcing", "PassiveEnvChecker", "TimeLimit")


class ActionLog:
    """The actions since the oldest running episode began, [room, B, ...]; the oldest go first."""

    def __init__(self) -> None:
        self._rows: Array = np.zeros(0)
        self._room = 0
        self._first = 0  # the clock at row 0
        self._at = 0  # rows that are in use

    def add(self, sent: Array, starts: Sequence[int]) -> None:
        """What was sent in this step; `starts` is when the running episodes began."""
        if self._at >= self._room:
            self._make_room(sent, starts)
        self._rows[self._at] = sent
        self._at += 1

    def of(self, env: int, start: int) -> Array | None:
        """The actions of an env since `start`; None if that is too long ago."""
        if start < self._first:
            return None
        return self._rows[start - self._first : self._at, env].copy()

    def load(self, clock: int, actions: Sequence[Array | None]) -> None:
        """Go on from what `of` gave for each env."""
        kept = [(i, a) for i, a in enumerate(actions) if a is not None]
        length = max((len(a) for _, a in kept), default=0)
        self._first, self._at, self._room = clock - length, length, 0
        if kept:
            shape, dtype = kept[0][1].shape[1:], kept[0][1].dtype
            self._rows = np.zeros((length, len(actions), *shape), dtype)
            for i, a in kept:
                self._rows[length - len(a) :, i] = a
            self._room = length

    def _make_room(self, sent: Array, starts: Sequence[int]) -> None:
        clock = self._first + self._at
        longest = min(LONGEST, max(_ROOM, _MOST_BYTES // max(1, sent.nbytes)))
        oldest = max(min(starts), clock - longest)
        kept = self._rows[max(0, oldest - self._first) : self._at]
        if self._room == 0 or len(kept) > self._room // 2:
            self._room = max(_ROOM, 2 * len(kept))
            rows = np.zeros((self._room, *sent.shape), sent.dtype)
            if len(kept):
                rows[: len(kept)] = kept
            self._rows = rows
        else:
            self._rows[: len(kept)] = kept  # numpy minds that the two may overlap
        self._first, self._at = clock - len(kept), len(kept)


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
    if isinstance(one, dict):
        return all(np.array_equal(part, other[key]) for key, part in one.items())
    return bool(np.array_equal(one, other))


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
