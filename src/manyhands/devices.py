"""What a worker computes with: its GPU, graphs of kernels there, and its threads on the CPU.

A worker's GPU is number *local rank modulo number of GPUs* of its machine. Learners come before
actors in the order of ranks, so the local rank of a learner is its number among those that learn on
its machine, and actors, which act on the CPU, leave no GPU out.

BLAS, OpenMP and torch have one thread a worker, unless the user has chosen. A process that is about
to start reads it from variables, before it loads numpy and torch. One that runs already, as on the
inline engine from Python, is limited while a run lasts.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from manyhands.errors import ConfigError

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


# -- CUDA graphs, and memory -----------------------------------------------------------------------


class Captured:
    """Calls `function`, which takes nothing, reads nothing back and works on tensors that stay
    where they are. On a GPU, from its third call on, as one CUDA graph: hundreds of small kernels
    then cost one call. Where it cannot be captured it is called as before, and `say` hears why.

    Args:
        function: what to call.
        device: of its tensors.
        generators: that it draws from, other than torch's own.
        name: what it is, in words.
        say: called with the reason, once, when there is no graph.
        capture: makes a graph of a function; what is returned replays it.
    """

    PLAIN = 2  # calls before the capture: kernels are chosen and memory is found in the first ones

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        generators: Sequence[torch.Generator],
        name: str,
        say: Callable[[str], None],
        capture: Callable[..., Callable[[], None]] | None = None,
    ) -> None:
        self._function, self._device, self._name, self._say = function, device, name, say
        self._generators, self._capture = tuple(generators), capture or _cuda_graph
        self._left = self.PLAIN if device.type == "cuda" or capture else -1  # -1: never
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._replay is not None:
            self._replay()
            return
        if self._left == 0:
            self._left = -1
            try:
                self._replay = self._capture(self._function, self._generators)
            except RuntimeError as error:  # nothing has run: in a capture kernels are only noted
                reason = str(error).strip().partition("\n")[0]
                self._say(f"the {self._name} is no CUDA graph, and slower for it: {reason}")
            else:
                self._replay()
                return
        self._left -= self._left > 0
        if self._left >= 0 and self._device.type == "cuda":
            _beside(self._function)
        else:
            self._function()


def _beside(function: Callable[[], None]) -> None:
    """In a stream of its own, as the calls before a capture have to be."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


def _cuda_graph(
    function: Callable[[], None], generators: Sequence[torch.Generator]
) -> Callable[[], None]:
    import torch

    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # Of the same priority as those that are called: a graph's kernels have that of its capture.
    stream = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


@contextmanager
def repeatable() -> Iterator[None]:
    """Convolutions whose gradients are summed in one order, so that a run repeats to the bit."""
    from torch.backends import cudnn

    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        yield
    finally:
        cudnn.deterministic = before


@contextmanager
def said_what_fits(device: torch.device, rows: int, options: object) -> Iterator[None]:
    """An error where a GPU's memory runs out inside: it names the rows at once that would fit, and
    how these options ask for them."""
    import torch

    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        room = free + torch.cuda.memory_reserved(device) - before
        used = torch.cuda.max_memory_allocated(device) - before
        fitting = rows_that_fit(rows, room, used + _asked_for(str(error)))
        raise ConfigError(
            f"{rows:,} rows at once do not fit into the memory of {device} ({total / 2**30:.1f} "
            f"GiB, {room / 2**30:.1f} of them free for it); "
            + (
                f"type: --minibatch {fitting}"
                if hasattr(options, "minibatch")
                else f"choose --num-envs and --rollout-length for {fitting:,} at most"
            )
        ) from error


def rows_that_fit(rows: int, room: float, needed: float) -> int:
    """A power of two of rows that find room, where `rows` of them needed more than there is.

    WHY half: what was needed is known up to the point only at which it failed.
    """
    fitting = rows * min(1.0, room / max(needed, 1.0)) / 2
    return int(2 ** max(0, math.floor(math.log2(max(1.0, fitting)))))


def _asked_for(text: str) -> float:
    """Bytes that the allocation which failed was for, as its error says."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB)", text)
    units = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
    return float(found[1]) * units[found[2]] if found else 0.0


# -- threads, and memory of the CPU ----------------------------------------------------------------


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h

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


def keep_memory() -> None:
    """Whatever the C library's malloc has, it keeps. For processes that make and drop tensors of
    megabytes: given back and asked for again, every page of them is cleared by the system each
    time, a third of the time that a gradient of a convolution takes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)  # nothing gets a mapping of its own, which is unmapped when freed
        mallopt(_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While large packages are imported: what they make stays, and looking through it again and
    again is an eighth of the processor time that `import torch` takes, in every worker."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
