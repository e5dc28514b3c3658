"""Who waits for whom, read off the board; the heartbeat that keeps the board true."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence

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
