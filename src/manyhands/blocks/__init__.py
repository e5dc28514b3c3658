"""Parts for your own distributed loop: weight server, gradient server, shared values.

Each is an object that workers share: one call at a time at its owner, a handle for everybody else.
`SharedValues` is the smallest: a table that all workers read and write, with compare-and-set.
`check_actor` looks at a network of your own before anything is played.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.engines.base import Service
from manyhands.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    from manyhands.parallel import Parallel


Method = TypeVar("Method", bound=Callable[..., Any])


class Locked:
    """An object whose `whole` methods exclude one another.

    Others' calls come in threads of their own, while the owner goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()


def whole(method: Method) -> Method:
    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]


def reach(par: Parallel, name: str) -> Service:
    """A handle on what another worker serves, or the words when that one has left already."""
    try:
        return par.service(name)
    except OSError as error:
        raise CollectiveError(
            f"service {name!r}: the worker that serves it has left ({error.strerror}). Whoever "
            "serves must stay until all have been served: end the script with par.barrier()"
        ) from None


def check_actor(actor: Any, state: Any) -> None:
    """ConfigError unless `actor(state)` gives an action and its log-probability.

    V-trace weighs each action by how likely it was for the policy that acted; without that number
    an actor's episodes cannot be learned from. Call it before the loop, with any one state.

    Args:
        actor: Callable that gives (action, logp, ...).
        state: A batch of states that it takes, of one row or more.
    """
    import torch

    with torch.no_grad():
        given = actor(state)
    need = "it must give (action, log-probability, ...), so that V-trace can weigh its actions"
    if not isinstance(given, (tuple, list)) or len(given) < 2:
        what = f"{len(given)} thing" if isinstance(given, (tuple, list)) else _words(given)
        raise ConfigError(f"the actor returned {what} and no log-probability; {need}")
    action, logp = given[0], given[1]
    if not torch.is_tensor(logp) or not logp.is_floating_point():
        raise ConfigError(
            f"the actor returned {_words(logp)} where the log-probability should be; {need}"
        )
    rows = len(action) if torch.is_tensor(action) and action.dim() else 1
    if logp.numel() != rows:
        raise ConfigError(
            f"the actor returned {rows} actions and log-probabilities of shape "
            f"{tuple(logp.shape)}; one for each action is needed (sum those of its parts)"
        )
    if not bool(torch.isfinite(logp).all()):
        raise ConfigError("the actor's log-probability is not finite for the state given")


def _words(thing: Any) -> str:
    shape = getattr(thing, "shape", None)
    return type(thing).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


# -- shared values ---------------------------------------------------------------------------------


class Table(Locked):
    """What the owner holds; one call at a time, so that each is whole."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, Any] = {}

    @whole
    def get(self, key: str) -> list[Any]:
        return [key in self._values, self._values.get(key)]

    @whole
    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    @whole
    def swap(self, key: str, old: Any, new: Any) -> bool:
        if self._values.get(key) != old:
            return False
        self._values[key] = new
        return True

    @whole
    def add(self, key: str, amount: Any) -> Any:
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]

    @whole
    def remove(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    @whole
    def keys(self) -> list[str]:
        return list(self._values)


class SharedValues:
    """A handle on the table; every worker makes one. Values are what can travel: see `wire`."""

    def __init__(self, par: Parallel, name: str = "values", *, owner: int = 0) -> None:
        self._worker = par.worker
        self._here: Table | None = None
        if par.rank == owner:
            self._here = Table()
            par.serve(f"values: {name}", self._here)
        else:
            self._there = reach(par, f"values: {name}")

    def __getitem__(self, key: str) -> Any:
        there, value = self._call("get", key)
        if not there:
            raise ConfigError(f"there is no shared value {key!r}; there are {self.keys()}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of that name, or `default`; `values[key]` raises where there is none."""
        there, value = self._call("get", key)
        return value if there else default

    def __setitem__(self, key: str, value: Any) -> None:
        self._call("set", key, value)

    def swap(self, key: str, old: Any, new: Any) -> bool:
        """Set `new` if the value is `old` (None: not there yet); whether it was."""
        return bool(self._call("swap", key, old, new))

    def add(self, key: str, amount: float = 1) -> Any:
        """Add to a number, from 0 if it is not there; the new number."""
        return self._call("add", key, amount)

    def remove(self, key: str) -> bool:
        """Forget a value; whether there was one."""
        return bool(self._call("remove", key))

    def keys(self) -> list[str]:
        """The names that have a value."""
        return list(self._call("keys"))

    def _call(self, method: str, *args: Any) -> Any:
        if self._here is not None:
            self._worker.breathe()
            return getattr(self._here, method)(*args)
        return self._there.call(method, *args)
