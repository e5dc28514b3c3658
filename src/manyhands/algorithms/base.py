"""What every algorithm is made of, and the learner step, written once.

    prepare     rollout -> rows with advantages and value targets
    gradient    rows -> the gradient of their loss, here           (this worker's rows only)
    [ seam ]    across.sum: the same numbers for all workers
    apply       clip, Adam: the same step on all workers

The seam sums; the division is by the number of rows of all workers, which everybody knows. So the
result is that of one worker with all the rows, however unequal the parts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from manyhands import devices, seeding, trees
from manyhands.collect.rollout import Rollout, rows_of
from manyhands.errors import ConfigError
from manyhands.math import losses
from manyhands.math.optimiser import Adam, check_gradient, clip_by_norm_, make_schedule
from manyhands.math.returns import gae
from manyhands.networks.build import (
    ActorCritic,
    RecurrentActor,
    RecurrentActorCritic,
    to_tensor,
)
from manyhands.networks.flat import FlatParameters
from manyhands.networks.numpy_distributions import for_head, sample
from manyhands.networks.numpy_mlp import (
    FastActor,
    FastGradient,
    FastValueGradient,
    can_act,
    can_learn,
)
from manyhands.trees import Array, take
from manyhands.types import Acted, Actor, Batch, Info, Obs


class Across(Protocol):
    """The seam: what an algorithm may know of the rows that other workers hold."""

    def sum(self, x: Any) -> Any:
        """Sum of an array or tensor over workers."""
        ...

    def moments(self, x: Any) -> tuple[float, float, int]:
        """(mean, deviation, count) of all elements on all workers."""
        ...

    def place(self, rows: int) -> tuple[int, int]:
        """(number of the first of these rows, rows in all) in one count over all workers."""
        ...


class Alone:
    """The seam of one worker: the identity."""

    def sum(self, x: Any) -> Any:
        return x

    def moments(self, x: Any) -> tuple[float, float, int]:
        values = np.asarray(x, dtype=np.float64)
        return float(values.mean()), float(values.std()), values.size

    def place(self, rows: int) -> tuple[int, int]:
        return 0, rows


class TorchActor:
    """Acts with the model itself: images, GPUs, models of the user's own."""

    def __init__(self, model: ActorCritic, device: torch.device) -> None:
        self._model, self._device = model, device

    @torch.no_grad()
    def act(self, obs: Obs, noise: Any) -> Acted:
        parameters, values = self._model(to_tensor(obs, self._device))
        numbers = parameters.cpu().numpy()
        actions, logp = sample(self._model.head, numbers, noise)
        return Acted(actions, logp, values.cpu().numpy(), numbers)

    @torch.no_grad()
    def value(self, obs: Obs) -> Array:
        values: Array = self._model.value(to_tensor(obs, self._device)).cpu().numpy()
        return values


class Algorithm(ABC):
    """One policy with its value function, its optimiser, and the way it learns from rows."""

    name: str
    stats: tuple[str, ...] = ()

    def __init__(
        self, model: ActorCritic, options: Any, *, seed: int, device: torch.device | None = None
    ) -> None:
        self.device = device or torch.device("cpu")
        self.brings = self.device.type != "cpu"  # whether batches are brought to the device whole
        self.model = model.to(self.device)
        self.options = options
        self.flat = FlatParameters(model)
        # What `descend` moves: all parameters, unless the algorithm says less.
        self.moved = slice(self.moved_from(model), None)
        self.adam = Adam(self.flat.data[self.moved], lr=0.0, eps=options.adam_epsilon)
        self.rng = seeding.generator(seed, "minibatch")  # the same stream on all workers
        self.version = 0
        self.recurrent = isinstance(model, RecurrentActorCritic)
        self.actor: Actor = self._make_actor()

    def _make_actor(self) -> Actor:
        if isinstance(self.model, RecurrentActorCritic):
            return RecurrentActor(self.model, self.device)
        return FastActor(self.model) if can_act(self.model) else TorchActor(self.model, self.device)

    def moved_from(self, model: ActorCritic) -> int:
        """The first of the flat parameters that gradient steps move."""
        return 0

    def prepare(self, rollout: Rollout) -> Batch:
        """GAE; then rows of all environments, one after the other.

        With a memory they stay together as sequences [B, T, ...], one an environment, with the
        state before the first step: a minibatch is then some of these.
        """
        advantages, targets = gae(
            rollout.reward,
            rollout.value,
            rollout.next_value,
            rollout.terminated,
            rollout.truncated,
            gamma=self.options.gamma,
            lam=self.options.gae_lambda,
        )
        columns = {
            "obs": rollout.obs,
            "action": rollout.action,
            "logp": rollout.logp,
            "value": rollout.value,
            "parameters": rollout.parameters,
            "advantage": advantages,
            "target": targets,
        }
        if not self.recurrent:
            return {name: rows_of(x, rollout.valid) for name, x in columns.items()}
        # Rows that are no transition stay in their place, without weight.
        weight = rollout.valid.astype(np.float32)
        columns |= {"first": rollout.first, "weight": weight, "advantage": advantages * weight}
        sequences: Batch = trees.map(lambda x: x.swapaxes(0, 1).copy(), columns)
        return sequences | {"state": rollout.state}

    @abstractmethod
    def update(self, batch: Batch, across: Across, progress: float) -> Info:
        """Learn from a batch; `progress` goes from 0 to 1 over the run, for schedules."""

    @abstractmethod
    def gradient(self, rows: Batch, count: int) -> list[float]:
        """Put the gradient of sum(loss of these rows) / count into `flat.grad`; sums to report."""

    # -- the learner step ----------------------------------------------------------------------

    def descend(
        self,
        batch: Batch,
        across: Across,
        *,
        epochs: int,
        minibatch: int,
        lr: float,
        max_grad_norm: float,
        stop: Callable[[Info], bool] = lambda info: False,
        fit: ValueFit | None = None,
    ) -> Info:
        """Epochs of minibatch steps. `minibatch` counts rows of all workers; 0 means all.

        With `fit` the value learns by itself; else the algorithm's own gradient is followed.
        """
        mover = fit or self
        batch = self.brought(batch)
        here = len(batch["target"])
        first, total = across.place(here)
        length = batch["target"].shape[1] if self.recurrent else 1  # rows of one sequence
        size = min(max(1, minibatch // length) if minibatch else total, total)
        totals = np.zeros(len(mover.stats))
        seen = steps = 0
        norm = 0.0
        info: Info = {}
        for _ in range(epochs):
            for rows, sequences in self._minibatches(first, here, total, size):
                count = sequences * length
                local = mover.gradient(batch if rows is None else _chosen(batch, rows), count)
                grad, sums = self._seam(across, local, mover.moved)
                norm = mover.apply(grad, lr, max_grad_norm)
                totals += sums
                seen, steps = seen + count, steps + 1
                info = dict(zip(mover.stats, (sums / count).tolist(), strict=True))
                if stop(info):
                    break
            if stop(info):
                break
        report = dict(zip(mover.stats, (totals / max(seen, 1)).tolist(), strict=True))
        return report | {"grad_norm": norm, "learning_rate": lr, "gradient_steps": float(steps)}

    def brought(self, batch: Batch) -> Batch:
        """The batch where it is learned from: on a device it is brought there once, so that
        minibatches are chosen there. A batch that finds no room there stays with the host, and its
        minibatches travel one by one."""
        if not self.brings or trees.is_tensor(batch["target"]):
            return batch
        try:
            there: Batch = to_tensor(batch, self.device)
        except torch.OutOfMemoryError:
            self.brings = False
            return batch
        return there

    def _seam(
        self, across: Across, stats: list[float], moved: slice | None = None
    ) -> tuple[torch.Tensor, Array]:
        """Gradient and reported sums of all workers, in one message."""
        grad = self.flat.grad[moved or self.moved]
        if isinstance(across, Alone):
            return grad, np.asarray(stats)
        n = grad.numel()
        if self.device.type == "cpu":  # in numpy: half the calls that torch needs for it
            message = np.empty(n + len(stats), np.float32)
            message[:n], message[n:] = grad.numpy(), stats
            summed = across.sum(message)
            return torch.from_numpy(summed[:n]), summed[n:].astype(np.float64)
        together = across.sum(torch.cat([grad, grad.new_tensor(stats)]))
        return together[:n], together[n:].cpu().numpy().astype(np.float64)

    def apply(self, grad: torch.Tensor, lr: float, max_grad_norm: float) -> float:
        """One step of Adam on the gradient of all workers."""
        return _step(self.adam, grad, lr, max_grad_norm, self.version + 1)

    def _minibatches(
        self, first: int, here: int, total: int, size: int
    ) -> Iterator[tuple[Array | None, int]]:
        """(this worker's rows, rows of all workers) of each minibatch of one epoch.

        All workers draw the same permutation of all rows; each finds its own in it.
        """
        if size == total:
            yield None, total
            return
        order = self.rng.permutation(total)
        for at in range(0, total, size):
            chosen = order[at : at + size]
            if here < total:
                chosen = chosen[(chosen >= first) & (chosen < first + here)] - first
            yield chosen, min(size, total - at)

    # -- what a checkpoint keeps ---------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        return {
            "shapes": shapes,  # says which layer it is, where a checkpoint does not fit
            "weights": self.flat.data,
            "adam": self.adam.state(),
            "rng": self.rng.bit_generator.state,
            "version": self.version,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.flat.data.copy_(state["weights"])
        self.adam.load_state(state["adam"])
        self.rng.bit_generator.state = state["rng"]
        self.version = int(state["version"])


class ValueFit:
    """The value network by itself: the gradient of its squared error, and Adam on its parameters.

    L = Σ w (V − R)² / rows          w: 1, or 0 for rows that do not count
    """

    stats = ("value_loss",)
    columns: tuple[str, ...] = ("obs", "target")

    def __init__(self, algorithm: Algorithm, adam: Adam | None = None) -> None:
        self._algorithm, model, flat = algorithm, algorithm.model, algorithm.flat
        self.moved = slice(value_from(model), None)
        self.adam = adam or Adam(flat.data[self.moved], lr=0.0, eps=algorithm.options.adam_epsilon)
        if algorithm.recurrent:
            self.columns += ("state", "first", "weight")
        self.fast = FastValueGradient(model, flat) if can_learn(model) else None

    def gradient(self, rows: Batch, count: int) -> list[float]:
        """Put it into the value's part of `flat.grad`; the sum of squares to report."""
        own = self._algorithm
        if len(rows["target"]) == 0:
            own.flat.grad.zero_()
            return [0.0]
        if self.fast is not None:
            values = self.fast.forward(rows["obs"])
            total, slope = losses.squares_slope(values, rows["target"])
            self.fast.backward(slope * (1.0 / count))
            return [total]
        own.flat.zero_grad()
        there = {k: to_tensor(v, own.device) for k, v in rows.items()}
        if own.recurrent:
            _, found, there = forward(own.model, there)
        else:
            found = own.model.value(there["obs"])
        squares = losses.squares(found, there["target"], there.get("weight"))
        (squares / count).backward()  # type: ignore[no-untyped-call]
        return [squares.item()]

    def apply(self, grad: torch.Tensor, lr: float, max_grad_norm: float) -> float:
        return _step(self.adam, grad, lr, max_grad_norm, self._algorithm.version + 1)


def _chosen(batch: Batch, rows: Array) -> Batch:
    """Some rows of the batch, where it is."""
    target = batch["target"]
    if not trees.is_tensor(target):
        return take(batch, rows)
    index = torch.from_numpy(rows).to(target.device)
    chosen: Batch = trees.map(lambda column: column.index_select(0, index), batch)
    return chosen


def value_from(model: ActorCritic) -> int:
    """Where the value network begins in the flat parameters: at their end, in our own networks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = {id(p) for p in model.value_parameters()}
    first = len(parameters) - len(own)
    if {id(p) for p in parameters[first:]} != own:
        return 0  # another order: the policy's gradient is zero, and it stays where it is
    return sum(p.numel() for p in parameters[:first])


def _step(adam: Adam, grad: torch.Tensor, lr: float, max_grad_norm: float, update: int) -> float:
    """Clip and move; the norm that the gradient had."""
    norm = clip_by_norm_(grad, max_grad_norm)
    check_gradient(norm, update)
    adam.step(grad, lr=lr)
    return norm


class PolicyGradient(Algorithm):
    """A loss of the policy's own, beside the value's and the entropy's, which are alike for all:

        L = policy + c_v Σ w (V − R)² − c_e Σ w H          w: 1, or 0 for rows that do not count

    The policy's part is given in torch; where it is given in numpy too (`policy_slope`), networks
    that numpy knows learn several times as fast.
    """

    stats: tuple[str, ...] = ("policy_loss", "value_loss", "entropy")
    on_device = False  # whether algorithms/on_device.py has its update

    def __init__(self, model: ActorCritic, options: Any, **kwargs: Any) -> None:
        super().__init__(model, options, **kwargs)
        self.critic = self._own_critic()
        written = type(self).policy_slope is not PolicyGradient.policy_slope
        self.fast = FastGradient(model, self.flat) if written and can_learn(model) else None
        self.density = for_head(model.head) if self.fast is not None else None

    def _own_critic(self) -> ValueFit | None:
        """The critic's own passes, where it has any; gradient steps then move the policy alone."""
        o = self.options
        if not (getattr(o, "critic_learning_rate", 0) or getattr(o, "critic_epochs", 0)):
            return None
        first = 0 if self.model.shared else value_from(self.model)
        if first == 0:
            raise ConfigError(
                "critic_learning_rate and critic_epochs need a value network of its own, behind "
                "the policy's; this network has parts that serve both, or another order"
            )
        self.moved = slice(0, first)
        self.adam = Adam(self.flat.data[self.moved], lr=0.0, eps=o.adam_epsilon)
        return ValueFit(self)

    def fit_value(
        self, batch: Batch, across: Across, progress: float, *, epochs: int, minibatch: int
    ) -> Info:
        """The critic's own passes over the batch, after the policy's; nothing where it has none."""
        o = self.options
        if self.critic is None:
            return {}
        rate = make_schedule(o.critic_learning_rate or o.learning_rate)(progress)
        info = self.descend(
            {name: batch[name] for name in self.critic.columns},
            across,
            epochs=o.critic_epochs or epochs,
            minibatch=minibatch,
            lr=rate,
            max_grad_norm=o.max_grad_norm,
            fit=self.critic,
        )
        return {"value_loss": info["value_loss"], "critic_learning_rate": rate}

    @property
    def value_weight(self) -> float:
        """Of the value's loss beside the policy's; its own passes have it all."""
        return float(self.options.value_weight) if self.critic is None else 0.0

    def state(self) -> dict[str, Any]:
        own = {} if self.critic is None else {"critic": self.critic.adam.state()}
        return super().state() | own

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if self.critic is not None:
            self.critic.adam.load_state(state["critic"])

    @abstractmethod
    def policy_loss(self, parameters: torch.Tensor, rows: Batch) -> tuple[torch.Tensor, list[Any]]:
        """(sum over rows, further sums to report, as numbers or tensors of one number) in torch:
        autograd does the rest."""

    def policy_slope(self, logp: Array, rows: Batch) -> tuple[float, Array, list[float]]:
        """(the same sum, its derivative by each log-probability, the same further sums) in numpy.
        Optional."""
        raise NotImplementedError

    def gradient(self, rows: Batch, count: int) -> list[float]:
        """Put the gradient of sum(loss of these rows) / count into `flat.grad`; sums to report."""
        if len(rows["target"]) == 0:
            self.flat.grad.zero_()
            return [0.0] * len(self.stats)
        if self.fast is not None:
            seen = self.see(rows)
            return self.backward(*seen, rows, count)
        self.flat.zero_grad()
        with devices.said_what_fits(self.device, math.prod(rows["target"].shape), self.options):
            on_device = {k: to_tensor(v, self.device) for k, v in rows.items()}
            return self.autograd(*forward(self.model, on_device), count)

    def see(self, rows: Batch) -> tuple[Array, Array, Any, Array]:
        """(log-probabilities, entropies, what pulls their slopes back to the network, values)."""
        assert self.fast is not None
        assert self.density is not None
        parameters, values = self.fast.forward(rows["obs"])
        return *self.density.log_prob_and_entropy(parameters, rows["action"]), values

    def backward(
        self, logp: Array, entropy: Array, pull: Any, values: Array, rows: Batch, count: int
    ) -> list[float]:
        """The gradient in numpy, from what `see` gave."""
        assert self.fast is not None
        o, weight = self.options, rows.get("weight")
        policy, d_logp, more = self.policy_slope(logp, rows)
        value, d_value = losses.squares_slope(values, rows["target"], weight)
        d_entropy = -o.entropy_weight if weight is None else -o.entropy_weight * weight
        self.fast.backward(
            pull(d_logp / count, d_entropy / count), self.value_weight * d_value / count
        )
        total = entropy.sum() if weight is None else np.dot(entropy, weight)
        return [policy, value, float(total), *more]

    def autograd(
        self, parameters: torch.Tensor, values: torch.Tensor, rows: Batch, count: int
    ) -> list[float]:
        """The gradient by torch."""
        total, sums = self.loss(parameters, values, rows)
        (total / count).backward()  # type: ignore[no-untyped-call]
        return [x.item() if isinstance(x, torch.Tensor) else float(x) for x in sums]

    def loss(
        self, parameters: torch.Tensor, values: torch.Tensor, rows: Batch
    ) -> tuple[torch.Tensor, list[Any]]:
        """(the loss, what is reported of it) in torch, both sums over rows."""
        o, weight = self.options, rows.get("weight")
        policy, more = self.policy_loss(parameters, rows)
        value = losses.squares(values, rows["target"], weight)
        entropies = self.model.head.entropy(parameters)
        entropy = entropies.sum() if weight is None else (entropies * weight).sum()
        total = policy + self.value_weight * value - o.entropy_weight * entropy
        return total, [policy, value, entropy, *more]


def forward(model: Any, rows: Batch) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """(distribution parameters [N, P], values [N], the rows themselves) in torch; sequences become
    rows, environment by environment."""
    if not isinstance(model, RecurrentActorCritic):
        return *model(rows["obs"]), rows
    state, first = rows["state"], rows["first"]
    flat: Batch = trees.map(
        lambda x: x.flatten(0, 1), {k: v for k, v in rows.items() if k not in ("state", "first")}
    )
    return *model.sequences(flat["obs"], state, first), flat


def recentred(batch: Batch, actor: Actor, at_once: int = 1024) -> Batch:
    """The batch with the distribution parameters of the policy as it is now.

    WHY: a trust region, and a KL penalty, lie around the policy that the update starts from. The
    behaviour's log-probabilities stay: the ratio in the surrogate is then the true one.
    """
    unused = np.random.default_rng(0)  # for actions that nobody takes
    parts = [
        actor.act(take(batch["obs"], slice(at, at + at_once)), unused).parameters
        for at in range(0, len(batch["logp"]), at_once)
    ]
    return {**batch, "parameters": np.concatenate(parts)}


def counted(batch: Batch, column: Array) -> Array:
    """The column of those rows that count: all, or those with a weight."""
    return column[batch["weight"] > 0] if "weight" in batch else column


def normalised(batch: Batch, across: Across, epsilon: float = 1e-8) -> Batch:
    """The batch with advantages of mean 0 and deviation 1 over the rows of all workers."""
    mean, std, _ = across.moments(counted(batch, batch["advantage"]))
    advantage = np.asarray((batch["advantage"] - mean) / (std + epsilon), dtype=np.float32)
    return {**batch, "advantage": advantage * batch["weight"] if "weight" in batch else advantage}


def explained_variance(batch: Batch, across: Across) -> float:
    """1 - var(target - value) / var(target), over the rows of all workers."""
    target = counted(batch, batch["target"])
    _, spread, _ = across.moments(target)
    _, left, _ = across.moments(target - counted(batch, batch["value"]))
    return 1.0 - (left / spread) ** 2 if spread > 0 else 0.0
