"""Objects that workers share: one call at a time at their owner, a handle for everybody else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.engines.base import Service
from manyhands.errors import CollectiveError

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
