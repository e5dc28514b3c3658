"""The algorithms by name."""

from __future__ import annotations

from manyhands.algorithms.a2c import A2C
from manyhands.algorithms.base import Algorithm
from manyhands.algorithms.ddpg import DDPG
from manyhands.algorithms.dqn import DQN
from manyhands.algorithms.impala import IMPALA
from manyhands.algorithms.ppo import PPO
from manyhands.algorithms.trpo import TRPO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "a2c": A2C,
    "ppo": PPO,
    "trpo": TRPO,
    "impala": IMPALA,
    "dqn": DQN,
    "ddpg": DDPG,
}
