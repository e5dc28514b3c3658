"""Algorithms and networks of the user's own, as the examples show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.config import build, load_toml
from manyhands.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("nothing_left")]

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "own_algorithm:SPEC"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_it_is_short() -> None:
    assert len((EXAMPLES / "own_algorithm.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("engine", "strategy", "workers"),
    [
        ("inline", "single", 1),
        ("inline", "gather", 2),
        ("inline", "allreduce", 2),
        ("local", "allreduce", 2),
        pytest.param("local", "single", 1, marks=pytest.mark.slow),
        pytest.param("local", "gather", 2, marks=pytest.mark.slow),
    ],
)
def test_it_trains_resumes_and_loads(
    engine: str, strategy: str, workers: int, tmp_path: Path
) -> None:
    options = {"env": "CartPole-v1", "strategy": strategy, "workers": workers, "engine": engine,
               "num_envs": 4, "rollout_length": 16, "hidden": (8,), "quiet": True,
               "tensorboard": False}  # fmt: skip
    uncut = options | {"engine": "inline"}  # what it learns is no engine's affair
    whole = mh.train(NAME, **uncut, steps=256, run_dir=str(tmp_path / "whole"))
    half = mh.train(NAME, **options, steps=128, run_dir=str(tmp_path / "half"))
    mh.resume(half.run_dir, steps=256)
    policies = [(r.run_dir / "policy.safetensors").read_bytes() for r in (whole, half)]
    assert policies[0] == policies[1]
    assert load_toml(whole.run_dir / "config.toml").algorithm == NAME
    assert mh.load(whole.run_dir).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_from_the_folder_it_lies_in(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands.cli.main", "train", NAME, "--env", "CartPole-v1",
               "--engine", "inline", "-n", "1", "--steps", "2048", "--no-tensorboard",
               "--learning-rate", "0.01", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ended = subprocess.run(
        command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert "reinforce on CartPole-v1" in ended.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["algorithm"] == NAME


def test_what_its_kind_does_not_allow_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reinforce with apex: reinforce learns from fresh data"):
        mh.train(NAME, env="CartPole-v1", strategy="apex", workers=2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_algorithm:NOTHING", "cannot be found"),
        ("no_such_module:SPEC", "cannot be imported"),
        ("own_algorithm:Reinforce", "is given by a manyhands.AlgorithmSpec"),
        ("reinforce", "there is no algorithm 'reinforce'"),
    ],
)
def test_a_wrong_name_is_said(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(name, env="CartPole-v1")


@pytest.mark.parametrize("network", ["build", "PolicyAndValue"])
def test_the_example_of_a_network(network: str, tmp_path: Path) -> None:
    """examples/own_network.py, by its name and with its options."""
    run = mh.train(
        "ppo", env="CartPole-v1", network=f"own_network:{network}", network_kwargs={"width": 16},
        steps=256, num_envs=4, rollout_length=32, minibatch=32, engine="inline", quiet=True,
        tensorboard=False, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    sizes = {tuple(p.shape) for p in mh.load(run.run_dir).model.parameters()}
    assert (16, 4) in sizes
