"""DQN: the value of every action, learned from a replay. Paper: Nature 518, 529 (2015).

    a* = argmax_a Q(s', a)                  double: chosen by θ, valued by θ̄ (arXiv:1509.06461);
    y  = R + γ^k Q̄(s', a*)                  else both by θ̄.  R, γ^k: n-step, 0 after a terminal
    δ  = Q(s, a) − y
    L  = Σ w · huber(δ) / rows,  w the importance weights of prioritized replay; one step of Adam
    θ̄  ← θ every k updates, or a little after each

Where the environment says which actions are possible, both choices are among these.
Acts ε-greedily; of several environments each has its own ε (the ladder of arXiv:1803.00933), whose
base falls in a straight line at the beginning. With strategy apex it is Ape-X DQN.
Differs from the papers: Adam instead of RMSProp; the ladder's base may fall.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.algorithms.off_policy import OffPolicy, annealed, epsilon_greedy, ladder
from manyhands.algorithms.registry import DQNConfig
from manyhands.math import losses
from manyhands.math.optimiser import make_schedule
from manyhands.networks.build import to_tensor
from manyhands.networks.flat import FlatParameters
from manyhands.networks.numpy_distributions import masked
from manyhands.networks.numpy_mlp import NumpyMLP, encoding
from manyhands.networks.q import DuelingOut, QNetwork
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import MASK, Batch, Info, Obs


class DQN(OffPolicy):
    name = "dqn"
    stats = ("loss", "td_error", "q_mean")
    options: DQNConfig

    def __init__(self, model: Any, options: DQNConfig, **kwargs: Any) -> None:
        super().__init__(model, options, **kwargs)
        self._numpy = FastQ(self.model, self.flat) if self.fast else None
        self._numpy_target = FastQ(self.target, self.target_flat) if self.fast else None

    def explorer(self, chance: EnvNoise, first: int, here: int, total: int) -> EpsilonGreedy:
        return EpsilonGreedy(self, chance, first, here, total)

    def q(self, obs: Obs) -> Array:
        """Q [N, n], in numpy."""
        if self._numpy is not None:
            return self._numpy.look(obs)
        with torch.no_grad():
            values: Array = self.model(to_tensor(obs, self.device)).cpu().numpy()
        return values

    def q_target(self, obs: Obs) -> Array:
        if self._numpy_target is not None:
            return self._numpy_target.look(obs)
        with torch.no_grad():
            values: Array = self.target(to_tensor(obs, self.device)).cpu().numpy()
        return values

    def targets(self, rows: Batch, *, own_target: bool = False) -> Array:
        """y of each row."""
        ahead = self.q(rows["next_obs"]) if own_target else self.q_target(rows["next_obs"])
        chooser = self.q(rows["next_obs"]) if self.options.double and not own_target else ahead
        best = ahead[np.arange(len(ahead)), chooser.argmax(axis=1)]
        return np.asarray(rows["reward"] + rows["discount"] * best, np.float32)

    def td_errors(self, rows: Batch, *, own_target: bool = False) -> Array:
        q = self.q(rows["obs"])
        taken = q[np.arange(len(q)), rows["action"]]
        return np.asarray(taken - self.targets(rows, own_target=own_target))

    def learn(self, rows: Batch, y: Array) -> list[float]:
        return self._numpy_step(rows, y) if self._numpy else self._torch_step(rows, y)

    def move(self, grad: torch.Tensor, progress: float) -> Info:
        lr = make_schedule(self.options.learning_rate)(progress)
        return {"grad_norm": self.descend_on(self.adam, grad, lr), "learning_rate": lr}

    def _numpy_step(self, rows: Batch, y: Array) -> list[float]:
        assert self._numpy is not None
        q = self._numpy.forward(rows["obs"])
        at = np.arange(len(q)), rows["action"]
        taken = q[at]
        self.errors = taken - y
        loss, slope = losses.huber_slope(self.errors, self.options.huber)
        d_q = np.zeros_like(q)
        d_q[at] = rows["weight"] * slope
        self._numpy.backward(d_q)
        return self._sums(float(np.dot(rows["weight"], loss)), taken)

    def _torch_step(self, rows: Batch, y: Array) -> list[float]:
        self.flat.zero_grad()
        there = {k: to_tensor(rows[k], self.device) for k in ("obs", "action", "weight")}
        taken = self.model(there["obs"]).gather(1, there["action"].long()[:, None])[:, 0]
        error = taken - torch.as_tensor(y, device=self.device)
        total = (there["weight"] * losses.huber(error, self.options.huber)).sum()
        total.backward()
        self.errors = error.detach().cpu().numpy()
        return self._sums(total.item(), taken.detach().cpu().numpy())

    def _sums(self, loss: float, taken: Array) -> list[float]:
        return [loss, float(np.abs(self.errors).sum()), float(taken.sum())]


class FastQ:
    """A QNetwork in numpy; a dueling one is a linear layer of V and A, and a sum."""

    def __init__(self, model: QNetwork, flat: FlatParameters) -> None:
        self._encode = encoding(model.policy_encoder)
        self._dueling = isinstance(model.policy_out, DuelingOut)
        out = "policy_out.parts" if self._dueling else "policy_out"
        self._net = NumpyMLP(flat, model.policy_trunk, "policy_trunk", out)

    def look(self, obs: Obs) -> Array:
        q = self._joined(self._net.look(self._encode(obs)))
        return masked(q, obs) if isinstance(obs, dict) else q

    def forward(self, obs: Obs) -> Array:
        return self._joined(self._net.forward(self._encode(obs)))

    def backward(self, d_q: Array) -> None:
        """Q_a = V + A_a − mean(A): ∂/∂V sums the rows, ∂/∂A takes their mean off."""
        if not self._dueling:
            self._net.backward(d_q)
            return
        d = np.empty((len(d_q), 1 + d_q.shape[1]), np.float32)
        d[:, 0] = d_q.sum(axis=1)
        d[:, 1:] = d_q - d_q.mean(axis=1, keepdims=True)
        self._net.backward(d)

    def _joined(self, out: Array) -> Array:
        if not self._dueling:
            return out
        advantage = out[:, 1:]
        return np.asarray(out[:, :1] + advantage - advantage.mean(axis=1, keepdims=True))


class EpsilonGreedy:
    """Each environment with its own ε."""

    def __init__(self, dqn: DQN, chance: EnvNoise, first: int, here: int, total: int) -> None:
        self._dqn, self._chance = dqn, chance
        self._place = first, here, total
        self._start = dqn.model.head.start
        self.epsilons = self._at(0)

    def _at(self, steps: int) -> Array:
        o = self._dqn.options
        base = annealed(o.epsilon, o.epsilon_final, o.epsilon_steps, steps)
        return ladder(base, o.ladder_alpha, *self._place)

    def act(self, obs: Obs, steps: int) -> tuple[Array, Array]:
        self.epsilons = self._at(steps)
        mask = obs.get(MASK) if isinstance(obs, dict) else None
        actions = epsilon_greedy(self._dqn.q(obs), self.epsilons, self._chance, mask)
        return actions, (actions + self._start if self._start else actions)

    def restart(self, ended: Array) -> None:
        """Choices do not depend on those before."""

    @property
    def reach(self) -> float:
        return float(self.epsilons.mean())

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...
