"""Calls between processes over sockets, without pickle: who offers objects, and who calls them.

A frame is eight bytes of length, then a tree in the format of `wire.py`, sent from where its arrays
lie. Between processes of one machine (unix sockets) large frames do not go through the socket:
their bytes lie in an anonymous memory file whose descriptor is passed along.

    caller ──► server   [number, name of the object, method, args, kwargs]
    caller ◄── server   [number, whether it went well, value or words]
    either way          number 0: the last words of a worker that leaves
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from manyhands import wire
from manyhands.engines.base import Service
from manyhands.engines.calls import invoke, remote_error
from manyhands.engines.shared import Segment
from manyhands.errors import CollectiveError, ConfigError, WorkerError

_LARGE = 1 << 18
_LARGEST = 1 << 40
_PIECE = 1 << 20  # memory that a frame may have before any of it has arrived
_PIECES = 512  # in one `sendmsg`; the kernel takes 1,024
_UNPROVED = 32  # callers at a time that have not been admitted yet
_BREATHER = 0.05  # seconds without descriptors or threads for another caller
_LINUX = sys.platform.startswith("linux")
NOT_ADMITTED = -2
FINISHED = "has finished and will not come"
Admit = Callable[[socket.socket], int]  # the caller's rank (-1: not said), or NOT_ADMITTED
# rank, and its last words ("": it had finished); None: it ended without any
Ended = Callable[[int, str | None], None]


# -- frames ----------------------------------------------------------------------------------------


def send(sock: socket.socket, lock: threading.Lock, tree: Any) -> None:
    packed = wire.Packed(tree)
    with lock:
        try:
            if packed.nbytes < _LARGE or not _LINUX or sock.family != socket.AF_UNIX:
                _send_all(sock, [struct.pack("<q", packed.nbytes), *packed.pieces()])
                return
            segment = Segment(packed.nbytes)
            packed.write_into(segment.view)
            # a negative length says: the bytes are in the file that comes along
            socket.send_fds(sock, [struct.pack("<q", -packed.nbytes)], [segment.number])
            segment.close()
        except BaseException:
            # CRUCIAL: after half a frame the next one would be read as the rest of it.
            cut(sock)
            raise


def _send_all(sock: socket.socket, pieces: Iterable[wire.Buffer]) -> None:
    views = [memoryview(piece) for piece in pieces]
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + _PIECES])
        while first < len(views) and sent >= views[first].nbytes:
            sent -= views[first].nbytes
            first += 1
        if sent:
            views[first] = views[first][sent:]


def receive(sock: socket.socket) -> Any:
    """The next tree; EOFError when the other side has gone."""
    head: bytes = b""
    files: list[int] = []
    if sock.family == socket.AF_UNIX:
        head, files, _, _ = socket.recv_fds(sock, 8, 1)
    while len(head) < 8:
        more = sock.recv(8 - len(head))
        if not more:
            raise EOFError
        head += more
    (length,) = struct.unpack("<q", head)
    if files:
        return _from_file(files[0], -length)
    longest = _LARGE if _LINUX and sock.family == socket.AF_UNIX else _LARGEST
    if not 0 <= length <= longest:
        raise EOFError  # not one of ours: drop it before anything is allocated
    return wire.decode(receive_exactly(sock, length))


def _from_file(fd: int, length: int) -> Any:
    """The tree in the first bytes of a memory file that came along."""
    try:
        facts = os.fstat(fd)
        # A file with holes claims what nobody has written: reading it would make it real.
        if not 0 < length <= min(facts.st_size, facts.st_blocks * 512, _LARGEST):
            raise EOFError
        segment = Segment(address=f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return wire.decode(segment.view[:length])


def receive_exactly(sock: socket.socket, length: int, until: float = 0.0) -> bytearray:
    """So many bytes. Whatever length is claimed, memory is at most twice what has arrived.

    Args:
        until: by the monotonic clock, when all must be there (0: no deadline). WHY not a timeout of
            the socket: that is for each read, and a byte now and then would hold the line for ever.
    """
    data, have = bytearray(min(length, _PIECE)), 0
    while have < length:
        if until:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        if have == len(data):
            data.extend(bytes(min(have, length - have)))
        with memoryview(data)[have:] as room:
            n = sock.recv_into(room)
        if not n:
            raise EOFError
        have += n
    return data


def cut(sock: socket.socket) -> None:
    """End a connection on both sides, also for a thread that waits on it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def say_last(sock: socket.socket, lock: threading.Lock, message: list[Any]) -> None:
    """A small frame without ever waiting: whoever leaves has no time for those that do not read."""
    packed = wire.Packed(message)
    if not lock.acquire(timeout=0.2):
        return
    try:
        with contextlib.suppress(OSError):
            frame = struct.pack("<q", packed.nbytes) + packed.to_bytes()
            if sock.send(frame, socket.MSG_DONTWAIT) < len(frame):
                cut(sock)
    finally:
        lock.release()


# -- who offers ------------------------------------------------------------------------------------


class Server:
    """Answers calls on objects that are offered by name. One call on each runs at a time."""

    def __init__(
        self, owner: str, listener: socket.socket, admit: Admit, ended: Ended | None = None
    ) -> None:
        self._owner, self._listener, self._admit, self._ended = owner, listener, admit, ended
        self._targets: dict[str, tuple[object, threading.Lock | None]] = {}
        self._lines: dict[socket.socket, threading.Lock] = {}
        self._unproved, self._closed = threading.BoundedSemaphore(_UNPROVED), False
        threading.Thread(target=self._accept, name="manyhands-server", daemon=True).start()

    def offer(self, name: str, target: object, *, at_once: bool = False) -> None:
        """`at_once`: calls on it may run side by side; it has locks of its own."""
        if name in self._targets:
            raise ConfigError(f"a service named {name!r} is already offered")
        self._targets[name] = (target, None if at_once else threading.Lock())

    def close(self, words: str | None = None) -> None:
        """No more callers; with words, those that are there hear them."""
        self._closed = True
        cut(self._listener)
        self._listener.close()
        if words is not None:
            for sock, lock in list(self._lines.items()):
                say_last(sock, lock, [0, True, words])

    def _accept(self) -> None:
        while True:
            self._unproved.acquire()  # WHY: strangers must not make us start threads without end
            try:
                sock, _ = self._listener.accept()
            except OSError:
                sock = None
            if self._closed:
                return  # this worker leaves
            if sock is not None:
                try:
                    threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
                    continue
                except RuntimeError:
                    sock.close()
            # CRUCIAL: no descriptor or thread is free just now, or that caller has gone. A server
            # that gave up here would leave all later callers to their deadlines.
            self._unproved.release()
            time.sleep(_BREATHER)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                rank = self._admit(sock)
            finally:
                self._unproved.release()
            if rank == NOT_ADMITTED:
                return
            self._lines[sock] = threading.Lock()
            words = self._converse(sock, self._lines[sock])
            del self._lines[sock]
            if self._ended is not None:
                self._ended(rank, words)

    def _converse(self, sock: socket.socket, lock: threading.Lock) -> str | None:
        """Answer one caller until it ends; its last words."""
        try:
            while True:
                number, name, method, args, kwargs = receive(sock)
                if number == 0:
                    return str(method)
                well, value = self._answer(name, method, args, kwargs)
                if isinstance(value, Future):  # it will be known later
                    value.add_done_callback(_Reply(sock, lock, number))
                else:
                    send(sock, lock, [number, well, value])
        except (EOFError, OSError, ConfigError, ValueError, TypeError):
            return None  # the caller has gone, or does not speak our language

    def _answer(self, name: str, method: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
        try:
            if name not in self._targets:
                raise ConfigError(f"no service {name!r} here")
            target, lock = self._targets[name]
            with lock or contextlib.nullcontext():
                value = invoke(target, method, args, kwargs)
            if not isinstance(value, Future):
                wire.Packed(value)  # refuse what cannot travel here, where its traceback is of use
            return True, value
        except BaseException as error:  # of SystemExit the caller would hear nothing else
            return False, str(remote_error(f"service {name!r} of {self._owner}", method, error))


class _Reply:
    def __init__(self, sock: socket.socket, lock: threading.Lock, number: int) -> None:
        self._sock, self._lock, self._number = sock, lock, number

    def __call__(self, done: Future[Any]) -> None:
        with contextlib.suppress(OSError):  # the caller has gone meanwhile
            send(self._sock, self._lock, [self._number, True, done.result()])


# -- who calls -------------------------------------------------------------------------------------


class Caller:
    """One connection, any number of calls under way."""

    def __init__(self, sock: socket.socket, peer: str, ended: Ended | None = None,
                 rank: int = -1) -> None:  # fmt: skip
        self._sock, self._peer, self._ended, self._rank = sock, peer, ended, rank
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._gone = ""
        threading.Thread(target=self._listen, name="manyhands-client", daemon=True).start()

    def start(self, name: str, method: str, args: list[Any], kwargs: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        # CRUCIAL: under way from here on. One that its owner has cancelled takes no answer, and the
        # thread that brings the answers of all would die of it.
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        self._pending[number] = future
        try:
            send(self._sock, self._lock, [number, name, method, args, kwargs])
        except BlockingIOError:
            self._end("does not read what it is sent")
        except OSError:
            self._end(None)
        except BaseException:
            self._pending.pop(number, None)
            raise
        if self._gone:  # perhaps since before it was noted down: nobody else would end it
            self._fail_all()
        return future

    def close(self, words: str) -> None:
        say_last(self._sock, self._lock, [0, "", words, [], {}])

    def _listen(self) -> None:
        words: str | None = None
        try:
            while True:
                number, well, value = receive(self._sock)
                if number == 0:
                    words = str(value)
                    break
                future = self._pending.pop(number, None)
                if future is not None and well:
                    future.set_result(value)
                elif future is not None:
                    future.set_exception(WorkerError(value))
        except (EOFError, OSError, ConfigError, ValueError, TypeError):
            pass  # it has gone, or does not speak our language
        self._end(words)

    def _end(self, words: str | None) -> None:
        if not self._gone:
            how = "is gone" if words is None else words or FINISHED
            self._gone = f"{self._peer} {how}"
            if self._ended is not None:
                self._ended(self._rank, words)
        self._fail_all()

    def _fail_all(self) -> None:
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread was faster
                _, future = self._pending.popitem()
                future.set_exception(CollectiveError(self._gone))


class SocketService(Service):
    """A handle on an object that another worker offers."""

    def __init__(self, name: str, owner: str, caller: Caller, timeout: float) -> None:
        self._key, self._caller, self.timeout = name, caller, timeout
        self.name = f"service {name!r} of {owner}"

    def call_async(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._caller.start(self._key, method, list(args), kwargs)


# -- on one machine --------------------------------------------------------------------------------


class UnixListener:
    """Where processes of this user, on this machine, reach a server.

    The socket has no name in any folder (Linux), and only processes of the same user are answered.
    """

    def __init__(self) -> None:
        self._folder = "" if _LINUX else tempfile.mkdtemp(prefix="manyhands-")
        name = f"manyhands-{secrets.token_hex(12)}"
        self.address = f"@{name}" if _LINUX else f"{self._folder}/{name}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(_socket_name(self.address))
        self.listener.listen(128)

    def close(self) -> None:
        if self._folder:
            with contextlib.suppress(OSError):
                os.unlink(self.address)
                os.rmdir(self._folder)


def same_user(sock: socket.socket) -> int:
    if _LINUX:  # elsewhere the socket lies in a folder that only this user can enter
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", raw)[1] != os.getuid():
            return NOT_ADMITTED
    return -1


def connect(address: str, timeout: float = 0.0) -> socket.socket:
    """BlockingIOError where that, or later one piece of what is sent, takes longer (0: no
    deadline): a process that is stopped reads nothing, and the socket's buffer is soon full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # WHY the kernel's: Python's own timeout would be that of whoever waits for answers too.
        microseconds = round(timeout * 1e6)
        limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(_socket_name(address))
    except BaseException:
        sock.close()
        raise
    return sock


def _socket_name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
