"""Memory that several processes see: segments, and the board on which workers report.

On Linux a segment is an anonymous memory file, opened by the others through /proc/PID/fd/N: it
has no name in any folder, so whoever dies, and however, nothing is left behind. Elsewhere it is a
temporary file that its maker removes.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from manyhands.trees import Array

_LINUX = sys.platform.startswith("linux")


class Segment:
    """A block of shared memory, made here or opened by its address."""

    def __init__(self, size: int = 0, address: str = "") -> None:
        path = ""
        if address:
            fd = os.open(address, os.O_RDWR)
            size = os.fstat(fd).st_size
        elif _LINUX:
            fd = os.memfd_create("manyhands")
        else:
            fd, path = tempfile.mkstemp(prefix="manyhands-")
        if not address:
            os.ftruncate(fd, size)
        self.size = size
        self.address = address or path or f"/proc/{os.getpid()}/fd/{fd}"
        self._map: Any = mmap.mmap(fd, size) if size else bytearray()
        # WHY keep it open only when made here: the number in /proc/PID/fd is the address.
        self._fd = -1 if address else fd
        if address:
            os.close(fd)
        else:
            self._release = weakref.finalize(self, _release, fd, path)
        self.bytes: Array = np.frombuffer(self._map, dtype=np.uint8)
        self.view = memoryview(self._map)

    @staticmethod
    def address_of(pid: int, number: int) -> str:
        return f"/proc/{pid}/fd/{number}"

    @property
    def number(self) -> int:
        """The file descriptor: with the process id, the address of this segment."""
        return self._fd

    def fresh_view(self, nbytes: int) -> Array:
        """A new array over the first bytes; all views taken of it keep it alive."""
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes)

    def read(self, at: int, nbytes: int) -> bytes:
        """A copy, in the one call that costs least: for notes, of which a meeting reads many."""
        return bytes(self._map[at : at + nbytes])

    def read_all(self) -> bytes:
        """What others have written to a segment that was made with size 0."""
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)

    def close(self) -> None:
        """Give the file back. The memory itself goes when the last array on it goes."""
        if self._fd >= 0:
            self._release()


def _release(fd: int, path: str) -> None:
    os.close(fd)
    if path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class ResultPool:
    """Shared memory for results, used again once the last array on it is gone.

    WHY: the first touch of fresh memory costs many times the copy itself (25 times where this was
    measured); a training loop gathers the same sizes again and again.
    """

    KEEP = 8

    def __init__(self) -> None:
        self._free: list[Segment] = []

    def take(self, nbytes: int) -> tuple[Segment, Array]:
        fitting = [s for s in self._free if nbytes <= s.size <= 4 * nbytes + (1 << 16)]
        if fitting:
            segment = min(fitting, key=lambda s: s.size)
            self._free.remove(segment)
        else:
            segment = Segment(max(nbytes + nbytes // 8, 4096))
        array = segment.fresh_view(nbytes)
        # The memory comes back when the array, and every view of it, has been dropped.
        weakref.finalize(array, self._give_back, segment).atexit = False
        return segment, array

    def _give_back(self, segment: Segment) -> None:
        self._free.append(segment)
        if len(self._free) > self.KEEP:
            self._free.pop(0).close()


# bytes: from here on malloc may get memory from the system each time, and give it back each time
FRESH_BELOW = 1 << 17


class Pool:
    """Large result arrays, used again once the last view of them is gone.

    WHY: as above; a learner draws batches of the same size for hours, and an actor pulls weights.
    What nobody else need see needs no file.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._arrays: list[Array] = []

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if math.prod(shape) * dtype.itemsize < FRESH_BELOW:
            return np.empty(shape, dtype)
        for i in range(len(self._arrays)):
            # Whoever has a view of it, or a view of a view, or a tensor on one, holds the array.
            if _holders(self._arrays, i) == _NOBODY:
                array = self._arrays[i]
                if array.shape == shape and array.dtype is dtype:
                    return array[:]
        array = np.empty(shape, dtype)  # numpy asks for huge pages
        self._arrays.append(array)
        if len(self._arrays) > self._keep:
            del self._arrays[0]
        return array[:]


def _holders(arrays: Sequence[Any], i: int) -> int:
    return getrefcount(arrays[i])


# Measured and not known: what a variable counts for differs between versions of Python.
_NOBODY = _holders([np.empty(0)], 0)


_LOCK = threading.Lock()


def fence() -> None:
    """Order the writes before it before the writes after it, as other processes see them.

    x86 does that by itself; other machines need an atomic instruction between. Taking and giving
    back a lock holds one on every platform, for 60 ns.
    """
    with _LOCK:
        pass


EMPTY, RUNNING, DONE, FAILED, DEAD, LOST = range(6)  # LOST: dead, and the run goes on
_PAGE = 16384
_WORDS = 16  # eight-byte words at the head of a page
_PID, _STATE, _BEAT, _CODE, _SINCE, _SECONDARY, _TURN, _STOP, _MOVED = range(9)
# (offset, room) of each text on a page
_TEXTS = {"host": (128, 128), "role": (256, 64), "where": (320, 256), "call": (576, 448),
          "notes": (1024, 3072), "phases": (4096, 1024),
          "report": (5120, _PAGE - 5120)}  # fmt: skip


class Board:
    """One page a worker, written by that worker alone and read by all; page 0 is the run's.

    It is how a waiting worker learns that another is gone, what it was doing, and why; and how the
    supervisor learns the original traceback. It works between any processes of one user on one
    host, whatever started them.
    """

    def __init__(self, workers: int, address: str = "") -> None:
        self.workers = workers
        self._segment = Segment(_PAGE * (workers + 1), address)
        self.address = self._segment.address
        self._words = self._segment.view.cast("Q")

    @staticmethod
    def token(address: str) -> str:
        """Address with the host it is good for: what travels in MANYHANDS_BOARD."""
        return f"{socket.gethostname()}|{address}"

    @staticmethod
    def open(token: str, workers: int) -> Board | None:
        """The board of that token, or None where it cannot be reached (another host)."""
        host, _, address = token.partition("|")
        if host != socket.gethostname():
            return None
        try:
            return Board(workers, address)
        except OSError:
            return None

    # -- the run's page ------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Tell every waiting worker to give up, and why."""
        if not self.aborted:
            self._write_text(0, "report", reason)
            fence()
            self._words[_STATE] = FAILED

    @property
    def aborted(self) -> str:
        return self._read_text(0, "report") if self._words[_STATE] == FAILED else ""

    def ask_stop(self, number: int) -> None:
        """Ask the main worker to end its update, save and leave; the first signal counts."""
        if not self._words[_STOP]:
            self._words[_STOP] = number

    @property
    def stop_word(self) -> int:
        """The signal by which the run was asked to stop; 0 if it was not."""
        return int(self._words[_STOP])

    def set_turn(self, rank: int) -> None:
        """Inline engine: who holds the baton."""
        self._words[_TURN] = rank

    @property
    def turn(self) -> int:
        return int(self._words[_TURN])

    # -- a worker's page -----------------------------------------------------------------------

    def arrive(self, rank: int) -> None:
        """The process of that worker is there; it has not come to `Parallel()` yet."""
        self._write_text(rank + 1, "host", socket.gethostname())
        self._words[self._base(rank) + _PID] = os.getpid()

    def enter(self, rank: int, role: str = "worker") -> None:
        self.arrive(rank)
        self._write_text(rank + 1, "role", role)
        self._words[self._base(rank) + _BEAT] = time.monotonic_ns()
        self.moved(rank)
        fence()
        self.set_state(rank, RUNNING)

    def set_state(self, rank: int, state: int, report: str = "", code: int = 0,
                  secondary: bool = False) -> None:  # fmt: skip
        base = self._base(rank)
        if report:
            self._write_text(rank + 1, "report", report)
        self._words[base + _CODE] = code & 0xFFFF
        self._words[base + _SECONDARY] = int(secondary)
        self._words[base + _SINCE] = time.monotonic_ns()
        fence()
        self._words[base + _STATE] = state

    def state(self, rank: int) -> int:
        return int(self._words[self._base(rank) + _STATE])

    def pid(self, rank: int) -> int:
        return int(self._words[self._base(rank) + _PID])

    def since(self, rank: int) -> int:
        return int(self._words[self._base(rank) + _SINCE])

    def code(self, rank: int) -> int:
        return int(self._words[self._base(rank) + _CODE])

    def secondary(self, rank: int) -> bool:
        """Whether that worker failed only because another had: not the cause."""
        return bool(self._words[self._base(rank) + _SECONDARY])

    def beat(self, rank: int, where: str) -> None:
        self._write_text(rank + 1, "where", where)
        self._words[self._base(rank) + _BEAT] = time.monotonic_ns()

    def moved(self, rank: int) -> None:
        """That worker's main thread has done something since it was last looked at."""
        self._words[self._base(rank) + _MOVED] = time.monotonic_ns()

    def no_signs(self, rank: int) -> None:
        """Its process is another from here on, and has not come yet."""
        base = self._base(rank)
        self._words[base + _BEAT] = self._words[base + _MOVED] = 0

    def signs(self, rank: int) -> tuple[int, int]:
        """The times of its last heartbeat and of its last move: other numbers, other signs."""
        base = self._base(rank)
        return int(self._words[base + _BEAT]), int(self._words[base + _MOVED])

    def beat_age(self, rank: int) -> float:
        return (time.monotonic_ns() - int(self._words[self._base(rank) + _BEAT])) / 1e9

    def text(self, rank: int, name: str) -> str:
        return self._read_text(rank + 1, name)

    def set_text(self, rank: int, name: str, text: str) -> None:
        self._write_text(rank + 1, name, text)

    def set_note(self, rank: int, key: str, value: Any) -> None:
        """A small public fact about this worker (the address of a service, say)."""
        notes = self.notes(rank)
        notes[key] = value
        self._write_text(rank + 1, "notes", json.dumps(notes))

    def note(self, rank: int, key: str) -> Any:
        """One of them; None as long as it is not there. Made to be asked again and again."""
        there = json.dumps(key) in self._read_text(rank + 1, "notes")
        return self.notes(rank).get(key) if there else None

    def notes(self, rank: int) -> dict[str, Any]:
        try:
            return dict(json.loads(self._read_text(rank + 1, "notes") or "{}"))
        except ValueError:  # read while it was being written: the reader looks again
            return {}

    # -- inside --------------------------------------------------------------------------------

    def _base(self, rank: int) -> int:
        return (rank + 1) * _PAGE // 8

    def _write_text(self, page: int, name: str, text: str) -> None:
        at, room = _TEXTS[name]
        at += page * _PAGE
        data = text.encode(errors="replace")
        if len(data) > room - 8:  # keep the end: that is where a traceback says what it was
            data = b"... " + data[-(room - 12) :]
        self._words[at // 8] = 0
        fence()
        self._segment.view[at + 8 : at + 8 + len(data)] = data
        fence()
        self._words[at // 8] = len(data)

    def _read_text(self, page: int, name: str) -> str:
        at, room = _TEXTS[name]
        at += page * _PAGE
        length = min(int(self._words[at // 8]), room - 8)
        return bytes(self._segment.view[at + 8 : at + 8 + length]).decode(errors="replace")
