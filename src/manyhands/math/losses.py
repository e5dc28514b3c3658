"""Every loss that trains, once: its value in torch, and beside it value and slope in numpy.

Torch's autograd differentiates the first; the second is for networks whose gradient is worked out
in numpy, which for small ones is several times as fast. All are *sums* over rows [N], to be
minimised: the division, by the rows of all workers, is the seam's.

Shapes are checked in torch: [N] against [N, 1] broadcasts to [N, N] and still trains, badly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import ConfigError
from manyhands.trees import Array


class Surrogate(NamedTuple):
    """A policy loss and what one wants to see of it, as sums. Only `loss` carries a gradient."""

    loss: Any  # a tensor, or in numpy a number
    kl: Any  # of KL(behaviour || new), estimated by (ρ − 1) − log ρ, which is never negative
    clipped: Any  # rows whose ratio is outside the clip range


# -- the policy ------------------------------------------------------------------------------------


def clipped_surrogate(
    logp: Tensor, behaviour_logp: Tensor, advantage: Tensor, clip: float
) -> Surrogate:
    """−Σ min(ρ A, clip(ρ, 1−ε, 1+ε) A),  ρ = π / μ. PAPER: arXiv:1707.06347, eq. 7."""
    _same_shapes(logp, behaviour_logp, advantage)
    log_ratio = logp - behaviour_logp
    ratio = log_ratio.exp()
    plain = ratio * advantage
    held = ratio.clamp(1 - clip, 1 + clip) * advantage
    return Surrogate(
        -torch.minimum(plain, held).sum(),
        (ratio - 1 - log_ratio).detach().sum(),
        ((ratio - 1).detach().abs() > clip).sum(),
    )


def clipped_surrogate_slope(
    logp: Array, behaviour_logp: Array, advantage: Array, clip: float
) -> tuple[Surrogate, Array]:
    """The same in numpy, and ∂loss/∂logp [N]."""
    log_ratio = logp - behaviour_logp
    ratio = np.exp(log_ratio)
    plain = ratio * advantage
    # Two bare ufuncs: on a minibatch np.clip takes twice as long.
    held = np.minimum(np.maximum(ratio, 1 - clip), 1 + clip) * advantage
    found = Surrogate(
        -float(np.minimum(plain, held).sum()),
        float((ratio - 1 - log_ratio).sum()),
        float(np.count_nonzero(np.abs(ratio - 1) > clip)),
    )
    # The smaller one's slope: ∂ρ/∂logp = ρ, and none where the clip holds.
    return found, np.where(plain <= held, -plain, 0)


def penalised_surrogate(
    logp: Tensor, behaviour_logp: Tensor, advantage: Tensor, kl: Tensor, weight: float
) -> Tensor:
    """Σ (−ρ A + β KL). PAPER: arXiv:1707.06347, eq. 8."""
    return (-importance(logp, behaviour_logp, advantage) + weight * kl).sum()


def importance(logp: Tensor, behaviour_logp: Tensor, advantage: Tensor) -> Tensor:
    """ρ A of each row: TRPO maximises its mean. PAPER: arXiv:1502.05477, eq. 14."""
    _same_shapes(logp, behaviour_logp, advantage)
    return (logp - behaviour_logp).exp() * advantage


def policy_gradient(logp: Tensor, advantage: Tensor) -> Tensor:
    """−Σ log π(a|s) A, the advantages held fixed: A2C, and IMPALA with those of V-trace."""
    _same_shapes(logp, advantage)
    return -(logp * advantage.detach()).sum()


def policy_gradient_slope(logp: Array, advantage: Array) -> tuple[float, Array]:
    """The same in numpy, and ∂loss/∂logp [N]."""
    return -float(np.dot(logp, advantage)), -advantage


# -- values ----------------------------------------------------------------------------------------


def squares(value: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ w (V − R)²."""
    _same_shapes(value, target)
    found = (value - target).square()
    return found.sum() if weight is None else (found * weight).sum()


def squares_slope(value: Array, target: Array, weight: Array | None = None) -> tuple[float, Array]:
    """The same in numpy, and ∂loss/∂V [N]; a weight is 0 or 1."""
    error = value - target if weight is None else (value - target) * weight
    return float(np.dot(error, error)), 2 * error


def huber(error: Tensor, kappa: float) -> Tensor:
    """½ δ² up to κ, then a straight line, row by row; κ = 0: the square everywhere."""
    if kappa <= 0.0:
        return 0.5 * error.square()
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), "none", delta=kappa)


def huber_slope(error: Array, kappa: float) -> tuple[Array, Array]:
    """The same in numpy, and ∂loss/∂δ, row by row."""
    if kappa <= 0.0:
        return 0.5 * error * error, error
    slope = np.clip(error, -kappa, kappa)
    return slope * (error - 0.5 * slope), slope


# -- around them -----------------------------------------------------------------------------------


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


def _same_shapes(first: Tensor, *others: Tensor) -> None:
    if any(x.shape != first.shape for x in others):
        shapes = ", ".join(str(tuple(x.shape)) for x in (first, *others))
        raise ConfigError(f"a loss needs tensors of one shape, got {shapes}")
