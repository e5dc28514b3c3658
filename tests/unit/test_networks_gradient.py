"""Flat parameters, and the written-out gradient against autograd."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.errors import ConfigError
from manyhands.math import losses
from manyhands.math.optimiser import Adam, clip_by_norm_
from manyhands.networks.build import ActorCritic, build_actor_critic
from manyhands.networks.flat import FlatParameters
from manyhands.networks.numpy_distributions import for_head
from manyhands.networks.numpy_mlp import (
    KEPT_SIZES,
    FastActor,
    FastGradient,
    FastValueGradient,
    can_learn,
)

VECTOR = Box(-1.0, 1.0, (4,))
ACTIONS = {
    "discrete": Discrete(3, start=1),
    "multi-discrete": MultiDiscrete([3, 2]),
    "multi-binary": MultiBinary(3),
    "box": Box(-2.0, 2.0, (2, 2)),
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def network(observation_space=VECTOR, action_space=ACTIONS["discrete"], seed=0, **options):
    """A model whose weights are far from their nearly zero start."""
    model = build_actor_critic(observation_space, action_space, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def autograd(model, observations, d_parameters, d_values):
    """The flat gradient of Σ d·outputs, which has the derivatives d."""
    parameters, values = model(observations)
    loss = (parameters * torch.as_tensor(d_parameters)).sum()
    loss = loss + (values * torch.as_tensor(d_values)).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in gradients]).numpy()


def assert_equal_to_autograd(model, observations, rows, seed=0):
    twin = copy.deepcopy(model)
    flat = FlatParameters(model)
    fast = FastGradient(model, flat)
    d_parameters = normal(rows, model.head.parameter_size, seed=seed) / rows
    d_values = normal(rows, seed=seed + 1) / rows
    tensors = torch.utils._pytree.tree_map(torch.as_tensor, observations)
    parameters, values = fast.forward(observations)
    with torch.no_grad():
        expected_parameters, expected_values = twin(tensors)
    np.testing.assert_allclose(parameters, expected_parameters, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values, expected_values, rtol=1e-4, atol=1e-5)
    fast.backward(d_parameters, d_values)
    expected = autograd(twin, tensors, d_parameters, d_values)
    np.testing.assert_allclose(flat.grad.numpy(), expected, **TOLERANCE)
    flat.check()


# ── flat parameters ──────────────────────────────────────────────────────────────────────────────


def test_the_parameters_are_views_in_order_with_their_values():
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatParameters(model)
    assert flat.size == sum(p.numel() for p in before.values())
    assert torch.equal(flat.data, torch.cat([p.reshape(-1) for p in before.values()]))
    assert list(flat.views()) == list(before)
    flat.data += 1.0
    flat.data.numpy()[:] += 1.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] + 2.0)
        np.testing.assert_array_equal(flat.views()[name], parameter.detach().numpy())
    flat.check()


def test_backward_accumulates_into_the_flat_gradient():
    model = network()
    observations, d_parameters, d_values = torch.randn(5, 4), normal(5, 3), normal(5)
    expected = autograd(copy.deepcopy(model), observations, d_parameters, d_values)
    flat = FlatParameters(model)
    for times in (1, 2):
        parameters, values = model(observations)
        (
            (parameters * torch.as_tensor(d_parameters)).sum() + values @ torch.as_tensor(d_values)
        ).backward()
        np.testing.assert_allclose(flat.grad.numpy(), times * expected, rtol=1e-5, atol=1e-5)
    flat.check()
    flat.zero_grad()
    assert not flat.grad.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert list(flat.grad_views()) == list(flat.views())


def test_zero_grad_takes_back_gradients_set_to_none():
    model = network()
    flat = FlatParameters(model)
    model.zero_grad(set_to_none=True)
    with pytest.raises(ConfigError, match="gradient of"):
        flat.check()
    flat.zero_grad()
    flat.check()


def test_a_torch_optimiser_and_load_state_dict_keep_the_views():
    model, other = network(), network(seed=1)
    flat = FlatParameters(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    flat.grad.fill_(1.0)
    before = flat.data.clone()
    optimiser.step()
    torch.testing.assert_close(flat.data, before - 1.0)
    model.load_state_dict(other.state_dict())
    assert torch.equal(flat.data, FlatParameters(other).data)
    flat.check()


def test_a_replaced_parameter_is_noticed():
    model = network()
    flat = FlatParameters(model)
    model.policy_out.weight.data = model.policy_out.weight.data.clone()
    with pytest.raises(ConfigError, match=r"policy_out\.weight"):
        flat.check()


def test_a_module_moved_afterwards_is_noticed():
    model = network()
    flat = FlatParameters(model)
    model.to("meta")
    with pytest.raises(ConfigError, match="module was moved"):
        flat.check()


def test_parameters_that_cannot_be_one_array_are_refused():
    mixed = network()
    mixed.value_out.double()
    with pytest.raises(ConfigError, match="float64"):
        FlatParameters(mixed)
    scattered = network()
    scattered.value_out.to("meta")
    with pytest.raises(ConfigError, match="several devices"):
        FlatParameters(scattered)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        FlatParameters(nn.Tanh())


def test_frozen_parameters_are_left_alone():
    model = network()
    model.policy_trunk.requires_grad_(False)
    flat = FlatParameters(model)
    assert not any(name.startswith("policy_trunk") for name in flat.views())
    flat.check()


def test_no_numpy_view_of_another_device():
    flat = FlatParameters(network().to("meta"))
    with pytest.raises(ConfigError, match="no numpy view"):
        flat.views()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    model = network().to("cuda")
    twin = copy.deepcopy(model).cpu()
    flat, twin_flat = FlatParameters(model), FlatParameters(twin)
    flat.check()
    adam, twin_adam = Adam(flat.data, lr=1e-2), Adam(twin_flat.data, lr=1e-2)
    observations = torch.randn(64, 4)
    for _ in range(5):
        for part, x, net in ((flat, observations.cuda(), model), (twin_flat, observations, twin)):
            part.zero_grad()
            parameters, values = net(x)
            (parameters.square().mean() + values.square().mean()).backward()
            part.check()
        norms = [clip_by_norm_(part.grad, 0.5) for part in (flat, twin_flat)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        adam.step(flat.grad)
        twin_adam.step(twin_flat.grad)
    torch.testing.assert_close(flat.data.cpu(), twin_flat.data, rtol=1e-3, atol=1e-4)


# ── the written-out gradient ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
def test_equal_to_autograd(action_space, activation, shared):
    model = network(action_space=action_space, activation=activation, shared=shared)
    assert can_learn(model)
    assert_equal_to_autograd(model, normal(33, 4), 33)


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 9),
    hidden=st.lists(st.integers(1, 20), max_size=3),
    rows=st.integers(1, 50),
    actions=st.sampled_from(sorted(ACTIONS)),
    activation=st.sampled_from(["tanh", "relu", "elu"]),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equal_to_autograd_for_any_shape(inputs, hidden, rows, actions, activation, shared, seed):
    space = Box(-1.0, 1.0, (inputs,))
    options = {"hidden": hidden, "activation": activation, "shared": shared}
    model = network(space, ACTIONS[actions], seed, **options)
    assert_equal_to_autograd(model, normal(rows, inputs, seed=seed), rows, seed)


@pytest.mark.parametrize(
    "space",
    [
        Box(-1.0, 1.0, (2, 3), np.float64),
        Discrete(5, start=2),
        MultiDiscrete([3, 4]),
        Dict({"a": Box(-1.0, 1.0, (2,)), "b": Discrete(3)}),
    ],
    ids=["matrix", "discrete", "multi-discrete", "dict"],
)
def test_any_encoder_without_images(space):
    space.seed(0)
    empty = gym.vector.utils.create_empty_array(space, 6)
    rows = gym.vector.utils.concatenate(space, [space.sample() for _ in range(6)], empty)
    assert_equal_to_autograd(network(space), rows, 6)


def test_forward_equals_the_actor():
    model = network(action_space=ACTIONS["box"])
    fast, observations = FastGradient(model, FlatParameters(model)), normal(9, 4)
    for ours, acting in zip(
        fast.forward(observations), FastActor(model).forward(observations), strict=True
    ):
        np.testing.assert_allclose(ours, acting, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_overwritten_and_backward_can_be_repeated():
    model = network()
    flat = FlatParameters(model)
    fast = FastGradient(model, flat)
    flat.grad.fill_(7.0)
    fast.forward(normal(8, 4))
    fast.backward(normal(8, 3), normal(8))
    first = flat.grad.clone()
    fast.backward(normal(8, 3), normal(8))
    assert torch.equal(flat.grad, first)


def test_work_arrays_are_kept_and_shared_by_all_sizes():
    model = network()
    flat = FlatParameters(model)
    fast = FastGradient(model, flat)
    first = fast.forward(normal(8, 4))[0]
    assert fast.forward(normal(8, 4))[0] is first
    for rows in range(1, 20):
        fast.forward(normal(rows, 4))
        assert len(fast._kept) <= KEPT_SIZES
    here = np.shares_memory(fast.forward(normal(5, 4))[1], fast.forward(normal(7, 4))[1])
    assert here  # no memory of its own for every size
    fast.forward(normal(3, 4))
    fast.forward(normal(8, 4))  # another size between must not disturb
    fast.backward(normal(8, 3), normal(8))
    expected = autograd(model, torch.as_tensor(normal(8, 4)), normal(8, 3), normal(8))
    np.testing.assert_allclose(flat.grad.numpy(), expected, **TOLERANCE)


def test_neither_row_order_nor_batch_size_matters():
    model = network(action_space=ACTIONS["box"])
    flat = FlatParameters(model)
    fast = FastGradient(model, flat)
    x, d_parameters, d_values = normal(40, 4), normal(40, 8) / 40, normal(40) / 40

    def gradient(rows):
        fast.forward(x[rows])
        fast.backward(d_parameters[rows], d_values[rows])
        return flat.grad.numpy().copy()

    whole = gradient(np.arange(40))
    shuffled = np.random.default_rng(0).permutation(40)
    np.testing.assert_allclose(gradient(shuffled), whole, **TOLERANCE)
    parts = [gradient(rows) for rows in np.split(shuffled, [1, 17])]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, **TOLERANCE)


def test_changes_in_place_are_seen_at_once():
    model = network()
    flat = FlatParameters(model)
    fast, observations = FastGradient(model, flat), normal(5, 4)
    before = fast.forward(observations)[1].copy()
    model.load_state_dict(network(seed=1).state_dict())
    assert not np.allclose(fast.forward(observations)[1], before)
    assert_equal_to_autograd(model, observations, 5)


@pytest.mark.parametrize("actions", ["discrete", "box"])
def test_whole_ppo_steps_equal_those_of_torch(actions):
    rows, clip, rng = 64, 0.2, np.random.default_rng(0)
    model = network(action_space=ACTIONS[actions])
    twin = copy.deepcopy(model)
    flat = FlatParameters(model)
    fast, density = FastGradient(model, flat), for_head(model.head)
    ours = Adam(flat.data, lr=1e-3)
    theirs = torch.optim.Adam(twin.parameters(), lr=1e-3, eps=1e-5)
    observations = normal(rows, 4)
    action, logp, _, _ = FastActor(model).act(observations, rng)
    behaviour = (logp + 0.2 * normal(rows, seed=3)).astype(np.float32)
    advantages, returns = normal(2, rows, seed=4)
    for _ in range(5):
        parameters, values = fast.forward(observations)
        logp, _, pullback = density.log_prob_and_entropy(parameters, action)
        ratio = np.exp(logp - behaviour)
        gain = ratio * advantages
        active = gain <= np.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages
        d_parameters = pullback(-gain * active / rows, -0.01 / rows)
        fast.backward(d_parameters, 0.5 * (values - returns) / rows)
        norm = clip_by_norm_(flat.grad, 0.5)
        ours.step(flat.grad)

        outputs, values = twin(torch.as_tensor(observations))
        logp = twin.head.log_prob(outputs, torch.as_tensor(action))
        tensors = [torch.as_tensor(x) for x in (behaviour, advantages, returns)]
        loss = losses.clipped_surrogate(logp, tensors[0], tensors[1], clip).loss
        loss = loss + 0.25 * losses.squares(values, tensors[2])
        loss = (loss - 0.01 * twin.head.entropy(outputs).sum()) / rows
        theirs.zero_grad()
        loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        assert norm == pytest.approx(float(expected), rel=1e-4)
        theirs.step()
    torch.testing.assert_close(flat.data, FlatParameters(twin).data, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_learned_in_numpy():
    class Mine(ActorCritic):
        """Might have a forward of its own."""

    frozen, double, own = network(), network().double(), network()
    frozen.policy_trunk.requires_grad_(False)
    own.__class__ = Mine
    unknown, twofold, steep, odd, unlike = (network(activation="elu") for _ in range(5))
    unknown.policy_trunk[1] = nn.GELU()
    twofold.policy_trunk[1] = nn.Tanh()
    steep.policy_trunk[1] = steep.policy_trunk[3] = nn.ELU(alpha=2.0)
    odd.policy_trunk.append(nn.Linear(64, 64))
    unlike.value_trunk = network(activation="relu").value_trunk
    images = build_actor_critic(Box(0, 255, (10, 10, 4), np.uint8), Discrete(2))
    for model in (nn.Linear(2, 2), frozen, double, own, images, network().to("meta")):
        assert not can_learn(model)
    for model in (unknown, twofold, steep, odd, unlike):
        assert not can_learn(model)
    with pytest.raises(ConfigError, match="autograd"):
        FastGradient(frozen, FlatParameters(frozen))


def test_misuse_is_refused():
    model = network()
    flat = FlatParameters(model)
    with pytest.raises(ConfigError, match="another model"):
        FastGradient(network(hidden=(8,)), flat)
    with pytest.raises(ConfigError, match="another model"):
        FastGradient(network(seed=1), flat)
    fast = FastGradient(model, flat)
    with pytest.raises(ConfigError, match="forward before"):
        fast.backward(normal(5, 3), normal(5))
    fast.forward(normal(5, 4))
    with pytest.raises(ConfigError, match="shapes"):
        fast.backward(normal(5, 3), normal(5, 1))


@pytest.mark.parametrize("hidden", [(), (8,), (16, 16)])
def test_the_value_alone_is_that_of_autograd_and_leaves_the_policy(hidden):
    model = network(action_space=ACTIONS["box"], hidden=hidden, seed=4)
    twin, flat = copy.deepcopy(model), FlatParameters(model)
    fast = FastValueGradient(model, flat)
    flat.grad.fill_(7.0)
    observations, d_values = normal(50, 4), normal(50, seed=1)
    values = fast.forward(observations)
    fast.backward(d_values)
    exact = autograd(twin, torch.as_tensor(observations), np.zeros((50, 8), "f4"), d_values)
    with torch.no_grad():
        np.testing.assert_allclose(values, twin.value(torch.as_tensor(observations)), **TOLERANCE)
    own = sum(p.numel() for p in model.value_parameters())  # at the end of the flat parameters
    np.testing.assert_allclose(flat.grad.numpy()[-own:], exact[-own:], **TOLERANCE)
    assert (flat.grad.numpy()[:-own] == 7.0).all()
    assert np.abs(exact[-own:]).max() > 0.1
    assert (exact[:-own] == 0).all()


def test_a_shared_trunk_has_no_value_alone():
    model = network(shared=True)
    with pytest.raises(ConfigError, match="shared trunk"):
        FastValueGradient(model, FlatParameters(model))
