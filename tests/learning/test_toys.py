"""It does learn: small environments whose best return is known, in seconds, from several seeds."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_programs

import manyhands
from manyhands.config import build, to_plain

pytestmark = [pytest.mark.usefixtures("nothing_left")]

# Identity has 16 steps: a random policy earns 4, 4, 1.3 and 2 of 16, and -13 where 0 is the best.
IDENTITY = {"discrete": 14.0, "shifted": 14.0, "multidiscrete": 13.0, "multibinary": 13.0}
IDENTITY |= {"box": -4.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "a2c": {"rollout_length": 16, "learning_rate": 5e-3},
    "ppo": {"rollout_length": 64, "minibatch": 128, "learning_rate": 2e-3},
    "trpo": {"rollout_length": 64, "max_kl": 0.05, "value_epochs": 3},
}
LIMIT = 16_384  # steps: three times what the slowest of these needs
SEEDS = (1, 2)


def tasks() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(algorithm, name of the task, options). In Identity each step stands alone: a low gamma."""
    for kind, target in IDENTITY.items():
        more: dict[str, Any] = {"learning_rate": 3e-3} if kind == "box" else {}
        more |= {"env": "manyhands/Identity-v0", "env_kwargs": {"kind": kind}, "gamma": 0.5}
        for algorithm in ("ppo", "a2c", "trpo") if kind == "discrete" else ("ppo",):
            yield algorithm, f"identity {kind}", {**more, "target_return": target}
    for algorithm in OPTIONS:
        # Five right turns in a row: 1 in 32 episodes of a random policy.
        more = {"env": "manyhands/Delayed-v0", "target_return": 0.9}
        yield algorithm, "delayed reward", more


TASKS = [f"{algorithm} on {name}" for algorithm, name, _ in tasks()]


@functools.cache
def summaries() -> dict[str, dict[str, Any]]:
    """All tasks and seeds, one after the other, in one worker with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for algorithm, name, more in tasks():
            for seed in SEEDS:
                common = {"workers": 1, "num_envs": 8, "steps": LIMIT, "quiet": True, "seed": seed}
                where = {"run_dir": str(Path(folder, str(len(cases)))), "engine": "inline"}
                options = OPTIONS[algorithm] | more
                experiment = build(algorithm, **common, **where, **options)
                cases[f"{algorithm} on {name}, seed {seed}"] = to_plain(experiment)
        program = training_programs.train_all
        with training_programs.as_in_a_worker():
            (told,) = manyhands.launch(program, list(cases.values()), workers=1, engine="inline")
    return dict(zip(cases, told, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", TASKS)
def test_it_is_learned(task: str, seed: int) -> None:
    summary = summaries()[f"{task}, seed {seed}"]
    assert summary["exit"] == "solved", summary
    assert summary["solved"] is True
    assert summary["env_steps"] < LIMIT


def test_several_workers_learn_too(tmp_path: Path) -> None:
    """And the policy that is left in the folder is the one that was learned."""
    (_, _, more), *_ = tasks()
    run_dir = str(tmp_path / "run")
    options = OPTIONS["ppo"] | more | {"num_envs": 8, "steps": LIMIT, "quiet": True}
    with training_programs.as_in_a_worker():
        result = manyhands.train("ppo", engine="inline", workers=2, run_dir=run_dir, **options)
    assert result.solved
    policy = manyhands.load(run_dir)
    assert [int(policy.act(np.int64(shown))) for shown in range(4)] == [0, 1, 2, 3]
