"""Networks of DQN and DDPG: identities, bounds, and numpy against autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from manyhands.errors import ConfigError
from manyhands.networks.flat import FlatParameters
from manyhands.networks.numpy_mlp import NumpyMLP
from manyhands.networks.q import build_bounded_actor, build_q_network, is_plain

SPACE = Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


def observations(rows: int = 7) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(rows, 3)).astype(np.float32))


def test_dueling_is_value_plus_advantage_less_its_mean() -> None:
    model = build_q_network(SPACE, Discrete(4), dueling=True, seed=1)
    x = observations()
    features = model.policy_trunk(model.policy_encoder(x))
    weight, bias = model.policy_out.parts.weight, model.policy_out.parts.bias
    value = features @ weight[0] + bias[0]
    advantage = features @ weight[1:].T + bias[1:]
    by_hand = torch.stack([value[i] + advantage[i] - sum(advantage[i]) / 4 for i in range(len(x))])
    assert torch.allclose(model(x), by_hand, atol=1e-6)
    assert torch.allclose(model(x).mean(-1), value, atol=1e-6)  # so V is the mean of Q


def test_value_is_the_best_q_and_policy_the_choice() -> None:
    model = build_q_network(SPACE, Discrete(3, start=5), seed=1)
    x = observations()
    assert torch.equal(model.value(x), model(x).max(-1).values)
    assert torch.equal(model.head.mode(model.policy(x)), model(x).argmax(-1) + 5)


def test_actions_stay_within_bounds_whatever_the_weights() -> None:
    model = build_bounded_actor(SPACE, ACTIONS, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1000.0)
    actions = model(observations(100)).detach().numpy()
    assert (actions >= ACTIONS.low).all()
    assert (actions <= ACTIONS.high).all()
    assert actions.std() > 1.0  # and reach them


def test_a_fresh_policy_acts_in_the_middle_and_unit_actions_are_on_the_unit_scale() -> None:
    middle = build_bounded_actor(SPACE, ACTIONS, seed=1)(observations()).detach().numpy()
    assert np.abs(middle - [0.0, 5.0]).max() < 0.3
    unit = build_bounded_actor(SPACE, ACTIONS, unit_actions=True, seed=1)
    assert torch.equal(unit.policy_out.reach, torch.ones(2))


def test_the_critic_sees_actions_on_the_unit_scale() -> None:
    model = build_bounded_actor(SPACE, ACTIONS, seed=1)
    x, a = observations(5), torch.rand(5, 2) * torch.tensor([4.0, 10.0]) + torch.tensor([-2.0, 0.0])
    unit = (a - torch.tensor([0.0, 5.0])) / torch.tensor([2.0, 5.0])
    by_hand = model.critic_out(model.critic_trunk(torch.cat([x, unit], -1)))[:, 0]
    assert torch.allclose(model.q(x, a), by_hand)
    assert torch.allclose(model.value(x), model.q(x, model(x)))


def test_noise_of_a_saved_policy_is_in_parts_of_half_the_range() -> None:
    model = build_bounded_actor(SPACE, ACTIONS, noise=0.1, seed=1)
    assert torch.allclose(model.policy(observations())[0, 2:].exp(), torch.tensor([0.2, 0.5]))


def test_policy_parameters_come_first() -> None:
    model = build_bounded_actor(SPACE, ACTIONS, seed=1)
    names = [name for name, _ in model.named_parameters()]
    split = [name.startswith("policy") for name in names].index(False)
    assert all(name.startswith("critic") for name in names[split:])
    sizes = [p.numel() for p in model.parameters()]
    assert model.policy_size() == sum(sizes[:split])


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build_q_network(SPACE, Discrete(2), seed=3)
    torch.manual_seed(2)
    other, third = (build_q_network(SPACE, Discrete(2), seed=s) for s in (3, 4))
    assert torch.equal(one(observations()), other(observations()))
    assert not torch.equal(one(observations()), third(observations()))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_numpy_mlp_is_autograd(activation: str) -> None:
    model = build_q_network(SPACE, Discrete(4), hidden=(9, 5), activation=activation, seed=1)
    flat = FlatParameters(model)
    net = NumpyMLP(flat, model.policy_trunk, "policy_trunk", "policy_out")
    x = observations().requires_grad_()
    signal = torch.from_numpy(np.random.default_rng(2).normal(size=(7, 4)).astype(np.float32))
    (model(x) * signal).sum().backward()
    wanted, wanted_x = flat.grad.clone(), x.grad
    flat.grad.zero_()
    assert np.allclose(net.look(x.detach().numpy()), model(x).detach().numpy(), atol=1e-6)
    net.forward(x.detach().numpy())
    down = net.backward(signal.numpy().copy(), down=True)
    assert torch.allclose(flat.grad, wanted, atol=1e-5)
    assert wanted_x is not None
    assert np.allclose(down, wanted_x.numpy(), atol=1e-5)
    flat.grad.zero_()
    net.backward(signal.numpy().copy(), into_parameters=False)
    assert not flat.grad.any()


def test_images_are_for_torch() -> None:
    image = Box(0, 255, (4, 84, 84), np.uint8)
    model = build_q_network(image, Discrete(2), hidden=(), dueling=True, seed=1)
    assert not is_plain(model)
    assert is_plain(build_q_network(SPACE, Discrete(2), seed=1))
    assert model(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 2)


def test_dict_observations() -> None:
    space = Dict({"a": SPACE, "b": Discrete(3)})
    model = build_q_network(space, Discrete(2), seed=1)
    assert model({"a": observations(), "b": torch.zeros(7, dtype=torch.long)}).shape == (7, 2)


@pytest.mark.parametrize(
    ("build", "space", "said"),
    [
        (build_q_network, ACTIONS, "manyhands train ddpg"),
        (build_q_network, MultiBinary(2), "Discrete"),
        (build_bounded_actor, Discrete(2), "manyhands train dqn"),
        (build_bounded_actor, Box(-np.inf, np.inf, (1,)), "finite bounds"),
    ],
)
def test_wrong_action_spaces_are_refused(build: Any, space: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(SPACE, space)
