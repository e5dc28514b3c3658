"""Losses against loops over rows, and the servo against hand values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.math import losses


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 50, dtype=torch.float64, generator=generator)


def test_clipped_policy_loss_row_by_row(rows):
    logp, behaviour, advantages, _ = rows
    total, clipped, kl = 0.0, 0, 0.0
    for new, old, advantage in zip(
        *(x.tolist() for x in (logp, behaviour, advantages)), strict=True
    ):
        ratio = math.exp(new - old)
        total += min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        clipped += abs(ratio - 1) > 0.2
        kl += ratio - 1 - (new - old)
    found = losses.clipped_policy_loss(logp, behaviour, advantages, clip=0.2)
    assert found.loss.item() == pytest.approx(-total / 50)
    assert found.clip_fraction.item() == pytest.approx(clipped / 50)
    assert found.approx_kl.item() == pytest.approx(kl / 50)


def test_policy_loss_without_a_clip(rows):
    logp, behaviour, advantages, _ = rows
    found = losses.policy_loss(logp, behaviour, advantages)
    torch.testing.assert_close(found.loss, -((logp - behaviour).exp() * advantages).mean())
    assert found.clip_fraction.item() == 0.0


@pytest.mark.parametrize(
    ("shift", "advantage", "moves"), [(1, 1, False), (1, -1, True), (-1, 1, True), (-1, -1, False)]
)
def test_the_clip_stops_only_gains(shift, advantage, moves):
    logp = torch.tensor([float(shift)], requires_grad=True)
    old = torch.zeros(1)
    losses.clipped_policy_loss(logp, old, torch.tensor([float(advantage)]), 0.2).loss.backward()
    assert bool(logp.grad.abs().item() > 0) is moves


def test_at_the_old_policy_both_policy_losses_have_the_policy_gradient(rows):
    _, start, advantages, _ = rows
    gradients = []
    for loss in (
        lambda x: losses.clipped_policy_loss(x, start, advantages, 0.2).loss,
        lambda x: losses.policy_loss(x, start, advantages).loss,
        lambda x: losses.policy_gradient_loss(x, advantages),
    ):
        x = start.clone().requires_grad_()
        gradients.append(torch.autograd.grad(loss(x), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


def test_policy_gradient_loss_holds_advantages_fixed():
    advantages = torch.ones(3, requires_grad=True)
    assert not losses.policy_gradient_loss(torch.zeros(3), advantages).requires_grad


def test_value_losses_row_by_row(rows):
    values, old, returns, _ = rows
    plain = clipped = 0.0
    for v, o, r in zip(*(x.tolist() for x in (values, old, returns)), strict=True):
        plain += 0.5 * (v - r) ** 2
        near = o + min(max(v - o, -0.3), 0.3)
        clipped += 0.5 * max((v - r) ** 2, (near - r) ** 2)
    assert losses.value_loss(values, returns).item() == pytest.approx(plain / 50)
    found = losses.clipped_value_loss(values, old, returns, 0.3)
    assert found.item() == pytest.approx(clipped / 50)


def test_columns_against_rows_are_refused():
    row, matrix = torch.zeros(5), torch.zeros(5, 1)
    for call in (
        lambda: losses.value_loss(row, matrix),
        lambda: losses.clipped_value_loss(row, row, matrix, 0.2),
        lambda: losses.clipped_policy_loss(row, row, matrix, 0.2),
        lambda: losses.policy_gradient_loss(row, matrix),
        lambda: losses.explained_variance(row, matrix),
    ):
        with pytest.raises(ConfigError, match=r"\(5,\).*\(5, 1\)"):
            call()


def test_entropy_loss_explores_and_refuses_a_wrong_sign():
    assert losses.entropy_loss(torch.tensor([1.0, 3.0]), 0.5).item() == -1.0
    with pytest.raises(ConfigError, match=r"give 0\.01"):
        losses.entropy_loss(torch.ones(1), -0.01)


def test_normalise_takes_mean_and_std_by_name():
    x = torch.tensor([1.0, 3.0, 8.0])
    std, mean = torch.std_mean(x, correction=0)
    found = losses.normalise(x, mean=mean.item(), std=std.item())
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert losses.normalise(torch.ones(4), mean=1.0, std=0.0).tolist() == [0, 0, 0, 0]


def test_kl_penalty_is_linear_up_to_twice_the_target_then_a_wall():
    low, high = torch.tensor([0.01, 0.03]), torch.tensor([0.1, 0.1])
    assert losses.kl_penalty(low, 2.0, target=0.01).item() == pytest.approx(0.04)
    want = 2.0 * 0.1 + 50 * (0.1 - 0.02) ** 2
    assert losses.kl_penalty(high, 2.0, target=0.01).item() == pytest.approx(want)


@pytest.mark.parametrize(
    ("kl", "after"),
    [(0.016, 2.0), (0.014, 1.0), (0.007, 1.0), (0.006, 0.5), (math.nan, 2.0), (math.inf, 2.0)],
)
def test_servo(kl, after):
    assert losses.adapt_kl_coefficient(1.0, kl, target=0.01) == after


@given(st.lists(st.floats(0, 10), max_size=100))
def test_servo_stays_within_its_bounds(kls):
    beta = 1.0
    for kl in kls:
        beta = losses.adapt_kl_coefficient(beta, kl, target=0.01, bounds=(0.1, 35.0))
        assert 0.1 <= beta <= 35.0


def test_servo_finds_the_coefficient_that_meets_the_target():
    beta = 1.0
    for _ in range(30):  # a world in which KL = 1 / β
        beta = losses.adapt_kl_coefficient(beta, 1.0 / beta, target=0.01)
    assert 1 / 1.5 <= (1.0 / beta) / 0.01 <= 1.5


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert losses.explained_variance(returns, returns).item() == 1.0
    assert losses.explained_variance(torch.zeros(3), returns).item() == 0.0
    assert losses.explained_variance(returns, torch.ones(3)).item() == 0.0
