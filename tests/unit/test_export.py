"""Exported policies act as the policy does, for any number of rows, and the rest of the policy."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import manyhands as mh
from manyhands.config import build
from manyhands.envs.adapter import DictRows
from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError, install
from manyhands.policy import Policy, build_model, build_normaliser

DISCRETE = spaces.Discrete(3, start=1)
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]] = {
    "vector, discrete": (spaces.Box(-9, 9, (4,), np.float32), DISCRETE, {}),
    "normalised, clipped": (spaces.Box(-9, 9, (3,), np.float64), BOX, {"normalize": True}),
    "scaled": (spaces.Box(-9, 9, (2, 3), np.float32), BOX, {"box_actions": "scale"}),
    "image, shared": (spaces.Box(0, 255, (4, 40, 40), np.uint8), BOX, {"shared": True}),
    "choice": (spaces.Discrete(5, start=2), spaces.MultiDiscrete([2, 4]), {}),
    "choices": (spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3), {}),
    "dict": (
        spaces.Dict({"z.1": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,), np.float32)}),
        DISCRETE,
        {},
    ),
}


def policy_of(
    observations: spaces.Space[Any],
    actions: spaces.Space[Any],
    normalize: bool = False,
    box_actions: str = "clip",
    shared: bool = False,
) -> Policy:
    experiment = build(
        "ppo",
        env="CartPole-v1",
        normalize_observations=normalize,
        box_actions=box_actions,
        shared_network=shared,
        activation="relu",
    )
    model = build_model(experiment, observations, actions)
    with torch.no_grad():  # the last layer begins near zero: let the answers differ
        model.policy_out.weight.mul_(300.0)
    normaliser = build_normaliser(experiment, observations)
    for stats in normaliser.parts.values():
        stats.update(np.random.default_rng(0).normal(3.0, 2.0, (100, *stats.shape)))
    normaliser.synchronise(None)
    return Policy(model, normaliser, actions, box_actions, observation_space=observations)


def samples(space: spaces.Space[Any], rows: int) -> Any:
    space.seed(rows)
    batch = zeros(space, (rows,))
    into = DictRows(batch) if isinstance(batch, dict) else batch
    for i in range(rows):
        into[i] = space.sample()
    return batch


def parts(batch: Any) -> list[np.ndarray[Any, Any]]:
    return [batch[key] for key in sorted(batch)] if isinstance(batch, dict) else [batch]


def assert_same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=SPACES, ids=list(SPACES))
def policy(request: pytest.FixtureRequest) -> Policy:
    observations, actions, more = SPACES[request.param]
    return policy_of(observations, actions, **more)


def test_torchscript_acts_as_the_policy(policy: Policy, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of torch's plans reaches the user
        path = policy.export(tmp_path / "policy.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.load(str(path))
    answers = []
    for rows in (1, 2, 33):
        batch = samples(policy.observation_space, rows)
        found = graph(*[torch.from_numpy(part) for part in parts(batch)])
        assert not found.requires_grad
        assert_same(found.numpy(), policy.act_batch(batch))
        answers += policy.act_batch(batch).tolist()
    assert len({str(answer) for answer in answers}) > 1  # a constant would agree with anything


@pytest.mark.skipif(
    importlib.util.find_spec("onnxscript") is None or importlib.util.find_spec("onnx") is None,
    reason="needs onnx and onnxscript: pip install 'manyhands[onnx]'",
)
def test_onnx_acts_as_the_policy(
    policy: Policy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    path = policy.export(tmp_path / "policy.onnx")
    assert capfd.readouterr() == ("", "")
    assert [p.name for p in tmp_path.iterdir()] == ["policy.onnx"]  # weights are inside
    session = runtime.InferenceSession(str(path))
    space = policy.observation_space
    keys = sorted(space.spaces) if isinstance(space, spaces.Dict) else ["observation"]
    assert [given.name for given in session.get_inputs()] == keys
    for rows in (1, 2, 33):
        batch = samples(space, rows)
        (found,) = session.run(["action"], dict(zip(keys, parts(batch), strict=True)))
        assert_same(found, policy.act_batch(batch))


def test_without_onnx_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "onnx" else real(name, *a)
    )
    policy = policy_of(*SPACES["vector, discrete"][:2])
    with pytest.raises(mh.SupportError, match=re.escape(install("onnx"))):
        policy.export(tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["policy.h5", "policy", "no/such/folder/policy.pt"])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    policy = policy_of(*SPACES["vector, discrete"][:2])
    with pytest.raises(ConfigError, match=r"\.onnx or in \.pt|there is no folder"):
        policy.export(tmp_path / name)


def test_exporting_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    policy = policy_of(*SPACES["normalised, clipped"][:2], normalize=True)
    batch = samples(policy.observation_space, 5)
    before = policy.act_batch(batch)
    policy.export(tmp_path / "policy.pt")
    assert np.array_equal(policy.act_batch(batch), before)
    assert all(p.requires_grad for p in policy.model.parameters())


def test_a_loaded_run_exports_and_runs_without_manyhands(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mh.train(
        "ppo", env="Pendulum-v1", steps=64, num_envs=2, rollout_length=32, minibatch=32,
        engine="inline", quiet=True, normalize_observations=True, run_dir=str(run),
    )  # fmt: skip
    policy = mh.load(run)
    policy.export(tmp_path / "policy.pt")
    code = (
        "import sys, torch\n"
        f"graph = torch.jit.load({str(tmp_path / 'policy.pt')!r})\n"
        "print(graph(torch.tensor([[1.0, 0.0, 0.5]])).item(), 'manyhands' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=200
    )
    value, ours = done.stdout.split()
    expected = policy.act(np.array([1.0, 0.0, 0.5], np.float32))
    assert float(value) == pytest.approx(expected.item(), abs=1e-5)
    assert ours == "False"


def test_value_is_the_critics(tmp_path: Path) -> None:
    policy = policy_of(*SPACES["normalised, clipped"][:2], normalize=True)
    batch = samples(policy.observation_space, 4)
    with torch.no_grad():
        seen = torch.from_numpy(policy.normaliser.apply(batch))
        expected = policy.model(seen)[1].numpy()
    assert np.array_equal(policy.value_batch(batch), expected)
    assert policy.value(batch[2]) == pytest.approx(float(expected[2]), rel=1e-5)


def test_drawn_actions_repeat_from_a_seed() -> None:
    policy = policy_of(*SPACES["scaled"][:2])
    batch = samples(policy.observation_space, 6)
    drawn = []
    for seed in (1, 1, 2):
        policy.seed(seed)
        drawn.append(policy.act_batch(batch, deterministic=False))
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_spaces_are_there_for_whoever_loads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mh.train(
        "a2c", env="CartPole-v1", steps=32, num_envs=2, rollout_length=16, engine="inline",
        quiet=True, run_dir=str(run),
    )  # fmt: skip
    policy = mh.load(run)
    env = gymnasium.make("CartPole-v1")
    assert policy.observation_space == env.observation_space
    assert policy.action_space == env.action_space
    assert policy.experiment is not None
    assert policy.experiment.run.env == "CartPole-v1"
