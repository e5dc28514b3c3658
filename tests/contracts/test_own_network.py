"""A network of the user's own: every algorithm, every kind of observation, the whole of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import own_networks
import pytest
import torch
from conftest import PROCESS_ENGINES
from training_programs import folder_of

import manyhands as mh
from manyhands.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("nothing_left")]

# No schedules: one over 192 steps is another than one over 128.
CONSTANT = {"learning_rate": 1e-3}
REPLAY = CONSTANT | {"learning_starts": 32, "batch_size": 8, "replay_size": 500, "beta": 0.5,
                     "checkpoint_replay": True}  # fmt: skip
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": CONSTANT | {"minibatch": 16},
    "impala": CONSTANT,
    "dqn": REPLAY | {"epsilon_steps": 100},
    "ddpg": REPLAY | {"policy_learning_rate": 1e-3},
}


def train(algorithm: str, kind: str, folder: Path, steps: int, **more: Any) -> Any:
    kwargs = {"kind": kind, "continuous": algorithm == "ddpg"}
    options = {"env": "own_networks:Seen", "env_kwargs": kwargs, "num_envs": 4, "quiet": True,
               "rollout_length": 16, "network": "own_networks:Features", "engine": "inline",
               "network_kwargs": {"width": 5}, "tensorboard": False}  # fmt: skip
    options |= ALGORITHMS.get(algorithm, {}) | more
    return mh.train(algorithm, **options, steps=steps, run_dir=str(folder))


def weights(run: Any) -> bytes:
    return Path(run.run_dir, "policy.safetensors").read_bytes()


@pytest.mark.parametrize("kind", own_networks.SPACES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_trains_resumes_to_the_bit_and_is_loaded(
    algorithm: str, kind: str, tmp_path: Path
) -> None:
    whole = train(algorithm, kind, tmp_path / "whole", 192)
    half = train(algorithm, kind, tmp_path / "half", 128)
    mh.resume(half.run_dir, steps=192)
    if algorithm != "impala":  # its actors begin new episodes, also alone
        assert weights(whole) == weights(half)
    policy = mh.load(whole.run_dir)
    assert any("module.layers" in name for name in policy.model.state_dict())
    space = own_networks.SPACES[kind]
    space.seed(1)
    seen = space.sample()
    action = policy.act(seen)
    assert policy.action_space.contains(action)
    exported = torch.jit.load(str(policy.export(tmp_path / "policy.pt")))
    parts = [seen[key] for key in sorted(seen)] if isinstance(seen, dict) else [seen]
    given = exported(*(torch.from_numpy(np.asarray(part)[None]) for part in parts))
    np.testing.assert_allclose(given.numpy()[0], action, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "workers"), [("gather", 2), ("allreduce", 2), ("gradient_server", 3)]
)
def test_every_strategy_of_a2c(strategy: str, workers: int, tmp_path: Path) -> None:
    run = train("a2c", "dict", tmp_path / "run", 256, strategy=strategy, workers=workers)
    assert run.summary["updates"] >= 2


@pytest.mark.parametrize(("algorithm", "workers"), [("trpo", 2), ("impala", 3), ("dqn", 3)])
def test_others_with_several_workers(algorithm: str, workers: int, tmp_path: Path) -> None:
    run = train(algorithm, "vector", tmp_path / "run", 256, workers=workers)
    assert run.summary["env_steps"] >= 256


@pytest.mark.parametrize("engine", PROCESS_ENGINES)
def test_every_engine_learns_the_same(engine: str) -> None:
    inline, other = (
        (folder_of(one, 2) / "own network/policy.safetensors").read_bytes()
        for one in ("inline", engine)
    )
    assert inline == other


def test_a_memory_behind_it(tmp_path: Path) -> None:
    run = train("impala", "vector", tmp_path / "run", 128, lstm=4)
    assert mh.load(run.run_dir).act(np.zeros(3, np.float32)) in range(3)


def test_a_class_is_given_by_name_or_as_it_is(tmp_path: Path) -> None:
    named = train("ppo", "vector", tmp_path / "named", 64)
    given = train("ppo", "vector", tmp_path / "given", 64, network=own_networks.Features)
    assert weights(named) == weights(given)
    with pytest.raises(ConfigError, match="a lambda cannot be sent"):
        train("ppo", "vector", tmp_path / "lambda", 64, network=lambda *spaces: None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Idle", r"parameters without a gradient.*forgotten\.weight, forgotten\.bias"),
        ("Moody", "the number of features must not change"),
        ("Flat", r"features of shape \(3,\) for 3 observations; \[3, F\] is expected"),
        ("Pair", "gave a tuple for 3 observations; features are expected"),
        ("frozen", "no parameters that can be trained"),
        ("no_module", "gave a str; a function or class"),
        ("fails", "failed: RuntimeError: the user's own trouble"),
        ("nowhere", "cannot be found"),
    ],
)
def test_a_wrong_one_is_said_before_anything_starts(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        train("ppo", "vector", tmp_path / "run", 64, network=f"own_networks:{name}",
              network_kwargs={})  # fmt: skip
    assert not (tmp_path / "run").exists()
