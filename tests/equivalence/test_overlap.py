"""Gather with overlap: every batch is learned from exactly one update late, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from once import shared_folder
from safetensors.numpy import load_file
from second_launch import OVERLAP_UPDATES, second_launch
from second_launch import overlap_options as options
from training_programs import as_in_a_worker

from manyhands import train
from manyhands.algorithms.base import Alone, recentred
from manyhands.algorithms.registry import SPECS
from manyhands.collect.rollout import Collector
from manyhands.config import build
from manyhands.envs import make_vec
from manyhands.policy import build_model, build_normaliser
from manyhands.streams import EnvNoise

ENVS, LENGTH, UPDATES = 4, 32, OVERLAP_UPDATES


def slow_reference(name: str) -> Any:
    """Two sets of weights in one process: those that act, and those that learn."""
    experiment = build(name, **options(name))
    run = experiment.run
    envs = make_vec(run.env, ENVS, seed=run.seed)
    model = build_model(experiment, envs.observation_space, envs.action_space)
    learner = SPECS[name].load()(model, experiment.options, seed=run.seed)
    twin = build_model(experiment, envs.observation_space, envs.action_space)
    actor = SPECS[name].load()(twin, experiment.options, seed=run.seed)
    normaliser = build_normaliser(experiment, envs.observation_space)
    collector = Collector(envs, actor.actor, LENGTH, EnvNoise(run.seed, 0, ENVS), normaliser)
    waiting = None
    for k in range(UPDATES + 1):
        actor.flat.data.copy_(learner.flat.data)  # collecting starts from these...
        batch = None
        if k < UPDATES:
            rows = actor.prepare(collector.collect())
            batch = {name: np.array(column) for name, column in rows.items()}
            normaliser.synchronise(None)
        if waiting is not None:  # ... and so does learning, from what came the time before
            # Schedules look at the steps that have been counted: those of batches 0 to k - 1.
            waiting = recentred(waiting, learner.actor) if k > 1 else waiting
            learner.update(waiting, Alone(), k / UPDATES)
        waiting = batch
    return learner.flat.data.numpy()


@pytest.mark.parametrize("name", ["a2c", "ppo", "trpo"])
def test_it_is_the_serial_program_with_one_update_of_lag(name: str, tmp_path: Path) -> None:
    with as_in_a_worker():
        expected = slow_reference(name)
        second_launch("local")  # the same on two workers
        folders = [shared_folder() / "second-local" / f"overlap of {name}"]
        for workers in (2, 3):
            folders.append(tmp_path / str(workers))
            train(
                name, strategy="gather", overlap=True, workers=workers, engine="inline",
                run_dir=str(folders[-1]), **options(name),
            )  # fmt: skip
        for folder in folders:
            summary = json.loads((folder / "summary.json").read_text())
            assert summary["updates"] == UPDATES
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
            assert [row["lag"] for row in rows] == [0.0, *[1.0] * (UPDATES - 1)]
            policy = {
                k: v
                for k, v in load_file(folder / "policy.safetensors").items()
                if k[:5] == "model"
            }
            model = build_model(build(name, **options(name)), *_spaces())
            model.load_state_dict(
                {k.removeprefix("model/"): torch.as_tensor(v) for k, v in policy.items()}
            )
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
            np.testing.assert_allclose(flat, expected, rtol=1e-4, atol=1e-5)


def _spaces() -> tuple[Any, Any]:
    envs = make_vec("CartPole-v1", 1)
    return envs.observation_space, envs.action_space


def test_whole_episodes_overlap_too(tmp_path: Path) -> None:
    weights = []
    with as_in_a_worker():
        for workers in (2, 3):
            result = train(
                "trpo", env="CartPole-v1", strategy="gather", overlap=True, workers=workers,
                engine="inline", collect="episodes", batch_steps=300, num_envs=4, steps=1500,
                quiet=True, tensorboard=False, run_dir=str(tmp_path / str(workers)),
            )  # fmt: skip
            weights.append(load_file(result.run_dir / "policy.safetensors"))
    for name, one in weights[0].items():
        np.testing.assert_allclose(weights[1][name], one, rtol=1e-4, atol=1e-5, err_msg=name)
