"""A learning rate and passes of the critic's own, for PPO and A2C.

The reference is torch: two optimisers, the policy's passes with its loss alone, then the critic's
with the squared error alone, on the minibatches that the algorithm draws.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from safetensors.numpy import load_file

import manyhands as mh
from manyhands.algorithms.base import Alone
from manyhands.algorithms.registry import SPECS
from manyhands.errors import ConfigError
from manyhands.networks.build import build_actor_critic

ROWS = 24
SPACE, ACTIONS = Box(-2.0, 2.0, (3,), np.float32), Discrete(3)


def make(name: str, shared: bool = False, **options: Any) -> Any:
    model = build_actor_critic(SPACE, ACTIONS, hidden=(8,), shared=shared, seed=2)
    return SPECS[name].load()(model, SPECS[name].options(**options), seed=1)


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {
        "obs": rng.standard_normal((ROWS, 3)).astype(np.float32),
        "action": rng.integers(0, 3, ROWS),
        "logp": np.full(ROWS, -np.log(3), np.float32),
        "parameters": np.zeros((ROWS, 3), np.float32),
        "value": rng.standard_normal(ROWS).astype(np.float32),
        "advantage": rng.standard_normal(ROWS).astype(np.float32),
        "target": rng.standard_normal(ROWS).astype(np.float32),
    }


def passes(rng: Any, epochs: int, size: int) -> Any:
    for _ in range(epochs):
        order = np.arange(ROWS) if size >= ROWS else rng.permutation(ROWS)
        for at in range(0, ROWS, size):
            yield order[at : at + size]


def reference(name: str, algorithm: Any, rows: dict[str, Any]) -> torch.nn.Module:
    """One update, in plain torch."""
    o, model = algorithm.options, copy.deepcopy(algorithm.model)
    rng = copy.deepcopy(algorithm.rng)
    given = {key: torch.from_numpy(column) for key, column in rows.items()}
    advantage = given["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    epochs, size = (o.epochs, o.minibatch) if name == "ppo" else (1, ROWS)
    rate = float(o.learning_rate)
    policy = torch.optim.Adam(model.policy_parameters(), rate, eps=o.adam_epsilon)
    for some in passes(rng, epochs, size):
        logits = torch.log_softmax(model.policy(given["obs"][some]), dim=1)
        logp = logits[torch.arange(len(some)), given["action"][some]]
        gain = advantage[some]
        if name == "ppo":
            ratio = (logp - given["logp"][some]).exp()
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - o.clip, 1 + o.clip) * gain)
        else:
            loss = -logp * gain
        entropy = -(logits.exp() * logits).sum(dim=1)
        policy.zero_grad()
        (loss - o.entropy_weight * entropy).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.policy_parameters(), o.max_grad_norm)
        policy.step()
    rate = float(o.critic_learning_rate) or rate
    critic = torch.optim.Adam(model.value_parameters(), rate, eps=o.adam_epsilon)
    for some in passes(rng, o.critic_epochs or epochs, size):
        critic.zero_grad()
        ((model.value(given["obs"][some]) - given["target"][some]) ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.value_parameters(), o.max_grad_norm)
        critic.step()
    return model


@pytest.mark.parametrize("path", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["ppo", "a2c"])
@pytest.mark.parametrize(
    "own",
    [
        {"critic_learning_rate": 3e-2},
        {"critic_epochs": 5},
        {"critic_learning_rate": 3e-2, "critic_epochs": 4},
    ],
    ids=lambda own: "+".join(own),
)
def test_an_update_is_that_of_two_optimisers(name: str, own: dict[str, Any], path: str) -> None:
    more = {"epochs": 2, "minibatch": 10} if name == "ppo" else {}
    algorithm = make(name, learning_rate=1e-2, entropy_weight=0.01, **more, **own)
    if path == "torch":
        algorithm.fast = algorithm.critic.fast = None
    expected = dict(reference(name, algorithm, batch()).named_parameters())
    info = algorithm.update(batch(), Alone(), 0.0)
    for key, parameter in algorithm.model.named_parameters():
        torch.testing.assert_close(parameter, expected[key], rtol=2e-4, atol=2e-6, msg=key)
    assert info["critic_learning_rate"] == pytest.approx(own.get("critic_learning_rate", 1e-2))


def test_the_schedule_is_the_critics_own() -> None:
    algorithm = make("ppo", learning_rate="linear:1e-3", critic_learning_rate="linear:4e-3:2e-3")
    info = algorithm.update(batch(), Alone(), 0.5)
    assert info["learning_rate"] == pytest.approx(5e-4)
    assert info["critic_learning_rate"] == pytest.approx(3e-3)


def test_what_serves_both_cannot_learn_apart() -> None:
    with pytest.raises(ConfigError, match="need a value network of its own"):
        make("ppo", shared=True, critic_epochs=3)


def test_a_gradient_server_has_one_gradient(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one gradient for policy and critic"):
        mh.train(
            "a2c", env="CartPole-v1", strategy="gradient_server", workers=3, engine="inline",
            critic_epochs=2, run_dir=str(tmp_path / "run"),
        )  # fmt: skip


@pytest.mark.parametrize("strategy", ["allreduce", "gather"])
def test_two_workers_and_a_resumed_run_learn_what_one_learns(strategy: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "env": "CartPole-v1", "engine": "inline", "num_envs": 4, "rollout_length": 16,
        "hidden": (16,), "minibatch": 32, "epochs": 2, "critic_epochs": 3,
        "critic_learning_rate": 2e-3, "learning_rate": 1e-3, "tensorboard": False, "quiet": True,
    }  # fmt: skip
    one = mh.train("ppo", steps=256, run_dir=str(tmp_path / "one"), **common)
    run = tmp_path / "two"
    mh.train("ppo", steps=128, run_dir=str(run), workers=2, strategy=strategy, **common)
    mh.resume(str(run), steps=256)
    found, expected = (load_file(Path(r) / "policy.safetensors") for r in (run, one))
    for key, weights in expected.items():
        np.testing.assert_allclose(found[key], weights, rtol=1e-4, atol=1e-5, err_msg=key)
