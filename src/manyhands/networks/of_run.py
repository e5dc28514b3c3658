"""The network that a configuration asks for, with the weights that its seed begins with."""

from __future__ import annotations

from typing import Any

from torch import nn

from manyhands import seeding
from manyhands.networks.build import build_actor_critic
from manyhands.networks.lstm import build_recurrent
from manyhands.networks.q import build_bounded_actor, build_q_network


def actor_critic(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """Policy and value; with a memory where the algorithm's options ask for one."""
    common = _common(experiment)
    if units := getattr(experiment.options, "lstm", 0):
        return build_recurrent(observations, actions, units=units, **common)
    shared = experiment.run.shared_network
    return build_actor_critic(observations, actions, shared=shared, **common)


def q_network(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """The value of every action."""
    dueling = getattr(experiment.options, "dueling", False)
    return build_q_network(observations, actions, dueling=dueling, **_common(experiment))


def bounded_actor(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """A deterministic policy and its critic."""
    return build_bounded_actor(
        observations,
        actions,
        noise=experiment.options.noise,
        unit_actions=experiment.run.box_actions == "scale",
        **_common(experiment),
    )


def _common(experiment: Any) -> dict[str, Any]:
    run = experiment.run
    return {
        "hidden": run.hidden,
        "activation": run.activation,
        "seed": seeding.integer(run.seed, "weights"),
    }
