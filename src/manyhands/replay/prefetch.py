"""A thread that makes things ahead of time, so that the one who takes them does not wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from manyhands.errors import CollectiveError


class Prefetcher:
    """Keeps up to `depth` results of `make` ready.

    `make(stopped)` gives the next result; it may wait, but returns soon after `stopped()` is True.
    The thread starts with the first `take`. What it raises is raised by the next `take`.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Any], depth: int) -> None:
        self._make, self._depth = make, depth
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        self._era = 0  # what was begun before a `discard` is thrown away
        self._thread: threading.Thread | None = None

    def take(self, doing: str, on: str, timeout: float) -> Any:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._ready or self._error or self._stopped,
                                   timeout or None)  # fmt: skip
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise CollectiveError(
                f"{doing}: it is closed"
                if self._stopped
                else f"{doing}: waited {timeout:.1f} s for {on}"
            )

    def discard(self) -> None:
        """Throw away what is ready and what is being made."""
        with self._changed:
            self._ready.clear()
            self._era += 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout or None)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    # Given up only by `close`: this thread may wait as long as nobody takes.
                    self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                    era = self._era
                if self._stopped:
                    return
                made = self._make(lambda: self._stopped)
                with self._changed:
                    if era == self._era and made is not None:
                        self._ready.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # told to whoever takes next
            with self._changed:
                self._error = error
                self._changed.notify_all()
