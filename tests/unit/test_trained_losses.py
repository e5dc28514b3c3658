"""The gradient that each on-policy algorithm trains with, against its equation.

The loss is written here row by row in plain Python, from the header of the algorithm's file, on
outputs of the network in double precision; its gradient is taken by central differences over every
parameter. Nothing of `math/losses.py`, of the heads' densities or of either gradient path is used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from manyhands.algorithms.base import Alone
from manyhands.algorithms.registry import SPECS
from manyhands.networks.build import build_actor_critic

ROWS, STEP = 12, 1e-5
SPACE, ACTIONS = Box(-2.0, 2.0, (3,), np.float32), Discrete(3)
VALUE, ENTROPY, CLIP = 0.7, 0.05, 0.2

Row = tuple[list[float], float, int]  # logits, value, number of the row


def make(name: str, **options: Any) -> Any:
    model = build_actor_critic(SPACE, ACTIONS, hidden=(4,), shared=False, seed=2)
    return SPECS[name].load()(model, SPECS[name].options(**options), seed=1)


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((ROWS, 3)).astype(np.float32)
    shifted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    action = rng.integers(0, 3, ROWS)
    return {
        "obs": rng.standard_normal((ROWS, 3)).astype(np.float32),
        "action": action,
        "logp": shifted[np.arange(ROWS), action],
        "parameters": logits,
        "advantage": rng.standard_normal(ROWS).astype(np.float32),
        "target": rng.standard_normal(ROWS).astype(np.float32),
    }


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def entropy(logits: list[float]) -> float:
    return -sum(math.exp(x) * x for x in log_softmax(logits))


def outputs_of(model: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, values); without the encoder, which makes single precision of everything."""
    values = model.value_out(model.value_trunk(inputs))[:, 0]
    return model.policy_out(model.policy_trunk(inputs)), values


def numeric_gradient(model: Any, loss: Callable[[Any], float], obs: Any) -> np.ndarray:
    """∂loss/∂θ of every parameter, in double precision."""
    twin = copy.deepcopy(model).double()
    inputs = torch.from_numpy(obs).double()
    found = []
    with torch.no_grad():
        for parameter in twin.parameters():
            flat = parameter.view(-1)
            for i in range(flat.numel()):
                ends = []
                for step in (STEP, -2 * STEP):
                    flat[i] += step
                    ends.append(loss(outputs_of(twin, inputs)))
                flat[i] += STEP
                found.append((ends[0] - ends[1]) / (2 * STEP))
    return np.array(found)


def mean_of(row_loss: Callable[[Row, dict[str, Any]], float], rows: dict[str, Any]) -> Any:
    def loss(outputs: Any) -> float:
        parameters, values = outputs
        pairs = zip(parameters.tolist(), values.tolist(), strict=True)
        return sum(row_loss((*pair, i), rows) for i, pair in enumerate(pairs)) / ROWS

    return loss


def rest(row: Row, rows: dict[str, Any]) -> float:
    """c_v (V − R)² − c_e H"""
    logits, value, i = row
    return VALUE * (value - float(rows["target"][i])) ** 2 - ENTROPY * entropy(logits)


def ppo_clip(row: Row, rows: dict[str, Any]) -> float:
    i, gain = row[2], float(rows["advantage"][row[2]])
    ratio = math.exp(log_softmax(row[0])[rows["action"][i]] - float(rows["logp"][i]))
    return -min(ratio * gain, min(max(ratio, 1 - CLIP), 1 + CLIP) * gain) + rest(row, rows)


def ppo_penalty(row: Row, rows: dict[str, Any]) -> float:
    i, gain = row[2], float(rows["advantage"][row[2]])
    new, old = log_softmax(row[0]), log_softmax(rows["parameters"][i].astype(float).tolist())
    ratio = math.exp(new[rows["action"][i]] - float(rows["logp"][i]))
    kl = sum(math.exp(o) * (o - n) for o, n in zip(old, new, strict=True))
    return -ratio * gain + 1.0 * kl + rest(row, rows)  # β is 1 before the first update


def a2c(row: Row, rows: dict[str, Any]) -> float:
    i = row[2]
    return -log_softmax(row[0])[rows["action"][i]] * float(rows["advantage"][i]) + rest(row, rows)


CASES = {
    "ppo clip": ("ppo", {"clip": CLIP}, ppo_clip),
    "ppo penalty": ("ppo", {"kl_penalty": True}, ppo_penalty),
    "a2c": ("a2c", {}, a2c),
}


@pytest.mark.parametrize("path", ["numpy", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_of_the_equation(case: str, path: str) -> None:
    name, options, row_loss = CASES[case]
    algorithm = make(name, value_weight=VALUE, entropy_weight=ENTROPY, **options)
    if path == "torch" or case == "ppo penalty":
        algorithm.fast = None
    else:
        assert algorithm.fast is not None
    rows = batch()
    algorithm.gradient(rows, ROWS)
    want = numeric_gradient(algorithm.model, mean_of(row_loss, rows), rows["obs"])
    assert np.abs(want).max() > 0.01
    np.testing.assert_allclose(algorithm.flat.grad.numpy(), want, atol=2e-5)


@pytest.mark.parametrize("path", ["numpy", "torch"])
def test_impala_on_rows_that_were_traced(path: str) -> None:
    """−log π A + c_v (V − v)² − c_e H, with v and A from V-trace and held fixed (test_math_vtrace
    has the trace itself); rows that do not count count for nothing."""
    algorithm = make("impala", value_weight=VALUE, entropy_weight=ENTROPY)
    weight = (np.arange(ROWS) % 4 > 0).astype(np.float32)
    rows = batch() | {"weight": weight, "rho": np.ones(ROWS, np.float32)}
    rows["advantage"] = rows["advantage"] * weight
    if path == "numpy":
        algorithm.backward(*algorithm.see(rows), rows, ROWS)
    else:
        algorithm.flat.zero_grad()
        there = {k: torch.from_numpy(np.asarray(v)) for k, v in rows.items()}
        algorithm.autograd(*algorithm.model(there["obs"]), there, ROWS)

    def counted(row: Row, rows: dict[str, Any]) -> float:
        return a2c(row, rows) if weight[row[2]] else 0.0

    want = numeric_gradient(algorithm.model, mean_of(counted, rows), rows["obs"])
    np.testing.assert_allclose(algorithm.flat.grad.numpy(), want, atol=2e-5)


def test_trpo_steps_along_the_natural_gradient_of_its_surrogate() -> None:
    """The policy's move of one update is F⁻¹g scaled to the trust region, times the line search's
    fraction: g and F by central differences of mean(ρ A) and of mean KL."""
    options = {"max_kl": 0.01, "cg_damping": 0.1, "cg_iterations": 50, "fisher_every": 1}
    algorithm = make("trpo", normalize_advantages=False, value_epochs=1, **options)
    rows = batch()
    with torch.no_grad():  # TRPO's radius lies around the policy that collected
        parameters, values = algorithm.model(torch.from_numpy(rows["obs"]))
    rows["parameters"], rows["value"] = parameters.numpy(), values.numpy()
    logp = [log_softmax(p)[a] for p, a in zip(parameters.tolist(), rows["action"], strict=True)]
    rows["logp"] = np.array(logp, np.float32)
    before = copy.deepcopy(algorithm.model)
    size = sum(p.numel() for p in algorithm.model.policy_parameters())
    start = algorithm.flat.data[:size].numpy().copy()

    def surrogate(row: Row, rows: dict[str, Any]) -> float:
        i = row[2]
        ratio = math.exp(log_softmax(row[0])[rows["action"][i]] - float(rows["logp"][i]))
        return ratio * float(rows["advantage"][i])

    g = numeric_gradient(before, mean_of(surrogate, rows), rows["obs"])[:size]
    fisher = numeric_fisher(before, rows["obs"])[:size, :size]
    direction = np.linalg.solve(fisher + 0.1 * np.eye(size), g)
    full = direction * math.sqrt(2 * 0.01 / (direction @ (fisher + 0.1 * np.eye(size)) @ direction))
    info = algorithm.update(rows, Alone(), 0.0)
    assert 0 < info["step_fraction"] <= 1
    moved = algorithm.flat.data[:size].numpy() - start
    np.testing.assert_allclose(moved, info["step_fraction"] * full, atol=0.02 * np.abs(full).max())


def numeric_fisher(model: Any, obs: Any) -> np.ndarray:
    """Σ over rows and actions of π ∇log π ∇log πᵀ / rows, ∇ by central differences."""
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        parameters, _ = outputs_of(twin, torch.from_numpy(obs).double())
        chances = torch.softmax(parameters, 1).numpy()
    size = sum(p.numel() for p in model.parameters())
    total = np.zeros((size, size))
    for i in range(len(obs)):
        for action in range(3):

            def one(outputs: Any, action: int = action) -> float:
                return log_softmax(outputs[0].tolist()[0])[action]

            slope = numeric_gradient(model, one, obs[i : i + 1])
            total += chances[i, action] * np.outer(slope, slope)
    return total / len(obs)
