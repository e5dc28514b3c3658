"""A policy of CartPole on a pole half as long again: in half the steps of a fresh start, or fewer.

The length was chosen on seeds 11, 21, 24 and 25; those below had not been tried. `make test-slow`.
On a pole of twice the length three seeds of four needed more than half (docs/how-to/fine-tune.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import manyhands as mh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUIET: dict[str, Any] = {"engine": "inline", "quiet": True, "tensorboard": False}
LONG: dict[str, Any] = QUIET | {
    "env": "hook_programs:long_pole", "env_kwargs": {"length": 0.75}, "steps": 100_000,
    "hooks": "hook_programs:UntilGood", "eval_every": 2_048, "eval_episodes": 20,
}  # fmt: skip


@pytest.mark.parametrize("seed", [31, 32, 33, 34, 35])
def test_half_the_steps_of_a_fresh_start(seed: int, tmp_path: Path) -> None:
    short = mh.train(
        "ppo", env="CartPole-v1", steps=60_000, entropy_weight=0.01, seed=seed,
        run_dir=str(tmp_path / "short"), **QUIET,
    )  # fmt: skip
    fresh = mh.train("ppo", seed=100 + seed, run_dir=str(tmp_path / "fresh"), **LONG)
    tuned = mh.train(
        "ppo", seed=100 + seed, start_from=str(short.run_dir), run_dir=str(tmp_path / "tuned"),
        **LONG,
    )  # fmt: skip
    steps = [run.summary["env_steps"] for run in (tuned, fresh)]
    print(f"seed {seed}: {steps[0]:,} steps, fresh {steps[1]:,}")
    assert tuned.summary["exit"] == "stopped by hooks: 475 is reached"
    assert steps[0] <= steps[1] / 2, steps
