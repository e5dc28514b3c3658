"""The chance in a policy's actions, one stream for each environment.

WHY not one stream a worker: an environment then draws the same numbers whichever worker steps it,
so that a run with four workers plays the episodes of a run with one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands import seeding
from manyhands.trees import Array

_AHEAD = 128  # steps drawn at once: a call of a generator costs more than the numbers


class EnvNoise:
    """Looks like a numpy Generator to the sampling functions; row i is environment `first + i`."""

    def __init__(self, seed: int, first: int, envs: int) -> None:
        self._streams = [seeding.generator(seed, "action", first + i) for i in range(envs)]
        self._drawn: dict[tuple[str, tuple[int, ...]], tuple[Array, int]] = {}

    def random(self, size: tuple[int, ...]) -> Array:
        return self._next("random", size[1:])

    def standard_normal(self, size: tuple[int, ...], dtype: Any = np.float32) -> Array:
        return self._next("standard_normal", size[1:])

    def _next(self, kind: str, shape: tuple[int, ...]) -> Array:
        block, at = self._drawn.get((kind, shape), (np.empty(0), _AHEAD))
        if at == _AHEAD:
            rows = [getattr(s, kind)((_AHEAD, *shape), dtype=np.float32) for s in self._streams]
            block, at = np.stack(rows, axis=1), 0  # [ahead, envs, ...]
        self._drawn[(kind, shape)] = (block, at + 1)
        values: Array = block[at]
        return values

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs to draw the same numbers."""
        drawn = [[k, list(s), block, at] for (k, s), (block, at) in self._drawn.items()]
        return {"streams": [s.bit_generator.state for s in self._streams], "drawn": drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.bit_generator.state = saved
        self._drawn = {(k, tuple(s)): (block, at) for k, s, block, at in state["drawn"]}
