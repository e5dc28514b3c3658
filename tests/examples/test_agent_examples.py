"""The examples with an Agent are short, run in every role and alone, and learn (slow)."""

from __future__ import annotations

import json
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


# Processes take long to start: one example has them here, others in the pages of docs/, and agents
# of every kind in tests/contracts/test_agent.py.
ENGINES = {"agent_a3c": "inline", "agent_apex": "inline", "agent_impala": "local"}
FEW = ["--steps", "1500"]
IN_TURN = """\
import importlib, json, runpy, sys
import manyhands as mh

def play(name):
    importlib.import_module(name).main()

if __name__ == "__main__":
    folder, few, roles, inline = json.loads(sys.argv[1])
    sys.path.append(folder)
    sys.argv[1:] = few
    for name in roles:
        print(f"-- {name} alone", flush=True)
        runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
    for name in inline:
        print(f"-- {name} inline", flush=True)
        mh.launch(play, name, roles=roles[name], engine="inline")
"""


def start(name: str, folder: Path, *words: str, seconds: int = 120) -> str:
    launch = ["-m", "manyhands", "launch", "--roles", ROLES[name]]
    return run([*launch, str(FOLDER / f"{name}.py"), *words], folder, seconds)


def run(words: list[str], folder: Path, seconds: int = 120) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """What examples print that need no other process, alone and inline, and their folder."""
    folder = tmp_path_factory.mktemp("one process")
    (folder / "in_turn.py").write_text(IN_TURN)
    inline = [name for name in ROLES if ENGINES[name] == "inline"]
    told = json.dumps([str(FOLDER), FEW, ROLES, inline])
    text = run(["in_turn.py", told], folder)
    parts = [part.partition("\n") for part in text.split("-- ")[1:]]
    return {title: said for title, _, said in parts}, folder


@pytest.mark.parametrize("name", ROLES)
def test_it_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= LIMIT


@pytest.mark.parametrize("name", ROLES)
def test_it_runs_in_its_roles_and_all_of_them_end(
    name: str, one_process: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    inline = ENGINES[name] == "inline"
    said = one_process[0][f"{name} inline"] if inline else start(name, tmp_path, *FEW)
    for part in ROLES[name].split(","):
        role, count = part.split("=")
        assert said.count(f"{role} ") >= int(count)
    assert said.count("has ended at version") == sum(int(p[-1]) for p in ROLES[name].split(","))
    assert "at version 0" not in said


@pytest.mark.parametrize("name", ROLES)
def test_it_runs_alone(name: str, one_process: tuple[dict[str, str], Path]) -> None:
    said, folder = one_process
    assert said[f"{name} alone"].count("worker 0 has ended") == 1
    assert (folder / f"{name.removeprefix('agent_')}-policy" / "policy.safetensors").exists()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROLES)
def test_it_learns_cartpole(name: str, tmp_path: Path) -> None:
    start(name, tmp_path, seconds=800)
    found = evaluate(tmp_path / f"{name.removeprefix('agent_')}-policy", 20)
    assert found.mean_return >= 350


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_apex_ddpg_learns_pendulum(tmp_path: Path) -> None:
    words = ("--algorithm", "ddpg", "--env", "Pendulum-v1")
    start("agent_apex", tmp_path, *words, seconds=800)
    assert evaluate(tmp_path / "apex-policy", 20).mean_return >= -300
