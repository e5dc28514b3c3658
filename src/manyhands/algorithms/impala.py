"""IMPALA: actors and learners apart, V-trace in between. Paper: arXiv:1802.01561.

    actors    unrolls of T steps with μ, their policy of some updates ago
    learner   V-trace of π against μ gives targets v and advantages A  (math/vtrace.py)
    L = −log π(a|s) A + c_v (V − v)² − c_e H,  averaged over all rows;  one step

Differs from the paper: Adam instead of RMSProp (one optimiser for all algorithms here, and a step
size that suits several scales of reward); the mean over rows instead of the sum, so that a larger
batch needs no other step size; advantages optionally normalised over the rows of all learners, and
optionally clipped as in PPO (APPO), for a replay. With one worker it acts and learns in turn, and
V-trace is then the n-step return.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands import trees
from manyhands.algorithms.base import Across, Alone, PolicyGradient
from manyhands.algorithms.registry import IMPALAConfig
from manyhands.collect.rollout import Rollout
from manyhands.collect.unroll import Unroll
from manyhands.math import losses
from manyhands.math.optimiser import make_schedule
from manyhands.math.vtrace import vtrace
from manyhands.networks.build import RecurrentActorCritic, to_tensor
from manyhands.trees import Array
from manyhands.types import Batch, Info


class IMPALA(PolicyGradient):
    name = "impala"
    stats = (*PolicyGradient.stats, "rho")
    on_device = True
    options: IMPALAConfig

    def prepare(self, rollout: Rollout) -> Batch:
        """A worker's own fresh rollout: the values at its edges are known already."""
        batch = {
            name: getattr(rollout, name)
            for name in ("obs", "action", "logp", "reward", "terminated", "truncated", "valid")
        }
        return _flat(batch) | {"next_value": rollout.next_value}

    def prepare_unroll(self, unroll: Unroll) -> Batch:
        """What actors have sent, joined: the values at its edges are still to be computed."""
        length, width = unroll["reward"].shape
        at = unroll["edge_at"]
        batch = _flat(unroll) | {"edges": unroll["edges"], "edge_row": at[:, 0] * width + at[:, 1]}
        if self.recurrent:
            batch |= {"state": unroll["state"], "first": unroll["first"], "length": length}
        return batch

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        o = self.options
        _, count = across.place(int(batch["valid"].sum()))
        local = self._gradient(batch, count, across)
        grad, sums = self._seam(across, local)
        lr = make_schedule(o.learning_rate)(progress)
        norm = self.apply(grad, lr, o.max_grad_norm)
        self.version += 1
        info = dict(zip(self.stats, (sums / max(count, 1)).tolist(), strict=True))
        return info | {"grad_norm": norm, "learning_rate": lr, "gradient_steps": 1.0}

    def gradient(self, rows: Batch, count: int) -> list[float]:
        return self._gradient(rows, count, Alone())

    def _gradient(self, rows: Batch, count: int, across: Across) -> list[float]:
        if self.fast is not None:
            logp, entropy, pull, values = self.see(rows)
            rows = rows | self._traced(logp, values, self._edge_values(rows), rows, across)
            return self.backward(logp, entropy, pull, values, rows, count)
        self.flat.zero_grad()
        on_device = {k: to_tensor(v, self.device) for k, v in rows.items() if k in _ON_DEVICE}
        parameters_t, values_t, after_t = self._forward(on_device, rows)
        with torch.no_grad():
            logp_t = self.model.head.log_prob(parameters_t, on_device["action"])
        traced = self._traced(_numpy(logp_t), _numpy(values_t), _numpy(after_t), rows, across)
        on_device |= {k: to_tensor(v, self.device) for k, v in traced.items()}
        return self.autograd(parameters_t, values_t, on_device, count)

    def _edge_values(self, rows: Batch) -> Array:
        if "next_value" in rows or len(rows["edge_row"]) == 0:
            return np.zeros(0, np.float32)
        return self.actor.value(rows["edges"])

    def _forward(self, on_device: Batch, rows: Batch) -> tuple[Any, Any, Any]:
        """(distribution parameters, values, values at the edges) in torch."""
        edges = "next_value" not in rows and len(rows["edge_row"]) > 0
        nothing = torch.zeros(0)
        if not isinstance(self.model, RecurrentActorCritic):
            parameters, values = self.model(on_device["obs"])
            if not edges:
                return parameters, values, nothing
            with torch.no_grad():
                return parameters, values, self.model.value(on_device["edges"])
        parameters, values, states = self.model.unroll(
            on_device["obs"], on_device["state"], on_device["first"], rows["length"]
        )
        if not edges:
            return parameters, values, nothing
        with torch.no_grad():
            before = states[on_device["edge_row"]]
            return parameters, values, self.model.step(on_device["edges"], before)[1]

    def _traced(
        self, logp: Array, values: Array, after: Array, rows: Batch, across: Across
    ) -> Batch:
        """V-trace of these rows: target, advantage and ρ, flat."""
        o, shape = self.options, rows["reward"].shape
        value = np.ascontiguousarray(values).reshape(shape)
        if "next_value" in rows:
            following = rows["next_value"]
        else:
            following = np.zeros(shape, np.float32)
            following[:-1] = value[1:]
            following.reshape(-1)[rows["edge_row"]] = after
        target_logp = np.ascontiguousarray(logp).reshape(shape)
        behaviour = rows["logp"].reshape(shape)
        columns = (behaviour, target_logp, rows["reward"], value, following)
        flags = (rows["terminated"], rows["truncated"])
        traced = vtrace(
            *(torch.from_numpy(np.ascontiguousarray(x)) for x in (*columns, *flags)),
            discounts=o.gamma,
            rho_bar=o.rho_bar,
            c_bar=o.c_bar,
            lam=o.vtrace_lambda,
        )
        weight = rows["valid"].reshape(-1).astype(np.float32)
        rho = np.minimum(np.exp(target_logp - behaviour), o.rho_bar).reshape(-1) * weight
        advantage = traced.advantages.numpy().reshape(-1) * weight
        if o.normalize_advantages:
            advantage = normalised_under(rho, advantage, across)
        if o.clip > 0:
            advantage *= ~_far_enough(np.ravel(target_logp - behaviour), advantage, o.clip)
        return {
            "target": traced.targets.numpy().reshape(-1),
            "advantage": advantage,
            "weight": weight,
            "rho": rho,
        }

    def policy_slope(self, logp: Array, rows: Batch) -> tuple[float, Array, list[float]]:
        loss, slope = losses.policy_gradient_slope(logp, rows["advantage"])
        return loss, slope, [float(np.dot(rows["rho"], rows["weight"]))]

    def policy_loss(self, parameters: torch.Tensor, rows: Batch) -> tuple[torch.Tensor, list[Any]]:
        logp = self.model.head.log_prob(parameters, rows["action"])
        loss = losses.policy_gradient(logp, rows["advantage"])
        return loss, [(rows["rho"] * rows["weight"]).sum()]


def normalised_under(rho: Array, advantage: Array, across: Across) -> Array:
    """Advantages ρA with mean 0 and deviation 1 under the weights ρ, over the rows of all learners.

        m = Σ ρA / Σ ρ      s² = Σ (ρA − ρm)² / Σ ρ      ρA becomes ρ (A − m) / s

    With ρ = 1 everywhere these are the plain mean and deviation.

    CRUCIAL: ρm is taken off, not m. Less m alone, a row of no weight would keep −m / s: an action
    that the policy has long left, where ∇ log π has no bound. It would then be driven further off,
    or drawn back, as the sign of m happens to be.
    """
    total, weighted = across.sum(np.array([rho.sum(), advantage.sum()], np.float64)).tolist()
    centred = advantage - rho * (weighted / max(total, 1e-8))
    squares = float(across.sum(np.array([np.dot(centred, centred)], np.float64))[0])
    return np.asarray(centred / (np.sqrt(squares / max(total, 1e-8)) + 1e-8), np.float32)


def _far_enough(log_ratio: Array, advantage: Array, clip: float) -> Array:
    """Rows where PPO's min(ratio A, clip(ratio, 1 − ε, 1 + ε) A) is flat: better actions that have
    become more likely by more than ε, and worse ones less likely."""
    ratio = np.exp(np.minimum(log_ratio, 20.0))
    return np.asarray(np.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip))


_ON_DEVICE = ("obs", "action", "edges", "edge_row", "state", "first")


def _flat(unroll: Any) -> Batch:
    """Observations and actions as rows, time first; the rest as [T, B]."""
    names = ("reward", "terminated", "truncated", "valid", "logp")
    batch: Batch = {name: unroll[name] for name in names}
    rows = {name: unroll[name] for name in ("obs", "action")}
    batch |= trees.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return batch


def _numpy(x: torch.Tensor) -> Array:
    array: Array = x.detach().cpu().numpy()
    return array
