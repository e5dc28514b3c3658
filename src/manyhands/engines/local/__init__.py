"""Workers on one machine, each a process of its own; what they share lies in shared memory."""

from __future__ import annotations

import os

from manyhands.engines.base import Place, Worker, worker_names
from manyhands.engines.group import Group
from manyhands.engines.local.transport import OPEN, LocalTransport
from manyhands.engines.parts.memory import MemoryParts
from manyhands.engines.process import BoardRoster, ProcessWorker, open_board, wake_precisely
from manyhands.engines.shared import RUNNING, Board, Segment
from manyhands.errors import ConfigError

_LINGER_SECONDS = 2.0  # for others to read the last call


def attach(place: Place, timeout: float) -> Worker:
    board = open_board(place.size)
    if board is None:
        raise ConfigError(
            "the local engine is started by `manyhands launch -n N script.py`; this process "
            "cannot reach its board"
        )
    return LocalWorker(place, timeout, board)


class LocalWorker(ProcessWorker):
    def __init__(self, place: Place, timeout: float, board: Board) -> None:
        super().__init__(place, timeout, board)
        wake_precisely()
        self._board = board
        names = worker_names(place.size, [place.host] * place.size)
        self._roster = BoardRoster(board, range(place.size), names)
        control = Segment(address=os.environ["MANYHANDS_CONTROL"])
        self.group = Group(LocalTransport(control, place.rank, place.size, self._roster, timeout))
        self.parts = MemoryParts(board, self._roster, place, timeout)

    def alive(self) -> int:
        return sum(self._board.state(rank) == RUNNING for rank in range(self.place.size))

    def close(self) -> None:
        if self._left:
            return
        self._linger()
        super().close()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._linger()

    def _linger(self) -> None:
        for transport in list(OPEN):
            transport.linger(_LINGER_SECONDS)
