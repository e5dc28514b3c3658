"""Fixtures shared by all tests: the engines, and the proof that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Before torch or numpy is imported: on small arrays a second BLAS thread only gets in the way.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Ray lets its workers run at the lowest priority but four: beside other tests they would starve.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell that starts something in the background has it ignore Ctrl-C, and so would all that tests
# start, and some of them wait for the answer to it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes: what they import is compiled once, not by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

sys.path.insert(0, os.path.dirname(__file__))  # worker processes find `programs` by this path

import once  # noqa: E402

FIRST = "PYTEST_XDIST_WORKER" not in os.environ  # the process that starts pytest's others
if FIRST:
    once.open_folder()


def pytest_unconfigure() -> None:
    if FIRST:
        once.remove_folder()


# One file is one process's: these take longest, and last they would keep it while others idle.
LONGEST = ("test_docs.py", "test_joined.py", "test_launch_faults.py", "test_async_faults.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector: what is imported for tests stays, and so it is neither looked
    through while it grows nor later; two seconds of processor time in each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


SHM = "/dev/shm"


def engine_params(*engines: str, slow: str = "") -> list[object]:
    marks = {"mpi": [pytest.mark.mpi], "ray": [pytest.mark.ray]}
    if slow:
        marks[slow] = [*marks[slow], pytest.mark.slow]
    return [pytest.param(e, marks=marks.get(e, []), id=e) for e in engines]


ALL_ENGINES = engine_params("inline", "local", "mpi", "ray", "torch")
PROCESS_ENGINES = engine_params("local", "mpi", "ray", "torch")
# Ray takes seconds to start: for what differs little from a test that runs on it anyway.
SOME_ENGINES_RAY_LATER = engine_params("inline", "local", "ray", slow="ray")


# Every process that a test starts inherits this mark, however far it runs away.
MARK = f"MANYHANDS_TEST={os.getpid()}-{time.time_ns()}"
os.environ["MANYHANDS_TEST"] = MARK.partition("=")[2]


def ours() -> set[int]:
    """Processes that carry our mark, but for this one and zombies."""
    name, _, value = MARK.partition("=")
    return {pid for pid in psutil.pids() if pid != os.getpid() and set_in(pid, name) == value}


def set_in(pid: int, variable: str) -> str | None:
    """An environment variable of a process; None where it has none, has ended, or is not ours."""
    try:  # by hand: psutil takes apart all variables of all processes, a thousand times a run
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    _, found, rest = (b"\0" + text).partition(f"\0{variable}=".encode())
    return rest.partition(b"\0")[0].decode() if found else None


def rank_of(pid: int) -> int | None:
    """Which worker a process is, by its name in `ps`; None where it is none."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    mark, _, rank = name.partition("-")
    return int(rank) if mark == "manyhands" and rank.isdigit() else None


def worker_process(rank: int) -> int:
    """The process of that worker, among those that tests have started."""
    for pid in ours():
        if rank_of(pid) == rank:
            return pid
    raise AssertionError(f"no process of worker {rank}")


def listening(pids: set[int]) -> set[str]:
    """TCP sockets on which any of these processes listens."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(f"{one.laddr.ip}:{one.laddr.port}")
    return found


def shared_memory() -> set[str]:
    return set(os.listdir(SHM)) if os.path.isdir(SHM) else set()


def left_behind(names: set[str]) -> set[str]:
    """Those shared-memory files that no living process has mapped: another test may run now."""
    for pid in psutil.pids() if names else ():
        try:  # by hand: psutil reads smaps, for which the kernel counts every page
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        names = {name for name in names if f"{SHM}/{name}" not in text}
    return names & shared_memory()


def descriptors() -> Counter[str]:
    """What this process has open, by what it is: numbers of sockets and pipes are their own."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the folder itself, closed by now
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


# What a process opens once and keeps, whoever was the first to need it
KEPT_OPEN = ("/dev/", "/proc/", "anon_inode:", "/sys/", str(Path.home() / ".cache"))


def still_open(before: Counter[str]) -> list[str]:
    """Files, sockets and pipes that were not open before, but for those of libraries: a driver of
    Ray leaves its own to the end of its process."""
    ray = ("socket:", f"{tempfile.gettempdir()}/mh-ray") if "ray" in sys.modules else ()
    return [name for name in descriptors() - before if not name.startswith((*KEPT_OPEN, *ray))]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test: no process, no shared-memory file, no port and no open file, socket or pipe
    that was not there before."""
    ports, memory, files_before = listening({os.getpid()}), shared_memory(), descriptors()
    yield
    deadline = time.monotonic() + 20.0  # long, for busy machines: it ends when all is well
    while True:
        # Looked at once: what another run makes after that is not ours, and it may be caught
        # between making a file and mapping it.
        left, files = ours(), left_behind(shared_memory() - memory)
        if opened := still_open(files_before):
            gc.collect()  # a Popen whose pipes nobody has closed; what still refers to it stays
            opened = still_open(files_before)
        if not (left or files or opened) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left, f"processes left: {[_command(pid) for pid in left]}"
    assert not listening({os.getpid()}) - ports
    assert not files
    assert not opened, f"still open: {opened}"


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())}"
    return str(pid)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three hosts (hosts.py): made once a process, and always removed."""
    from hosts import Cluster, NotPermitted

    try:
        cluster = Cluster(tmp_path_factory.mktemp("hosts")).__enter__()
    except NotPermitted as reason:
        pytest.skip(str(reason))
    with cluster:
        yield cluster


def skipped_in_one_line(reasons: list[str]) -> str:
    """How many tests were skipped, why, and what to type to have them, where the reason says it."""
    told = [f"{count}: {reason}" for reason, count in Counter(reasons).most_common()]
    return f"{len(reasons)} skipped ({' | '.join(told)})" if told else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after all that pytest itself has to say
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    result = yield
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports]
    if reasons:
        terminalreporter.write_line(skipped_in_one_line(reasons), yellow=True)
    return result
