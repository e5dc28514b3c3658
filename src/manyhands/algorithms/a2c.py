"""A2C: advantage actor-critic, one gradient step a batch. Paper: arXiv:1602.01783.

    collect T steps from B envs with π
    A = GAE(r, V, γ, λ)                     (λ = 1: n-step returns, as in the paper)
    L = −log π(a|s) A + c_v (V − R)² − c_e H,  averaged over all rows;  one step
    with `--critic-epochs` or `--critic-learning-rate`: V in steps of its own, after the policy's

Differs from the paper: synchronous, Adam instead of shared RMSProp, advantages optionally
normalised over the rows of all workers. With `--strategy gradient_server` it is A3C.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.algorithms.base import Across, Alone, PolicyGradient, explained_variance, normalised
from manyhands.algorithms.registry import A2CConfig
from manyhands.math import losses
from manyhands.math.optimiser import make_schedule
from manyhands.trees import Array
from manyhands.types import Batch, Info


class A2C(PolicyGradient):
    name = "a2c"
    on_device = True
    options: A2CConfig

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        fit = explained_variance(batch, across)
        if o.normalize_advantages:
            batch = normalised(batch, across)
        info = self.descend(
            batch,
            across,
            epochs=1,
            minibatch=0,
            lr=make_schedule(o.learning_rate)(progress),
            max_grad_norm=o.max_grad_norm,
        )
        info |= self.fit_value(batch, across, progress, epochs=1, minibatch=0)
        self.version += 1
        return info | {"explained_variance": fit}

    def push(self, batch: Batch) -> list[float]:
        """The gradient of one worker's own rows, averaged over them, into `flat.grad`: what a
        gradient server takes. The numbers to report, averaged too."""
        if self.options.normalize_advantages:
            batch = normalised(batch, Alone())
        rows = max(1, batch["target"].size)
        return [value / rows for value in self.gradient(batch, rows)]

    def policy_slope(self, logp: Array, rows: Batch) -> tuple[float, Array, list[float]]:
        return *losses.policy_gradient_slope(logp, rows["advantage"]), []

    def policy_loss(self, parameters: torch.Tensor, rows: Batch) -> tuple[torch.Tensor, list[Any]]:
        logp = self.model.head.log_prob(parameters, rows["action"])
        return losses.policy_gradient(logp, rows["advantage"]), []
