"""`Parallel`: a user's own script on N workers, with a handful of changed lines.

par = Parallel()                        # plain `python script.py` is one worker
envs = par.make_vec("CartPole-v1", num_envs=8)
par.sync(model)
...
loss.backward()
par.average_gradients(model)
optimizer.step()
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands import devices, roles, seeding
from manyhands.engines.attach import attach
from manyhands.engines.base import Channel, Service, WeightStore, seconds
from manyhands.engines.group import Group
from manyhands.errors import ConfigError, SupportError
from manyhands.trees import Tree, is_tensor

if TYPE_CHECKING:
    import torch
    from gymnasium.vector import VectorEnv

    from manyhands.blocks import SharedValues
    from manyhands.blocks.gradients import GradientServer
    from manyhands.blocks.weights import WeightServer


class Parallel:
    """This worker's place among all workers, and what they do together.

    How the script was started (python, manyhands launch, mpiexec, torchrun, srun) is detected.
    Every call that waits for others has a deadline; when workers disagree, or one is gone, it
    raises an error that names each worker and what it had.

    Args:
        timeout: Seconds that any wait for other workers may take; 0 waits for ever. By default
            what `manyhands launch --timeout` says, else 60.
        debug: Compare call sites and fingerprints across workers at each call (slower). By default
            what `manyhands launch --debug-collectives` says.
    """

    def __init__(self, timeout: float | None = None, debug: bool | None = None) -> None:
        self.worker = attach(timeout)
        if timeout is not None:
            timeout = seconds("timeout", timeout)
            self.worker.timeout = timeout
            self.worker.group.transport.timeout = timeout
        self.group: Group = self.worker.group
        if debug is not None:
            self.group.debug = debug
        place = self.worker.place
        self.rank, self.size, self.engine = place.rank, place.size, place.engine
        self.role, self.role_rank, self.role_size = place.role, place.role_rank, place.role_size
        self.roles = _roles_of(self.worker, self.size)
        self.is_main = place.is_main
        self.root_seed: int | None = None
        self.seconds: dict[str, float] = {}  # wall time of each `timer` section
        self._started = time.perf_counter()
        self._streams_checked = False
        _cap_threads(place.local_size)
        if not self.is_main:
            seeding.part_from_main(self.rank)

    # -- place ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The GPU of this worker's local rank, else the CPU."""
        import torch

        return torch.device(devices.name("auto", self.worker.place.local_rank, devices.usable()))

    def seed(self, seed: int) -> None:
        """Seed python, numpy and torch; each worker gets a stream of its own."""
        self.root_seed = seed
        seeding.seed_everything(seed, self.role, self.rank)

    def group_of(self, role: str) -> Group:
        """Collectives among the workers of one role; only they call it, each as often."""
        ranks = self.roles.ranks(role)
        if self.rank not in ranks:
            raise ConfigError(
                f"group_of({role!r}): {self.worker.place.name} is not one of them; there are "
                f"{self.roles.text}"
            )
        return self.group.among(ranks, f"role {role}")

    def make_vec(self, env_id: Any, num_envs: int, **kwargs: Any) -> VectorEnv:
        """Gymnasium vector env with `num_envs` on this worker; no two workers share a seed."""
        from manyhands.envs.make import seeded_vector

        return seeded_vector(env_id, num_envs, worker=self.rank, root_seed=self.root_seed, **kwargs)

    def share(self, total: int) -> int:
        """This worker's part of a global number; the parts sum to it."""
        whole = isinstance(total, (Integral, float)) and total == total // 1
        if not whole or total < 0:
            raise ConfigError(f"share({total!r}): a whole number of things is needed, 0 or more")
        total = int(total)
        return total // self.size + (self.rank < total % self.size)

    # -- data ----------------------------------------------------------------------------------

    def gather(self, tree: Tree) -> Tree | None:
        """Every worker's arrays joined along axis 0 on the main worker; None elsewhere."""
        return self.group.gather(tree)

    def all_gather(self, tree: Tree) -> Tree:
        """Every worker's arrays joined along axis 0, on all workers."""
        return self.group.all_gather(tree)

    def broadcast(self, tree: Tree) -> Tree:
        """The main worker's arrays, on all workers."""
        return self.group.broadcast(tree)

    def mean(self, tree: Tree) -> Tree:
        return self.group.mean(tree)

    def sum(self, tree: Tree) -> Tree:
        return self.group.sum(tree)

    def max(self, tree: Tree) -> Tree:
        return self.group.max(tree)

    def min(self, tree: Tree) -> Tree:
        return self.group.min(tree)

    def any(self, flag: Any) -> bool:
        """True on all workers if it is true on one: a branch that every worker takes alike."""
        return self.group.any(flag)

    def all(self, flag: Any) -> bool:
        return self.group.all(flag)

    def normalize(self, x: Any, eps: float = 1e-8) -> Any:
        """(x - mean) / (std + eps) with mean and std over all workers, as if it were one array.

        Exact for parts of unequal size; a worker may have none at all.
        """
        mean, std, _ = self.group.moments(x)
        x = x if is_tensor(x) else np.asarray(x)
        return (x - mean) / (std + eps)

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self.group.barrier()

    # -- models --------------------------------------------------------------------------------

    def sync(self, *things: Any) -> None:
        """The main worker's weights and buffers (nn.Module) or state (optimiser), on all."""
        self._warn_of_same_streams()
        for thing in things:
            if hasattr(thing, "parameters") and hasattr(thing, "buffers"):
                self._sync_module(thing)
            elif hasattr(thing, "state_dict") and hasattr(thing, "param_groups"):
                self._sync_optimiser(thing)
            else:
                raise ConfigError(
                    f"sync takes an nn.Module or an optimiser, not {type(thing).__name__}; "
                    "for arrays there is par.broadcast"
                )

    def average_gradients(
        self, model: Any, weight: float | None = None, *, group: Group | None = None
    ) -> None:
        """Replace every gradient by its mean over workers: call between backward and step.

        Args:
            model: nn.Module, or an iterable of parameters.
            weight: This worker's weight in the average, such as the rows of its minibatch. By
                default all weigh the same.
            group: Those that take part, such as `group_of("learner")`; by default all workers.
        """
        group = group or self.group
        if group.size == 1:
            return
        import torch

        parameters = _trainable(model)
        if group.debug:
            _check_synced(group, model)
        for same in _by_kind(parameters):
            had = [p.grad is not None for p in same]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            # The flags tell, for a parameter unused here, whether anybody has a gradient for it.
            flags = grads[0].new_tensor([float(h) for h in had] + [1.0])
            flat = torch.cat([g.detach().reshape(-1) for g in grads] + [flags])
            if weight is not None:
                flat *= weight
            group.mean_tensor_(flat)
            if weight is not None:
                flat /= flat[-1].clone()
            at = 0
            used = flat[-1 - len(same) : -1].tolist()
            for p, grad, anybody in zip(same, grads, used, strict=True):
                if anybody:
                    grad.copy_(flat[at : at + p.numel()].view_as(p))
                    p.grad = grad
                at += p.numel()

    def average_weights(self, model: Any) -> None:
        """Replace every weight by its mean over workers."""
        if self.size == 1:
            return
        import torch

        with torch.no_grad():
            for same in _by_kind(_trainable(model)):
                flat = torch.cat([p.detach().reshape(-1) for p in same])
                self.group.mean_tensor_(flat)
                _pour(flat, same)

    def check_synced(self, model: Any) -> None:
        """CollectiveError naming who differs in what, unless all replicas are equal to the bit."""
        _check_synced(self.group, model)

    def data_parallel(self, model: Any) -> Any:
        """The model in torch's DistributedDataParallel (torch and ray engines).

        CRUCIAL: call the wrapper itself; losses that go around it by `.module` are not averaged.
        """
        if self.size == 1 and self.engine != "torch":
            return model
        if self.engine not in ("torch", "ray"):
            raise SupportError(
                f"DistributedDataParallel needs the torch or ray engine and this is {self.engine}; "
                "par.average_gradients(model) works on all"
            )
        from manyhands.engines.torch.transport import wrap_ddp

        return wrap_ddp(model, self.device)

    # -- blocks --------------------------------------------------------------------------------

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        """Bounded many-to-one queue; each writer may have `capacity` trees waiting."""
        return self.worker.channel(name, reader=reader, capacity=capacity)

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        """Versioned weights that one worker publishes and all may pull."""
        return self.worker.weights(name, writer=writer)

    def serve(self, name: str, target: object) -> None:
        """Offer an object's public methods to the other workers."""
        self.worker.serve(name, target)

    def service(self, name: str, timeout: float | None = None) -> Service:
        """A handle on what another worker serves under that name."""
        return self.worker.service(name, timeout)

    def weight_server(self, name: str, model: Any, **options: Any) -> WeightServer:
        """Numbered versions of a model's weights, pushed by some and pulled by all: every worker
        makes one with its own model. Options: owner, history, sync."""
        from manyhands.blocks.weights import WeightServer

        return WeightServer(self, name, model, **options)

    def gradient_server(
        self, name: str, model: Any, optimizer: Callable[[Any], Any], **options: Any
    ) -> GradientServer:
        """One optimiser for all, to which workers push gradients: every worker makes one with its
        own copy of the model. Options: scheduler, pushes, reduce, max_lag, owner, relays, sync."""
        from manyhands.blocks.gradients import GradientServer

        return GradientServer(self, name, model, optimizer, **options)

    def values(self, name: str = "values", *, owner: int = 0) -> SharedValues:
        """A small table that all workers read and write."""
        from manyhands.blocks import SharedValues

        return SharedValues(self, name, owner=owner)

    # -- a run as a person sees it -------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the main worker only."""
        if self.is_main:
            print(*args, **kwargs)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add up the wall time of a section; the main worker prints the table when it ends."""
        if self.is_main and not self.seconds:
            atexit.register(self._print_times)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        """Leave: the others learn that no further call will come. Done at exit by itself."""
        self.worker.close()

    # -- inside --------------------------------------------------------------------------------

    def _warn_of_same_streams(self) -> None:
        """Once: workers that seeded torch alike after `Parallel()` draw the same actions."""
        torch = sys.modules.get("torch")
        if self._streams_checked or self.size == 1 or torch is None:
            return
        self._streams_checked = True
        seeds = self.group.exchange(torch.initial_seed())
        if len(set(seeds)) < len(seeds) and self.is_main:
            warnings.warn(
                f"several workers have torch seed {seeds[-1]} and draw the same random numbers; "
                "seed before Parallel(), or with par.seed(...)",
                stacklevel=3,
            )

    def _print_times(self) -> None:
        total = time.perf_counter() - self._started
        rest = total - sum(self.seconds.values())
        rows = [*sorted(self.seconds.items(), key=lambda kv: -kv[1]), ("everything else", rest)]
        width = max(len(name) for name, _ in rows)
        with contextlib.suppress(OSError, ValueError):  # stdout may be closed by now
            print(f"\nmain worker, {total:.1f} s:")
            for name, seconds in rows:
                print(f"  {name:<{width}}  {seconds:8.2f} s  {100 * seconds / total:5.1f} %")

    def _sync_module(self, module: Any) -> None:
        import torch

        if self.size == 1:
            return
        tensors = [*module.parameters(), *module.buffers()]
        names = [n for n, _ in module.named_parameters()] + [n for n, _ in module.named_buffers()]
        tree = {n: t.detach() for n, t in zip(names, tensors, strict=True)}
        with torch.no_grad():
            for name, value in self.group.broadcast(tree).items():
                tree[name].copy_(value)

    def _sync_optimiser(self, optimiser: Any) -> None:
        from manyhands import wire

        if self.size == 1:
            return
        # WHY as one message: the others may not have any state yet, so shapes cannot be agreed on.
        state = optimiser.state_dict()
        state = {**state, "state": [[k, v] for k, v in state["state"].items()]}
        data = np.frombuffer(wire.encode(state), dtype=np.uint8)
        (length,) = self.group.broadcast(np.array([data.size]))
        data = self.group.broadcast(data if self.is_main else np.zeros(length, np.uint8))
        state = wire.decode(data.data)
        optimiser.load_state_dict({**state, "state": dict(state["state"])})


def _roles_of(worker: Any, size: int) -> roles.Roles:
    world = getattr(worker, "world", None)  # the inline engine's workers share one process
    given: roles.Roles = roles.from_environment(size) if world is None else world.roles
    return given


def _cap_threads(local_size: int) -> None:
    """Under a launcher that is not ours, share the cores out; an explicit choice is respected."""
    if local_size == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, (os.cpu_count() or 1) // local_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


# -- parameters of the user's models ---------------------------------------------------------------


def _check_synced(group: Group, model: Any) -> None:
    if hasattr(model, "state_dict"):
        tree = {k: v for k, v in model.state_dict().items() if is_tensor(v)}
    else:
        tree = {str(i): p for i, p in enumerate(_trainable(model))}
    group.check_equal("check_synced", tree)


def _trainable(model: Any) -> list[Any]:
    try:
        found = list(model.parameters() if hasattr(model, "parameters") else model)
        found = [p for p in found if p.requires_grad]
    except (TypeError, AttributeError):
        kind = type(model).__name__
        raise ConfigError(f"an nn.Module or its parameters are needed, not {kind}") from None
    if not found:
        raise ConfigError("there is no parameter that requires a gradient")
    return found


def _by_kind(parameters: list[Any]) -> list[list[Any]]:
    """Parameters of one dtype and device together: one message for each such set."""
    kinds: dict[tuple[Any, Any], list[Any]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    return list(kinds.values())


def _pour(flat: Any, tensors: list[Any]) -> None:
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view_as(t))
        at += t.numel()
