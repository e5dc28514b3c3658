"""PPO: several epochs of clipped, or KL-penalised, policy gradient. Paper: arXiv:1707.06347.

    collect T steps from B envs with π_old
    A = GAE(r, V, γ, λ), normalised over the rows of all workers
    for epoch, minibatch:  L = −min(ρ A, clip(ρ, 1±ε) A) + c_v (V − R)² − c_e H,   ρ = π / π_old
    stop the update when KL(π_old || π) passes its limit
    with `--critic-epochs` or `--critic-learning-rate`: V in passes of its own, after the policy's

Differs from the paper: the value loss is not clipped; advantages are normalised once a batch, not
once a minibatch, so that they do not depend on how rows are shared out; all workers stop alike.
With `--kl-penalty` the clip is replaced by β KL, β adapted after each update (section 4).
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.algorithms.base import Across, PolicyGradient, explained_variance, normalised
from manyhands.algorithms.registry import PPOConfig
from manyhands.math import losses
from manyhands.math.optimiser import make_schedule
from manyhands.trees import Array
from manyhands.types import Batch, Info


class PPO(PolicyGradient):
    name = "ppo"
    stats = (*PolicyGradient.stats, "kl", "clip_fraction")
    on_device = True
    options: PPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kl_weight = 1.0
        if self.options.kl_penalty:
            self.fast = None  # the penalty is written in torch only

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        fit = explained_variance(batch, across)
        # What minibatches are not asked for is not copied into them.
        unused = {"value"} if o.kl_penalty else {"value", "parameters"}
        batch = {name: column for name, column in batch.items() if name not in unused}
        if o.normalize_advantages:
            batch = normalised(batch, across)
        batch = self.brought(batch)  # once, for the critic's passes too
        limit = 1.5 * o.target_kl if o.target_kl > 0 and not o.kl_penalty else float("inf")
        info = self.descend(
            batch,
            across,
            epochs=o.epochs,
            minibatch=o.minibatch,
            lr=make_schedule(o.learning_rate)(progress),
            max_grad_norm=o.max_grad_norm,
            stop=lambda now: now["kl"] > limit,
        )
        if o.kl_penalty:
            self.kl_weight = losses.adapt_kl_coefficient(
                self.kl_weight, info["kl"], target=o.target_kl or 0.01
            )
            info["kl_weight"] = self.kl_weight
        info |= self.fit_value(batch, across, progress, epochs=o.epochs, minibatch=o.minibatch)
        self.version += 1
        return info | {"explained_variance": fit}

    def policy_slope(self, logp: Array, rows: Batch) -> tuple[float, Array, list[float]]:
        found, slope = losses.clipped_surrogate_slope(
            logp, rows["logp"], rows["advantage"], self.options.clip
        )
        return found.loss, slope, [found.kl, found.clipped]

    def policy_loss(self, parameters: torch.Tensor, rows: Batch) -> tuple[torch.Tensor, list[Any]]:
        o, head = self.options, self.model.head
        logp = head.log_prob(parameters, rows["action"])
        found = losses.clipped_surrogate(logp, rows["logp"], rows["advantage"], o.clip)
        if not o.kl_penalty:
            return found.loss, [found.kl, found.clipped]
        kl = head.kl(rows["parameters"], parameters) * rows.get("weight", 1.0)
        loss = losses.penalised_surrogate(logp, rows["logp"], rows["advantage"], kl, self.kl_weight)
        return loss, [kl.detach().sum(), found.clipped]

    def state(self) -> dict[str, Any]:
        return super().state() | {"kl_weight": self.kl_weight}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.kl_weight = float(state["kl_weight"])
