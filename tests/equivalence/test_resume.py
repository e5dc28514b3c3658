"""A run that was stopped and resumed ends as one that was not, to the bit."""

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
from conftest import engine_params
from resume_programs import check_same, left_in
from second_launch import CELLS, MORE, left_by, left_resumed

from manyhands.cli.main import main
from manyhands.experiment import checkpoint, records
from manyhands.run import Paused, resume, train

pytestmark = [pytest.mark.usefixtures("nothing_left")]

NAMES = [name for name, *_ in CELLS]


def both(engine: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run has left whole, and stopped and resumed."""
    left = left_by(engine) if engine in ("inline", "local") else left_resumed(engine)
    return left[name], left[f"{name}-stopped"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_resumed_is_as_if_never_stopped(engine: str, name: str) -> None:
    """Weights, optimiser, generators, normalisers, environments, metrics, episodes."""
    whole, stopped = both(engine, name)
    assert len(whole["metrics"]) == 8
    assert whole["state"]["team"] == {"steps": 768, "updates": 8, "solved": False}
    check_same(whole, stopped)


@pytest.mark.parametrize("what", [name for name, *_ in MORE])
def test_other_things_that_are_kept(what: str) -> None:
    pair = both("inline", what)
    if what == "overlap":  # who does not act draws no noise; who does not learn counts no versions
        for left in pair:
            left["state"]["workers"][0].pop("collector", None)
            left["state"]["workers"][1]["extra"].pop("version", None)
    check_same(*pair)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first of an engine waits for all of its runs
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", engine_params("mpi", "torch", "ray"))
def test_resumed_on_other_engines(engine: str, name: str) -> None:
    check_same(*both(engine, name))


def test_what_is_compared_is_not_nothing() -> None:
    """The comparison sees one bit of one weight, and one draw of one generator."""
    whole, _ = both("inline", "ppo-gather-Pendulum-v1")
    other, _ = both("inline", "ppo-allreduce-Pendulum-v1")
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
    """`manyhands train`, SIGTERM, `manyhands resume`: processes as they are in life, and what they
    leave is what the same run leaves inline that was not stopped."""
    words = [
        "--env", "Pendulum-v1", "--normalize-observations", "--normalize-rewards", "-n", "2",
        "--num-envs", "4", "--rollout-length", "64", "--steps", "10240", "--hidden", "16",
        "--strategy", strategy, "--quiet", "--no-tensorboard",
    ]  # fmt: skip
    words += {"ppo": ["--minibatch", "64"], "trpo": ["--value-minibatch", "64"]}.get(algorithm, [])
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert main(["train", algorithm, *words, "--engine", "inline", "--run-dir", str(whole)]) == 0
    process = subprocess.Popen(
        command("train", algorithm, *words, "--engine", engine, "--run-dir", str(halved)),
        stderr=subprocess.PIPE, text=True,
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
    assert 0 < steps < 10240, "the run was over before it was stopped"
    subprocess.run(command("resume", str(halved)), check=True, timeout=200)
    expected, found = left_in(whole), left_in(halved)
    expected["config"] = expected["config"].replace('engine = "inline"', f'engine = "{engine}"')
    check_same(expected, found)
    assert not os.path.exists(halved / ".lock")
