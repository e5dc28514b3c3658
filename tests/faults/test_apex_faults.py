"""An actor of Ape-X is killed: its transitions are kept or dropped, and learning goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_params

import manyhands as mh

pytestmark = [pytest.mark.usefixtures("nothing_left")]

TESTS = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def programs_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))


OPTIONS: dict[str, Any] = {
    "env": "async_programs:deadly_cartpole", "num_envs": 4,
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
    folder, steps = tmp_path / "run", 5_000 if actors == 2 else 4_000
    # The other one's steps take two milliseconds each: it is not done before the dead one is back.
    kwargs = {"steps": 300, "seconds": 0.002 if actors == 2 else 0.0}
    options = OPTIONS | {"workers": 1 + actors, "steps": steps, "lost_shard": what}
    options |= {"env_kwargs": kwargs}
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


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("algorithm", ["impala", "dqn"])
def test_a_killed_actor_is_started_again_on_ray(algorithm: str, tmp_path: Path) -> None:
    kwargs, options = {"steps": 100, "seconds": 0.002}, dict(OPTIONS)
    if algorithm == "impala":
        for name in ("learning_starts", "batch_size", "updates_per_step", "pull_every"):
            del options[name]
    options |= {"workers": 3, "steps": 12_000, "engine": "ray", "env_kwargs": kwargs}
    summary = mh.train(algorithm, run_dir=str(tmp_path / "run"), **options).summary
    assert summary["exit"] == "finished"
    assert summary["env_steps"] >= 12_000
    assert summary["restarts"] == 1
    again = [e for e in lines(tmp_path / "run/events.jsonl") if e["event"] == "restart"]
    assert [(e["worker"], e["life"]) for e in again] == [(2, 1)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", engine_params("local", "ray"))
def test_actors_that_are_killed_again_and_again(engine: str, tmp_path: Path) -> None:
    """Each is replaced, on Ray as on local, and the same return is reached."""
    ended = mh.train(
        "impala", env="async_programs:killed_cartpole", workers=4, num_envs=6, engine=engine,
        run_dir=str(tmp_path / "run"), quiet=True, tensorboard=False, max_restarts=1000,
        target_return=150.0, steps=400_000, timeout=120.0,
    ).summary  # fmt: skip
    found = [e for e in lines(tmp_path / "run/events.jsonl") if e["event"] == "worker_fault"]
    print(f"{engine}: {ended['env_steps']:,} steps, {len(found)} killed, "
          f"{ended['restarts']} came back")  # fmt: skip
    assert ended["exit"] == "solved"
    assert len(found) > 3
    assert {(fault["kind"], fault["action"]) for fault in found} == {("killed", "restart")}
    # A worker on Ray is a child of Ray's own processes, which do not say by what it was ended.
    signals = {"SIGKILL"} if engine == "local" else {None}
    assert {fault["signal"] for fault in found} == signals


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open()]


def test_one_actor_fills_the_replay_for_all(tmp_path: Path) -> None:
    """Three of four fail before they have sent a row: their parts of what may be added before
    anything is drawn are not lost, or the one that is left would wait for the learner, and it for
    rows."""
    options = OPTIONS | {"workers": 5, "steps": 1_000, "timeout": 20.0}
    options |= {"env": "async_programs:faulty_cartpole", "on_worker_failure": "continue"}
    how = {"how": {"1": "raise", "3": "raise", "4": "raise"}, "at": 5}
    ended = mh.train("dqn", run_dir=str(tmp_path / "run"), **options, env_kwargs=how).summary
    assert ended["exit"] == "finished"
