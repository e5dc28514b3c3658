"""The own-loop ladder: few lines changed, every launcher takes it, and it still learns."""

from __future__ import annotations

import difflib
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ALL_ENGINES

pytestmark = [pytest.mark.usefixtures("nothing_left")]

FOLDER = Path(__file__).parents[2] / "examples" / "own_loop"
BEFORE = (FOLDER / "before.py").read_text()
AFTER = ["after_allreduce.py", "after_gather.py"]
BIN = Path(sys.executable).parent
SECONDS = 200  # for what takes ten on a quiet machine
LIMIT = 8  # added + removed lines
# Several scripts one after the other in the same workers: what takes time is their start. In the
# end, when a worker has left (atexit is last in, first out), each says whether gloo's threads have.
IN_TURN = """
import atexit, glob, runpy, sys
from pathlib import Path

@atexit.register
def threads():
    names = [Path(name).read_text().strip() for name in glob.glob("/proc/self/task/*/comm")]
    print("threads:", *sorted(name for name in names if name.startswith("pt_gloo")), flush=True)

for script in sys.argv[1:]:
    runpy.run_path(script, run_name="__main__")
"""
WEIGHTS = "sum(w.abs().sum() for w in agent.parameters())"  # other steps, other sums
LAUNCH = [sys.executable, "-m", "manyhands.cli.main", "launch", "-n", "2"]


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
    # A few updates print nothing by themselves: let the main worker show what it has in the end.
    text = text.replace("if number % 40 == 0:", "if number % 40 == 0 or number == UPDATES:")
    text = text.replace('print(f"update', f'print(f"{name}: weights {{{WEIGHTS}:.2f}} update')
    path = folder / name
    path.write_text(text)
    return str(path)


def in_turn(folder: Path, names: list[str], updates: int) -> list[str]:
    """The command line, after Python, that runs these scripts for so many updates each."""
    (folder / "in_turn.py").write_text(IN_TURN)
    small = {"UPDATES": updates, "EPOCHS": 4}
    return [str(folder / "in_turn.py"), *(edited(name, folder, **small) for name in names)]


def run(command: list[str], seconds: float = SECONDS) -> str:
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env=clean(),
    )
    assert result.returncode == 0, result.stdout
    assert "Traceback" not in result.stdout, result.stdout
    return result.stdout


def clean() -> dict[str, str]:
    """No launcher's variables from outside, and one thread a worker."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "OMPI_", "SLURM_", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1"}


def shows_update(number: int, name: str, text: str, workers: int) -> None:
    """The main worker prints in the gather form; in the allreduce form every worker does."""
    who = workers if name == "after_allreduce.py" else 1
    assert len(re.findall(rf"{name}: weights [\d.]+ update +{number} +return", text)) == who, text


def learned(name: str, text: str) -> list[tuple[str, str]]:
    """Weights and return, of each that prints them."""
    return sorted(re.findall(rf"{name}: weights ([\d.]+) update +\d+ +return +([\d.]+)", text))


@functools.cache
def alone() -> str:
    """What the scripts print in one plain process."""
    with tempfile.TemporaryDirectory() as folder:
        return run([sys.executable, *in_turn(Path(folder), ["before.py", *AFTER], 3)])


@functools.cache
def started(how: str) -> str:
    """What both forms print, started in one of the ways with two workers."""
    with tempfile.TemporaryDirectory() as folder:
        words = in_turn(Path(folder), AFTER, 3)
        if how == "srun":
            return srun([sys.executable, *words])
        if how == "mpiexec":
            return run([str(BIN / "mpiexec"), "-n", "2", sys.executable, *words])
        if how == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            return run([*torchrun, "--nproc-per-node", "2", *words])
        engine = [] if how == "local" else ["--engine", how]  # the default
        return run([*LAUNCH, *engine, *words])


def srun(words: list[str]) -> str:
    """Two processes with the variables that srun sets, as on one node of a cluster."""
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
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean() | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        text = "".join(task.communicate(timeout=SECONDS)[0] for task in tasks)
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], text
    return text


@pytest.mark.parametrize("name", ["before.py", *AFTER])
def test_plain_python(name: str) -> None:
    shows_update(3, name, alone(), 1)


def test_with_one_worker_both_forms_are_one_program() -> None:
    """Gathering from oneself and averaging with oneself change no digit of what is learned."""
    assert learned(AFTER[0], alone()) == learned(AFTER[1], alone()) != []


@pytest.mark.parametrize("name", AFTER)
def test_the_same_seed_repeats_to_the_digit(name: str) -> None:
    """The script seeds torch and the environments: what two workers learn follows from that, in
    another launch and on another engine."""
    assert learned(name, started("local")) == learned(name, started("torch")) != []


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize(
    "how",
    [
        *ALL_ENGINES,
        pytest.param("mpiexec", marks=pytest.mark.mpi),
        "torchrun",
        "srun",
    ],
)
def test_every_way_to_start_it(how: str, name: str) -> None:
    shows_update(3, name, started(how), 2)


def test_no_thread_of_gloo_is_left_when_python_ends() -> None:
    """One that asks for Python's lock then aborts the process, once in forty on a busy machine:
    torch's compiler, which the first optimiser imports, kept the group that it belongs to."""
    ends = [line.partition("threads:") for line in started("torchrun").splitlines()]
    assert [rest.strip() for _, found, rest in ends if found] == ["", ""]


def solves(name: str, seed: int, tmp_path: Path) -> None:
    script = edited(name, tmp_path, SEED=seed)
    text = run([*LAUNCH, script], seconds=500)
    assert "solved" in text, text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", AFTER)
def test_every_seed_solves_cartpole(name: str, seed: int, tmp_path: Path) -> None:
    solves(name, seed, tmp_path)
