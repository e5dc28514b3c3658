"""The own-loop ladder: few lines changed, every launcher takes it, and it still learns."""

from __future__ import annotations

import difflib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ALL_ENGINES

pytestmark = [pytest.mark.usefixtures("nothing_left")]

FOLDER = Path(__file__).parents[2] / "examples" / "own_loop"
BEFORE = (FOLDER / "before.py").read_text()
AFTER = ["after_allreduce.py", "after_gather.py"]
BIN = Path(sys.executable).parent
LIMIT = 8  # added + removed lines


def _marks(name: str, engine: Any) -> list[Any]:
    """Ray takes seconds to start: one of the two programs is enough before `make test-slow`."""
    later = engine.id == "ray" and name == AFTER[0]
    return [*engine.marks, *([pytest.mark.slow] if later else [])]


@pytest.mark.parametrize("name", AFTER)
def test_few_lines_changed(name: str) -> None:
    lines = difflib.ndiff(BEFORE.splitlines(), (FOLDER / name).read_text().splitlines())
    changed = [line for line in lines if line[:2] in ("+ ", "- ")]
    assert 0 < len(changed) <= LIMIT, "\n".join(changed)


def edited(name: str, folder: Path, **constants: int) -> str:
    """A copy of the script with other constants: the text itself is what users read."""
    text = (FOLDER / name).read_text()
    for constant, value in constants.items():
        text, count = re.subn(rf"(?m)^{constant} = \d+", f"{constant} = {value}", text)
        assert count == 1, constant
    # Two updates print nothing by themselves: let the main worker show that it got to the end.
    text = text.replace("if number % 40 == 0:", "if number % 40 == 0 or number == UPDATES:")
    path = folder / name
    path.write_text(text)
    return str(path)


def run(command: list[str], env: dict[str, str] | None = None, seconds: float = 90) -> str:
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env=clean() | (env or {}),
    )
    assert result.returncode == 0, result.stdout
    assert "Traceback" not in result.stdout, result.stdout
    return result.stdout


def clean() -> dict[str, str]:
    """No launcher's variables from outside, and one thread a worker."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "OMPI_", "SLURM_", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1"}


def shows_two_updates(text: str, workers: int) -> None:
    """The main worker prints in the gather form; in the allreduce form every worker does."""
    assert len(re.findall(r"update +2 +return", text)) in (1, workers), text


@pytest.mark.parametrize("name", ["before.py", *AFTER])
def test_plain_python(name: str, tmp_path: Path) -> None:
    shows_two_updates(run([sys.executable, edited(name, tmp_path, UPDATES=2)]), 1)


def test_with_one_worker_both_forms_are_one_program(tmp_path: Path) -> None:
    """Gathering from oneself and averaging with oneself change no digit of what is learned."""
    texts = [run([sys.executable, edited(name, tmp_path, UPDATES=3)]) for name in AFTER]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, *engine.values, marks=_marks(name, engine), id=f"{name}-{engine.id}")
        for name in AFTER
        for engine in ALL_ENGINES
    ],
)
def test_manyhands_launch(name: str, engine: str, tmp_path: Path) -> None:
    script = edited(name, tmp_path, UPDATES=2)
    command = [sys.executable, "-m", "manyhands.cli.main", "launch", "-n", "2"]
    shows_two_updates(run([*command, "--engine", engine, script]), 2)


@pytest.mark.parametrize("name", AFTER)
def test_the_same_seed_repeats_to_the_digit(name: str, tmp_path: Path) -> None:
    """The script seeds torch and the environments: what two workers learn follows from that."""
    script = edited(name, tmp_path, UPDATES=12)
    command = [sys.executable, "-m", "manyhands.cli.main", "launch", "-n", "2", script]
    first, second = (sorted(re.findall(r"return +[\d.]+", run(command))) for _ in range(2))
    assert first
    assert first == second


@pytest.mark.mpi
@pytest.mark.parametrize("name", AFTER)
def test_mpiexec(name: str, tmp_path: Path) -> None:
    script = edited(name, tmp_path, UPDATES=2)
    shows_two_updates(run([str(BIN / "mpiexec"), "-n", "2", sys.executable, script]), 2)


@pytest.mark.parametrize("name", AFTER)
def test_torchrun(name: str, tmp_path: Path) -> None:
    script = edited(name, tmp_path, UPDATES=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shows_two_updates(run([*command, "--nproc-per-node", "2", script]), 2)


@pytest.mark.parametrize("name", AFTER)
def test_srun(name: str, tmp_path: Path) -> None:
    """Two processes with the variables that srun sets, as on one node of a cluster."""
    script = edited(name, tmp_path, UPDATES=2)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": socket.gethostname(),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean() | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        texts = [task.communicate(timeout=90)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], "".join(texts)
    shows_two_updates("".join(texts), 2)


def solves(name: str, seed: int, tmp_path: Path) -> None:
    script = edited(name, tmp_path, SEED=seed)
    command = [sys.executable, "-m", "manyhands.cli.main", "launch", "-n", "2", script]
    text = run(command, seconds=110)
    assert "solved" in text, text


@pytest.mark.slow
def test_allreduce_solves_cartpole(tmp_path: Path) -> None:
    solves("after_allreduce.py", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", AFTER)
def test_every_seed_solves_cartpole(name: str, seed: int, tmp_path: Path) -> None:
    solves(name, seed, tmp_path)
