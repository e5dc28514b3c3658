"""One contract, every engine: what the support table says is there trains and leaves its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_programs
from conftest import engine_params
from safetensors.numpy import load_file
from training_programs import ENVS, LENGTH, UPDATES, Trained, cells, trained

from manyhands import support
from manyhands.algorithms.registry import SPECS
from manyhands.cli.main import main
from manyhands.experiment.folder import EPISODE_COLUMNS, SUMMARY

pytestmark = [pytest.mark.usefixtures("nothing_left")]

# The contract of the run folder, written out, so that a key or a file that goes missing is noticed
KEYS = {
    "env_steps", "episodes", "updates", "wall_seconds", "steps_per_second", "mean_return",
    "best_return", "solved", "algorithm", "strategy", "engine", "workers", "seed", "restarts",
    "lost_fragments", "phase_seconds", "exit", "versions", "cpu", "gpu", "commit",
}  # fmt: skip
FILES = {
    "config.toml", "episodes.csv", "events.jsonl", "metrics.csv", "metrics.jsonl",
    "policy.safetensors", "summary.json",
}  # fmt: skip


def ok_cells() -> list[Any]:
    """(algorithm, strategy, engine): one test for each OK of the table, new ones included."""
    found = []
    for engine in engine_params(*support.ENGINES):
        name = engine.values[0]  # type: ignore[attr-defined]
        for algorithm, strategy in [*cells(workers=1), *cells(workers=2)]:
            if support.why_not(algorithm, strategy, name) == "":
                marks = list(engine.marks)  # type: ignore[attr-defined]
                # One worker is no engine's affair: the other engines' single runs are for later.
                if strategy == "single" and name != "inline":
                    marks.append(pytest.mark.slow)
                where = f"{name}-{algorithm}-{strategy}"
                found.append(pytest.param(algorithm, strategy, name, marks=marks, id=where))
    return found


def run_of(algorithm: str, strategy: str, engine: str) -> Trained:
    return trained(engine, 1 if strategy == "single" else 2)[f"{algorithm}-{strategy}"]


@pytest.mark.parametrize(("algorithm", "strategy", "engine"), ok_cells())
def test_every_ok_cell_trains(algorithm: str, strategy: str, engine: str) -> None:
    run = run_of(algorithm, strategy, engine)
    assert set(run.files) >= FILES
    _check_summary(run, algorithm, strategy, engine)
    _check_metrics(run)
    assert run.episode_header == list(EPISODE_COLUMNS)
    assert len(run.episodes) == run.summary["episodes"] > 0
    for name, weights in run.policy.items():
        assert np.isfinite(weights).all(), name


def _check_summary(run: Trained, algorithm: str, strategy: str, engine: str) -> None:
    summary = run.summary
    assert set(summary) == KEYS == set(SUMMARY)
    asked = {
        "env_steps": UPDATES * ENVS * LENGTH,
        "updates": UPDATES,
        "algorithm": algorithm,
        "strategy": strategy,
        "engine": engine,
        "workers": 1 if strategy == "single" else 2,
        "seed": 1,
        "restarts": 0,
        "lost_fragments": 0,
        "solved": False,
        "exit": "finished",
    }
    assert {key: summary[key] for key in asked} == asked
    assert summary["wall_seconds"] > 0
    assert summary["best_return"] >= summary["mean_return"]
    assert (summary["mean_return"] > 0) == (
        SPECS[algorithm].actions != "bounded"
    )  # whose task has costs
    assert {"rollout", "optimisation"} <= set(summary["phase_seconds"])


def _check_metrics(run: Trained) -> None:
    assert [record["update"] for record in run.metrics] == [1, 2, 3]
    assert [record["env_steps"] for record in run.metrics] == [
        ENVS * LENGTH * update for update in (1, 2, 3)
    ]
    for record in run.metrics:
        assert "not_finite" not in record, record["not_finite"]
        for name, value in record.items():
            nothing_yet = name == "mean_return" and record["episodes"] == 0
            assert nothing_yet or math.isfinite(value), (name, value)


def test_config_of_a_run_repeats_it_to_the_bit(tmp_path: Path) -> None:
    """In fresh processes, by the command line, from the file that the first run has left."""
    first = trained("local", 2)["ppo-allreduce"]
    file, folder = tmp_path / "config.toml", tmp_path / "again"
    file.write_text(first.config)
    assert main(["train", "--config", str(file), "--run-dir", str(folder)]) == 0
    second = load_file(folder / "policy.safetensors")
    assert set(second) == set(first.policy)
    for name, weights in first.policy.items():
        assert np.array_equal(weights, second[name]), name
    assert (folder / "config.toml").read_text() == first.config


def test_policy_of_a_run_acts() -> None:
    """With the normaliser it was trained with, and with no engine."""
    run = trained("inline", 1)["ppo-single-normalised"]
    assert any(name.startswith("normaliser/obs/") for name in run.policy)
    assert training_programs.act_with(run, np.zeros(4, np.float32)) in (0, 1)
