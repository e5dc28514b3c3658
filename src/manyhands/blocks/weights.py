"""A weight server: numbered versions of a model's weights, pushed by some workers, pulled by all.

    server = par.weight_server("policy", model)     every worker, with its own; all begin alike
    server.push(model)      learner: accepted only on top of the version it knew (compare and set)
    server.pull(model)      actor: copies the newest weights in, if they are newer than its own

The weights live on the worker that owns the server (rank 0, unless said otherwise); they travel
only when there is something newer. `history` versions can be asked for by number.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

from manyhands.blocks import Locked, reach, whole
from manyhands.engines.base import Patience
from manyhands.errors import CollectiveError, ConfigError
from manyhands.trees import Tree

if TYPE_CHECKING:
    from manyhands.parallel import Parallel

Sync = Literal["auto", "manual"]


class Versions(Locked):
    """What the owner of a weight server holds: the last few versions of one tree.

    Served to the others; its methods are called by name.
    """

    def __init__(self, shapes: list[list[Any]], owner: str, history: int = 1) -> None:
        super().__init__()
        if history < 1:
            raise ConfigError(f"history={history}: at least the newest version is kept")
        self._shapes, self._owner, self._history = shapes, owner, history
        self._kept: OrderedDict[int, Tree] = OrderedDict()
        self._version = 0
        self._refused = 0

    @whole
    def version(self) -> int:
        """The newest version: 1 is what the owner began with."""
        return self._version

    @whole
    def push(self, tree: Tree, on: int, shapes: list[list[Any]], who: str) -> list[int]:
        """Add a version if `on` is the newest one: [1 if it was added, the newest version]."""
        self.check(shapes, who)
        if on != self._version:
            self._refused += 1
            return [0, self._version]
        self._version += 1
        self._kept[self._version] = tree
        while len(self._kept) > self._history:
            self._kept.popitem(last=False)
        return [1, self._version]

    @whole
    def pull(self, newer_than: int = 0, version: int = 0) -> list[Any] | None:
        """[version, tree] of that version, or of the newest one if it is newer; else None."""
        if version:
            if version not in self._kept:
                there = ", ".join(map(str, self._kept)) or "none"
                raise ConfigError(f"version {version} is not kept; there are {there}")
            return [version, self._kept[version]]
        if self._version <= newer_than:
            return None
        return [self._version, self._kept[self._version]]

    def check(self, shapes: list[list[Any]], who: str) -> None:
        """ConfigError that names the first parameter in which two networks differ."""
        own, theirs = dict(map(tuple, self._shapes)), dict(map(tuple, shapes))
        for name in [*own, *(n for n in theirs if n not in own)]:
            if own.get(name) != theirs.get(name):
                raise ConfigError(
                    f"the networks differ: {name} is {_shape(own.get(name))} at {self._owner} and "
                    f"{_shape(theirs.get(name))} at {who}; build the same network in every role"
                )

    @whole
    def counters(self) -> dict[str, int]:
        return {"version": self._version, "refused": self._refused}


class WeightServer:
    """A handle on the versions of one model; every worker makes one, with its own model.

    Args:
        par: This worker.
        name: The same on all workers.
        model: nn.Module, or a list of them; compared with the owner's at once.
        owner: Rank of the worker that holds the versions.
        history: How many versions the owner keeps.
        sync: "auto": `act_with` pulls before it gives the model; "manual": only `pull` does.
    """

    def __init__(
        self,
        par: Parallel,
        name: str,
        model: Any,
        *,
        owner: int = 0,
        history: int = 1,
        sync: Sync = "auto",
    ) -> None:
        if sync not in ("auto", "manual"):
            raise ConfigError(f"sync={sync!r} is not auto or manual")
        self.model, self.sync, self.version = model, sync, 0
        self._worker, self._who = par.worker, par.worker.place.name
        self._shapes = _shapes(model)
        self._here: Versions | None = None
        if par.rank == owner:
            self._here = Versions(self._shapes, self._who, history)
            self._here.push(_tree(model), 0, self._shapes, self._who)  # all begin with these
            par.serve(f"weights: {name}", self._here)
        else:
            self._there = reach(par, f"weights: {name}")
            self._call("check", self._shapes, self._who)
        self.pull()

    def push(self, model: Any = None, *, pull_on_fail: bool = True) -> bool:
        """Make these the newest weights; False if somebody has pushed since this worker's last
        pull or push. It then has the newest ones, unless `pull_on_fail` is off."""
        tree = _tree(self.model if model is None else model)
        added, newest = self._call("push", tree, self.version, self._shapes, self._who)
        if added:
            self.version = int(newest)
        elif pull_on_fail:
            self.pull(model)
        return bool(added)

    def pull(self, model: Any = None, *, version: int = 0, wait: float = 0.0) -> bool:
        """Copy the newest weights in, or those of a version; False when there are none newer.

        With `wait`, newer ones are waited for so many seconds (CollectiveError at the deadline).
        """
        newer_than = 0 if version else self.version
        found = self._call("pull", newer_than, version)
        patience = Patience(wait)
        while found is None and wait > 0:
            patience.pause()
            if patience.over:
                raise CollectiveError(
                    f"no weights newer than version {self.version} within {wait:g} s"
                )
            found = self._call("pull", newer_than, version)
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
        """The newest version, and how many pushes came too late."""
        counters: dict[str, int] = self._call("counters")
        return counters

    def _call(self, method: str, *args: Any) -> Any:
        if self._here is not None:
            self._worker.breathe()
            return getattr(self._here, method)(*args)
        return self._there.call(method, *args)


def _modules(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _tensors(model: Any) -> dict[str, Any]:
    """Weights and buffers by name; of several modules, with their number before it."""
    modules = _modules(model)
    found: dict[str, Any] = {}
    for i, module in enumerate(modules):
        module = getattr(module, "module", module)  # inside DistributedDataParallel
        prefix = f"{i}." if len(modules) > 1 else ""
        found |= {prefix + name: tensor for name, tensor in module.state_dict().items()}
    if not found:
        raise ConfigError("a weight server needs a module with parameters")
    return found


def _shapes(model: Any) -> list[list[Any]]:
    return [[name, list(tensor.shape)] for name, tensor in _tensors(model).items()]


def _tree(model: Any) -> Tree:
    return {name: tensor.detach().cpu().clone() for name, tensor in _tensors(model).items()}


def _pour(tree: Any, model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(tree[name])


def _shape(shape: Any) -> str:
    return "not there" if shape is None else str(tuple(shape))
