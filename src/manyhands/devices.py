"""Which GPU a worker takes: number *local rank modulo number of GPUs* of its machine.

Learners come before actors in the order of ranks, so the local rank of a learner is its number
among those that learn on its machine, and actors, which act on the CPU, leave no GPU out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
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
