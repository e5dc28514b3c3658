"""Environments that give something else than they should, at a step of one's choice."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

GOOD = np.array([0.1, 0.2, 0.3], np.float32)
_BUFFER = np.zeros(3, np.float32)  # used again and again


def _obs(value: Any) -> Callable[..., Any]:
    return lambda obs, reward, term, trunc, info: (value, reward, term, trunc, info)


def _reward(value: Any) -> Callable[..., Any]:
    return lambda obs, reward, term, trunc, info: (obs, value, term, trunc, info)


def _flags(term: Any, trunc: Any = False) -> Callable[..., Any]:
    return lambda obs, reward, _, __, info: (obs, reward, term, trunc, info)


def _all(value: Any) -> Callable[..., Any]:
    return lambda *_: value


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, Callable[..., Any]] = {
    "obs shape": _obs(np.zeros(4, np.float32)),
    "obs scalar": _obs(np.float32(1.0)),
    "obs two dimensions": _obs(np.zeros((2, 3), np.float32)),
    "obs empty": _obs(np.zeros(0, np.float32)),
    "obs nothing": _obs(None),
    "obs text": _obs("here"),
    "obs dict": _obs({"x": 1}),
    "obs nan": _obs(np.array([0, NAN, 0], np.float32)),
    "obs inf": _obs(np.array([0, INF, 0], np.float32)),
    "obs too large for float32": _obs(np.array([0, 1e300, 0])),
    "obs objects": _obs(np.array([0, object(), 0], dtype=object)),
    "obs objects that are numbers": _obs(np.array([0, 1, 0], dtype=object)),
    "obs complex": _obs(np.array([0, 1j, 0])),
    "obs words": _obs(np.array(["a", "b", "c"])),
    "obs doubles": _obs(GOOD.astype(np.float64)),
    "obs big-endian": _obs(GOOD.astype(">f4")),
    "obs list": _obs([0.0, 1.0, 2.0]),
    "obs strided": _obs(np.zeros(6, np.float32)[::2]),
    "obs ints": _obs(np.array([1, 2, 3])),
    "reward nan": _reward(NAN),
    "reward inf": _reward(-INF),
    "reward too large for float32": _reward(1e300),
    "reward nothing": _reward(None),
    "reward text": _reward("1.0"),
    "reward array of one": _reward(np.array([1.0])),
    "reward array": _reward(np.zeros(3)),
    "reward complex": _reward(1j),
    "reward bool": _reward(True),
    "reward double": _reward(np.float64(0.5)),
    "reward 0-d": _reward(np.array(0.5)),
    "flags numpy": _flags(np.bool_(True)),
    "flags ints": _flags(1, 0),
    "flags nothing": _flags(None, None),
    "flags text": _flags("no"),
    "flags array": _flags(np.array([True, False])),
    "flags nan": _flags(NAN),
    "info nothing": lambda o, r, t, u, _: (o, r, True, u, None),
    "four values": lambda o, r, t, u, i: (o, r, t, i),
    "six values": lambda o, r, t, u, i: (o, r, t, u, i, 1),
    "no tuple": _all(None),
    "reset alone": _all("reset"),
    "reset of another shape": _all("reset shape"),
    "reset nothing": _all("reset none"),
}
HARMLESS = (
    "obs doubles", "obs big-endian", "obs list", "obs strided", "obs ints", "reward bool",
    "obs objects that are numbers", "reward double", "reward 0-d", "flags numpy", "flags ints",
)  # fmt: skip


class Wrong(gymnasium.Env):  # type: ignore[misc]
    def __init__(self, wrong: str, at: int = 2) -> None:
        self.observation_space = gymnasium.spaces.Box(-INF, INF, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._wrong, self._at, self._steps = wrong, at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self._steps > self._at or (self._at == 0 and self._wrong.startswith("reset")):
            if self._wrong == "reset alone":
                return GOOD
            if self._wrong == "reset of another shape":
                return np.zeros(7, np.float32), {}
            if self._wrong == "reset nothing":
                return None
        return GOOD.copy(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        usual = GOOD.copy(), 1.0, self._steps % 5 == 0, False, {}
        if self._steps <= self._at or self._wrong.startswith("reset"):
            return usual if self._steps <= self._at else (*usual[:2], True, False, {})
        return WRONG[self._wrong](*usual)


@contextlib.contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as place:
        yield f"{place}/run"
