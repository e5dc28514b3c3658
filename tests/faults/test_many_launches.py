"""A program that ends well ends well every time, on a machine that is busy, too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import engine_params

pytestmark = [pytest.mark.usefixtures("nothing_left")]

HERE = Path(__file__).parent
LAUNCHES, LOOPS = 2000, 2  # in all; side by side


def launch(engine: str, script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands", "launch", "-n", "3", "--engine", engine]
    return subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=100)


@pytest.mark.mpi
def test_mpiexec_kills_nobody_who_leaves_later_than_the_first() -> None:
    """MPICH takes its leave of mpiexec in a handler of C's exit(). A rank that left without it made
    mpiexec kill the others: seen when one of them needed a moment longer."""
    ended = launch("mpi", HERE / "leaves_late.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("left well") == 3, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("engine", engine_params("local", "mpi", "torch"))
def test_two_thousand_launches_under_load(engine: str, tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(
        "from manyhands import Parallel\npar = Parallel()\nassert par.sum(1) == par.size\n"
    )

    def loop(number: int) -> list[str]:
        failures = []
        for i in range(LAUNCHES // LOOPS):
            ended = launch(engine, script)
            if ended.returncode:
                failures.append(f"loop {number}, launch {i}: {ended.returncode}\n{ended.stderr}")
        return failures

    spin = [sys.executable, "-c", "while True: pass"]
    began = time.monotonic()
    load = [subprocess.Popen(spin, preexec_fn=lambda: os.nice(5)) for _ in range(LOOPS)]
    try:
        with ThreadPoolExecutor(LOOPS) as pool:
            failures = [text for part in pool.map(loop, range(LOOPS)) for text in part]
    finally:
        for process in load:
            process.kill()
            process.wait(10)
    print(f"{engine}: {LAUNCHES} launches in {time.monotonic() - began:.0f} s")
    assert not failures, f"{len(failures)} of {LAUNCHES} failed:\n" + "\n".join(failures[:5])
