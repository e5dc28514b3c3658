"""Channel, WeightStore and Service between workers on several machines: TCP of our own.

    writer ──► reader's endpoint: queue ──► get()     a put is answered when it was taken, so that
                                                      a writer knows how many of its trees wait
    puller ──► writer's endpoint: newest weights      one copy of them, asked for by version
    caller ──► main worker's endpoint: who serves it? ──► that worker

One connection a handle, made at its first use. It is never made anew: when it breaks, its worker
counts as gone and the run ends with its name. So nothing is sent twice, and nothing gets lost
without a word. Both sides prove that they know the run's token, which the workers have from
their engine; it never travels over these connections. Until then nothing that a stranger says is
stored, or leads to memory being set aside.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from manyhands import wire
from manyhands.engines import addresses
from manyhands.engines.base import Channel, Parts, Patience, Place, Roster, Service, WeightStore
from manyhands.engines.parts import sockets
from manyhands.engines.process import Say
from manyhands.errors import CollectiveError, ConfigError
from manyhands.trees import Tree

DRAIN_SECONDS = 10.0  # for a reader to take what was put
_ENDPOINT = "manyhands: endpoint"
_NONCE, _PROOF, _RANK = 32, 32, 4
_HANDSHAKE_SECONDS = 10.0  # for a caller to prove itself, on a busy machine
_SLICE = 0.2  # seconds between looks at who has gone
_GRACE = 0.5  # seconds in which the last words of a worker may come over another connection
_POLL = 5.0  # seconds that a pull waits at the other side before it asks again


def forced() -> bool:
    """Whether workers of one machine are to speak as those of several do: for tests."""
    return os.environ.get("MANYHANDS_PARTS") == "network"


def meet(place: Place, hosts: Sequence[str], names: Sequence[str], say: Say, timeout: float,
         rendezvous: str = "") -> NetworkParts:  # fmt: skip
    """Tell the others where this worker listens; all workers call it.

    On the loopback when all are on one host, else on the address of the route to the main worker.
    """
    address = addresses.LOOPBACK
    if len(set(hosts)) > 1:
        networks = say("addresses", addresses.own_networks())
        main = addresses.main_address(hosts, networks, rendezvous)
        address = addresses.address_towards(main)
        if not address:
            raise ConfigError(
                f"this host ({place.host}) has no route to {main}, where the main worker is; is it "
                "in the same network?"
            )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=max(128, place.size))
    token = secrets.token_hex(32) if place.is_main else ""
    said = say("parts", [address, listener.getsockname()[1], token])
    places = [(str(s[0]), int(s[1])) for s in said]
    return NetworkParts(place, places, bytes.fromhex(said[0][2]), listener, names, timeout)


# -- what a worker keeps for the others ------------------------------------------------------------


class _Queue:
    def __init__(self) -> None:
        self.items: deque[tuple[Tree, Future[None] | None]] = deque()


class _Endpoint:
    """Queues, weights and the list of services. Every public method may be called from afar."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, _Queue] = {}
        self._weights: dict[str, tuple[int, Tree]] = {}
        self._offers: dict[str, int] = {}
        self._lost: dict[int, str] = {}  # workers that are gone, and how
        self._left: set[int] = set()  # workers that have said that they had finished

    def put(self, channel: str, tree: Tree) -> Future[None]:
        taken: Future[None] = Future()
        with self._changed:
            self._queues.setdefault(channel, _Queue()).items.append((tree, taken))
            self._changed.notify_all()
        return taken

    def pull(self, name: str, newer_than: int, wait: float) -> list[Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._version(name) > newer_than, min(wait, _POLL))
            found = self._weights.get(name)
        return list(found) if found is not None and found[0] > newer_than else None

    def offer(self, name: str, rank: int) -> int:
        """Who offers that name now: `rank`, or whoever was first."""
        with self._changed:
            return self._offers.setdefault(name, rank)

    def find(self, name: str) -> int | None:
        return self._offers.get(name)

    # -- for this worker alone -----------------------------------------------------------------

    def _take(self, channel: str, seconds: float) -> tuple[bool, Tree]:
        """(whether there was one, the next tree), after so many seconds at the most."""
        with self._changed:
            queue = self._queues.setdefault(channel, _Queue()).items
            self._changed.wait_for(lambda: queue or self._lost, seconds)
            if self._lost or not queue:
                return False, None
            tree, taken = queue.popleft()
        if taken is not None:
            taken.set_result(None)
        return True, tree

    def _length(self, channel: str) -> int:
        return len(self._queues[channel].items) if channel in self._queues else 0

    def _version(self, name: str) -> int:
        return self._weights[name][0] if name in self._weights else 0

    def _publish(self, name: str, tree: Tree) -> int:
        with self._changed:
            version = self._version(name) + 1
            self._weights[name] = version, tree
            self._changed.notify_all()
        return version

    def _ended(self, rank: int, words: str | None) -> None:
        """A connection has ended: with a worker's last words ("": it had finished), or without."""
        with self._changed:
            if words == "":
                self._left.add(rank)
            elif words or not self._changed.wait_for(lambda: rank in self._left, _GRACE):
                self._lost.setdefault(rank, words or "is gone: its connection broke")
            self._changed.notify_all()


class PeerRoster(Roster):
    """Workers on several hosts: who is gone, as far as this worker is connected to them."""

    def __init__(self, names: Sequence[str], lost: dict[int, str]) -> None:
        super().__init__(names)
        self._lost = lost

    def is_there(self, rank: int) -> bool:
        return rank not in self._lost

    def raise_if_gone(self, ranks: Sequence[int], doing: str) -> None:
        for rank in ranks:
            if rank in self._lost:
                raise CollectiveError(f"{doing}: {self.name(rank)} {self._lost[rank]}")


# -- one worker's side -----------------------------------------------------------------------------


class NetworkParts(Parts):
    def __init__(
        self, place: Place, places: list[tuple[str, int]], token: bytes, listener: socket.socket,
        names: Sequence[str], timeout: float,
    ) -> None:  # fmt: skip
        self._place, self._places, self._token, self.timeout = place, places, token, timeout
        self.rank, self.everyone = place.rank, range(place.size)
        self.endpoint = _Endpoint()
        self.roster: Roster = PeerRoster(names, self.endpoint._lost)
        self._callers: list[sockets.Caller] = []
        self._directory: sockets.Caller | None = None
        self._channels: list[NetworkChannel] = []
        self._server = sockets.Server(place.name, listener, self._admit, self.endpoint._ended)
        self._server.offer(_ENDPOINT, self.endpoint, at_once=True)

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        channel = NetworkChannel(self, name, reader, capacity)
        self._channels.append(channel)
        return channel

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        return NetworkWeights(self, name, writer)

    def serve(self, name: str, target: object) -> None:
        owner = self._ask_main("offer", name, self.rank)
        if owner != self.rank:
            who = self.roster.name(int(owner))
            raise ConfigError(f"a service named {name!r} is already offered by {who}")
        self._server.offer(name, target)

    def service(self, name: str, timeout: float | None = None) -> Service:
        patience, doing = (
            Patience(self.timeout if timeout is None else timeout),
            f"service {name!r}",
        )
        while (owner := self._ask_main("find", name)) is None:
            patience.pause()
            self.raise_if_lost(doing)
            if patience.over:
                raise self.roster.late(list(self.everyone), doing, patience.waited)
        who = self.roster.name(int(owner))
        caller = self.connect(int(owner), f"service {name!r} of {who}")
        return sockets.SocketService(name, who, caller, self.timeout)

    def drain(self) -> None:
        """Let the readers take what this worker has put, before it leaves."""
        for channel in self._channels:
            channel.drain(min(self.timeout or DRAIN_SECONDS, DRAIN_SECONDS))

    def close(self, words: str) -> None:
        """Tell those at the other ends that this worker leaves; "": because it has finished."""
        self._server.close(words)
        for caller in self._callers:
            caller.close(words)

    # -- for the handles -----------------------------------------------------------------------

    def ask(self, caller: sockets.Caller, method: str, *args: Any) -> Future[Any]:
        return caller.start(_ENDPOINT, method, list(args), {})

    def raise_if_lost(self, doing: str) -> None:
        """CollectiveError when the run was given up, or anybody is gone: nobody is started again
        on these engines, so that the rest of the run would be another one."""
        self.roster.raise_if_gone([], doing)
        for rank, how in list(self.endpoint._lost.items()):
            raise CollectiveError(f"{doing}: {self.roster.name(rank)} {how}")

    def connect(self, rank: int, peer: str) -> sockets.Caller:
        """A connection of its own to that worker, at which both have proved themselves."""
        try:
            sock = socket.create_connection(self._places[rank], self._limit())
            tune(sock, self.timeout)
            prove(sock, self._token, self.rank, self._limit())
            sock.settimeout(None)
        except (OSError, EOFError) as error:
            how = sockets.FINISHED if rank in self.endpoint._left else "cannot be reached"
            host, port = self._places[rank]
            raise CollectiveError(
                f"{peer}: {self.roster.name(rank)} {how} at {host}:{port} "
                f"({error or 'it broke off'})"
            ) from None
        caller = sockets.Caller(sock, peer, self.endpoint._ended, rank)
        self._callers.append(caller)
        return caller

    def _limit(self) -> float:
        return self.timeout if self.timeout > 0 else 60.0

    def _ask_main(self, method: str, *args: Any) -> Any:
        """The main worker keeps the list of services."""
        if self.rank == 0:
            return getattr(self.endpoint, method)(*args)
        who = self.roster.name(0)
        if self._directory is None:
            self._directory = self.connect(0, f"the list of services, at {who},")
        try:
            return self.ask(self._directory, method, *args).result(self._limit())
        except TimeoutError:
            raise self.roster.late([0], f"service {args[0]!r}", self._limit()) from None

    def _admit(self, sock: socket.socket) -> int:
        try:
            rank = challenge(sock, self._token, _HANDSHAKE_SECONDS)
            if rank not in self.everyone:
                return sockets.NOT_ADMITTED
            sock.settimeout(None)
            tune(sock, self.timeout)
            return rank
        except (OSError, EOFError):
            return sockets.NOT_ADMITTED


class NetworkChannel(Channel):
    def __init__(self, parts: NetworkParts, name: str, reader: int, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"channel {name!r}: capacity {capacity}, but it must be 1 or more")
        self._parts, self._name, self._reader, self._capacity = parts, name, reader, capacity
        self._caller: sockets.Caller | None = None
        self._waiting: deque[Future[Any]] = deque()  # put and not taken yet

    def put(self, tree: Tree, timeout: float | None = None) -> None:
        parts = self._parts
        patience = Patience(parts.timeout if timeout is None else timeout)
        doing = f"channel {self._name!r}: put (it is full)"
        while self._untaken() >= self._capacity:
            if patience.over:
                raise parts.roster.late([self._reader], doing, patience.waited)
            left = min(_SLICE, patience.left)
            with contextlib.suppress(TimeoutError):
                self._waiting[0].result(left)
            parts.roster.raise_if_gone([], doing)
        if parts.rank == self._reader:
            self._waiting.append(parts.endpoint.put(self._name, wire.decode(wire.encode(tree))))
            return
        if self._caller is None:
            reader = parts.roster.name(self._reader)
            self._caller = parts.connect(self._reader, f"channel {self._name!r}: {reader}")
        self._waiting.append(parts.ask(self._caller, "put", self._name, tree))
        self._untaken()  # says so if the reader has gone

    def get(self, timeout: float | None = None) -> Tree:
        parts = self._parts
        if parts.rank != self._reader:
            raise ConfigError(f"channel {self._name!r}: only worker {self._reader} reads it")
        doing = f"channel {self._name!r}: get"
        patience = Patience(parts.timeout if timeout is None else timeout)
        while True:
            left = min(_SLICE, patience.left)
            found, tree = parts.endpoint._take(self._name, left)
            if found:
                return tree
            parts.raise_if_lost(doing)
            if patience.over:
                others = [r for r in parts.everyone if r != parts.rank]
                raise parts.roster.late(others, f"{doing} (it is empty)", patience.waited)

    def __len__(self) -> int:
        return self._parts.endpoint._length(self._name)

    def drain(self, seconds: float) -> None:
        patience, gone = Patience(seconds), False
        while not gone and (waiting := self._untaken(drop_faults=True)):
            gone = not self._parts.roster.is_there(self._reader) or self._reader == self._parts.rank
            if patience.over:
                print(
                    f"manyhands: channel {self._name!r}: {waiting} trees were never read",
                    file=sys.stderr,
                )
                return
            patience.pause()

    def _untaken(self, *, drop_faults: bool = False) -> int:
        """How many wait to be read; CollectiveError where the reader has gone with some."""
        while self._waiting and self._waiting[0].done():
            done = self._waiting.popleft()
            if not drop_faults:
                done.result()
        return len(self._waiting)


class NetworkWeights(WeightStore):
    def __init__(self, parts: NetworkParts, name: str, writer: int) -> None:
        self._parts, self._name, self._writer = parts, name, writer
        self._caller: sockets.Caller | None = None

    def publish(self, tree: Tree) -> int:
        if self._parts.rank != self._writer:
            raise ConfigError(f"weights {self._name!r}: only worker {self._writer} publishes")
        # A copy: the writer goes on changing its own.
        return self._parts.endpoint._publish(self._name, wire.decode(wire.encode(tree)))

    def pull(self, newer_than: int = 0, timeout: float | None = None) -> tuple[int, Tree] | None:
        patience = Patience(timeout or 0.0)
        while True:
            left = 0.0 if timeout is None else patience.left
            found = self._ask(newer_than, min(left, _POLL))
            if found is not None:
                return int(found[0]), found[1]
            if timeout is None:
                return None
            if patience.over:
                doing = f"weights {self._name!r}: pull of version {newer_than + 1}"
                raise self._parts.roster.late([self._writer], doing, patience.waited)

    def _ask(self, newer_than: int, wait: float) -> Any:
        parts = self._parts
        if parts.rank == self._writer:
            found = parts.endpoint.pull(self._name, newer_than, wait)
            return wire.decode(wire.encode(found))  # what is published stays as it is
        doing = f"weights {self._name!r}: pull of version {newer_than + 1}"
        if self._caller is None:
            writer = parts.roster.name(self._writer)
            self._caller = parts.connect(self._writer, f"weights {self._name!r}: {writer}")
        answer = parts.ask(self._caller, "pull", self._name, newer_than, wait)
        patience = Patience(parts.timeout + wait if parts.timeout > 0 else 0.0)
        while True:
            try:
                return answer.result(_SLICE)
            except TimeoutError:
                parts.roster.raise_if_gone([], doing)
                if patience.over:
                    raise parts.roster.late([self._writer], doing, patience.waited) from None


# -- sockets ---------------------------------------------------------------------------------------


def tune(sock: socket.socket, timeout: float) -> None:
    """Send at once; and notice, within the deadline, a peer whose host went without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if timeout > 0 and sys.platform.startswith("linux"):
        seconds = max(1, int(timeout))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 10))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1000))


def challenge(sock: socket.socket, token: bytes, seconds: float) -> int:
    """Let a caller prove that it knows the token, within so many seconds, and prove it in turn; its
    rank, -2 if it fails.

    WHY numbers and not the token: whoever listens on the network learns nothing from them.
    """
    until, mine = time.monotonic() + seconds, secrets.token_bytes(_NONCE)
    sock.settimeout(seconds)
    sock.sendall(mine)
    said = bytes(sockets.receive_exactly(sock, _RANK + _NONCE + _PROOF, until))
    rank, theirs, proof = said[:_RANK], said[_RANK : _RANK + _NONCE], said[_RANK + _NONCE :]
    if not hmac.compare_digest(proof, _proof(token, b"caller", mine, theirs, rank)):
        return sockets.NOT_ADMITTED
    sock.sendall(_proof(token, b"server", theirs, mine, rank))
    return int.from_bytes(rank, "little")


def prove(sock: socket.socket, token: bytes, rank: int, seconds: float) -> None:
    """The caller's side; OSError when the other one does not know the token."""
    until = time.monotonic() + seconds
    theirs = bytes(sockets.receive_exactly(sock, _NONCE, until))
    mine, me = secrets.token_bytes(_NONCE), rank.to_bytes(_RANK, "little")
    sock.sendall(me + mine + _proof(token, b"caller", theirs, mine, me))
    proof = bytes(sockets.receive_exactly(sock, _PROOF, until))
    if not hmac.compare_digest(proof, _proof(token, b"server", mine, theirs, me)):
        raise ConnectionRefusedError("who answers there is not of this run")


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"|".join(parts), "sha256")
