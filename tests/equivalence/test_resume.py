"""A run that was stopped and resumed ends as one that was not, to the bit."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import resume_programs
from conftest import engine_params
from resume_programs import ENVS, check_same, configuration, left_in
from training_programs import as_in_a_worker

from manyhands import launch
from manyhands.engines import stopping
from manyhands.experiment import checkpoint, records
from manyhands.run import Paused, resume, train

pytestmark = [pytest.mark.usefixtures("nothing_left")]

CELLS = list(itertools.product(("a2c", "ppo", "trpo"), ("gather", "allreduce"), ENVS))
MORE: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "episodes": {"collect": "episodes", "batch_steps": 96, "steps": 2500},
    "pendulum episodes": {
        "env": "Pendulum-v1",
        "collect": "episodes",
        "batch_steps": 300,
        "steps": 12000,
    },
    "penalty": {"kl_penalty": True, "target_kl": 0.01},  # PPO's adaptive weight is state, too
    "dict": {"env": "manyhands/Counter-v0", "env_kwargs": {"as_dict": True, "longest": 60}},
    "scaled": {"env": "Pendulum-v1", "box_actions": "scale", "log_every": 3},
}


@functools.cache
def both(engine: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Every case as it was left whole, and stopped and resumed, on one engine; one launch."""
    rng = random.Random(11)
    with tempfile.TemporaryDirectory() as name:
        folder, cases = Path(name), {}
        for algorithm, strategy, env in CELLS:
            cases[f"{algorithm}-{strategy}-{env}"] = (algorithm, strategy, env, {})
        for what, more in MORE.items():
            more = dict(more)
            cases[what] = ("ppo", "gather", more.pop("env", "CartPole-v1"), more)
        runs = []
        for what, (algorithm, strategy, env, more) in cases.items():
            names = folder / what, folder / f"{what}-stopped"
            more = {"engine": engine} | more
            plain = [configuration(algorithm, strategy, env, p, **more) for p in names]
            runs.append([*plain, rng.randint(1, 7)])
        with as_in_a_worker(), mock.patch.object(stopping, "asked", resume_programs.stop_word):
            launch(resume_programs.stop_and_resume, runs, workers=2, engine=engine, timeout=60)
        return {
            what: (left_in(folder / what), left_in(folder / f"{what}-stopped")) for what in cases
        }


@pytest.mark.parametrize(("algorithm", "strategy", "env"), CELLS)
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_resumed_is_as_if_never_stopped(
    engine: str, algorithm: str, strategy: str, env: str
) -> None:
    """Weights, optimiser, generators, normalisers, environments, metrics, episodes."""
    whole, stopped = both(engine)[f"{algorithm}-{strategy}-{env}"]
    assert len(whole["metrics"]) == 8
    assert whole["state"]["team"] == {"steps": 768, "updates": 8, "solved": False}
    check_same(whole, stopped)


@pytest.mark.parametrize("what", list(MORE))
def test_other_things_that_are_kept(what: str) -> None:
    pair = both("inline")[what]
    if what == "overlap":  # who does not act draws no noise; who does not learn counts no versions
        for left in pair:
            left["state"]["workers"][0].pop("collector", None)
            left["state"]["workers"][1]["extra"].pop("version", None)
    check_same(*pair)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first of an engine waits for all of its runs
@pytest.mark.parametrize(("algorithm", "strategy", "env"), CELLS)
@pytest.mark.parametrize("engine", engine_params("mpi", "torch", "ray"))
def test_resumed_on_other_engines(engine: str, algorithm: str, strategy: str, env: str) -> None:
    check_same(*both(engine)[f"{algorithm}-{strategy}-{env}"])


def test_what_is_compared_is_not_nothing() -> None:
    """The comparison sees one bit of one weight, and one draw of one generator."""
    whole, _ = both("inline")["ppo-gather-Pendulum-v1"]
    other, _ = both("inline")["ppo-allreduce-Pendulum-v1"]
    assert set(whole["state"]) == {"algorithm", "team", "workers", "records"}
    worker = whole["state"]["workers"][1]
    assert {"collector", "normaliser", "chance", "extra"} <= set(worker)
    assert len(worker["collector"]["envs"]["actions"][0]) == 128 % 200  # in mid-episode
    with pytest.raises(AssertionError):
        check_same(whole, other)


# -- by signals, as a person or a job manager stops it ---------------------------------------------

OPTIONS: dict[str, Any] = {
    "env": "CartPole-v1", "num_envs": 4, "rollout_length": 16, "hidden": (16,), "quiet": True,
    "tensorboard": False,
}  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_inline_stops_and_resumes_in_this_process(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup: then a run ignores it, too
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
        signal.signal(number, signal.SIG_DFL)
    options = OPTIONS | {"engine": "inline", "workers": 2, "steps": 640}
    train("a2c", **options, run_dir=str(tmp_path / "whole"))
    real = records.Records.update

    def then_a_signal(self: Any, steps: int, *more: Any) -> None:
        real(self, steps, *more)
        if steps == 320 and self.folder.path is not None:
            signal.raise_signal(number)  # seen at the end of the next update

    with monkeypatch.context() as patch:
        patch.setattr(records.Records, "update", then_a_signal)
        with pytest.raises(Paused) as paused:
            train("a2c", **options, run_dir=str(tmp_path / "run"))
    assert (paused.value.number, paused.value.env_steps) == (number, 384)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    result = resume(tmp_path / "run")
    assert (result.summary["exit"], result.summary["updates"]) == ("finished", 10)
    check_same(left_in(tmp_path / "whole"), left_in(tmp_path / "run"))
    assert resume(tmp_path / "run").worked is False
    longer = resume(tmp_path / "run", steps=700)
    assert (longer.worked, longer.summary["env_steps"]) == (True, 704)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "manyhands.cli.main", *words]


@pytest.mark.parametrize(
    ("algorithm", "strategy", "engine"),
    [
        ("ppo", "allreduce", "local"),
        pytest.param("trpo", "gather", "local", marks=pytest.mark.slow),
        pytest.param("a2c", "allreduce", "torch", marks=pytest.mark.slow),
        pytest.param("a2c", "gather", "mpi", marks=[pytest.mark.slow, pytest.mark.mpi]),
        pytest.param("a2c", "gather", "ray", marks=[pytest.mark.slow, pytest.mark.ray]),
    ],
)
def test_sigterm_at_a_random_moment(
    algorithm: str, strategy: str, engine: str, tmp_path: Path
) -> None:
    """`manyhands train`, SIGTERM, `manyhands resume`: processes as they are in life."""
    words = [
        "--env", "Pendulum-v1", "--normalize-observations", "--normalize-rewards", "-n", "2",
        "--num-envs", "4", "--rollout-length", "64", "--steps", "15360", "--hidden", "16",
        "--strategy", strategy, "--engine", engine, "--quiet", "--no-tensorboard",
    ]  # fmt: skip
    words += {"ppo": ["--minibatch", "64"], "trpo": ["--value-minibatch", "64"]}.get(algorithm, [])
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    subprocess.run(
        command("train", algorithm, *words, "--run-dir", str(whole)), check=True, timeout=200
    )
    process = subprocess.Popen(
        command("train", algorithm, *words, "--run-dir", str(halved)), stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    path = halved / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and path.stat().st_size):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 143, said
    assert f"manyhands resume {halved}" in said
    steps = checkpoint.newest(halved)[0].facts["env_steps"]
    assert 0 < steps < 15360, "the run was over before it was stopped"
    subprocess.run(command("resume", str(halved)), check=True, timeout=200)
    check_same(left_in(whole), left_in(halved))
    assert not os.path.exists(halved / ".lock")
