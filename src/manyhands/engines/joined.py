"""One run on workers that a launcher has started, each of which runs the whole command.

    mpiexec -n 4 manyhands train ...          torchrun --nproc-per-node 4 -m manyhands train ...

All come with the same words. The main worker decides what only one may decide (which folder, its
lock, the checkpoint to resume from) and tells the others; then all are workers of one run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from manyhands.engines import inline, process, worker
from manyhands.engines.attach import detect
from manyhands.engines.base import Place
from manyhands.engines.group import Group
from manyhands.errors import ConfigError

# Checked in this order, which is that of `detect`.
_LAUNCHERS = {
    "MANYHANDS_ENGINE": "manyhands launch",
    "MASTER_ADDR": "torchrun",
    "PMI_RANK": "mpiexec",
    "OMPI_COMM_WORLD_RANK": "mpiexec",
    "SLURM_PROCID": "srun",
}

_SPEECH_SECONDS = 5.0  # for a main worker on a busy machine to say what is wrong


def place_in(engine: str | None) -> Place | None:
    """Where this process stands among the workers of a launcher; None when it starts its own.

    It does so when it is alone, and when `engine` asks for a run in this very process: many
    independent runs under one mpiexec are a fine thing. None as `engine` asks for nothing.
    """
    here = inline.current()
    place = here.place if here is not None else detect(os.environ)
    private = engine == "inline" and place.engine != "inline"
    return place if place.size > 1 and not private else None


def defaults(engine: str | None) -> dict[str, Any]:
    """Options that a launcher has decided, unless they were typed."""
    place = place_in(engine)
    return {} if place is None else {"engine": place.engine, "workers": place.size}


def faults(engine: str, workers: int) -> Iterator[str]:
    """What was typed against what was started."""
    place = place_in(engine)
    if place is None:
        return
    who = launcher(os.environ)
    if engine != place.engine:
        yield (
            f"{who} has started {place.size} workers of the {place.engine} engine, and --engine "
            f"says {engine}; leave --engine out, or start this command without {who}"
        )
    if workers != place.size:
        yield (
            f"{who} has started {place.size} workers, and --workers says {workers}; leave "
            f"--workers out, or let {who} start {workers}"
        )


def launcher(env: Mapping[str, str]) -> str:
    """What has started this process, as it is typed."""
    return next((name for sign, name in _LAUNCHERS.items() if sign in env), "python")


def is_main() -> bool:
    """Whether this process is the one that speaks: alone, or the first that was started."""
    try:
        place = place_in(None)
    except ConfigError:  # the launcher's variables make no sense, which has to be said
        return True
    return place is None or place.is_main


@contextlib.contextmanager
def main_speaks() -> Iterator[None]:
    """What every worker would say alike is said once."""
    with contextlib.ExitStack() as stack:
        if not is_main():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def let_main_speak() -> None:
    """Before a worker leaves that has found what every worker finds alike.

    WHY: torchrun ends all others with the first that fails, and so would cut off the main worker's
    words. The first that leaves is the main one: on its machine nobody waits any longer.
    """
    place, deadline, most = place_in(None), time.monotonic() + _SPEECH_SECONDS, 0
    while time.monotonic() < deadline:
        here = _started_here()
        most = max(most, here)
        # mpiexec lets the others be, and uses a whole core for as long as some of them are left.
        expected = place.local_size if place is not None and place.engine == "mpi" else most
        if here < expected:
            return
        time.sleep(0.1)


def _started_here() -> int:
    """How many of the launcher's workers run on this machine, this one included."""
    import psutil  # slow to import, and hardly ever needed

    try:
        started = psutil.Process(os.getppid()).children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in started)
    except psutil.Error:  # the launcher itself has gone, or one of them just now
        return 0


def main_decides(group: Group, decide: Callable[[], Any]) -> Any:
    """What `decide` gives on the main worker (plain data), on all; so with a ConfigError."""
    said: dict[str, Any] = {}
    if group.is_main:
        try:
            said = {"value": decide()}
        except ConfigError as error:
            said = {"fault": str(error)}
    said = group.exchange(said)[0]
    if "fault" in said:
        raise ConfigError(said["fault"])
    return said["value"]


def launched_by_us() -> bool:
    """Whether `manyhands launch` is there to answer signals."""
    return os.environ.get("MANYHANDS_LAUNCHED") == "1"


def leave(code: int) -> NoReturn:
    """End a worker that has run a whole command.

    WHY: torch's gloo threads abort the process now and then when they are destroyed at exit.
    """
    place = place_in(None)
    if place is not None:
        worker.leave(code, place.engine, process.THREAD_SECONDS)
    sys.exit(code)
