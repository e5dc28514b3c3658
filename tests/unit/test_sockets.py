"""Calls through sockets of one machine, with peers that behave as none of ours does."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.engines.base import Place, Roster
from manyhands.engines.parts.memory import MemoryParts
from manyhands.engines.parts.sockets import (
    Caller,
    Server,
    SocketService,
    UnixListener,
    connect,
    same_user,
)
from manyhands.engines.shared import Board
from manyhands.errors import CollectiveError, ConfigError, WorkerError

pytestmark = [pytest.mark.usefixtures("nothing_left")]


class Target:
    def __init__(self) -> None:
        self.go_on = threading.Event()

    def echo(self, x: Any) -> Any:
        return x

    def wait(self) -> bool:
        return self.go_on.wait(20)

    def leave(self) -> None:
        sys.exit(3)


class Door(UnixListener):
    """A server with one object, and callers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.target = Target()
        self.server = Server("worker 1", self.listener, same_user)
        self.server.offer("target", self.target)
        self.socks: list[socket.socket] = []

    def service(self, timeout: float = 20.0) -> SocketService:
        self.socks.append(connect(self.address, timeout))
        caller = Caller(self.socks[-1], "service 'target' of worker 1")
        return SocketService("target", "worker 1", caller, timeout)


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door()
    yield found
    found.target.go_on.set()
    for sock in found.socks:
        sock.shutdown(socket.SHUT_RDWR)  # its thread waits there
        sock.close()
    found.server.close()
    found.close()


def test_a_call_that_nobody_reads_has_a_deadline(door: Door) -> None:
    """Calls wait in the socket for the one that is being answered, and it has room for two."""
    service = door.service(timeout=0.3)
    first = service.call_async("wait")
    began = time.monotonic()
    call = service.call_async("echo", 1)
    while not call.done() and time.monotonic() < began + 10:
        call = service.call_async("echo", bytes(200_000))
    with pytest.raises(CollectiveError, match="worker 1 does not read what it is sent"):
        call.result(0)
    with pytest.raises(CollectiveError):
        first.result(5)


def test_a_connection_that_nobody_takes_has_a_deadline() -> None:
    door = UnixListener()
    door.listener.listen(0)
    waiting = [connect(door.address, 0.1)]  # the one for which there is room
    with pytest.raises(BlockingIOError):
        connect(door.address, 0.1)
    for sock in (*waiting, door.listener):
        sock.close()
    door.close()


def test_a_method_that_exits_is_an_answer(door: Door) -> None:
    service = door.service()
    with pytest.raises(WorkerError, match="leave failed: SystemExit: 3"):
        service.call("leave")
    assert service.call("echo", 1) == 1


def test_a_call_under_way_cannot_be_cancelled(door: Door) -> None:
    """It could be, and then no other call on this connection was ever answered."""
    service = door.service()
    waiting = service.call_async("wait")
    assert not waiting.cancel()
    later = service.call_async("echo", 2)
    door.target.go_on.set()
    assert waiting.result(5) is True
    assert later.result(5) == 2


def test_who_listens_outlives_a_moment_without_descriptors(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accept() fails while no descriptor is free, and so does the start of a thread without room
    for another: callers that come later are answered all the same."""
    faults = {"accept": OSError(errno.EMFILE, "Too many open files"), "start": RuntimeError("no")}
    accept, start = socket.socket.accept, threading.Thread.start

    def failing_accept(sock: socket.socket) -> Any:
        taken = accept(sock)
        if "accept" in faults:
            taken[0].close()
            raise faults.pop("accept")
        return taken

    def failing_start(thread: threading.Thread) -> None:
        if "_serve" in thread.name and "start" in faults:
            raise faults.pop("start")
        start(thread)

    monkeypatch.setattr(socket.socket, "accept", failing_accept)
    monkeypatch.setattr(threading.Thread, "start", failing_start)
    for _ in range(4):  # an accept() that was under way already does not fail
        with contextlib.suppress(CollectiveError):
            door.service().call("echo", 1, timeout=5)
    assert not faults
    assert door.service().call("echo", 1, timeout=5) == 1


def test_a_service_of_a_worker_that_is_gone_is_waited_for() -> None:
    """Its address is still on the board, and nobody listens there."""
    board = Board(2)
    board.enter(0)
    parts = MemoryParts(board, Roster(["worker 0", "worker 1"]), Place("local", 0, 2), 0.3)
    board.set_note(1, "service/target", "@manyhands-nobody")
    with pytest.raises(CollectiveError, match="service 'target': waited"):
        parts.service("target")


@pytest.mark.parametrize("left", [-0.5, float("nan")])
def test_time_that_is_over_is_not_for_ever(left: float) -> None:
    """As somebody works it out who has a deadline of his own."""
    board = Board(2)
    board.enter(0)
    parts = MemoryParts(board, Roster(["worker 0", "worker 1"]), Place("local", 0, 2), 0.3)
    for wait in (
        lambda: parts.channel("left", reader=0).get(timeout=left),
        lambda: parts.weights("left", writer=1).pull(timeout=left),
        lambda: parts.service("left", timeout=left),
    ):
        with pytest.raises(ConfigError, match=r"timeout .*seconds, or 0 to wait for ever"):
            wait()
