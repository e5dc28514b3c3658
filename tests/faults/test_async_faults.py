"""An actor that is killed, one that is slow, a run that is stopped: the others go on, or leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh

pytestmark = [pytest.mark.usefixtures("nothing_left")]

TESTS = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def programs_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))


def train(env: str, folder: Path, **more: Any) -> Any:
    options: dict[str, Any] = {
        "workers": 3, "num_envs": 4, "quiet": True, "tensorboard": False, "timeout": 60.0,
        "log_every": 10,
    }  # fmt: skip
    return mh.train("impala", env=env, run_dir=str(folder), **(options | more))


def test_a_killed_actor_is_started_again(tmp_path: Path) -> None:
    """Killed by its own environment after some steps, in its first life."""
    result = train(
        "async_programs:deadly_cartpole", tmp_path / "run", steps=12_000,
        env_kwargs={"steps": 700}, rollout_length=20,
    )  # fmt: skip
    assert result.summary["exit"] == "finished"
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    restarts = [event for event in events if event["event"] == "restart"]
    # Where the others were done before it was back, nobody heard of it: both are right.
    assert result.summary["restarts"] == len(restarts) <= 1
    assert result.summary["env_steps"] >= 12_000


def test_a_slow_actor_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Its unrolls are too old when they come: refused and counted, and never above the bound."""
    result = train(
        "async_programs:slow_cartpole", tmp_path / "run", steps=30_000, rollout_length=10,
        env_kwargs={"seconds": 0.005}, max_lag=6, unrolls=1, queue=1,
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert max(record["lag_max"] for record in records) <= 6
    rows = (tmp_path / "run/episodes.csv").read_text().splitlines()[1:]
    workers = [int(row.split(",")[1]) for row in rows]
    assert workers.count(1) > workers.count(2)
    assert result.summary["lost_fragments"] >= records[-1]["refused"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("strategy", ["actor_learner", "gradient_server"])
def test_a_stopped_run_ends_cleanly(number: signal.Signals, strategy: str, tmp_path: Path) -> None:
    algorithm = "impala" if strategy == "actor_learner" else "a2c"
    command = [
        sys.executable, "-m", "manyhands.cli.main", "train", algorithm, "--env", "CartPole-v1",
        "--strategy", strategy, "-n", "3", "--num-envs", "4", "--steps", "100000000",
        "--run-dir", str(tmp_path / "run"), "--no-tensorboard", "--quiet",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    metrics = tmp_path / "run/metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=40)
    assert "Traceback" not in said, said
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["exit"] == f"stopped: {number.name}", said
    assert summary["updates"] > 0
