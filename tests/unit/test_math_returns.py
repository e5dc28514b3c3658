"""Returns and advantages against loops written from the equations, and against hand values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.math.returns import gae


def column(*numbers):
    return np.array(numbers, np.float64)[:, None]


def flags(*numbers):
    return np.array(numbers, bool)[:, None]


def slow_gae(rewards, values, next_values, terminated, truncated, gamma, lam):
    """A_t = Σ_l (γλ)^l δ_{t+l}, summed forward until the episode or the batch is over."""
    horizon, width = rewards.shape
    advantages = np.zeros_like(values)
    for b in range(width):
        for t in range(horizon):
            factor = 1.0
            for s in range(t, horizon):
                after = 0.0 if terminated[s, b] else next_values[s, b]
                delta = rewards[s, b] + gamma * after - values[s, b]
                advantages[t, b] += factor * delta
                factor *= gamma * lam
                if terminated[s, b] or truncated[s, b]:
                    break
    return advantages


def slow_n_step(rewards, next_values, terminated, truncated, gamma, n):
    horizon, width = rewards.shape
    returns = np.zeros_like(next_values)
    for b in range(width):
        for t in range(horizon):
            total, factor = 0.0, 1.0
            for s in range(t, min(t + n, horizon)):
                total += factor * rewards[s, b]
                factor *= gamma
                if terminated[s, b] or truncated[s, b]:
                    break
            after = 0.0 if terminated[s, b] else next_values[s, b]
            returns[t, b] = total + factor * after
    return returns


@st.composite
def rollouts(draw):
    horizon, width = draw(st.integers(1, 17)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = rng.random((2, horizon, width)) < draw(st.sampled_from([0.0, 0.1, 0.4]))
    numbers = rng.standard_normal((3, horizon, width))
    return (*numbers, *ends)


unit = st.floats(0.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(rollouts(), unit, unit)
def test_gae_is_the_sum_of_the_paper(rollout, gamma, lam):
    advantages, returns = gae(*rollout, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, slow_gae(*rollout, gamma, lam), atol=1e-10)
    np.testing.assert_allclose(returns, advantages + rollout[1])


@settings(max_examples=30, deadline=None)
@given(rollouts(), unit)
def test_gae_with_lambda_one_is_the_longest_n_step_return(rollout, gamma):
    rewards, values, after, terminated, truncated = rollout
    inside = ~(terminated | truncated)[:-1]  # there the sum telescopes: V(s'_t) is V(s_{t+1})
    after[:-1][inside] = values[1:][inside]
    returns = gae(*rollout, gamma=gamma, lam=1.0).returns
    longest = slow_n_step(rewards, after, terminated, truncated, gamma, len(rewards))
    np.testing.assert_allclose(returns, longest, atol=1e-9)


def test_a_terminated_end_is_worth_nothing_and_a_truncated_end_its_final_observation():
    rewards, values, after = column(1, 1), column(5, 6), column(6, 100)
    no, yes = flags(0, 0), flags(0, 1)
    over = gae(rewards, values, after, yes, no, gamma=0.5, lam=1.0).returns
    clock = gae(rewards, values, after, no, yes, gamma=0.5, lam=1.0).returns
    cut = gae(rewards, values, after, no, no, gamma=0.5, lam=1.0).returns
    np.testing.assert_allclose(over, column(1.5, 1))
    np.testing.assert_allclose(clock, column(1 + 0.5 * 51, 51))  # not V(last *visited*) = 6
    np.testing.assert_allclose(cut, clock)


def test_termination_wins_when_the_clock_ends_at_the_same_step():
    args = column(1.0), column(0.0), column(100.0)
    assert gae(*args, flags(1), flags(1), gamma=0.9, lam=0.9).returns.item() == 1.0


def test_a_true_terminal_at_the_end_of_the_batch_is_not_bootstrapped():
    args = column(0, 1), column(0, 0), column(0, 100)
    found = gae(*args, flags(0, 1), flags(0, 0), gamma=1.0, lam=1.0)
    np.testing.assert_array_equal(found.returns, column(1, 1))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_nothing_of_the_next_episode_leaks_into_the_one_before(end):
    rewards, values = np.ones((6, 1)), np.zeros((6, 1))
    ends = {"terminated": flags(0, 0, 1, 0, 0, 0), "truncated": flags(0, 0, 0, 0, 0, 0)}
    if end == "truncated":
        ends = {"terminated": ends["truncated"], "truncated": ends["terminated"]}
    calm = gae(rewards, values, values, **ends, gamma=0.9, lam=0.9).advantages
    rewards[3:] = 1e6
    wild = gae(rewards, values, values, **ends, gamma=0.9, lam=0.9).advantages
    np.testing.assert_array_equal(calm[:3], wild[:3])


def test_a_value_that_is_not_finite_after_a_termination_does_no_harm():
    args = column(1.0), column(0.0), column(np.inf)
    assert gae(*args, flags(1), flags(0), gamma=0.9, lam=0.9).returns.item() == 1.0


def test_flags_may_be_bytes():
    rollout = column(1, 1, 1), column(1, 2, 3), column(2, 3, 4)
    ends = flags(0, 1, 0), flags(0, 0, 0)
    as_bytes = [end.astype(np.uint8) for end in ends]
    want = gae(*rollout, *ends, gamma=0.9, lam=0.5)
    np.testing.assert_array_equal(gae(*rollout, *as_bytes, gamma=0.9, lam=0.5), want)


def test_float32_stays_float32_and_long_rollouts_stay_exact():
    rng = np.random.default_rng(0)
    rollout = rng.standard_normal((3, 2048, 2)), rng.random((2, 2048, 2)) < 0.005
    small = [x.astype(np.float32) for x in rollout[0]]
    found = gae(*small, *rollout[1], gamma=0.99, lam=0.95).advantages
    exact = slow_gae(*rollout[0][:, :300], *rollout[1][:, :300], 0.99, 0.95)
    assert found.dtype == np.float32
    # The first steps of a long rollout see the cut at 300 only through 0.94 ** 150.
    np.testing.assert_allclose(found[:150], exact[:150], atol=2e-3)


def test_columns_do_not_depend_on_their_neighbours():
    """N workers with b envs give bit for bit what one worker with N·b envs gives."""
    rng = np.random.default_rng(1)
    numbers, ends = rng.standard_normal((3, 64, 8)).astype("f"), rng.random((2, 64, 8)) < 0.1
    whole = gae(*numbers, *ends, gamma=0.99, lam=0.95).advantages
    half = gae(*numbers[..., 4:], *ends[..., 4:], gamma=0.99, lam=0.95).advantages
    np.testing.assert_array_equal(whole[:, 4:], half)


def test_shapes_that_would_broadcast_are_refused():
    a, b = np.zeros((4, 2)), np.zeros((4, 1))
    with pytest.raises(ConfigError, match=r"\(4, 2\), \(4, 1\)"):
        gae(a, b, a, a > 0, a > 0, gamma=1.0, lam=1.0)
