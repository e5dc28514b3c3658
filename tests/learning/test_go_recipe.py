"""TRPO learns Go on a Ray cluster of two nodes, and then plays against random moves."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from manyhands import load
from manyhands.config import load_recipe
from manyhands.envs.go import COLORS, Go9x9
from manyhands.run import train_experiment


def games_won(policy: Any, games: int, seed: int) -> int:
    """Each colour in turn."""
    won = 0
    for number in range(games):
        env = Go9x9(color=COLORS[number % 2])
        obs, _ = env.reset(seed=seed + number)
        over, reward = False, 0.0
        while not over:
            obs, reward, over, _, _ = env.step(int(policy.act(obs)))
        won += reward > 0
    return won


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [1, 2])
def test_trpo_on_a_cluster_of_two_nodes_beats_random_play(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        signal.signal(signal.SIGTERM, before)  # Ray takes it for itself
        experiment = load_recipe("trpo-go9x9")
        run = dataclasses.replace(
            experiment.run,
            seed=seed,
            address=str(cluster.address),
            quiet=True,
            tensorboard=False,
            run_dir=str(tmp_path / "run"),
        )
        train_experiment(dataclasses.replace(experiment, run=run))
    finally:
        cluster.shutdown()
    assert games_won(load(tmp_path / "run"), 100, seed=10_000) >= 90
