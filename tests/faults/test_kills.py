"""SIGKILL at random moments, to the launcher, the main worker or any other; resumed each time, a
run ends as the one that was left alone, to the bit, and every checkpoint on disk can be read."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import rank_of
from resume_programs import check_same, left_in, start

from manyhands.cli.main import main
from manyhands.experiment import checkpoint

pytestmark = [pytest.mark.usefixtures("nothing_left")]

KILLS = int(os.environ.get("MANYHANDS_KILLS", "200"))  # of the slow test, over all strategies
SECONDS = 150  # that anything may take; one or two on a quiet machine
COMMON = ["--env", "CartPole-v1", "--hidden", "16", "--quiet", "--no-tensorboard",
          "--checkpoint-seconds", "0"]  # fmt: skip
ON_POLICY = ["a2c", *COMMON, "--num-envs", "4", "--rollout-length", "16"]
# strategy -> (words of the run, who is killed). An actor of apex is not: it is started again, and
# what it had not sent yet is lost, so the run goes on as another.
RUNS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "single": (
        [*ON_POLICY, "--steps", "12800"],
        ("launcher", "worker 0"),
    ),
    "gather": (
        [*ON_POLICY, "-n", "2", "--strategy", "gather", "--steps", "12800"],
        ("launcher", "worker 0", "worker 1"),
    ),
    "allreduce": (
        [*ON_POLICY, "-n", "2", "--strategy", "allreduce", "--steps", "12800"],
        ("launcher", "worker 0", "worker 1"),
    ),
    "apex": (
        ["dqn", *COMMON, "-n", "2", "--num-envs", "2", "--rollout-length", "16", "--batch-size",
         "16", "--learning-starts", "200", "--updates-per-step", "0.1", "--replay-size", "600",
         "--pull-every", "8", "--checkpoint-replay", "--steps", "6400"],
        ("launcher", "worker 0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("single", 1),
        ("gather", 1),
        *(pytest.param(name, KILLS // len(RUNS), marks=pytest.mark.slow) for name in RUNS),
    ],
)
@pytest.mark.timeout(3600)
def test_killed_again_and_again(strategy: str, kills: int, tmp_path: Path) -> None:
    words, targets = RUNS[strategy]
    chance = random.Random(f"{strategy} {kills}")
    whole = tmp_path / "whole"
    steps = words if kills > 1 else [*words[:-1], str(int(words[-1]) // 8)]
    assert main(["train", *steps, "--run-dir", str(whole)]) == 0
    left, died, rounds = kills, dict.fromkeys(targets, 0), 0
    while left:
        rounds += 1
        folder = tmp_path / f"run{rounds}"
        life = Life(start("train", *steps, "--run-dir", str(folder)), folder)
        while not life.over(chance, targets[left % len(targets)], kill=left > 0):
            left, died[life.target] = left - 1, died[life.target] + 1
            life = life.next(steps)
        check_same(compared(whole), compared(folder))
        assert all(name.isdigit() for name in os.listdir(folder / "checkpoints"))
        shutil.rmtree(folder)
    print(f"{strategy}: killed {died}, in {rounds} runs")


class Life:
    """One process of a run, from its start to its death or its end."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.saved, self.target = steps_saved(folder), ""

    def over(self, chance: random.Random, target: str, *, kill: bool) -> bool:
        """Let it live for a while, then kill the target; True if the run has ended before."""
        process, self.target = self.process, target
        deadline = time.monotonic() + SECONDS
        training = chance.random() < 0.75  # else anywhere: while it starts, too
        while (
            training and kill and process.poll() is None and steps_saved(self.folder) == self.saved
        ):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.0, 0.2 if training else 2.0) if kill else SECONDS)
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[1]
            process.communicate()
            return True
        assert kill, "it does not end"
        pid = process.pid if target == "launcher" else worker_of(process.pid, target)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=SECONDS)
        if process.returncode == 0:  # its work was done when it was killed
            return True
        assert pid == process.pid or "SIGKILL" in said, said
        return False

    def next(self, words: list[str]) -> Life:
        """What is on disk is whole, and never less than before; the next process goes on."""
        folder, parent = self.folder, self.folder / "checkpoints"
        for name in os.listdir(parent) if parent.exists() else ():
            if name.isdigit():
                checkpoint.load(parent / name, tensors=False)
        assert steps_saved(folder) >= self.saved
        if steps_saved(folder) >= 0:
            return Life(start("resume", str(folder)), folder)
        shutil.rmtree(folder, ignore_errors=True)  # killed before there was a run
        return Life(start("train", *words, "--run-dir", str(folder)), folder)


def worker_of(launcher: int, target: str) -> int:
    """The process of that worker; the launcher's where it has none yet."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children(recursive=True):
            if rank_of(child.pid) == int(target.removeprefix("worker ")):
                return child.pid
    return launcher


def steps_saved(folder: Path) -> int:
    with suppress(OSError):
        names = [int(n) for n in os.listdir(folder / "checkpoints") if n.isdigit()]
        return max(names, default=-1)
    return -1


def compared(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for bounds of priorities, which say the same in another way."""
    left = left_in(folder)
    if "replay" in left["state"]:
        left["state"]["replay"]["sampler"].pop("floors", None)
    return left
