"""A network of the user's own: what makes features of observations, in the place of our encoders.

    observation ── own module -> features [N, F] ── policy head, value head, Q values, …

`--network package.module:build` names a function or class (observation_space, action_space,
**network_kwargs) -> torch.nn.Module. The module gets what the policy sees: a tensor [N, ...] of the
space's dtype (float32 where observations are normalised), or a dict of them for a Dict space. What
comes behind it is a linear layer for each output, so that one module suits every algorithm. Policy
and value have a module each, unless `shared_network` asks for one; so do DDPG's policy and critic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import seeding, trees
from manyhands.engines import calls
from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError

_ROWS = 3


class OwnEncoder(nn.Module):
    """The user's module, with what our networks ask of an encoder."""

    def __init__(self, module: nn.Module, features: int, keys: list[str]) -> None:
        super().__init__()
        self.module, self.features = module, features
        self.keys = keys  # of a Dict observation, in the order in which an exported file has them

    def forward(self, observations: Any) -> Tensor:
        features: Tensor = self.module(observations)
        return features


def encoders_of(run: Any, observation_space: Any, action_space: Any) -> Callable[[], OwnEncoder]:
    """Makes the first module that a run's network is made of, the second, and so on."""
    made = 0

    def make() -> OwnEncoder:
        nonlocal made
        seed = seeding.integer(run.seed, "own network", made)
        made += 1
        with torch.random.fork_rng(devices=()):  # the user's generators stay where they are
            torch.manual_seed(seed)
            module = calls.find(run.network)(observation_space, action_space, **run.network_kwargs)
        features = _features_of(run.network, module, observation_space)
        keys = sorted(observation_space) if type(observation_space).__name__ == "Dict" else []
        return OwnEncoder(module, features, keys)

    return make


def _features_of(name: str, module: Any, space: Any) -> int:
    """How many features a module gives; ConfigError, with what was expected, unless it can be used.

    Nothing else of a run has started by then.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"network {name} gave a {type(module).__name__}; a function or class "
            "(observation_space, action_space, **network_kwargs) -> torch.nn.Module is expected"
        )
    parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(f"network {name} has no parameters that can be trained")
    shapes = []
    for rows in (_ROWS, _ROWS, _ROWS + 1):
        features = module(trees.map(torch.from_numpy, zeros(space, (rows,))))
        if not isinstance(features, Tensor) or not features.is_floating_point():
            raise ConfigError(
                f"network {name} gave a {_what(features)} for {rows} observations; features are "
                "expected: one tensor of floats [N, F]"
            )
        shapes.append((rows, tuple(features.shape)))
        if features.ndim != 2 or features.shape[0] != rows:
            raise ConfigError(
                f"network {name} gave features of shape {tuple(features.shape)} for {rows} "
                f"observations; [{rows}, F] is expected, one row an observation"
            )
    if len({shape[1] for _, shape in shapes}) > 1:
        given = ", then ".join(f"{shape} for {rows} observations" for rows, shape in shapes)
        raise ConfigError(f"network {name} gave {given}; the number of features must not change")
    module(trees.map(torch.from_numpy, zeros(space, (_ROWS,)))).sum().backward()
    idle = [k for k, p in parameters.items() if p.grad is None]
    module.zero_grad()
    if idle:
        raise ConfigError(
            f"network {name} has parameters without a gradient, on which its features do not "
            f"depend: {', '.join(idle[:5])}{' and more' if len(idle) > 5 else ''}. Use them in "
            "forward, or freeze them with requires_grad_(False)"
        )
    return int(shapes[0][1][1])


def _what(x: Any) -> str:
    return f"tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
