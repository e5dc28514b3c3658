"""V-trace against the sum of the paper, written as it stands there."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.math.returns import gae
from manyhands.math.vtrace import vtrace


def slow_vtrace(mu, pi, rewards, values, after, terminated, truncated, gamma, rho_bar, c_bar, lam):
    """v_s = V(x_s) + Σ_t γ^{t-s} (Π_{i<t} c_i) δ_t V, eq. 1; the sum ends with the episode."""
    horizon, width = rewards.shape
    targets, advantages = np.zeros_like(values), np.zeros_like(values)
    for b in range(width):
        ratio = np.exp(pi[:, b] - mu[:, b])
        rho, c = np.minimum(ratio, rho_bar), lam * np.minimum(ratio, c_bar)
        for s in range(horizon):
            total, factor = values[s, b], 1.0
            for t in range(s, horizon):
                follow = 0.0 if terminated[t, b] else after[t, b]
                delta = rho[t] * (rewards[t, b] + gamma * follow - values[t, b])
                total += factor * delta
                factor *= gamma * c[t]
                if terminated[t, b] or truncated[t, b]:
                    break
            targets[s, b] = total
        for s in range(horizon):
            if terminated[s, b]:
                follow = 0.0
            elif truncated[s, b] or s == horizon - 1:
                follow = after[s, b]
            else:
                follow = targets[s + 1, b]
            advantages[s, b] = rho[s] * (rewards[s, b] + gamma * follow - values[s, b])
    return targets, advantages


def fast(*arrays, **options):
    targets, advantages = vtrace(*(torch.from_numpy(np.asarray(a)) for a in arrays), **options)
    return targets.numpy(), advantages.numpy()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 13),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.9, 1.0]),
)
def test_vtrace_is_the_sum_of_the_paper(horizon, seed, gamma, rho_bar, c_bar, lam):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((5, horizon, 3))
    ends = rng.random((2, horizon, 3)) < 0.2
    found = fast(*numbers, *ends, discounts=gamma, rho_bar=rho_bar, c_bar=c_bar, lam=lam)
    want = slow_vtrace(*numbers, *ends, gamma, rho_bar, c_bar, lam)
    np.testing.assert_allclose(found, want, atol=1e-9)


def test_a_reward_at_the_very_end_reaches_every_target():
    """A recursion started from v = 0 gives only zeros here, and Pong is never learned."""
    zeros = np.zeros((4, 1))
    rewards = np.array([[0.0], [0], [0], [1]])
    over = np.array([[0], [0], [0], [1]], bool)
    targets, advantages = fast(
        zeros, zeros, rewards, zeros, zeros, over, over & False, discounts=0.99
    )
    want = np.array([[0.99**3], [0.99**2], [0.99], [1.0]])
    np.testing.assert_allclose(targets, want)
    np.testing.assert_allclose(advantages, want)


def test_truncation_bootstraps_from_the_final_observation_and_stops_the_recursion():
    zeros, ones = np.zeros((3, 1)), np.ones((3, 1))
    after = np.array([[0.0], [50.0], [7.0]])  # V(next), V(final observation), V(cut)
    clock = np.array([[0], [1], [0]], bool)
    targets, advantages = fast(
        zeros, zeros, ones, zeros, after, clock & False, clock, discounts=0.5
    )
    np.testing.assert_allclose(targets, [[1 + 0.5 * 26], [26], [4.5]])
    np.testing.assert_allclose(advantages, [[1 + 0.5 * 26], [26], [4.5]])


def test_on_policy_the_targets_are_the_lambda_one_returns():
    rng = np.random.default_rng(0)
    logp, rewards, values, after = rng.standard_normal((4, 20, 4))
    ends = rng.random((2, 20, 4)) < 0.1
    targets, _ = fast(logp, logp, rewards, values, after, *ends, discounts=0.97)
    want = gae(rewards, values, after, *ends, gamma=0.97, lam=1.0).returns
    np.testing.assert_allclose(targets, want, atol=1e-10)


def test_discounts_may_differ_by_step_and_advantages_have_their_own_clip():
    rng = np.random.default_rng(3)
    numbers, ends = rng.standard_normal((5, 6, 2)), rng.random((2, 6, 2)) < 0.2
    gammas = torch.full((6, 2), 0.9, dtype=torch.float64)
    same = fast(*numbers, *ends, discounts=0.9)
    np.testing.assert_array_equal(same, fast(*numbers, *ends, discounts=gammas))
    wide = fast(*numbers, *ends, discounts=0.9, pg_rho_bar=float("inf"))
    ratio = np.exp(numbers[1] - numbers[0])
    np.testing.assert_array_equal(wide[0], same[0])
    np.testing.assert_allclose(wide[1], same[1] / np.minimum(ratio, 1.0) * ratio)


def test_no_gradient_flows_through_targets_and_shapes_are_checked():
    x = torch.zeros(3, 2, requires_grad=True)
    no = torch.zeros(3, 2, dtype=torch.bool)
    assert not any(part.requires_grad for part in vtrace(x, x, x, x, x, no, no, discounts=1.0))
    with pytest.raises(ConfigError, match=r"\(3, 2\).*\(3, 1\)"):
        vtrace(x, x, x, x[:, :1], x, no, no, discounts=1.0)
