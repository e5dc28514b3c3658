"""The algorithms, as data: what everything asks that runs before torch is loaded.

One row an algorithm: the command line, its help, the checks, the table of what runs with what, the
docs and the workers all read it. An algorithm of your own is the same row in a module of your own,
and `manyhands train package.module:NAME` takes it (examples/own_algorithm.py).

    learns_from    what it is given; the strategies' own rows say which of them take it
    rollout        T steps of each environment, of the newest policy
    unroll         the same, from a policy some updates old
    replay         transitions of any age, drawn from a replay
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.algorithms.options import (
    A2CConfig,
    DDPGConfig,
    DQNConfig,
    IMPALAConfig,
    PPOConfig,
    TRPOConfig,
)
from manyhands.errors import ConfigError

# (experiment, observation space, action space) -> torch.nn.Module
BuildModel = Callable[[Any, Any, Any], Any]

_MODEL = {
    "rollout": "manyhands.networks.build:actor_critic",
    "unroll": "manyhands.networks.build:actor_critic",
    "replay": "manyhands.networks.q:q_network",
}


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm. Functions and classes may be given by name, so that torch is loaded late."""

    name: str
    """As it is typed, and as its options are headed in config.toml."""
    about: str
    """One line for the help."""
    options: type[Any]
    """A frozen dataclass; the string under each field is its help."""
    algorithm: str | type[Any]
    """The class, a subclass of manyhands.algorithms.base.Algorithm, or package.module:Class."""
    learns_from: Literal["rollout", "unroll", "replay"] = "rollout"
    """What it is given; the strategies that it runs with follow from that."""
    model: str | BuildModel = ""
    """Makes its network (default: what suits what it learns from)."""
    actions: Literal["any", "discrete", "bounded"] = "any"
    """Which action spaces it can learn."""
    pushes_gradients: bool = False
    """Whether one gradient of one worker's rows is a whole step: for strategy gradient_server."""
    separate_networks: bool = False
    """Whether policy and value may not share a network."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> why not, where its kind alone does not say it; reads on after the name."""

    def load(self) -> Any:
        """The class; loads torch."""
        return named(self.algorithm) if isinstance(self.algorithm, str) else self.algorithm

    def build_model(self, experiment: Any, observation_space: Any, action_space: Any) -> Any:
        """The network, with the weights that the run's seed begins with; loads torch."""
        model = self.model or _MODEL[self.learns_from]
        build: BuildModel = named(model) if isinstance(model, str) else model
        return build(experiment, observation_space, action_space)


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


def named(path: str) -> Any:
    """`package.module:NAME` -> what it names; ConfigError when it is not there."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{path!r} is not of the form package.module:NAME")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of the user's own imports: the traceback says where
        raise ConfigError(
            f"{path!r} names the module {module!r}, which cannot be imported: {error}. Is it on "
            "PYTHONPATH, or in the folder from which you start?"
        ) from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ConfigError(f"{path!r} cannot be found: {error}") from None
    return found
