"""DDPG: a deterministic policy that climbs its critic. Paper: arXiv:1509.02971.

    y  = R + γ^k Q̄(s', μ̄(s'))               n-step; the bootstrap is 0 after a terminal
    δ  = Q(s, a) − y                         of the action that was taken
    critic  L = Σ w · huber(δ) / rows        w: importance weights of prioritized replay
    policy  L = − Σ Q(s, μ(s)) / rows        through the critic, whose weights stay
    each one step of its own Adam;  θ̄ ← θ̄ + τ (θ − θ̄), or a copy every k updates

Acts by μ(s) + noise: normal, clipped, or the walk of the paper (ou); until learning starts, with
any action at all. With strategy apex it is Ape-X DPG. Differs from the paper: no weight decay, no
batch normalisation (`--normalize-observations` stands in for it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.algorithms.off_policy import ActionNoise, OffPolicy
from manyhands.algorithms.registry import DDPGConfig
from manyhands.math import losses
from manyhands.math.optimiser import Adam, make_schedule
from manyhands.networks.build import to_tensor
from manyhands.networks.flat import FlatParameters
from manyhands.networks.numpy_mlp import NumpyMLP, encoding
from manyhands.networks.q import BoundedActor
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import Batch, Info, Obs


class DDPG(OffPolicy):
    name = "ddpg"
    stats = ("loss", "td_error", "q_mean", "policy_loss")
    options: DDPGConfig

    def __init__(self, model: Any, options: DDPGConfig, **kwargs: Any) -> None:
        super().__init__(model, options, **kwargs)
        split = self.model.policy_size()
        self.of_policy, self.of_critic = slice(0, split), slice(split, None)
        self.adam = Adam(self.flat.data[self.of_policy], lr=0.0, eps=options.adam_epsilon)
        self.critic_adam = Adam(self.flat.data[self.of_critic], lr=0.0, eps=options.adam_epsilon)
        self._numpy = FastBounded(self.model, self.flat) if self.fast else None
        self._numpy_target = FastBounded(self.target, self.target_flat) if self.fast else None

    def explorer(self, chance: EnvNoise, first: int, here: int, total: int) -> Noisy:
        return Noisy(self, chance, first, here, total)

    def act(self, obs: Obs) -> Array:
        """μ(s), flat: [N, d]."""
        if self._numpy is not None:
            return self._numpy.act(obs)
        with torch.no_grad():
            actions: Array = self.model(to_tensor(obs, self.device)).cpu().numpy()
        return actions

    def targets(self, rows: Batch, *, own_target: bool = False) -> Array:
        """y of each row."""
        fast = self._numpy if own_target else self._numpy_target
        if fast is not None:
            ahead = fast.q(rows["next_obs"], fast.act(rows["next_obs"]))
        else:
            with torch.no_grad():
                model = self.model if own_target else self.target
                ahead = model.value(to_tensor(rows["next_obs"], self.device)).cpu().numpy()
        return np.asarray(rows["reward"] + rows["discount"] * ahead, np.float32)

    def td_errors(self, rows: Batch, *, own_target: bool = False) -> Array:
        if self._numpy is not None:
            q = self._numpy.q(rows["obs"], _flat(rows["action"]))
        else:
            there = to_tensor({k: rows[k] for k in ("obs", "action")}, self.device)
            with torch.no_grad():
                q = self.model.q(there["obs"], there["action"]).cpu().numpy()
        return np.asarray(q - self.targets(rows, own_target=own_target))

    def learn(self, rows: Batch, y: Array) -> list[float]:
        """CRUCIAL: both gradients are of the weights before the step, so one message carries them.
        The policy then follows the critic of one update ago, as with any number of learners."""
        return self._numpy_step(rows, y) if self._numpy else self._torch_step(rows, y)

    def move(self, grad: torch.Tensor, progress: float) -> Info:
        lr = make_schedule(self.options.learning_rate)(progress)
        policy_lr = make_schedule(self.options.policy_learning_rate)(progress)
        critic = self.descend_on(self.critic_adam, grad[self.of_critic], lr)
        policy = self.descend_on(self.adam, grad[self.of_policy], policy_lr)
        return {"grad_norm": critic, "policy_grad_norm": policy, "learning_rate": lr}

    def _numpy_step(self, rows: Batch, y: Array) -> list[float]:
        net = self._numpy
        assert net is not None
        obs = rows["obs"]
        q = net.q_forward(obs, _flat(rows["action"]))
        self.errors = q - y
        loss, slope = losses.huber_slope(self.errors, self.options.huber)
        net.q_backward(rows["weight"] * slope)
        climbed = net.climb(obs)
        return self._sums(float(np.dot(rows["weight"], loss)), q, climbed)

    def _torch_step(self, rows: Batch, y: Array) -> list[float]:
        self.flat.zero_grad()
        there = {k: to_tensor(rows[k], self.device) for k in ("obs", "action", "weight")}
        model = self.model
        value = model.value(there["obs"])
        (-value.sum()).backward()
        self.flat.grad[self.of_critic].zero_()  # the critic is climbed, not moved
        q = model.q(there["obs"], there["action"])
        error = q - torch.as_tensor(y, device=self.device)
        total = (there["weight"] * losses.huber(error, self.options.huber)).sum()
        total.backward()
        self.errors = error.detach().cpu().numpy()
        return self._sums(total.item(), q.detach().cpu().numpy(), float(value.sum().detach()))

    def _sums(self, loss: float, q: Array, climbed: float) -> list[float]:
        return [loss, float(np.abs(self.errors).sum()), float(q.sum()), -climbed]

    def state(self) -> dict[str, Any]:
        return super().state() | {"critic_adam": self.critic_adam.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.critic_adam.load_state(state["critic_adam"])


class FastBounded:
    """A BoundedActor in numpy."""

    def __init__(self, model: BoundedActor, flat: FlatParameters) -> None:
        self._encode = encoding(model.policy_encoder)
        self._policy = NumpyMLP(flat, model.policy_trunk, "policy_trunk", "policy_out.linear")
        self._critic = NumpyMLP(flat, model.critic_trunk, "critic_trunk", "critic_out")
        self._middle = model.policy_out.middle.numpy()
        self._reach = model.policy_out.reach.numpy()

    def act(self, obs: Obs) -> Array:
        unit = np.tanh(self._policy.look(self._encode(obs)))
        return np.asarray(self._middle + self._reach * unit)

    def q(self, obs: Obs, actions: Array) -> Array:
        return self._critic.look(self._joined(self._encode(obs), self._unit(actions)))[:, 0]

    def q_forward(self, obs: Obs, actions: Array) -> Array:
        return self._critic.forward(self._joined(self._encode(obs), self._unit(actions)))[:, 0]

    def q_backward(self, d_q: Array) -> None:
        self._critic.backward(np.asarray(d_q, np.float32)[:, None])

    def climb(self, obs: Obs) -> float:
        """The gradient of −Σ Q(s, μ(s)) into the policy's part; Σ Q. The critic's part stays."""
        x = self._encode(obs)
        unit = np.tanh(self._policy.forward(x))
        q = self._critic.forward(self._joined(x, unit))
        d_inputs = self._critic.backward(
            np.full((len(x), 1), -1.0, np.float32), into_parameters=False, down=True
        )
        d_unit = d_inputs[:, x.shape[1] :]
        self._policy.backward(d_unit * (1.0 - unit * unit))
        return float(q.sum())

    def _unit(self, actions: Array) -> Array:
        return np.asarray((actions - self._middle) / self._reach, np.float32)

    @staticmethod
    def _joined(x: Array, unit: Array) -> Array:
        return np.concatenate([x, unit], axis=1)


class Noisy:
    """μ(s) + noise, within the bounds; any action at all until learning starts."""

    def __init__(self, ddpg: Any, chance: EnvNoise, first: int, here: int, total: int) -> None:
        o, out = ddpg.options, ddpg.model.policy_out
        i = np.arange(first, first + here)
        self.scales = o.noise * o.noise_spread ** (i / max(total - 1, 1))
        self._ddpg, self._chance = ddpg, chance
        self._noise = ActionNoise(
            o.noise_kind, self.scales, out.out_features, theta=o.ou_theta, clip=o.noise_clip
        )
        self._middle, self._reach = out.middle.cpu().numpy(), out.reach.cpu().numpy()
        self._shape = ddpg.model.head.action_shape

    def act(self, obs: Obs, steps: int) -> tuple[Array, Array]:
        noise = self._noise.draw(self._chance)
        if steps < self._ddpg.options.learning_starts:
            unit = 2.0 * self._chance.random(noise.shape) - 1.0
        else:
            unit = (self._ddpg.act(obs) - self._middle) / self._reach + noise
        actions = self._middle + self._reach * np.clip(unit, -1.0, 1.0)
        actions = np.asarray(actions, np.float32).reshape(-1, *self._shape)
        return actions, actions

    def restart(self, ended: Array) -> None:
        self._noise.restart(ended)

    @property
    def reach(self) -> float:
        return float(self.scales.mean())

    def state(self) -> dict[str, Any]:
        return self._noise.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._noise.load_state(state)


def _flat(actions: Array) -> Array:
    return actions.reshape(len(actions), -1)
