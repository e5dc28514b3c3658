"""A run that starts from another takes over what fits, and says what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.cli.main import main
from manyhands.errors import ConfigError
from manyhands.policy import arrays_of

SMALL: dict[str, Any] = {
    "env": "CartPole-v1", "engine": "inline", "num_envs": 4, "hidden": (8,), "rollout_length": 32,
    "steps": 256, "seed": 3, "quiet": True, "tensorboard": False,
}  # fmt: skip
PPO = {"epochs": 1, "minibatch": 0, "normalize_observations": True}
# Updates that change next to nothing, so that the weights at the end show those at the start.
STILL = {"learning_rate": 1e-12, "seed": 4}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO with normalised observations, evaluated."""
    path = tmp_path_factory.mktemp("earlier") / "run"
    mh.train("ppo", run_dir=str(path), eval_every=100, eval_episodes=2, **SMALL, **PPO)
    return path


def arrays(run_dir: Path) -> dict[str, Any]:
    return arrays_of(run_dir / "policy.safetensors")


def event(run_dir: Path) -> dict[str, Any]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    (found,) = [e for e in map(json.loads, lines) if e["event"] == "start_from"]
    return dict(found)


def weights_agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = [name for name in one if name.startswith("model/")]
    return all(np.allclose(one[name], other[name], atol=1e-4) for name in names)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("ppo", {"workers": 2, **PPO, **STILL}),
        ("ppo", {"workers": 2, "strategy": "gather", **PPO, **STILL}),
        ("a2c", {"workers": 3, "strategy": "gradient_server", **STILL}),
        ("impala", {"workers": 4, "learners": 2, "unrolls": 2, **STILL}),
        ("trpo", {"max_kl": 1e-12, "value_learning_rate": 1e-12, "seed": 4}),
    ],
    ids=["allreduce", "gather", "gradient_server", "actor_learner", "trpo"],
)
def test_weights_are_taken_over(
    algorithm: str, more: dict[str, Any], earlier: Path, tmp_path: Path
) -> None:
    settings = SMALL | {"normalize_observations": True} | more
    result = mh.train(algorithm, start_from=str(earlier), run_dir=str(tmp_path / "a"), **settings)
    assert weights_agree(arrays(earlier), arrays(result.run_dir))
    said = event(result.run_dir)
    assert said["left"] == []
    assert "statistics of observations" in said["taken"]
    counts = [arrays(path)["normaliser/obs/count"] for path in (earlier, result.run_dir)]
    assert counts[1] >= counts[0] + 256


def test_q_networks_and_the_best_policy(earlier: Path, tmp_path: Path) -> None:
    settings = SMALL | {"learning_starts": 32, "batch_size": 8}
    first = mh.train("dqn", run_dir=str(tmp_path / "a"), eval_every=64, **settings)
    second = mh.train(
        "dqn", start_from=str(first.run_dir / "best"), run_dir=str(tmp_path / "b"),
        **settings | {"learning_rate": 1e-12, "workers": 2},
    )  # fmt: skip
    best = arrays_of(first.run_dir / "best/policy.safetensors")
    assert weights_agree(best, arrays(second.run_dir))
    with pytest.raises(ConfigError, match="no layer fits this network") as caught:
        mh.train(
            "ppo",
            start_from=str(earlier),
            run_dir=str(tmp_path / "c"),
            **SMALL | PPO | {"hidden": (9,)},
        )
    assert "is [8, 4] there and [9, 4] here" in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_what_does_not_fit_is_listed_and_begins_anew(
    earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SMALL | PPO | STILL | {"env": "Acrobot-v1", "hidden": (8,), "quiet": False}
    result = mh.train("ppo", start_from=str(earlier), run_dir=str(tmp_path / "a"), **settings)
    said = event(result.run_dir)
    assert said["run"] == str(earlier)
    assert any("[8, 4] there and [8, 6] here" in text for text in said["left"])
    assert any(text.startswith("statistics of observations are [4] there") for text in said["left"])
    assert "statistics of returns" in said["taken"]
    assert any(name.endswith("bias") for name in said["taken"])
    assert f"start from {earlier}: {len(said['taken'])} of " in capsys.readouterr().out


def test_a_resumed_run_does_not_start_again(earlier: Path, tmp_path: Path) -> None:
    """Nor does it need the folder that it once started from."""
    gone = tmp_path / "gone"
    gone.mkdir()
    for name in ("config.toml", "policy.safetensors"):
        (gone / name).write_bytes((earlier / name).read_bytes())
    settings = SMALL | PPO
    whole = mh.train("ppo", start_from=str(gone), run_dir=str(tmp_path / "a"), **settings)
    for name in ("config.toml", "policy.safetensors"):
        (gone / name).unlink()
    longer = mh.resume(whole.run_dir, steps=384)
    assert longer.summary["env_steps"] == 384
    assert event(longer.run_dir)["left"] == []


def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "ppo", "--env", "CartPole-v1", "--run-dir", str(tmp_path / "run")]
    assert main([*words, "--engine", "inline", "--start-from", str(tmp_path / "nobody")]) == 2
    assert "nobody holds no config.toml" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
