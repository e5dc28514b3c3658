"""The Ape-X examples are short, start, and learn. `make test-slow` waits for the latter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("nothing_left")]

FOLDER = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent
ROLES = {"apex_dqn.py": "learner=2,actor=2", "apex_ddpg.py": "learner=1,actor=2"}
LIMIT = 90  # lines


@pytest.mark.parametrize("name", ROLES)
def test_it_is_short(name: str) -> None:
    assert len((FOLDER / name).read_text().splitlines()) <= LIMIT


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROLES)
def test_it_solves_its_task(name: str) -> None:
    command = [str(BIN / "manyhands"), "launch", "--roles", ROLES[name], str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "solved" in done.stdout
