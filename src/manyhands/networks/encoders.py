"""Layers, and what makes features of observations.

    Box of floats or whole numbers    -> flat vector
    Box of bytes, three dimensions    -> image: convolutions
    Discrete, MultiDiscrete           -> one-hot
    MultiBinary                       -> vector
    Dict                              -> its parts end to end, keys sorted, without action_mask

Images: the network of Nature 518, 529 (2015) from 36 × 36 on; for the tiny pictures of grid worlds,
where it does not fit, one layer of 3 × 3 filters as in MinAtar (arXiv:1903.03176).

No encoder asks for the number of rows, which an exporter would write down as a constant. What they
do without convolutions, networks/numpy_mlp.py does too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.errors import ConfigError
from manyhands.types import MASK

Observations = Any  # a tensor [N, ...], or a (nested) dict of them

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
}
HIDDEN_GAIN = math.sqrt(2.0)

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # (filters, kernel, stride)
SMALL = ((16, 3, 1),)
NATURE_FEATURES, SMALL_FEATURES = 512, 128
SMALLEST_NATURE = 36  # the side at which the third layer still has one pixel


def untouched_chance() -> AbstractContextManager[None]:
    """Layers made under it leave torch's global stream where it was: their constructors draw from
    it, only to be overwritten. WHY not device="meta" and to_empty: that imports sympy, half a
    second in every worker."""
    return torch.random.fork_rng(devices=())


def orthogonal(layer: Layer, gain: float, generator: torch.Generator | None = None) -> Layer:
    """Orthogonal weights times `gain`, zero bias."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def linear(
    inputs: int, outputs: int, gain: float, generator: torch.Generator | None = None
) -> nn.Linear:
    """A layer whose every number comes from `generator`."""
    with untouched_chance():
        layer = nn.Linear(inputs, outputs)
    return orthogonal(layer, gain, generator)


def mlp(
    inputs: int,
    hidden: Sequence[int],
    outputs: int | None = None,
    *,
    activation: str = "tanh",
    output_gain: float = 1.0,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """[N, inputs] -> [N, outputs], or the last hidden layer if outputs is None.

    A small output gain (0.01) makes a fresh policy nearly uniform whatever it observes.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [linear(inputs, width, HIDDEN_GAIN, generator), ACTIVATIONS[activation]()]
        inputs = width
    if outputs is not None:
        layers.append(linear(inputs, outputs, output_gain, generator))
    return nn.Sequential(*layers)


# -- encoders --------------------------------------------------------------------------------------


class VectorEncoder(nn.Module):
    """Numbers of any shape and dtype -> float32 [N, features]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features = math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32).reshape(-1, self.features)


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


class ImageEncoder(nn.Module):
    """uint8 [N, C, H, W] or [N, H, W, C] -> [N, features]; values are divided by 255."""

    in_bfloat16 = False  # its products in bfloat16, see `to_bfloat16`

    def __init__(
        self, shape: tuple[int, int, int], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.channels_last = channels_are_last(shape)
        channels, height, width = (
            (shape[2], shape[0], shape[1]) if self.channels_last else (shape[0], shape[1], shape[2])
        )
        side = min(height, width)
        if side < 3:
            raise ConfigError(f"an image of shape {shape} is too small for a convolution: 3 x 3")
        nature = side >= SMALLEST_NATURE
        layers: list[nn.Module] = []
        for filters, kernel, stride in NATURE if nature else SMALL:
            with untouched_chance():
                layer = nn.Conv2d(channels, filters, kernel, stride)
            layers += [orthogonal(layer, HIDDEN_GAIN, generator), nn.ReLU()]
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            channels = filters
        self.features = NATURE_FEATURES if nature else SMALL_FEATURES
        flat = channels * height * width
        layers += [nn.Flatten(), linear(flat, self.features, HIDDEN_GAIN, generator), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.permute(0, 3, 1, 2)
        elif images.device.type == "cpu" and not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            # The numbers of one pixel side by side: the first layer's gradient then takes 70 µs a
            # row instead of 170, and bringing bytes into that order 10.
            images = images.contiguous(memory_format=torch.channels_last)
        if self.in_bfloat16:  # which has every byte exactly; the tensor cores want channels last
            images = images.to(torch.bfloat16, memory_format=torch.channels_last)
            with torch.autocast(images.device.type, torch.bfloat16):
                return self.layers(images * (1.0 / 255.0)).to(torch.float32)  # type: ignore[no-any-return]
        features: Tensor = self.layers(images.to(torch.float32) * (1.0 / 255.0))
        return features


def to_bfloat16(model: nn.Module) -> None:
    """Let the model's image encoders compute in bfloat16, with weights, gradients and everything
    behind the features in float32 as before."""
    for module in model.modules():
        if isinstance(module, ImageEncoder):
            module.in_bfloat16 = True


def channels_are_last(shape: tuple[int, ...]) -> bool:
    """Channels are the fewer: [84, 84, 3] has them last, [4, 84, 84] first."""
    return shape[2] < shape[0]


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
        keys = [key for key in sorted(space) if key != MASK]  # a mask is for the head alone
        return DictEncoder({key: make_encoder(space[key], generator) for key in keys})
    raise ConfigError(
        f"no encoder for the observation space {space}; give Box, Discrete, MultiDiscrete, "
        "MultiBinary or a Dict of these"
    )


def has_image(model: nn.Module) -> bool:
    """Whether it convolves, which is worth several threads and no hidden layers behind it."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())
