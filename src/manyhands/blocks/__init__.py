"""Parts for your own distributed loop: weight server, gradient server, shared values.

Each is an object that workers share: one call at a time at its owner, a handle for everybody else.
`check_actor` looks at a network of your own before anything is played.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.engines.base import Service
from manyhands.errors import CollectiveError

if TYPE_CHECKING:
    from manyhands.parallel import Parallel
from manyhands.errors import ConfigError

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
