"""Who is there: names and whereabouts of the workers, their heartbeat, and how far each has come.

All of it is read off the board, as far as there is one in reach.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from manyhands.engines.base import Roster
from manyhands.engines.shared import DEAD, DONE, EMPTY, FAILED, RUNNING, Board
from manyhands.errors import CollectiveError

_BEAT_SECONDS = 0.5


class BoardRoster(Roster):
    """Names, whereabouts and deaths of the workers of a group."""

    def __init__(self, board: Board, members: Sequence[int], names: Sequence[str]) -> None:
        super().__init__(names)
        self.board = board
        self.members = list(members)  # rank in this group -> rank on the board

    def name(self, rank: int) -> str:
        pid = self.board.pid(self.members[rank])
        return self.names[rank] + (f" (pid {pid})" if pid else "")

    def status(self, rank: int) -> str:
        world = self.members[rank]
        if self.board.state(world) == EMPTY:
            return ", which has not come to `Parallel()` yet"
        age = self.board.beat_age(world)
        where = self.board.text(world, "where")
        place = f" at {where}" if where else ""
        if age > 4 * _BEAT_SECONDS:
            return f", silent for {age:.1f} s (stopped, or stuck in native code){place}"
        return f", alive{place}"

    def is_there(self, rank: int) -> bool:
        return self.board.state(self.members[rank]) == RUNNING and not self.board.aborted

    def raise_if_gone(self, ranks: Sequence[int], doing: str) -> None:
        reason = self.board.aborted
        if reason:
            raise CollectiveError(f"{doing}: given up, because {reason}")
        for rank in ranks:
            world = self.members[rank]
            state = self.board.state(world)
            if state == DONE:
                raise CollectiveError(
                    f"{doing}: {self.name(rank)} has finished and will not come. Workers must make "
                    "the same calls the same number of times"
                )
            if state in (FAILED, DEAD):
                said = self.board.text(world, "report").strip().rsplit("\n", 1)[-1]
                raise CollectiveError(f"{doing}: {self.name(rank)} is gone: {said}")


class Heartbeat:
    """A thread that writes, twice a second, where this worker's main thread is."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            with contextlib.suppress(Exception):
                self._board.beat(self._rank, self._where())

    def _where(self) -> str:
        """`train.py:88 in rollout`: the innermost line of the user's own code."""
        frame = sys._current_frames().get(self._main or 0)
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        found = ""
        for f, line in traceback.walk_stack(frame):
            name = f.f_code.co_filename
            if not name.startswith((here, "<frozen", sys.prefix, sys.base_prefix)):
                found = f"{os.path.basename(name)}:{line} in {f.f_code.co_name}"
                break
        return found


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
        self._step = self._published = 0

    def step(self) -> None:
        self._step += 1
        if self.board is not None:
            self.board.set_text(self._ranks[self._rank], "call", f"{self._step}:{self._name}")

    def tell(self) -> None:
        if self.board is None and self._store is not None and self._published < self._step:
            self._published = self._step
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
