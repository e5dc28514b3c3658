"""DDPG against slow references written from the equations, and its noise against statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from manyhands.algorithms.base import Alone
from manyhands.algorithms.ddpg import DDPG
from manyhands.algorithms.off_policy import ActionNoise
from manyhands.algorithms.registry import DDPGConfig
from manyhands.errors import ConfigError
from manyhands.networks.q import build_bounded_actor
from manyhands.streams import EnvNoise

SPACE = Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
ROWS = 20


def make(torch_only: bool = False, **options: Any) -> DDPG:
    model = build_bounded_actor(SPACE, ACTIONS, hidden=(16, 8), seed=2)
    ddpg = DDPG(model, DDPGConfig(**options), seed=1)
    if torch_only:
        ddpg._numpy = ddpg._numpy_target = None
    ddpg.target_flat.data += 0.3 * torch.randn(
        ddpg.target_flat.size, generator=torch.Generator().manual_seed(5)
    )
    return ddpg


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(count, 3)).astype(np.float32),
        "next_obs": rng.normal(size=(count, 3)).astype(np.float32),
        "action": rng.uniform(ACTIONS.low, ACTIONS.high, (count, 2)).astype(np.float32),
        "reward": (3.0 * rng.normal(size=count)).astype(np.float32),
        "discount": np.where(rng.random(count) < 0.3, 0.0, 0.97).astype(np.float32),
        "weight": rng.random(count).astype(np.float32),
    }


def reference_targets(ddpg: DDPG, batch: dict[str, Any]) -> list[float]:
    """y = R + γ^k Q̄(s', μ̄(s')), one row at a time."""
    found = []
    for i in range(len(batch["reward"])):
        ahead = torch.from_numpy(batch["next_obs"][i : i + 1])
        with torch.no_grad():
            value = ddpg.target.q(ahead, ddpg.target(ahead)).item()
        found.append(float(batch["reward"][i]) + float(batch["discount"][i]) * value)
    return found


@pytest.mark.parametrize("torch_only", [False, True], ids=["numpy", "torch"])
def test_targets_and_errors(torch_only: bool) -> None:
    ddpg, batch = make(torch_only), rows()
    y = reference_targets(ddpg, batch)
    assert np.allclose(ddpg.targets(batch), y, atol=1e-5)
    with torch.no_grad():
        q = ddpg.model.q(torch.from_numpy(batch["obs"]), torch.from_numpy(batch["action"])).numpy()
    assert np.allclose(ddpg.td_errors(batch), q - y, atol=1e-5)
    ddpg.update(batch, Alone(), 0.0)
    assert np.allclose(ddpg.errors, q - y, atol=1e-5)  # of the stored actions, before the step


@pytest.mark.parametrize("torch_only", [False, True], ids=["numpy", "torch"])
def test_gradients(torch_only: bool) -> None:
    """Critic: Σ w ½δ² / rows. Policy: −Σ Q(s, μ(s)) / rows, with the critic's weights held."""
    ddpg, batch = make(torch_only, huber=0.0), rows()
    y = torch.tensor(reference_targets(ddpg, batch))
    twin = build_bounded_actor(SPACE, ACTIONS, hidden=(16, 8), seed=2)
    obs, actions = torch.from_numpy(batch["obs"]), torch.from_numpy(batch["action"])
    weight = torch.from_numpy(batch["weight"])
    split = twin.policy_size()
    critic = [p for n, p in twin.named_parameters() if n.startswith("critic")]
    policy = [p for n, p in twin.named_parameters() if n.startswith("policy")]
    loss = (weight * 0.5 * (twin.q(obs, actions) - y).square()).sum() / ROWS
    d_critic = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, critic)])
    d_policy = torch.autograd.grad(-twin.q(obs, twin(obs)).sum() / ROWS, policy)
    seen: list[torch.Tensor] = []
    ddpg.descend_on = lambda adam, grad, lr: float(seen.append(grad.clone()) or 0.0)  # type: ignore[method-assign]
    ddpg.update(batch, Alone(), 0.0)
    assert len(seen[1]) == split
    assert torch.allclose(seen[0], d_critic, atol=1e-5)
    assert torch.allclose(seen[1], torch.cat([g.reshape(-1) for g in d_policy]), atol=1e-5)


def test_policy_and_critic_have_optimisers_of_their_own() -> None:
    ddpg, batch = make(policy_learning_rate=0.0), rows()
    before = ddpg.flat.data.clone()
    ddpg.update(batch, Alone(), 0.0)
    assert torch.equal(ddpg.flat.data[ddpg.of_policy], before[ddpg.of_policy])
    assert not torch.equal(ddpg.flat.data[ddpg.of_critic], before[ddpg.of_critic])
    ddpg, before = make(learning_rate=0.0), before
    ddpg.update(batch, Alone(), 0.0)
    assert torch.equal(ddpg.flat.data[ddpg.of_critic], before[ddpg.of_critic])
    assert not torch.equal(ddpg.flat.data[ddpg.of_policy], before[ddpg.of_policy])


def test_soft_and_hard_target() -> None:
    soft = make(target_tau=0.1)
    before = soft.target_flat.data.clone()
    soft.update(rows(), Alone(), 0.0)
    assert torch.allclose(soft.target_flat.data, 0.9 * before + 0.1 * soft.flat.data, atol=1e-6)
    hard = make(target_every=2)
    hard.update(rows(), Alone(), 0.0)
    assert torch.equal(hard.target_flat.data, before)
    hard.update(rows(), Alone(), 0.0)
    assert torch.equal(hard.target_flat.data, hard.flat.data)


class Halves:
    """The seam of two learners in one process: the second adds what the first has left."""

    def __init__(self) -> None:
        self.left: list[torch.Tensor] = []

    def sum(self, x: Any) -> Any:
        self.left.append(x.clone())
        return torch.stack(self.left).sum(0)

    def moments(self, x: Any) -> Any:
        raise AssertionError("not needed")

    def place(self, count: int) -> Any:
        raise AssertionError("not needed")


@pytest.mark.parametrize("cut", [1, 10, 20])
def test_two_learners_are_one_with_twice_the_batch(cut: int) -> None:
    batch = rows()
    whole, one, other = make(), make(), make()
    whole.update(batch, Alone(), 0.0)
    across = Halves()
    one.update({k: v[:cut] for k, v in batch.items()}, across, 0.0)
    other.update({k: v[cut:] for k, v in batch.items()}, across, 0.0)
    assert torch.allclose(other.flat.data, whole.flat.data, atol=1e-6)


def test_state_goes_on_exactly() -> None:
    one, other = make(), make()
    for i in range(3):
        one.update(rows(seed=i), Alone(), 0.0)
    other.load_state(one.state())
    for ddpg in (one, other):
        ddpg.update(rows(seed=9), Alone(), 0.0)
    assert torch.equal(one.flat.data, other.flat.data)
    assert torch.equal(one.target_flat.data, other.target_flat.data)


# -- noise -----------------------------------------------------------------------------------------


def drawn(kind: str, steps: int, scales: Any = (0.5, 2.0), **options: Any) -> Any:
    noise, chance = ActionNoise(kind, np.array(scales), 2, **options), EnvNoise(3, 0, len(scales))
    return np.stack([noise.draw(chance) for _ in range(steps)])  # [T, E, 2]


def test_normal_noise() -> None:
    x = drawn("normal", 5000)
    assert np.allclose(x.mean((0, 2)), 0.0, atol=0.1)
    assert np.allclose(x.std((0, 2)), [0.5, 2.0], rtol=0.05)
    assert abs(np.corrcoef(x[1:, 0, 0], x[:-1, 0, 0])[0, 1]) < 0.06


def test_clipped_noise() -> None:
    x = drawn("clipped", 2000, clip=1.5)
    assert np.abs(x[:, 0]).max() == pytest.approx(0.75)
    assert np.abs(x[:, 1]).max() == pytest.approx(3.0)


def test_ou_noise() -> None:
    """x ← (1 − θ) x + σ ε: correlation 1 − θ, deviation σ / √(1 − (1 − θ)²)."""
    theta = 0.3
    x = drawn("ou", 20000, (0.5,), theta=theta)[200:, 0]
    lag = np.corrcoef(x[1:, 0], x[:-1, 0])[0, 1]
    assert lag == pytest.approx(1 - theta, abs=0.03)
    assert x.std() == pytest.approx(0.5 / np.sqrt(1 - (1 - theta) ** 2), rel=0.05)
    assert x.mean() == pytest.approx(0.0, abs=0.06)


def test_ou_noise_begins_anew_with_an_episode() -> None:
    noise, chance = ActionNoise("ou", np.array([1.0, 1.0]), 1), EnvNoise(3, 0, 2)
    for _ in range(10):
        noise.draw(chance)
    kept = noise.state()["walk"]
    noise.restart(np.array([True, False]))
    assert noise.state()["walk"][0] == 0.0
    assert noise.state()["walk"][1] == kept[1] != 0.0


def test_noise_repeats_and_goes_on_from_its_state() -> None:
    one, other = (ActionNoise("ou", np.array([1.0]), 1) for _ in range(2))
    a, b = EnvNoise(3, 0, 1), EnvNoise(3, 0, 1)
    first = [one.draw(a) for _ in range(5)]
    assert np.array_equal(first, [other.draw(b) for _ in range(5)])
    third, chance = ActionNoise("ou", np.array([1.0]), 1), EnvNoise(3, 0, 1)
    third.load_state(one.state())
    chance.load_state(a.state())
    assert np.array_equal(third.draw(chance), one.draw(a))


def test_unknown_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="normal, ou, clipped"):
        ActionNoise("pink", np.array([1.0]), 1)


@pytest.mark.parametrize("kind", ["normal", "ou", "clipped"])
def test_acting_stays_within_bounds_and_spreads_over_environments(kind: str) -> None:
    ddpg = make(noise=5.0, noise_spread=0.01, noise_kind=kind, learning_starts=10)
    explorer = ddpg.explorer(EnvNoise(1, 0, 3), 0, 3, 3)
    assert explorer.scales == pytest.approx([5.0, 0.5, 0.05])
    obs = rows(3)["obs"]
    found = np.stack([explorer.act(obs, 100)[1] for _ in range(200)])
    assert (found >= ACTIONS.low).all()
    assert (found <= ACTIONS.high).all()
    assert found[:, 0].std() > found[:, 2].std()


def test_actions_are_drawn_evenly_until_learning_starts() -> None:
    explorer = make(noise=0.0, learning_starts=10).explorer(EnvNoise(1, 0, 2), 0, 2, 2)
    obs = rows(2)["obs"]
    early = np.stack([explorer.act(obs, 9)[1] for _ in range(3000)]).reshape(-1, 2)
    unit = (early - [0.0, 5.0]) / [2.0, 5.0]
    assert np.allclose(unit.mean(0), 0.0, atol=0.04)
    assert np.allclose(unit.std(0), 0.577, atol=0.03)
    late = np.stack([explorer.act(obs, 10)[1] for _ in range(3)])
    assert np.array_equal(late[0], late[2])
