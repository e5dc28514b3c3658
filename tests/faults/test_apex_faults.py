"""An actor of Ape-X is killed: its transitions are kept or dropped, and learning goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh

pytestmark = [pytest.mark.usefixtures("nothing_left")]

TESTS = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def programs_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("what", ["keep", "drop"])
def test_a_killed_actor_is_started_again(what: str, tmp_path: Path) -> None:
    """Killed by its own environment after some steps, in its first life."""
    options: dict[str, Any] = {
        "workers": 3, "num_envs": 4, "quiet": True, "tensorboard": False, "timeout": 60.0,
        "steps": 20_000, "hidden": (16, 16), "learning_starts": 500, "batch_size": 32,
        "updates_per_step": 0.1, "pull_every": 8,
    }  # fmt: skip
    result = mh.train(
        "dqn",
        env="async_programs:deadly_cartpole",
        env_kwargs={"steps": 700},
        lost_shard=what,
        run_dir=str(tmp_path / "run"),
        **options,
    )
    assert result.summary["exit"] == "finished"
    assert result.summary["env_steps"] >= 20_000
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    lost = [event for event in events if event["event"] == "shard_lost"]
    assert result.summary["restarts"] == len(lost) == 1
    (told,) = lost
    assert told["what"] == what
    assert told["rows"] > 0
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    after = [record for record in records if record["lost_shards"] == 1]
    for record in after:  # none where it was back only when the others were done
        kept = record["replay_size"] == record["inserted"]
        assert kept == (what == "keep")
