"""A worker that raises, dies or goes silent; Ctrl-C; SIGTERM: on every engine, in seconds."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ALL_ENGINES, ours

import manyhands
from manyhands.errors import SupportError

pytestmark = [pytest.mark.usefixtures("nothing_left")]

SCRIPT = str(Path(__file__).with_name("script.py"))
HOST = socket.gethostname()
# Seconds from the fault to the end of the launch: one or two on a quiet machine. What must not be
# needed to end it is the deadline of the others' wait, and that is 60.
LIMIT = 15.0


class Launch:
    """`manyhands launch` as a person starts it, with its lines as they come."""

    def __init__(self, engine: str, how: str, workers: int = 2, timeout: float = 60) -> None:
        command = [sys.executable, "-m", "manyhands.cli.main", "launch", "-n", str(workers)]
        command += ["--engine", engine, "--timeout", str(timeout), SCRIPT, how]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, word: str, count: int = 1, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while self.text.count(word) < count:
            assert time.monotonic() < deadline, f"no {word!r} in:\n{self.text}"
            assert self.process.poll() is None, self.text
            time.sleep(0.01)

    def end(self, limit: float) -> tuple[int, float]:
        """(exit code, seconds since the fault); kills what does not end, and shows where it was."""
        try:
            code = self.process.wait(limit + 60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self._thread.join(2)
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running:\n{self.text}") from None
        ended = time.time()
        self._thread.join(2)
        fault = re.search(r"FAULT ([\d.]+)", self.text)
        return code, ended - float(fault.group(1)) if fault else 0.0


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_worker_that_raises(engine: str) -> None:
    launch = Launch(engine, "raise")
    code, seconds = launch.end(LIMIT)
    assert code == 1, launch.text
    assert seconds < LIMIT, launch.text
    assert f"worker 1 of 2 on {HOST}" in launch.text
    assert "ValueError: the original trouble" in launch.text
    assert "script.py" in launch.text
    assert launch.text.count("Traceback") == 1, launch.text  # the cause, and only the cause


@pytest.mark.parametrize("engine", ["local", "mpi", "torch"])
def test_worker_that_fails_when_its_work_is_done(engine: str) -> None:
    launch = Launch(engine, "after")
    code, _ = launch.end(LIMIT)
    assert code == 7, launch.text
    assert f"worker 1 of 2 on {HOST}" in launch.text
    assert "left with exit code 7" in launch.text
    assert "after its work was done" in launch.text


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_worker_that_is_killed(engine: str) -> None:
    launch = Launch(engine, "kill")
    code, seconds = launch.end(LIMIT)
    assert code not in (0, None), launch.text
    assert seconds < LIMIT, launch.text
    assert f"worker 1 of 2 on {HOST}" in launch.text
    assert "SIGKILL" in launch.text


@pytest.mark.parametrize("attempt", range(3))
def test_worker_that_dies_slowly_is_the_one_named(attempt: int) -> None:
    """Its sockets are closed, and mpiexec has killed the others, before its own end is complete."""
    launch = Launch("mpi", "dies_slowly")
    code, _ = launch.end(LIMIT)
    assert code == 137, launch.text
    assert f"worker 1 of 2 on {HOST}" in launch.text


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_worker_that_goes_silent(engine: str) -> None:
    deadline = 3.0
    launch = Launch(engine, "silent", timeout=deadline)
    code, seconds = launch.end(LIMIT)
    assert code not in (0, None), launch.text
    assert deadline * 0.8 < seconds < deadline + LIMIT, launch.text
    assert f"worker 1 of 2 on {HOST}" in launch.text
    assert "script.py" in launch.text  # where it was last seen


@pytest.mark.parametrize("how", ["stopped", "segfault", "exit", "threads", "children"])
def test_other_ways_to_go_on_local(how: str) -> None:
    launch = Launch("local", how, timeout=3)
    code, seconds = launch.end(LIMIT)
    expected = {"segfault": 139, "exit": 7}.get(how, 1)
    assert code == expected, launch.text
    assert seconds < LIMIT + (3 if how == "stopped" else 0), launch.text
    assert "worker 1 of 2" in launch.text
    said = {"stopped": "silent for", "segfault": "SIGSEGV", "exit": "exit code 7"}
    assert said.get(how, "the original trouble") in launch.text


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_ctrl_c(engine: str) -> None:
    launch = Launch(engine, "wait")
    launch.wait_for("READY", count=1 if engine == "inline" else 2)
    start = time.monotonic()
    os.killpg(launch.process.pid, signal.SIGINT)  # a terminal sends it to all of them
    code, _ = launch.end(LIMIT)
    assert time.monotonic() - start < LIMIT, launch.text
    assert code == 130, launch.text
    assert "Traceback" not in launch.text, launch.text


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_sigterm(engine: str) -> None:
    launch = Launch(engine, "wait")
    launch.wait_for("READY", count=1 if engine == "inline" else 2)
    start = time.monotonic()
    launch.process.terminate()
    code, _ = launch.end(LIMIT)
    assert time.monotonic() - start < LIMIT, launch.text
    assert code == 143, launch.text
    assert "Traceback" not in launch.text, launch.text


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_launcher_that_is_killed_takes_all_with_it(engine: str) -> None:
    launch = Launch(engine, "wait")
    launch.wait_for("READY", count=1 if engine == "inline" else 2)
    start = time.monotonic()
    launch.process.kill()
    launch.end(LIMIT)
    # Ray's own processes notice in their own time; ours go with the launcher.
    limit = 2 * LIMIT if engine == "ray" else LIMIT
    while ours() and time.monotonic() - start < limit:
        time.sleep(0.02)
    assert not ours(), f"left after {limit} s"


def test_second_ctrl_c_is_at_once() -> None:
    """The best of three: a busy machine may need the 1.5 s for itself."""
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=9.0) >= 1.5:
        launch = Launch("local", "busy")
        launch.wait_for("READY", count=2)
        os.killpg(launch.process.pid, signal.SIGINT)
        time.sleep(0.1)
        start = time.monotonic()
        os.killpg(launch.process.pid, signal.SIGINT)
        launch.end(LIMIT)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 1.5, seconds


@pytest.mark.ray
def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is too busy: it gives up when half of its processes are there."""
    services = pytest.importorskip("ray._private.services")

    def not_there(*_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(services, "get_node", not_there)
    with pytest.raises(SupportError, match=r"Ray has not started .* timed out during startup"):
        manyhands.launch(os.getpid, workers=2, engine="ray")
    assert not ours()
