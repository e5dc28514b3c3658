"""The network that a configuration asks for, with the weights that its seed begins with."""

from __future__ import annotations

from typing import Any

from torch import nn

from manyhands import seeding
from manyhands.networks.build import build_actor_critic
from manyhands.networks.lstm import build_recurrent
from manyhands.networks.own import encoders_of
from manyhands.networks.q import build_bounded_actor, build_q_network


def actor_critic(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """Policy and value; with a memory where the algorithm's options ask for one."""
    common = _common(experiment, observations, actions)
    if units := getattr(experiment.options, "lstm", 0):
        return build_recurrent(observations, actions, units=units, **common)
    shared = experiment.run.shared_network
    return build_actor_critic(observations, actions, shared=shared, **common)


def q_network(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """The value of every action."""
    dueling = getattr(experiment.options, "dueling", False)
    return build_q_network(
        observations, actions, dueling=dueling, **_common(experiment, observations, actions)
    )


def bounded_actor(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """A deterministic policy and its critic."""
    return build_bounded_actor(
        observations,
        actions,
        noise=experiment.options.noise,
        unit_actions=experiment.run.box_actions == "scale",
        **_common(experiment, observations, actions),
    )


def _common(experiment: Any, observations: Any, actions: Any) -> dict[str, Any]:
    run = experiment.run
    own = encoders_of(run, observations, actions) if run.network else None
    return {
        "encoder": own,
        "hidden": () if own else run.hidden,  # what is hidden is the user's own
        "activation": run.activation,
        "seed": seeding.integer(run.seed, "weights"),
    }
