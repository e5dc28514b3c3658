"""Every fault is found before anything starts, all together, with what to type."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from manyhands import support
from manyhands.algorithms.registry import SPECS
from manyhands.config import Experiment, build, validate
from manyhands.errors import ConfigError, install
from manyhands.experiment.folder import RunFolder


class Strange(gymnasium.Env):  # type: ignore[misc]
    """Spaces to be refused, or not, by keyword."""

    closed = 0

    def __init__(self, observation: str = "box", action: str = "discrete") -> None:
        kinds: dict[str, Any] = {
            "box": spaces.Box(-1, 1, (2,), np.float32),
            "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "ints": spaces.Box(0, 5, (2,), np.int64),
            "discrete": spaces.Discrete(3),
            "multidiscrete": spaces.MultiDiscrete([2, 3]),
            "multibinary": spaces.MultiBinary(2),
            "text": spaces.Text(5),
            "tuple": spaces.Tuple([spaces.Discrete(2)]),
            "dict": spaces.Dict({"a": spaces.Discrete(2)}),
        }
        self.observation_space, self.action_space = kinds[observation], kinds[action]

    def close(self) -> None:
        Strange.closed += 1


STRANGE = f"{__name__}:Strange"


def make_pair() -> Any:
    return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")


def faults(algorithm: str = "ppo", **overrides: Any) -> list[str]:
    return validate.faults(build(algorithm, **{"env": "CartPole-v1"} | overrides))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("algorithm", support.built())
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("engine", support.ENGINES)
def test_the_defaults_are_right(algorithm: str, workers: int, engine: str) -> None:
    spread: dict[str, Any] = {} if workers == 1 else {"num_envs": 12}  # for four, or three actors
    spread |= {"env": "Pendulum-v1"} if SPECS[algorithm].actions == "bounded" else {}
    strategy = build(algorithm, env="CartPole-v1", workers=workers).strategy
    if support.on_engine(strategy, engine) == support.OK:
        assert faults(algorithm, workers=workers, engine=engine, **spread) == []
    assert os.listdir() == []  # nothing is left behind


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"env": "Cartpole-v1"}, "did you mean CartPole-v1"),
        ({"env": "no_such:Env"}, "cannot be imported"),
        ({"engine": "locale"}, "there is no engine 'locale'; did you mean local?"),
        ({"strategy": "alreduce"}, "no strategy 'alreduce'; did you mean allreduce?"),
        ({"strategy": "apex"}, "ppo with apex: ppo learns from fresh data only"),
        ({"strategy": "gradient_server"}, "type: --strategy single or gather or allreduce"),
        ({"strategy": "single", "workers": 2}, "strategy single has one worker and 2 were asked"),
        ({"address": "host:1"}, "add --engine ray"),
        ({"workers": 0}, "workers=0: at least 1 is needed"),
        ({"workers": 3}, "8 = 3 × 2 + 2); type: --num-envs 9, or --workers 2"),
        ({"workers": 12}, "12 workers share 8 environments"),
        ({"workers": 12}, "type: --num-envs 12, or --workers 8"),
        ({"minibatch": 300}, "2048 = 6 × 300 + 248); type: --minibatch 256"),
        ({"minibatch": 4096}, "minibatch=4096 is more than the batch (8 envs × 256 steps = 2048)"),
        ({"steps": 100}, "steps=100 is less than one batch (8 envs × 256 steps = 2048)"),
        ({"steps": -1}, "steps=-1: at least 1 is needed"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"timeout": -2.5}, "timeout=-2.5 must not be negative"),
        ({"timeout": float("nan")}, "timeout=nan: a number is needed"),
        ({"epochs": -1}, "epochs=-1 must not be negative"),
        ({"gamma": 1.5}, "gamma=1.5 must lie from 0 to 1"),
        ({"gae_lambda": -0.5}, "gae_lambda=-0.5 must lie from 0 to 1"),
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is not a schedule; give a number"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 goes down to -1"),
        ({"learning_rate": "linear:1e-3:-1"}, "goes down to -1"),
        ({"hidden": (64, 0)}, "hidden=[64, 0]: every layer needs at least 1 unit"),
        ({"collect": "episodes"}, "type: --batch-steps 2048"),
        ({"batch_steps": 10}, "add --collect episodes"),
        (
            {"collect": "episodes", "batch_steps": 4000, "steps": 100},
            "one batch (batch_steps = 4000)",
        ),
        ({"env_backend": "envpol"}, "no env_backend 'envpol'; did you mean envpool"),
        ({"env_kwargs": {"x": 1}}, "CartPole-v1 cannot be made with env_kwargs {'x': 1}: Type"),
        ({"env_kwargs": {"seed": 1}}, "env_kwargs has seed, which the run itself decides"),
        ({"env": STRANGE, "env_kwargs": {"observation": "text"}}, "observation space is Text"),
        ({"env": STRANGE, "env_kwargs": {"action": "tuple"}}, "action space Tuple"),
        ({"env": STRANGE, "env_kwargs": {"action": "ints"}}, "must be of floats"),
        (
            {"env": STRANGE, "env_kwargs": {"action": "unbounded"}, "box_actions": "scale"},
            "needs finite bounds",
        ),
        (
            {
                "env": STRANGE,
                "env_kwargs": {"observation": "dict"},
                "normalize_observations": True,
            },
            "normalize_observations needs a Box",
        ),
        (
            {"env": f"{__name__}:make_pair"},
            "makes 2 environments at once, and each worker has 8 (8 envs / 1 workers); type: "
            "--num-envs 2",
        ),
        ({"run_dir": "file/run"}, "file is a file"),
        ({"run_dir": "/proc/run"}, "cannot be written"),
    ],
)
def test_each_fault_alone(overrides: dict[str, Any], said: str) -> None:
    Path("file").touch()
    found = faults(**overrides)
    assert len(found) == 1, found
    assert said in found[0]


def test_targets_may_be_negative_and_discounts_at_their_ends() -> None:
    assert faults(target_return=-200.0, gamma=1.0, gae_lambda=0.0, minibatch=0) == []


@pytest.mark.parametrize("action", ["discrete", "multidiscrete", "multibinary", "box", "unbounded"])
@pytest.mark.parametrize("observation", ["box", "ints", "discrete", "multibinary", "dict"])
def test_spaces_that_are_understood(observation: str, action: str) -> None:
    before = Strange.closed
    assert faults(env=STRANGE, env_kwargs={"observation": observation, "action": action}) == []
    assert Strange.closed == before + 2  # one shows its spaces, one what its info has


def test_both_spaces_are_looked_at() -> None:
    kwargs = {"observation": "text", "action": "tuple"}
    assert len(faults(env=STRANGE, env_kwargs=kwargs)) == 2


def test_a_vector_env_of_the_right_size() -> None:
    assert faults(env=f"{__name__}:make_pair", num_envs=4, workers=2, minibatch=64) == []


def test_all_faults_together_and_soon() -> None:
    experiment = build(
        "ppo", env="CartPol-v1", workers=4, steps=5, gamma=2, learning_rate="x", engine="mpl",
        strategy="apex", minibatch=7, run_dir="/proc/x", timeout=-1,
    )  # fmt: skip
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        validate.check(experiment)
    assert time.process_time() - start < 3.0
    text = str(caught.value)
    assert text.startswith("10 things are wrong:\n  1. ")
    for word in ("mpl", "apex", "timeout", "gamma", "'x'", "num-envs", "minibatch", "steps=5",
                 "CartPol-v1", "/proc/x"):  # fmt: skip
        assert word in text


def test_unknown_algorithm_in_an_experiment_made_by_hand() -> None:
    experiment = Experiment(
        "pppo", build("ppo", env="CartPole-v1").run, build("ppo", env="X").options
    )
    assert validate.faults(experiment) == ["there is no algorithm 'pppo'; did you mean ppo?"]


@pytest.mark.parametrize(("engine", "package"), [("mpi", "mpi4py"), ("ray", "ray")])
def test_missing_packages(engine: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = validate.importlib.util.find_spec
    monkeypatch.setattr(
        validate.importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a)
    )
    (found,) = faults(engine=engine)
    assert f"{package} is not installed; type: {install(engine)}" in found


def test_a_folder_that_holds_a_run() -> None:
    experiment = build("ppo", env="CartPole-v1", run_dir="mine")
    assert validate.faults(experiment) == []
    with RunFolder("mine") as folder:
        folder.open(experiment)
    (found,) = validate.faults(experiment)
    assert "mine already holds a run" in found


def test_no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert faults(device="cuda") == ["device=cuda, but torch finds no GPU here; type: --device cpu"]
    assert faults(device="auto") == []


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_SIMULATED_GPUS", "2")
    monkeypatch.setenv("MANYHANDS_GPUS", "4")
    (fault,) = faults(device="cuda")
    assert fault.startswith("MANYHANDS_GPUS=4, but this machine has 2")
    assert faults(device="cpu") == []
    monkeypatch.setenv("MANYHANDS_GPUS", "2")
    assert faults(device="cuda") == []
