"""Multi-layer perceptrons with orthogonal initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import nn

from manyhands.errors import ConfigError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
}
HIDDEN_GAIN = math.sqrt(2.0)

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


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
