"""Update math only: an algorithm knows no ranks, processes, environments or files."""

from __future__ import annotations

from manyhands.algorithms.a2c import A2C, A2CConfig
from manyhands.algorithms.base import Across, Algorithm, Alone, Batch
from manyhands.algorithms.ppo import PPO, PPOConfig
from manyhands.algorithms.trpo import TRPO, TRPOConfig

CONFIGS = {"a2c": A2CConfig, "ppo": PPOConfig, "trpo": TRPOConfig}
ALGORITHMS: dict[str, type[Algorithm]] = {"a2c": A2C, "ppo": PPO, "trpo": TRPO}

__all__ = [
    "A2C",
    "ALGORITHMS",
    "CONFIGS",
    "PPO",
    "TRPO",
    "A2CConfig",
    "Across",
    "Algorithm",
    "Alone",
    "Batch",
    "PPOConfig",
    "TRPOConfig",
]
