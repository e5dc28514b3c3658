"""The examples with an Agent are short, run in every role and alone, and learn (slow)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.viewing.evaluation import evaluate

pytestmark = [pytest.mark.usefixtures("nothing_left")]

FOLDER = Path(__file__).parents[2] / "examples"
ROLES = {
    "agent_a3c": "server=1,worker=2",
    "agent_apex": "learner=1,actor=2",
    "agent_impala": "learner=2,actor=2",
}
LIMIT = 60  # lines


# Processes take long to start: one example has them here, and all of them in the pages of docs/.
ENGINES = {"agent_a3c": "inline", "agent_apex": "inline", "agent_impala": "local"}


def start(name: str, folder: Path, *words: str, engine: str = "local", seconds: int = 120) -> str:
    launch = ["-m", "manyhands", "launch", "--roles", ROLES[name], "--engine", engine]
    return run([*launch, str(FOLDER / f"{name}.py"), *words], folder, seconds)


def run(words: list[str], folder: Path, seconds: int = 120) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ROLES)
def test_it_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= LIMIT


@pytest.mark.parametrize("name", ROLES)
def test_it_runs_in_its_roles_and_all_of_them_end(name: str, tmp_path: Path) -> None:
    said = start(name, tmp_path, "--steps", "1500", engine=ENGINES[name])
    for part in ROLES[name].split(","):
        role, count = part.split("=")
        assert said.count(f"{role} ") >= int(count)
    assert said.count("has ended at version") == sum(int(p[-1]) for p in ROLES[name].split(","))
    assert "at version 0" not in said


def test_each_runs_alone(tmp_path: Path) -> None:
    """One after the other in one process."""
    scripts = [str(FOLDER / f"{name}.py") for name in ROLES]
    code = f"import runpy\nfor path in {scripts}: runpy.run_path(path, run_name='__main__')"
    (tmp_path / "in_turn.py").write_text(code)
    said = run(["in_turn.py", "--steps", "1500"], tmp_path)
    assert said.count("worker 0 has ended") == len(ROLES)
    for name in ROLES:
        folder = tmp_path / f"{name.removeprefix('agent_')}-policy"
        assert (folder / "policy.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROLES)
def test_it_learns_cartpole(name: str, tmp_path: Path) -> None:
    start(name, tmp_path, seconds=800)
    found = evaluate(tmp_path / f"{name.removeprefix('agent_')}-policy", 20)
    assert found.mean_return >= 350


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_apex_ddpg_learns_pendulum(tmp_path: Path) -> None:
    words = ("--algorithm", "ddpg", "--env", "Pendulum-v1")
    start("agent_apex", tmp_path, *words, seconds=800)
    assert evaluate(tmp_path / "apex-policy", 20).mean_return >= -300
