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


OPTIONS: dict[str, Any] = {
    "env": "async_programs:deadly_cartpole", "env_kwargs": {"steps": 700}, "num_envs": 4,
    "quiet": True, "tensorboard": False, "timeout": 120.0, "hidden": (16, 16),
    "learning_starts": 500, "batch_size": 32, "updates_per_step": 0.1, "pull_every": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("actors", "what"),
    [
        (1, "drop"),
        (2, "keep"),
        pytest.param(1, "keep", marks=pytest.mark.slow),
        pytest.param(2, "drop", marks=pytest.mark.slow),
    ],
)
def test_a_killed_actor_is_started_again(actors: int, what: str, tmp_path: Path) -> None:
    """Killed by its own environment after some steps, in its first life. One actor alone takes
    turns with the learner, which waits for the next life; of two the other goes on meanwhile."""
    folder, steps = tmp_path / "run", 20_000 if actors == 2 else 6_000
    options = OPTIONS | {"workers": 1 + actors, "steps": steps, "lost_shard": what}
    summary = mh.train("dqn", run_dir=str(folder), **options).summary
    assert summary["exit"] == "finished"
    assert summary["env_steps"] >= steps
    lost = [event for event in lines(folder / "events.jsonl") if event["event"] == "shard_lost"]
    assert summary["restarts"] == len(lost) == 1
    (told,) = lost
    assert told["what"] == what
    assert told["rows"] > 0
    after = [record for record in lines(folder / "metrics.jsonl") if record["lost_shards"] == 1]
    assert after or actors == 2  # none where it was back only when the other was done
    for record in after:
        counted = {"keep": record["kept_rows"], "drop": record["dropped_rows"]}
        assert counted == {"keep": 0, "drop": 0} | {what: told["rows"]}
        # The size is read after the counters, and of two actors one may have appended in between.
        since = record["replay_size"] - (record["inserted"] - record["dropped_rows"])
        assert 0 <= since <= (256 if actors == 2 else 0)
    if after:
        assert after[-1]["gradient_steps"] > 0  # the learner goes on


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open()]
