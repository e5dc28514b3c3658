"""Channels, weights and services between hosts: who gets in, who is missed, and what is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from manyhands import wire
from manyhands.engines import addresses
from manyhands.engines.base import Place
from manyhands.engines.parts import network, sockets
from manyhands.engines.parts.network import NetworkParts
from manyhands.errors import CollectiveError, ConfigError

NAMES = [f"worker {rank} of 3 on h{rank}" for rank in range(3)]


class Meeting:
    """Everybody's word under a heading: what an engine's own means do at the start."""

    def __init__(self) -> None:
        self._all = threading.Barrier(3)
        self._said: dict[str, list[Any]] = {}

    def say(self, rank: int) -> Callable[[str, Any], list[Any]]:
        def say(what: str, mine: Any) -> list[Any]:
            self._said.setdefault(what, [None] * 3)[rank] = mine
            self._all.wait(20)
            return self._said[what]

        return say


def three(timeout: float = 20.0) -> list[NetworkParts]:
    meeting = Meeting()

    def one(rank: int) -> NetworkParts:
        place = Place("torch", rank, 3)
        return network.meet(place, ["one"] * 3, NAMES, meeting.say(rank), timeout)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


@pytest.fixture
def workers() -> Iterator[list[NetworkParts]]:
    found = three()
    yield found
    for parts in found:
        parts.close("")


def break_connections(parts: NetworkParts) -> None:
    """As when its process is killed: every connection ends, without a word."""
    for caller in parts._callers:
        sockets.cut(caller._sock)
    for sock in list(parts._server._lines):
        sockets.cut(sock)


def until(ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- what travels ----------------------------------------------------------------------------------


def test_pieces_are_the_bytes() -> None:
    tree = {"a": np.arange(7), "b": [b"xyz", np.zeros((0, 2)), "text"], "c": np.ones(64, np.uint8)}
    packed = wire.Packed(tree)
    assert b"".join(bytes(piece) for piece in packed.pieces()) == packed.to_bytes()


def test_what_is_larger_than_the_sockets_buffers_arrives_whole(workers: list[NetworkParts]) -> None:
    main, second, _ = workers
    leaves = {f"leaf {i}": np.full(5_000, i) for i in range(700)}  # more than one call takes
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(second.channel("large").put, leaves)
        got = main.channel("large").get()
        sent.result(20)
    assert all((got[f"leaf {i}"] == i).all() for i in range(700))


def test_a_reader_may_put_too(workers: list[NetworkParts]) -> None:
    own = workers[0].channel("own", capacity=1)
    array = np.zeros(3)
    own.put({"x": array})
    array[:] = 1
    with pytest.raises(CollectiveError, match="it is full"):
        own.put({"x": array}, timeout=0.05)
    assert own.get()["x"].sum() == 0  # what was put is a copy


def test_who_leaves_loses_nothing(workers: list[NetworkParts]) -> None:
    main, second, third = workers
    box, inbox = second.channel("box", capacity=4), main.channel("box", capacity=4)
    for i in range(4):
        box.put(i)
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(lambda: (second.drain(), second.close("")))
        assert [inbox.get() for _ in range(4)] == [0, 1, 2, 3]
        left.result(20)
    until(lambda: 1 in main.endpoint._left)
    third.channel("box", capacity=4).put("later")
    assert inbox.get() == "later"  # whoever has finished is not missed


def test_a_service_has_one_owner(workers: list[NetworkParts]) -> None:
    _, second, third = workers
    second.serve("list", [1, 2])
    assert third.service("list").call("index", 2) == 1
    with pytest.raises(ConfigError, match="already offered by worker 1 of 3"):
        third.serve("list", [])
    with pytest.raises(ConfigError, match="already offered"):
        second.serve("list", [])


# -- who is gone -----------------------------------------------------------------------------------


def test_one_that_is_gone_is_named_by_all_that_wait(workers: list[NetworkParts]) -> None:
    main, second, third = workers
    main.channel("box", capacity=1)
    outbox, weights = (
        second.channel("to third", reader=2, capacity=1),
        second.weights("w", writer=2),
    )
    third.serve("slow", Slow())
    service = second.service("slow")
    third.channel("box", capacity=1).put(0)
    outbox.put(0)
    with ThreadPoolExecutor(4) as pool:
        waits = [
            pool.submit(outbox.put, 1),
            pool.submit(weights.pull, 0, 20.0),
            pool.submit(service.call, "sleep"),
        ]
        until(lambda: len(third._server._lines) == 3)
        started = time.monotonic()
        break_connections(third)
        for wait in waits:
            with pytest.raises(CollectiveError, match="worker 2 of 3 on h2 is gone"):
                wait.result(20)
    until(lambda: 2 in main.endpoint._lost)
    with pytest.raises(CollectiveError, match="worker 2 of 3 on h2 is gone: its connection broke"):
        main.channel("box").get()
    with pytest.raises(CollectiveError, match="worker 2 of 3 on h2"):
        main.roster.raise_if_gone([2], "gather")
    assert time.monotonic() - started < 10  # long before the deadline


def test_one_that_failed_says_why(workers: list[NetworkParts]) -> None:
    main, second, _ = workers
    second.channel("box").put(0)
    second.close("failed: ValueError: a wrong number")
    until(lambda: main.endpoint._lost)
    with pytest.raises(CollectiveError, match=r"worker 1 of 3 on h1 failed: ValueError: a wrong"):
        main.channel("box").get()


def test_late_ones_are_named(workers: list[NetworkParts]) -> None:
    main, second, _ = workers
    with pytest.raises(CollectiveError, match=r"pull of version 1: waited .* worker 0 of 3 on h0"):
        second.weights("nothing").pull(timeout=0.05)
    with pytest.raises(
        CollectiveError, match=r"get \(it is empty\): waited .* worker 1 of 3 on h1"
    ):
        main.channel("nothing").get(timeout=0.05)
    with pytest.raises(CollectiveError, match=r"service 'nobody': waited"):
        second.service("nobody", timeout=0.05)


class Slow:
    def sleep(self) -> None:
        time.sleep(1)


# -- who gets in -----------------------------------------------------------------------------------


def stranger(parts: NetworkParts) -> socket.socket:
    sock = socket.create_connection(parts._places[parts.rank], 20)
    assert len(sockets.receive_exactly(sock, 32)) == 32  # a challenge, another each time
    return sock


def test_who_does_not_know_the_token_gets_nowhere(workers: list[NetworkParts]) -> None:
    main = workers[0]
    silent = [stranger(main) for _ in range(3)]  # they keep nobody else waiting
    frame = wire.encode([1, "manyhands: endpoint", "put", ["box", "no"], {}])
    for said in (frame + bytes(100), (1 << 39).to_bytes(8, "little") * 9, bytes(68)):
        sock = stranger(main)
        sock.sendall(said)
        with contextlib.suppress(ConnectionResetError):  # it did not read all that was said
            assert sock.recv(1) == b""
    sock = socket.create_connection(main._places[0], 20)
    with pytest.raises((OSError, EOFError)):
        network.prove(sock, b"another token", 1, 20.0)
    assert main.endpoint._queues == {}
    assert main._server._lines == {}
    assert main.endpoint._lost == {}
    workers[1].channel("box").put("yes")
    assert main.channel("box").get() == "yes"
    for sock in silent:
        sock.close()


def test_who_says_a_byte_now_and_then_is_sent_away(
    workers: list[NetworkParts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole proof has a deadline. By the byte, 32 such callers kept all others out for ever."""
    monkeypatch.setattr(network, "_HANDSHAKE_SECONDS", 0.3)
    slow = [stranger(workers[0]) for _ in range(40)]
    began = time.monotonic()
    while time.monotonic() < began + 1.0:
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.send(b"x")
        time.sleep(0.05)
    workers[1].channel("box").put("yes")
    assert workers[0].channel("box").get(timeout=5) == "yes"
    for sock in slow:
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        sock.close()


def test_an_answer_a_byte_now_and_then_has_a_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        proved = pool.submit(network.prove, ours, b"token", 1, 0.3)
        for _ in range(30):
            if proved.done():
                break
            theirs.send(b"x")
            time.sleep(0.05)
        with pytest.raises(TimeoutError):
            proved.result(0)


def test_a_proof_is_not_good_twice(workers: list[NetworkParts]) -> None:
    """Who has listened to a worker that proved itself cannot do it in its place."""
    main, token = workers[0], workers[0]._token
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        proved = pool.submit(network.prove, ours, token, 1, 20.0)
        theirs.sendall(bytes(32))
        heard = bytes(sockets.receive_exactly(theirs, 68))
        theirs.sendall(bytes(32))
        with pytest.raises(ConnectionRefusedError, match="not of this run"):
            proved.result(20)  # and the worker notices one that does not know the token
    sock = stranger(main)
    sock.sendall(heard)
    assert sock.recv(1) == b""


def test_on_one_host_only_the_loopback_is_listened_on(workers: list[NetworkParts]) -> None:
    assert {host for parts in workers for host, _ in parts._places} == {"127.0.0.1"}
    assert workers[0]._server._listener.getsockname()[0] == "127.0.0.1"


# -- which address ---------------------------------------------------------------------------------


def test_an_address_is_that_of_the_route() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.address_towards("no.such.host.invalid") == ""


@pytest.mark.parametrize(
    ("networks", "given", "expected"),
    [
        ([["10.0.0.1/24"], ["10.0.0.2/24"]], "", "10.0.0.1"),
        # A container's bridge is the same on both; the first network leads elsewhere.
        (
            [["172.17.0.1/16", "192.168.7.1/24", "10.0.0.1/255.255.255.0"],
             ["172.17.0.1/16", "10.0.0.2/24"]],
            "", "10.0.0.1",
        ),
        # No network in common: a router stands between.
        ([["10.0.0.1/24"], ["10.0.1.1/24"]], "", "10.0.0.1"),
        ([["10.0.0.1/24", "10.9.0.1/24"], ["10.0.0.2/24", "10.9.0.2/24"]], "10.9.0.1", "10.9.0.1"),
        ([["10.0.0.1/24"], ["10.0.0.2/24"]], "127.0.1.1", "10.0.0.1"),
    ],
)  # fmt: skip
def test_the_main_workers_address(networks: list[list[str]], given: str, expected: str) -> None:
    assert addresses.main_address(["a", "b"], networks, given) == expected


def test_a_host_without_a_network_is_named() -> None:
    with pytest.raises(ConfigError, match="that of the main worker, a, has no address"):
        addresses.main_address(["a", "b"], [[], ["10.0.0.2/24"]])
