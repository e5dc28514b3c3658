"""The sentence about the bottleneck: true words, and advice that this run could take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from manyhands.config import build
from manyhands.experiment.bottleneck import PHASES, Phases, bottleneck, stepper_of

SOURCE = Path(__file__).parents[2] / "src" / "manyhands"


def said(phases: dict[str, float], algorithm: str = "ppo", **options: Any) -> str:
    experiment = build(algorithm, **({"env": "CartPole-v1", "workers": 2} | options))
    sentence = bottleneck(phases, experiment, cores=8)
    assert "\n" not in sentence
    measured = Phases()
    for name, seconds in phases.items():
        measured.add(name, seconds)
    assert bottleneck(measured, experiment, cores=8) == sentence
    return sentence


@pytest.mark.parametrize(
    ("phases", "workers", "words"),
    [
        ({"rollout": 3, "optimisation": 1}, 2, "rollout, 75% of the time; use more workers (--wor"),
        ({"rollout": 3, "optimisation": 1}, 8, "all 8 cores are busy already"),
        ({"rollout": 1, "optimisation": 3}, 2, "--strategy allreduce"),
        ({"rollout": 1, "optimisation": 3}, 8, "; take larger minibatches (--minibatch)"),
        ({"rollout": 2, "synchronisation": 3}, 8, "synchronisation, 60% of the time; make updates"),
        ({"rollout": 1, "synchronisation": 2}, 16, "16 workers share 8 cores; fewer would wait"),
        ({"logging": 3, "optimisation": 1}, 2, "--log-every"),
        ({"checkpoint": 3, "optimisation": 1}, 2, "--checkpoint-seconds"),
        ({"mystery": 3, "optimisation": 1}, 2, "mystery, 75% of the time; it is no part"),
        ({}, 2, "unknown"),
    ],
)
def test_what_took_the_most_time(phases: dict[str, float], workers: int, words: str) -> None:
    assert words in said(phases, workers=workers, num_envs=16)


def test_a_run_that_hardly_began() -> None:
    sentence = bottleneck({"rollout": 1.0}, build("ppo", env="X"), cores=8, wall_seconds=4.0)
    assert sentence.startswith("bottleneck: everything else, 75% of the time; the run is too short")


def test_phases_of_one_kind_count_together() -> None:
    sentence = said(
        {"rollout": 2, "first priorities": 1, "optimisation": 2}, "dqn", strategy="apex"
    )
    assert sentence.startswith("bottleneck: rollout and first priorities, 60% of the time")


# -- the environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "backend", "stepper"),
    [
        ("CartPole-v1", "auto", "gymnasium"),
        ("Walker2d-v5", "gymnasium", "gymnasium"),
        ("CartPole-v1", "envpool", "envpool"),
        ("CartPole-v1", "vector", "other"),  # it steps all of them at once already
        ("Taxi-v4", "auto", "other"),
        ("own_env:Thermostat", "auto", "other"),
        ("manyhands/PendulumSwingUp-v0", "auto", "other"),
        ("NeverHeardOf-v0", "auto", "other"),
        ("ALE/Pong-v5", "auto", "ale"),
        ("ALE/Pong-v5", "envpool", "envpool"),
        ("PongNoFrameskip-v4", "auto", "ale"),
    ],
)
def test_who_steps_an_environment(env: str, backend: str, stepper: str) -> None:
    assert stepper_of(env, backend) == stepper


def test_envpool_is_offered_where_envpool_has_the_environment() -> None:
    envpool = pytest.importorskip("envpool")
    offered = [name for name in gymnasium.registry if stepper_of(name, "auto") == "gymnasium"]
    assert {"CartPole-v1", "LunarLander-v3", "Walker2d-v5", "FrozenLake-v1"} <= set(offered)
    assert sorted(set(offered) - set(envpool.list_all_envs())) == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("CartPole-v1", "or step the environments in C++ (--env-backend envpool)"),
        ("own_env:Thermostat", "or profile the environment's own step and reset"),
        ("ALE/Pong-v5", "or let more games share each call of the policy (a larger --num-envs)"),
    ],
)
def test_advice_fits_the_environment(env: str, words: str) -> None:
    sentence = said({"rollout": 1}, env=env)
    assert sentence.endswith(words)
    assert ("envpool" in sentence) == (env == "CartPole-v1")


def test_one_worker_with_a_gpu_leaves_the_cores_to_the_games() -> None:
    games = {"env": "ALE/Pong-v5", "strategy": "single", "workers": 1}
    assert "--workers" in said({"rollout": 1}, device="cpu", **games)
    assert "--workers" not in said({"rollout": 1}, device="cuda", **games)


# -- the algorithm and the strategy --------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "strategy", "has", "has_not"),
    [
        ("ppo", "gather", "--strategy allreduce", "--learners"),
        ("a2c", "allreduce", "--strategy allreduce", "--minibatch"),
        ("impala", "actor_learner", "--learners", "--strategy allreduce"),
        ("dqn", "apex", "--learners", "--minibatch"),
        ("ddpg", "single", "--updates-per-step", "--learners"),
    ],
)
def test_advice_on_learning_is_what_the_algorithm_has(
    algorithm: str, strategy: str, has: str, has_not: str
) -> None:
    workers = 1 if strategy == "single" else 2
    sentence = said({"optimisation": 1}, algorithm, strategy=strategy, workers=workers)
    assert has in sentence
    assert has_not not in sentence


def test_waits_of_asynchronous_strategies_say_who_is_too_slow() -> None:
    starved = said({"waiting for data": 2, "rollout": 1}, "impala", workers=3)
    assert "whoever learns waits for those that act: use more workers" in starved
    ahead = said({"waiting for room": 2, "rollout": 1}, "impala", workers=3)
    assert "more workers that act will not help" in ahead


def test_whole_episodes_have_no_rollout_length() -> None:
    sentence = said({"synchronisation": 1}, collect="episodes", batch_steps=4000)
    assert "--batch-steps" in sentence
    assert "--rollout-length" not in sentence


# -- names ---------------------------------------------------------------------------------------


def test_every_phase_of_the_code_is_known() -> None:
    text = "\n".join(path.read_text() for path in (SOURCE / "strategies").rglob("*.py"))
    text += (SOURCE / "run.py").read_text()
    used = set(re.findall(r'phases(?:\.add)?\("([^"]+)"', text))
    assert used == set(PHASES) - {"everything else"}
