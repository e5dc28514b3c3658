"""Networks: every supported space, initialisation, gradients, and the numpy twin of the forward."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text
from torch import nn
from torch.nn import functional

from manyhands.errors import ConfigError
from manyhands.math.natural_gradient import flat_parameters, set_flat_parameters
from manyhands.networks.build import build_actor_critic
from manyhands.networks.encoders import ImageEncoder, mlp, to_bfloat16
from manyhands.networks.numpy_distributions import mode, sample
from manyhands.networks.numpy_mlp import FastActor, can_act, encoding

VECTOR = Box(-1.0, 1.0, (4,))
OBSERVATIONS = {
    "vector": VECTOR,
    "matrix": Box(-1.0, 1.0, (2, 3), np.float64),
    "bytes": Box(0, 255, (6,), np.uint8),
    "discrete": Discrete(5, start=2),
    "multi-discrete": MultiDiscrete([[3, 2], [4, 2]]),
    "multi-binary": MultiBinary(3),
    "dict": Dict({"b.c": Discrete(3), "a": Box(-1.0, 1.0, (2,)), "d": Dict({"x": MultiBinary(2)})}),
}
IMAGES = {
    "channels first": Box(0, 255, (4, 84, 84), np.uint8),
    "channels last": Box(0, 255, (40, 50, 3), np.uint8),
    "small": Box(0, 255, (10, 10, 4), np.uint8),
}
ACTIONS = {
    "discrete": Discrete(3, start=1),
    "multi-discrete": MultiDiscrete([3, 2]),
    "multi-binary": MultiBinary(3),
    "box": Box(-2.0, 2.0, (2, 2)),
}


def batch_of(space, rows=6):
    """`rows` observations stacked as a vector environment stacks them."""
    space.seed(0)
    return gym.vector.utils.concatenate(
        space,
        [space.sample() for _ in range(rows)],
        gym.vector.utils.create_empty_array(space, rows),
    )


def tensors(x):
    if isinstance(x, dict):
        return {key: tensors(value) for key, value in x.items()}
    return torch.from_numpy(x)


def shake(model, seed=0):
    """Weights far from their initial values, so that nothing is nearly zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("observation", [*OBSERVATIONS, *IMAGES])
def test_every_observation_space_gives_parameters_values_and_gradients(observation, shared):
    space = (OBSERVATIONS | IMAGES)[observation]
    model = build_actor_critic(space, Discrete(3), shared=shared, hidden=(8,), seed=0)
    x = tensors(batch_of(space))
    parameters, values = model(x)
    assert parameters.shape == (6, 3)
    assert values.shape == (6,)
    torch.testing.assert_close(model.policy(x), parameters)
    torch.testing.assert_close(model.value(x), values)
    (model.head.log_prob(parameters, torch.zeros(6)).sum() + values.sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_space(action):
    model = build_actor_critic(VECTOR, ACTIONS[action], seed=0)
    parameters, _ = model(tensors(batch_of(VECTOR)))
    actions = model.head.sample(parameters)
    assert actions.shape == (6, *ACTIONS[action].shape)
    assert model.head.entropy(parameters).shape == (6,)
    assert model.head.log_prob(parameters, actions).requires_grad


def test_one_hot_and_dict_parts_by_hand():
    def encode(space, x):
        encoder = build_actor_critic(space, Discrete(2)).policy_encoder
        assert np.array_equal(encoding(encoder)(x), encoder(tensors(x)).numpy())
        return encoding(encoder)(x).tolist()

    assert encode(Discrete(3, start=5), np.array([5, 7])) == [[1, 0, 0], [0, 0, 1]]
    assert encode(MultiDiscrete([2, 3]), np.array([[1, 0], [0, 2]])) == [
        [0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1],
    ]
    space = Dict({"b": Discrete(2), "a": Box(-9.0, 9.0, (1,))})
    assert encode(space, {"b": np.array([1]), "a": np.array([[7.0]])}) == [[7, 0, 1]]


def test_separate_trunks_share_nothing_and_a_shared_trunk_is_held_once():
    apart = build_actor_critic(VECTOR, ACTIONS["box"], seed=0)
    policy, value = apart.policy_parameters(), apart.value_parameters()
    assert not {id(p) for p in policy} & {id(p) for p in value}
    assert len(policy) + len(value) == len(list(apart.parameters()))
    together = build_actor_critic(VECTOR, ACTIONS["box"], shared=True, seed=0)
    pointers = [x.data_ptr() for x in together.state_dict().values()]
    assert len(pointers) == len(set(pointers)) == len(list(together.parameters()))
    assert [p.shape for p in together.value_parameters()] == [(1, 64), (1,)]


def test_changing_value_parameters_leaves_the_policy_alone():
    x = tensors(batch_of(VECTOR))
    for shared in (False, True):
        model = build_actor_critic(VECTOR, Discrete(2), shared=shared, seed=0)
        before = model.policy(x)
        with torch.no_grad():
            for p in model.value_parameters():
                p.add_(1.0)
        assert torch.equal(model.policy(x), before)


def test_initial_weights_are_orthogonal_with_their_gains():
    model = build_actor_critic(VECTOR, Discrete(2), seed=0)
    first, last = model.policy_trunk[0], model.policy_out
    torch.testing.assert_close(first.weight.T @ first.weight, 2.0 * torch.eye(4))
    torch.testing.assert_close(last.weight @ last.weight.T, 1e-4 * torch.eye(2))
    torch.testing.assert_close(model.value_out.weight.norm(), torch.tensor(1.0))
    assert not first.bias.any()


def test_a_fresh_policy_is_nearly_uniform():
    model = build_actor_critic(VECTOR, Discrete(4), seed=0)
    entropy = model.head.entropy(model.policy(tensors(batch_of(VECTOR))))
    torch.testing.assert_close(entropy, torch.full((6,), math.log(4)), atol=1e-3, rtol=0)


def test_a_seed_makes_weights_repeat_and_leaves_the_global_stream_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, again, other = (build_actor_critic(VECTOR, Discrete(2), seed=s) for s in (1, 1, 2))
    flat = [flat_parameters(list(m.parameters())) for m in (first, again, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])
    assert torch.equal(state, torch.get_rng_state())


def test_log_std_is_a_parameter_of_its_own_and_part_of_the_distribution():
    model = build_actor_critic(VECTOR, Box(-1.0, 1.0, (3,)), initial_log_std=-0.5, seed=0)
    parameters = model.policy(tensors(batch_of(VECTOR)))
    assert parameters.shape == (6, 6)
    assert (parameters[:, 3:] == -0.5).all()
    assert any(p is model.log_std for p in model.policy_parameters())


def test_images_are_scaled_and_both_layouts_agree():
    encoder = ImageEncoder((3, 40, 50))
    last = ImageEncoder((40, 50, 3))
    last.load_state_dict(encoder.state_dict())
    image = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8)
    torch.testing.assert_close(encoder(image), last(image.permute(0, 2, 3, 1)))
    torch.testing.assert_close(encoder(image), encoder.layers(image.float() / 255.0))
    assert encoder(image).shape == (2, 512)
    assert ImageEncoder((36, 36, 1)).layers[-2].in_features == 64


@pytest.mark.parametrize("shape", [(3, 40, 50), (40, 50, 3)])
def test_bfloat16_changes_the_third_digit(shape):
    encoder = ImageEncoder(shape)
    halved = copy.deepcopy(encoder)
    to_bfloat16(nn.ModuleDict({"in a model": halved}))
    images = torch.randint(0, 256, (8, *shape), dtype=torch.uint8)
    exact, rough = encoder(images), halved(images)
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.0, atol=0.02 * exact.detach().max().item())
    for features in (exact, rough):
        (features - 1.0).square().mean().backward()
    for p, q in zip(encoder.parameters(), halved.parameters(), strict=True):
        assert q.grad.dtype == torch.float32
        assert functional.cosine_similarity(p.grad.flatten(), q.grad.flatten(), 0) > 0.999


def test_faults_are_named():
    with pytest.raises(ConfigError, match="too small"):
        ImageEncoder((2, 2, 3))
    with pytest.raises(ConfigError, match="make it grey"):
        build_actor_critic(Box(0, 255, (4, 84, 84, 3), np.uint8), Discrete(2))
    with pytest.raises(ConfigError, match="no encoder"):
        build_actor_critic(Text(3), Discrete(2))
    with pytest.raises(ConfigError, match="not one of tanh, relu, elu"):
        mlp(2, (3,), activation="sine")
    with pytest.raises(ConfigError, match="without images"):
        FastActor(build_actor_critic(IMAGES["small"], Discrete(2)))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_fast_forward_equals_torch(observation, activation, shared):
    space = OBSERVATIONS[observation]
    model = build_actor_critic(
        space, ACTIONS["box"], shared=shared, activation=activation, hidden=(16, 8), seed=0
    )
    x = batch_of(space)
    if observation == "bytes":  # unscaled bytes make outputs of hundreds: compare on their scale
        x = x // 64
    with torch.no_grad():
        parameters, values = shake(model)(tensors(x))
    fast = FastActor(model)
    found, found_values = fast.forward(x)
    np.testing.assert_allclose(found, parameters.numpy(), atol=1e-6, rtol=1e-5)
    np.testing.assert_allclose(found_values, values.numpy(), atol=1e-6, rtol=1e-5)
    np.testing.assert_array_equal(fast.value(x), found_values)


@pytest.mark.parametrize("hidden", [(), (64, 64)])
@pytest.mark.parametrize("action", ACTIONS)
def test_fast_actions_have_the_log_probabilities_of_torch(action, hidden):
    model = shake(build_actor_critic(VECTOR, ACTIONS[action], hidden=hidden, seed=0))
    x = batch_of(VECTOR, 64)
    actions, logp, values, parameters = FastActor(model).act(x, np.random.default_rng(0))
    assert actions.shape == (64, *ACTIONS[action].shape)
    assert logp.dtype == values.dtype == parameters.dtype == np.float32
    with torch.no_grad():
        p, v = model(torch.from_numpy(x))
        want = model.head.log_prob(torch.from_numpy(parameters), torch.from_numpy(actions))
        whole = model.head.log_prob(p, torch.from_numpy(actions))
        likeliest = model.head.mode(p)
    np.testing.assert_allclose(logp, want.numpy(), atol=2e-6)
    np.testing.assert_allclose(logp, whole.numpy(), atol=1e-5)
    np.testing.assert_allclose(values, v.numpy(), atol=1e-6, rtol=1e-5)
    means = parameters[:, : model.policy_out.out_features]
    np.testing.assert_allclose(mode(model.head, means), likeliest.numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("action", ACTIONS)
def test_fast_samples_follow_the_distribution(action):
    """E[−log p] over samples is the entropy, within three sigma; and the first moments agree."""
    model = shake(build_actor_critic(VECTOR, ACTIONS[action], seed=0))
    row = FastActor(model).forward(batch_of(VECTOR, 1))[0]
    many = np.repeat(row, 100_000, axis=0)
    actions, logp = sample(model.head, many, np.random.default_rng(1))
    exact = model.head.entropy(torch.from_numpy(row).double()).item()
    assert abs(-logp.mean() - exact) < 3 * logp.std() / math.sqrt(len(logp))
    theirs = model.head.sample(torch.from_numpy(many), torch.Generator().manual_seed(0)).numpy()
    spread = np.sqrt((actions.var(axis=0) + theirs.var(axis=0)) / len(many))
    gap = np.abs(actions.mean(axis=0, dtype=float) - theirs.mean(axis=0, dtype=float))
    assert (gap < 4 * spread).all()


def test_fast_samples_never_pick_the_impossible():
    from manyhands.networks.heads import Categorical

    logits = np.tile(np.array([[-1e4, 3.0, -1e4, 3.0, -1e4]], np.float32), (10_000, 1))
    actions, logp = sample(Categorical(5), logits, np.random.default_rng(0))
    assert set(actions.tolist()) == {1, 3}
    np.testing.assert_allclose(logp, math.log(0.5), atol=1e-6)


def test_fast_sees_every_change_made_in_place():
    model = shake(build_actor_critic(VECTOR, ACTIONS["box"], seed=0))
    fast = FastActor(model)
    x = batch_of(VECTOR)

    def check():
        with torch.no_grad():
            want, values = model(torch.from_numpy(x))
        np.testing.assert_allclose(fast.forward(x)[0], want.numpy(), atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(fast.forward(x)[1], values.numpy(), atol=1e-6, rtol=1e-5)

    start = fast.forward(x)[0]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    sum(part.sum() for part in model(torch.from_numpy(x))).backward()
    optimiser.step()
    check()
    assert not np.allclose(start, fast.forward(x)[0], atol=1e-3)
    parameters = list(model.parameters())
    set_flat_parameters(parameters, flat_parameters(parameters) * 0.5)
    check()
    model.load_state_dict(shake(copy.deepcopy(model), seed=9).state_dict())
    check()
    for p in parameters:
        p.data = p.data + 0.1  # other memory
    fast = FastActor(model)
    check()


def test_what_can_act_in_numpy():
    assert can_act(build_actor_critic(VECTOR, Discrete(2)))
    assert not can_act(build_actor_critic(IMAGES["small"], Discrete(2)))
    assert not can_act(nn.Linear(2, 2))
