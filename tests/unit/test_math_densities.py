"""Densities in numpy against the torch heads, autograd and finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.networks.heads import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical
from manyhands.networks.numpy_distributions import for_head, has_density

BOX = np.full((2, 2), -2.0, np.float32), np.full((2, 2), 2.0, np.float32)
HEADS = {
    "two": Categorical(2),
    "categorical": Categorical(5, start=3),
    "only choice": Categorical(1),
    "multi-categorical": MultiCategorical([3, 2, 4], starts=[0, 5, -1]),
    "multi-categorical matrix": MultiCategorical([3, 2, 4, 2], shape=(2, 2)),
    "bernoulli": Bernoulli((2, 2)),
    "gaussian": DiagonalGaussian(*BOX),
    "one gaussian": DiagonalGaussian(BOX[0][0, :1], BOX[1][0, :1]),
}
every_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def case(head, rows=7, seed=0, scale=1.0):
    """(parameters [N, P], actions) that the head itself has drawn."""
    generator = torch.Generator().manual_seed(seed)
    parameters = scale * torch.randn(rows, head.parameter_size, generator=generator)
    return parameters, head.sample(parameters, generator)


def torch_gradient(head, parameters, actions, d_logp, d_entropy):
    parameters = parameters.clone().requires_grad_()
    objective = head.log_prob(parameters, actions) * torch.as_tensor(d_logp)
    objective = objective + head.entropy(parameters) * torch.as_tensor(d_entropy)
    return torch.autograd.grad(objective.sum(), parameters)[0].numpy()


@every_head
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("rows", [1, 7])
def test_equal_to_the_torch_head(head, order, rows):
    tensors = case(head, rows)
    parameters, actions = np.array(tensors[0].numpy(), order=order), tensors[1].numpy()
    logp, entropy, pullback = for_head(head).log_prob_and_entropy(parameters, actions)
    np.testing.assert_allclose(logp, head.log_prob(*tensors), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy, head.entropy(tensors[0]), rtol=1e-5, atol=1e-6)

    d_logp, d_entropy = np.random.default_rng(0).standard_normal((2, rows), np.float32)
    d_parameters = pullback(d_logp, d_entropy)
    expected = torch_gradient(head, *tensors, d_logp, d_entropy)
    np.testing.assert_allclose(d_parameters, expected, rtol=1e-4, atol=1e-6)
    assert {x.dtype for x in (logp, entropy, d_parameters)} == {np.dtype(np.float32)}
    assert logp.shape == entropy.shape == (rows,)


@every_head
def test_one_number_serves_for_the_entropy_of_all_rows(head):
    tensors = case(head)
    _, _, pullback = for_head(head).log_prob_and_entropy(*(x.numpy() for x in tensors))
    # float64 on purpose: results stay float32, or np.dot(out=) would refuse them.
    d_logp = np.linspace(-1.0, 1.0, 7)
    d_parameters = pullback(d_logp, np.float64(-0.01))
    expected = torch_gradient(head, *tensors, np.float32(d_logp), -0.01)
    np.testing.assert_allclose(d_parameters, expected, rtol=1e-4, atol=1e-6)
    assert d_parameters.dtype == np.float32


@every_head
def test_a_pullback_can_be_used_twice(head):
    parameters, actions = (x.numpy() for x in case(head))
    before = parameters.copy()
    _, _, pullback = for_head(head).log_prob_and_entropy(parameters, actions)
    d_logp = np.ones(7, np.float32)
    first = pullback(d_logp, 0.5).copy()
    np.testing.assert_array_equal(pullback(d_logp, 0.5), first)
    np.testing.assert_array_equal(parameters, before)
    np.testing.assert_array_equal(d_logp, np.ones(7))


@every_head
def test_gradients_agree_with_finite_differences(head):
    parameters, actions = (x.numpy() for x in case(head, rows=3))
    density, step = for_head(head), 1e-2
    d_logp, d_entropy = np.random.default_rng(1).standard_normal((2, 3), np.float32)

    def objective(x):
        logp, entropy, _ = density.log_prob_and_entropy(x, actions)
        return logp @ d_logp + entropy @ d_entropy

    d_parameters = density.log_prob_and_entropy(parameters, actions)[2](d_logp, d_entropy)
    for place in np.ndindex(*parameters.shape):
        up, down = parameters.copy(), parameters.copy()
        up[place] += step
        down[place] -= step
        slope = (objective(up) - objective(down)) / (2 * step)
        assert d_parameters[place] == pytest.approx(slope, rel=2e-2, abs=2e-3)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(HEADS)),
    rows=st.integers(1, 40),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
)
def test_any_parameters_and_actions(name, rows, seed, scale):
    head = HEADS[name]
    tensors = case(head, rows, seed, scale)
    logp, entropy, pullback = for_head(head).log_prob_and_entropy(*(x.numpy() for x in tensors))
    d_logp = np.random.default_rng(seed).standard_normal(rows, np.float32)
    np.testing.assert_allclose(logp, head.log_prob(*tensors), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(entropy, head.entropy(tensors[0]), rtol=1e-4, atol=1e-5)
    expected = torch_gradient(head, *tensors, d_logp, 0.1)
    np.testing.assert_allclose(pullback(d_logp, 0.1), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["two", "categorical", "multi-categorical", "bernoulli"])
def test_huge_logits_stay_finite(name):
    head = HEADS[name]
    tensors = case(head, rows=20, scale=300.0)
    logp, entropy, pullback = for_head(head).log_prob_and_entropy(*(x.numpy() for x in tensors))
    d_parameters = pullback(np.ones(20, np.float32), 1.0)
    np.testing.assert_allclose(logp, head.log_prob(*tensors), rtol=1e-5, atol=1e-4)
    assert all(np.isfinite(x).all() for x in (logp, entropy, d_parameters))


def test_known_values():
    logp, entropy, pullback = for_head(Categorical(4, start=1)).log_prob_and_entropy(
        np.zeros((1, 4), np.float32), np.array([2])
    )
    assert logp[0] == pytest.approx(-math.log(4.0))
    assert entropy[0] == pytest.approx(math.log(4.0))
    np.testing.assert_allclose(
        pullback(np.ones(1), 5.0), [[-0.25, 0.75, -0.25, -0.25]], atol=1e-6
    )  # a uniform distribution has the largest entropy: no slope there


def test_an_unknown_head_is_refused():
    class Mine(Categorical):
        """Might mean anything."""

    assert has_density(Categorical(2))
    assert not has_density(Mine(2))
    with pytest.raises(ConfigError, match="Mine"):
        for_head(Mine(2))
