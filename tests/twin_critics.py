"""What SAC and TD3 have in common, two critics, against slow references: for their test files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

import manyhands as mh
from manyhands.algorithms.base import Alone
from manyhands.algorithms.off_policy import NOISE

SPACE = Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
ROWS = 12
PATHS = pytest.mark.parametrize("by_autograd", [False, True], ids=["written out", "autograd"])


def some_rows(count: int, seed: int, draws: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(count, 3)).astype(np.float32),
        "next_obs": rng.normal(size=(count, 3)).astype(np.float32),
        "action": rng.uniform(ACTIONS.low, ACTIONS.high, (count, 2)).astype(np.float32),
        "reward": (3.0 * rng.normal(size=count)).astype(np.float32),
        "discount": np.where(rng.random(count) < 0.3, 0.0, 0.97).astype(np.float32),
        "weight": rng.random(count).astype(np.float32),
        NOISE: rng.standard_normal((count, draws)).astype(np.float32),
    }


def layers(model: Any, critic: int | None) -> list[tuple[Any, Any]]:
    """Weights and biases, in double precision, of the policy or of one critic."""
    if critic is None:
        linears = [model.policy_trunk[0], model.policy_trunk[2], model.policy_out.linear]
        pairs = [(layer.weight, layer.bias) for layer in linears]
    else:
        stacked = zip(model.critics.weights, model.critics.biases, strict=True)
        pairs = [(weight[critic], bias[critic, 0]) for weight, bias in stacked]
    return [(w.detach().double().numpy(), b.detach().double().numpy()) for w, b in pairs]


def run(net: list[tuple[Any, Any]], x: Any) -> Any:
    for i, (weight, bias) in enumerate(net):
        x = weight @ x + bias
        if i + 1 < len(net):
            x = np.maximum(x, 0.0)
    return x


def q(model: Any, critic: int, obs: Any, unit: Any) -> float:
    return float(run(layers(model, critic), np.concatenate([obs, unit]))[0])


def unit_of(actions: Any) -> Any:
    return (np.asarray(actions, np.float64) - [0.0, 5.0]) / [2.0, 5.0]


class Halves:
    """The seam of two learners in one process: the second adds what the first has left."""

    def __init__(self, cut: int) -> None:
        self.left: list[torch.Tensor] = []
        self.firsts = [0, cut]

    def sum(self, x: Any) -> Any:
        self.left.append(x.clone())
        return torch.stack(self.left).sum(0)

    def moments(self, x: Any) -> Any:
        raise AssertionError("not needed")

    def place(self, count: int) -> Any:
        return self.firsts.pop(0), ROWS


def check_two_learners(make: Callable[[], Any], batch: dict[str, Any], cut: int) -> None:
    """Two learners, one with the rows before `cut`, are one with all of them."""
    del batch[NOISE]  # drawn in `update`, for all rows alike
    whole, one, other = make(), make(), make()
    whole.update(batch, Alone(), 0.0)
    across = Halves(cut)
    one.update({k: v[:cut] for k, v in batch.items()}, across, 0.0)
    other.update({k: v[cut:] for k, v in batch.items()}, across, 0.0)
    assert torch.allclose(other.flat.data, whole.flat.data, atol=1e-6)


def check_state(make: Callable[[], Any], rows: Callable[[int], dict[str, Any]]) -> None:
    one, other = make(), make()
    for i in range(3):
        one.update(rows(i), Alone(), 0.0)
    other.load_state(one.state())
    for learner in (one, other):
        learner.update(rows(9), Alone(), 0.0)
    assert torch.equal(one.flat.data, other.flat.data)
    assert torch.equal(one.target_flat.data, other.target_flat.data)
    assert one.rng.bit_generator.state == other.rng.bit_generator.state


def loaded_and_exported(algorithm: str, folder: Path) -> tuple[Any, Any]:
    """A short run's policy, which says the same as ONNX, and the observations [5, 3] it saw."""
    onnxruntime = pytest.importorskip("onnxruntime")
    mh.train(
        algorithm, env="Pendulum-v1", steps=256, num_envs=2, learning_starts=64, batch_size=16,
        hidden=(8, 8), seed=1, quiet=True, tensorboard=False, run_dir=str(folder / "run"),
    )  # fmt: skip
    policy = mh.load(folder / "run")
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(policy.export(folder / "policy.onnx"))
    (actions,) = session.run(None, {"observation": obs})
    assert np.allclose(actions, policy.act_batch(obs), atol=1e-5)
    assert math.isfinite(policy.value(obs[0]))
    return policy, obs
