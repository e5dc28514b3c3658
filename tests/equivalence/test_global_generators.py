"""An environment that draws from `random`, `np.random` and torch: the same seed, the same run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ALL_ENGINES
from resume_programs import check_same, left_in
from second_launch import GAMBLERS, answers_of, left_by

import manyhands as mh
from manyhands.viewing.evaluation import evaluate

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("name", list(GAMBLERS))
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_it_repeats_and_resumes_to_the_bit(engine: str, name: str) -> None:
    first, again, stopped, other = (
        left_by(engine)[f"gambler-{name}-{which}"]
        for which in ("first", "again", "stopped", "other")
    )
    check_same(first, again)
    check_same(first, stopped)
    assert first["policy"] != other["policy"]
    assert len(first["episodes"]) > 8


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_two_workers_never_draw_the_same(engine: str) -> None:
    for run in zip(*(drawn.items() for drawn in answers_of(engine, "gamblers")), strict=True):
        (name, mine), (same, theirs) = run
        assert name == same
        assert len(mine) > 1000
        assert len(set(mine)) == len(mine)
        assert not set(mine) & set(theirs)


def test_engines_and_numbers_of_workers_play_the_same_episodes(tmp_path: Path) -> None:
    """They end by chance alone, whatever was done."""
    inline, local = (left_by(engine)["gambler-ppo-gather-first"] for engine in ("inline", "local"))
    assert inline["episodes"] == local["episodes"]
    mh.train("a2c", **_small(tmp_path, "alone", workers=1))
    alone = left_in(tmp_path / "alone")["episodes"]
    assert _lengths(alone) == _lengths(local["episodes"])


@pytest.mark.parametrize(
    ("algorithm", "strategy", "options"),
    [
        ("a2c", "gradient_server", {}),
        ("impala", "actor_learner", {}),
        ("impala", "single", {"workers": 1}),
    ],
)
def test_asynchronous_ones_repeat_inline(
    algorithm: str, strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for folder, seed in (("one", 1), ("again", 1), ("other", 2)):
        values: dict[str, Any] = {"workers": 3, "strategy": strategy, "seed": seed} | options
        mh.train(algorithm, **_small(tmp_path, folder, **values))
    one, again, other = (left_in(tmp_path / folder) for folder in ("one", "again", "other"))
    check_same(one, again)
    assert one["policy"] != other["policy"]


def test_an_evaluation_repeats_however_many_play_side_by_side(tmp_path: Path) -> None:
    mh.train("a2c", **_small(tmp_path, "run", steps=96))
    np.random.seed(5)
    state = np.random.get_state()[1].tolist()
    plays = [
        evaluate(tmp_path / "run", 30, num_envs=n, seed=s) for n, s in ((8, 1), (3, 1), (8, 2))
    ]
    assert plays[0].lengths == plays[1].lengths
    assert plays[0].returns[0] == plays[1].returns[0]
    assert plays[0].lengths != plays[2].lengths
    assert np.random.get_state()[1].tolist() == state


def test_inline_gives_the_user_his_generators_back(tmp_path: Path) -> None:
    def draws() -> tuple[float, ...]:
        return (np.random.normal(), np.random.normal(), random.random(), float(torch.rand(())))

    np.random.seed(1)
    np.random.normal()  # one of a pair: the other is in waiting
    random.seed(1)
    torch.manual_seed(1)
    expected = draws()
    for workers in (1, 2):
        np.random.seed(1)
        np.random.normal()
        random.seed(1)
        torch.manual_seed(1)
        mh.train("a2c", **_small(tmp_path, f"of {workers}", workers=workers))
        assert draws() == expected


def _small(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "env": "resume_programs:gambler", "num_envs": 6, "rollout_length": 16, "steps": 768,
        "hidden": (16, 16), "quiet": True, "tensorboard": False, "engine": "inline",
        "run_dir": str(folder / name),
    } | more  # fmt: skip


def _lengths(episodes: list[dict[str, str]]) -> dict[str, list[str]]:
    """By environment, in order."""
    return {env: [e["length"] for e in episodes if e["env"] == env] for env in "012345"}
