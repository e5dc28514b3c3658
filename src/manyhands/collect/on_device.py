"""Rollouts that never leave the device: environments, policy and storage are tensors there.

    obs[t]  --policy-->  action[t], logp[t], value[t]  --equations-->  reward[t], flags[t], obs[t+1]

The same rollout as `rollout.py` makes, of environments that are tensors (envs/tensors.py). What
goes to the host, once a rollout and in one piece: how many episodes have ended, the last of them,
and the sums behind running statistics. On a GPU the whole rollout is one CUDA graph (devices.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyhands import seeding
from manyhands.devices import Captured
from manyhands.envs.tensors import Moved, TensorEnvs
from manyhands.math.running_stats import Moments, Normaliser
from manyhands.trees import Array

LISTED = 100  # of the episodes that end in one rollout: as many as a mean return is of
_CLIP = 10.0  # of what is normalised, as in RunningStats.normalise


class TensorRollout(NamedTuple):
    """[T, B] tensors that the next rollout overwrites."""

    obs: Any  # a tensor, or what makes one of flat rows, `obs[rows]` (emulators.py)
    action: Tensor
    logp: Tensor
    value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_value: Tensor


class Finished(NamedTuple):
    """The episodes that ended in a rollout."""

    ended: int
    best: float  # the highest return of one
    last: Array  # [n, 3] of the last `LISTED`: (environment, return, length), the newest last


class TensorCollector:
    """T steps of every environment with the policy `model`, on the device of both."""

    def __init__(
        self,
        envs: TensorEnvs,
        model: Any,
        length: int,
        normaliser: Normaliser,
        gamma: float,
        *,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.envs, self.length, self.begun = envs, length, False
        self._model, self._normaliser, self._gamma = model, normaliser, gamma
        device, b = envs.device, envs.num_envs
        self.generator = torch.Generator(device).manual_seed(seeding.integer(seed, "actions"))
        shape = tuple(envs.observation_space.shape)
        space = envs.action_space
        kind = torch.int64 if space.dtype.kind == "i" else torch.float32

        def zeros(*of: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(of, dtype=dtype, device=device)

        def room(*of: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return zeros(length, b, *of, dtype=dtype)

        self.rollout = TensorRollout(
            obs=room(*shape),
            action=room(*space.shape, dtype=kind),
            logp=room(),
            value=room(),
            reward=room(),
            terminated=room(dtype=torch.bool),
            truncated=room(dtype=torch.bool),
            next_value=room(),
        )
        self._obs = zeros(b, *shape)  # raw, to act on next
        self._raw = room(*shape) if normaliser.parts else self.rollout.obs
        # An environment is truncated at most once in as many steps as its time limit has.
        self._cut = zeros(math.ceil(length / envs.limit), b, *shape)
        self._ended = room(dtype=torch.bool)
        self._totals, self._lengths = room(dtype=torch.float64), room(dtype=torch.float64)
        self._discounted = room(dtype=torch.float64)
        self._running = zeros(b, dtype=torch.float64)
        self._offset, self._scale = zeros(*shape), zeros(*shape) + 1.0
        self._reward_scale = zeros() + 1.0
        self._facts = torch.zeros(0)
        self._run = Captured(self._steps, device, (envs.generator, self.generator), "rollout", say)

    def collect(self) -> tuple[TensorRollout, Finished]:
        """The next T steps of every environment."""
        if not self.begun:
            self.begun = True
            self._obs.copy_(self.envs.begin())
        self._take_statistics()
        self._run()
        facts = self._facts.cpu().numpy()  # the one wait for the device
        self._give_statistics(facts)
        count, best, rows = int(facts[0]), float(facts[1]), facts[2 : 2 + 3 * self._listed]
        last = rows.reshape(3, -1).T[: min(count, self._listed)][::-1]
        return self.rollout, Finished(count, best, last)

    @property
    def _listed(self) -> int:
        return min(LISTED, self._ended.numel())

    # -- what may be a CUDA graph: no number is read, and every tensor stays where it is ---------

    @torch.no_grad()
    def _steps(self) -> None:
        for t in range(self.length):
            self._one_step(t)
        values = self._model.value(
            self._seen(torch.cat([self._obs[None], self._cut]).flatten(0, 1))
        )
        values = values.unflatten(0, (-1, self.envs.num_envs))
        out = self.rollout
        out.next_value[:-1] = out.value[1:]
        out.next_value[-1] = values[0]
        for slot, final in enumerate(values[1:]):
            part = slice(slot * self.envs.limit, (slot + 1) * self.envs.limit)
            out.next_value[part] = torch.where(out.truncated[part], final, out.next_value[part])
        self._facts = self._sums()

    def _one_step(self, t: int) -> None:
        out, head = self.rollout, self._model.head
        out.obs[t] = seen = self._seen(self._obs)
        if self._raw is not out.obs:
            self._raw[t] = self._obs
        parameters, out.value[t] = self._model(seen)
        out.action[t] = action = head.sample(parameters, self.generator)
        out.logp[t] = head.log_prob(parameters, action)
        moved = self.envs.move(action)
        over = moved.terminated | moved.truncated
        slot = t // self.envs.limit
        cut = moved.truncated.view(-1, *[1] * (moved.final.dim() - 1))
        self._cut[slot] = torch.where(cut, moved.final, self._cut[slot])
        out.terminated[t], out.truncated[t] = moved.terminated, moved.truncated
        out.reward[t] = self._scaled(t, moved, over)
        self._ended[t], self._totals[t], self._lengths[t] = over, moved.total, moved.length
        self._obs.copy_(moved.obs)

    def _seen(self, raw: Tensor) -> Tensor:
        if not self._normaliser.parts:
            return raw
        seen: Tensor = ((raw - self._offset) * self._scale).clamp(-_CLIP, _CLIP)
        return seen

    def _scaled(self, t: int, moved: Moved, over: Tensor) -> Tensor:
        if self._normaliser.returns is None:
            return moved.reward
        self._running.mul_(self._gamma).add_(moved.reward)
        self._discounted[t] = self._running
        self._running.masked_fill_(over, 0.0)
        scaled: Tensor = (moved.reward * self._reward_scale).clamp(-_CLIP, _CLIP)
        return scaled

    def _sums(self) -> Tensor:
        """What goes to the host, float64: counts of episodes, the last of them, moments."""
        ended, b = self._ended.flatten(), self.envs.num_envs
        order = torch.arange(1, ended.numel() + 1, device=ended.device)
        newest = (order * ended).topk(self._listed).indices
        totals = self._totals.flatten()
        best = torch.where(ended, totals, -math.inf).max()
        rows = [(newest % b).double(), totals[newest], self._lengths.flatten()[newest]]
        parts = [ended.sum().double().view(1), best.view(1), *rows]
        if self._normaliser.returns is not None:
            parts += _moments(self._discounted.flatten())
        if self._normaliser.parts:
            parts += _moments(self._raw.flatten(0, 1).double())
        return torch.cat(parts)

    # -- statistics of the run, and checkpoints --------------------------------------------------

    def _take_statistics(self) -> None:
        def given(numbers: Any) -> Tensor:
            return torch.as_tensor(np.asarray(numbers, np.float32)).to(self._obs.device)

        n = self._normaliser
        if n.parts:
            stats = n.parts[""]
            self._offset.copy_(given(stats.mean))
            self._scale.copy_(given(1.0 / np.sqrt(stats.variance + stats.epsilon)))
        if n.returns is not None:
            variance = n.returns.variance + n.returns.epsilon
            self._reward_scale.copy_(given(1.0 / np.sqrt(variance)))

    def _give_statistics(self, facts: Array) -> None:
        n, rows, at = self._normaliser, self._ended.numel(), 2 + 3 * self._listed
        if n.returns is not None:
            n.returns.pending = Moments(rows, facts[at], facts[at + 1])
            at += 2
        if n.parts:
            stats = n.parts[""]
            mean, m2 = facts[at:].reshape(2, *stats.shape)
            stats.pending = Moments(rows, mean, m2)

    def state(self) -> dict[str, Any]:
        """Plain data and arrays from which `load_state` goes on exactly; between two rollouts."""
        return {
            "envs": self.envs.state(None) if self.begun else None,
            "actions": self.generator.get_state().numpy(),
            "running": self._running.cpu().numpy().copy(),
        }

    def load_state(self, state: dict[str, Any]) -> list[str]:
        self.generator.set_state(torch.as_tensor(np.array(state["actions"])))
        self._running.copy_(torch.as_tensor(np.array(state["running"])))
        if state["envs"] is not None:
            self.begun = True
            self._obs.copy_(torch.as_tensor(self.envs.load_state(state["envs"]).obs))
        return []


def _moments(x: Tensor) -> list[Tensor]:
    """Mean and Σ (x − mean)² over rows, end to end."""
    mean = x.mean(0)
    return [mean.flatten(), (x - mean).square().sum(0).flatten()]
