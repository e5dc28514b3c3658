"""A worker that is a process of its own: its page on the board, its heartbeat, its last words.

Shared by the local, mpi, torch and ray engines. Who else is there (names, whereabouts, how far each
has come) is read off the board, where one can be reached.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from manyhands.engines.base import (
    Channel,
    Place,
    Roster,
    Service,
    WeightStore,
    Worker,
    worker_names,
)
from manyhands.engines.shared import DEAD, DONE, EMPTY, FAILED, LOST, RUNNING, Board
from manyhands.errors import CollectiveError, described

if TYPE_CHECKING:
    from manyhands.engines.parts.memory import MemoryParts
    from manyhands.engines.parts.network import NetworkParts

# everybody's word (plain data) under a heading, by rank
Say = Callable[[str, Any], list[Any]]
THREAD_SECONDS = 5.0  # that threads of an environment may outlast the run
FORK = "MANYHANDS_FORK"  # the plan of a process that forks the workers: worker.become_worker
_CURRENT: list[ProcessWorker] = []  # at most one a process


class ProcessWorker(Worker):
    """Everything about a worker but the way it moves bytes. Engines add `group` and `parts`."""

    parts: MemoryParts | NetworkParts | None = None  # ray has its own

    def __init__(self, place: Place, timeout: float, board: Board | None) -> None:
        self.place, self.timeout, self.board = place, timeout, board
        self._heartbeat: Heartbeat | None = None
        self._left = False
        if board is not None:
            board.enter(place.rank, place.role)
            self._heartbeat = Heartbeat(board, place.rank)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._last_words
        atexit.register(self.close)
        _CURRENT.append(self)

    def roster(self, hosts: Sequence[str]) -> Roster:
        """The roster of all workers, given the host of each."""
        size = self.place.size
        names = worker_names(size, hosts)
        if self.board is not None and len(set(hosts)) == 1:
            return BoardRoster(self.board, range(size), names)
        return Roster(names)

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        assert self.parts is not None
        return self.parts.channel(name, reader=reader, capacity=capacity)

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        assert self.parts is not None
        return self.parts.weights(name, writer=writer)

    def serve(self, name: str, target: object) -> None:
        assert self.parts is not None
        self.parts.serve(name, target)

    def service(self, name: str, timeout: float | None = None) -> Service:
        assert self.parts is not None
        return self.parts.service(name, timeout)

    def meet(self, hosts: Sequence[str], say: Say, rendezvous: str = "") -> Roster:
        """Come by channels, weights and services; the roster of all workers. All call it.

        In shared memory where all have the board, else over the network.
        """
        from manyhands.engines.parts import memory, network

        roster, place = self.roster(hosts), self.place
        if self.board is not None and not network.forced():
            self.parts = memory.MemoryParts(self.board, roster, place, self.timeout)
            return roster
        far = network.meet(place, hosts, roster.names, say, self.timeout, rendezvous)
        self.parts = far
        if self.board is not None:
            far.roster = roster
        return far.roster

    def fail(self, error: BaseException) -> None:
        """Leave the original traceback where the supervisor and the others find it."""
        self._left = True
        if self.parts is not None:
            self.parts.close(f"failed: {described(error)}")
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self.board is not None and self.board.state(self.place.rank) == RUNNING:
            text = "failed:\n" + "".join(traceback.format_exception(trim(error)))
            secondary = isinstance(error, (CollectiveError, KeyboardInterrupt))
            self.board.set_state(self.place.rank, FAILED, text, code=1, secondary=secondary)

    @property
    def restarts(self) -> int:
        return int(os.environ.get("MANYHANDS_RESTARTS", "0"))

    def show(self, look: Callable[[], dict[str, float]]) -> None:
        if self._heartbeat is not None:
            self._heartbeat.look = look

    def moves(self, sign: Callable[[], object]) -> None:
        if self._heartbeat is not None:
            self._heartbeat.sign = sign

    def lost(self) -> set[int]:
        return self._in_state(LOST)

    def away(self) -> set[int]:
        return self._in_state(EMPTY, FAILED, DEAD, LOST)

    def _in_state(self, *states: int) -> set[int]:
        board = self.board
        if board is None:
            return set()
        return {rank for rank in range(self.place.size) if board.state(rank) in states}

    def peers(self) -> list[dict[str, Any]]:
        board = self.board
        if board is None:
            return []
        found = []
        for rank in range(self.place.size):
            there = board.state(rank) == RUNNING
            found.append(
                {
                    "rank": rank,
                    "role": board.text(rank, "role"),
                    "state": _STATES[board.state(rank)],
                    "beat_age": round(board.beat_age(rank), 2) if there else None,
                    "where": board.text(rank, "where") if there else "",
                    "phases": _phases(board.text(rank, "phases")),
                }
            )
        return found

    def main_has_left(self) -> bool:
        return self.board is not None and self.board.state(0) == DONE

    def abandon(self) -> None:
        """End the other workers too, where no supervisor does it (plain mpiexec)."""

    def close(self) -> None:
        if self._left:
            return
        if self.parts is not None:
            self.parts.drain()
            self.parts.close("")
        self._left = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self.board is not None and self.board.state(self.place.rank) == RUNNING:
            self.board.set_state(self.place.rank, DONE)

    def _last_words(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        """Uncaught exception without our own launcher: say who it was, then end all.

        One worker tells the story; its end is the end of those who would tell it again.
        """
        self.fail(error)
        if isinstance(error, (CollectiveError, KeyboardInterrupt)) and self._another_speaks():
            time.sleep(1.0)
        print(f"\nmanyhands: {self.place.name} (pid {os.getpid()}) failed:", file=sys.stderr)
        self._previous_hook(kind, error, where)
        sys.stderr.flush()
        self.abandon()

    def _another_speaks(self) -> bool:
        time.sleep(0.1)  # the others fail of the same thing, within a moment
        board, me = self.board, self.place.rank
        if board is None:
            return me > 0
        failed = [r for r in range(self.place.size) if r != me and board.state(r) == FAILED]
        return any(r < me or not board.secondary(r) for r in failed)


_STATES = {
    EMPTY: "starting", RUNNING: "running", DONE: "finished", FAILED: "failed", DEAD: "dead",
    LOST: "lost",
}  # fmt: skip


def _phases(text: str) -> dict[str, float]:
    try:
        return dict(json.loads(text or "{}"))
    except ValueError:  # read while it was being written: whoever looks will look again
        return {}


def current() -> ProcessWorker | None:
    return _CURRENT[-1] if _CURRENT else None


def forget() -> None:
    """For a process that hosts one worker after another (a Ray actor, a test)."""
    if _CURRENT:
        worker = _CURRENT.pop()
        sys.excepthook = worker._previous_hook
        atexit.unregister(worker.close)


def trim(error: BaseException) -> BaseException:
    """Drop the launcher's own frames from the top of a traceback: the user did not write them."""
    here = os.path.dirname(os.path.abspath(__file__))
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        name = tb.tb_frame.f_code.co_filename
        if not (name.startswith(here) or name.startswith("<frozen")):
            break
        tb = tb.tb_next
    return error.with_traceback(tb)


def wait_for_threads(seconds: float | None = None) -> bool:
    """Until all threads are over, as the interpreter waits on its way out; with a deadline where an
    environment may have left one behind. Whether they are."""
    deadline = None if seconds is None else time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon:
            continue
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            said = f"manyhands: {thread.name}, a thread that something has started, does not end"
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print(f"{said}; it was given {seconds:g} s", file=sys.stderr)
            return False
    return True


def open_board(size: int) -> Board | None:
    """The board of the launcher that started this process, if there is one and it is in reach."""
    token = os.environ.get("MANYHANDS_BOARD", "")
    return Board.open(token, size) if token else None


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def show_as(name: str) -> None:
    """The name of this process in `top` and `ps` (15 bytes at most)."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(15, name.encode()[:15])  # PR_SET_NAME


def wake_precisely() -> None:
    """Sleep no longer than asked: the default timer slack adds 50 µs to each short sleep."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK, nanoseconds


# -- who is there ----------------------------------------------------------------------------------


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
            if state in (FAILED, DEAD, LOST):
                said = self.board.text(world, "report").strip().rsplit("\n", 1)[-1]
                raise CollectiveError(f"{doing}: {self.name(rank)} is gone: {said}")


class Heartbeat:
    """A thread that writes, twice a second, where this worker's main thread is."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self.look: Callable[[], dict[str, float]] | None = None  # seconds by phase
        self.sign: Callable[[], object] = object  # another than before: the main thread has moved
        self._last: object = None
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
                if (sign := self.sign()) != self._last:
                    self._last = sign
                    self._board.moved(self._rank)
                if self.look is not None:
                    self._board.set_text(self._rank, "phases", json.dumps(self.look()))

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


def what_ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (kill -9, or out of memory)" if -code == signal.SIGKILL else ""
            return f"was killed by signal {name}{hint}"
        return f"was killed by signal {-code}"
    return f"left with exit code {code}"


def alive(pid: int) -> bool:
    """Whether a process of this host is; one that has ended and was not waited for is not."""
    import psutil  # here: not every command that reads this file has processes to look at

    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
