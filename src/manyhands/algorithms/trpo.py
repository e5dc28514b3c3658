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
from typing import Any

import torch

from manyhands import trees
from manyhands.algorithms.base import (
    Across,
    Algorithm,
    ValueFit,
    explained_variance,
    forward,
    normalised,
    value_from,
)
from manyhands.algorithms.registry import TRPOConfig
from manyhands.errors import ConfigError
from manyhands.math import losses
from manyhands.math.natural_gradient import (
    fisher_product,
    flat_gradient,
    line_search,
    trust_region_step,
)
from manyhands.math.optimiser import check_gradient, make_schedule
from manyhands.networks.build import ActorCritic, to_tensor
from manyhands.types import Batch, Info


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
        self.critic = ValueFit(self, self.adam)

    def moved_from(self, model: ActorCritic) -> int:
        return value_from(model)  # the policy has a way of its own

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        fit = explained_variance(batch, across)
        if o.normalize_advantages:
            batch = normalised(batch, across)
        batch = self.brought(batch)
        policy = self._improve_policy(batch, across)
        value = self.descend(
            {k: batch[k] for k in self.critic.columns},
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
        columns = ("obs", "action", "logp", "advantage", "parameters", *self._of_sequences)
        given = {k: to_tensor(batch[k], self.device) for k in columns}
        count = total * (batch["logp"].shape[1] if self.recurrent else 1)
        weights = self.model.policy_parameters()

        def surrogate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """This worker's parts of mean(ρ A), mean KL and mean entropy over all rows."""
            parameters, rows = self._policy(given)
            logp = head.log_prob(parameters, rows["action"])
            gain = losses.importance(logp, rows["logp"], rows["advantage"])
            kl = head.kl(rows["parameters"], parameters)
            entropy = head.entropy(parameters)
            gain, kl, entropy = (_weighted(x, rows) for x in (gain, kl, entropy))
            return (
                gain.sum() / count,
                kl.sum() / count,
                entropy.sum() / count,
            )

        objective, _, entropy = surrogate()
        gradient = across.sum(flat_gradient(objective, weights))
        check_gradient(float(gradient.norm()), self.version + 1)
        step = trust_region_step(
            gradient,
            self._fisher(given, weights, first, total, across),
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
        """v -> F v on every k-th row of all workers' rows, counted in their common order; with a
        memory, on every k-th sequence."""
        k = max(1, self.options.fisher_every)
        chosen = slice((-first) % k, None, k)
        used = -(-total // k)
        parameters, some = self._policy(trees.take(rows, chosen))
        kl = _weighted(self.model.head.kl(parameters.detach(), parameters), some)
        length = rows["logp"].shape[1] if self.recurrent else 1
        return fisher_product(kl.sum() / (used * length), weights, across.sum)

    def _policy(self, rows: Batch) -> tuple[torch.Tensor, Batch]:
        """(distribution parameters, the rows themselves)."""
        if not self.recurrent:
            return self.model.policy(rows["obs"]), rows
        parameters, _, flat = forward(self.model, rows)
        return parameters, flat

    @property
    def _of_sequences(self) -> tuple[str, ...]:
        return ("state", "first", "weight") if self.recurrent else ()

    def gradient(self, rows: Batch, count: int) -> list[float]:
        """Of the squared error of the value; the policy has had its step."""
        return self.critic.gradient(rows, count)


def _weighted(x: torch.Tensor, rows: Batch) -> torch.Tensor:
    """Rows of sequences that are no transition count for nothing."""
    return x * rows["weight"] if "weight" in rows else x
