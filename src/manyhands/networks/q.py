"""Networks that learn from a replay: Q(s, ·) for choices; a policy and Q(s, a) for numbers.

    QNetwork        observation ── encoder ── hidden layers ── out        -> Q [N, n]
                    out: a linear layer, or dueling:  Q = V + A − mean(A)    PAPER: arXiv:1511.06581
    BoundedActor    observation ── encoder ── hidden layers ── tanh to the bounds     -> μ [N, d]
    + its critic    observation ── encoder ─┬─ hidden layers ── out       -> Q [N]
                    action, on [-1, 1] ─────┘
    TwinActor       a policy with two such critics, side by side          -> Q [2, N]

All have the parts by which a saved policy is loaded, evaluated, drawn and exported: `head`,
`policy`, `value`, and `policy_encoder`, `policy_trunk`, `policy_out` one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.envs.spaces import check_bounded, check_discrete
from manyhands.networks import own
from manyhands.networks.encoders import (
    ACTIVATIONS,
    HIDDEN_GAIN,
    Encoder,
    Observations,
    has_image,
    linear,
    make_encoder,
    mlp,
)
from manyhands.networks.flat import FlatParameters
from manyhands.networks.heads import Categorical, DiagonalGaussian, SquashedGaussian, masked
from manyhands.networks.numpy_mlp import can_encode, encoding
from manyhands.networks.wide_mlp import WideMLPs

OUT_GAIN, ACTOR_GAIN = 1.0, 0.01
LOG_STDS = -20.0, 2.0  # of a GaussianOut
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


def _middle_and_reach(low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """Of the bounds of actions, flat."""
    low, high = np.ravel(low).astype(np.float32), np.ravel(high).astype(np.float32)
    return torch.from_numpy((high + low) / 2), torch.from_numpy((high - low) / 2)


class BoundedOut(nn.Module):
    """middle + reach · tanh(linear): actions that lie within the bounds whatever is learned."""

    middle: Tensor
    reach: Tensor

    def __init__(self, inputs: int, low: Any, high: Any, generator: torch.Generator | None) -> None:
        super().__init__()
        middle, reach = _middle_and_reach(low, high)
        self.out_features = len(middle)
        self.linear = linear(inputs, self.out_features, ACTOR_GAIN, generator)
        self.register_buffer("middle", middle)
        self.register_buffer("reach", reach)

    def forward(self, features: Tensor) -> Tensor:
        actions: Tensor = self.middle + self.reach * torch.tanh(self.linear(features))
        return actions

    def unit(self, actions: Tensor) -> Tensor:
        """The same actions on [-1, 1], as the critic takes them."""
        return (actions.reshape(-1, self.out_features) - self.middle) / self.reach


class _PolicyFirst(nn.Module):
    """A policy with critics: the policy's parameters come first, those of the critics follow."""

    policy_encoder: Encoder
    policy_trunk: nn.Sequential
    policy_out: nn.Module

    def forward(self, observations: Observations) -> Tensor:
        """What the policy's last layer gives; of a deterministic one μ(s), flat: [N, d]."""
        given: Tensor = self.policy_out(self.policy_trunk(self.policy_encoder(observations)))
        return given

    def policy_size(self) -> int:
        """How many of the flat parameters are the policy's."""
        own = (self.policy_encoder, self.policy_trunk, self.policy_out)
        return sum(p.numel() for part in own for p in part.parameters())


class BoundedActor(_PolicyFirst):
    """A deterministic policy and its critic."""

    log_std: Tensor
    policy_out: BoundedOut

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


class GaussianOut(nn.Module):
    """Means, then logarithms of deviations between bounds: a policy that is certain of everything,
    or of nothing, would learn no more."""

    def __init__(self, inputs: int, size: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.out_features = size
        self.linear = linear(inputs, 2 * size, ACTOR_GAIN, generator)

    def forward(self, features: Tensor) -> Tensor:
        mean, log_std = self.linear(features).chunk(2, -1)
        return torch.cat([mean, log_std.clamp(*LOG_STDS)], -1)


class TwinCritic(nn.Module):
    """Two critics of one shape: inputs [N, F] -> Q [2, N], one batched product a layer."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for below, above in itertools.pairwise([inputs, *hidden, 1]):
            gain = OUT_GAIN if len(self.weights) == len(hidden) else HIDDEN_GAIN
            pair = [linear(below, above, gain, generator) for _ in range(2)]
            self.weights.append(torch.stack([layer.weight.detach() for layer in pair]))
            self.biases.append(torch.stack([layer.bias.detach()[None] for layer in pair]))
        self.activation = ACTIVATIONS[activation]()

    def forward(self, inputs: Tensor, *, held: bool = False) -> Tensor:
        """`held`: the weights get no gradient; what they are given does."""
        x = inputs.expand(2, *inputs.shape)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if i:
                x = self.activation(x)
            if held:
                weight, bias = weight.detach(), bias.detach()
            x = torch.baddbmm(bias, x, weight.transpose(1, 2))
        return x.squeeze(-1)


class TwinActor(_PolicyFirst):
    """A policy and two critics.

    Args:
        out: makes the policy's last layer for features of this width; it gives the parameters of
            `head`, or the means alone where `log_std` has the rest.
        bounds: of actions.
        log_std: of the noise of a deterministic policy.
    """

    middle: Tensor
    reach: Tensor
    log_std: Tensor | None

    def __init__(
        self,
        head: DiagonalGaussian,
        encoders: tuple[Encoder, Encoder],
        out: Callable[[int], nn.Module],
        bounds: tuple[Any, Any],
        *,
        hidden: Sequence[int],
        critic_hidden: Sequence[int],
        activation: str,
        generator: torch.Generator | None,
        log_std: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.policy_encoder, self.critic_encoder = encoders
        features = self.policy_encoder.features
        self.policy_trunk = mlp(features, hidden, activation=activation, generator=generator)
        self.policy_out = out(hidden[-1] if hidden else features)
        inputs = self.critic_encoder.features + head.size
        self.critics = TwinCritic(inputs, critic_hidden, activation, generator)
        middle, reach = _middle_and_reach(*bounds)
        self.register_buffer("middle", middle)
        self.register_buffer("reach", reach)
        self.register_buffer("log_std", log_std)

    def policy(self, observations: Observations) -> Tensor:
        """The parameters of `head`."""
        given: Tensor = self(observations)
        if self.log_std is None:
            return given
        return torch.cat([given, self.log_std.expand_as(given)], -1)

    def unit(self, actions: Tensor) -> Tensor:
        """Actions on [-1, 1], as the critics take them: [N, d]."""
        return (actions.to(torch.float32).reshape(-1, self.head.size) - self.middle) / self.reach

    def q(self, observations: Observations, unit: Tensor, *, held: bool = False) -> Tensor:
        """Both critics' values of actions on [-1, 1]: [2, N]. `held`: no gradient of their own."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not held):
            features = self.critic_encoder(observations)
        values: Tensor = self.critics(torch.cat([features, unit], -1), held=held)
        return values

    def value(self, observations: Observations) -> Tensor:
        """The lower of the two values of the policy's likeliest action, [N]."""
        actions = self.head.mode(self.policy(observations))
        return self.q(observations, self.unit(actions)).amin(0)


class FastTwin:
    """A TwinActor on the CPU without autograd, for learners: see WideMLPs."""

    def __init__(self, model: TwinActor, flat: FlatParameters) -> None:
        self._encode = encoding(model.policy_encoder)
        grads = flat.gradients()
        names = [f"policy_trunk.{2 * i}" for i in range((len(model.policy_trunk) + 1) // 2)]
        names.append("policy_out.linear")
        own = dict(model.named_parameters())
        layers = [
            (own[f"{n}.weight"].detach()[None], own[f"{n}.bias"].detach()[None, None])
            for n in names
        ]
        gradients = [(grads[f"{n}.weight"][None], grads[f"{n}.bias"][None, None]) for n in names]
        kind = type(model.critics.activation)
        self.policy = WideMLPs(layers, gradients, kind)
        weights = [weight.detach() for weight in model.critics.weights]
        biases = [bias.detach() for bias in model.critics.biases]
        pairs = list(zip(weights, biases, strict=True))
        slopes = [
            (grads[f"critics.weights.{i}"], grads[f"critics.biases.{i}"]) for i in range(len(pairs))
        ]
        self.critics = WideMLPs(pairs, slopes, kind)
        self.first_critic = WideMLPs(
            [(w[:1], b[:1]) for w, b in pairs], [(w[:1], b[:1]) for w, b in slopes], kind
        )

    def encode(self, observations: Observations) -> Tensor:
        return torch.from_numpy(self._encode(observations))

    def q(self, x: Tensor, unit: Tensor) -> Tensor:
        """Both critics' values of encoded observations and actions on [-1, 1]: [2, N]."""
        return self.critics.forward(torch.cat([x, unit], -1))[..., 0]

    def q_backward(self, d_q: Tensor) -> None:
        """The critics' gradient, from ∂loss/∂Q [2, N]."""
        self.critics.backward(d_q[..., None])

    def q_slope(self, d_q: Tensor, size: int) -> Tensor:
        """∂loss/∂action [N, size], from ∂loss/∂Q [2, N]; the critics' gradient stays."""
        return self.critics.backward(d_q[..., None], into_parameters=False, down=size)

    def climbed(self, x: Tensor, unit: Tensor) -> Tensor:
        """∂ −Σ Q_1 / ∂action [N, size]: the first critic alone is asked."""
        q = self.first_critic.forward(torch.cat([x, unit], -1))
        down = torch.full_like(q, -1.0)
        return self.first_critic.backward(down, into_parameters=False, down=unit.shape[1])


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
    parts = _actor_parts(observation_space, hidden, seed, encoder)
    bounds = _bounds(action_space, unit_actions)
    head = DiagonalGaussian(action_space.low, action_space.high)
    encoders = parts.pop("encoders")
    return BoundedActor(head, encoders, bounds, activation=activation, noise=noise, **parts)


def build_twin_actor(
    observation_space: Any,
    action_space: Any,
    *,
    squashed: bool,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    noise: float = 0.1,
    unit_actions: bool = False,
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> TwinActor:
    """A policy and two critics for *single* Gymnasium spaces, the actions a Box with finite bounds.

    Args:
        squashed: a Gaussian that tanh brings to the bounds; else μ(s), and noise as in
            `build_bounded_actor`.
    """
    parts = _actor_parts(observation_space, hidden, seed, encoder)
    low, high = bounds = _bounds(action_space, unit_actions)
    encoders, generator = parts.pop("encoders"), parts["generator"]
    common = {"activation": activation, **parts}
    if squashed:
        head = SquashedGaussian(low, high)
        return TwinActor(
            head, encoders, lambda width: GaussianOut(width, head.size, generator), bounds, **common
        )
    reach = torch.from_numpy(np.ravel(high - low).astype(np.float32) / 2)
    log_std = torch.clamp(noise * reach, min=_NO_NOISE).log()
    return TwinActor(
        DiagonalGaussian(action_space.low, action_space.high), encoders,
        lambda width: BoundedOut(width, low, high, generator), bounds, log_std=log_std, **common,
    )  # fmt: skip


def _actor_parts(
    observation_space: Any,
    hidden: Sequence[int] | None,
    seed: int | None,
    encoder: Callable[[], Any] | None,
) -> dict[str, Any]:
    """What a policy with critics is made of, whatever they are."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    make = encoder or partial(make_encoder, observation_space, generator)
    encoders = (make(), make())
    layers = _hidden(hidden, encoders[0])
    return {
        "encoders": encoders,
        "hidden": layers,
        # CRUCIAL behind features of the user's own, which know nothing of the action: a value that
        # is linear in the action has the same best action in every state.
        "critic_hidden": (encoders[1].features,) if encoder else layers,
        "generator": generator,
    }


def _bounds(space: Any, unit_actions: bool) -> tuple[Any, Any]:
    low, high = space.low, space.high
    return (np.full_like(low, -1.0), np.full_like(high, 1.0)) if unit_actions else (low, high)


def _hidden(hidden: Sequence[int] | None, encoder: Encoder) -> Sequence[int]:
    if hidden is not None:
        return hidden
    return () if has_image(encoder) else (64, 64)


def is_plain(model: Any) -> bool:
    """Whether numpy can do this model's arithmetic (of a TwinActor the policy's): no image, on the
    CPU, tanh or relu."""
    if type(model) not in (QNetwork, BoundedActor, TwinActor):
        return False  # a subclass may have a forward of its own
    trunks = [getattr(model, name, ()) for name in ("policy_trunk", "critic_trunk")]
    parts = [part for trunk in trunks for part in trunk]
    return (
        can_encode(model.policy_encoder)
        and all(isinstance(part, nn.Linear | nn.Tanh | nn.ReLU) for part in parts)
        and all(p.device.type == "cpu" and p.requires_grad for p in model.parameters())
    )
