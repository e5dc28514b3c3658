"""Adam on a flat tensor against torch.optim.Adam, its checkpoint, and clipping by norm."""

import math

import pytest
import torch

from manyhands.errors import ConfigError
from manyhands.math.optimiser import Adam, clip_by_norm_

SIZE = 1000


def random(seed=0, scale=1.0):
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def gradient(step):
    # Sizes from 1e-6 to 1e2, so that ε matters for some parameters and not for others.
    return random(step + 1) * torch.logspace(-6, 2, SIZE)


def adam(flat, *, fused=True, **options):
    optimiser = Adam(flat, **{"lr": 1e-2, **options})
    optimiser._fused = optimiser._fused and fused
    return optimiser


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-5), ((0.5, 0.9), 1e-8)])
def test_the_same_as_torch_over_100_steps(fused, betas, eps):
    parameter = torch.nn.Parameter(random())
    reference = torch.optim.Adam([parameter], lr=1e-2, betas=betas, eps=eps)
    flat = random()
    ours = adam(flat, fused=fused, betas=betas, eps=eps)
    for step in range(100):
        parameter.grad = gradient(step)
        reference.step()
        ours.step(gradient(step))
    torch.testing.assert_close(flat, parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_learning_rate_given_to_a_step_replaces_the_usual_one(fused):
    parameter = torch.nn.Parameter(random())
    reference = torch.optim.Adam([parameter], lr=1.0, eps=1e-5)
    flat = random()
    ours = adam(flat, fused=fused, lr=1.0)
    for step in range(10):
        rate = 0.1 / (step + 1)
        reference.param_groups[0]["lr"] = rate
        parameter.grad = gradient(step)
        reference.step()
        ours.step(gradient(step), lr=rate)
    torch.testing.assert_close(flat, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_the_first_step_is_the_learning_rate_against_the_sign():
    flat = torch.zeros(3)
    Adam(flat, lr=0.1, eps=1e-12).step(torch.tensor([5.0, -0.01, 0.0]))
    torch.testing.assert_close(flat, torch.tensor([-0.1, 0.1, 0.0]))


def test_it_moves_the_given_memory_and_leaves_the_gradient_alone():
    flat, grad = random(), gradient(0)
    address, before = flat.data_ptr(), flat.clone()
    adam(flat).step(grad)
    assert flat.data_ptr() == address
    assert not torch.equal(flat, before)
    assert torch.equal(grad, gradient(0))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_going_on_from_a_state_is_exact(fused):
    flat = random()
    ours = adam(flat, fused=fused)
    for step in range(7):
        ours.step(gradient(step))
    state, resumed_flat = ours.state(), flat.clone()
    for step in range(7, 12):
        ours.step(gradient(step))  # must not reach into the state taken before

    resumed = adam(resumed_flat, fused=fused)
    resumed.load_state(state)
    for step in range(7, 12):
        resumed.step(gradient(step))
    assert torch.equal(resumed_flat, flat)


def test_a_state_holds_only_numbers_and_tensors():
    assert {type(value) for value in adam(random()).state().values()} <= {int, float, torch.Tensor}


def test_what_does_not_fit_is_refused():
    ours = adam(random())
    with pytest.raises(ConfigError, match="shape"):
        ours.step(torch.zeros(SIZE + 1))
    with pytest.raises(ConfigError, match="another network"):
        ours.load_state(Adam(torch.zeros(3), lr=0.1).state())
    for wrong in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"lr": math.nan}):
        with pytest.raises(ConfigError, match="Adam needs"):
            Adam(torch.zeros(3), **{"lr": 0.1, **wrong})


@pytest.mark.parametrize("max_norm", [0.5, 30.0, 1e9])
def test_clipping_is_that_of_torch(max_norm):
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    parameter.grad = random()
    expected = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    grad = random()
    assert clip_by_norm_(grad, max_norm) == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(grad, parameter.grad, rtol=1e-6, atol=0.0)


def test_a_gradient_within_the_limit_is_untouched():
    grad = random(scale=1e-3)
    clip_by_norm_(grad, 10.0)
    assert torch.equal(grad, random(scale=1e-3))


def test_a_zero_gradient_stays_zero():
    grad = torch.zeros(SIZE)
    assert clip_by_norm_(grad, 0.5) == 0.0
    assert torch.equal(grad, torch.zeros(SIZE))


def test_a_norm_that_is_not_a_number_is_reported_and_changes_nothing():
    grad = torch.tensor([1.0, math.nan])
    assert math.isnan(clip_by_norm_(grad, 0.5))
    assert grad[0] == 1.0
