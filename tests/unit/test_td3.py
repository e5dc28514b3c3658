"""TD3 against slow references written from the equations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from twin_critics import (
    ACTIONS,
    PATHS,
    ROWS,
    SPACE,
    check_state,
    check_two_learners,
    layers,
    loaded_and_exported,
    q,
    run,
    some_rows,
    unit_of,
)

import manyhands as mh
from manyhands.algorithms.base import Alone
from manyhands.algorithms.off_policy import NOISE
from manyhands.algorithms.registry import TD3Config
from manyhands.algorithms.td3 import TD3
from manyhands.config import build
from manyhands.config.validate import faults
from manyhands.networks.q import build_twin_actor
from manyhands.streams import EnvNoise
from manyhands.viewing.evaluation import evaluate


def make(by_autograd: bool = False, activation: str = "relu", **options: Any) -> TD3:
    model = build_twin_actor(
        SPACE, ACTIONS, squashed=False, hidden=(16, 8), activation=activation, seed=2
    )
    td3 = TD3(model, TD3Config(**options), seed=1)
    if by_autograd:
        td3._fast = td3._fast_target = None
    generator = torch.Generator().manual_seed(5)
    td3.flat.data += 0.3 * torch.randn(td3.flat.size, generator=generator)
    td3.target_flat.data += 0.3 * torch.randn(td3.target_flat.size, generator=generator)
    return td3


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    found = some_rows(count, seed, 2)
    found[NOISE] *= 2.0  # some are cut
    return found


# -- slow references -------------------------------------------------------------------------------


def mu(model: Any, obs: Any) -> Any:
    """On [-1, 1]."""
    return np.tanh(run(layers(model, None), np.asarray(obs, np.float64)))


def reference_targets(td3: TD3, batch: dict[str, Any], noise: float, clip: float) -> Any:
    """y = R + γ^k min_i Q̄_i(s', clip(μ̄(s') + clip(σ̃ ε, −c, c), −1, 1)), a number at a time."""
    found = []
    for i in range(len(batch["reward"])):
        ahead = batch["next_obs"][i]
        action = mu(td3.target, ahead)
        for j in range(2):
            drawn = min(max(noise * float(batch[NOISE][i, j]), -clip), clip)
            action[j] = min(max(action[j] + drawn, -1.0), 1.0)
        value = min(q(td3.target, k, ahead, action) for k in (0, 1))
        found.append(float(batch["reward"][i]) + float(batch["discount"][i]) * value)
    return np.array(found)


def losses(td3: TD3, batch: dict[str, Any], y: Any) -> tuple[float, float]:
    """(critics, policy), sums over the rows."""
    critics = policy = 0.0
    for i in range(len(y)):
        obs = batch["obs"][i]
        for k in (0, 1):
            error = q(td3.model, k, obs, unit_of(batch["action"][i])) - y[i]
            critics += float(batch["weight"][i]) * 0.5 * error**2
        policy -= q(td3.model, 0, obs, mu(td3.model, obs))
    return critics, policy


# -- against them ----------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize(("noise", "clip"), [(0.2, 0.5), (0.9, 0.3), (0.0, 0.5)])
def test_targets_are_smoothed(by_autograd: bool, noise: float, clip: float) -> None:
    td3 = make(by_autograd, target_noise=noise, target_noise_clip=clip)
    batch = rows()
    y = reference_targets(td3, batch, noise, clip)
    assert np.allclose(td3.targets(batch), y, atol=1e-4)
    td3.learn(batch, td3.targets(batch))
    values = [[q(td3.model, k, o, unit_of(a)) for o, a in zip(batch["obs"], batch["action"],
              strict=True)] for k in (0, 1)]  # fmt: skip
    assert np.allclose(td3.errors, np.abs(np.array(values) - y).mean(0), atol=1e-4)
    del batch[NOISE]  # an actor's first priorities are not smoothed
    plain = reference_targets(td3, batch | {NOISE: np.zeros((ROWS, 2))}, 0.0, 0.0)
    assert np.allclose(td3.targets(batch), plain, atol=1e-4)
    assert np.allclose(td3.td_errors(batch), np.abs(np.array(values) - plain).mean(0), atol=1e-4)


@PATHS
def test_gradients_are_slopes_of_the_losses(by_autograd: bool) -> None:
    """Finite differences of the slow losses: each part of the gradient is of its own loss alone."""
    td3, batch = make(by_autograd, policy_delay=1), rows()
    y = td3.targets(batch)
    sums = td3.learn(batch, y)
    assert sums[0] == pytest.approx(losses(td3, batch, y)[0], rel=1e-4)
    grad, step = td3.flat.grad.clone(), 1e-3
    rng = np.random.default_rng(1)
    for which, part in enumerate((td3.of_critic, td3.of_policy)):
        for place in rng.choice(np.arange(td3.flat.size)[part], 15, replace=False):
            kept, found = float(td3.flat.data[place]), []
            for change in (step, -step):
                td3.flat.data[place] = kept + change
                found.append(losses(td3, batch, y)[which])
            td3.flat.data[place] = kept
            slope = (found[0] - found[1]) / (2 * step)
            assert float(grad[place]) == pytest.approx(slope, rel=0.02, abs=0.02), (which, place)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("huber", [0.0, 0.5])
def test_both_ways_are_one(activation: str, huber: float) -> None:
    fast, slow = (make(by, activation, huber=huber) for by in (False, True))
    for seed in range(4):
        told = [td3.update(rows(seed=seed), Alone(), 0.0) for td3 in (fast, slow)]
        assert told[0] == pytest.approx(told[1], rel=1e-4)
        assert np.allclose(fast.errors, slow.errors, atol=1e-5)
    assert torch.allclose(fast.flat.data, slow.flat.data, atol=1e-6)


@PATHS
def test_policy_and_targets_wait(by_autograd: bool) -> None:
    """With a delay of 3 they move with updates 3 and 6, and critics with every one."""
    td3 = make(by_autograd, policy_delay=3, target_tau=0.1)
    moved = []
    for update in range(1, 7):
        before, target = td3.flat.data.clone(), td3.target_flat.data.clone()
        td3.update(rows(seed=update), Alone(), 0.0)
        assert not torch.equal(td3.flat.data[td3.of_critic], before[td3.of_critic])
        same = torch.equal(td3.flat.data[td3.of_policy], before[td3.of_policy])
        assert torch.equal(td3.target_flat.data, target) == same
        if not same:
            moved.append(update)
            expected = 0.9 * target + 0.1 * td3.flat.data
            assert torch.allclose(td3.target_flat.data, expected, atol=1e-6)
    assert moved == [3, 6]


@pytest.mark.parametrize("cut", [1, 6, 12])
def test_two_learners_are_one_with_twice_the_batch(cut: int) -> None:
    check_two_learners(lambda: make(policy_delay=1), rows(), cut)


def test_state_goes_on_exactly() -> None:
    check_state(make, lambda seed: rows(seed=seed))


def test_it_acts_with_noise_within_the_bounds() -> None:
    td3 = make(learning_starts=10, noise=0.1)
    obs = rows(4)["obs"]
    with torch.no_grad():
        assert np.allclose(td3.act(obs), td3.model(torch.from_numpy(obs)).numpy(), atol=1e-5)
    expected = np.array([0.0, 5.0]) + np.array([2.0, 5.0]) * [mu(td3.model, o) for o in obs]
    assert np.allclose(td3.act(obs), expected, atol=1e-4)
    explorer = td3.explorer(EnvNoise(3, 0, 4), 0, 4, 4)
    early = np.stack([explorer.act(obs, 0)[0] for _ in range(400)])
    assert np.allclose(early.std((0, 1)), np.array([4.0, 10.0]) / math.sqrt(12), rtol=0.1)
    late = np.stack([explorer.act(obs, 10)[0] for _ in range(400)])
    assert (late >= ACTIONS.low).all()
    assert (late <= ACTIONS.high).all()
    assert np.allclose(np.median(late, 0), expected, atol=0.15)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy_delay": 0}, "policy_delay=0: at least 1 is needed"),
        ({"target_noise": -0.1}, "target_noise=-0.1 must not be negative"),
        ({"target_noise_clip": -1.0}, "target_noise_clip=-1 must not be negative"),
        ({"noise_spread": 0.0}, "noise_spread=0 must be above 0"),
        ({"env": "CartPole-v1"}, "td3 moves actions along a gradient"),
        ({"strategy": "gather", "workers": 2}, "use single or apex"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    found = faults(build("td3", **{"env": "Pendulum-v1"} | options))
    assert any(said in fault for fault in found), found


def test_a_run_can_be_loaded_and_exported(tmp_path: Path) -> None:
    policy, obs = loaded_and_exported("td3", tmp_path)
    drawn = policy.act_batch(np.repeat(obs[:1], 500, 0), deterministic=False)
    assert drawn.std() == pytest.approx(0.2, rel=0.2)  # a tenth of half the range


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pendulum(tmp_path: Path) -> None:
    """Measured: seeds 21 to 25, 5 of 5 above -160 after 12,000 steps."""
    mh.train(
        "td3", env="Pendulum-v1", steps=12_000, num_envs=4, learning_starts=1_000, batch_size=128,
        hidden=(64, 64), learning_rate=1e-3, policy_learning_rate=1e-3, gamma=0.98, seed=1,
        quiet=True, tensorboard=False, engine="inline", run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert evaluate(str(tmp_path / "run"), 50).mean_return >= -200
