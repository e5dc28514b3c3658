"""One contract for the asynchronous strategies, on every engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import five_workers
import numpy as np
import pytest
from conftest import ALL_ENGINES
from five_workers import SMALL
from safetensors.numpy import load_file

import manyhands as mh
from manyhands.experiment.folder import SUMMARY

pytestmark = [pytest.mark.usefixtures("nothing_left")]

CASES: dict[str, dict[str, Any]] = {
    "a3c": {"algorithm": "a2c", "strategy": "gradient_server", "workers": 3},
    "a3c, four pushes": {
        "algorithm": "a2c", "strategy": "gradient_server", "workers": 4, "pushes": 4,
        "reduce": "sum", "learning_rate": 1e-4,
    },
    "a3c, two levels": {
        "algorithm": "a2c", "strategy": "gradient_server", "workers": 6, "pushes": 4, "reducers": 2,
    },
    "impala": {"algorithm": "impala", "workers": 3},
    "impala, two learners": {
        "algorithm": "impala", "workers": 4, "learners": 2, "normalize_observations": True,
    },
    "impala, episodes, replay": {
        "algorithm": "impala", "workers": 3, "collect": "episodes", "unrolls": 4, "replay": 8,
    },
    "impala, lstm": {"algorithm": "impala", "workers": 3, "lstm": 8},
    "impala, continuous": {"algorithm": "impala", "workers": 3, "env": "Pendulum-v1"},
    "impala, shared network": {"algorithm": "impala", "workers": 3, "shared_network": True},
}  # fmt: skip
FEW = ("a3c, two levels", "impala, two learners")  # where one launch has them all


def train(name: str, folder: Path, **more: Any) -> mh.run.Result:  # type: ignore[name-defined]
    options = SMALL | CASES[name] | more
    return mh.train(options.pop("algorithm"), run_dir=str(folder), **options)


def cases() -> list[Any]:
    found = []
    for engine in ALL_ENGINES:
        name = engine.values[0]  # type: ignore[attr-defined]
        for case in CASES if name == "inline" else FEW:
            marks = [*engine.marks]  # type: ignore[attr-defined]
            if name != "inline" and case in five_workers.SLOW[name]:
                marks.append(pytest.mark.slow)
            found.append(pytest.param(case, name, marks=marks, id=f"{name}-{case}"))
    return found


@pytest.mark.parametrize(("case", "engine"), cases())
def test_trains_and_leaves_its_folder(case: str, engine: str, tmp_path: Path) -> None:
    if engine == "inline":
        folder = tmp_path / "run"
        summary = train(case, folder, engine=engine).summary
    else:
        folder = five_workers.folder_of(engine, case)
        summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == set(SUMMARY)
    assert summary["exit"] == "finished"
    assert summary["env_steps"] >= 3000
    assert summary["updates"] > 3
    assert summary["restarts"] == 0
    phases = set(summary["phase_seconds"])
    assert {"rollout", "optimisation", "waiting for data", "waiting for room"} <= phases
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for record in records:
        assert 0 <= record["lag_min"] <= record["lag_mean"] <= record["lag_max"] <= 20
        assert 0 <= record["queue_fill"] <= 1
    assert summary["lost_fragments"] == records[-1]["refused"]
    assert all(np.isfinite(w).all() for w in load_file(folder / "policy.safetensors").values())
    observation = np.zeros(3 if "continuous" in case else 4, np.float32)
    assert mh.load(folder).act(observation) is not None


@pytest.mark.parametrize("case", CASES)
def test_inline_repeats_bit_for_bit(case: str, tmp_path: Path) -> None:
    weights = []
    for name in ("one", "two"):
        train(case, tmp_path / name, engine="inline", steps=1500)
        weights.append(load_file(tmp_path / name / "policy.safetensors"))
    for key, value in weights[0].items():
        assert np.array_equal(value, weights[1][key]), key


def test_a_run_is_gone_on_with(tmp_path: Path) -> None:
    """The learner as it was, the actors with fresh episodes; no seed is used twice."""
    first = train("impala, two learners", tmp_path / "run", engine="inline")
    before = len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
    second = mh.resume(tmp_path / "run", steps=6000)
    assert second.worked
    assert second.summary["env_steps"] >= 6000 > first.summary["env_steps"]
    assert second.summary["updates"] > first.summary["updates"] == before


def test_a_target_ends_a_run_for_all() -> None:
    summary = json.loads((five_workers.folder_of("local", "a target") / "summary.json").read_text())
    assert summary["solved"]
    assert summary["env_steps"] < 50_000


def test_a_reward_at_the_very_end_is_learned(tmp_path: Path) -> None:
    """Five right turns in a row, and only then a reward: 1 in 32 episodes of a random policy."""
    result = train(
        "impala", tmp_path / "run", engine="inline", env="manyhands/Delayed-v0", num_envs=8,
        hidden=(16,), learning_rate=5e-3, target_return=0.9, steps=20_000, log_every=10,
    )  # fmt: skip
    assert result.solved, result.summary


@pytest.mark.parametrize("case", ["impala, two learners", "a3c, two levels"])
def test_the_last_table_says_who_waited(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Throughput of both sides, how full the queue was, how long the learner was idle."""
    train(case, tmp_path / "run", engine="inline", steps=1000, quiet=False)
    said = capsys.readouterr().out
    acts, learns = ("actor", "learner") if "impala" in case else ("worker", "server")
    found = re.search(
        rf"^{acts}s: ([\d.,]+) steps/s each of (\d), (\d+)% of the time waiting for room\n"
        rf"{learns}: ([\d.,]+) updates/s, ([\d.,]+) steps/s, idle (\d+)% of the time, "
        r"queue (\d+)% full\n"
        r"lag: (\d+) at least, [\d.]+ on average, (\d+) at most; refused \d+, lost 0$",
        said,
        re.MULTILINE,
    )
    assert found, said
    each, many, room, updates, steps, idle, full, low, high = (
        float(text.replace(",", "")) for text in found.groups()
    )
    assert steps == pytest.approx(each * many, rel=0.05)  # both are rounded
    assert updates < steps
    assert max(room, idle, full) <= 100
    assert low <= high <= 20
    for name in ("waiting for data", "waiting for room"):
        assert re.search(rf"^ *(time)? +{name} +[\d.]+ s", said, re.MULTILINE), said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 2, "learners": 2}, "leave nobody to act"),
        ({"workers": 4, "learners": 2, "unrolls": 3}, "3 unrolls an update do not go evenly"),
        ({"workers": 4, "num_envs": 8}, "8 environments do not go evenly into 3 acting workers"),
        ({"workers": 3, "replay": 4, "replay_share": 1.0}, "replay_share=1 must lie"),
    ],
)
def test_parts_that_do_not_add_up(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(mh.ConfigError, match=words):
        mh.train("impala", **(SMALL | {"run_dir": str(tmp_path / "run")} | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 1}, "needs a server and others that act, and has 1"),
        ({"workers": 5, "reducers": 2, "pushes": 3}, "3 pushes do not go evenly into 2 reducers"),
        ({"workers": 3, "queue": 0}, "queue=0"),
    ],
)
def test_servers_that_do_not_add_up(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    more = {"run_dir": str(tmp_path / "run"), "strategy": "gradient_server"}
    with pytest.raises(mh.ConfigError, match=words):
        mh.train("a2c", **(SMALL | more | options))


@pytest.mark.parametrize("case", ["a3c", "a3c, two levels"])
def test_a_gradient_that_is_too_old_is_computed_again(case: str, tmp_path: Path) -> None:
    """With no lag allowed nearly every push of two workers comes too late, and all are counted: a
    run in which pushed is not applied and refused fails at its end."""
    result = train(case, tmp_path / "run", engine="inline", max_lag=0, steps=2000)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert {record["lag_max"] for record in records} == {0.0}
    assert result.summary["lost_fragments"] == records[-1]["refused"] > 0
