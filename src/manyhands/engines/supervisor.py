"""The supervisor: starts processes, sees them fail, says why, and leaves nothing behind.

One shutdown path for every engine and every reason: stop word on the board, SIGTERM, a short
grace, SIGKILL to the whole tree of descendants, all under one deadline.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

import psutil

from manyhands import roles, terminal
from manyhands.engines.process import FORK, alive, what_ended
from manyhands.engines.recovery import LineFilter, Recovery, Restart, Watch
from manyhands.engines.shared import DEAD, DONE, EMPTY, FAILED, LOST, RUNNING, Board
from manyhands.errors import ConfigError, Stopped, WorkerError

POLL_SECONDS = 0.02
START_SECONDS = 300.0  # for what all workers import: from a cold network disk it takes minutes
SPARE_FILES = 64  # for all that a launcher opens beside its workers' output
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
LINGER_SECONDS = 1.0  # how long a worker that has failed may take to leave
CAUSE_SECONDS = 0.4  # how long the first failure waits for a deeper cause to show
SHOWN_BYTES = 1 << 20  # of each worker's output in a second
LONGEST_LINE = 1 << 16
_LIBC: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


@dataclass(frozen=True)
class Seat:
    """Where one worker is to sit: its own part of the environment, and whom its output goes to."""

    rank: int
    env: dict[str, str]
    piped: bool
    restart: bool


class Forked:
    """A worker that was forked for us: the part of a Popen that we use."""

    def __init__(self, pid: int, output: list[int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        if output:
            self.stdout, self.stderr = (os.fdopen(fd, "rb") for fd in output)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else in this process has waited for it
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


@dataclass
class Child:
    """A process we started, and the workers it hosts (mpiexec hosts all)."""

    process: subprocess.Popen[bytes] | Forked
    ranks: list[int]
    explain: Callable[[int], tuple[int, str]] | None = None  # exit code -> (rank, what it means)
    gone: bool = False
    restart: Restart | None = None  # for workers that the run can do without for a while
    watch: Watch | None = None
    silence: tuple[str, str] | None = None  # why we have killed it: kind, and in words
    lost: bool = False  # dead, and the run goes on without it
    pumps: list[threading.Thread] = field(default_factory=list)

    def drain(self) -> None:
        """Let the last lines be shown; a grandchild that holds the pipe open is not waited for."""
        for pump in self.pumps:
            pump.join(0.5)


class Supervisor:
    def __init__(self, board: Board, host: str) -> None:
        self.board, self.host = board, host
        self.children: list[Child] = []
        self.recovery = Recovery()
        self.keep: Any = None  # shared memory that must live as long as the workers
        self._handlers: dict[int, Any] = {}
        adopt_orphans()

    def start(
        self,
        command: list[str],
        env: dict[str, str],
        ranks: list[int],
        *,
        pass_fds: tuple[int, ...] = (),
        piped: bool = False,
        own_group: bool = False,
        restart: bool = False,
        explain: Callable[[int], tuple[int, str]] | None = None,
    ) -> Child:
        """Start a process that hosts these workers; `piped` output comes through `pass_on`.

        In a group of its own (`own_group`) it does not hear a terminal's Ctrl-C. With `restart` it
        is started again when a signal has killed it.
        """
        pipe = subprocess.PIPE if piped else None
        child = subprocess.Popen(
            command,
            env=env,
            pass_fds=pass_fds,
            stdout=pipe,
            stderr=pipe,
            process_group=0 if own_group else None,
            preexec_fn=die_with_us,
        )
        again = Restart(command, env) if restart else None
        self.children.append(Child(child, ranks, explain, restart=again))
        return self.children[-1]

    def fork(
        self,
        command: list[str],
        env: dict[str, str],
        seats: list[Seat],
        modules: tuple[str, ...],
        pass_fds: tuple[int, ...] = (),
    ) -> list[Child]:
        """Start workers that are forked from one process, which has imported for all.

        An import of torch takes a second or two of processor time: 64 workers would take a minute
        of two cores. What it lays in memory is there once, too. `pass_fds` go to worker 0.
        """
        make_room_for(4 * len(seats))
        answer, answers = os.pipe()
        pipes = {seat.rank: [os.pipe(), os.pipe()] for seat in seats if seat.piped}
        ours = {rank: [read for read, _ in pair] for rank, pair in pipes.items()}
        theirs = {rank: [write for _, write in pair] for rank, pair in pipes.items()}
        written = [answers, *(fd for pair in theirs.values() for fd in pair)]
        plan = {
            "modules": modules,
            "workers": [{"env": s.env, "output": theirs.get(s.rank, [])} for s in seats],
            "answer": answers,
            "close": written,
            "keep": pass_fds,
        }
        try:
            template = self.start(
                command,
                env | {FORK: json.dumps(plan)},
                [seat.rank for seat in seats],
                pass_fds=(*written, *pass_fds),
            )
        finally:
            for fd in written:
                os.close(fd)
        try:
            pids = self._forked_by(template, answer, modules)
        except BaseException:
            for fd in [fd for pair in ours.values() for fd in pair]:
                os.close(fd)
            raise
        finally:
            os.close(answer)
        self.children.remove(template)
        children = []
        for seat, pid in zip(seats, pids, strict=True):
            again = Restart(command, env | seat.env) if seat.restart else None
            process = Forked(pid, ours.get(seat.rank, []))
            children.append(Child(process, [seat.rank], restart=again))
        self.children += children
        return children

    def _forked_by(self, template: Child, answer: int, modules: tuple[str, ...]) -> list[int]:
        """The pids of the workers, once the process that forks them has written them and left."""
        deadline = time.monotonic() + START_SECONDS
        while (code := template.process.poll()) is None:
            if time.monotonic() > deadline:
                text = (
                    f"has not imported {', '.join(['numpy', *modules])} within {START_SECONDS:g} s"
                )
                self.board.set_state(0, DEAD, text, code=1)
                raise self._failure()
            time.sleep(POLL_SECONDS)
        if code != 0:
            template.gone = True
            self._note_end(template, code)
            raise self._failure()
        pids: list[int] = json.loads(os.read(answer, 1 << 16))
        return pids

    def pass_on(self, child: Child, out: LineFilter | None, err: LineFilter | None) -> None:
        """Show the lines of a piped child as `out` and `err` (bytes -> bytes) want them; None
        shows all as it comes, a line that is being rewritten too.

        WHY only after all have been started: a fork while threads run is asking for trouble.
        """
        if child.restart is not None:
            child.restart.filters = (out, err)
        for source, sink, rewrite in (
            (child.process.stdout, sys.stdout, out),
            (child.process.stderr, sys.stderr, err),
        ):
            pump = threading.Thread(target=_pump, args=(source, sink, rewrite), daemon=True)
            pump.start()
            child.pumps.append(pump)

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: a closed terminal is no reason to stop
            with contextlib.suppress(ValueError):  # not the main thread: the caller has its own way
                self._handlers[number] = signal.signal(number, _raise_stopped)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            # A second Ctrl-C means: now.
            self.stop("the launch has ended" if exc[1] is None else str(exc[1]))
        except Stopped:
            self.kill_all()
        finally:
            for child in self.children:
                if child.watch is not None:
                    child.watch.close()
            if exc[1] is not None:
                terminal.clear_below(sys.stdout)  # a main worker that was killed could not
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Until every child has ended well. WorkerError as soon as one has not, and the run cannot
        go on."""
        while True:
            running = 0
            for child in self.children:
                if child.gone:
                    continue
                code = child.process.poll()
                if code is None:
                    running += 1
                    self._look_at(child)
                elif self._recovered(child, code):
                    running += not child.lost
                else:
                    child.gone = True
                    self._note_end(child, code)
                    child.drain()
            if any(c.gone and not c.lost and self._failed(c) for c in self.children):
                raise self._failure()
            if self._lingers():
                raise self._failure()
            if not running:
                return
            time.sleep(POLL_SECONDS)

    def _failed(self, child: Child) -> bool:
        return bool(child.process.returncode) or self.board.state(child.ranks[0]) == DEAD

    # -- recovery ------------------------------------------------------------------------------

    def _look_at(self, child: Child) -> None:
        """Whether a worker that may fail gets on; one that does not is killed, and
        where it was is kept."""
        if child.restart is None:
            return
        rank = child.ranks[0]
        if child.watch is None:
            pid, silence = child.process.pid, self.recovery.silence
            child.watch = Watch(self.board, rank, pid, silence)
        found = child.watch.look() if self.board.state(rank) in (EMPTY, RUNNING) else None
        lingers = self.board.state(rank) == FAILED and self._long_ago(rank)
        if found is not None and child.silence is None and not self.board.aborted:
            child.silence = found
            if stacks := child.watch.stacks(ask=True):
                child.silence = (found[0], f"{found[1]}. It was here:\n{stacks}")
        if child.silence is not None or lingers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGKILL)

    def _recovered(self, child: Child, code: int) -> bool:
        """Whether the run goes on after this end: with a new process, or without this worker."""
        restart, rank, board = child.restart, child.ranks[0], self.board
        if restart is None or board.aborted or (code == 0 and board.state(rank) == DONE):
            return False
        if restart.due is None:
            child.drain()
            kind, what = self._how_it_ended(child, code)
            if board.secondary(rank):  # it suffers from what another has done
                return False
            return self._decided(child, code, kind, what)
        if time.monotonic() >= restart.due:
            if child.watch is not None:
                child.watch.close()
            child.watch = child.silence = None
            child.pumps.clear()
            child.process = restart.start()
            self.pass_on(child, *restart.filters)
        return True

    def _decided(self, child: Child, code: int, kind: str, what: str) -> bool:
        restart, rank, recovery = child.restart, child.ranks[0], self.recovery
        assert restart is not None
        left = sum(c.restart is not None and not c.lost for c in self.children) - 1
        silent = recovery.silence if child.silence is not None else 0.0
        action, why = recovery.policy, ""
        if (self.board.stop_word or self.board.state(0) == DONE) and action != "stop":
            action = "continue"  # nobody waits for it any more
        elif action == "continue" and left < recovery.minimum:
            action = "stop"
            why = (
                f"of the workers that act {left} are left, and --min-workers is {recovery.minimum}"
            )
        elif action == "restart" and not restart.allowed(recovery.restarts, silent):
            action = "stop"
            why = (
                f"gave up after {len(restart.deaths) - 1} restarts in {restart.span:.0f} s "
                f"(--max-restarts {recovery.restarts})"
            )
        who = roles.from_environment(self.board.workers, restart.env).name(rank)
        self._record(rank, who, code, kind, what, action, restart.times)
        if action == "stop":
            text = f"{why}. It {what}" if why else what
            self.board.set_state(rank, DEAD, text, code=128 - code if code < 0 else code or 1)
            return False
        then = f"it is started again (restart {restart.times + 1})"
        if action == "restart":
            self.board.set_state(rank, EMPTY)
            self.board.no_signs(rank)
        else:
            child.lost = child.gone = True
            self.board.set_state(rank, LOST, what)
            then = f"the run goes on without it ({left} are left)"
        first, _, more = what.partition("\n")
        more = f"\n{more}" if more else ""
        print(f"manyhands: {who} {first.rstrip(':')}; {then}{more}", file=sys.stderr, flush=True)
        return True

    def _how_it_ended(self, child: Child, code: int) -> tuple[str, str]:
        """(kind of fault, in words with the traceback where there is one)."""
        rank = child.ranks[0]
        if child.silence is not None:
            return child.silence
        if self.board.state(rank) == FAILED:
            report = self.board.text(rank, "report").rstrip()
            _, _, traceback = report.partition("\n")
            # The error itself: the first line after the last that is indented.
            lines = traceback.split("\n  ")[-1].split("\n")[1:]
            return "raised", f"raised {lines[0]}\n{traceback}" if lines else report
        text = what_ended(code)
        if code == 0:
            text += " before its work was done"
        stacks = "" if child.watch is None else child.watch.stacks()
        if stacks:
            text += f". It was here:\n{stacks}"
        return "killed" if code < 0 else "exited", text

    def _record(
        self,
        rank: int,
        who: str,
        code: int,
        kind: str,
        what: str,
        action: str,
        times: int = 0,
    ) -> None:
        """A line of events.jsonl."""
        first, _, traceback = what.partition("\n")
        name = None
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
        self.recovery.event(
            "worker_fault",
            kind=kind, worker=rank, who=who, what=first.rstrip(":"), signal=name, exit_code=code,
            traceback=traceback, action=action, restarts=times,
        )  # fmt: skip

    def _lingers(self) -> bool:
        """Whether a worker has reported its failure but does not end (a thread of the user's)."""
        may_fail = {c.ranks[0] for c in self.children if c.restart is not None}
        return any(
            self.board.state(r) == FAILED and self._long_ago(r)
            for r in range(self.board.workers)
            if r not in may_fail
        )

    def _long_ago(self, rank: int) -> bool:
        return self.board.since(rank) < time.monotonic_ns() - int(LINGER_SECONDS * 1e9)

    def _note_end(self, child: Child, code: int) -> None:
        """Put on the board what the dead can no longer say."""
        if code == 0 and child.explain is None and self.board.state(child.ranks[0]) == RUNNING:
            # os._exit(0), of an environment or a library: no worker of ours leaves like that.
            text = "left with exit code 0 before its work was done"
            self.board.set_state(child.ranks[0], DEAD, text, code=1)
            return
        for rank in child.ranks:
            state = self.board.state(rank)
            if code == 0 and state in (EMPTY, RUNNING):
                self.board.set_state(rank, DONE)
        if code == 0:
            return
        if any(self.board.state(r) in (FAILED, DEAD) for r in child.ranks):
            return  # it is known why; the others were ended for it
        rank, text = (child.ranks[0], what_ended(code))
        if child.explain is not None:
            rank, text = child.explain(code)
        if self.board.state(rank) not in (EMPTY, RUNNING):
            text += ", after its work was done"
        self.board.set_state(rank, DEAD, text, code=128 - code if code < 0 else code)

    def _failure(self) -> WorkerError:
        """The original failure: not that of a worker who only suffered from it."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while True:
            for child in self.children:
                if not child.gone and (code := child.process.poll()) is not None:
                    child.gone = True
                    self._note_end(child, code)
            ranks = range(self.board.workers)
            failed = [r for r in ranks if self.board.state(r) in (FAILED, DEAD)]
            causes = [r for r in failed if not self.board.secondary(r)]
            if causes or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        rank = min(causes or failed, key=self.board.since, default=0)
        report = self.board.text(rank, "report").rstrip()
        if not causes:  # all have waited for somebody who is still there
            report += self._stacks_of_the_silent()
        host = self.board.text(rank, "host") or self.host
        pid = f" (pid {self.board.pid(rank)})" if self.board.pid(rank) else ""
        code = self.board.code(rank) or 1
        role = self.board.text(rank, "role")
        named = "" if role in ("", "worker") else f"{role}, "
        who = f"{named}worker {rank} of {self.board.workers} on {host}{pid}"
        if not any(c.restart is not None and rank in c.ranks for c in self.children):
            killed = "killed by signal" in report
            kind = "killed" if killed else "raised" if "\n" in report else "exited"
            self._record(rank, who, 128 - code if killed else code, kind, report, "stop")
        return WorkerError(who, report, rank=rank, exit_code=code)

    def _stacks_of_the_silent(self) -> str:
        """Where those are that run on while others have given up waiting for them."""
        found = ""
        for child in self.children:
            rank, pid = child.ranks[0], child.process.pid
            if child.explain is not None or self.board.state(rank) != RUNNING:
                continue
            if child.process.poll() is None:
                watch = Watch(self.board, rank, pid, 0.0)
                watch.look()
                if stacks := watch.stacks(ask=True):
                    found += f"\nWorker {rank} (pid {pid}) was here:\n{stacks}"
                watch.close()
        return found

    def stop(self, reason: str) -> None:
        """End everything that is still there, gently first."""
        if all(c.process.poll() is not None for c in self.children) and not descendants():
            return
        self.board.abort(reason)
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if all(c.process.poll() is not None for c in self.children):
                break
            time.sleep(POLL_SECONDS)
        self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL to all descendants, again until none is left (they may be starting more)."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            left = descendants()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for child in self.children:
                child.process.poll()
            _reap_orphans({c.process.pid for c in self.children})
            time.sleep(POLL_SECONDS)


def label(who: str) -> LineFilter:
    """Put the worker's name before each line. Of one that prints without end, the most is left
    out: the others are to be heard."""
    mark = f"[{who}] ".encode()
    since, shown, left_out = 0.0, 0, 0

    def marked(line: bytes) -> bytes:
        nonlocal since, shown, left_out
        now, said = time.monotonic(), b""
        if now - since > 1.0:
            if left_out:
                said = mark + f"... {left_out:,} bytes are not shown\n".encode()
            since, shown, left_out = now, 0, 0
        if shown > SHOWN_BYTES:
            left_out += len(line)
            return said
        shown += len(line)
        return said + mark + line

    return marked


def _pump(source: Any, sink: Any, rewrite: LineFilter | None) -> None:
    raw = getattr(sink, "buffer", None)
    text = codecs.getincrementaldecoder("utf-8")("replace")
    # The main worker's live view lies below the cursor: cleared here, it is drawn again there.
    clear = b"\x1b[J" if rewrite is not None and terminal.can_draw(sink) else b""
    read = source.readline if rewrite is not None else source.read1
    for piece in iter(functools.partial(read, LONGEST_LINE), b""):
        shown = piece if rewrite is None else rewrite(piece)
        shown = clear + shown if shown else b""
        if sink is None:  # closed before we were started
            continue
        with contextlib.suppress(OSError, ValueError):  # our own output has been closed: read on,
            if raw is not None:  # or the worker would block on a full pipe
                raw.write(shown)
            else:
                sink.write(text.decode(shown))
            sink.flush()


def descendants() -> list[int]:
    """Every process below this one that is not a zombie."""
    return [child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)]


def make_room_for(files: int) -> None:
    """Let this process open so many files more; ConfigError where it may not."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files + len(os.listdir("/proc/self/fd")) + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"so many workers need {needed} open files, and {hard} are allowed; start fewer, or "
            f"type: ulimit -Hn {needed} (as root)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def adopt_orphans() -> None:
    """Processes that our workers start and leave behind become our children, so we can end them."""
    if _LIBC is not None:
        _LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _reap_orphans(ours: set[int]) -> None:
    """Collect adopted processes that have ended; those that Popen started are left to Popen."""
    for child in psutil.Process().children():
        if child.pid not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def die_with_us() -> None:
    """In a process that is being started: the kernel kills it when the one that starts it ends."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
