"""The parts of a trust-region step: flat parameters, Fisher products, CG, line search. torch.

    g = ∇ objective,   F = ∇² KL(old || new) at new = old          PAPER: arXiv:1502.05477, app. C
    s = (F + damping I)⁻¹ g                                        conjugate gradient
    step = s √(2 max_kl / sᵀ(F + damping I)s)                      quadratic model of the KL
    the largest of step, step/2, step/4, … that is finite, improves and keeps KL ≤ max_kl

Over several workers each has its own rows and the same parameters. Every `mean` argument is then
the average over workers; with one worker it is the identity. CRUCIAL: every number that steers a
loop or a branch here went through `mean` first, so all workers make the same calls in the same
order and end with the same parameters. `mean` weights workers alike: give it means over equal
numbers of rows, or scale the local numbers by rows · workers / all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.errors import ConfigError

Mean = Callable[[Tensor], Tensor]
Product = Callable[[Tensor], Tensor]


class Solution(NamedTuple):
    """What conjugate gradient found."""

    x: Tensor
    iterations: int
    residual: float  # |b − A x|²


class TrustRegionStep(NamedTuple):
    """A full step, before the line search."""

    step: Tensor | None  # None: there is no usable direction; leave the parameters alone
    expected_improvement: float  # gᵀ step, the linear model's promise
    iterations: int


class LineSearch(NamedTuple):
    """How the line search ended. Numbers are means over workers."""

    accepted: bool
    fraction: float  # of the full step; 0 when nothing was accepted
    improvement: float
    kl: float
    tries: int


def itself(x: Tensor) -> Tensor:
    """The mean over one worker."""
    return x


def flat_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """A copy of all parameters, end to end."""
    return torch.cat([p.detach().reshape(-1) for p in parameters])


@torch.no_grad()
def set_flat_parameters(parameters: Sequence[Tensor], flat: Tensor) -> None:
    """Write a flat vector into the parameters, in place: views of their memory stay valid."""
    offset = 0
    for p in parameters:
        p.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
    if offset != len(flat):
        raise ConfigError(f"{len(flat)} flat numbers for parameters that hold {offset}")


def flat_gradient(
    scalar: Tensor,
    parameters: Sequence[Tensor],
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> Tensor:
    """∇ scalar, end to end. Parameters that the scalar does not depend on get zeros."""
    gradients = torch.autograd.grad(
        scalar,
        list(parameters),
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return torch.cat([g.reshape(-1) for g in gradients])


def fisher_product(kl: Tensor, parameters: Sequence[Tensor], mean: Mean = itself) -> Product:
    """v -> F v, by a second backward pass through ∇ KL, averaged over workers.

    Args:
        kl: Mean of KL(old || new) over the rows, with `old` detached from the graph and equal in
            value to `new`. Only then is its Hessian the Fisher matrix.
        parameters: What F is taken with respect to.
        mean: Average over workers; one call per product.
    """
    gradient = flat_gradient(kl, parameters, create_graph=True)

    def product(v: Tensor) -> Tensor:
        return mean(flat_gradient(gradient @ v, parameters, retain_graph=True))

    return product


def conjugate_gradient(
    product: Product,
    b: Tensor,
    *,
    iterations: int = 10,
    damping: float = 0.0,
    tolerance: float = 1e-10,
) -> Solution:
    """Solve (A + damping I) x = b for a symmetric positive A given by its products.

    Stops after `iterations`, when |residual|² ≤ tolerance |b|², or when a direction shows no
    positive curvature (A is singular there, or the numbers went bad): x is then the best so far.
    The tolerance is relative because the step that follows does not depend on the size of b.
    """
    x = torch.zeros_like(b)
    residual = b.clone()
    direction = b.clone()
    square = float(residual @ residual)
    enough = tolerance * square
    done = 0
    while done < iterations and square > enough:
        image = product(direction) + damping * direction
        curvature = float(direction @ image)
        if not (curvature > 0.0 and math.isfinite(curvature)):
            break
        length = square / curvature
        x = x + length * direction
        residual = residual - length * image
        last, square = square, float(residual @ residual)
        direction = residual + (square / last) * direction
        done += 1
    return Solution(x, done, square)


def trust_region_step(
    gradient: Tensor,
    product: Product,
    *,
    max_kl: float,
    damping: float = 0.1,
    iterations: int = 10,
    tolerance: float = 1e-10,
) -> TrustRegionStep:
    """The step of steepest ascent whose modelled KL is max_kl.

    Args:
        gradient: Of the objective to be raised, already averaged over workers.
        product: v -> F v, already averaged over workers.
        max_kl: Radius of the trust region.
        damping: Added to the diagonal of F, in the solution and in the length alike.
        iterations: Of conjugate gradient.
        tolerance: Of conjugate gradient.
    """
    if not bool(torch.isfinite(gradient).all()):
        return TrustRegionStep(None, 0.0, 0)
    found = conjugate_gradient(
        product, gradient, iterations=iterations, damping=damping, tolerance=tolerance
    )
    if found.iterations == 0:  # a zero gradient: nothing to improve, and no product was called
        return TrustRegionStep(None, 0.0, 0)
    curvature = float(found.x @ (product(found.x) + damping * found.x))
    if not (curvature > 0.0 and math.isfinite(curvature)):
        return TrustRegionStep(None, 0.0, found.iterations)
    step = found.x * math.sqrt(2.0 * max_kl / curvature)
    return TrustRegionStep(step, float(gradient @ step), found.iterations)


def line_search(
    parameters: Sequence[Tensor],
    step: Tensor,
    evaluate: Callable[[], tuple[Tensor, Tensor]],
    *,
    max_kl: float,
    mean: Mean = itself,
    expected_improvement: float = 0.0,
    accept_ratio: float = 0.0,
    shrink: float = 0.5,
    tries: int = 10,
) -> LineSearch:
    """Take the largest of step, shrink·step, shrink²·step, … that is good, or none at all.

    Good: objective and KL finite, KL ≤ max_kl, and an improvement above zero and of at least
    accept_ratio of what the linear model promised for that fraction. When none is good, or when
    `evaluate` raises, the parameters are restored bit for bit.

    Args:
        parameters: Changed in place.
        step: Full step, the same on all workers.
        evaluate: (objective to be raised, mean KL(old || new)) at the parameters as they are now.
        max_kl: Radius of the trust region.
        mean: Average over workers of a tensor [2]; called once before and once per try.
        expected_improvement: gᵀ step of the full step.
        accept_ratio: Share of the expected improvement that must be reached.
        shrink: Factor from one try to the next.
        tries: Number of candidates.
    """

    def agreed() -> tuple[float, float]:
        with torch.no_grad():
            objective, kl = evaluate()
            # A nan or inf of one worker survives the average, so all workers see it.
            both = mean(torch.stack([objective.detach(), kl.detach()]))
        return float(both[0]), float(both[1])

    start = flat_parameters(parameters)
    before, _ = agreed()
    accepted = False
    improvement = kl = math.nan
    try:
        for attempt in range(tries):
            fraction = shrink**attempt
            set_flat_parameters(parameters, start + fraction * step)
            after, kl = agreed()
            improvement = after - before
            needed = accept_ratio * expected_improvement * fraction
            finite = math.isfinite(improvement) and math.isfinite(kl)
            accepted = finite and kl <= max_kl and improvement > 0.0 and improvement >= needed
            if accepted:
                return LineSearch(True, fraction, improvement, kl, attempt + 1)
        return LineSearch(False, 0.0, improvement, kl, tries)
    finally:
        if not accepted:
            set_flat_parameters(parameters, start)
