"""One call at a time, also from the owner: others' calls come in threads of their own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Locked:
    """An object whose `whole` methods exclude one another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()


def whole(method: Method) -> Method:
    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]
