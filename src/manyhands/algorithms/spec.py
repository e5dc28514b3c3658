"""What an algorithm is, for everything that asks before torch is loaded.

One row an algorithm: the command line, its help, the checks, the table of what runs with what, the
docs and the workers all read it. An algorithm of your own is the same row in a module of your own,
and `manyhands train package.module:NAME` takes it (examples/own_algorithm.py).

    learns_from    what it is given; the strategies' own rows say which of them take it
    rollout        T steps of each environment, of the newest policy
    unroll         the same, from a policy some updates old
    replay         transitions of any age, drawn from a replay
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
