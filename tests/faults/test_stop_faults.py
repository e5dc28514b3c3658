"""Signals: a run is asked first and forced second, and can be resumed either way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from resume_programs import (
    TINY,
    at_update,
    check_same,
    left_in,
    start,
    summary,
    until,
)

from manyhands.engines import stopping
from manyhands.experiment import checkpoint
from manyhands.run import Paused, resume, train

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_every_process(number: int, code: int, tmp_path: Path) -> None:
    """A terminal's Ctrl-C and a job manager's signals reach workers too: they must live on."""
    folder = tmp_path / "run"
    process = start(
        "train", "a2c", "--env", "CartPole-v1", "-n", "2", "--num-envs", "4", "--steps", "1e8",
        "--quiet", "--no-tensorboard", "--run-dir", str(folder),
    )  # fmt: skip
    path = folder / "metrics.jsonl"
    until(lambda: path.exists() and path.stat().st_size, process)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=150)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert f"manyhands resume {folder}" in said
    assert ("press again to stop now" in said) is (number == signal.SIGINT)
    assert summary(folder)["exit"] == f"stopped: {signal.Signals(number).name}"
    assert checkpoint.newest(folder)[0].facts["env_steps"] == summary(folder)["env_steps"] > 0


def test_second_sigterm_while_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TINY | {"steps": 640, "checkpoint_seconds": 1e9}
    train("a2c", **options, run_dir=str(tmp_path / "whole"))
    folder = tmp_path / "run"
    real = checkpoint._force

    def force(path: Path) -> None:
        if path.name.startswith(".tmp") and not path.name.endswith("-0"):
            signal.raise_signal(signal.SIGTERM)
        real(path)

    with monkeypatch.context() as patch:
        at_update(patch, {3: lambda: signal.raise_signal(signal.SIGTERM)})
        patch.setattr(checkpoint, "_force", force)
        with pytest.raises(Paused) as paused:
            train("a2c", **options, run_dir=str(folder))
    assert (paused.value.number, paused.value.env_steps) == (signal.SIGTERM, 0)
    assert os.listdir(folder / "checkpoints") == ["000000000000"]  # the one before, and no other
    assert summary(folder)["exit"] == "stopped: SIGTERM"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    resume(folder)
    check_same(
        left_in(tmp_path / "whole"), left_in(folder)
    )  # fmt: skip


def test_an_update_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline the run is stopped in the middle of it; the checkpoint before stays."""
    monkeypatch.setattr(stopping, "SECONDS", 0.2)
    real = checkpoint.save

    def save(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)  # before the first update
        return made

    monkeypatch.setattr(checkpoint, "save", save)
    slow = {"env": "manyhands/Sleep-v0", "env_kwargs": {"seconds": 0.5}}
    with pytest.raises(Paused) as paused:  # an update would take 32 s
        train("a2c", **TINY | slow, steps=640, run_dir=str(tmp_path / "run"))
    assert paused.value.env_steps == 0
    assert summary(tmp_path / "run")["exit"] == "stopped: SIGTERM"
