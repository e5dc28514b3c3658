"""The algorithms by name, as data: reading it loads no torch."""

from __future__ import annotations

import difflib

from manyhands.algorithms.options import (
    A2CConfig,
    DDPGConfig,
    DQNConfig,
    IMPALAConfig,
    PPOConfig,
    TRPOConfig,
)
from manyhands.algorithms.spec import AlgorithmSpec, named
from manyhands.errors import ConfigError

_ALL = (
    AlgorithmSpec(
        name="a2c",
        about="advantage actor-critic: one gradient step on each batch",
        options=A2CConfig,
        algorithm="manyhands.algorithms.a2c:A2C",
        pushes_gradients=True,
    ),
    AlgorithmSpec(
        name="ppo",
        about="proximal policy optimisation: several passes over each batch, the step clipped",
        options=PPOConfig,
        algorithm="manyhands.algorithms.ppo:PPO",
    ),
    AlgorithmSpec(
        name="trpo",
        about="trust region policy optimisation: the natural gradient, KL bounded",
        options=TRPOConfig,
        algorithm="manyhands.algorithms.trpo:TRPO",
        separate_networks=True,
        refuses={
            "gradient_server": "makes a search over one whole batch, no gradient that can be "
            "pushed; use a2c"
        },
    ),
    AlgorithmSpec(
        name="dqn",
        about="deep Q-learning from a prioritized replay, for discrete actions; with apex Ape-X",
        options=DQNConfig,
        algorithm="manyhands.algorithms.dqn:DQN",
        learns_from="replay",
        actions="discrete",
    ),
    AlgorithmSpec(
        name="ddpg",
        about="a deterministic policy that climbs its critic, for continuous actions",
        options=DDPGConfig,
        algorithm="manyhands.algorithms.ddpg:DDPG",
        learns_from="replay",
        model="manyhands.networks.q:bounded_actor",
        actions="bounded",
    ),
    AlgorithmSpec(
        name="impala",
        about="actors and learners apart: V-trace corrects for data older than the policy",
        options=IMPALAConfig,
        algorithm="manyhands.algorithms.impala:IMPALA",
        learns_from="unroll",
    ),
)
SPECS: dict[str, AlgorithmSpec] = {spec.name: spec for spec in _ALL}


def spec_of(algorithm: str) -> AlgorithmSpec:
    """The algorithm of that name, or of the user's own as package.module:NAME."""
    if algorithm in SPECS:
        return SPECS[algorithm]
    if ":" not in algorithm:
        near = difflib.get_close_matches(algorithm.lower(), SPECS, 3, 0.6)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(SPECS)}"
        raise ConfigError(f"there is no algorithm {algorithm!r}; {hint}")
    found = named(algorithm)
    if not isinstance(found, AlgorithmSpec):
        raise ConfigError(
            f"{algorithm} is a {type(found).__name__}, and an algorithm is given by a "
            "manyhands.AlgorithmSpec; examples/own_algorithm.py shows one"
        )
    if found.name in SPECS:
        raise ConfigError(f"{algorithm} is called {found.name!r}, which is one of ours; rename it")
    return found
