"""From Gymnasium spaces to an actor-critic network.

    observation ── encoder ── hidden layers ── policy head  -> distribution parameters [N, P]
               └── encoder ── hidden layers ── value head   -> values [N]

Separate trunks by default; one shared trunk for images, where the encoder is nearly all the cost.

Encoders: Box of floats or whole numbers -> flat vector; Box of bytes with three dimensions ->
image; Discrete and MultiDiscrete -> one-hot; MultiBinary -> vector; Dict -> its parts end to end,
keys sorted. Each knows how to encode torch tensors and, without convolutions, numpy arrays. None
asks for the number of rows, which an exporter would write down as a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands import trees
from manyhands.errors import ConfigError
from manyhands.networks.cnn import ImageEncoder
from manyhands.networks.heads import DiagonalGaussian, Head, make_head
from manyhands.networks.mlp import linear, mlp
from manyhands.trees import Array

Observations = Any  # a tensor [N, ...], or a (nested) dict of them

POLICY_GAIN, VALUE_GAIN = 0.01, 1.0


class VectorEncoder(nn.Module):
    """Numbers of any shape and dtype -> float32 [N, features]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features = math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32).reshape(-1, self.features)

    def encode(self, x: Array) -> Array:
        return np.asarray(x, np.float32).reshape(len(x), self.features)


class OneHotEncoder(nn.Module):
    """Choices -> one-hot codes end to end, [N, n_1 + n_2 + …]."""

    def __init__(self, sizes: Sequence[int], starts: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.starts = [int(n) for n in sizes], [int(s) for s in starts]
        self.features = sum(self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.reshape(-1, len(self.sizes)).unbind(-1)
        parts = zip(columns, self.sizes, self.starts, strict=True)
        codes = [
            (column.unsqueeze(-1) - start) == torch.arange(n, device=x.device)
            for column, n, start in parts
        ]
        return torch.cat(codes, -1).to(torch.float32)

    def encode(self, x: Array) -> Array:
        columns = x.reshape(len(x), len(self.sizes)).T
        codes = np.zeros((len(x), self.features), np.float32)
        rows, offset = np.arange(len(x)), 0
        for column, n, start in zip(columns, self.sizes, self.starts, strict=True):
            codes[rows, offset + column - start] = 1.0
            offset += n
        return codes


class DictEncoder(nn.Module):
    """A dict of observations -> its encoded parts end to end, keys sorted."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__()
        # Names of modules may not contain dots, keys of observations may: hence a list.
        self.keys = sorted(parts)
        self.parts = nn.ModuleList([parts[key] for key in self.keys])
        self.features = sum(int(parts[key].features) for key in self.keys)

    def forward(self, x: Mapping[str, Any]) -> Tensor:
        return torch.cat([part(x[k]) for k, part in zip(self.keys, self.parts, strict=True)], -1)

    def encode(self, x: Mapping[str, Any]) -> Array:
        parts = zip(self.keys, self.parts, strict=True)
        return np.concatenate([part.encode(x[k]) for k, part in parts], axis=-1)  # type: ignore[operator]


Encoder = VectorEncoder | OneHotEncoder | ImageEncoder | DictEncoder


def make_encoder(space: Any, generator: torch.Generator | None = None) -> Encoder:
    """The encoder for a Gymnasium observation space."""
    name = type(space).__name__
    if name == "Box":
        if np.dtype(space.dtype) != np.uint8 or len(space.shape) < 3:
            return VectorEncoder(tuple(space.shape))
        if len(space.shape) == 3:
            return ImageEncoder(tuple(space.shape), generator)
        raise ConfigError(
            f"an image of {len(space.shape)} dimensions {space.shape} has no encoder; make it grey "
            "before stacking frames, so that it is [stack, height, width]"
        )
    if name == "Discrete":
        return OneHotEncoder([space.n], [space.start])
    if name == "MultiDiscrete":
        return OneHotEncoder(space.nvec.ravel().tolist(), space.start.ravel().tolist())
    if name == "MultiBinary":
        return VectorEncoder(tuple(space.shape))
    if name == "Dict":
        return DictEncoder({key: make_encoder(space[key], generator) for key in sorted(space)})
    raise ConfigError(
        f"no encoder for the observation space {space}; give Box, Discrete, MultiDiscrete, "
        "MultiBinary or a Dict of these"
    )


class ActorCritic(nn.Module):
    """forward(observations) -> (distribution parameters [N, P], values [N])."""

    def __init__(
        self,
        head: Head,
        policy_encoder: Encoder,
        value_encoder: Encoder | None,
        *,
        hidden: Sequence[int],
        activation: str,
        initial_log_std: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.head = head
        self.shared = value_encoder is None

        def trunk() -> nn.Sequential:
            return mlp(policy_encoder.features, hidden, activation=activation, generator=generator)

        # Drawn in this order, kept in another: what belongs to the value alone comes last, so that
        # it is one piece of the flat parameters.
        policy_trunk = trunk()
        # None, not a second name for the same module: a checkpoint would hold its weights twice.
        value_trunk = None if self.shared else trunk()
        width = hidden[-1] if hidden else policy_encoder.features
        outputs = head.parameter_size
        self.log_std: nn.Parameter | None = None
        if isinstance(head, DiagonalGaussian):
            outputs = head.size
            self.log_std = nn.Parameter(torch.full((head.size,), initial_log_std))
        self.policy_encoder = policy_encoder
        self.policy_trunk = policy_trunk
        self.policy_out = linear(width, outputs, POLICY_GAIN, generator)
        self.value_encoder = value_encoder
        self.value_trunk = value_trunk
        self.value_out = linear(width, 1, VALUE_GAIN, generator)

    def forward(self, observations: Observations) -> tuple[Tensor, Tensor]:
        features = self._policy_features(observations)
        parameters = self._distribution(features)
        if not self.shared:
            features = self._value_features(observations)
        return parameters, self.value_out(features).squeeze(-1)

    def policy(self, observations: Observations) -> Tensor:
        """Distribution parameters only, [N, P]."""
        return self._distribution(self._policy_features(observations))

    def value(self, observations: Observations) -> Tensor:
        """Values only, [N]."""
        values: Tensor = self.value_out(self._value_features(observations))
        return values.squeeze(-1)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Everything the policy depends on, a shared trunk included: what a TRPO step moves."""
        own: list[nn.Parameter] = [] if self.log_std is None else [self.log_std]
        return own + list(_of(self.policy_encoder, self.policy_trunk, self.policy_out))

    def value_parameters(self) -> list[nn.Parameter]:
        """What can be changed without changing the policy: only the last layer if shared."""
        if self.value_encoder is None or self.value_trunk is None:
            return list(_of(self.value_out))
        return list(_of(self.value_encoder, self.value_trunk, self.value_out))

    def _policy_features(self, observations: Observations) -> Tensor:
        features: Tensor = self.policy_trunk(self.policy_encoder(observations))
        return features

    def _value_features(self, observations: Observations) -> Tensor:
        if self.value_encoder is None or self.value_trunk is None:
            return self._policy_features(observations)
        features: Tensor = self.value_trunk(self.value_encoder(observations))
        return features

    def _distribution(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.policy_out(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], -1)


def build_actor_critic(
    observation_space: Any,
    action_space: Any,
    *,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    shared: bool | None = None,
    initial_log_std: float = 0.0,
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> ActorCritic:
    """An actor-critic for *single* (not vectorised) Gymnasium spaces.

    Args:
        observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these.
        action_space: Discrete, MultiDiscrete, MultiBinary or a Box of floats.
        hidden: Widths of the hidden layers; None: (64, 64), or none after an image encoder.
        activation: tanh, relu or elu.
        shared: One trunk for policy and value; None: only with images.
        initial_log_std: Of a Gaussian policy, on the unit scale of actions.
        seed: Makes the initial weights repeatable without touching torch's global stream.
        encoder: Makes what comes before the hidden layers, if not what suits the space.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    head = make_head(action_space)
    make = encoder or partial(make_encoder, observation_space, generator)
    policy_encoder = make()
    images = has_image(policy_encoder)
    shared = images if shared is None else shared
    return ActorCritic(
        head,
        policy_encoder,
        None if shared else make(),
        hidden=hidden if hidden is not None else (() if images else (64, 64)),
        activation=activation,
        initial_log_std=initial_log_std,
        generator=generator,
    )


def to_tensor(x: Any, device: torch.device) -> Any:
    """An array, or a tree of arrays, on the device."""
    return trees.map(lambda leaf: torch.as_tensor(leaf).to(device), x)


def has_image(encoder: nn.Module) -> bool:
    return any(isinstance(module, ImageEncoder) for module in encoder.modules())


def _of(*modules: nn.Module) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters()
