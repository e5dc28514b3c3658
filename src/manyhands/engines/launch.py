"""Start N workers, on any engine: a script with its arguments, or a function by name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from manyhands import devices, wire
from manyhands import roles as parts
from manyhands.engines import ENGINES, calls, inline, stopping
from manyhands.engines.base import DEFAULT_TIMEOUT, seconds
from manyhands.engines.process import what_ended
from manyhands.engines.recovery import Recovery
from manyhands.engines.shared import Board, Segment
from manyhands.engines.supervisor import Seat, Supervisor, label
from manyhands.errors import ConfigError, Stopped, SupportError, install, needs

# An outer launcher's own variables would tell a worker that it is somebody else.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Job:
    """What to start, and how."""

    workers: int
    engine: str = "local"
    script: str = ""
    args: tuple[str, ...] = ()
    call: str = ""  # instead of a script: a function by name (calls.pack)
    timeout: float = DEFAULT_TIMEOUT
    debug: bool = False
    gpus: int | None = None
    threads: int | None = None
    address: str = ""  # of a running Ray cluster
    results: bool = False
    roles: str = ""  # who plays which part, ranks in that order: actor=2,learner=2
    recovery: Recovery = field(default_factory=Recovery)  # when a worker fails (local, ray)
    graceful: bool = False  # asked to end by a first signal, ended by a second; see stopping.py
    preload: tuple[str, ...] = ()  # modules that all workers need, imported once where they fork


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    engine: str = "local",
    timeout: float = DEFAULT_TIMEOUT,
    roles: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Run a function on N workers; what each returned, by rank.

    The function finds its place with `Parallel()`. It and its arguments travel by name and as
    plain data (numbers, strings, lists, dicts, arrays). With `roles`, such as
    "actor=2,learner=2", there are as many workers as these say. Raises WorkerError with the
    original traceback when a worker fails.
    """
    if calls.importing_main:
        raise ConfigError(
            "launch() was reached while a worker imported your script. Put the call under a main "
            'guard: if __name__ == "__main__":'
        )
    given = parts.parse(roles) if roles else None
    workers = workers if given is None else given.size
    if engine == "inline":
        check(Job(workers=workers, engine=engine, call="-", timeout=timeout))
        return inline.run(lambda: function(*args, **kwargs), workers, timeout, given)
    job = Job(workers=workers, engine=engine, timeout=timeout, results=True, roles=roles)
    preload = ("torch",) if _has_torch(function) else ()
    return run(replace(job, call=calls.pack(function, args, kwargs), preload=preload))


def _has_torch(function: Callable[..., Any]) -> bool:
    """Whether the module of a function, which all workers will import, has imported torch."""
    names = vars(sys.modules.get(function.__module__, sys)).values()
    return any(isinstance(n, ModuleType) and n.__name__.split(".")[0] == "torch" for n in names)


def run(job: Job) -> list[Any]:
    """Start the job and wait for its end. WorkerError, ConfigError or SupportError on failure."""
    check(job)
    if job.engine == "ray":
        return _run_ray(job)
    host = socket.gethostname()
    board = Board(job.workers)
    results = [Segment(0) for _ in range(job.workers)] if job.results else []
    env = _environment(job, board)
    if results:
        env["MANYHANDS_RESULTS"] = ",".join(s.address for s in results)
    with Supervisor(board, host) as supervisor, stopping.graceful(job.graceful, board):
        supervisor.recovery = job.recovery
        _START[job.engine](job, env, supervisor)
        supervisor.wait()
    return [_result(segment) for segment in results]


def check(job: Job) -> None:
    """Everything that can be wrong before anything starts."""
    if job.engine not in ENGINES:
        raise ConfigError(f"engine {job.engine!r}: engines are {', '.join(ENGINES)}")
    if job.roles and parts.parse(job.roles).size != job.workers:
        raise ConfigError(
            f"roles {job.roles} are {parts.parse(job.roles).size} workers, and there are to be "
            f"{job.workers}"
        )
    if job.workers < 1:
        raise ConfigError(f"-n {job.workers}: at least 1 worker is needed; type: -n 1")
    if not job.call and not os.path.isfile(job.script):
        what = "is a folder, not a script" if os.path.isdir(job.script) else "does not exist"
        raise ConfigError(f"script {job.script!r} {what} (looked from {os.getcwd()})")
    seconds("--timeout", job.timeout)
    if job.gpus is not None:
        present = devices.present()
        if job.gpus > present:
            raise ConfigError(
                f"--gpus {job.gpus}: this machine has {present}; type: --gpus {present}"
            )
    if job.engine == "mpi":
        _mpiexec()


def threads_per_worker(workers: int, call: str = "") -> int:
    """One torch/BLAS thread each by default: more fight over the cores (the commonest hidden cause
    of a parallel run that is slower than a serial one). A script that is alone gets all cores."""
    return (os.cpu_count() or 1) if workers == 1 and not call else 1


def _environment(job: Job, board: Board) -> dict[str, str]:
    threads = job.threads or threads_per_worker(job.workers, job.call)
    env = dict(os.environ)
    for name in _FOREIGN:
        env.pop(name, None)
    for name in devices.THREAD_VARIABLES:
        if job.threads or name not in os.environ:
            env[name] = str(threads)
    for name in (parts.VARIABLE, "MANYHANDS_RESTARTS"):
        env.pop(name, None)
    if job.roles:
        env[parts.VARIABLE] = job.roles
    env.update(
        MANYHANDS_ENGINE=job.engine,
        MANYHANDS_LAUNCHED="1",
        MANYHANDS_SIZE=str(job.workers),
        MANYHANDS_LOCAL_SIZE=str(job.workers),
        MANYHANDS_TIMEOUT=str(job.timeout),
        MANYHANDS_BOARD=Board.token(board.address),
        MANYHANDS_GRACEFUL="1" if job.graceful else "0",
        MANYHANDS_DEBUG="1" if job.debug else os.environ.get("MANYHANDS_DEBUG", "0"),
    )
    if job.gpus is not None:
        env["MANYHANDS_GPUS"] = str(job.gpus)
    if job.call:
        env["MANYHANDS_CALL"] = job.call
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return env


def _command(job: Job) -> list[str]:
    command = [sys.executable, "-m", "manyhands.engines.worker"]
    return command if job.call else [*command, job.script, *job.args]


def _start_processes(
    job: Job, env: dict[str, str], supervisor: Supervisor, pass_fds: tuple[int, ...] = ()
) -> None:
    """One process a worker. The main worker has the terminal; the others' lines are labelled.

    A notebook shows what its kernel writes, and no more: there the main worker's output goes
    through us too, as it is.
    """
    notebook = type(sys.stdout).__module__.startswith("ipykernel")
    seats = [
        Seat(
            rank,
            {"MANYHANDS_RANK": str(rank), "MANYHANDS_LOCAL_RANK": str(rank)}
            | ({"MANYHANDS_NOTEBOOK": "1"} if notebook else {}),
            piped=rank > 0 or notebook,
            restart=rank in job.recovery.ranks,
        )
        for rank in range(job.workers)
    ]
    if job.workers > 1 and sys.platform.startswith("linux"):
        children = supervisor.fork(_command(job), env, seats, job.preload, pass_fds)
    else:
        children = [
            supervisor.start(
                _command(job),
                env | seat.env,
                [seat.rank],
                pass_fds=pass_fds if seat.rank == 0 else (),
                piped=seat.piped,
                restart=seat.restart,
            )
            for seat in seats
        ]
    given = parts.from_environment(job.workers, env)
    for seat, child in zip(seats, children, strict=True):
        if seat.piped:
            part = given.of(seat.rank)
            who = f"{part.role} {seat.rank if part.role == 'worker' else part.rank}"
            mark = label(who) if seat.rank > 0 else None
            supervisor.pass_on(child, mark, mark)


def _start_local(job: Job, env: dict[str, str], supervisor: Supervisor) -> None:
    from manyhands.engines.local.transport import control_size

    supervisor.keep = Segment(control_size(job.workers))
    env["MANYHANDS_CONTROL"] = supervisor.keep.address
    _start_processes(job, env, supervisor)


def _start_torch(job: Job, env: dict[str, str], supervisor: Supervisor) -> None:
    # WHY a socket and not a port number: a number may be taken by somebody else before worker 0
    # binds it; an inherited listening socket cannot. It listens on loopback only.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env["MANYHANDS_MASTER"] = f"127.0.0.1:{listener.getsockname()[1]}"
        env["MANYHANDS_MASTER_FD"] = str(listener.fileno())
        if job.call:  # a script may have something to say about how torch is imported
            job = replace(job, preload=job.preload or ("torch",))
        _start_processes(job, env, supervisor, (listener.fileno(),))


def _start_inline(job: Job, env: dict[str, str], supervisor: Supervisor) -> None:
    supervisor.start(
        _command(job),
        env,
        list(range(job.workers)),
        explain=lambda code: (supervisor.board.turn, what_ended(code)),
    )


def _start_mpi(job: Job, env: dict[str, str], supervisor: Supervisor) -> None:
    child = supervisor.start(
        [_mpiexec(), "-n", str(job.workers), *_command(job)],
        env,
        list(range(job.workers)),
        piped=True,
        # mpiexec answers Ctrl-C by killing all: it must not hear of one that only asks.
        own_group=job.graceful,
        # Of a worker that ends, the board has how (worker.be_watched): this is mpiexec itself.
        explain=lambda code: (0, f"{what_ended(code)}, or mpiexec did"),
    )
    supervisor.pass_on(child, _without_banner(), _without_banner())


def _without_banner() -> Callable[[bytes], bytes]:
    """mpiexec announces a death in a banner, its last words: left out, and said in our own."""
    begun = False

    def keep(line: bytes) -> bytes:
        nonlocal begun
        begun = begun or line.startswith(b"=====") or b"MPI_Abort(" in line
        return b"" if begun else line

    return keep


def _mpiexec() -> str:
    """mpiexec of the environment we run in, else the one on the PATH."""
    if importlib.util.find_spec("mpi4py") is None:
        raise needs("mpi4py", "mpi")
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.path.exists(beside) else shutil.which("mpiexec")
    if found is None:
        raise SupportError(
            f"no mpiexec found; type: {install('mpi')} (mpi4py and mpich), or load your cluster's "
            "MPI module"
        )
    return found


def _run_ray(job: Job) -> list[Any]:
    board = Board(job.workers)
    env = {k: v for k, v in _environment(job, board).items() if k.startswith("MANYHANDS_")}
    threads = job.threads or threads_per_worker(job.workers, job.call)
    env |= dict.fromkeys(devices.THREAD_VARIABLES, str(threads))
    script = os.path.abspath(job.script) if job.script else ""
    try:
        return _ray_asked_first(job, board, env, script)
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT) from None
    except SystemExit:  # Ray's own answer to SIGTERM
        raise Stopped(signal.SIGTERM) from None


def _ray_asked_first(job: Job, board: Board, env: dict[str, str], script: str) -> list[Any]:
    from manyhands.engines.ray import core as ray_core

    with stopping.graceful(job.graceful, board, through_ray=True) as soft:
        # Before Ray starts: its session keeps handlers that are there already.
        try:
            return ray_core.run(
                workers=job.workers,
                run_worker="manyhands.engines.worker:run_payload",
                payload={"script": script, "args": list(job.args), "call": job.call},
                timeout=job.timeout,
                env=env,
                address=job.address,
                recovery=job.recovery,
            )
        except BaseException:
            if soft is not None and soft.over:  # Ray's own code turns it into something else
                raise Stopped(soft.asked) from None
            raise


def _result(segment: Segment) -> Any:
    data = segment.read_all()
    return wire.decode(data) if data else None


_START: dict[str, Callable[[Job, dict[str, str], Supervisor], None]] = {
    "local": _start_local,
    "torch": _start_torch,
    "inline": _start_inline,
    "mpi": _start_mpi,
}
