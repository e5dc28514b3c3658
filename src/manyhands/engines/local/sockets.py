"""Named services between processes of one machine: a unix socket, no pickle.

A frame is eight bytes of length, then a tree in the format of `wire.py`. Large frames do not go
through the socket: their bytes lie in an anonymous memory file whose descriptor is passed along.
The socket has no name in any folder (Linux), and only processes of the same user are answered.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
from concurrent.futures import Future
from typing import Any

from manyhands import wire
from manyhands.engines.base import Service
from manyhands.engines.calls import invoke, remote_error
from manyhands.engines.shared import Segment
from manyhands.errors import CollectiveError, ConfigError, WorkerError

_LARGE = 1 << 18
_LARGEST = 1 << 40
_LINUX = sys.platform.startswith("linux")


def _send(sock: socket.socket, lock: threading.Lock, tree: Any) -> None:
    packed = wire.Packed(tree)
    with lock:
        if packed.nbytes < _LARGE or not _LINUX:
            sock.sendall(struct.pack("<q", packed.nbytes) + packed.to_bytes())
        else:
            segment = Segment(packed.nbytes)
            packed.write_into(segment.view)
            # a negative length says: the bytes are in the file that comes along
            socket.send_fds(sock, [struct.pack("<q", -packed.nbytes)], [segment.number])
            segment.close()


def _receive(sock: socket.socket) -> Any:
    """The next tree; EOFError when the other side has gone."""
    head, files, _, _ = socket.recv_fds(sock, 8, 1)
    while len(head) < 8:
        more = sock.recv(8 - len(head))
        if not more:
            raise EOFError
        head += more
    (length,) = struct.unpack("<q", head)
    if abs(length) > _LARGEST or (length < 0) != bool(files):
        raise EOFError  # not one of ours: drop it before anything is allocated
    if files:
        segment = Segment(address=f"/proc/self/fd/{files[0]}")
        os.close(files[0])
        return wire.decode(segment.view[:-length])
    data = bytearray(length)
    view = memoryview(data)
    while view:
        n = sock.recv_into(view)
        if not n:
            raise EOFError
        view = view[n:]
    return wire.decode(data)


def _same_user(sock: socket.socket) -> bool:
    if not _LINUX:
        return True  # the socket lies in a folder that only this user can enter
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] == os.getuid())


class Server:
    """Answers calls to this worker's services, one call at a time for each service."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._targets: dict[str, tuple[object, threading.Lock]] = {}
        self._folder = "" if _LINUX else tempfile.mkdtemp(prefix="manyhands-")
        name = f"manyhands-{secrets.token_hex(12)}"
        self.address = f"@{name}" if _LINUX else f"{self._folder}/{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_socket_name(self.address))
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="manyhands-server", daemon=True).start()

    def offer(self, name: str, target: object) -> None:
        if name in self._targets:
            raise ConfigError(f"a service named {name!r} is already offered")
        self._targets[name] = (target, threading.Lock())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._folder:
            with contextlib.suppress(OSError):
                os.unlink(self.address)
                os.rmdir(self._folder)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed: this worker leaves
            if _same_user(sock):
                threading.Thread(target=self._converse, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _converse(self, sock: socket.socket) -> None:
        lock = threading.Lock()
        with sock:
            while True:
                try:
                    number, name, method, args, kwargs = _receive(sock)
                    _send(sock, lock, self._answer(number, name, method, args, kwargs))
                except (EOFError, OSError, ConfigError, ValueError, TypeError):
                    return  # the caller has gone, or does not speak our language

    def _answer(self, number: int, name: str, method: str, args: Any, kwargs: Any) -> list[Any]:
        try:
            if name not in self._targets:
                raise ConfigError(f"no service {name!r} here")
            target, lock = self._targets[name]
            with lock:
                value = invoke(target, method, args, kwargs)
            wire.Packed(value)  # refuse what cannot travel here, where its traceback is of use
            return [number, True, value]
        except Exception as error:
            text = str(remote_error(f"service {name!r} of {self._owner}", method, error))
            return [number, False, text]


class SocketService(Service):
    """A handle: one connection, any number of calls under way."""

    def __init__(self, name: str, address: str, owner: str, timeout: float) -> None:
        self._key, self.timeout = name, timeout
        self.name = f"service {name!r} of {owner}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(_socket_name(address))
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._calls = 0
        threading.Thread(target=self._listen, name="manyhands-client", daemon=True).start()

    def call_async(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls += 1
        number = self._calls
        self._pending[number] = future
        try:
            _send(self._sock, self._lock, [number, self._key, method, list(args), kwargs])
        except OSError:
            self._pending.pop(number, None)
            future.set_exception(CollectiveError(f"{self.name} is gone"))
        return future

    def _listen(self) -> None:
        try:
            while True:
                number, well, value = _receive(self._sock)
                future = self._pending.pop(number, None)
                if future is not None:
                    if well:
                        future.set_result(value)
                    else:
                        future.set_exception(WorkerError(value))
        except (EOFError, OSError, ConfigError):
            pass
        while self._pending:
            _, future = self._pending.popitem()
            future.set_exception(CollectiveError(f"{self.name} is gone"))


def _socket_name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
