"""The losses that train, against loops over rows; their slopes against finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.math import losses

ROWS = 50


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((4, ROWS))


def each(*columns):
    return zip(*(x.tolist() for x in columns), strict=True)


def tensors(*columns):
    return [torch.from_numpy(x) for x in columns]


def slope_of(function, x, step=1e-6):
    """∂f/∂x_i of a function of one column, by central differences."""
    found = np.zeros_like(x)
    for i in range(len(x)):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        found[i] = (function(up) - function(down)) / (2 * step)
    return found


# -- slow references, from the equations -----------------------------------------------------------


def slow_clipped(logp, behaviour, advantages, clip):
    """(−Σ min(ρA, clip(ρ) A), Σ ρ − 1 − log ρ, rows outside the range)"""
    total, kl, clipped = 0.0, 0.0, 0
    for new, old, advantage in each(logp, behaviour, advantages):
        ratio = math.exp(new - old)
        total -= min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        kl += ratio - 1 - (new - old)
        clipped += abs(ratio - 1) > clip
    return total, kl, clipped


def slow_policy_gradient(logp, advantages):
    return -sum(new * advantage for new, advantage in each(logp, advantages))


def slow_squares(values, targets, weights):
    return sum(w * (v - r) ** 2 for v, r, w in each(values, targets, weights))


def slow_huber(errors, kappa):
    total = 0.0
    for error in errors.tolist():
        far = kappa > 0 and abs(error) > kappa
        total += kappa * (abs(error) - 0.5 * kappa) if far else 0.5 * error * error
    return total


# -- values and slopes -----------------------------------------------------------------------------


def test_clipped_surrogate(rows):
    logp, behaviour, advantages, _ = rows
    want = slow_clipped(logp, behaviour, advantages, 0.2)
    found = losses.clipped_surrogate(*tensors(logp, behaviour, advantages), clip=0.2)
    assert [float(x) for x in found] == pytest.approx(want)
    fast, slope = losses.clipped_surrogate_slope(logp, behaviour, advantages, clip=0.2)
    assert list(fast) == pytest.approx(want)
    numeric = slope_of(lambda x: slow_clipped(x, behaviour, advantages, 0.2)[0], logp)
    np.testing.assert_allclose(slope, numeric, atol=1e-6)


@pytest.mark.parametrize(
    ("shift", "advantage", "moves"), [(1, 1, False), (1, -1, True), (-1, 1, True), (-1, -1, False)]
)
def test_the_clip_stops_only_gains(shift, advantage, moves):
    logp = torch.tensor([float(shift)], requires_grad=True)
    gain = torch.tensor([float(advantage)])
    losses.clipped_surrogate(logp, torch.zeros(1), gain, 0.2).loss.backward()
    assert bool(logp.grad.abs().item() > 0) is moves
    _, slope = losses.clipped_surrogate_slope(logp.detach().numpy(), np.zeros(1), gain.numpy(), 0.2)
    assert bool(abs(slope.item()) > 0) is moves


def test_penalised_surrogate(rows):
    logp, behaviour, advantages, kl = rows
    want = sum(
        -math.exp(new - old) * advantage + 0.7 * far
        for new, old, advantage, far in each(logp, behaviour, advantages, kl)
    )
    found = losses.penalised_surrogate(*tensors(logp, behaviour, advantages, kl), weight=0.7)
    assert found.item() == pytest.approx(want)


def test_importance_is_what_trpo_raises(rows):
    logp, behaviour, advantages, _ = rows
    want = [math.exp(new - old) * gain for new, old, gain in each(logp, behaviour, advantages)]
    found = losses.importance(*tensors(logp, behaviour, advantages))
    assert found.tolist() == pytest.approx(want)


def test_at_the_old_policy_all_policy_losses_have_the_policy_gradient(rows):
    _, start, advantages, _ = tensors(*rows)
    gradients = []
    for loss in (
        lambda x: losses.clipped_surrogate(x, start, advantages, 0.2).loss,
        lambda x: -losses.importance(x, start, advantages).sum(),
        lambda x: losses.policy_gradient(x, advantages),
    ):
        x = start.clone().requires_grad_()
        gradients.append(torch.autograd.grad(loss(x), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


def test_policy_gradient(rows):
    logp, advantages, _, _ = rows
    want = slow_policy_gradient(logp, advantages)
    assert losses.policy_gradient(*tensors(logp, advantages)).item() == pytest.approx(want)
    fast, slope = losses.policy_gradient_slope(logp, advantages)
    assert fast == pytest.approx(want)
    numeric = slope_of(lambda x: slow_policy_gradient(x, advantages), logp)
    np.testing.assert_allclose(slope, numeric, atol=1e-6)


def test_policy_gradient_holds_advantages_fixed():
    advantages = torch.ones(3, requires_grad=True)
    assert not losses.policy_gradient(torch.zeros(3), advantages).requires_grad


@pytest.mark.parametrize("weighted", [False, True])
def test_squares(rows, weighted):
    values, targets, draws, _ = rows
    weights = (draws > 0).astype(float) if weighted else np.ones(ROWS)
    given = weights if weighted else None
    want = slow_squares(values, targets, weights)
    in_torch = None if given is None else torch.from_numpy(given)
    assert losses.squares(*tensors(values, targets), in_torch).item() == pytest.approx(want)
    fast, slope = losses.squares_slope(values, targets, given)
    assert fast == pytest.approx(want)
    numeric = slope_of(lambda x: slow_squares(x, targets, weights), values)
    np.testing.assert_allclose(slope, numeric, atol=1e-6)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 10.0])
def test_huber(rows, kappa):
    errors = 2 * rows[0]
    want = slow_huber(errors, kappa)
    assert losses.huber(torch.from_numpy(errors), kappa).sum().item() == pytest.approx(want)
    fast, slope = losses.huber_slope(errors, kappa)
    assert fast.sum() == pytest.approx(want)
    numeric = slope_of(lambda x: slow_huber(x, kappa), errors)
    np.testing.assert_allclose(slope, numeric, atol=1e-6)


def test_columns_against_rows_are_refused():
    row, matrix = torch.zeros(5), torch.zeros(5, 1)
    for call in (
        lambda: losses.squares(row, matrix),
        lambda: losses.clipped_surrogate(row, row, matrix, 0.2),
        lambda: losses.importance(row, matrix, row),
        lambda: losses.policy_gradient(row, matrix),
    ):
        with pytest.raises(ConfigError, match=r"\(5,\).*\(5, 1\)|\(5, 1\)"):
            call()


# -- the servo -------------------------------------------------------------------------------------


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
