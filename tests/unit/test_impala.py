"""IMPALA's loss: both gradients, both kinds of memory, and V-trace where it meets the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from async_programs import impala, unrolls_of

import manyhands as mh
from manyhands import wire
from manyhands.algorithms.base import Alone
from manyhands.algorithms.impala import IMPALA, normalised_under
from manyhands.algorithms.registry import IMPALAConfig
from manyhands.collect.unroll import UnrollCollector, joined
from manyhands.envs import make_vec
from manyhands.math.returns import gae
from manyhands.math.running_stats import Normaliser
from manyhands.networks.build import build_actor_critic, build_recurrent
from manyhands.streams import EnvNoise


def moved(algorithm: Any, by: float = 0.05) -> None:
    noise = torch.Generator().manual_seed(6)
    with torch.no_grad():
        flat = algorithm.flat.data
        flat += by * torch.randn(flat.shape, generator=noise)


def rho_of(algorithm: Any, unroll: Any) -> float:
    batch = algorithm.prepare_unroll(unroll)
    stats = algorithm.gradient(batch, 1)
    return float(stats[3] / batch["valid"].sum())


@pytest.mark.parametrize("units", [0, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_on_policy_every_weight_is_one(units: int, whole: bool) -> None:
    """The learner finds the very probabilities with which the actor acted, memory included."""
    algorithm, envs = impala(lstm=units)
    unrolls = unrolls_of(algorithm, envs, 5, length=17, whole_episodes=whole)
    envs.close()
    for unroll in (*unrolls, joined(unrolls)):
        assert rho_of(algorithm, unroll) == pytest.approx(1.0, abs=1e-5)
    moved(algorithm, 0.3)
    assert rho_of(algorithm, joined(unrolls)) < 0.99


def test_on_policy_targets_are_n_step_returns() -> None:
    algorithm, envs = impala(normalize_advantages=False)
    unroll = joined(unrolls_of(algorithm, envs, 3, length=25))
    envs.close()
    batch = algorithm.prepare_unroll(unroll)
    parameters, values = algorithm.fast.forward(batch["obs"])
    logp, _, _ = algorithm.density.log_prob_and_entropy(parameters, batch["action"])
    after = algorithm.actor.value(batch["edges"])
    traced = algorithm._traced(logp, values, after, batch, Alone())
    shape = batch["reward"].shape
    following = np.zeros(shape, np.float32)
    following[:-1] = values.reshape(shape)[1:]
    following.reshape(-1)[batch["edge_row"]] = after
    want = gae(
        batch["reward"], values.reshape(shape), following, batch["terminated"],
        batch["truncated"], gamma=0.99, lam=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(traced["target"].reshape(shape), want.returns, atol=1e-4)
    np.testing.assert_allclose(traced["advantage"].reshape(shape), want.advantages, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_both_gradients_agree(env: str, normalize: bool) -> None:
    options = IMPALAConfig(entropy_weight=0.05, normalize_advantages=normalize)
    grads = []
    for fast in (True, False):
        envs = make_vec(env, 2, seed=5)
        model = build_actor_critic(envs.observation_space, envs.action_space, hidden=(8,), seed=3)
        algorithm = IMPALA(model, options, seed=1)
        unroll = joined(unrolls_of(algorithm, envs, 2))
        envs.close()
        moved(algorithm)
        if not fast:
            algorithm.fast = None
        stats = algorithm.gradient(algorithm.prepare_unroll(unroll), 7)
        grads.append((algorithm.flat.grad.clone(), stats))
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(grads[0][1], grads[1][1], rtol=1e-4)


def test_on_policy_advantages_are_normalised_as_ever() -> None:
    advantage = np.random.default_rng(1).normal(3.0, 2.0, 50).astype(np.float32)
    found = normalised_under(np.ones(50, np.float32), advantage, Alone())
    np.testing.assert_allclose(found, (advantage - advantage.mean()) / advantage.std(), atol=1e-5)


def test_a_row_without_weight_has_no_advantage_either() -> None:
    """Where the policy has long left the action, grad log π has no bound: nothing may be left."""
    advantage = np.array([4.0, 2.0, 6.0, 0.0], np.float32)  # ρ is already in them
    rho = np.array([1.0, 1.0, 1.0, 0.0], np.float32)
    found = normalised_under(rho, advantage, Alone())
    assert found[3] == 0.0
    np.testing.assert_allclose(found[:3], normalised_under(rho[:3], advantage[:3], Alone()))


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_clip_is_that_of_ppo(env: str) -> None:
    """Its gradient is that of min(r A, clip(r) A), for which autograd stands in here."""
    envs = make_vec(env, 2, seed=5)
    model = build_actor_critic(envs.observation_space, envs.action_space, hidden=(8,), seed=3)
    options = IMPALAConfig(clip=0.1, rho_bar=1e9, value_weight=0.0)
    algorithm = IMPALA(model, options, seed=1)
    batch = algorithm.prepare_unroll(joined(unrolls_of(algorithm, envs, 2)))
    envs.close()
    moved(algorithm, 0.1)
    algorithm.gradient(batch, 1)
    found = algorithm.flat.grad.clone()

    parameters, values = model(torch.from_numpy(batch["obs"]))
    logp = model.head.log_prob(parameters, torch.from_numpy(batch["action"]))
    behaviour = torch.from_numpy(batch["logp"].reshape(-1))
    ratio = torch.exp(logp - behaviour)
    unclipped = IMPALA(model, IMPALAConfig(rho_bar=1e9), seed=1)
    numbers = [x.detach().numpy() for x in (logp, values)]
    traced = unclipped._traced(*numbers, unclipped._edge_values(batch), batch, Alone())
    advantage = torch.from_numpy(traced["advantage"]) / ratio.detach()
    algorithm.flat.zero_grad()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    assert ((ratio < 0.9) | (ratio > 1.1)).any()
    (-surrogate.sum()).backward()
    torch.testing.assert_close(found, algorithm.flat.grad, rtol=1e-3, atol=1e-4)


def test_padding_does_not_change_the_gradient() -> None:
    """Episodes one by one, their gradients added up, are the gradient of all side by side."""
    algorithm, envs = impala(normalize_advantages=False, entropy_weight=0.1)
    episodes = unrolls_of(algorithm, envs, 4, whole_episodes=True)
    envs.close()
    moved(algorithm)
    total = torch.zeros_like(algorithm.flat.grad)
    for episode in episodes:
        algorithm.gradient(algorithm.prepare_unroll(episode), 100)
        total += algorithm.flat.grad
    algorithm.gradient(algorithm.prepare_unroll(joined(episodes)), 100)
    torch.testing.assert_close(algorithm.flat.grad, total, rtol=1e-4, atol=1e-6)


def test_an_unroll_stays_as_it_was() -> None:
    """One worker that acts and learns has no channel that would copy it; its replay needs it so."""
    algorithm, envs = impala()
    noise, plain = EnvNoise(1, 0, 2), Normaliser(envs.observation_space, False, False, 0.99)
    collector = UnrollCollector(envs, algorithm.actor, 5, noise, plain)
    (first,) = collector.collect(0)
    before = wire.encode(first)
    collector.collect(0)
    envs.close()
    assert wire.encode(first) == before


def test_a_memory_forgets_at_the_end_of_an_episode() -> None:
    spaces = make_vec("CartPole-v1", 1)
    model = build_recurrent(spaces.observation_space, spaces.action_space, units=4, seed=1)
    spaces.close()
    obs, state = torch.randn(6, 4), torch.randn(1, 8)
    first = torch.zeros(6, 1, dtype=torch.bool)
    first[3] = True
    parameters, values, states = model.unroll(obs, state, first, 6)
    again, _, _ = model.unroll(obs[3:], torch.zeros(1, 8), torch.zeros(3, 1, dtype=torch.bool), 3)
    torch.testing.assert_close(parameters[3:], again)
    stepped, value, after = model.step(obs[:1], state)
    torch.testing.assert_close(parameters[:1], stepped)
    torch.testing.assert_close(values[:1], value)
    torch.testing.assert_close(states[:1], after)


def test_a_reward_at_the_very_end_is_learned(tmp_path: Any) -> None:
    """With the last target fixed at zero, as it was in one of the founding systems, it never is."""
    result = mh.train(
        "impala", env="manyhands/Delayed-v0", env_kwargs={"length": 8}, engine="inline", workers=3,
        steps=60_000, target_return=0.95, learning_rate=3e-3, entropy_weight=0.01, quiet=True,
        tensorboard=False, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert result.solved, result.summary
