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
    "precise": Box(-1.0, 1.0, (3,), np.float64),
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
            return self.np_random.uniform(-1, 1, space.shape).astype(space.dtype)

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


class PolicyValue(nn.Module):
    """Policy and value, each with features of its own, or with one for both."""

    def __init__(
        self, observation_space: Any, action_space: Any, width: int = 6, shared: bool = False
    ) -> None:
        super().__init__()
        continuous = isinstance(action_space, Box)
        size = action_space.shape[0] if continuous else int(action_space.n)
        self.value_features = None if shared else Features(observation_space, action_space, width)
        self.value = nn.Linear(width, 1)
        self.policy_features = Features(observation_space, action_space, width)
        self.policy = nn.Linear(width, size)
        self.log_std = nn.Parameter(torch.zeros(size)) if continuous else None

    def forward(self, x: Any) -> Any:
        seen = self.policy_features(x)
        outputs = self.policy(seen)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, self.value(seen if self.value_features is None else self.value_features(x))


class QValues(nn.Module):
    """Q of every action."""

    q_values = True

    def __init__(self, observation_space: Any, action_space: Any, width: int = 6) -> None:
        super().__init__()
        self.features = Features(observation_space, action_space, width)
        self.out = nn.Linear(width, int(action_space.n))

    def forward(self, x: Any) -> torch.Tensor:
        return self.out(self.features(x))


def linear(observation_space: Any, action_space: Any) -> nn.Module:
    """Takes float32 alone."""
    return nn.Sequential(nn.Linear(observation_space.shape[0], 4), nn.Tanh())


def drawn_by_numpy(observation_space: Any, action_space: Any) -> nn.Module:
    """Initial weights that torch knows nothing of."""
    module = Features(observation_space, action_space)
    with torch.no_grad():
        module.layers[0].weight.copy_(torch.from_numpy(np.random.standard_normal((6, 3))))
    return module


class CountsRows(Features):
    """Right in training; an exporter takes len(x) for a constant."""

    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.reshape(len(x), -1))


# -- wrong ones -----------------------------------------------------------------------------------


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
        return super().forward(x)[:, :3], None


class Triple(Features):
    def forward(self, x: Any) -> Any:
        return (super().forward(x),) * 3


class Wide(PolicyValue):
    """A number too many for the action space."""

    def forward(self, x: Any) -> Any:
        parameters, values = super().forward(x)
        return torch.cat([parameters, values], -1), values


class Values(PolicyValue):
    """A value for each action, where one is expected."""

    def forward(self, x: Any) -> Any:
        parameters, _ = super().forward(x)
        return parameters, parameters


class WideQ(QValues):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x)[:, :2]


class Detached(Features):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x).detach()


class DetachedValue(PolicyValue):
    def forward(self, x: Any) -> Any:
        parameters, values = super().forward(x)
        return parameters, values.detach()


class Mixes(Features):
    """Each row depends on the others."""

    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x).softmax(0)


class OneRow(Features):
    """Forgets the first dimension when it has one row."""

    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x).squeeze()


class NotFinite(Features):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x) / 0.0


class Double(Features):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x).double()


class Statistics(nn.Sequential):
    """Buffers that workers do not share."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(nn.Linear(observation_space.shape[0], 6), nn.BatchNorm1d(6))


class Raises(Features):
    def forward(self, x: Any) -> torch.Tensor:
        return self.layers(x[:, :1])


def doubles(*spaces: Any) -> nn.Module:
    return Features(*spaces).double()


def frozen(*spaces: Any) -> nn.Module:
    return Features(*spaces).requires_grad_(False)


def no_module(*spaces: Any) -> str:
    return "features"


def fails(*spaces: Any) -> nn.Module:
    raise RuntimeError("the user's own trouble")


def one_space(observation_space: Any) -> nn.Module:
    return Features(observation_space, None)


_KEPT: list[nn.Module] = []


def the_same(*spaces: Any) -> nn.Module:
    if not _KEPT:
        _KEPT.append(Features(*spaces))
    return _KEPT[0]
