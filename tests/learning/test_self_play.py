"""Connect four against its own past, and then against moves drawn at random."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands import load
from manyhands.config import load_toml
from manyhands.run import train_experiment

RECIPE = Path(__file__).parents[2] / "recipes" / "ppo-connect-four.toml"


def games_won(policy: Any, games: int, seed: int) -> int:
    """Each side in turn; a draw is not won."""
    from pettingzoo.classic import connect_four_v3

    env, rng, won = connect_four_v3.env(), np.random.default_rng(seed), 0
    for number in range(games):
        env.reset()
        mine = env.possible_agents[number % 2]
        for agent in env.agent_iter():
            observation, reward, terminated, truncated, _ = env.last()
            if terminated or truncated:
                won += agent == mine and reward > 0
                env.step(None)
            elif agent == mine:
                env.step(int(policy.act(observation)))
            else:
                env.step(int(rng.choice(np.flatnonzero(observation["action_mask"]))))
    return won


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_connect_four_beats_random_play(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    experiment = load_toml(RECIPE)
    run = dataclasses.replace(
        experiment.run, seed=seed, quiet=True, tensorboard=False, run_dir=str(tmp_path / "run")
    )
    train_experiment(dataclasses.replace(experiment, run=run))
    assert games_won(load(tmp_path / "run"), 100, seed=7) >= 95
