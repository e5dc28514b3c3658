"""A policy gradient's update on tensors that never leave their device.

    rollout ─► GAE ─► advantages, normalised ─► epochs of minibatches drawn there ─► Adam
    rollout ─► forward, V-trace, backward ─► Adam                          (IMPALA: TraceLearner)

The same update as `Algorithm.prepare` and `descend` make, with one worker: the same loss, the same
clip, the same Adam. Nothing is read back but what is reported, once an update and when it is asked
for (with `--target-kl` the KL of each minibatch, which may end the update). On a GPU a gradient
step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands import devices, seeding
from manyhands.algorithms.base import PolicyGradient
from manyhands.algorithms.impala import IMPALA
from manyhands.algorithms.registry import HOST_ONLY
from manyhands.collect.on_device import TensorRollout
from manyhands.math.optimiser import check_gradient, make_schedule
from manyhands.math.returns import gae_of_tensors
from manyhands.math.vtrace import vtrace
from manyhands.types import Batch, Info


def fits(algorithm: type[Any], options: Any) -> bool:
    """Whether this algorithm, with these options, learns on the device from end to end."""
    return getattr(algorithm, "on_device", False) and not any(
        getattr(options, name, 0) for name in HOST_ONLY
    )


class TensorLearner:
    """Updates of `algorithm` from rollouts of `rows` rows in all."""

    _fits_values = True  # to targets that are known before the update: how well is reported

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
        self._batch = self._columns()
        self._fit = torch.zeros((), device=device)
        self._chosen = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._rate = torch.zeros((), device=device)
        count = len(algorithm.stats)
        # Sums of what is reported, of all steps and of the last; the norm; whether all was finite.
        self._totals = torch.zeros(count, device=device)
        self._last = torch.zeros(count, device=device)
        self._norm = torch.zeros((), device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._given = 0.0
        self._taken = (0, 0)  # gradient steps, and rows, of the last update
        self._step = devices.Captured(self._gradient_step, device, (), "gradient step", say)

    def _columns(self) -> dict[str, Any]:
        """What rows are made of; of `obs` it is enough that some rows can be had of it."""
        r = self._rollout
        flat = {name: getattr(r, name).flatten(0, 1) for name in ("action", "logp")}
        flat["obs"] = r.obs.flatten(0, 1) if isinstance(r.obs, Tensor) else r.obs
        return flat | {name: torch.zeros_like(flat["logp"]) for name in ("advantage", "target")}

    def update(self, progress: float) -> Info:
        """Learn from what the rollout holds now."""
        self.launch(progress)
        return self.report()

    def launch(self, progress: float) -> None:
        """The whole update, without waiting for the device; `report` waits."""
        algorithm, o = self.algorithm, self.algorithm.options
        rate = make_schedule(o.learning_rate)(progress)
        limit = getattr(o, "target_kl", 0.0) * 1.5
        self._given = rate
        self._rate.fill_(rate)
        for tensor in (self._totals, self._last, self._norm):
            tensor.zero_()
        self._finite.fill_(True)
        with devices.said_what_fits(algorithm.device, self.size, o), devices.repeatable():
            self._prepare()
            self._taken = self._epochs(getattr(o, "epochs", 1), limit)
        algorithm.adam.count(self._taken[0])
        algorithm.version += 1

    def report(self) -> Info:
        """The numbers of the update that was launched last; those of the run's own mistakes."""
        algorithm, (steps, seen), rate = self.algorithm, self._taken, self._given
        numbers = torch.cat([self._totals, torch.stack([self._norm, self._finite, self._fit])])
        *sums, norm, finite, fit = numbers.tolist()
        check_gradient(norm if finite else float("nan"), algorithm.version)
        info = {name: total / seen for name, total in zip(algorithm.stats, sums, strict=True)}
        info |= {"grad_norm": norm, "learning_rate": rate, "gradient_steps": float(steps)}
        return info | ({"explained_variance": fit} if self._fits_values else {})

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

    def _completed(self, rows: Batch, parameters: Tensor, values: Tensor) -> Batch:
        """The rows with what follows from the policy as it is now."""
        return rows

    def _gradient_step(self, chosen: Tensor | None = None) -> None:
        """One step down the loss of the chosen rows. No number is read, no tensor moves."""
        algorithm, flat, o = self.algorithm, self.algorithm.flat, self.algorithm.options
        chosen = self._chosen if chosen is None else chosen
        rows = {name: column[chosen] for name, column in self._batch.items()}
        flat.zero_grad()
        parameters, values = algorithm.model(rows["obs"])
        rows = self._completed(rows, parameters, values)
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


class TraceLearner(TensorLearner):
    """IMPALA's updates: one pass over all rows, with V-trace between forward and backward."""

    _fits_values = False
    algorithm: IMPALA

    def _columns(self) -> dict[str, Any]:
        r, device = self._rollout, self.algorithm.device
        self._ones = torch.ones(self.rows, device=device)
        self._all = torch.arange(self.rows, device=device)
        # A number would be brought to the device each time, which a graph cannot.
        self._discount = torch.full((), self.algorithm.options.gamma, device=device)
        flat = r.obs.flatten(0, 1) if isinstance(r.obs, Tensor) else r.obs
        return {"obs": flat, "action": r.action.flatten(0, 1), "logp": r.logp.flatten(0, 1)}

    def _prepare(self) -> None:
        self._chosen.copy_(self._all)

    @torch.no_grad()
    def _completed(self, rows: Batch, parameters: Tensor, values: Tensor) -> Batch:
        o, r, shape = self.algorithm.options, self._rollout, self._rollout.logp.shape
        target_logp = self.algorithm.model.head.log_prob(parameters, rows["action"])
        value = values.view(shape)
        following = torch.cat([value[1:], r.next_value[-1:]])
        # The collector has computed V of last observations with these very weights.
        following = torch.where(r.truncated, r.next_value, following)
        traced = vtrace(
            r.logp, target_logp.view(shape), r.reward, value, following, r.terminated, r.truncated,
            discounts=self._discount, rho_bar=o.rho_bar, c_bar=o.c_bar, lam=o.vtrace_lambda,
        )  # fmt: skip
        log_ratio = target_logp - rows["logp"]
        rho, advantage = log_ratio.exp().clamp(max=o.rho_bar), traced.advantages.flatten()
        if o.normalize_advantages:  # as `normalised_under` in impala.py
            total = rho.double().sum().clamp(min=1e-8)
            centred = advantage - rho * (advantage.double().sum() / total).to(rho.dtype)
            spread = (centred.double().square().sum() / total).sqrt() + 1e-8
            advantage = (centred / spread).to(rho.dtype)
        if o.clip > 0:  # as `_far_enough` there
            ratio = log_ratio.clamp(max=20.0).exp()
            far = torch.where(advantage > 0, ratio > 1 + o.clip, ratio < 1 - o.clip)
            advantage = advantage * ~far
        return rows | {"target": traced.targets.flatten(), "advantage": advantage,
                       "weight": self._ones, "rho": rho}  # fmt: skip
