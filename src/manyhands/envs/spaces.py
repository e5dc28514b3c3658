"""Which spaces are understood, and room for observations of them.

Observations are stored as the space says: one array [B, ...], or for a Dict space one array per
key.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands.errors import ConfigError
from manyhands.types import Obs

UNBOUNDED = 1e30  # bounds near the largest float are a way to say "none"
_UNDERSTOOD = "Box, Discrete, MultiDiscrete, MultiBinary and a flat Dict of these"


def check_observation_space(space: gymnasium.Space[Any]) -> None:
    """Refuse, by name, an observation space that cannot be stored as arrays of numbers."""
    if isinstance(space, spaces.Dict):
        if not space.spaces:
            raise ConfigError("the observation space is an empty Dict: there is nothing to learn")
        for key, part in space.spaces.items():
            _check_observation_leaf(part, f"observation space, key {key!r}")
        return
    _check_observation_leaf(space, "observation space")


def _check_observation_leaf(space: gymnasium.Space[Any], where: str) -> None:
    if isinstance(space, spaces.Box):
        if space.dtype is None or space.dtype.kind not in "biuf":
            raise ConfigError(f"{where} is a Box of dtype {space.dtype}; numbers are needed")
        return
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ConfigError(
            f"{where} is {space}, which is not understood; understood are {_UNDERSTOOD}. "
            "gymnasium.wrappers.FlattenObservation turns most others into a Box"
        )


def check_action_space(space: gymnasium.Space[Any]) -> None:
    """Refuse, by name, an action space for which there is no policy."""
    if isinstance(space, spaces.Box):
        if space.dtype is None or space.dtype.kind != "f":
            raise ConfigError(
                f"action space {space} is a Box of dtype {space.dtype}; a Box of actions must be "
                "of floats (whole numbers are a Discrete or a MultiDiscrete)"
            )
        return
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1:
            raise ConfigError(
                f"action space {space} has {space.nvec.ndim} dimensions; a MultiDiscrete of "
                "actions must have one"
            )
        return
    if not isinstance(space, (spaces.Discrete, spaces.MultiBinary)):
        raise ConfigError(
            f"action space {space} is not understood; understood are Discrete, MultiDiscrete, "
            "MultiBinary and Box of floats"
        )


def check_actions(kind: str, space: Any) -> None:
    """ConfigError unless an algorithm that learns this kind of actions can learn these."""
    checks = {"discrete": check_discrete, "bounded": check_bounded}
    if kind in checks:
        checks[kind](space)


def check_discrete(space: Any) -> None:
    """ConfigError unless a Q value can be given for every action."""
    if type(space).__name__ == "Discrete":
        return
    other = "ddpg" if type(space).__name__ == "Box" else "ppo"
    raise ConfigError(
        f"dqn compares the values of all actions, which needs a Discrete action space, and this "
        f"one is {space}; type: manyhands train {other}"
    )


def check_bounded(space: Any) -> None:
    """ConfigError unless actions are numbers between bounds."""
    if type(space).__name__ != "Box" or np.dtype(space.dtype).kind != "f":
        raise ConfigError(
            f"ddpg moves actions along a gradient, which needs a Box of floats, and the action "
            f"space is {space}; type: manyhands train "
            + ("dqn" if type(space).__name__ == "Discrete" else "ppo")
        )
    if not (np.abs(space.low) < UNBOUNDED).all() or not (np.abs(space.high) < UNBOUNDED).all():
        raise ConfigError(
            f"ddpg needs actions with finite bounds, and the action space is {space}; wrap the "
            "environment in gymnasium.wrappers.RescaleAction, or type: manyhands train ppo"
        )


def zeros(space: gymnasium.Space[Any], leading: tuple[int, ...]) -> Obs:
    """Room for observations: shape `leading + space.shape`, the space's own dtype."""
    if isinstance(space, spaces.Dict):
        return {key: zeros(part, leading) for key, part in space.spaces.items()}
    return np.zeros(leading + tuple(space.shape or ()), dtype=space.dtype)


def shape_fault(space: gymnasium.Space[Any], value: Any) -> str:
    """Empty when `value` has the shape the space promises; otherwise what is wrong."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space.spaces):
            have = sorted(value) if isinstance(value, dict) else type(value).__name__
            return f"keys are {have}, the space says {sorted(space.spaces)}"
        faults = [(k, shape_fault(part, value[k])) for k, part in space.spaces.items()]
        return "; ".join(f"key {k!r}: {fault}" for k, fault in faults if fault)
    # Discrete has shape (); numpy broadcasts a wrong shape silently, so this is worth asking.
    if np.shape(value) != tuple(space.shape or ()):
        return f"shape is {np.shape(value)}, the space says {tuple(space.shape or ())}"
    return ""
