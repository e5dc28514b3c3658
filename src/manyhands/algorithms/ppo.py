"""PPO: several epochs of clipped, or KL-penalised, policy gradient. Paper: arXiv:1707.06347.

    collect T steps from B envs with π_old
    A = GAE(r, V, γ, λ), normalised over the rows of all workers
    for epoch, minibatch:  L = −min(ρ A, clip(ρ, 1±ε) A) + c_v (V − R)² − c_e H,   ρ = π / π_old
    stop the update when KL(π_old || π) passes its limit

Differs from the paper: the value loss is not clipped; advantages are normalised once a batch, not
once a minibatch, so that they do not depend on how rows are shared out; all workers stop alike.
With `--kl-penalty` the clip is replaced by β KL, β adapted after each update (section 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.algorithms.base import (
    Across,
    Batch,
    Info,
    PolicyGradient,
    Signals,
    explained_variance,
    normalised,
)
from manyhands.algorithms.options import PPOConfig
from manyhands.math.losses import adapt_kl_coefficient
from manyhands.math.schedules import make_schedule
from manyhands.trees import Array


class PPO(PolicyGradient):
    name = "ppo"
    stats = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction")
    options: PPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kl_weight = 1.0
        if self.options.kl_penalty:
            self.fast = None  # the penalty is written in torch only

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        fit = explained_variance(batch, across)
        if o.normalize_advantages:
            batch = {**batch, "advantage": normalised(batch["advantage"], across)}
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
            self.kl_weight = adapt_kl_coefficient(
                self.kl_weight, info["kl"], target=o.target_kl or 0.01
            )
            info["kl_weight"] = self.kl_weight
        self.version += 1
        return info | {"explained_variance": fit}

    def signals(self, logp: Array, entropy: Array, value: Array, rows: Batch) -> Signals:
        o, advantage = self.options, rows["advantage"]
        log_ratio = logp - rows["logp"]
        ratio = np.exp(log_ratio)
        plain = ratio * advantage
        # min(ρA, clip(ρ)A) has the gradient of ρA where it is the smaller, and none elsewhere.
        held = np.clip(ratio, 1 - o.clip, 1 + o.clip) * advantage
        active = plain <= held
        error = value - rows["target"]
        stats = [
            -float(np.minimum(plain, held).sum()),
            float(np.dot(error, error)),
            float(entropy.sum()),
            float((ratio - 1 - log_ratio).sum()),
            float(np.count_nonzero(np.abs(ratio - 1) > o.clip)),
        ]
        d_value = (2 * o.value_weight) * error
        return Signals(np.where(active, -plain, 0), -o.entropy_weight, d_value, stats)

    def loss(
        self, parameters: torch.Tensor, value: torch.Tensor, rows: Batch
    ) -> tuple[torch.Tensor, list[float]]:
        o, head = self.options, self.model.head
        log_ratio = head.log_prob(parameters, rows["action"]) - rows["logp"]
        ratio = log_ratio.exp()
        plain = ratio * rows["advantage"]
        held = ratio.clamp(1 - o.clip, 1 + o.clip) * rows["advantage"]
        if o.kl_penalty:
            kl = head.kl(rows["parameters"], parameters)
            policy = (-plain + self.kl_weight * kl).sum()
        else:
            kl = ratio - 1 - log_ratio
            policy = -torch.minimum(plain, held).sum()
        squares = (value - rows["target"]).square().sum()
        entropy = head.entropy(parameters).sum()
        total = policy + o.value_weight * squares - o.entropy_weight * entropy
        clipped = float(((ratio - 1).abs() > o.clip).sum())
        stats = [policy.item(), squares.item(), entropy.item(), kl.sum().item(), clipped]
        return total, stats

    def state(self) -> dict[str, Any]:
        return super().state() | {"kl_weight": self.kl_weight}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.kl_weight = float(state["kl_weight"])
