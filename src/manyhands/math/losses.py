"""Losses of the policy-gradient family, and the servo of the KL penalty. Pure torch functions.

Each takes flat minibatches [N] and returns a mean to be *minimised*. Shapes are checked, because
[N] against [N, 1] broadcasts to [N, N] and still trains, badly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.errors import ConfigError


class Surrogate(NamedTuple):
    """A policy loss and what one wants to see of it. Only `loss` carries a gradient."""

    loss: Tensor
    approx_kl: Tensor  # of KL(behaviour || new): mean of (ratio − 1) − log ratio, never negative
    clip_fraction: Tensor  # share of the rows whose ratio was outside the clip range


def normalise(x: Tensor, *, mean: float, std: float, epsilon: float = 1e-8) -> Tensor:
    """(x − mean) / (std + ε), with the moments of *all* workers' data.

    The moments are keyword-only: torch.std_mean gives them in the other order than most expect.
    """
    return (x - mean) / (std + epsilon)


def policy_loss(logp: Tensor, behaviour_logp: Tensor, advantages: Tensor) -> Surrogate:
    """−mean(ratio A): the surrogate of TRPO and of the KL-penalised PPO, without a clip."""
    return clipped_policy_loss(logp, behaviour_logp, advantages, clip=float("inf"))


def clipped_policy_loss(
    logp: Tensor, behaviour_logp: Tensor, advantages: Tensor, clip: float
) -> Surrogate:
    """−mean(min(ratio A, clip(ratio, 1−ε, 1+ε) A)). PAPER: arXiv:1707.06347, eq. 7."""
    _same_shapes(logp, behaviour_logp, advantages)
    log_ratio = logp - behaviour_logp
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        approx_kl = ((ratio - 1.0) - log_ratio).mean()
        clip_fraction = ((ratio - 1.0).abs() > clip).to(ratio.dtype).mean()
    return Surrogate(loss, approx_kl, clip_fraction)


def policy_gradient_loss(logp: Tensor, advantages: Tensor) -> Tensor:
    """−mean(log π(a|s) A), the advantages held fixed: A2C, and IMPALA with V-trace advantages."""
    _same_shapes(logp, advantages)
    return -(logp * advantages.detach()).mean()


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """½ mean((V − R)²)."""
    _same_shapes(values, returns)
    return 0.5 * (values - returns).square().mean()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ mean(max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²)): the worse of the two."""
    _same_shapes(values, old_values, returns)
    near = old_values + (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, clipped).mean()


def entropy_loss(entropy: Tensor, coefficient: float) -> Tensor:
    """−c mean(H). A positive coefficient explores; a negative one would be a mistake of sign."""
    if coefficient < 0:
        raise ConfigError(
            f"entropy coefficient {coefficient} is negative, which punishes exploration; "
            f"give {-coefficient}"
        )
    return -coefficient * entropy.mean()


def kl_penalty(kl: Tensor, coefficient: float, *, target: float, steep: float = 50.0) -> Tensor:
    """β KL + η max(0, KL − 2 target)², with KL the mean over the rows: [N] -> scalar.

    The square is a wall against one bad update; β alone only reacts in the next one.
    """
    mean_kl = kl.mean()
    return coefficient * mean_kl + steep * (mean_kl - 2.0 * target).clamp(min=0.0).square()


def adapt_kl_coefficient(
    coefficient: float,
    kl: float,
    *,
    target: float,
    tolerance: float = 1.5,
    factor: float = 2.0,
    bounds: tuple[float, float] = (1e-4, 1e4),
) -> float:
    """The servo: β grows when KL overshot its target, shrinks when it undershot.

    PAPER: arXiv:1707.06347, section 4. `kl` must be the mean over all workers, or their penalties
    drift apart. A KL that is not finite counts as an overshoot.
    """
    if not kl <= target * tolerance:
        coefficient *= factor
    elif kl < target / tolerance:
        coefficient /= factor
    return min(max(coefficient, bounds[0]), bounds[1])


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R): 1 is perfect, 0 no better than a constant; 0 if R is constant."""
    _same_shapes(values, returns)
    spread = returns.var(correction=0)
    unexplained = (returns - values).var(correction=0)
    return torch.where(spread > 0, 1.0 - unexplained / spread, torch.zeros_like(spread))


def _same_shapes(first: Tensor, *others: Tensor) -> None:
    if any(x.shape != first.shape for x in others):
        shapes = ", ".join(str(tuple(x.shape)) for x in (first, *others))
        raise ConfigError(f"a loss needs tensors of one shape, got {shapes}")
