"""TD3: DDPG with two critics, of which the lower one counts. Paper: arXiv:1802.09477.

    a' = clip(μ̄(s') + clip(σ̃ ε, −c, c), −1, 1)     smoothed: the critics cannot be sure of one peak
    y  = R + γ^k min_i Q̄_i(s', a')                 n-step; the bootstrap is 0 after a terminal
    δ_i = Q_i(s, a) − y,  i = 1, 2                 of the action that was taken
    critics  L = Σ w · (huber(δ_1) + huber(δ_2)) / rows     w: importance weights
    every d-th update, and only then:
    policy   L = − Σ Q_1(s, μ(s)) / rows           through the critic, whose weights stay
             θ̄ ← θ̄ + τ (θ − θ̄)                    critics and policy
    each one step of its own Adam

Acts as DDPG does, by μ(s) + noise; until learning starts, with any action at all.
Differs from the paper: both gradients are of the weights before the step, so that one message
carries them; n-step targets and prioritized replay where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.algorithms.ddpg import Noisy
from manyhands.algorithms.off_policy import NOISE, OffPolicy, errors_of_both
from manyhands.algorithms.registry import TD3Config
from manyhands.envs.spaces import check_bounded
from manyhands.math import losses
from manyhands.math.optimiser import Adam, make_schedule
from manyhands.networks import own
from manyhands.networks.build import to_tensor
from manyhands.networks.numpy_mlp import NumpyMLP, encoding
from manyhands.networks.q import FastTwin, build_twin_actor
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import Batch, Info, Obs


def twin_bounded_actor(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """A deterministic policy and two critics."""
    check_bounded(actions, experiment.spec.name)
    modules = own.modules(experiment, observations, actions, own.FEATURES)
    return build_twin_actor(
        observations,
        actions,
        squashed=False,
        noise=experiment.options.noise,
        unit_actions=experiment.run.box_actions == "scale",
        **own.common(experiment, modules),
    )


class TD3(OffPolicy):
    name = "td3"
    stats = ("loss", "td_error", "q_mean")
    options: TD3Config

    def __init__(self, model: Any, options: TD3Config, **kwargs: Any) -> None:
        super().__init__(model, options, **kwargs)
        self.draws = self.model.head.size
        split = self.model.policy_size()
        self.of_policy, self.of_critic = slice(0, split), slice(split, None)
        self.adam = Adam(self.flat.data[self.of_policy], lr=0.0, eps=options.adam_epsilon)
        self.critic_adam = Adam(self.flat.data[self.of_critic], lr=0.0, eps=options.adam_epsilon)
        self._fast = FastTwin(self.model, self.flat) if self.fast else None
        self._fast_target = FastTwin(self.target, self.target_flat) if self.fast else None
        if self.fast:  # for the few rows that are acted on
            trunk = self.model.policy_trunk
            self._acting = NumpyMLP(self.flat, trunk, "policy_trunk", "policy_out.linear")
            self._encode = encoding(self.model.policy_encoder)

    def explorer(self, chance: EnvNoise, first: int, here: int, total: int) -> Noisy:
        return Noisy(self, chance, first, here, total)

    def act(self, obs: Obs) -> Array:
        """μ(s), flat: [N, d]."""
        if self.fast:
            unit = np.tanh(self._acting.look(self._encode(obs)))
            return np.asarray(self.model.middle.numpy() + self.model.reach.numpy() * unit)
        with torch.no_grad():
            actions: Array = self.model(to_tensor(obs, self.device)).cpu().numpy()
        return actions

    @property
    def delayed(self) -> bool:
        """Whether the update that comes next moves critics alone."""
        return (self.version + 1) % self.options.policy_delay > 0

    @torch.no_grad()
    def targets(self, rows: Batch, *, own_target: bool = False) -> Array:
        """y of each row; not smoothed where nothing was drawn for them (an actor's first
        priorities)."""
        fast = self._fast if own_target else self._fast_target
        q: Callable[[Tensor], Tensor]
        if fast is not None:
            x = fast.encode(rows["next_obs"])
            actions, q = torch.tanh(fast.policy.forward(x)[0]), partial(fast.q, x)
        else:
            model = self.model if own_target else self.target
            obs = to_tensor(rows["next_obs"], self.device)
            actions, q = model.unit(model(obs)), partial(model.q, obs)
        if NOISE in rows:
            actions = self.smoothed(actions, to_tensor(rows[NOISE], self.device))
        ahead = q(actions).amin(0).cpu().numpy()
        return np.asarray(rows["reward"] + rows["discount"] * ahead, np.float32)

    def smoothed(self, actions: Tensor, noise: Tensor) -> Tensor:
        """Actions on [-1, 1] with noise that is cut, within the bounds."""
        o = self.options
        cut = (o.target_noise * noise).clamp(-o.target_noise_clip, o.target_noise_clip)
        return (actions + cut).clamp(-1.0, 1.0)

    def td_errors(self, rows: Batch, *, own_target: bool = False) -> Array:
        return errors_of_both(self, rows, own_target)

    def learn(self, rows: Batch, y: Array) -> list[float]:
        """CRUCIAL: both gradients are of the weights before the step: one message carries them."""
        unit = self.model.unit(to_tensor(rows["action"], self.device))
        if self._fast is not None:
            return self._fast_step(self._fast, rows, y, unit)
        return self._torch_step(rows, y, unit)

    def _fast_step(self, fast: FastTwin, rows: Batch, y: Array, unit: Tensor) -> list[float]:
        x = fast.encode(rows["obs"])
        q = fast.q(x, unit).numpy()
        valued, errors = q.sum() / 2, q - y
        loss, slope = losses.huber_slope(errors, self.options.huber)
        fast.q_backward(torch.from_numpy(rows["weight"] * slope))
        if self.delayed:
            self.flat.grad[self.of_policy].zero_()
        else:
            actions = torch.tanh(fast.policy.forward(x)[0])
            d_actions = fast.climbed(x, actions)
            fast.policy.backward((d_actions * (1.0 - actions.square()))[None])
        return self._sums(np.dot(loss.sum(0), rows["weight"]), np.abs(errors), valued)

    def _torch_step(self, rows: Batch, y: Array, unit: Tensor) -> list[float]:
        self.flat.zero_grad()
        there = {k: to_tensor(rows[k], self.device) for k in ("obs", "weight")}
        obs, model = there["obs"], self.model
        q = model.q(obs, unit)
        error = q - torch.as_tensor(y, device=self.device)
        loss = (there["weight"] * losses.huber(error, self.options.huber)).sum()
        total = loss
        if not self.delayed:
            total = loss - model.q(obs, model.unit(model(obs)), held=True)[0].sum()
        total.backward()
        sizes = error.detach().abs().cpu().numpy()
        return self._sums(loss.item(), sizes, q.detach().sum().item() / 2)

    def _sums(self, loss: float, errors: Array, valued: float) -> list[float]:
        self.errors = errors.mean(0)
        return [float(loss), float(self.errors.sum()), float(valued)]

    def move(self, grad: Tensor, progress: float) -> Info:
        lr = make_schedule(self.options.learning_rate)(progress)
        info = {"grad_norm": self.descend_on(self.critic_adam, grad[self.of_critic], lr)}
        if not self.delayed:
            policy_lr = make_schedule(self.options.policy_learning_rate)(progress)
            self.descend_on(self.adam, grad[self.of_policy], policy_lr)
        return info | {"learning_rate": lr}

    def move_target(self) -> None:
        if self.version % self.options.policy_delay == 0:
            super().move_target()

    def state(self) -> dict[str, Any]:
        return super().state() | {"critic_adam": self.critic_adam.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.critic_adam.load_state(state["critic_adam"])
