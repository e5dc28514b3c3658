"""Networks that learn from a replay: Q(s, ·) for DQN; μ(s) and Q(s, a) for DDPG.

    QNetwork        observation ── encoder ── hidden layers ── out        -> Q [N, n]
                    out: a linear layer, or dueling:  Q = V + A − mean(A)    PAPER: arXiv:1511.06581
    BoundedActor    observation ── encoder ── hidden layers ── tanh to the bounds     -> μ [N, d]
    + its critic    observation ── encoder ─┬─ hidden layers ── out       -> Q [N]
                    action, on [-1, 1] ─────┘

Both have the parts by which a saved policy is loaded, evaluated, drawn and exported: `head`,
`policy`, `value`, and `policy_encoder`, `policy_trunk`, `policy_out` one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.envs.spaces import check_bounded, check_discrete
from manyhands.networks import own
from manyhands.networks.encoders import (
    Encoder,
    Observations,
    has_image,
    linear,
    make_encoder,
    mlp,
)
from manyhands.networks.heads import Categorical, DiagonalGaussian, masked
from manyhands.networks.numpy_mlp import can_encode

OUT_GAIN, ACTOR_GAIN = 1.0, 0.01
_NO_NOISE = 1e-8  # a deviation of zero, of which the logarithm can be taken


def q_network(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """The value of every action."""
    check_discrete(actions)
    modules = own.modules(experiment, observations, actions, own.FEATURES, own.Q_VALUES)
    if modules is not None and modules.kind == own.Q_VALUES:
        return modules.q_network()
    dueling = getattr(experiment.options, "dueling", False)
    common = own.common(experiment, modules)
    return build_q_network(observations, actions, dueling=dueling, **common)


def bounded_actor(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """A deterministic policy and its critic."""
    check_bounded(actions)
    modules = own.modules(experiment, observations, actions, own.FEATURES)
    return build_bounded_actor(
        observations,
        actions,
        noise=experiment.options.noise,
        unit_actions=experiment.run.box_actions == "scale",
        **own.common(experiment, modules),
    )


class DuelingOut(nn.Module):
    """Q = V + A − mean(A): what a state is worth is learned from every action taken in it."""

    def __init__(self, inputs: int, actions: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.out_features = actions
        self.parts = linear(inputs, 1 + actions, OUT_GAIN, generator)  # V, then A

    def forward(self, features: Tensor) -> Tensor:
        value, advantage = self.parts(features).split([1, self.out_features], -1)
        q: Tensor = value + advantage - advantage.mean(-1, keepdim=True)
        return q


class QNetwork(nn.Module):
    """forward(observations) -> Q [N, n], one number an action; ILLEGAL for impossible ones."""

    def __init__(
        self,
        head: Categorical,
        encoder: Encoder,
        *,
        hidden: Sequence[int],
        activation: str,
        dueling: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.head = head
        width = hidden[-1] if hidden else encoder.features
        self.policy_encoder = encoder
        self.policy_trunk = mlp(
            encoder.features, hidden, activation=activation, generator=generator
        )
        self.policy_out: DuelingOut | nn.Linear = (
            DuelingOut(width, head.n, generator)
            if dueling
            else linear(width, head.n, OUT_GAIN, generator)
        )

    def forward(self, observations: Observations) -> Tensor:
        q: Tensor = self.policy_out(self.policy_trunk(self.policy_encoder(observations)))
        return masked(q, observations)

    def policy(self, observations: Observations) -> Tensor:
        """Q as the parameters of a choice: the likeliest is the best; draws are softmax of Q."""
        return self(observations)  # type: ignore[no-any-return]

    def value(self, observations: Observations) -> Tensor:
        """max Q, [N]."""
        best: Tensor = self(observations).amax(-1)
        return best


class BoundedOut(nn.Module):
    """middle + reach · tanh(linear): actions that lie within the bounds whatever is learned."""

    middle: Tensor
    reach: Tensor

    def __init__(self, inputs: int, low: Any, high: Any, generator: torch.Generator | None) -> None:
        super().__init__()
        low, high = np.ravel(low).astype(np.float32), np.ravel(high).astype(np.float32)
        self.out_features = len(low)
        self.linear = linear(inputs, self.out_features, ACTOR_GAIN, generator)
        self.register_buffer("middle", torch.from_numpy((high + low) / 2))
        self.register_buffer("reach", torch.from_numpy((high - low) / 2))

    def forward(self, features: Tensor) -> Tensor:
        actions: Tensor = self.middle + self.reach * torch.tanh(self.linear(features))
        return actions

    def unit(self, actions: Tensor) -> Tensor:
        """The same actions on [-1, 1], as the critic takes them."""
        return (actions.reshape(-1, self.out_features) - self.middle) / self.reach


class BoundedActor(nn.Module):
    """A deterministic policy and its critic; the policy's parameters come first."""

    log_std: Tensor

    def __init__(
        self,
        head: DiagonalGaussian,
        encoders: tuple[Encoder, Encoder],
        bounds: tuple[Any, Any],
        *,
        hidden: Sequence[int],
        critic_hidden: Sequence[int],
        activation: str,
        noise: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.head = head
        encoder, critic_encoder = encoders
        width = hidden[-1] if hidden else encoder.features
        self.policy_encoder = encoder
        self.policy_trunk = mlp(
            encoder.features, hidden, activation=activation, generator=generator
        )
        self.policy_out = BoundedOut(width, *bounds, generator)
        inputs = critic_encoder.features + head.size
        self.critic_encoder = critic_encoder
        self.critic_trunk = mlp(inputs, critic_hidden, activation=activation, generator=generator)
        wide = critic_hidden[-1] if critic_hidden else inputs
        self.critic_out = linear(wide, 1, OUT_GAIN, generator)
        deviation = torch.clamp(noise * self.policy_out.reach, min=_NO_NOISE)
        self.register_buffer("log_std", deviation.log())

    def forward(self, observations: Observations) -> Tensor:
        """μ(s), flat: [N, d]."""
        actions: Tensor = self.policy_out(self.policy_trunk(self.policy_encoder(observations)))
        return actions

    def q(self, observations: Observations, actions: Tensor) -> Tensor:
        """Q(s, a), [N]."""
        unit = self.policy_out.unit(actions.to(torch.float32))
        inputs = torch.cat([self.critic_encoder(observations), unit], -1)
        values: Tensor = self.critic_out(self.critic_trunk(inputs))
        return values.squeeze(-1)

    def policy(self, observations: Observations) -> Tensor:
        """μ(s), then the logarithm of the noise's deviation: as a Gaussian's parameters."""
        actions: Tensor = self(observations)
        return torch.cat([actions, self.log_std.expand_as(actions)], -1)

    def value(self, observations: Observations) -> Tensor:
        """Q(s, μ(s)), [N]."""
        return self.q(observations, self(observations))

    def policy_size(self) -> int:
        """How many of the flat parameters are the policy's; those of the critic follow."""
        own = (self.policy_encoder, self.policy_trunk, self.policy_out)
        return sum(p.numel() for part in own for p in part.parameters())


def build_q_network(
    observation_space: Any,
    action_space: Any,
    *,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    dueling: bool = False,
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> QNetwork:
    """Q(s, ·) for *single* Gymnasium spaces, the actions Discrete."""
    check_discrete(action_space)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    made = encoder() if encoder else make_encoder(observation_space, generator)
    return QNetwork(
        Categorical(int(action_space.n), int(action_space.start)),
        made,
        hidden=_hidden(hidden, made),
        activation=activation,
        dueling=dueling,
        generator=generator,
    )


def build_bounded_actor(
    observation_space: Any,
    action_space: Any,
    *,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    noise: float = 0.1,
    unit_actions: bool = False,
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> BoundedActor:
    """μ(s) and Q(s, a) for *single* Gymnasium spaces, the actions a Box with finite bounds.

    Args:
        noise: deviation of the actions that a saved policy draws, in parts of half the range.
        unit_actions: actions on [-1, 1], for environments that scale them to their bounds.
    """
    check_bounded(action_space)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    make = encoder or partial(make_encoder, observation_space, generator)
    encoders = (make(), make())
    low, high = action_space.low, action_space.high
    bounds = (np.full_like(low, -1.0), np.full_like(high, 1.0)) if unit_actions else (low, high)
    layers = _hidden(hidden, encoders[0])
    return BoundedActor(
        DiagonalGaussian(low, high),
        encoders,
        bounds,
        hidden=layers,
        # CRUCIAL behind features of the user's own, which know nothing of the action: a value that
        # is linear in the action has the same best action in every state.
        critic_hidden=(encoders[1].features,) if encoder else layers,
        activation=activation,
        noise=noise,
        generator=generator,
    )


def _hidden(hidden: Sequence[int] | None, encoder: Encoder) -> Sequence[int]:
    if hidden is not None:
        return hidden
    return () if has_image(encoder) else (64, 64)


def is_plain(model: nn.Module) -> bool:
    """Whether numpy can do this model's arithmetic: no image, on the CPU, tanh or relu."""
    if not isinstance(model, QNetwork | BoundedActor) or not can_encode(model.policy_encoder):
        return False
    trunks = [getattr(model, name, ()) for name in ("policy_trunk", "critic_trunk")]
    parts = [part for trunk in trunks for part in trunk]
    return (
        type(model) in (QNetwork, BoundedActor)  # a subclass may have a forward of its own
        and all(isinstance(part, nn.Linear | nn.Tanh | nn.ReLU) for part in parts)
        and all(p.device.type == "cpu" and p.requires_grad for p in model.parameters())
    )
