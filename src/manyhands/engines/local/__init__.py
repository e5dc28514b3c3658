"""Workers on one machine, each a process of its own; what they share lies in shared memory."""

from __future__ import annotations

import os

from manyhands.engines.base import (
    Channel,
    Patience,
    Place,
    Service,
    WeightStore,
    Worker,
    worker_names,
)
from manyhands.engines.group import Group
from manyhands.engines.liveness import BoardRoster
from manyhands.engines.local.parts import LocalChannel, LocalWeights
from manyhands.engines.local.sockets import Server, SocketService
from manyhands.engines.local.transport import OPEN, LocalTransport
from manyhands.engines.process import ProcessWorker, open_board, wake_precisely
from manyhands.engines.shared import RUNNING, Board, Segment
from manyhands.errors import ConfigError

_LINGER_SECONDS = 2.0  # for others to read the last call
_DRAIN_SECONDS = 10.0  # for a reader to take what was put


def attach(place: Place, timeout: float) -> Worker:
    board = open_board(place.size)
    if board is None:
        raise ConfigError(
            "the local engine is started by `manyhands launch -n N script.py`; its board is not in "
            "reach of this process"
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
        self._server: Server | None = None
        self._channels: list[LocalChannel] = []

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        channel = LocalChannel(
            self._board, self._roster, self.place.rank, name, reader, capacity, self.timeout
        )
        self._channels.append(channel)
        return channel

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        return LocalWeights(self._board, self._roster, self.place.rank, name, writer, self.timeout)

    def serve(self, name: str, target: object) -> None:
        if self._server is None:
            self._server = Server(self.place.name)
        self._server.offer(name, target)
        self._board.set_note(self.place.rank, f"service/{name}", self._server.address)

    def service(self, name: str, timeout: float | None = None) -> Service:
        patience = Patience(self.timeout if timeout is None else timeout)
        others = range(self.place.size)
        while True:
            for rank in others:
                address = self._board.notes(rank).get(f"service/{name}")
                if address:
                    return SocketService(name, address, self._roster.name(rank), self.timeout)
            patience.pause()
            if patience.over:
                raise self._roster.late(list(others), f"service {name!r}", patience.waited)
            self._roster.raise_if_gone([], f"service {name!r}")

    def alive(self) -> int:
        return sum(self._board.state(rank) == RUNNING for rank in range(self.place.size))

    def close(self) -> None:
        if self._left:
            return
        for channel in self._channels:
            channel.drain(min(self.timeout or _DRAIN_SECONDS, _DRAIN_SECONDS))
        self._linger()
        super().close()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._linger()

    def _linger(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for transport in list(OPEN):
            transport.linger(_LINGER_SECONDS)
