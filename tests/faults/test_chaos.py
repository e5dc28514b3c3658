"""`make chaos` and `make soak`, shortened: see benchmarks/chaos.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.slow]
PROGRAM = str(Path(__file__).parents[2] / "benchmarks/chaos.py")


@pytest.mark.timeout(1800)
def test_faults_in_a_running_training() -> None:
    """Each strategy, and each fault several times: all noticed, all got over, nothing left."""
    run("--faults", "100", "--minutes", "20")


@pytest.mark.timeout(1200)
def test_five_minutes_left_alone() -> None:
    """Memory, open files and speed stay as they are."""
    run("--faults", "0", "--minutes", "5")


def run(*words: str) -> None:
    done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
