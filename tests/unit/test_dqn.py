"""DQN against slow references written from the equations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from manyhands.algorithms.base import Alone
from manyhands.algorithms.dqn import DQN
from manyhands.algorithms.off_policy import annealed, epsilon_greedy, ladder
from manyhands.algorithms.registry import DQNConfig
from manyhands.math import losses
from manyhands.networks.q import build_q_network
from manyhands.replay.n_step import NStep
from manyhands.streams import EnvNoise

SPACE = Box(-1.0, 1.0, (4,), np.float32)
ROWS = 24


def make(start: int = 0, torch_only: bool = False, **options: Any) -> DQN:
    dueling = bool(options.get("dueling", False))
    model = build_q_network(
        SPACE, Discrete(3, start=start), hidden=(16, 8), dueling=dueling, seed=2
    )
    dqn = DQN(model, DQNConfig(**options), seed=1)
    if torch_only:
        dqn._numpy = dqn._numpy_target = None
    # A target that differs: otherwise double and plain targets could not be told apart.
    dqn.target_flat.data += 0.3 * torch.randn(
        dqn.target_flat.size, generator=torch.Generator().manual_seed(5)
    )
    return dqn


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(count, 4)).astype(np.float32),
        "next_obs": rng.normal(size=(count, 4)).astype(np.float32),
        "action": rng.integers(0, 3, count),
        "reward": (3.0 * rng.normal(size=count)).astype(np.float32),
        "discount": np.where(rng.random(count) < 0.3, 0.0, 0.97).astype(np.float32),
        "weight": rng.random(count).astype(np.float32),
    }


def reference_targets(dqn: DQN, batch: dict[str, Any]) -> list[float]:
    found = []
    for i in range(len(batch["reward"])):
        ahead = torch.from_numpy(batch["next_obs"][i : i + 1])
        with torch.no_grad():
            online, target = dqn.model(ahead)[0].tolist(), dqn.target(ahead)[0].tolist()
        chooser = online if dqn.options.double else target
        best = max(range(3), key=lambda a: chooser[a])
        found.append(float(batch["reward"][i]) + float(batch["discount"][i]) * target[best])
    return found


@pytest.mark.parametrize("torch_only", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("double", [False, True], ids=["one", "double"])
def test_targets(double: bool, dueling: bool, torch_only: bool) -> None:
    dqn, batch = make(double=double, dueling=dueling, torch_only=torch_only), rows()
    assert np.allclose(dqn.targets(batch), reference_targets(dqn, batch), atol=1e-5)


def test_double_and_plain_targets_differ_here() -> None:
    batch = rows()
    double, plain = (make(double=d).targets(batch) for d in (True, False))
    assert (plain >= double - 1e-6).all()
    assert (plain > double + 1e-3).any()


@pytest.mark.parametrize("torch_only", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_gradient(kappa: float, dueling: bool, torch_only: bool) -> None:
    """L = Σ w huber(δ) / rows, row by row, by autograd on the equation."""
    dqn, batch = make(huber=kappa, dueling=dueling, torch_only=torch_only), rows()
    y = reference_targets(dqn, batch)
    model = build_q_network(SPACE, Discrete(3), hidden=(16, 8), dueling=dueling, seed=2)
    total = torch.zeros(())
    for i in range(ROWS):
        q = model(torch.from_numpy(batch["obs"][i : i + 1]))[0, int(batch["action"][i])]
        d = q - y[i]
        small = kappa == 0.0 or abs(d.item()) <= kappa
        loss = 0.5 * d * d if small else kappa * (abs(d) - 0.5 * kappa)
        total = total + float(batch["weight"][i]) * loss / ROWS
    total.backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    seen: list[torch.Tensor] = []
    dqn.descend_on = lambda adam, grad, lr: float(seen.append(grad.clone()) or 0.0)  # type: ignore[method-assign]
    info = dqn.update(batch, Alone(), 0.0)
    assert torch.allclose(seen[0], wanted, atol=1e-5)
    assert info["loss"] == pytest.approx(total.item(), rel=1e-4)


def test_errors_are_of_the_stored_action() -> None:
    dqn, batch = make(), rows()
    y = reference_targets(dqn, batch)
    with torch.no_grad():
        q = dqn.model(torch.from_numpy(batch["obs"])).numpy()
    wanted = [q[i, batch["action"][i]] - y[i] for i in range(ROWS)]
    assert np.allclose(dqn.td_errors(batch), wanted, atol=1e-5)
    dqn.update(batch, Alone(), 0.0)
    assert np.allclose(dqn.errors, wanted, atol=1e-5)  # of the weights before the step


def test_an_actors_own_errors_need_no_target() -> None:
    dqn, batch = make(), rows()
    before = dqn.td_errors(batch, own_target=True)
    dqn.target_flat.data.zero_()
    assert np.array_equal(dqn.td_errors(batch, own_target=True), before)
    dqn.target_flat.data.copy_(dqn.flat.data)
    assert np.allclose(dqn.td_errors(batch), before, atol=1e-6)


def test_huber_and_its_slope() -> None:
    x = np.array([-3.0, -1.0, -0.2, 0.0, 0.5, 2.0])
    loss, slope = losses.huber_slope(x, 1.0)
    assert np.allclose(loss, [2.5, 0.5, 0.02, 0.0, 0.125, 1.5])
    nearby = (losses.huber_slope(x + 1e-6, 1.0)[0] - losses.huber_slope(x - 1e-6, 1.0)[0]) / 2e-6
    assert np.allclose(slope, nearby, atol=1e-5)
    assert np.allclose(losses.huber_slope(x, 0.0)[0], 0.5 * x**2)


def test_rows_without_weight_change_nothing() -> None:
    dqn, batch = make(), rows()
    batch["weight"][:] = 0.0
    before = dqn.flat.data.clone()
    dqn.update(batch, Alone(), 0.0)
    assert torch.equal(dqn.flat.data, before)


def test_hard_target() -> None:
    dqn = make(target_every=3)
    for update in range(1, 7):
        before = dqn.target_flat.data.clone()
        dqn.update(rows(seed=update), Alone(), 0.0)
        copied = torch.equal(dqn.target_flat.data, dqn.flat.data)
        assert copied == (update % 3 == 0)
        assert copied or torch.equal(dqn.target_flat.data, before)


def test_soft_target() -> None:
    dqn = make(target_every=0, target_tau=0.1)
    before = dqn.target_flat.data.clone()
    dqn.update(rows(), Alone(), 0.0)
    wanted = 0.9 * before + 0.1 * dqn.flat.data
    assert torch.allclose(dqn.target_flat.data, wanted, atol=1e-6)


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


@pytest.mark.parametrize("cut", [1, 7, 12, 24])
def test_two_learners_are_one_with_twice_the_batch(cut: int) -> None:
    batch = rows()
    first = {k: v[:cut] for k, v in batch.items()}
    second = {k: v[cut:] for k, v in batch.items()}
    whole, one, other = make(), make(), make()
    info = whole.update(batch, Alone(), 0.0)
    across = Halves()
    one.update(first, across, 0.0)  # sees its own half only: thrown away
    info_other = other.update(second, across, 0.0)
    assert torch.allclose(other.flat.data, whole.flat.data, atol=1e-6)
    assert info_other["loss"] == pytest.approx(info["loss"], rel=1e-5)
    assert np.allclose(np.concatenate([one.errors, other.errors]), whole.errors, atol=1e-6)


@pytest.mark.parametrize("ending", ["terminated", "truncated", "goes on"])
def test_n_step_bootstrap(ending: str) -> None:
    """r0 + γ r1 + γ² r2 + γ³ Q̄(s3): without the last part where it terminated, and only there."""
    dqn, steps = make(double=False), NStep(3, 0.9, 1)
    obs = np.random.default_rng(3).normal(size=(4, 1, 4)).astype(np.float32)
    rewards = [1.0, -2.0, 4.0]
    found: dict[str, Any] = {}
    for t in range(3):
        over = t == 2
        found = steps.push(
            {"obs": obs[t], "action": np.array([t])},
            np.array([rewards[t]]),
            obs[t + 1],
            np.array([over and ending == "terminated"]),
            np.array([over and ending == "truncated"]),
        )
    with torch.no_grad():
        ahead = dqn.target(torch.from_numpy(obs[3])).max().item()
    wanted = 1.0 + 0.9 * -2.0 + 0.81 * 4.0 + (0.0 if ending == "terminated" else 0.729 * ahead)
    assert dqn.targets(found)[0] == pytest.approx(wanted, abs=1e-5)
    if ending != "goes on":  # shorter ones are flushed with the discount of their own length
        tail = 4.0 + (0.0 if ending == "terminated" else 0.9 * ahead)
        assert dqn.targets(found)[2] == pytest.approx(tail, abs=1e-5)


def test_ladder_of_the_paper() -> None:
    found = ladder(0.4, 7.0, 0, 8, 8)
    assert np.allclose(found, [0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert np.allclose(np.concatenate([ladder(0.4, 7.0, f, 4, 8) for f in (0, 4)]), found)
    assert ladder(0.3, 7.0, 0, 1, 1).tolist() == [0.3]


def test_epsilon_falls_in_a_straight_line() -> None:
    assert [annealed(1.0, 0.2, 100, s) for s in (0, 50, 100, 900)] == pytest.approx(
        [1.0, 0.6, 0.2, 0.2]
    )
    assert annealed(1.0, 0.2, 0, 0) == pytest.approx(0.2)


def test_epsilon_greedy_frequencies() -> None:
    q = np.array([[0.0, 1.0, 0.5], [2.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    epsilon = np.array([0.0, 0.3, 1.0])
    chance, draws = EnvNoise(1, 0, 3), 6000
    counts = np.zeros((3, 3))
    for _ in range(draws):
        counts[np.arange(3), epsilon_greedy(q, epsilon, chance)] += 1
    wanted = np.array([[0, 1, 0], [0.8, 0.1, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    spread = np.sqrt(wanted * (1 - wanted) / draws)
    assert (np.abs(counts / draws - wanted) <= 4.5 * spread).all()


def test_actions_start_where_the_space_does() -> None:
    dqn = make(start=5)
    explorer = dqn.explorer(EnvNoise(1, 0, 2), 0, 2, 2)
    stored, sent = explorer.act(rows(2)["obs"], 0)
    assert set(stored) <= {0, 1, 2}
    assert np.array_equal(sent, stored + 5)
    assert explorer.reach == pytest.approx(1.0)
    explorer.act(rows(2)["obs"], 10**6)
    assert explorer.epsilons == pytest.approx([0.02, 0.02**8])


def test_state_goes_on_exactly() -> None:
    one, other = make(), make()
    for i in range(3):
        one.update(rows(seed=i), Alone(), 0.0)
    other.load_state(one.state())
    for dqn in (one, other):
        dqn.update(rows(seed=9), Alone(), 0.0)
    assert torch.equal(one.flat.data, other.flat.data)
    assert torch.equal(one.target_flat.data, other.target_flat.data)
    assert one.version == other.version == 4
    assert math.isfinite(float(one.flat.data.sum()))
