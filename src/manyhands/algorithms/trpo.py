"""TRPO: the natural-gradient step within a KL radius. Paper: arXiv:1502.05477.

    collect rows with π_old;  A = GAE(r, V, γ, λ), normalised over the rows of all workers
    g = ∇ mean(ρ A);  s = F⁻¹ g by conjugate gradient, F from products on every k-th row
    step = s √(2 δ / sᵀ F s);  halve it until KL ≤ δ and the surrogate has improved, else stay
    V: epochs of Adam on (V − R)²

Gradient, Fisher products and the line search's two numbers are sums over the rows of all workers,
so that all workers take the same decision. Differs from the paper: GAE, a neural value function,
damping on F's diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from manyhands.algorithms.base import (
    Across,
    Algorithm,
    Batch,
    Info,
    Signals,
    explained_variance,
    normalised,
    to_tensor,
)
from manyhands.errors import ConfigError
from manyhands.math.natural_gradient import (
    fisher_product,
    flat_gradient,
    line_search,
    trust_region_step,
)
from manyhands.math.schedules import make_schedule
from manyhands.networks.build import ActorCritic
from manyhands.trees import Array


@dataclass(frozen=True)
class TRPOConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 256

    max_kl: float = 0.01
    """Radius of the trust region: KL between the policies before and after an update."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.97
    """Trade between bias (0) and variance (1) of the advantages."""
    cg_iterations: int = 10
    """Steps of conjugate gradient."""
    cg_damping: float = 0.1
    """Added to the diagonal of the Fisher matrix."""
    fisher_every: int = 5
    """Fisher products use every k-th row only."""
    line_search_tries: int = 10
    """Halvings of the step before it is given up."""
    value_learning_rate: float | str = 1e-3
    """Step size of the value function."""
    value_epochs: int = 10
    """Passes of the value function over each batch."""
    value_minibatch: int = 256
    """Rows of one step of the value function, of all workers together."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Epsilon of the value function's Adam."""


class TRPO(Algorithm):
    name = "trpo"
    stats = ("value_loss",)
    options: TRPOConfig

    def __init__(self, model: ActorCritic, options: TRPOConfig, **kwargs: Any) -> None:
        if model.shared:
            raise ConfigError(
                "TRPO needs separate networks for policy and value: fitting the value would move a "
                "shared trunk, and with it the policy, out of the trust region"
            )
        super().__init__(model, options, **kwargs)

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        fit = explained_variance(batch, across)
        if o.normalize_advantages:
            batch = {**batch, "advantage": normalised(batch["advantage"], across)}
        policy = self._improve_policy(batch, across)
        value = self.descend(
            batch,
            across,
            epochs=o.value_epochs,
            minibatch=o.value_minibatch,
            lr=make_schedule(o.value_learning_rate)(progress),
            max_grad_norm=math.inf,
        )
        self.version += 1
        return policy | value | {"explained_variance": fit}

    def _improve_policy(self, batch: Batch, across: Across) -> Info:
        o, head = self.options, self.model.head
        first, total = across.place(len(batch["logp"]))
        rows = {
            k: to_tensor(batch[k], self.device)
            for k in ("obs", "action", "logp", "advantage", "parameters")
        }
        weights = self.model.policy_parameters()

        def surrogate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """This worker's parts of mean(ρ A), mean KL and mean entropy over all rows."""
            parameters = self.model.policy(rows["obs"])
            ratio = (head.log_prob(parameters, rows["action"]) - rows["logp"]).exp()
            kl = head.kl(rows["parameters"], parameters)
            entropy = head.entropy(parameters)
            return (
                (ratio * rows["advantage"]).sum() / total,
                kl.sum() / total,
                entropy.sum() / total,
            )

        objective, _, entropy = surrogate()
        gradient = across.sum(flat_gradient(objective, weights))
        step = trust_region_step(
            gradient,
            self._fisher(rows, weights, first, total, across),
            max_kl=o.max_kl,
            damping=o.cg_damping,
            iterations=o.cg_iterations,
        )
        info = {
            "entropy": float(across.sum(entropy.detach())),
            "cg_iterations": float(step.iterations),
            "step_fraction": 0.0,
            "kl": 0.0,
            "improvement": 0.0,
        }
        if step.step is None:
            return info
        found = line_search(
            weights,
            step.step,
            lambda: surrogate()[:2],
            max_kl=o.max_kl,
            mean=across.sum,  # the parts are divided by all rows already
            tries=o.line_search_tries,
        )
        return info | {
            "step_fraction": found.fraction,
            "kl": found.kl if found.accepted else 0.0,
            "improvement": found.improvement if found.accepted else 0.0,
        }

    def _fisher(
        self, rows: Batch, weights: list[Any], first: int, total: int, across: Across
    ) -> Any:
        """v -> F v on every k-th row of all workers' rows, counted in their common order."""
        k = max(1, self.options.fisher_every)
        chosen = slice((-first) % k, None, k)
        used = -(-total // k)
        obs = rows["obs"]
        some = {n: x[chosen] for n, x in obs.items()} if isinstance(obs, dict) else obs[chosen]
        parameters = self.model.policy(some)
        kl = self.model.head.kl(parameters.detach(), parameters).sum() / used
        return fisher_product(kl, weights, across.sum)

    def signals(self, logp: Array, entropy: Array, value: Array, rows: Batch) -> Signals:
        error = value - rows["target"]
        # Zero gradients leave the policy where the trust region put it: Adam has no momentum there.
        return Signals(np.zeros_like(logp), 0.0, 2 * error, [float(np.dot(error, error))])

    def loss(
        self, parameters: torch.Tensor, value: torch.Tensor, rows: Batch
    ) -> tuple[torch.Tensor, list[float]]:
        squares = (value - rows["target"]).square().sum()
        return squares, [squares.item()]
