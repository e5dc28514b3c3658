"""Which action spaces DQN and DDPG can learn. Torch-free: checked before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.errors import ConfigError

UNBOUNDED = 1e30  # bounds near the largest float are a way to say "none"


def check(kind: str, space: Any) -> None:
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
