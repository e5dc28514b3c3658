"""A2C: advantage actor-critic, one gradient step a batch. Paper: arXiv:1602.01783.

    collect T steps from B envs with π
    A = GAE(r, V, γ, λ)                     (λ = 1: n-step returns, as in the paper)
    L = −log π(a|s) A + c_v (V − R)² − c_e H,  averaged over all rows;  one step

Differs from the paper: synchronous, Adam instead of shared RMSProp, advantages optionally
normalised over the rows of all workers. With `--strategy gradient_server` it is A3C.
"""

from __future__ import annotations

import numpy as np
import torch

from manyhands.algorithms.base import (
    Across,
    Alone,
    Batch,
    Info,
    PolicyGradient,
    Signals,
    explained_variance,
    normalised,
)
from manyhands.algorithms.options import A2CConfig
from manyhands.math.schedules import make_schedule
from manyhands.trees import Array


class A2C(PolicyGradient):
    name = "a2c"
    stats = ("policy_loss", "value_loss", "entropy")
    options: A2CConfig

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        fit = explained_variance(batch, across)
        if o.normalize_advantages:
            batch = {**batch, "advantage": normalised(batch["advantage"], across)}
        info = self.descend(
            batch,
            across,
            epochs=1,
            minibatch=0,
            lr=make_schedule(o.learning_rate)(progress),
            max_grad_norm=o.max_grad_norm,
        )
        self.version += 1
        return info | {"explained_variance": fit}

    def push(self, batch: Batch) -> list[float]:
        """The gradient of one worker's own rows, averaged over them, into `flat.grad`: what a
        gradient server takes. The numbers to report, averaged too."""
        if self.options.normalize_advantages:
            batch = {**batch, "advantage": normalised(batch["advantage"], Alone())}
        rows = max(1, len(batch["target"]))
        return [value / rows for value in self.gradient(batch, rows)]

    def signals(self, logp: Array, entropy: Array, value: Array, rows: Batch) -> Signals:
        o = self.options
        error = value - rows["target"]
        stats = [
            -float(np.dot(logp, rows["advantage"])),
            float(np.dot(error, error)),
            float(entropy.sum()),
        ]
        return Signals(-rows["advantage"], -o.entropy_weight, 2 * o.value_weight * error, stats)

    def loss(
        self, parameters: torch.Tensor, value: torch.Tensor, rows: Batch
    ) -> tuple[torch.Tensor, list[float]]:
        o, head = self.options, self.model.head
        policy = -(head.log_prob(parameters, rows["action"]) * rows["advantage"]).sum()
        squares = (value - rows["target"]).square().sum()
        entropy = head.entropy(parameters).sum()
        total = policy + o.value_weight * squares - o.entropy_weight * entropy
        return total, [policy.item(), squares.item(), entropy.item()]
