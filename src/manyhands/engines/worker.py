"""What runs in a worker process: `python -m manyhands.engines.worker [script args ...]`.

Started by the launcher, which has set the thread caps and MANYHANDS_* before this interpreter
began. Imports nothing heavy before the user's own code does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np

from manyhands import devices, terminal, wire
from manyhands.engines import calls, inline, process, recovery, stopping
from manyhands.engines.attach import detect, timeout_from
from manyhands.engines.base import Patience
from manyhands.engines.shared import DEAD, DONE, FAILED, RUNNING, Board
from manyhands.errors import CollectiveError, WorkerError

STOPPED = stopping.STOPPED
WATCHED = "MANYHANDS_WATCHED"
# Signals that are meant for a worker and not for the process that watches it.
_ASKED = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def run_script(path: str, args: list[str]) -> None:
    """Run a script as `python path args` would."""
    sys.argv = [path, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_job(script: str, args: list[str], call: str) -> Any:
    return calls.perform(call) if call else run_script(script, args)


def run_payload(payload: dict[str, Any]) -> Any:
    """The job inside a Ray actor, which gets it as plain data."""
    return run_job(payload["script"], payload["args"], payload["call"])


def main() -> NoReturn:
    # WHY ignore: Ctrl-C in a terminal reaches every process; the launcher alone answers it, and
    # ends the workers by SIGTERM, which here unwinds the stack so that `finally` blocks run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = os.environ.pop(process.FORK, "")
    process.die_with_parent(become_worker(json.loads(plan)) if plan else os.getppid())
    terminal.whole_lines()
    signal.signal(signal.SIGTERM, _stop)
    place = detect(os.environ)
    process.show_as(f"manyhands-{place.rank}")
    board = process.open_board(place.size)
    if place.engine == "mpi" and board is not None and not os.environ.get(WATCHED):
        be_watched(place.rank, board)
    patience = None  # a script's threads are its own to end
    if os.environ.get("MANYHANDS_GRACEFUL") == "1" and board is not None:
        stopping.answer_in_worker(board)
        patience = process.THREAD_SECONDS
    call = os.environ.get("MANYHANDS_CALL", "")
    # Now: an environment may change the variables of its process.
    places = os.environ.get("MANYHANDS_RESULTS", "")
    script, args = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])

    def program() -> Any:
        return run_job(script, args, call)

    if place.engine == "inline":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pdb wants it
        leave(_run_inline(program, place.size, board, places), place.engine, patience)
    if board is not None:
        board.arrive(place.rank)
        recovery.leave_stacks(board, place.rank)
    leave(_run_one(program, place.rank, board, places), place.engine, patience)


def become_worker(plan: dict[str, Any]) -> int:
    """Import once what all workers need, fork them, and leave; in each of them: the launcher's pid.

    The launcher adopts them, as it does all whose parents leave (PR_SET_CHILD_SUBREAPER), and reads
    their pids from a pipe.

    CRUCIAL: a fork copies the locks of other threads but not the threads, so it must come before
    any. Importing torch starts none, nor does it touch a GPU. Where something else has started one
    (BLAS with several threads, a sitecustomize), each fork begins anew as a program of its own.
    """
    with devices.no_garbage_collection():
        for name in plan["modules"]:
            with contextlib.suppress(Exception):  # the workers meet it too, and say it properly
                importlib.import_module(name)
    gc.freeze()  # a collection would write to the pages that all share
    alone = len(os.listdir("/proc/self/task")) == 1
    template, launcher, pids = os.getpid(), os.getppid(), []
    for place in plan["workers"]:
        pid = os.fork()
        if pid == 0:
            _take_place(place, plan)
            # No deadline of its own: the launcher has one for us all, and kills us past it.
            while os.getppid() == template:
                time.sleep(0.001)
            if not alone:
                os.execv(sys.executable, sys.orig_argv)
            return launcher
        pids.append(pid)
    with os.fdopen(plan["answer"], "w") as answer:
        json.dump(pids, answer)
    os._exit(0)


def be_watched(rank: int, board: Board) -> None:
    """Go on in a child. This process waits for its end, writes it on the board and follows.

    WHY: when a rank dies, mpiexec kills the others at once and then names any of them. It learns of
    a death by the end of that rank's PMI socket, which this process holds open until it has
    written: so who was first, and how it ended, is known before another can be killed.
    """
    alone = len(os.listdir("/proc/self/task")) == 1  # see become_worker
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)
    watcher, worker = os.getpid(), os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process.die_with_parent(watcher)
        if not alone:
            os.execve(sys.executable, sys.orig_argv, os.environ | {WATCHED: "1"})
        return
    for number in _ASKED:
        signal.signal(number, signal.SIG_IGN)
    process.show_as(f"manyhands-{rank}-w")
    # No deadline: a worker may run for weeks. The launcher ends both.
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    code_shown = code if code >= 0 else 128 - code
    if code and board.state(rank) not in (FAILED, DEAD):
        when = ", after its work was done" if board.state(rank) == DONE else ""
        board.set_state(rank, DEAD, process.what_ended(code) + when, code=code_shown)
    os._exit(code_shown)


def _take_place(place: dict[str, Any], plan: dict[str, Any]) -> None:
    """The worker's own environment and output; what belongs to the others is closed."""
    os.environ.update(place["env"])
    np.random.seed()  # Python's generator has seen the fork; numpy's would be the same on all
    for mine, stream in zip(place["output"], (1, 2), strict=False):
        os.dup2(mine, stream)
    for fd in plan["close"]:
        os.close(fd)
    for fd in plan["keep"]:
        if place["env"]["MANYHANDS_RANK"] != "0":
            os.close(fd)


def _run_one(program: Callable[[], Any], rank: int, board: Board | None, places: str) -> int:
    try:
        _return(rank, program(), places)
    except SystemExit as leave:
        return _exit_code(leave, rank, board)
    except BaseException as error:
        _report(error, rank, board)
        return 1
    worker = process.current()
    if worker is not None:
        worker.close()
    elif board is not None:
        board.set_state(rank, DONE)
    return 0


def _report(error: BaseException, rank: int, board: Board | None) -> None:
    worker = process.current()
    if worker is not None:
        worker.fail(error)
    elif board is not None:
        text = "failed:\n" + "".join(traceback.format_exception(process.trim(error)))
        board.set_state(rank, FAILED, text, code=1, secondary=isinstance(error, CollectiveError))
    if board is None:  # nobody will print it for us
        who = worker.place.name if worker is not None else f"worker {rank}"
        print(f"manyhands: {who} (pid {os.getpid()}) failed:", file=sys.stderr)
        traceback.print_exception(process.trim(error))
    if worker is not None:
        worker.abandon()


def _exit_code(leave: SystemExit, rank: int, board: Board | None) -> int:
    code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
    worker = process.current()
    if code == 0:
        if worker is not None:
            worker.close()
        return 0
    if isinstance(leave.code, str):
        print(leave.code, file=sys.stderr)
    if board is not None and board.state(rank) <= RUNNING:
        board.set_state(rank, FAILED, f"left with exit code {leave.code}", code=code,
                        secondary=code == STOPPED)  # fmt: skip
    if worker is not None:
        worker.abandon()
    return code


def _run_inline(program: Callable[[], Any], size: int, board: Board | None, places: str) -> int:
    world = inline.World(size, timeout_from(None))
    if board is not None:
        for rank in range(size):
            board.enter(rank)
        world.on_turn = board.set_turn
        threading.Thread(target=_watch_baton, args=(world, board), daemon=True).start()
    try:
        for rank, value in enumerate(world.run(program)):
            _return(rank, value, places)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as leave:
        return _exit_code(leave, 0, board)
    except WorkerError as error:
        if board is not None:
            board.set_state(error.rank, FAILED, error.what, code=error.exit_code)
        else:
            print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _watch_baton(world: inline.World, board: Board) -> None:
    """End the run when one worker keeps the others waiting past the deadline.

    Inside the engine nobody can notice: only the holder of the baton runs. A person in a debugger
    is left alone.
    """
    seen, patience = -1, Patience(world.timeout)
    while world.timeout > 0:
        time.sleep(min(0.2, world.timeout / 10))
        if world.turns != seen or world.size == 1 or "pdb" in sys.modules:
            seen, patience = world.turns, Patience(world.timeout)
        elif patience.over:
            rank = world.turn
            frame = sys._current_frames().get(world.threads[rank] or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            text = (
                f"kept the others waiting for more than {world.timeout:g} s, its deadline. If it "
                f"needs that long, allow it more: --timeout SECONDS. It is here:\n{stack}"
            )
            board.set_state(rank, FAILED, text, code=1)
            os._exit(1)


def _return(rank: int, value: Any, places: str) -> None:
    """Give the function's value to the launcher, if it asked for one and is on this host."""
    if places and value is not None:
        with open(places.split(",")[rank], "r+b") as file:
            file.write(wire.encode(value))


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(STOPPED)


def leave(code: int, engine: str, patience: float | None = None) -> NoReturn:
    """Leave as Python does, up to the point where only C++ destructors are left; with `patience`,
    threads that are not over after so many seconds are left alone.

    WHY not further: torch's gloo threads abort the process now and then when they are destroyed at
    exit, which would turn a run that ended well into one that failed.
    CRUCIAL: mpi goes further. MPICH takes its leave of mpiexec in a handler of C's `exit`, not in
    MPI_Finalize; when the first rank goes without, mpiexec kills those that are still on their way.
    """
    # From here on there is nothing left to unwind: SIGTERM may end us at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code == 0:  # after a failure nobody waits for the user's threads
        process.wait_for_threads(patience)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if engine == "mpi":
        ctypes.PyDLL(None).exit(code)  # PyDLL keeps the interpreter's lock: no thread runs on
    os._exit(code)


if __name__ == "__main__":
    main()
