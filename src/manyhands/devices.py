"""What a worker computes with: its GPU, and its threads on the CPU.

A worker's GPU is number *local rank modulo number of GPUs* of its machine. Learners come before
actors in the order of ranks, so the local rank of a learner is its number among those that learn on
its machine, and actors, which act on the CPU, leave no GPU out.

BLAS, OpenMP and torch have one thread a worker, unless the user has chosen. A process that is about
to start reads it from variables, before it loads numpy and torch. One that runs already, as on the
inline engine from Python, is limited while a run lasts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from manyhands.engines.base import Place

# Pretend that the machine has so many GPUs: names are given out, and everything is computed on the
# CPU. To see who would get what, before a machine with GPUs is paid for, and for tests.
SIMULATED = "MANYHANDS_SIMULATED_GPUS"


class Seat(NamedTuple):
    """Where one worker computes."""

    who: str  # "worker 1", "learner 0"
    host: str
    device: str


def name(choice: str, local_rank: int, gpus: int) -> str:
    """`cuda:1`, or `cpu` where that is the choice or there is no GPU."""
    return f"cuda:{local_rank % gpus}" if choice != "cpu" and gpus else "cpu"


def seat(choice: str, place: Place, who: str = "") -> Seat:
    """Of the worker that stands there."""
    gpus = usable() if choice != "cpu" else 0
    return Seat(who or f"worker {place.rank}", place.host, name(choice, place.local_rank, gpus))


def usable() -> int:
    """GPUs that this process may use: those that torch sees, or fewer where --gpus said so."""
    import torch  # slow to import: only when it is asked about

    simulated = os.environ.get(SIMULATED, "")
    present = int(simulated) if simulated else torch.cuda.device_count()
    return min(present, int(os.environ.get("MANYHANDS_GPUS", present)))


def to_compute_on(device: str) -> torch.device:
    import torch

    return torch.device("cpu" if os.environ.get(SIMULATED) else device)


def present() -> int:
    """GPUs that a worker started here would see, without importing torch."""
    if os.environ.get(SIMULATED):
        return int(os.environ[SIMULATED])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def described(seats: Sequence[Seat]) -> str:
    """`cuda:0, shared by workers 0 and 2; cuda:1, worker 1`: for the start table."""
    if len(seats) == 1 or all(seat.device == "cpu" for seat in seats):
        return seats[0].device
    several_hosts = len({seat.host for seat in seats}) > 1
    sharing: dict[str, list[str]] = {}
    for seat in seats:
        where = f"{seat.device} on {seat.host}" if several_hosts else seat.device
        sharing.setdefault(where, []).append(seat.who)
    return "; ".join(f"{where}, {_together(who)}" for where, who in sharing.items())


def _together(who: list[str]) -> str:
    """`worker 1`, or `shared by workers 0 and 2`; all of them have one role."""
    if len(who) == 1:
        return who[0]
    role, numbers = who[0].rpartition(" ")[0], [one.rpartition(" ")[2] for one in who]
    return f"shared by {role}s {', '.join(numbers[:-1])} and {numbers[-1]}"


# -- threads ---------------------------------------------------------------------------------------


THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def threads_chosen_by_user() -> bool:
    """Whether the user has said how many, for this process and those that it starts."""
    return "OMP_NUM_THREADS" in os.environ


@contextmanager
def one_thread() -> Iterator[None]:
    """One in this process; then everything as it was before.

    WHY: the products of small networks take less time than the threads need to meet; on two busy
    cores 12,288 steps of PPO took ten times the processor time.
    """
    if threads_chosen_by_user():
        yield
        return
    import numpy  # noqa: F401 (its BLAS must be there to be told)
    import torch
    from threadpoolctl import ThreadpoolController

    before, known = torch.get_num_threads(), ThreadpoolController()
    others = {library.filepath for library in known.lib_controllers}
    unset = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, "1"))  # for libraries that an environment loads
    try:
        with known.limit(limits=1):
            torch.set_num_threads(1)
            yield
    finally:
        for name in unset:
            del os.environ[name]
        torch.set_num_threads(before)
        for library in ThreadpoolController().lib_controllers:
            if library.filepath not in others:  # as it would have begun, had we not been there
                library.set_num_threads(before)


def one_thread_here() -> None:
    """OpenMP's number belongs to the thread that asks: for a thread inside `one_thread`."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        from threadpoolctl import threadpool_limits

        threadpool_limits(limits=1, user_api="openmp")
