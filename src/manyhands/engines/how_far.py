"""How far each worker of a group has come: whom to name when a collective call waits too long."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from manyhands.engines.shared import RUNNING, Board


class HowFar:
    """How far each worker of a group has come, as far as that can be known.

    With a board everybody writes it there at each step. Without one a worker that has waited for
    a while says so in the store; who has not said so is taken to be behind.
    """

    def __init__(self, ranks: list[int], rank: int, board: Any, store: Any, name: str) -> None:
        self.board: Board | None = board
        self.others = [r for r in range(len(ranks)) if r != rank]
        self._ranks, self._rank, self._store = ranks, rank, store
        self._name = name  # a worker's groups count their steps apart
        self._step = self._told = 0

    def step(self) -> None:
        self._step += 1
        if self.board is not None:
            self.board.set_text(self._ranks[self._rank], "call", f"{self._step}:{self._name}")

    def tell(self) -> None:
        if self.board is None and self._store is not None and self._told < self._step:
            self._told = self._step
            with contextlib.suppress(RuntimeError):  # the store's holder is gone; gloo will say so
                self._store.set(f"waits{self._name}/{self._rank}", str(self._step))

    def behind(self) -> list[int]:
        """Who has not come to this step, by the board; without one it may be anybody."""
        if self.board is None:
            return self.others
        return [r for r in self.others if self._step_of(r) < self._step]

    def late(self) -> list[int]:
        """Whom to name when the time is over."""
        return [r for r in self.others if self._step_of(r) < self._step] or self.others

    def left(self, seconds: float) -> list[int]:
        """Who has failed or finished that long ago; those who failed come first."""
        if self.board is None:
            return []
        state = {r: self.board.state(self._ranks[r]) for r in self.others}
        before = time.monotonic_ns() - seconds * 1e9
        old = [r for r in self.others if self.board.since(self._ranks[r]) <= before]
        return sorted([r for r in old if state[r] > RUNNING], key=lambda r: -state[r])

    def dead(self, rank: int) -> bool:
        """Whether that worker's process has ended without a word."""
        if self.board is None or self.board.state(self._ranks[rank]) != RUNNING:
            return False
        return not alive(self.board.pid(self._ranks[rank]))

    def _step_of(self, rank: int) -> int:
        if self.board is not None:
            step, _, name = self.board.text(self._ranks[rank], "call").partition(":")
            return int(step or 0) if name == self._name else 0
        key = f"waits{self._name}/{rank}"
        try:
            return int(self._store.get(key)) if self._store and self._store.check([key]) else 0
        except RuntimeError:  # the store is gone, with the worker that held it
            self._store = None
            return 0


def alive(pid: int) -> bool:
    """Whether a process of this host is; one that has ended and was not waited for is not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[-1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.exists("/proc/self")  # without /proc nothing can be said
