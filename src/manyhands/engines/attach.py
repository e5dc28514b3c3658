"""How was this process started? Detected, not declared.

plain python            1 worker, nothing needed
manyhands launch        MANYHANDS_ENGINE, _RANK, _SIZE ...
torchrun                RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
mpiexec (MPICH, Intel)  PMI_RANK, PMI_SIZE
mpiexec (Open MPI)      OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
srun                    SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping

from manyhands import devices, roles, terminal
from manyhands.engines import ENGINES, inline, process
from manyhands.engines.base import DEFAULT_TIMEOUT, Place, Worker, seconds
from manyhands.errors import ConfigError


def attach(timeout: float | None = None) -> Worker:
    """This process's (or inline thread's) worker; made at the first call, the same ever after."""
    here = inline.current()
    if here is not None:
        return here
    known = process.current()
    if known is not None:
        return known
    place = detect(os.environ)
    limit = timeout_from(timeout)
    if place.size == 1 and place.engine != "torch":
        return inline.solo(limit)
    with devices.no_garbage_collection():
        module = importlib.import_module(f"manyhands.engines.{place.engine}")
    terminal.whole_lines()
    if not place.is_main and not _labelled_by_launcher(place):
        number = place.rank if place.role == "worker" else place.role_rank
        terminal.label_lines(f"{place.role} {number}")
    worker: Worker = module.attach(place, limit)
    return worker


def _labelled_by_launcher(place: Place) -> bool:
    """Whether somebody else says whose line it is: Ray, or `manyhands launch` where each worker is
    a process of its own; mpiexec and torchrun mix all lines."""
    launched = os.environ.get("MANYHANDS_LAUNCHED") == "1"
    return place.engine == "ray" or (launched and place.engine != "mpi")


def timeout_from(timeout: float | None) -> float:
    if timeout is not None:
        return seconds("timeout", timeout)
    text = os.environ.get("MANYHANDS_TIMEOUT", "")
    try:
        return seconds("MANYHANDS_TIMEOUT", float(text) if text else DEFAULT_TIMEOUT)
    except ValueError:
        raise ConfigError(f"MANYHANDS_TIMEOUT={text!r} is not a number of seconds") from None


def detect(env: Mapping[str, str]) -> Place:
    """Engine, rank and size from the variables that each launcher sets."""
    if env.get("MANYHANDS_ENGINE"):
        engine = env["MANYHANDS_ENGINE"]
        if engine not in ENGINES:
            raise ConfigError(f"MANYHANDS_ENGINE={engine!r}; engines are {', '.join(ENGINES)}")
        if engine == "mpi":
            return _mpi(env)
        return _place(engine, env, "MANYHANDS_RANK", "MANYHANDS_SIZE", "MANYHANDS_LOCAL_RANK",
                      "MANYHANDS_LOCAL_SIZE")  # fmt: skip
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        return _place("torch", env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "PMI_RANK" in env or "OMPI_COMM_WORLD_RANK" in env:
        return _mpi(env)
    # WHY the step's variables too: inside `sbatch` or `salloc`, a plain `python` has SLURM_PROCID=0
    # and SLURM_NTASKS=N of the job, yet is alone. Only srun gives more than one task to a step.
    if "SLURM_PROCID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _place("torch", env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                      "SLURM_NTASKS_PER_NODE")  # fmt: skip
    return Place()


def _mpi(env: Mapping[str, str]) -> Place:
    if "OMPI_COMM_WORLD_RANK" in env:
        return _place("mpi", env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                      "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")  # fmt: skip
    return _place("mpi", env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _place(
    engine: str, env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str
) -> Place:
    def number(name: str, default: int) -> int:
        return _number(env, name, default)

    r, n = number(rank, 0), number(size, 1)
    if not 0 <= r < n:
        raise ConfigError(f"{rank}={r} with {size}={n}: ranks go from 0 to {size} - 1")
    part = roles.from_environment(n, env).of(r)
    return Place(
        engine=engine,
        rank=r,
        size=n,
        local_rank=number(local_rank, r),
        local_size=number(local_size, n),
        role=part.role,
        role_rank=part.rank,
        role_size=part.size,
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    digits = re.fullmatch(r"(\d+)(\(x\d+\)(,.*)?)?", text)  # SLURM writes `4(x2)` for some
    if text and not digits:
        raise ConfigError(f"{name}={text!r} is not a number; who started this process?")
    return int(digits.group(1)) if digits else default
