"""Training that goes wrong: it ends soon, says where and why, and what is on disk can be read."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from manyhands import run as running
from manyhands.cli.main import main
from manyhands.streams import EpisodeSeeds

pytestmark = [pytest.mark.usefixtures("nothing_left")]

TESTS = str(Path(__file__).parents[1])  # where workers find `training_programs`


class Training:
    """`manyhands train` as a person starts it, with two workers."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "manyhands.cli.main", "train", *words]
        self._output = open(folder.with_suffix(".txt"), "w+")  # noqa: SIM115 (closed in end)
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(folder)],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": TESTS},
            start_new_session=True,
        )

    def end(self, seconds: float = 150) -> tuple[int, str]:
        """(exit code, everything it said)."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        finally:
            self._output.seek(0)
            text = self._output.read()
            self._output.close()
        return code, text


def records(folder: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl; each must be whole."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_folder(folder: Path) -> None:
    """Whatever a failed run has left can be read, and nothing in it claims that all went well."""
    records(folder)
    policy = folder / "policy.safetensors"
    if policy.exists():
        assert all(np.isfinite(array).all() for array in load_file(policy).values())
    summary = folder / "summary.json"
    if summary.exists():
        told = json.loads(summary.read_text())
        assert told["exit"].startswith("failed"), told
        assert told["solved"] is False
    assert not list(folder.glob("*.tmp"))


SMALL = ("--num-envs", "4", "--rollout-length", "8", "-n", "2", "--steps", "3200", "--quiet")


@pytest.mark.parametrize(
    ("where", "strategy", "engine"),
    [("reward", "gather", "inline"), ("observation", "allreduce", "local")],
)
def test_not_a_number(
    where: str, strategy: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = tmp_path / "run", [
        "a2c", "--env", "manyhands/NotANumber-v0", "--strategy", strategy,
        "--engine", engine, "--env-kwargs", f"where={where}", "after=20", *SMALL,
    ]  # fmt: skip
    if engine == "inline":
        code = main(["train", *words, "--run-dir", str(folder)])
        text = "".join(capsys.readouterr())
    else:
        code, text = Training(folder, *words).end()
    assert code == 1, text
    assert re.search(r"worker [01] of 2 on \S+", text), text
    place = re.search(r"env (\d+) \(episode 0, step 21, seed (\d+)\)", text)
    assert place, text
    # The seed plays that episode again, whatever the number of workers.
    assert int(place.group(2)) in [EpisodeSeeds(1, 0, env)(0) for env in range(4)]
    assert ("a reward" if where == "reward" else "an observation") in text
    assert len(records(folder)) == 2, text  # 16 steps were sound, and are kept
    check_folder(folder)


def test_environment_that_raises(tmp_path: Path) -> None:
    training = Training(
        tmp_path / "run", "ppo", "--env", "training_programs:breaks", "--env-kwargs", "at=20",
        "--minibatch", "32", *SMALL,
    )  # fmt: skip
    code, text = training.end()
    assert code == 1, text
    assert re.search(r"worker [01] of 2 on \S+", text), text
    assert "ZeroDivisionError: the simulator has exploded" in text
    assert "training_programs.py" in text  # the traceback is the environment's own
    assert re.search(r"raised by env \d+ \(episode 0, step 20, seed \d+\)", text), text
    assert text.count("Traceback") == 1, text
    check_folder(training.folder)


WRONG = [
    "--env", "CartPole-v1", "-n", "3", "--num-envs", "8", "--rollout-length", "16",
    "--minibatch", "100", "--gamma", "1.5", "--learning-rate", "lineer:1", "--engine", "locl",
    "--env-backend", "pool",
]  # fmt: skip
SAID = [
    "8 environments do not go evenly into 3 workers",
    "does not go evenly into minibatches of 100",
    "gamma=1.5",
    "learning_rate",
    "no engine 'locl'; did you mean local?",
    "no env_backend 'pool'; did you mean envpool?",
]


def test_all_faults_of_a_configuration_at_once(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    training = Training(tmp_path / "run", "ppo", *WRONG)
    code, text = training.end(seconds=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 2, text
    assert f"{len(SAID)} things are wrong" in text
    for fault in SAID:
        assert fault in text, text
    assert "Traceback" not in text
    assert not training.folder.exists()
    # Seconds of the processor: on a machine that others use, those on the wall say little.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


def test_wrong_configuration_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(running, "train_experiment", refused)
    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    monkeypatch.setattr(os, "fork", refused)
    assert main(["train", "ppo", *WRONG, "--run-dir", str(tmp_path / "run")]) == 2
    assert "things are wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pp0", "--env", "CartPole-v1"], "did you mean ppo?"),
        (["dqn", "--env", "Pendulum-v1", "-n", "1"], "ddpg"),
        (["ppo", "--env", "CartPole-v9"], "CartPole"),
        (["ppo", "--env", "CartPole-v1", "--strategy", "apex"], "fresh data only"),
        (["ppo", "--env", "CartPole-v1", "--strategy", "single", "-n", "2"], "--workers 1"),
        (["trpo", "--env", "CartPole-v1", "-n", "1", "--shared-network"], "separate networks"),
        (["ppo", "--env", "training_programs:nothing"], "nothing"),
        (["ppo", "--config", "/no/such/file.toml"], "cannot be read"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(subprocess.Popen, "__init__", None)  # whatever starts a process, fails
    assert main(["train", *words, "--run-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
