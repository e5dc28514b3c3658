"""Action distributions as pure functions over one tensor of parameters [N, P].

One tensor whatever the distribution, so that a rollout can store it, workers can send it and KL
can compare it. A Gaussian's log standard deviations are part of it: those of the *old* policy are
then its own, not the new one's by accident.

    Categorical        Discrete        P = n logits
    MultiCategorical   MultiDiscrete   P = n_1 + n_2 + … logits
    Bernoulli          MultiBinary     P = n logits
    DiagonalGaussian   Box             P = 2 d: means, then log standard deviations
    SquashedGaussian   bounded Box     the same, of what is squashed to the bounds by tanh

Actions are [N, *action_shape] in the terms of the space (a Discrete that starts at 1 gives 1, 2,
…), but for DiagonalGaussian, whose actions live on the unit scale until `to_env`. Actions that are
impossible now have the logit ILLEGAL (`masked`).

WHY not torch.distributions: its objects cost more to make and validate than a small forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.envs.spaces import UNBOUNDED
from manyhands.errors import ConfigError
from manyhands.trees import Array
from manyhands.types import MASK

ILLEGAL = -1e9  # logit of an impossible action: its exponential is exactly 0, and 0 · −10⁹ is 0
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_2 = math.log(2.0)
_INSIDE = 1.0 - 1e-6  # of a bound, where tanh can still be undone


class Head(Protocol):
    """What an action distribution can do. `parameters` is [N, P]; results are [N] or actions."""

    parameter_size: int  # P
    action_shape: tuple[int, ...]

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None) -> Tensor: ...

    def mode(self, parameters: Tensor) -> Tensor: ...

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor: ...

    def entropy(self, parameters: Tensor) -> Tensor: ...

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """KL(old || new), row by row. Detach `old` where it must stay fixed."""
        ...

    def to_env(self, actions: Array) -> Array:
        """Actions as the environment wants them: scaled, clipped, of the space's dtype."""
        ...


def masked(parameters: Tensor, observations: Any) -> Tensor:
    """Logits with those of impossible actions at ILLEGAL, where the observation has a mask.

    Log-probabilities, entropy and KL then need no other formula: such an action has probability 0,
    adds 0 to every sum, and sends no gradient back. The parameters that a rollout stores say which
    actions were possible.
    """
    if not isinstance(observations, dict) or MASK not in observations:
        return parameters
    mask = observations[MASK].reshape(-1, parameters.shape[-1])
    return parameters.masked_fill(mask == 0, ILLEGAL)


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last axis. WHY through columns: torch works along rows as short as a choice of six
    one number at a time; along columns it is six times as fast, forward and backward."""
    return logits.movedim(-1, 0).contiguous().log_softmax(0).movedim(0, -1)


class Categorical:
    """One choice of n."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start
        self.parameter_size = n
        self.action_shape: tuple[int, ...] = ()

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
        # A race of exponentials: choice i wins with probability softmax(logits)_i.
        clock = torch.empty_like(parameters).exponential_(generator=generator)
        return (parameters - clock.log_()).argmax(-1) + self.start

    def choose(self, parameters: Tensor, chance: Tensor) -> Tensor:
        """The choices that numbers [N], drawn evenly from 0 to 1 elsewhere, stand for: those of
        numpy_distributions.py."""
        below = (parameters - parameters.amax(-1, keepdim=True)).exp().cumsum(-1)
        return (below <= chance.unsqueeze(-1) * below[..., -1:]).sum(-1) + self.start

    def mode(self, parameters: Tensor) -> Tensor:
        return parameters.argmax(-1) + self.start

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        index = (actions.long() - self.start).unsqueeze(-1)
        return log_softmax(parameters).gather(-1, index).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        logp = log_softmax(parameters)
        return -(logp.exp() * logp).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        old_logp, new_logp = log_softmax(old), log_softmax(new)
        return (old_logp.exp() * (old_logp - new_logp)).sum(-1)

    def to_env(self, actions: Array) -> Array:
        return actions


class MultiCategorical:
    """Several independent choices; an action is one number for each."""

    def __init__(
        self,
        sizes: Sequence[int],
        starts: Sequence[int] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.sizes = [int(n) for n in sizes]
        starts = starts if starts is not None else [0] * len(self.sizes)
        self.parts = [Categorical(n, int(s)) for n, s in zip(self.sizes, starts, strict=True)]
        self.parameter_size = sum(self.sizes)
        self.action_shape = shape if shape is not None else (len(self.sizes),)

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
        parts = zip(self.parts, self._split(parameters), strict=True)
        return self._joined([part.sample(logits, generator) for part, logits in parts])

    def mode(self, parameters: Tensor) -> Tensor:
        parts = zip(self.parts, self._split(parameters), strict=True)
        return self._joined([part.mode(logits) for part, logits in parts])

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        columns = actions.reshape(len(actions), -1).unbind(-1)
        parts = zip(self.parts, self._split(parameters), columns, strict=True)
        return torch.stack([part.log_prob(logits, a) for part, logits, a in parts]).sum(0)

    def entropy(self, parameters: Tensor) -> Tensor:
        parts = zip(self.parts, self._split(parameters), strict=True)
        return torch.stack([part.entropy(logits) for part, logits in parts]).sum(0)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        parts = zip(self.parts, self._split(old), self._split(new), strict=True)
        return torch.stack([part.kl(p, q) for part, p, q in parts]).sum(0)

    def to_env(self, actions: Array) -> Array:
        return actions

    def _split(self, parameters: Tensor) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(parameters, self.sizes, -1)

    def _joined(self, columns: list[Tensor]) -> Tensor:
        return torch.stack(columns, -1).reshape(-1, *self.action_shape)


class Bernoulli:
    """n independent yes or no."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.parameter_size = math.prod(shape)
        self.action_shape = shape

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.empty_like(parameters).uniform_(generator=generator)
        yes = uniform < parameters.sigmoid()
        return yes.to(torch.int8).reshape(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        return (parameters > 0).to(torch.int8).reshape(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        sign = 2.0 * actions.reshape(len(actions), -1).to(parameters.dtype) - 1.0
        return functional.logsigmoid(sign * parameters).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return -self._expected(parameters, parameters).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        return (self._expected(old, old) - self._expected(old, new)).sum(-1)

    def to_env(self, actions: Array) -> Array:
        return actions

    @staticmethod
    def _expected(by: Tensor, of: Tensor) -> Tensor:
        """Expectation under `by` of log-probability under `of`, per component."""
        p = by.sigmoid()
        return p * functional.logsigmoid(of) + (1.0 - p) * functional.logsigmoid(-of)


class DiagonalGaussian:
    """Independent normals. The network learns on the unit scale; `to_env` maps to the bounds."""

    def __init__(self, low: Array, high: Array) -> None:
        self.action_shape: tuple[int, ...] = low.shape
        self.size: int = math.prod(self.action_shape)
        self.parameter_size = 2 * self.size
        self.dtype = low.dtype
        self.low, self.high = low, high
        # Bounded dimensions: [-1, 1] becomes [low, high]. Others pass through, then are clipped.
        # Bounds near the largest float are a way to say "none".
        bounded = (np.abs(low) < UNBOUNDED) & (np.abs(high) < UNBOUNDED)
        finite_low, finite_high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        self._scale = (0.5 * (finite_high - finite_low)).astype(low.dtype)
        self._offset = (0.5 * (finite_high + finite_low)).astype(low.dtype)

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return (mean + noise * log_std.exp()).reshape(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        mean: Tensor = parameters.chunk(2, -1)[0]
        return mean.reshape(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Density of the action before `to_env`: store that one, not the clipped one."""
        mean, log_std = parameters.chunk(2, -1)
        z = (actions.reshape(len(actions), -1) - mean) * torch.exp(-log_std)
        return -(0.5 * z.square() + log_std).sum(-1) - self.size * HALF_LOG_2PI

    def entropy(self, parameters: Tensor) -> Tensor:
        log_std = parameters.chunk(2, -1)[1]
        return log_std.sum(-1) + self.size * (0.5 + HALF_LOG_2PI)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Σ log σ₁/σ₀ + (σ₀² + (μ₀ − μ₁)²) / 2σ₁² − ½, with 0 the old and 1 the new policy."""
        mean0, log_std0 = old.chunk(2, -1)
        mean1, log_std1 = new.chunk(2, -1)
        spread = (2.0 * log_std0).exp() + (mean0 - mean1).square()
        return (log_std1 - log_std0 + 0.5 * spread * torch.exp(-2.0 * log_std1) - 0.5).sum(-1)

    def to_env(self, actions: Array) -> Array:
        scaled = actions * self._scale + self._offset
        return np.asarray(np.clip(scaled, self.low, self.high), self.dtype)


class SquashedGaussian(DiagonalGaussian):
    """a = middle + reach · tanh(u), u of independent normals: actions lie within the bounds.

    log p(a) = log N(u) − Σ log(1 − tanh² u) − Σ log reach             PAPER: arXiv:1801.01290
    """

    def __init__(self, low: Array, high: Array) -> None:
        super().__init__(low, high)
        flat_low, flat_high = low.ravel().astype(np.float32), high.ravel().astype(np.float32)
        self.middle, self.reach = (flat_high + flat_low) / 2, (flat_high - flat_low) / 2

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self._squashed(super().sample(parameters, generator))

    def mode(self, parameters: Tensor) -> Tensor:
        """The middle one: half of the draws lie on either side."""
        return self._squashed(super().mode(parameters))

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        middle, reach = self._bounds(parameters)
        unit = (actions.reshape(-1, self.size) - middle) / reach
        u = torch.atanh(unit.clamp(-_INSIDE, _INSIDE))
        return super().log_prob(parameters, u) - (log_slope_of_tanh(u) + reach.log()).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        raise ConfigError("the entropy of a squashed Gaussian has no formula: average −log p")

    def to_env(self, actions: Array) -> Array:
        return np.asarray(np.clip(actions, self.low, self.high), self.dtype)

    def _squashed(self, u: Tensor) -> Tensor:
        middle, reach = self._bounds(u)
        actions = middle + reach * torch.tanh(u.reshape(-1, self.size))
        return actions.reshape(-1, *self.action_shape)

    def _bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        # WHY by way of lists: arrays and tensors of a head are nothing that can be exported.
        middle, reach = self.middle.tolist(), self.reach.tolist()
        return torch.tensor(middle, device=like.device), torch.tensor(reach, device=like.device)


def log_slope_of_tanh(u: Tensor) -> Tensor:
    """log(1 − tanh² u), where 1 − tanh² u itself would round to 0, too."""
    return 2.0 * (_LOG_2 - u - functional.softplus(-2.0 * u))


def make_head(space: Any) -> Head:
    """The distribution for a Gymnasium action space."""
    name = type(space).__name__
    if name == "Discrete":
        return Categorical(int(space.n), int(space.start))
    if name == "MultiDiscrete":
        return MultiCategorical(
            space.nvec.ravel().tolist(), space.start.ravel().tolist(), tuple(space.nvec.shape)
        )
    if name == "MultiBinary":
        return Bernoulli(tuple(space.shape))
    if name == "Box" and np.dtype(space.dtype).kind == "f":
        return DiagonalGaussian(space.low, space.high)
    raise ConfigError(
        f"no policy for the action space {space}; give Discrete, MultiDiscrete, MultiBinary or a "
        "Box of floats"
    )
