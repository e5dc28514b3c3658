"""Runs with a replay that were stopped and resumed with it end as if never stopped, to the bit:
alone, and with Ape-X where everybody takes turns (inline; local with one actor)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from resume_programs import check_same, left_in

import manyhands as mh
from manyhands.algorithms.registry import SPECS
from manyhands.cli.main import main
from manyhands.experiment import checkpoint, records
from manyhands.run import Paused

pytestmark = [pytest.mark.usefixtures("nothing_left")]

SMALL: dict[str, Any] = {
    "num_envs": 4, "steps": 1280, "quiet": True, "tensorboard": False, "hidden": (16, 16),
    "learning_starts": 200, "batch_size": 32, "updates_per_step": 0.15, "rollout_length": 16,
    "pull_every": 8, "replay_size": 600, "checkpoint_replay": True,
}  # fmt: skip
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dqn": {"env": "CartPole-v1", "n_step": 4},
    "ddpg": {
        "env": "Pendulum-v1", "noise_kind": "ou", "normalize_observations": True,
        "normalize_rewards": True,
    },
    "dqn, global generators": {"env": "resume_programs:gambler"},
}  # fmt: skip
# Others with continuous actions differ by what their algorithm keeps, which one shape shows.
OTHERS = [n for n, spec in SPECS.items() if spec.actions == "bounded" and n not in ALGORITHMS]
ALGORITHMS |= {name: {"env": "Pendulum-v1"} for name in OTHERS}
SHAPES: dict[str, dict[str, Any]] = {
    "single": {"workers": 1, "engine": "inline"},
    "two actors": {"workers": 3, "engine": "inline"},
    "two learners": {"workers": 4, "learners": 2, "engine": "inline"},
}


def compared(folder: Path) -> dict[str, Any]:
    """All that a run leaves."""
    left = left_in(folder)
    state = left["state"]
    replay = state["worker"]["replay"] if "worker" in state else state["replay"]
    # Of priorities: below these nothing is left, which is another way to say the same.
    replay["sampler"].pop("floors", None)
    return left


def stop_after(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes while that update is written down."""
    real = records.Records.update

    def then_a_signal(self: Any, steps: int, updates: int, *more: Any) -> None:
        real(self, steps, updates, *more)
        if updates == update and self.folder.path is not None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(records.Records, "update", then_a_signal)


def cases() -> list[Any]:
    found = []
    for algorithm in ALGORITHMS:
        for shape in SHAPES:
            seldom = [pytest.mark.slow] if algorithm in OTHERS and shape != "single" else []
            found.append(pytest.param(algorithm, shape, marks=seldom))
    return found


@pytest.mark.parametrize(("algorithm", "shape"), cases())
def test_resumed_is_as_if_never_stopped(
    algorithm: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, target, optimiser, replay, priorities, episodes under way, metrics."""
    options = SMALL | ALGORITHMS[algorithm] | SHAPES[shape]
    algorithm = algorithm.partition(",")[0]
    mh.train(algorithm, run_dir=str(tmp_path / "whole"), **options)
    with monkeypatch.context() as patch:
        stop_after(random.Random(shape).randint(6, 14), patch)
        with pytest.raises(Paused):
            mh.train(algorithm, run_dir=str(tmp_path / "run"), **options)
    result = mh.resume(tmp_path / "run")
    assert result.summary["exit"] == "finished"
    whole, stopped = compared(tmp_path / "whole"), compared(tmp_path / "run")
    assert len(whole["metrics"]) == 20
    assert whole["metrics"][-1]["gradient_steps"] > 0
    assert whole["state"]["algorithm"]["version"] > 100
    if shape == "single":
        replay = whole["state"]["worker"]["replay"]
        assert len(replay["ring"]["columns"][0]) == 600  # it has gone round
    else:
        assert len(whole["state"]["turns"]["actors"]) == 2
        assert sum(len(s["columns"][0]) for s in whole["state"]["replay"]["shards"]) == 600
    check_same(whole, stopped)


def test_what_is_compared_is_not_nothing(tmp_path: Path) -> None:
    """Another seed leaves other priorities and other rows."""
    options = SMALL | ALGORITHMS["dqn"] | SHAPES["two actors"] | {"steps": 640}
    for seed in (1, 2):
        mh.train("dqn", run_dir=str(tmp_path / str(seed)), seed=seed, **options)
    one, other = (compared(tmp_path / str(seed))["state"] for seed in (1, 2))
    for path in (("replay", "sampler", "priorities"), ("turns", "actors"), ("algorithm",)):
        a, b = one, other
        for name in path:
            a, b = a[name], b[name]
        with pytest.raises(AssertionError):
            check_same(a, b)


def test_a_checkpoint_in_between_changes_nothing(tmp_path: Path) -> None:
    options = SMALL | ALGORITHMS["dqn"] | SHAPES["two actors"] | {"steps": 640}
    mh.train("dqn", run_dir=str(tmp_path / "whole"), **options)
    mh.train("dqn", run_dir=str(tmp_path / "often"), checkpoint_seconds=0.0, **options)
    whole, often = compared(tmp_path / "whole"), compared(tmp_path / "often")
    for left in (whole, often):
        del left["config"]
    check_same(whole, often)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "manyhands.cli.main", *words]


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [
        ("dqn", 2),
        pytest.param("ddpg", 2, marks=pytest.mark.slow),
        pytest.param("dqn", 1, marks=pytest.mark.slow),
        pytest.param("ddpg", 1, marks=pytest.mark.slow),
    ],
)
def test_local_stopped_by_sigterm(algorithm: str, workers: int, tmp_path: Path) -> None:
    """`manyhands train`, SIGTERM after some updates, `manyhands resume`: processes as in life, and
    what they leave is what the same run leaves inline that was not stopped. Two workers are a
    learner and one actor; one is strategy single."""
    words = [
        "--workers", str(workers), "--num-envs", "4",
        "--rollout-length", "16", "--pull-every", "8", "--steps", "8000", "--hidden", "16",
        "--learning-starts", "200", "--batch-size", "32", "--replay-size", "3000",
        "--checkpoint-replay", "--quiet", "--no-tensorboard", "--timeout", "120",
    ]  # fmt: skip
    words += {"dqn": ["--env", "CartPole-v1"],
              "ddpg": ["--env", "Pendulum-v1", "--noise-kind", "ou"]}[algorithm]  # fmt: skip
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert main(["train", algorithm, *words, "--engine", "inline", "--run-dir", str(whole)]) == 0
    process = subprocess.Popen(
        command("train", algorithm, *words, "--engine", "local", "--run-dir", str(halved)),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    path, deadline = halved / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.stat().st_size > 4000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    steps = checkpoint.newest(halved)[0].facts["env_steps"]
    assert 0 < steps < 8000, "the run was over before it was stopped"
    subprocess.run(command("resume", str(halved)), check=True, timeout=200)
    expected, found = compared(whole), compared(halved)
    expected["config"] = expected["config"].replace('engine = "inline"', 'engine = "local"')
    check_same(expected, found)
    assert not os.path.exists(halved / ".lock")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lstm": 8},
        {"collect": "episodes"},
        {"unrolls": 2},
        {"replay": 4, "unrolls": 2, "replay_share": 0.5},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_impala_alone(more: dict[str, Any], tmp_path: Path) -> None:
    """One worker has all there is in its checkpoint: environments, memory, unrolls that wait."""

    def train(name: str, steps: int) -> Path:
        mh.train(
            "impala", env="CartPole-v1", engine="inline", seed=3, steps=steps, num_envs=2,
            rollout_length=8, learning_rate=1e-3, hidden=(8,), quiet=True, tensorboard=False,
            run_dir=str(tmp_path / name), **more,
        )  # fmt: skip
        return tmp_path / name

    whole, part = train("whole", 960), train("part", 480)
    mh.resume(part, steps=960)
    weights = "policy.safetensors"
    assert (whole / weights).read_bytes() == (part / weights).read_bytes()
    assert (whole / "episodes.csv").read_text().count("\n") > 5
