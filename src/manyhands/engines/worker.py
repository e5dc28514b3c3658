"""What runs in a worker process: `python -m manyhands.engines.worker [script args ...]`.

Started by the launcher, which has set the thread caps and MANYHANDS_* before this interpreter
began. Imports nothing heavy before the user's own code does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, NoReturn

from manyhands import wire
from manyhands.engines import calls, inline, process, stopping
from manyhands.engines.attach import detect, timeout_from
from manyhands.engines.shared import DONE, FAILED, RUNNING, Board
from manyhands.errors import CollectiveError, WorkerError

STOPPED = stopping.STOPPED


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
    process.die_with_parent(os.getppid())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines: workers share a terminal. Under PYTHONUNBUFFERED, too, where `print`
            # writes text and newline apart, and another worker's line may come between them.
            stream.reconfigure(line_buffering=True, write_through=False)
    # WHY ignore: Ctrl-C in a terminal reaches every process; the launcher alone answers it, and
    # ends the workers by SIGTERM, which here unwinds the stack so that `finally` blocks run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    place = detect(os.environ)
    board = process.open_board(place.size)
    if os.environ.get("MANYHANDS_GRACEFUL") == "1" and board is not None:
        stopping.answer_in_worker(board)
    call = os.environ.get("MANYHANDS_CALL", "")
    script, args = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])

    def program() -> Any:
        return run_job(script, args, call)

    if place.engine == "inline":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pdb wants it
        leave(_run_inline(program, place.size, board), place.engine)
    if board is not None:
        board.arrive(place.rank)
    leave(_run_one(program, place.rank, board), place.engine)


def _run_one(program: Callable[[], Any], rank: int, board: Board | None) -> int:
    try:
        _return(rank, program())
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


def _run_inline(program: Callable[[], Any], size: int, board: Board | None) -> int:
    world = inline.World(size, timeout_from(None))
    if board is not None:
        for rank in range(size):
            board.enter(rank)
        world.on_turn = board.set_turn
        threading.Thread(target=_watch_baton, args=(world, board), daemon=True).start()
    try:
        for rank, value in enumerate(world.run(program)):
            _return(rank, value)
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
    seen, since = -1, time.monotonic()
    while world.timeout > 0:
        time.sleep(min(0.2, world.timeout / 10))
        if world.turns != seen or world.size == 1 or "pdb" in sys.modules:
            seen, since = world.turns, time.monotonic()
        elif time.monotonic() - since > world.timeout:
            rank = world.turn
            frame = sys._current_frames().get(world.threads[rank] or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            text = (
                f"kept the others waiting for more than {world.timeout:g} s, its deadline. If it "
                f"needs that long, allow it more: --timeout SECONDS. It is here:\n{stack}"
            )
            board.set_state(rank, FAILED, text, code=1)
            os._exit(1)


def _return(rank: int, value: Any) -> None:
    """Give the function's value to the launcher, if it asked for one and is on this host."""
    places = os.environ.get("MANYHANDS_RESULTS", "")
    if places and value is not None:
        with open(places.split(",")[rank], "r+b") as file:
            file.write(wire.encode(value))


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(STOPPED)


def leave(code: int, engine: str) -> NoReturn:
    """Leave as Python does, up to the point where only C++ destructors are left.

    WHY not further: torch's gloo threads abort the process now and then when they are destroyed at
    exit, which would turn a run that ended well into one that failed.
    CRUCIAL: mpi goes further. MPICH takes its leave of mpiexec in a handler of C's `exit`, not in
    MPI_Finalize; when the first rank goes without, mpiexec kills those that are still on their way.
    """
    # From here on there is nothing left to unwind: SIGTERM may end us at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code == 0:  # after a failure nobody waits for the user's threads
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()  # as the interpreter would: a thread of the user's is his to end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if engine == "mpi":
        ctypes.PyDLL(None).exit(code)  # PyDLL keeps the interpreter's lock: no thread runs on
    os._exit(code)


if __name__ == "__main__":
    main()
