"""Policies with an LSTM for a2c, ppo and trpo: what is carried, what is forgotten, what is learned
through time."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import manyhands as mh
from manyhands import trees
from manyhands.algorithms.base import Algorithm
from manyhands.algorithms.registry import SPECS
from manyhands.collect.rollout import Collector
from manyhands.config import build
from manyhands.config.validate import faults
from manyhands.envs import make_vec
from manyhands.errors import ConfigError
from manyhands.networks.build import RecurrentActorCritic, build_recurrent
from manyhands.policy import build_model, build_normaliser, load
from manyhands.streams import EnvNoise
from manyhands.viewing.evaluation import evaluate

SMALL: dict[str, Any] = {
    "env": "manyhands/Recall-v0", "env_kwargs": {"delay": 3}, "engine": "inline", "quiet": True,
    "tensorboard": False, "hidden": (8,), "lstm": 6, "num_envs": 4, "rollout_length": 8, "seed": 3,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch": 16, "epochs": 2},
    "a2c": {},
    "trpo": {"value_minibatch": 16, "fisher_every": 2},
}


def recurrent(shared: bool = True, seed: int = 1) -> RecurrentActorCritic:
    box = spaces.Box(-9, 9, (3,), np.float32)
    model = build_recurrent(box, spaces.Discrete(4), units=5, shared=shared, hidden=(6,), seed=seed)
    with torch.no_grad():
        model.policy_out.weight.mul_(100.0)
    return model


@pytest.mark.parametrize("shared", [True, False])
def test_sequences_are_single_steps_with_a_state_that_is_forgotten(shared: bool) -> None:
    """Forward and gradient, against a loop over environments and steps."""
    model, rng = recurrent(shared), torch.Generator().manual_seed(2)
    width, length = 4, 7
    obs = torch.randn(width, length, 3, generator=rng)
    state = torch.randn(width, model.state_size, generator=rng)
    first = torch.rand(width, length, generator=rng) < 0.3
    first[0], first[1, 0], first[2, 0] = False, True, False
    parameters, values = model.sequences(obs.flatten(0, 1), state, first)
    slow_parameters, slow_values = [], []
    for b in range(width):
        now = state[b : b + 1]
        for t in range(length):
            now = torch.zeros_like(now) if first[b, t] else now
            p, v, now = model.step(obs[b, t : t + 1], now)
            slow_parameters.append(p)
            slow_values.append(v)
    assert torch.allclose(parameters, torch.cat(slow_parameters), atol=1e-5)
    assert torch.allclose(values, torch.cat(slow_values), atol=1e-5)
    weight = torch.randn(parameters.shape, generator=rng)
    weights = list(model.parameters())
    fast = torch.autograd.grad(
        (weight * parameters).sum() + values.square().sum(), weights, retain_graph=True
    )
    slow = torch.autograd.grad(
        (weight * torch.cat(slow_parameters)).sum() + torch.cat(slow_values).square().sum(),
        weights,
        retain_graph=True,
    )
    for one, other in zip(fast, slow, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    # Twice, as TRPO's Fisher products are.
    policy = model.policy_parameters()
    direction = [torch.randn(p.shape, generator=rng) for p in policy]
    curved = []
    for found in (parameters, torch.cat(slow_parameters)):
        kl = model.head.kl(found.detach() + 1.0 + 0.1 * weight, found).sum()
        slopes = torch.autograd.grad(kl, policy, create_graph=True)
        along = sum((a * b).sum() for a, b in zip(slopes, direction, strict=True))
        curved.append(torch.autograd.grad(along, policy))
    for one, other in zip(*curved, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)


def test_what_the_value_has_of_its_own_moves_no_policy() -> None:
    model = recurrent(shared=False)
    own = {id(p) for p in model.value_parameters()}
    assert own.isdisjoint(id(p) for p in model.policy_parameters())
    assert len(own) + len(model.policy_parameters()) == len(list(model.parameters()))


def algorithm_of(name: str) -> tuple[Algorithm, Any]:
    experiment = build(name, **{**SMALL, **OPTIONS[name], "env": "manyhands/Counter-v0",
                                "env_kwargs": {}, "gamma": 0.9})  # fmt: skip
    envs = make_vec("manyhands/Counter-v0", 3, seed=4)
    space = envs.observation_space
    model = build_model(experiment, space, envs.action_space)
    algorithm = experiment.spec.load()(model, experiment.options, seed=1)
    normaliser = build_normaliser(experiment, space)
    collector = Collector(
        envs, algorithm.actor, 6, EnvNoise(1, 0, 3), normaliser, state_size=model.state_size
    )
    return algorithm, collector


@pytest.mark.parametrize("name", ["ppo", "trpo"])
def test_a_rollout_knows_the_state_it_began_with_and_the_values_it_led_to(name: str) -> None:
    algorithm, collector = algorithm_of(name)
    actor: Any = algorithm.actor
    model: Any = algorithm.model
    memory = np.zeros((3, model.state_size), np.float32)
    first = np.ones(3, bool)
    cut = 0
    for _ in range(4):
        rollout = collector.collect()
        batch = algorithm.prepare(rollout)
        # The same steps, one at a time.
        memory[first] = 0.0
        assert np.array_equal(batch["state"], memory)
        for t in range(6):
            assert np.array_equal(rollout.first[t], first)
            memory[first] = 0.0
            seen = rollout.obs[t]
            acted, after = actor.act_with(seen, np.random.default_rng(0), memory)
            assert acted.values == pytest.approx(rollout.value[t], abs=1e-5)
            first = rollout.terminated[t] | rollout.truncated[t]
            for b in range(3):
                if rollout.terminated[t, b]:
                    continue
                if first[b]:  # cut off: the state goes on to the last observation
                    cut += 1
                    last = seen[b].copy()
                    last[2] += 1.0  # the step that Counter shows
                elif t < 5:
                    last = rollout.obs[t + 1, b]
                else:
                    last = trees.take(collector.current, b)
                value = actor.value_with(last[None], after[b : b + 1])[0]
                assert rollout.next_value[t, b] == pytest.approx(value, abs=1e-4)
            memory = after.copy()
        parameters, values = model.sequences(
            torch.from_numpy(batch["obs"]).flatten(0, 1),
            torch.from_numpy(batch["state"]),
            torch.from_numpy(batch["first"]),
        )
        assert np.allclose(parameters.detach(), batch["parameters"].reshape(18, -1), atol=1e-4)
        assert np.allclose(values.detach(), batch["value"].ravel(), atol=1e-4)
    assert cut > 2


# -- runs ------------------------------------------------------------------------------------------


def train(algorithm: str, folder: Path, **more: Any) -> Any:
    options = {**SMALL, **OPTIONS[algorithm], "steps": 128, **more}
    mh.train(algorithm, run_dir=str(folder), **options)
    return load(folder)


def weights(policy: Any) -> Any:
    return torch.cat([p.detach().reshape(-1) for p in policy.model.parameters()])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """algorithm -> the policy of one worker."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda algorithm: train(algorithm, folder / algorithm))


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_workers_learn_as_one(algorithm: str, strategy: str, alone: Any, tmp_path: Path) -> None:
    one = alone(algorithm)
    two = train(algorithm, tmp_path / "2", workers=2, strategy=strategy)
    assert torch.allclose(weights(one), weights(two), rtol=1e-3, atol=1e-5)
    start = build_model(one.experiment, one.observation_space, one.action_space)
    moved = torch.cat([p.detach().reshape(-1) for p in start.parameters()])
    assert (weights(one) - moved).abs().max() > 1e-4


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_resumed_run_is_as_if_never_stopped(algorithm: str, tmp_path: Path) -> None:
    """Episodes of 4 steps end in the middle of rollouts of 6."""
    more = {"rollout_length": 6, "num_envs": 4, **({"minibatch": 12} if algorithm == "ppo" else {})}
    schedule = "value_learning_rate" if algorithm == "trpo" else "learning_rate"
    more[schedule] = 1e-3
    train(algorithm, tmp_path / "whole", steps=144, **more)
    train(algorithm, tmp_path / "part", steps=72, **more)
    mh.resume(tmp_path / "part", steps=144)
    name = "policy.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()


def test_gradients_that_are_pushed(tmp_path: Path) -> None:
    train("a2c", tmp_path / "run", workers=3, strategy="gradient_server")
    evaluate(tmp_path / "run", 3)


@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
def test_an_exported_policy_takes_its_state_and_gives_the_next(
    algorithm: str, tmp_path: Path
) -> None:
    policy = train(algorithm, tmp_path / "run", normalize_observations=True)
    size = policy.model.state_size
    with torch.no_grad():
        policy.model.policy_out.weight.mul_(300.0)  # let the answers differ
    asked: list[Any] = []
    policy.export(tmp_path / "policy.pt")
    module = torch.jit.load(str(tmp_path / "policy.pt"))  # type: ignore[no-untyped-call]
    asked.append(lambda obs, state: [x.numpy() for x in module(*map(torch.from_numpy,
                                                                    (obs, state)))])  # fmt: skip
    there = importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnxscript")
    if there and algorithm == "ppo":  # an export takes seconds
        import onnxruntime

        policy.export(tmp_path / "policy.onnx")
        session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
        asked.append(
            lambda obs, state: session.run(
                ["action", "next_state"], {"observation": obs, "state": state}
            )
        )
    rng = np.random.default_rng(1)
    for ask in asked:
        policy.reset()
        state = np.zeros((3, size), np.float32)
        for step in range(6):
            obs = rng.random((3, 5), np.float32)
            action, state = ask(obs, state)
            assert np.array_equal(action, policy.act_batch(obs))
            if step == 2:  # a new episode in one of them
                state = np.array(state)
                state[1] = 0.0
                policy.reset([1])
    policy.reset()
    one = [policy.act(obs[0]) for _ in range(3)]
    policy.reset()
    assert one == [policy.act(obs[0]) for _ in range(3)]


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        ("ppo", {"collect": "episodes", "batch_steps": 64}, "type: --collect steps"),
        ("ppo", {"overlap": True, "workers": 3, "strategy": "gather"}, "overlap and lstm"),
        ("ppo", {"rollout_length": 32, "minibatch": 16}, "type: --minibatch 32, or"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    algorithm: str, more: dict[str, Any], said: str
) -> None:
    experiment = build(algorithm, **{**SMALL, **OPTIONS[algorithm], "steps": 512, **more})
    assert any(said in fault for fault in faults(experiment))


@pytest.mark.parametrize(
    "algorithm", [name for name, spec in SPECS.items() if spec.learns_from == "replay"]
)
def test_a_replay_has_no_memory(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="lstm"):
        build(algorithm, env="CartPole-v1", lstm=8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16, 21))
def test_ppo_recalls_what_it_saw_ten_steps_ago(seed: int, tmp_path: Path) -> None:
    """Measured: seeds 16 to 26, all at 1.0. With 100,000 steps seed 14 ended at 0.74 on one machine
    and at 1.0 on another."""
    folder = str(tmp_path / "run")
    mh.train(
        "ppo", env="manyhands/Recall-v0", lstm=64, steps=150_000, seed=seed, engine="inline",
        quiet=True, tensorboard=False, run_dir=folder,
    )  # fmt: skip
    assert evaluate(folder, 100).mean_return >= 0.95  # by chance: 0.25
