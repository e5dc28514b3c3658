"""SAC against slow references written from the equations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
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
from manyhands.algorithms.registry import SACConfig
from manyhands.algorithms.sac import SAC, with_temperature
from manyhands.config import build
from manyhands.config.validate import faults
from manyhands.errors import ConfigError
from manyhands.networks.heads import SquashedGaussian
from manyhands.networks.numpy_distributions import mode, sample
from manyhands.networks.q import build_twin_actor
from manyhands.streams import EnvNoise
from manyhands.viewing.evaluation import evaluate


def make(by_autograd: bool = False, activation: str = "relu", **options: Any) -> SAC:
    config = SACConfig(**options)
    model = build_twin_actor(
        SPACE, ACTIONS, squashed=True, hidden=(16, 8), activation=activation, seed=2
    )
    sac = SAC(with_temperature(model, config), config, seed=1)
    if by_autograd:
        sac._fast = sac._fast_target = None
    generator = torch.Generator().manual_seed(5)
    sac.flat.data[1:] += 0.3 * torch.randn(sac.flat.size - 1, generator=generator)
    sac.target_flat.data += 0.3 * torch.randn(sac.target_flat.size, generator=generator)
    return sac


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    return some_rows(count, seed, 4)


# -- slow references -------------------------------------------------------------------------------


def draw(model: Any, obs: Any, noise: Any) -> tuple[Any, float]:
    """tanh(m + σ ε), and its log-density by the change of variables, one number at a time."""
    out = run(layers(model, None), np.asarray(obs, np.float64))
    u = out[:2] + np.exp(np.clip(out[2:], -20.0, 2.0)) * noise
    logp = 0.0
    for i in range(2):
        std = math.exp(min(max(out[2 + i], -20.0), 2.0))
        logp += -0.5 * ((u[i] - out[i]) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi))
        logp -= math.log(1.0 - math.tanh(u[i]) ** 2)
    return np.tanh(u), logp


def reference_targets(sac: SAC, batch: dict[str, Any]) -> Any:
    """y = R + γ^k (min_i Q̄_i(s', a') − α log π(a'|s')), one row at a time."""
    alpha, found = math.exp(float(sac.model.log_temperature.detach())), []
    for i in range(len(batch["reward"])):
        ahead = batch["next_obs"][i]
        action, logp = draw(sac.model, ahead, batch[NOISE][i, :2])
        value = min(q(sac.target, k, ahead, action) for k in (0, 1)) - alpha * logp
        found.append(float(batch["reward"][i]) + float(batch["discount"][i]) * value)
    return np.array(found)


def losses(sac: SAC, batch: dict[str, Any], y: Any) -> tuple[float, float, float]:
    """(critics, policy, temperature), sums over the rows."""
    critics = policy = logps = 0.0
    log_alpha = float(sac.model.log_temperature.detach())
    for i in range(len(y)):
        obs = batch["obs"][i]
        for k in (0, 1):
            error = q(sac.model, k, obs, unit_of(batch["action"][i])) - y[i]
            critics += float(batch["weight"][i]) * 0.5 * error**2
        action, logp = draw(sac.model, obs, batch[NOISE][i, 2:])
        policy += math.exp(log_alpha) * logp - min(q(sac.model, k, obs, action) for k in (0, 1))
        logps += logp
    return critics, policy, -log_alpha * (logps + len(y) * -2.0)  # H̄ = −d


# -- against them ----------------------------------------------------------------------------------


@PATHS
def test_targets_and_errors(by_autograd: bool) -> None:
    sac, batch = make(by_autograd), rows()
    y = reference_targets(sac, batch)
    assert np.allclose(sac.targets(batch), y, atol=1e-4)
    sac.learn(batch, sac.targets(batch))
    values = [[q(sac.model, k, o, unit_of(a)) for o, a in zip(batch["obs"], batch["action"],
              strict=True)] for k in (0, 1)]  # fmt: skip
    assert np.allclose(sac.errors, np.abs(np.array(values) - y).mean(0), atol=1e-4)


@PATHS
def test_first_priorities_take_the_likeliest_action(by_autograd: bool) -> None:
    sac, batch = make(by_autograd), rows()
    del batch[NOISE]
    y = []
    for i in range(ROWS):
        ahead = batch["next_obs"][i]
        unit = np.tanh(run(layers(sac.model, None), ahead)[:2])
        value = min(q(sac.model, k, ahead, unit) for k in (0, 1))
        y.append(batch["reward"][i] + batch["discount"][i] * value)
    values = [[q(sac.model, k, o, unit_of(a)) for o, a in zip(batch["obs"], batch["action"],
              strict=True)] for k in (0, 1)]  # fmt: skip
    expected = np.abs(np.array(values) - y).mean(0)
    assert np.allclose(sac.td_errors(batch, own_target=True), expected, atol=1e-4)


@PATHS
def test_gradients_are_slopes_of_the_losses(by_autograd: bool) -> None:
    """Finite differences of the slow losses: each part of the gradient is of its own loss alone."""
    sac, batch = make(by_autograd), rows()
    y = sac.targets(batch)
    sums = sac.learn(batch, y)
    assert np.allclose([sums[0], sums[3]], losses(sac, batch, y)[:2], rtol=1e-4)
    grad, step = sac.flat.grad.clone(), 1e-3
    parts = (sac.of_critic, sac.of_policy, sac.of_temperature)
    rng = np.random.default_rng(1)
    for which, part in enumerate(parts):
        places = np.arange(sac.flat.size)[part]
        for place in rng.choice(places, min(12, len(places)), replace=False):
            kept, found = float(sac.flat.data[place]), []
            for change in (step, -step):
                sac.flat.data[place] = kept + change
                found.append(losses(sac, batch, y)[which])
            sac.flat.data[place] = kept
            slope = (found[0] - found[1]) / (2 * step)
            assert float(grad[place]) == pytest.approx(slope, rel=0.02, abs=0.02), (which, place)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("huber", [0.0, 0.5])
def test_both_ways_are_one(activation: str, huber: float) -> None:
    fast, slow = (make(by, activation, huber=huber) for by in (False, True))
    for seed in range(3):
        told = [sac.update(rows(seed=seed), Alone(), 0.0) for sac in (fast, slow)]
        assert told[0] == pytest.approx(told[1], rel=1e-4)
        assert np.allclose(fast.errors, slow.errors, atol=1e-5)
    assert torch.allclose(fast.flat.data, slow.flat.data, atol=1e-6)


def test_the_temperature_rises_where_entropy_lacks() -> None:
    """log α ← log α − lr · sign: the first step of Adam is one of the learning rate."""
    for kept, sign in ((5.0, 1.0), (-5.0, -1.0)):
        sac = make(entropy_per_action=kept, learning_rate=0.01)
        info = sac.update(rows(), Alone(), 0.0)
        assert float(sac.model.log_temperature.detach()) == pytest.approx(0.01 * sign, rel=1e-3)
        assert info["temperature"] == pytest.approx(math.exp(0.01 * sign), rel=1e-4)
    fixed = make(temperature=0.3)
    assert fixed.update(rows(), Alone(), 0.0)["temperature"] == pytest.approx(0.3)
    assert fixed.temperature_adam is None


def test_all_move_and_the_target_follows() -> None:
    sac = make(target_tau=0.1)
    before, target = sac.flat.data.clone(), sac.target_flat.data.clone()
    sac.update(rows(), Alone(), 0.0)
    for part in (sac.of_critic, sac.of_policy, sac.of_temperature):
        assert not torch.equal(sac.flat.data[part], before[part])
    assert torch.allclose(sac.target_flat.data, 0.9 * target + 0.1 * sac.flat.data, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 6, 12])
def test_two_learners_are_one_with_twice_the_batch(cut: int) -> None:
    check_two_learners(make, rows(), cut)


def test_state_goes_on_exactly() -> None:
    check_state(make, lambda seed: rows(seed=seed))


# -- the policy ------------------------------------------------------------------------------------


def test_density_of_a_squashed_gaussian() -> None:
    """Integrates to 1 over the actions, and is what draws follow; numpy says the same."""
    head = SquashedGaussian(np.array([-1.0], np.float32), np.array([3.0], np.float32))
    parameters = torch.tensor([[0.4, -0.5]])
    grid = torch.linspace(-0.9999, 2.9999, 40_001)[:, None]
    density = head.log_prob(parameters.expand(len(grid), 2), grid).double().exp()
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1.0, abs=1e-3)
    many = parameters.expand(50_000, 2)
    drawn = head.sample(many, torch.Generator().manual_seed(1))
    below = float(density[grid[:, 0] < 2.0].sum() / density.sum())
    assert float((drawn < 2.0).float().mean()) == pytest.approx(below, abs=0.01)
    actions, logp = sample(head, many.numpy()[:100], np.random.default_rng(0))
    assert np.allclose(
        logp, head.log_prob(many[:100], torch.from_numpy(actions)).numpy(), atol=1e-3
    )
    assert np.allclose(mode(head, parameters.numpy()), head.mode(parameters).numpy())
    assert float(head.mode(parameters)) == pytest.approx(1.0 + 2.0 * math.tanh(0.4))
    with pytest.raises(ConfigError, match="no formula"):
        head.entropy(parameters)


def test_it_acts_by_draws_within_the_bounds() -> None:
    sac = make(learning_starts=10)
    explorer = sac.explorer(EnvNoise(3, 0, 4), 0, 4, 4)
    obs = rows(4)["obs"]
    early = np.stack([explorer.act(obs, 0)[0] for _ in range(400)])
    assert np.allclose(early.mean((0, 1)), [0.0, 5.0], atol=0.3)  # evenly over the range
    assert np.allclose(early.std((0, 1)), np.array([4.0, 10.0]) / math.sqrt(12), rtol=0.1)
    late = np.stack([explorer.act(obs, 10)[0] for _ in range(400)])
    assert (late >= ACTIONS.low).all()
    assert (late <= ACTIONS.high).all()
    mean, log_std = sac.parameters(obs)
    with torch.no_grad():
        out = sac.model(torch.from_numpy(obs)).numpy()
    assert np.allclose(np.concatenate([mean, log_std], 1), out, atol=1e-5)
    assert explorer.reach == pytest.approx(float(np.exp(log_std).mean()), rel=1e-5)
    u = np.arctanh(np.clip(unit_of(late), -0.999999, 0.999999))
    assert np.allclose(np.median(u, 0), mean, atol=0.35 * np.exp(log_std).max())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1 must not be negative"),
        ({"initial_temperature": 0.0}, "initial_temperature=0 must be above 0"),
        ({"learning_rate": "fast"}, "is not a schedule"),
        ({"env": "CartPole-v1"}, "sac moves actions along a gradient"),
        ({"target_tau": 0.0}, "target_tau=0 must lie"),
        ({"strategy": "allreduce", "workers": 2}, "use single or apex"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    found = faults(build("sac", **{"env": "Pendulum-v1"} | options))
    assert any(said in fault for fault in found), found


def test_usual_settings() -> None:
    run = build("sac", env="Pendulum-v1").run
    assert (run.hidden, run.activation) == ((256, 256), "relu")
    assert build("sac", env="Pendulum-v1", hidden=(8,)).run.hidden == (8,)


@pytest.mark.parametrize(
    "space",
    [Box(0, 255, (1, 36, 36), np.uint8), Dict({"a": SPACE, "b": Discrete(3)})],
    ids=["image", "dict"],
)
def test_other_observations(space: Any) -> None:
    experiment = build("sac", env="Pendulum-v1", hidden=(8,))
    sac = SAC(experiment.spec.build_model(experiment, space, ACTIONS), experiment.options, seed=1)
    space.seed(0)
    seen = [space.sample() for _ in range(4)]
    obs = (
        {k: np.stack([x[k] for x in seen]) for k in space}
        if isinstance(space, Dict)
        else np.stack(seen)
    )
    before = sac.flat.data.clone()
    sac.update(rows(4) | {"obs": obs, "next_obs": obs}, Alone(), 0.0)
    assert torch.isfinite(sac.flat.data).all()
    assert not torch.equal(sac.flat.data, before)
    assert sac.explorer(EnvNoise(1, 0, 4), 0, 4, 4).act(obs, 10**6)[0].shape == (4, 2)


def test_a_run_can_be_loaded_and_exported(tmp_path: Path) -> None:
    policy, obs = loaded_and_exported("sac", tmp_path)
    drawn = policy.act_batch(np.repeat(obs, 50, 0), deterministic=False)
    assert (np.abs(drawn) <= 2.0).all()
    assert drawn.std() > 0.3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pendulum(tmp_path: Path) -> None:
    """Measured: seeds 11 to 15, 5 of 5 above -170 after 12,000 steps."""
    mh.train(
        "sac", env="Pendulum-v1", steps=12_000, num_envs=4, learning_starts=1_000, batch_size=128,
        hidden=(64, 64), learning_rate=1e-3, seed=1, quiet=True, tensorboard=False, engine="inline",
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert evaluate(str(tmp_path / "run"), 50).mean_return >= -200
