"""A policy gradient's update on tensors that never leave their device.

    rollout ─► GAE ─► advantages, normalised ─► epochs of minibatches drawn there ─► Adam

The same update as `Algorithm.prepare` and `descend` make, with one worker: the same loss, the same
clip, the same Adam. Nothing is read back but what is reported, once an update (with `--target-kl`
the KL of each minibatch, which may end the update). On a GPU a gradient step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands import devices, seeding
from manyhands.algorithms.base import PolicyGradient
from manyhands.collect.on_device import TensorRollout
from manyhands.math.optimiser import check_gradient, make_schedule
from manyhands.math.returns import gae_of_tensors
from manyhands.types import Info


def fits(algorithm: type[Any], options: Any) -> bool:
    """Whether this algorithm, with these options, learns on the device from end to end."""
    others = ("lstm", "critic_learning_rate", "critic_epochs", "kl_penalty")
    return getattr(algorithm, "on_device", False) and not any(
        getattr(options, name, 0) for name in others
    )


class TensorLearner:
    """Updates of `algorithm` from rollouts of `rows` rows in all."""

    def __init__(
        self, algorithm: PolicyGradient, rollout: TensorRollout, *, seed: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.algorithm, self._rollout = algorithm, rollout
        o, device = algorithm.options, algorithm.device
        self.rows = rollout.reward.numel()
        self.size = min(getattr(o, "minibatch", 0) or self.rows, self.rows)
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seeding.integer(seed, "minibatch"))
        flat = {name: getattr(rollout, name).flatten(0, 1) for name in ("obs", "action", "logp")}
        self._batch = flat | {
            "advantage": torch.zeros_like(flat["logp"]), "target": torch.zeros_like(flat["logp"])
        }  # fmt: skip
        self._fit = torch.zeros((), device=device)
        self._chosen = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._rate = torch.zeros((), device=device)
        count = len(algorithm.stats)
        # Sums of what is reported, of all steps and of the last; the norm; whether all was finite.
        self._totals = torch.zeros(count, device=device)
        self._last = torch.zeros(count, device=device)
        self._norm = torch.zeros((), device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._step = devices.Captured(self._gradient_step, device, (), "gradient step", say)

    def update(self, progress: float) -> Info:
        """Learn from what the rollout holds now."""
        algorithm, o = self.algorithm, self.algorithm.options
        rate = make_schedule(o.learning_rate)(progress)
        limit = getattr(o, "target_kl", 0.0) * 1.5
        self._rate.fill_(rate)
        for tensor in (self._totals, self._last, self._norm):
            tensor.zero_()
        self._finite.fill_(True)
        with devices.said_what_fits(algorithm.device, self.size, o):
            self._prepare()
            steps, seen = self._epochs(getattr(o, "epochs", 1), limit)
        algorithm.adam.count(steps)
        algorithm.version += 1
        numbers = torch.cat([self._totals, torch.stack([self._norm, self._finite, self._fit])])
        *sums, norm, finite, fit = numbers.tolist()
        check_gradient(norm if finite else float("nan"), algorithm.version)
        info = {name: total / seen for name, total in zip(algorithm.stats, sums, strict=True)}
        return info | {
            "grad_norm": norm, "learning_rate": rate, "gradient_steps": float(steps),
            "explained_variance": fit,
        }  # fmt: skip

    @torch.no_grad()
    def _prepare(self) -> None:
        o, r, batch = self.algorithm.options, self._rollout, self._batch
        found = gae_of_tensors(
            r.reward, r.value, r.next_value, r.terminated, r.truncated,
            gamma=o.gamma, lam=o.gae_lambda,
        )  # fmt: skip
        advantage, target = (x.flatten() for x in found)
        batch["target"].copy_(target)
        spread, left = (x.double().var(correction=0) for x in (target, target - r.value.flatten()))
        self._fit.copy_(torch.where(spread > 0, 1.0 - left / spread, 0.0))
        if o.normalize_advantages:
            wide = advantage.double()
            advantage = (wide - wide.mean()) / (wide.std(correction=0) + 1e-8)
        batch["advantage"].copy_(advantage)

    def _epochs(self, epochs: int, limit: float) -> tuple[int, int]:
        """(gradient steps, rows learned from)."""
        steps = seen = 0
        for _ in range(epochs):
            order = self._order()
            for at in range(0, self.rows, self.size):
                chosen = order[at : at + self.size]
                if len(chosen) == self.size:
                    self._chosen.copy_(chosen)
                    self._step()
                else:  # the rest of an epoch is shorter than a graph is for
                    self._gradient_step(chosen)
                steps, seen = steps + 1, seen + len(chosen)
                if limit and self._kl() / len(chosen) > limit:
                    return steps, seen
        return steps, seen

    def _order(self) -> Tensor:
        if self.size == self.rows:
            return torch.arange(self.rows, device=self._chosen.device)
        return torch.randperm(self.rows, generator=self.generator, device=self._chosen.device)

    def _kl(self) -> float:
        return float(self._last[self.algorithm.stats.index("kl")])

    def _gradient_step(self, chosen: Tensor | None = None) -> None:
        """One step down the loss of the chosen rows. No number is read, no tensor moves."""
        algorithm, flat, o = self.algorithm, self.algorithm.flat, self.algorithm.options
        chosen = self._chosen if chosen is None else chosen
        rows = {name: column[chosen] for name, column in self._batch.items()}
        flat.zero_grad()
        parameters, values = algorithm.model(rows["obs"])
        loss, sums = algorithm.loss(parameters, values, rows)
        (loss / len(chosen)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._last.copy_(torch.stack([x.detach().to(torch.float32) for x in sums]))
            self._totals.add_(self._last)
            norm = torch.linalg.vector_norm(flat.grad)
            finite = norm.isfinite()
            self._norm.copy_(norm)
            self._finite.logical_and_(finite)
            # A gradient that is not finite moves nothing: the update then ends with an error.
            scale = (o.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            flat.grad.copy_(torch.where(finite, flat.grad * scale, 0.0))
            algorithm.adam.step_on_device(flat.grad, self._rate * finite)
