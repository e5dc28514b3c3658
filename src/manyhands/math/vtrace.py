"""V-trace: value targets and policy-gradient advantages from stale behaviour policies.

PAPER: arXiv:1802.01561, section 4.1. With ρ_t = min(ρ̄, π/μ) and c_t = λ min(c̄, π/μ):

    δ_t = ρ_t (r_t + γ_t V(x_{t+1}) − V(x_t))
    v_t = V(x_t) + δ_t + γ_t c_t (v_{t+1} − V(x_{t+1}))                        (remark 1)
    policy-gradient advantage:  ρ_t (r_t + γ_t v_{t+1} − V(x_t))               (section 4.2)

and v_T = V(x_T) where the unroll is cut: the recursion starts from a *difference* of zero, never
from a value of zero, so the last reward enters every target. A terminated step has γ_t = 0. A
truncated step bootstraps from V(final observation), and no later v reaches back across it.

torch, not numpy: the learner has the target log-probabilities and values on its own device, and a
trip to numpy would stop a GPU at every update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.errors import ConfigError


class VTrace(NamedTuple):
    """Both [T, B], neither carries a gradient."""

    targets: Tensor  # v_t, what the value function is regressed on
    advantages: Tensor  # with the importance weight ρ_t inside


@torch.no_grad()
def vtrace(
    behaviour_logp: Tensor,
    target_logp: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    discounts: float | Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float | None = None,
    lam: float = 1.0,
) -> VTrace:
    """V-trace targets and advantages.

    Args:
        behaviour_logp: log μ(a|x) of the policy that acted, [T, B].
        target_logp: log π(a|x) of the policy being learned, [T, B].
        rewards: [T, B].
        values: V(x_t), [T, B].
        next_values: V of the observation after step t (the final one on truncation), [T, B].
        terminated: bool [T, B].
        truncated: bool [T, B].
        discounts: γ, a number or [T, B]; zero after a terminated step is applied here.
        rho_bar: ρ̄, decides which policy's value function the targets stand for.
        c_bar: c̄, decides how far corrections travel back: speed, not the fixed point.
        pg_rho_bar: Clip of the weight in the advantages; None: the same as rho_bar.
        lam: λ of remark 2, one in the paper's experiments.
    """
    _same_shapes(behaviour_logp, target_logp, rewards, values, next_values, terminated, truncated)
    ratio = torch.exp(target_logp - behaviour_logp)
    rho = ratio.clamp(max=rho_bar)
    c = lam * ratio.clamp(max=c_bar)
    discount = torch.as_tensor(discounts, dtype=values.dtype, device=values.device)
    discount = torch.where(terminated, 0.0, discount)
    bootstrap = next_values.masked_fill(terminated, 0.0)  # not a product: 0 * inf would be nan
    delta = rho * (rewards + discount * bootstrap - values)
    keep = (discount * c).masked_fill(truncated, 0.0)

    targets = values + _backward_sums(delta, keep)

    # v_{t+1}: of the same episode inside the unroll; V(x') where the unroll or the clock ended;
    # after a terminated step it does not matter, the discount there is zero.
    following = bootstrap.clone()
    following[:-1] = torch.where(truncated[:-1], bootstrap[:-1], targets[1:])
    pg_rho = rho if pg_rho_bar is None else ratio.clamp(max=pg_rho_bar)
    return VTrace(targets, pg_rho * (rewards + discount * following - values))


def _backward_sums(delta: Tensor, keep: Tensor) -> Tensor:
    """x_t = δ_t + keep_t x_{t+1}, in log₂ T passes over all of time (as in returns.py)."""
    sums, reach = delta.clone(), keep.clone()
    span = 1
    while span < len(sums):
        sums[:-span] += reach[:-span] * sums[span:]
        reach[:-span] = reach[:-span] * reach[span:]
        span *= 2
    return sums


def _same_shapes(first: Tensor, *others: Tensor) -> None:
    if first.dim() != 2 or any(x.shape != first.shape for x in others):
        shapes = ", ".join(str(tuple(x.shape)) for x in (first, *others))
        raise ConfigError(f"V-trace needs tensors of one shape [T, B], got {shapes}")
