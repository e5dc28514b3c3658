"""Evaluation while training: its numbers, the best policy, and a training that does not feel it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.config import build
from manyhands.errors import ConfigError
from manyhands.experiment.folder import RunFolder
from manyhands.policy import build_model, build_normaliser, spaces_of
from manyhands.viewing import evaluator
from manyhands.viewing.curves import curve_of
from manyhands.viewing.evaluation import evaluate
from manyhands.viewing.runs import read_run

SMALL: dict[str, Any] = {
    "env": "hook_programs:Staged", "env_kwargs": {"stage": 1}, "num_envs": 6, "hidden": (8,),
    "rollout_length": 16, "steps": 960, "seed": 3, "quiet": True, "tensorboard": False,
    "eval_every": 200, "eval_episodes": 3,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"workers": 2, "epochs": 1, "minibatch": 0}),
    "impala": ("impala", {"workers": 3}),
    "dqn": ("dqn", {"workers": 3, "learning_starts": 64, "batch_size": 8}),
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_evaluation_in_line_changes_nothing_of_the_training(case: str, tmp_path: Path) -> None:
    algorithm, more = CASES[case]
    settings = SMALL | more | {"engine": "inline"}
    seen: list[Any] = []

    class Sees:
        def on_evaluation(self, run: Any, evaluation: Any) -> None:
            seen.append(evaluation)

    with_it = mh.train(algorithm, run_dir=str(tmp_path / "a"), hooks=Sees, **settings)
    without = mh.train(
        algorithm, run_dir=str(tmp_path / "b"), **settings | {"eval_every": 0, "log_every": 2}
    )
    policies = [(r.run_dir / "policy.safetensors").read_bytes() for r in (with_it, without)]
    assert policies[0] == policies[1]

    rows = [row for row in lines(with_it.run_dir / "metrics.jsonl") if "eval_return" in row]
    assert [row["eval_env_steps"] for row in rows] == [e.env_steps for e in seen]
    assert [row["eval_env_steps"] for row in rows] == [row["env_steps"] for row in rows]
    assert all(row["steps_per_second"] > 0 for row in rows)  # also of the last, after all updates
    assert rows[-1]["eval_env_steps"] == with_it.summary["env_steps"]
    assert len(rows) >= 4
    assert all(row["eval_return"] == row["eval_length"] == 6 for row in rows)
    assert seen[0].is_best
    assert not seen[-1].is_best  # no better than the first
    best = json.loads((with_it.run_dir / "best/evaluation.json").read_text())
    assert best["env_steps"] == seen[0].env_steps
    assert not (with_it.run_dir / evaluator.FOLDER).exists()
    curve = curve_of(read_run(with_it.run_dir), "steps", "eval_return")
    assert curve is not None
    assert curve.x.tolist() == [e.env_steps for e in seen]


def test_a_process_of_its_own_gives_the_same_numbers(tmp_path: Path) -> None:
    """On the local engine: the training of the inline engine, the evaluations too, and no process
    is left."""
    algorithm, more = CASES["ppo"]
    settings = SMALL | more | {"env": "CartPole-v1", "env_kwargs": {}, "steps": 1_000}
    settings |= {"eval_every": 700, "hidden": (64, 64)}
    here = mh.train(algorithm, engine="inline", run_dir=str(tmp_path / "a"), **settings)
    there = mh.train(algorithm, engine="local", run_dir=str(tmp_path / "b"), **settings)
    for name in ("policy.safetensors", "best/policy.safetensors"):
        assert (here.run_dir / name).read_bytes() == (there.run_dir / name).read_bytes()
    events = [
        [
            {k: v for k, v in e.items() if "eval" in k}
            for e in lines(r.run_dir / "events.jsonl")
            if e["event"] == "evaluation"
        ]
        for r in (here, there)
    ]
    assert events[0] == events[1]
    assert len(events[0]) == 2
    rows = [row for row in lines(there.run_dir / "metrics.jsonl") if "eval_return" in row]
    assert [row["eval_return"] for row in rows] == [e["eval_return"] for e in events[0]]

    best = mh.load(there.run_dir, "best")
    observation = np.zeros(4, np.float32)
    assert best.act(observation) == mh.load(there.run_dir / "best").act(observation)
    assert evaluate(there.run_dir / "best", 2).returns
    with pytest.raises(ConfigError, match="choose 'last' or 'best'"):
        mh.load(there.run_dir, "worst")  # type: ignore[arg-type]


def test_a_run_without_evaluation_has_no_best_policy(tmp_path: Path) -> None:
    algorithm, more = CASES["ppo"]
    settings = SMALL | more | {"engine": "inline", "eval_every": 0, "steps": 96}
    result = mh.train(algorithm, run_dir=str(tmp_path / "run"), **settings)
    with pytest.raises(ConfigError, match="train with --eval-every N"):
        mh.load(result.run_dir, "best")


@pytest.fixture
def parts(tmp_path: Path) -> Any:
    """An evaluator with a process, a model and a normaliser for it, and its run's folder."""
    made = []

    def make(**more: Any) -> tuple[evaluator.Evaluator, Any, Any, Path]:
        experiment = build("ppo", **SMALL | {"run_dir": str(tmp_path / "run")} | more)
        folder = RunFolder.of(experiment)
        spaces = spaces_of(experiment.run)
        ours = evaluator.Evaluator(experiment, folder)
        made.append((ours, folder))
        assert folder.path is not None
        model = build_model(experiment, *spaces)
        return ours, model, build_normaliser(experiment, spaces[0]), folder.path

    yield make
    for ours, folder in made:
        ours.close()
        folder.close()


def pid_of(ours: evaluator.Evaluator) -> int:
    assert ours._process is not None
    return ours._process._child.pid


def until_ended(ours: evaluator.Evaluator) -> list[Any]:
    while not ours.wait(1.0):
        pass
    return ours.take()


def test_a_process_that_dies_is_started_again(parts: Any) -> None:
    ours, model, normaliser, path = parts()
    ours.look(100, model, normaliser)
    assert ours._process is None, "none is due"
    ours.look(200, model, normaliser)
    os.kill(pid_of(ours), signal.SIGKILL)
    for steps in (400, 600):  # the first of these waits, and makes room for the second
        ours.look(steps, model, normaliser)
    found = until_ended(ours)
    assert [e.env_steps for e in found] == [200, 600]
    events = [e["event"] for e in lines(path / "events.jsonl")]
    assert events.count("evaluator_died") == 1
    assert events.count("evaluation_skipped") == 1
    pid = pid_of(ours)
    ours.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (path / evaluator.FOLDER).exists()


def test_an_evaluation_that_does_not_end(
    parts: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is given up at a deadline; and its process ends with the pipe that it reads from, as when
    the main worker is killed."""
    monkeypatch.setattr(evaluator, "LAST_SECONDS", 0.1)
    ours, model, normaliser, _ = parts(env="hook_programs:Endless", env_kwargs={}, quiet=False)
    ours.look(200, model, normaliser)
    assert until_ended(ours) == []
    said = capfd.readouterr().err
    assert "waiting up to 0 s for the last evaluation" in said
    assert "not within 0 s; type: manyhands evaluate" in said
    child = ours._process._child
    assert child.stdin is not None
    child.stdin.close()
    deadline = time.perf_counter() + 60
    while child.poll() is None and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert child.poll() == 0


def test_an_error_is_reported_and_no_more(parts: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ours, model, normaliser, path = parts(env="hook_programs:Breaks", env_kwargs={})
    ours.look(200, model, normaliser)
    assert until_ended(ours) == []
    (failed,) = [e for e in lines(path / "events.jsonl") if e["event"] == "evaluation_failed"]
    assert "it broke" in failed["error"]
    assert "the policy of step 200 was not evaluated" in capfd.readouterr().err
