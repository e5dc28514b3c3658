"""Workers forked from one process that has imported for all: whose they are, what can go wrong."""

from __future__ import annotations

import importlib
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import suite
from conftest import ours

from manyhands.engines import calls, launch, supervisor
from manyhands.engines.launch import Job, run
from manyhands.errors import ConfigError, WorkerError

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux only"),
]


def look_around(fail: int = -1) -> dict[str, Any]:
    """What a worker sees of itself."""
    rank = int(os.environ["MANYHANDS_RANK"])
    if rank == fail:
        raise ValueError("on purpose")
    print(f"I am {rank}")
    pipes = 0
    for fd in range(3, 256):
        try:
            pipes += stat.S_ISFIFO(os.fstat(fd).st_mode)
        except OSError:
            continue
    return {
        "rank": rank,
        "parent": os.getppid(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "imported": getattr(sys.modules.get("slow_to_import"), "PID", None),
        "ran_as": os.getpid(),
        "drawn": [random.random(), float(np.random.rand())],
        "pipes": pipes,
        "plan": "MANYHANDS_FORK" in os.environ,
    }


def job(workers: int = 3, *args: Any, modules: tuple[str, ...] = ("slow_to_import",)) -> Job:
    call = calls.pack(look_around, args, {})
    return Job(workers=workers, call=call, results=True, preload=modules, timeout=30)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "slow_to_import.py"
    path.write_text("import os\nPID = os.getpid()\n")
    return path


def test_they_are_the_launchers_own_and_share_one_import(
    module: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    seen = run(job())
    assert [one["rank"] for one in seen] == [0, 1, 2]
    assert {one["parent"] for one in seen} == {os.getpid()}
    assert [one["name"] for one in seen] == ["manyhands-0", "manyhands-1", "manyhands-2"]
    assert len({one["imported"] for one in seen}) == 1
    assert len({one["ran_as"] for one in seen} | {seen[0]["imported"]}) == 4
    assert [one["pipes"] for one in seen] == [0, 0, 0]  # nobody holds another's output open
    assert not any(one["plan"] for one in seen)
    for kind in (0, 1):
        assert len({one["drawn"][kind] for one in seen}) == 3  # nobody seeds a user's script
    output = capfd.readouterr().out
    assert "I am 0\n" in output
    assert "[worker 1] I am 1\n" in output
    assert "[worker 2] I am 2\n" in output
    assert len(os.listdir("/proc/self/fd")) <= before


def test_functions_share_torch_where_their_module_has_it(module: Path) -> None:
    assert launch._has_torch(suite.suite)
    module.write_text("from torch import nn\ndef function(): pass\n")
    assert launch._has_torch(importlib.import_module("slow_to_import").function)
    del sys.modules["slow_to_import"]
    assert not launch._has_torch(look_around)


def test_beside_a_thread_they_begin_anew(module: Path) -> None:
    """A fork copies locks that a thread holds, and not the thread."""
    module.write_text(
        "import os, threading\nPID = os.getpid()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    seen = run(job())
    assert [one["imported"] for one in seen] == [None] * 3
    assert [one["rank"] for one in seen] == [0, 1, 2]
    assert {one["parent"] for one in seen} == {os.getpid()}


def test_what_cannot_be_imported_is_left_to_the_workers(module: Path) -> None:
    module.write_text("raise ImportError('broken')")
    assert [one["imported"] for one in run(job())] == [None] * 3


def test_a_worker_that_fails_is_named() -> None:
    with pytest.raises(WorkerError, match="worker 2 of 3") as error:
        run(job(3, 2, modules=("json",)))
    assert "on purpose" in str(error.value)


def test_a_process_that_dies_while_it_imports(module: Path) -> None:
    module.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(WorkerError, match="was killed by signal SIGKILL"):
        run(job())


def test_an_import_that_hangs(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.5)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerError, match=r"has not imported numpy, slow_to_import within 0\.5 s"):
        run(job())
    assert len(os.listdir("/proc/self/fd")) <= before


def test_more_workers_than_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised as far as it may be; beyond that it is a sentence, and nothing starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        assert len(run(job(8, modules=()))) == 8
        monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
        with pytest.raises(ConfigError, match="open files, and 64 are allowed; start fewer"):
            run(job(8, modules=()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_while_they_import(module: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches all processes of a terminal; SIGKILL only the launcher."""
    reached = module.with_name("reached")
    module.write_text(f"import time\nopen({str(reached)!r}, 'w').close()\ntime.sleep(600)\n")
    script = module.with_name("starts.py")
    script.write_text("import test_forked_workers as t\nt.run(t.job())\n")
    path = os.pathsep.join([str(module.parent), str(Path(__file__).parent), *sys.path])
    launcher = subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not reached.exists():
        assert time.monotonic() < deadline
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.01)
    os.killpg(launcher.pid, number) if number == signal.SIGINT else launcher.kill()
    said = launcher.communicate(timeout=30)[1]
    assert launcher.returncode != 0
    assert said.count("Traceback") <= 1  # the script's own; none of the process that imports
    while ours():
        assert time.monotonic() < deadline, ours()
        time.sleep(0.01)
