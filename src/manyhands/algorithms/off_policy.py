"""What learning from a replay takes, whatever the algorithm: a target network, rows, the seam.

    rows     obs, action, reward, next_obs, discount, weight       n-step, from replay/n_step.py
             reward = r_t + γ r_t+1 + …;  discount = γ^k, or 0 where the episode terminated
    y        = reward + discount · Q̄(next_obs, ·)                  one formula for every case
    δ        = Q(obs, action) − y                                  of the *stored* action
    [ seam ] across.sum: gradients, sums to report and the number of rows of all learners

The division is by the rows of all learners: two learners are one with twice the batch.

Exploration tries what the policy would not do: ε-greedy for choices, noise for numbers. Every draw
comes from the environment's own stream (EnvNoise), so that runs repeat and a run with four actors
plays the episodes of a run with one.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, Protocol

import numpy as np
import torch

from manyhands.algorithms.base import Across, Algorithm, Alone
from manyhands.errors import ConfigError
from manyhands.math.optimiser import Adam, check_gradient, clip_by_norm_
from manyhands.networks.build import to_tensor
from manyhands.networks.flat import FlatParameters
from manyhands.networks.q import is_plain
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import Batch, Info, Obs

NO_ERRORS = np.zeros(0, np.float32)
NOISE = "noise"  # column of a batch: the draws that its loss takes, [N, draws]


class Explorer(Protocol):
    """Chooses actions for the environments of one worker."""

    def act(self, obs: Obs, steps: int) -> tuple[Array, Array]:
        """(what is stored, what the environments get); `steps` of all workers so far."""
        ...

    def restart(self, ended: Array) -> None:
        """Those environments [E] begin an episode."""
        ...

    @property
    def reach(self) -> float:
        """How far it goes from the policy now, on average: ε, or σ. To be reported."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class OffPolicy(Algorithm):
    """One network with its target, and a step on rows that any policy has collected."""

    model: Any  # a QNetwork, a BoundedActor or a TwinActor, or what the user has in their place
    target: Any
    draws = 0  # normal numbers that the loss of one row takes; the same whoever holds the row

    def __init__(self, model: Any, options: Any, **kwargs: Any) -> None:
        super().__init__(model, options, **kwargs)
        self.target = copy.deepcopy(self.model)
        self.target_flat = FlatParameters(self.target)
        self.fast = is_plain(self.model)
        self.errors: Array = NO_ERRORS  # of the last update's rows, in their order

    # -- what an algorithm gives -----------------------------------------------------------------

    @abstractmethod
    def explorer(self, chance: EnvNoise, first: int, here: int, total: int) -> Explorer:
        """For environments first .. first + here − 1 out of `total`."""

    @abstractmethod
    def td_errors(self, rows: Batch, *, own_target: bool = False) -> Array:
        """δ of each row, without learning: what an actor gives its rows as first priorities.

        `own_target`: bootstrap from the network itself, where the target's weights are not known.
        """

    @abstractmethod
    def targets(self, rows: Batch, *, own_target: bool = False) -> Array:
        """y of each row."""

    @abstractmethod
    def learn(self, rows: Batch, y: Array) -> list[float]:
        """Put the gradient of Σ loss of these rows into `flat.grad`; the sums to report. Leaves
        their `errors`."""

    @abstractmethod
    def move(self, grad: torch.Tensor, progress: float) -> Info:
        """One step of each optimiser; what is to be reported of it."""

    # -- the learner step ------------------------------------------------------------------------

    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        """One gradient step; afterwards `errors` are the new priorities of these rows."""
        rows = len(batch["reward"])
        if self.draws:
            first, total = across.place(rows)
            noise = self.rng.standard_normal((total, self.draws), dtype=np.float32)
            batch = {**batch, NOISE: noise[first : first + rows]}
        sums = self.gradient(batch, 1)
        grad, means = self.seam(across, self.flat.grad, sums, rows)
        info = dict(zip(self.stats, means.tolist(), strict=True)) | self.move(grad, progress)
        self.version += 1
        self.move_target()
        return info

    def gradient(self, rows: Batch, count: int) -> list[float]:
        if len(rows["reward"]) == 0:  # another learner has them all
            self.errors = NO_ERRORS
            self.flat.grad.zero_()
            return [0.0] * len(self.stats)
        sums = self.learn(rows, self.targets(rows))
        if count > 1:
            self.flat.grad.div_(count)
        return sums

    def move_target(self) -> None:
        """θ̄ ← θ every k updates, or θ̄ ← θ̄ + τ (θ − θ̄) after each."""
        o = self.options
        if o.target_every:
            if self.version % o.target_every == 0:
                self.target_flat.data.copy_(self.flat.data)
        else:
            self.target_flat.data.lerp_(self.flat.data, o.target_tau)

    def seam(
        self, across: Across, grad: torch.Tensor, sums: list[float], rows: int
    ) -> tuple[torch.Tensor, Array]:
        """(gradient, reported numbers) of all learners' rows, averaged over them.

        `grad` and `sums` are sums over this learner's rows. One message.
        """
        if isinstance(across, Alone):
            count = max(rows, 1)
            return grad.div_(count), np.asarray(sums) / count
        tail = grad.new_tensor([*sums, float(rows)])
        together = across.sum(torch.cat([grad, tail]))
        n = grad.numel()
        numbers = together[n:].cpu().numpy().astype(np.float64)
        total = max(numbers[-1], 1.0)
        return together[:n] / total, numbers[:-1] / total

    def descend_on(self, adam: Adam, grad: torch.Tensor, lr: float) -> float:
        """Clip, check, one step of an optimiser; the norm before clipping."""
        norm = clip_by_norm_(grad, self.options.max_grad_norm)
        check_gradient(norm, self.version + 1)
        adam.step(grad, lr=lr)
        return norm

    # -- what a checkpoint keeps -----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return super().state() | {"target": self.target_flat.data}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.target_flat.data.copy_(state["target"])


@torch.no_grad()
def errors_of_both(learner: OffPolicy, rows: Batch, own_target: bool) -> Array:
    """Mean of |δ_1| and |δ_2| of two critics (a TwinActor), without learning."""
    there = to_tensor({k: rows[k] for k in ("obs", "action")}, learner.device)
    q = learner.model.q(there["obs"], learner.model.unit(there["action"])).cpu().numpy()
    return np.asarray(np.abs(q - learner.targets(rows, own_target=own_target)).mean(0))


# -- exploration -----------------------------------------------------------------------------------


KINDS = ("normal", "ou", "clipped")


def ladder(base: float, alpha: float, first: int, here: int, total: int) -> Array:
    """ε_i = ε^(1 + α i / (N − 1)) of environments first .. first + here − 1 out of N.

    PAPER: arXiv:1803.00933, section 4. Number 0 explores most; with one alone it is ε itself.
    """
    i = np.arange(first, first + here, dtype=np.float64)
    exponents: Array = 1.0 + alpha * i / max(total - 1, 1)
    return np.asarray(base**exponents)


def annealed(start: float, end: float, over: int, steps: int) -> float:
    """From start to end in a straight line over so many steps, then constant."""
    done = min(1.0, steps / over) if over else 1.0
    return (1.0 - done) * start + done * end


def epsilon_greedy(q: Array, epsilon: Array, chance: EnvNoise, mask: Array | None = None) -> Array:
    """The best of each row of Q [N, n], or any action at all with probability ε [N].

    With a mask [N, n], any that is possible; the best is possible, for Q says so (`masked`).
    """
    drawn = chance.random((len(q), 2))
    count = q.shape[1] if mask is None else np.count_nonzero(mask, axis=1)
    anything = np.minimum((drawn[:, 1] * count).astype(np.int64), np.maximum(count, 1) - 1)
    if mask is not None:  # the first action with so many possible ones before it
        anything = np.argmax(np.cumsum(mask != 0, axis=1) > anything[:, None], axis=1)
    return np.asarray(np.where(drawn[:, 0] < epsilon, anything, q.argmax(axis=1)))


class ActionNoise:
    """Noise on [-1, 1] for actions of `size` numbers, one stream an environment.

        normal     σ ε                             ε ~ N(0, 1), anew at every step
        clipped    the same, cut to ±clip σ
        ou         x ← x + θ (0 − x) dt + σ √dt ε   a walk that is pulled back to 0; PAPER:
                                                   arXiv:1509.02971; it begins at 0 in each episode

    Args:
        kind: normal, ou or clipped.
        scales: σ of each environment, [E].
        size: numbers of an action.
        theta, dt: of the walk.
        clip: deviations beyond which clipped noise is cut.
    """

    def __init__(
        self, kind: str, scales: Array, size: int, *, theta: float = 0.15, dt: float = 1.0,
        clip: float = 2.0,
    ) -> None:  # fmt: skip
        if kind not in KINDS:
            raise ConfigError(f"there is no noise {kind!r}; there are {', '.join(KINDS)}")
        self.kind, self.theta, self.dt, self.clip = kind, theta, dt, clip
        self._scales = np.asarray(scales, np.float32)[:, None]
        self._walk = np.zeros((len(scales), size), np.float32)

    def draw(self, chance: EnvNoise) -> Array:
        """[E, size] for one step."""
        fresh = chance.standard_normal(self._walk.shape)
        if self.kind == "clipped":
            fresh = np.clip(fresh, -self.clip, self.clip)
        if self.kind != "ou":
            return np.asarray(self._scales * fresh)
        pull = self.theta * self.dt * self._walk
        self._walk = self._walk - pull + self._scales * np.float32(np.sqrt(self.dt)) * fresh
        return self._walk.copy()

    def restart(self, ended: Array) -> None:
        """Those environments [E] begin an episode."""
        if self.kind == "ou":
            self._walk[ended] = 0.0

    def state(self) -> dict[str, Any]:
        return {"walk": self._walk.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._walk = np.array(state["walk"], np.float32)
