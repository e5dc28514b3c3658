"""Distributions: by Monte Carlo, by enumeration, and against torch.distributions."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as reference

from manyhands.errors import ConfigError
from manyhands.networks.heads import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    make_head,
)

SAMPLES = 100_000


def gaussian(size=3):
    return DiagonalGaussian(np.full(size, -1, np.float32), np.full(size, 1, np.float32))


HEADS = {
    "categorical": Categorical(5),
    "categorical from 3": Categorical(4, start=3),
    "multi-categorical": MultiCategorical([3, 2, 4], [0, -1, 2]),
    "bernoulli": Bernoulli((4,)),
    "gaussian": gaussian(),
}


@pytest.fixture(params=HEADS)
def head(request):
    return HEADS[request.param]


def parameters_of(head, rows, seed=0):
    return torch.randn(
        rows,
        head.parameter_size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )


def within_three_sigma(estimates, exact):
    sigma = estimates.std().item() / len(estimates) ** 0.5
    assert abs(estimates.mean().item() - exact) < 3 * sigma


def test_entropy_and_kl_are_within_three_sigma_of_their_monte_carlo_estimates(head):
    old, new = parameters_of(head, 1, seed=1), parameters_of(head, 1, seed=2)
    many_old, many_new = old.expand(SAMPLES, -1), new.expand(SAMPLES, -1)
    actions = head.sample(many_old, torch.Generator().manual_seed(7))
    old_logp, new_logp = head.log_prob(many_old, actions), head.log_prob(many_new, actions)
    within_three_sigma(-old_logp, head.entropy(old).item())
    within_three_sigma(old_logp - new_logp, head.kl(old, new).item())


def test_kl_is_not_symmetric_zero_only_at_home_and_flat_there(head):
    old, new = parameters_of(head, 6, seed=1), parameters_of(head, 6, seed=2)
    assert (head.kl(old, new) > 0).all()
    assert not torch.allclose(head.kl(old, new), head.kl(new, old))
    home = old.clone().requires_grad_()
    kl = head.kl(old, home)
    torch.testing.assert_close(kl, torch.zeros_like(kl))
    torch.testing.assert_close(torch.autograd.grad(kl.sum(), home)[0], torch.zeros_like(old))


def test_the_kl_of_two_gaussians_uses_the_spread_of_each():
    """One log σ taken for both makes the KL of two policies with equal means zero."""
    head = gaussian(1)
    narrow, wide = torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, 1.0]])
    want = 2.0 + np.exp(-4.0) / 2 - 0.5
    assert head.kl(narrow, wide).item() == pytest.approx(want, rel=1e-5)
    assert head.kl(wide, narrow).item() == pytest.approx(-2.0 + np.exp(4.0) / 2 - 0.5, rel=1e-5)


def torch_reference(head, p):
    if isinstance(head, Categorical):
        return reference.Categorical(logits=p)
    if isinstance(head, Bernoulli):
        return reference.Independent(reference.Bernoulli(logits=p), 1)
    mean, log_std = p.chunk(2, -1)
    return reference.Independent(reference.Normal(mean, log_std.exp()), 1)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian"])
def test_equal_to_torch_distributions(name):
    head = HEADS[name]
    old, new = parameters_of(head, 8, seed=1), parameters_of(head, 8, seed=2)
    p, q = torch_reference(head, old), torch_reference(head, new)
    actions = head.sample(old)
    torch.testing.assert_close(head.log_prob(old, actions), p.log_prob(actions.double()))
    torch.testing.assert_close(head.entropy(old), p.entropy())
    torch.testing.assert_close(head.kl(old, new), reference.kl_divergence(p, q))


@pytest.mark.parametrize("name", [n for n in HEADS if n != "gaussian"])
def test_probabilities_of_all_actions_sum_to_one_and_the_mode_is_the_largest(name):
    head = HEADS[name]
    p = parameters_of(head, 1, seed=3)
    if isinstance(head, Bernoulli):
        choices = itertools.product([0, 1], repeat=4)
    elif isinstance(head, MultiCategorical):
        choices = itertools.product(*(range(c.start, c.start + c.n) for c in head.parts))
    else:
        choices = range(head.start, head.start + head.n)
    actions = torch.tensor(list(choices))
    logp = head.log_prob(p.expand(len(actions), -1), actions)
    assert logp.exp().sum().item() == pytest.approx(1.0)
    assert torch.equal(head.mode(p)[0], actions[logp.argmax()].to(head.mode(p).dtype))
    entropy = -(logp.exp() * logp).sum()
    torch.testing.assert_close(head.entropy(p)[0], entropy)


def test_the_mode_of_a_gaussian_is_its_mean():
    p = parameters_of(HEADS["gaussian"], 4)
    assert torch.equal(HEADS["gaussian"].mode(p), p[:, :3])


def test_extreme_logits_stay_finite(head):
    p = 200.0 * parameters_of(head, 8, seed=4).sign()
    if isinstance(head, DiagonalGaussian):
        p = p / 100.0
    assert torch.isfinite(head.entropy(p)).all()
    assert torch.isfinite(head.kl(p, p.flip(-1))).all()
    assert torch.isfinite(head.log_prob(p, head.sample(p))).all()


def test_samples_repeat_with_their_generator(head):
    p = parameters_of(head, 16)
    first, again = (head.sample(p, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(4),
        gym.spaces.Discrete(4, start=-2),
        gym.spaces.MultiDiscrete([3, 5]),
        gym.spaces.MultiDiscrete([[3, 5], [2, 2]], start=[[0, 1], [2, 3]]),
        gym.spaces.MultiBinary(3),
        gym.spaces.MultiBinary((2, 3)),
        gym.spaces.Box(-2.0, 5.0, (3,)),
        gym.spaces.Box(-np.inf, np.inf, (2, 2)),
        gym.spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, 1.0]), dtype=np.float64),
    ],
    ids=str,
)
def test_what_is_sampled_lies_in_the_space(space):
    head = make_head(space)
    p = 3.0 * parameters_of(head, 50).float()
    for actions in (head.sample(p), head.mode(p)):
        assert actions.shape == (50, *space.shape)
        assert head.log_prob(p, actions).shape == (50,)
        given = head.to_env(actions.numpy())
        assert all(space.contains(a if space.shape else int(a)) for a in given)


def test_unit_actions_are_stretched_to_finite_bounds_only():
    low, high = np.array([-2, 0, -np.inf, -3.4e38], "f"), np.array([2, 10, 1, 3.4e38], "f")
    head = DiagonalGaussian(low, high)
    actions = np.array([[1.0, 0.0, -7.0, 5.0], [-9.0, 9.0, 7.0, -5.0]], np.float32)
    want = [[2.0, 5.0, -7.0, 5.0], [-2.0, 10.0, 1.0, -5.0]]
    np.testing.assert_allclose(head.to_env(actions), want)
    assert head.to_env(actions).dtype == np.float32


def test_unknown_spaces_are_refused_by_name():
    for space in (gym.spaces.Text(3), gym.spaces.Box(0, 5, (2,), np.int64)):
        with pytest.raises(ConfigError, match="no policy for the action space"):
            make_head(space)
