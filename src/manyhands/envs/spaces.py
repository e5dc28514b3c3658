"""Which spaces are understood, how they are stored, and how actions reach the environment.

Observations are stored as the space says: one array [B, ...], or for a Dict space one array per
key. Actions come from the policy in the policy's own terms (numbers from 0, raw Gaussians); the
`ActionMap` turns them into what the environment expects, and leaves the raw ones untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands import trees
from manyhands.errors import ConfigError
from manyhands.trees import Array
from manyhands.types import Obs

BoxActions = Literal["clip", "scale", "raw"]

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


def zeros(space: gymnasium.Space[Any], leading: tuple[int, ...]) -> Obs:
    """Room for observations: shape `leading + space.shape`, the space's own dtype."""
    if isinstance(space, spaces.Dict):
        return {key: zeros(part, leading) for key, part in space.spaces.items()}
    return np.zeros(leading + tuple(space.shape or ()), dtype=space.dtype)


class DictRows:
    """Makes `rows[i] = observation` work for a batch of Dict observations."""

    def __init__(self, batch: dict[str, Array]) -> None:
        self._parts = list(batch.items())

    def __setitem__(self, i: int, observation: Any) -> None:
        for key, part in self._parts:
            part[i] = observation[key]


def take_row(batch: Obs, i: int) -> Obs:
    """A copy of row i."""
    return trees.map(lambda part: np.array(part[i]), batch)


def copy_single(space: gymnasium.Space[Any], value: Any) -> Obs:
    """One sub-environment's observation as arrays of our own, in the space's dtype."""
    if isinstance(space, spaces.Dict):
        return {key: np.array(value[key], dtype=part.dtype) for key, part in space.spaces.items()}
    return np.array(value, dtype=space.dtype)


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


class FiniteCheck:
    """Is there a NaN or an infinity in a batch of observations? Integers are never looked at.

    x · 0 is zero for every finite x and NaN for NaN and ±inf, so one dot product with zeros
    answers exactly, at a quarter of the cost of `np.isfinite(x).all()`, and cannot overflow.
    """

    def __init__(self, space: gymnasium.Space[Any], rows: int) -> None:
        self._is_dict = isinstance(space, spaces.Dict)
        parts = space.spaces if self._is_dict else {"": space}
        self._zeros: dict[str, Array] = {
            key: np.zeros(rows * int(np.prod(part.shape)), dtype=part.dtype)
            for key, part in parts.items()
            if part.dtype is not None and part.dtype.kind == "f"
        }
        self._plain_zeros = self._zeros.get("") if not self._is_dict else None

    def holds(self, batch: Obs) -> bool:
        """Whether every number of the batch is finite."""
        if self._plain_zeros is not None:
            return bool(batch.reshape(-1).dot(self._plain_zeros) == 0)
        if not self._is_dict:
            return True
        return all(batch[key].reshape(-1).dot(nil) == 0 for key, nil in self._zeros.items())

    def bad_row(self, batch: Obs) -> int:
        """The first row with a NaN or an infinity, once `holds` has said no."""
        parts = [batch[key] if self._is_dict else batch for key in self._zeros]
        finite = [np.isfinite(part).reshape(len(part), -1).all(axis=1) for part in parts]
        return int(np.argmin(np.logical_and.reduce(finite)))


class ActionMap:
    """From the policy's actions to the environment's, a batch at a time.

    Discrete and MultiDiscrete: as the policy's head gives them, the space's `start` included.
    Box: "clip" cuts to the bounds, "scale" takes [-1, 1] to [low, high], "raw" sends as it is.
    The given array is never changed: log-probabilities belong to the raw action.
    """

    def __init__(self, space: gymnasium.Space[Any], box_actions: BoxActions = "clip") -> None:
        check_action_space(space)
        if box_actions not in ("clip", "scale", "raw"):
            raise ConfigError(
                f"box_actions={box_actions!r} is not known; choose clip, scale or raw"
            )
        self.space = space
        self._shape: tuple[int, ...] = tuple(space.shape or ())
        self._dtype = space.dtype
        self._convert: Callable[[Array], Array]
        if isinstance(space, spaces.Box):
            self._convert = self._box_conversion(space, box_actions)
        else:
            self._convert = self._typed

    def __call__(self, actions: Array) -> Array:
        """[B, ...] of the policy -> [B, ...] for the environments."""
        actions = np.asarray(actions)
        if actions.shape[1:] != self._shape:
            raise ConfigError(
                f"actions have shape {actions.shape}, expected (envs, *{self._shape}) "
                f"for the action space {self.space}"
            )
        return self._convert(actions)

    def _typed(self, actions: Array) -> Array:
        return actions.astype(self._dtype, copy=False)

    def _box_conversion(self, space: spaces.Box, how: BoxActions) -> Callable[[Array], Array]:
        low, high = space.low, space.high
        if how == "clip":
            return lambda a: np.clip(a, low, high).astype(self._dtype, copy=False)
        if how == "raw":
            return self._typed
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigError(
                f"box_actions='scale' needs finite bounds, the action space is {space}; "
                "use box_actions='clip'"
            )
        middle, half = (high + low) / 2, (high - low) / 2
        # WHY clip twice: rounding may carry middle + half a hair over `high`.
        return lambda a: np.clip(middle + half * np.clip(a, -1.0, 1.0), low, high).astype(
            self._dtype, copy=False
        )
