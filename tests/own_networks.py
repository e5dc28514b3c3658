"""Networks of a user's own, right and wrong ones, and environments for them to look at."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn

SPACES = {
    "vector": Box(-1.0, 1.0, (3,), np.float32),
    "image": Box(0, 255, (1, 12, 12), np.uint8),
    "dict": Dict({"near": Box(-1.0, 1.0, (2,), np.float32), "far": Box(0, 255, (4,), np.uint8)}),
}


class Seen(gymnasium.Env[Any, Any]):
    """Observations of one kind, discrete or continuous actions, episodes of nine steps."""

    def __init__(self, kind: str, continuous: bool = False) -> None:
        self.observation_space = SPACES[kind]
        self.action_space = Box(-1.0, 1.0, (2,), np.float32) if continuous else Discrete(3)
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = 9
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return self._look(), float(np.sum(action)), self._left == 0, False, {}

    def _look(self) -> Any:
        def draw(space: Any) -> Any:
            if space.dtype == np.uint8:
                return self.np_random.integers(0, 256, space.shape).astype(np.uint8)
            return self.np_random.uniform(-1, 1, space.shape).astype(np.float32)

        space = self.observation_space
        return {k: draw(s) for k, s in space.items()} if isinstance(space, Dict) else draw(space)


class Features(nn.Module):
    """Any of the spaces above -> [N, width]."""

    def __init__(self, observation_space: Any, action_space: Any, width: int = 6) -> None:
        super().__init__()
        parts = observation_space.spaces if isinstance(observation_space, Dict) else {
            "": observation_space
        }  # fmt: skip
        self.keys = sorted(parts)
        inputs = sum(math.prod(parts[key].shape) for key in self.keys)
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())

    def forward(self, x: Any) -> torch.Tensor:
        parts = [x[key] if key else x for key in self.keys]
        flat = [part.flatten(1).to(torch.float32) for part in parts]
        return self.layers(torch.cat(flat, -1) / 255.0)


class Idle(Features):
    """A layer that nothing depends on."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__(*spaces)
        self.forgotten = nn.Linear(2, 2)


class Moody(Features):
    """Another number of features each time."""

    def forward(self, x: Any) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)[:, : 6 - self.calls]


class Flat(Features):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x).sum(-1)


class Pair(Features):
    def forward(self, x: Any) -> Any:
        return super().forward(x), None


def frozen(*spaces: Any) -> nn.Module:
    return Features(*spaces).requires_grad_(False)


def no_module(*spaces: Any) -> str:
    return "features"


def fails(*spaces: Any) -> nn.Module:
    raise RuntimeError("the user's own trouble")
