"""A gradient server: workers push gradients, one optimiser takes the steps, all pull the weights.

    server = par.gradient_server("a3c", [actor, critic], optimizer=lambda p: Adam(p, lr=5e-3))
    loss.backward()
    server.push()           sends the gradients; True if they were taken, False if too old
    server.pull()           the newest weights, if there are newer ones

Every push is taken or refused, and both are counted: `server.counters()`. `push_async` does not
wait for the answer; it is asked for at the next push.

Its arithmetic (`Reducer`): k pushes become one gradient, and none is lost silently.

    offer    a push is taken, or refused because it is too old; both are counted
    full     k pushes are here
    take     their mean or their sum; the next k may come

Sums of several pushes may be offered as one (`count`), which is how levels are built: a reducer
near the workers adds some up and offers the sum further on. Mean and sum come out as if all had
come to one place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from manyhands.blocks import Locked, reach, whole
from manyhands.blocks.weights import Sync, _modules, _pour, _shapes, _tree
from manyhands.engines.base import answer
from manyhands.errors import ConfigError
from manyhands.trees import Array

if TYPE_CHECKING:
    from manyhands.parallel import Parallel


class Steps(Locked):
    """What the owner of a gradient server holds: the optimiser and the model it moves."""

    def __init__(
        self, model: Any, optimizer: Any, scheduler: Any, reducer: Reducer, owner: str
    ) -> None:
        super().__init__()
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._reducer, self._owner = reducer, owner
        self._parameters = _parameters(model)
        self._shapes = _shapes(model)
        self._version = 1
        self._tree: Any = _tree(model)

    def check(self, shapes: list[list[Any]], who: str) -> None:
        from manyhands.blocks.weights import Versions

        Versions(self._shapes, self._owner).check(shapes, who)

    @whole
    def push(self, gradient: Any, version: int, count: int = 1) -> list[int]:
        """Offer a flat gradient, or the sum of several: [1 if it was taken, newest version]."""
        taken = self._reducer.offer(_numpy(gradient), version, self._version, count)
        if taken and self._reducer.full:
            self._step(self._reducer.take())
        return [int(taken), self._version]

    @whole
    def pull(self, newer_than: int = 0) -> list[Any] | None:
        return [self._version, self._tree] if self._version > newer_than else None

    @whole
    def counters(self) -> dict[str, int]:
        return self._reducer.counters() | {"version": self._version}

    def _step(self, flat: Array) -> None:
        import torch

        total = torch.from_numpy(flat)
        at = 0
        for parameter in self._parameters:
            piece = total[at : at + parameter.numel()].view_as(parameter)
            parameter.grad = piece.to(parameter.device, parameter.dtype)
            at += parameter.numel()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        self._version += 1
        self._tree = _tree(self._model)


class Relay(Locked):
    """A reducer between some workers and the server: hands on the sum of every few pushes.

    CRUCIAL: the lock is not held while it hands on, or all its workers would wait for the server.
    """

    def __init__(self, forward: Any, pushes: int) -> None:
        super().__init__()
        self._forward, self._reducer = forward, Reducer(pushes)
        self._answer = [1, 1]

    def push(self, gradient: Any, version: int, count: int = 1) -> list[int]:
        with self._lock:
            self._reducer.offer(_numpy(gradient), version, version, count)
            if not self._reducer.full:
                return self._answer
            oldest = self._reducer.oldest
            total, together = self._reducer.take_sum()
        self._answer = list(self._forward("push", total, oldest, together))
        return self._answer

    def flush(self) -> list[int]:
        """Hand on what waits, however little it is."""
        with self._lock:
            if not self._reducer.waiting:
                return self._answer
            oldest = self._reducer.oldest
            total, together = self._reducer.take_sum()
        self._answer = list(self._forward("push", total, oldest, together))
        return self._answer

    @whole
    def waiting(self) -> int:
        return self._reducer.waiting


class GradientServer:
    """A handle on one optimiser for all; every worker makes one, with its own copy of the model.

    Args:
        par: This worker.
        name: The same on all workers.
        model: nn.Module, or a list of them; compared with the owner's at once.
        optimizer: Makes the optimiser from the parameters; called on the owner only.
        scheduler: Makes a learning-rate scheduler from the optimiser; stepped with it.
        pushes: How many pushes make one step.
        reduce: What they become, "mean" or "sum".
        max_lag: Pushes from weights more versions old than this are refused; None: never.
        owner: Rank of the worker that holds model and optimiser.
        relays: Ranks of workers that add pushes up on their way to the owner, for very many
            workers; each hands on the sum of pushes / len(relays).
        sync: "auto": `act_with` pulls before it gives the model; "manual": only `pull` does.
    """

    def __init__(
        self,
        par: Parallel,
        name: str,
        model: Any,
        optimizer: Callable[[Any], Any],
        *,
        scheduler: Callable[[Any], Any] | None = None,
        pushes: int = 1,
        reduce: Reduce = "mean",
        max_lag: int | None = None,
        owner: int = 0,
        relays: tuple[int, ...] = (),
        sync: Sync = "auto",
    ) -> None:
        if sync not in ("auto", "manual"):
            raise ConfigError(f"sync={sync!r} is not auto or manual")
        if relays and pushes % len(relays):
            raise ConfigError(
                f"{pushes} pushes do not go evenly into {len(relays)} relays; take "
                f"pushes={-(-pushes // len(relays)) * len(relays)}"
            )
        self.model, self.sync, self.version = model, sync, 0
        self._relay: Relay | None = None
        self._pending: Any = None
        self.taken = self.refused = 0  # of this worker's pushes, as far as it knows
        self._worker, who = par.worker, par.worker.place.name
        self._here: Any = None
        if par.rank == owner:
            # CRUCIAL: a copy. Steps are taken whenever others push, and this worker may be in the
            # middle of a backward through its own.
            moved = copy.deepcopy(model)
            made = optimizer(_parameters(moved))
            lr = scheduler(made) if scheduler is not None else None
            self._here = Steps(moved, made, lr, Reducer(pushes, reduce, max_lag), who)
            par.serve(f"gradients: {name}", self._here)
        else:
            self._there = self._async = reach(par, f"gradients: {name}")
            self._there.call("check", _shapes(model), who)
        self._push_to: Any = self._call
        self._connect_relays(par, name, pushes, relays)
        self.pull()

    def _connect_relays(
        self, par: Parallel, name: str, pushes: int, relays: tuple[int, ...]
    ) -> None:
        if par.rank in relays:
            self._relay = Relay(self._call, pushes // len(relays))
            par.serve(f"gradients: {name} by {par.rank}", self._relay)
            self._push_to = lambda method, *args: getattr(self._relay, method)(*args)
        elif relays and self._here is None:
            nearest = relays[par.rank % len(relays)]
            service = reach(par, f"gradients: {name} by {nearest}")
            self._push_to, self._async = service.call, service

    def push(self, model: Any = None) -> bool:
        """Send the gradients that `backward` has left; False if they were too old.

        They are set to zero, so that the next backward begins afresh.
        """
        taken, _ = self._push_to("push", self._flat(model), self.version)
        self._count(bool(taken))
        return bool(taken)

    def push_async(self, model: Any = None) -> None:
        """Send without waiting for the answer to this push; the one before is waited for."""
        self.settle()
        flat = self._flat(model)
        if self._here is not None or self._relay is not None:
            self._count(bool(self._push_to("push", flat, self.version)[0]))
        else:
            self._pending = self._async.call_async("push", flat, self.version)

    def settle(self) -> None:
        """Wait for the answer to the last `push_async`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._count(bool(answer(pending, self._async.timeout)[0]))

    def flush(self) -> None:
        """On a relay: hand on what waits there, however little; elsewhere nothing."""
        if self._relay is not None:
            self._relay.flush()

    def pull(self, model: Any = None) -> bool:
        """Copy the newest weights in; False when this worker has them already."""
        found = self._call("pull", self.version)
        if found is None:
            return False
        self.version = int(found[0])
        _pour(found[1], self.model if model is None else model)
        return True

    def act_with(self) -> Any:
        """The model to act with; with sync="auto" the newest weights are pulled first."""
        if self.sync == "auto":
            self.pull()
        return self.model

    def counters(self) -> dict[str, int]:
        """pushed = applied + refused + waiting, and the newest version."""
        counters: dict[str, int] = self._call("counters")
        return counters

    def _count(self, taken: bool) -> None:
        self.taken += taken
        self.refused += not taken

    def _call(self, method: str, *args: Any) -> Any:
        if self._here is not None:
            self._worker.breathe()
            return getattr(self._here, method)(*args)
        return self._there.call(method, *args)

    def _flat(self, model: Any) -> Any:
        import torch

        parameters = _parameters(self.model if model is None else model)
        missing = sum(p.grad is None for p in parameters)
        if missing == len(parameters):
            raise ConfigError("push: no parameter has a gradient; call loss.backward() before")
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([part.detach().reshape(-1).cpu() for part in parts]).clone()
        for parameter in parameters:
            parameter.grad = None
        return flat


def _parameters(model: Any) -> list[Any]:
    found = [p for module in _modules(model) for p in module.parameters() if p.requires_grad]
    if not found:
        raise ConfigError("a gradient server needs a module with trainable parameters")
    return found


def _numpy(gradient: Any) -> Array:
    array: Array = gradient.numpy() if hasattr(gradient, "numpy") else gradient
    return array


# -- the arithmetic: k pushes become one gradient --------------------------------------------------


Reduce = Literal["mean", "sum"]


class Reducer:
    """Adds up flat gradients.

    Args:
        pushes: How many make one step.
        reduce: What they become: "mean" or "sum".
        max_lag: A push made from weights more than so many versions old is refused; None: never.
    """

    def __init__(
        self, pushes: int = 1, reduce: Reduce = "mean", max_lag: int | None = None
    ) -> None:
        if pushes < 1:
            raise ConfigError(f"pushes={pushes}: a step needs at least 1")
        if reduce not in ("mean", "sum"):
            raise ConfigError(f"reduce={reduce!r} is not mean or sum")
        if max_lag is not None and max_lag < 0:
            raise ConfigError(f"max_lag={max_lag} must not be negative; None never refuses")
        self.pushes, self.reduce, self.max_lag = pushes, reduce, max_lag
        self.offered = self.refused = self.applied = 0  # pushes since the beginning
        self.oldest: int | None = None  # version of the oldest push that waits here
        self._sum: Array | None = None
        self._count = 0

    def offer(self, gradient: Array, version: int, newest: int, count: int = 1) -> bool:
        """Take a push, or the sum of `count` pushes; False when it was refused.

        Args:
            gradient: Flat, of the shape that the first one had.
            version: Of the weights that it was computed with, the oldest of a sum's.
            newest: Version of the weights that it would be applied to.
            count: How many pushes it is the sum of.
        """
        if self._sum is not None and gradient.shape != self._sum.shape:
            raise ConfigError(
                f"a gradient of shape {gradient.shape} was pushed, and those before it had "
                f"{self._sum.shape}: the networks differ between workers"
            )
        self.offered += count
        if self.max_lag is not None and newest - version > self.max_lag:
            self.refused += count
            return False
        self._sum = gradient.copy() if self._sum is None else _added(self._sum, gradient)
        self._count += count
        self.oldest = version if self.oldest is None else min(self.oldest, version)
        return True

    @property
    def waiting(self) -> int:
        """Pushes taken and not yet applied."""
        return self._count

    @property
    def full(self) -> bool:
        return self._count >= self.pushes

    def take(self) -> Array:
        """The mean or the sum of what waits; it counts as applied."""
        total, count = self.take_sum()
        self.applied += count
        return total / np.asarray(count, total.dtype) if self.reduce == "mean" else total

    def take_sum(self) -> tuple[Array, int]:
        """(sum, how many pushes): to be offered further on, where it will be counted."""
        if self._sum is None:
            raise ConfigError("there is no gradient to take: nothing was pushed")
        total, count = self._sum, self._count
        self._sum, self._count, self.oldest = None, 0, None
        return total, count

    def drop(self) -> int:
        """Refuse what waits: the run ends before there is enough for a step."""
        dropped, self._sum, self._count, self.oldest = self._count, None, 0, None
        self.refused += dropped
        return dropped

    def counters(self) -> dict[str, Any]:
        return {
            "pushed": self.offered,
            "applied": self.applied,
            "refused": self.refused,
            "waiting": self._count,
        }


def _added(total: Array, more: Array) -> Array:
    total += more
    return total
