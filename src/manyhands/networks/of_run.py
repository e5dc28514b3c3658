"""The network that a configuration asks for, with the weights that its seed begins with."""

from __future__ import annotations

from typing import Any

from torch import nn

from manyhands import seeding
from manyhands.networks import own
from manyhands.networks.action_spaces import check_bounded, check_discrete
from manyhands.networks.build import build_actor_critic
from manyhands.networks.lstm import build_recurrent
from manyhands.networks.q import build_bounded_actor, build_q_network


def actor_critic(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """Policy and value; with a memory where the algorithm's options ask for one."""
    units = getattr(experiment.options, "lstm", 0)
    # What remembers stands between features and outputs.
    takes = (own.FEATURES,) if units else (own.FEATURES, own.POLICY_AND_VALUE)
    modules = _own(experiment, observations, actions, *takes)
    if modules is not None and modules.kind == own.POLICY_AND_VALUE:
        return modules.actor_critic()
    common = _common(experiment, modules)
    if units:
        return build_recurrent(observations, actions, units=units, **common)
    shared = experiment.run.shared_network
    return build_actor_critic(observations, actions, shared=shared, **common)


def q_network(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """The value of every action."""
    check_discrete(actions)
    modules = _own(experiment, observations, actions, own.FEATURES, own.Q_VALUES)
    if modules is not None and modules.kind == own.Q_VALUES:
        return modules.q_network()
    dueling = getattr(experiment.options, "dueling", False)
    return build_q_network(observations, actions, dueling=dueling, **_common(experiment, modules))


def bounded_actor(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """A deterministic policy and its critic."""
    check_bounded(actions)
    return build_bounded_actor(
        observations,
        actions,
        noise=experiment.options.noise,
        unit_actions=experiment.run.box_actions == "scale",
        **_common(experiment, _own(experiment, observations, actions, own.FEATURES)),
    )


def _own(experiment: Any, observations: Any, actions: Any, *takes: str) -> own.OwnModules | None:
    if not experiment.run.network:
        return None
    return own.OwnModules(experiment, observations, actions, *takes)


def _common(experiment: Any, modules: own.OwnModules | None) -> dict[str, Any]:
    run = experiment.run
    return {
        "encoder": modules and modules.encoder,
        "hidden": () if modules else run.hidden,  # what is hidden is the user's own
        "activation": run.activation,
        "seed": seeding.integer(run.seed, "weights"),
    }
