"""SAC: a policy that stays as random as it can afford. Papers: arXiv:1801.01290, arXiv:1812.05905.

    a' = tanh(u), u ~ N(m(s'), σ(s'))              of the policy as it is, on [-1, 1]
    y  = R + γ^k (min_i Q̄_i(s', a') − α log π(a'|s'))      n-step; 0 after a terminal
    δ_i = Q_i(s, a) − y,  i = 1, 2                 of the action that was taken
    critics      L = Σ w · (huber(δ_1) + huber(δ_2)) / rows      w: importance weights
    policy       L = Σ (α log π(ã|s) − min_i Q_i(s, ã)) / rows   ã drawn anew; through the critics,
                                                                 whose weights stay
    temperature  L = − log α Σ (log π(ã|s) + H̄) / rows           H̄: the entropy that is kept
    log π(a|s) = log N(u) − Σ log(1 − tanh² u)
    each one step of its own Adam;  θ̄ ← θ̄ + τ (θ − θ̄)

Acts by a draw from the policy; until learning starts, with any action at all.
Differs from the papers: the three gradients are of the same weights, those before the step, so that
one message carries them; n-step targets and prioritized replay where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.algorithms.off_policy import NOISE, OffPolicy, errors_of_both
from manyhands.algorithms.registry import SACConfig
from manyhands.envs.spaces import check_bounded
from manyhands.math import losses
from manyhands.math.optimiser import Adam, make_schedule
from manyhands.networks import own
from manyhands.networks.build import to_tensor
from manyhands.networks.heads import HALF_LOG_2PI, log_slope_of_tanh
from manyhands.networks.numpy_mlp import NumpyMLP, encoding
from manyhands.networks.q import LOG_STDS, FastTwin, TwinActor, build_twin_actor
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import Batch, Info, Obs


def squashed_actor(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """A squashed Gaussian, two critics, and the temperature, a parameter where it is learned."""
    check_bounded(actions, experiment.spec.name)
    modules = own.modules(experiment, observations, actions, own.FEATURES)
    unit = experiment.run.box_actions == "scale"
    common = own.common(experiment, modules)
    model = build_twin_actor(observations, actions, squashed=True, unit_actions=unit, **common)
    return with_temperature(model, experiment.options)


def with_temperature(model: TwinActor, options: SACConfig) -> TwinActor:
    """Its logarithm: a parameter, which comes before all others, or a buffer where it is fixed."""
    log = torch.tensor([options.temperature or options.initial_temperature]).log()
    if options.temperature:
        model.register_buffer("log_temperature", log)
    else:
        model.register_parameter("log_temperature", nn.Parameter(log))
    return model


class SAC(OffPolicy):
    name = "sac"
    stats = ("loss", "td_error", "q_mean", "policy_loss", "entropy")
    options: SACConfig

    def __init__(self, model: Any, options: SACConfig, **kwargs: Any) -> None:
        super().__init__(model, options, **kwargs)
        size = self.model.head.size
        self.draws = 2 * size  # of a' and of ã
        self.kept_entropy = options.entropy_per_action * size
        learned = int(self.model.log_temperature.requires_grad)
        split = learned + self.model.policy_size()
        parts = slice(0, learned), slice(learned, split), slice(split, None)
        self.of_temperature, self.of_policy, self.of_critic = parts
        self.adam = self._adam(self.of_policy)
        self.critic_adam = self._adam(self.of_critic)
        self.temperature_adam = self._adam(self.of_temperature) if learned else None
        self._fast = FastTwin(self.model, self.flat) if self.fast else None
        self._fast_target = FastTwin(self.target, self.target_flat) if self.fast else None
        if self.fast:  # for the few rows that are acted on
            trunk = self.model.policy_trunk
            self._acting = NumpyMLP(self.flat, trunk, "policy_trunk", "policy_out.linear")
            self._encode = encoding(self.model.policy_encoder)

    def _adam(self, part: slice) -> Adam:
        return Adam(self.flat.data[part], lr=0.0, eps=self.options.adam_epsilon)

    def explorer(self, chance: EnvNoise, first: int, here: int, total: int) -> Drawn:
        return Drawn(self, chance)

    def parameters(self, obs: Obs) -> tuple[Array, Array]:
        """(m, log σ) of u, in numpy: [N, d] each."""
        if self.fast:
            out = self._acting.look(self._encode(obs))
        else:
            with torch.no_grad():
                out = self.model(to_tensor(obs, self.device)).cpu().numpy()
        mean, log_std = np.split(out, 2, axis=1)
        return mean, np.clip(log_std, *LOG_STDS)

    def drawn(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """(actions on [-1, 1] [N, d], their log π [N]), of what the policy gives and normal numbers
        [N, d]."""
        mean, log_std = out.chunk(2, -1)
        log_std = log_std.clamp(*LOG_STDS)
        u = mean + log_std.exp() * noise
        density = 0.5 * noise.square() + log_std + HALF_LOG_2PI + log_slope_of_tanh(u)
        return torch.tanh(u), -density.sum(-1)

    def drawn_slope(
        self, out: Tensor, noise: Tensor, actions: Tensor, d_actions: Tensor, d_logp: Tensor
    ) -> Tensor:
        """∂loss/∂out, from ∂loss/∂actions [N, d] and ∂loss/∂log π, one number for all rows.

        ∂a/∂u = 1 − a²,   ∂log π/∂u = 2 a,   ∂u/∂m = 1,   ∂u/∂log σ = σ ε,   ∂log π/∂log σ = −1
        """
        log_std = out.chunk(2, -1)[1]
        held = log_std.clamp(*LOG_STDS)
        d_u = d_actions * (1.0 - actions.square()) + 2.0 * d_logp * actions
        d_log_std = (d_u * held.exp() * noise - d_logp) * (held == log_std)
        return torch.cat([d_u, d_log_std], -1)

    @torch.no_grad()
    def targets(self, rows: Batch, *, own_target: bool = False) -> Array:
        """y of each row. Where nothing was drawn for them (an actor's first priorities), that of
        the likeliest action, without its entropy."""
        q: Callable[[Tensor], Tensor]
        if self._fast is not None and self._fast_target is not None:
            x = self._fast.encode(rows["next_obs"])
            out = self._fast.policy.forward(x)[0]
            q = partial((self._fast if own_target else self._fast_target).q, x)
        else:
            obs = to_tensor(rows["next_obs"], self.device)
            out = self.model(obs)
            q = partial((self.model if own_target else self.target).q, obs)
        if NOISE in rows:
            noise = to_tensor(rows[NOISE], self.device)[:, : self.draws // 2]
            actions, logp = self.drawn(out, noise)
            ahead = q(actions).amin(0) - self.model.log_temperature.exp() * logp
        else:
            ahead = q(torch.tanh(out.chunk(2, -1)[0])).amin(0)
        return np.asarray(rows["reward"] + rows["discount"] * ahead.cpu().numpy(), np.float32)

    def td_errors(self, rows: Batch, *, own_target: bool = False) -> Array:
        return errors_of_both(self, rows, own_target)

    def learn(self, rows: Batch, y: Array) -> list[float]:
        """CRUCIAL: all gradients are of the weights before the step: one message carries them."""
        there = {k: to_tensor(rows[k], self.device) for k in ("action", "weight", NOISE)}
        unit, noise = self.model.unit(there["action"]), there[NOISE][:, self.draws // 2 :]
        if self._fast is not None:
            return self._fast_step(self._fast, rows, y, unit, noise)
        return self._torch_step(rows, y, unit, there["weight"], noise)

    def _fast_step(
        self, fast: FastTwin, rows: Batch, y: Array, unit: Tensor, noise: Tensor
    ) -> list[float]:
        x = fast.encode(rows["obs"])
        q = fast.q(x, unit).numpy()
        valued, errors = q.sum() / 2, q - y
        loss, slope = losses.huber_slope(errors, self.options.huber)
        fast.q_backward(torch.from_numpy(rows["weight"] * slope))
        out = fast.policy.forward(x)[0]
        actions, logp = self.drawn(out, noise)
        climbed = fast.q(x, actions)
        lower = climbed.min(0)
        d_q = torch.zeros_like(climbed).scatter_(0, lower.indices[None], -1.0)
        d_actions = fast.q_slope(d_q, actions.shape[1])
        temperature = self.model.log_temperature.detach().exp()
        fast.policy.backward(self.drawn_slope(out, noise, actions, d_actions, temperature)[None])
        entropy = -float(logp.sum())
        if self.temperature_adam is not None:
            self.flat.grad[self.of_temperature] = entropy - len(y) * self.kept_entropy
        policy = -float(temperature) * entropy - float(lower.values.sum())
        return self._sums(
            np.dot(loss.sum(0), rows["weight"]), np.abs(errors), valued, policy, entropy
        )

    def _torch_step(
        self, rows: Batch, y: Array, unit: Tensor, weight: Tensor, noise: Tensor
    ) -> list[float]:
        self.flat.zero_grad()
        obs, model = to_tensor(rows["obs"], self.device), self.model
        q = model.q(obs, unit)
        error = q - torch.as_tensor(y, device=self.device)
        loss = (weight * losses.huber(error, self.options.huber)).sum()
        actions, logp = self.drawn(model(obs), noise)
        climbed = model.q(obs, actions, held=True).amin(0)
        policy = (model.log_temperature.detach().exp() * logp - climbed).sum()
        entropy = -logp.detach().sum()
        total = loss + policy
        if self.temperature_adam is not None:
            surplus = entropy - len(y) * self.kept_entropy
            total = total + (model.log_temperature * surplus).sum()
        total.backward()
        sizes, valued = error.detach().abs().cpu().numpy(), q.detach().sum().item() / 2
        return self._sums(loss.item(), sizes, valued, policy.item(), entropy.item())

    def _sums(
        self, loss: float, errors: Array, valued: float, policy: float, entropy: float
    ) -> list[float]:
        self.errors = errors.mean(0)
        return [float(loss), float(self.errors.sum()), float(valued), policy, entropy]

    def move(self, grad: Tensor, progress: float) -> Info:
        lr = make_schedule(self.options.learning_rate)(progress)
        critic = self.descend_on(self.critic_adam, grad[self.of_critic], lr)
        policy = self.descend_on(self.adam, grad[self.of_policy], lr)
        if self.temperature_adam is not None:
            self.descend_on(self.temperature_adam, grad[self.of_temperature], lr)
        temperature = float(self.model.log_temperature.detach().exp())
        return {
            "grad_norm": critic,
            "policy_grad_norm": policy,
            "temperature": temperature,
            "learning_rate": lr,
        }

    def state(self) -> dict[str, Any]:
        adams = {"critic_adam": self.critic_adam.state()}
        if self.temperature_adam is not None:
            adams["temperature_adam"] = self.temperature_adam.state()
        return super().state() | adams

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.critic_adam.load_state(state["critic_adam"])
        if self.temperature_adam is not None:
            self.temperature_adam.load_state(state["temperature_adam"])


class Drawn:
    """Draws from the policy; any action at all until learning starts."""

    def __init__(self, sac: SAC, chance: EnvNoise) -> None:
        self._sac, self._chance = sac, chance
        self._head = sac.model.head
        self.reach = 1.0  # mean σ of the last step, before it is squashed

    def act(self, obs: Obs, steps: int) -> tuple[Array, Array]:
        mean, log_std = self._sac.parameters(obs)
        std = np.exp(log_std)
        self.reach = float(std.mean())
        noise = self._chance.standard_normal(mean.shape)
        if steps < self._sac.options.learning_starts:
            unit = 2.0 * self._chance.random(mean.shape) - 1.0
        else:
            unit = np.tanh(mean + std * noise)
        actions = self._head.middle + self._head.reach * unit
        actions = np.asarray(actions, np.float32).reshape(-1, *self._head.action_shape)
        return actions, actions

    def restart(self, ended: Array) -> None:
        """Draws do not depend on those before."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...
