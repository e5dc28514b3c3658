"""Ape-X and the single runs beside it, on every engine that has their parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import five_workers
import numpy as np
import pytest
from conftest import ALL_ENGINES
from five_workers import SMALL_REPLAY
from gymnasium.spaces import Box, Discrete
from safetensors.numpy import load_file

import manyhands as mh
from manyhands.algorithms.base import Alone
from manyhands.algorithms.registry import SPECS
from manyhands.engines import inline
from manyhands.engines.group import OverGroup
from manyhands.errors import ConfigError
from manyhands.experiment.bottleneck import Phases
from manyhands.experiment.folder import SUMMARY
from manyhands.networks.q import build_bounded_actor, build_q_network
from manyhands.strategies.apex import learner as apex

pytestmark = [pytest.mark.usefixtures("nothing_left")]

SMALL = SMALL_REPLAY | {"workers": 3}
CASES: dict[str, dict[str, Any]] = {
    "dqn": {"algorithm": "dqn"},
    "dqn, two learners": {"algorithm": "dqn", "workers": 4, "learners": 2, "dueling": True},
    "dqn, uniform, normalised": {
        "algorithm": "dqn", "prioritized": False, "normalize_observations": True,
    },
    "dqn, dict": {
        "algorithm": "dqn", "env": "manyhands/Counter-v0",
        "env_kwargs": {"as_dict": True, "longest": 60},
    },
    "ddpg": {"algorithm": "ddpg", "env": "Pendulum-v1", "noise_kind": "ou"},
    "ddpg, two learners, scaled": {
        "algorithm": "ddpg", "env": "Pendulum-v1", "workers": 4, "learners": 2,
        "box_actions": "scale", "noise_spread": 0.3,
    },
}  # fmt: skip
CASES |= {
    f"{name}, two learners": {
        "algorithm": name, "env": "Pendulum-v1", "workers": 4, "learners": 2, "prioritized": True,
        "hidden": (16, 16),
    }
    for name, spec in SPECS.items()
    if spec.actions == "bounded" and name != "ddpg"
}  # fmt: skip
# Where one launch has them all.
FEW = {"local": ("dqn, two learners", "ddpg"), "ray": ("dqn", "dqn, two learners")}
FEW |= dict.fromkeys(("mpi", "torch"), ("dqn, two learners",))


def train(name: str, folder: Path, **more: Any) -> Any:
    options = SMALL | CASES[name] | more
    return mh.train(options.pop("algorithm"), run_dir=str(folder), **options)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def cases() -> list[Any]:
    found = []
    for engine in ALL_ENGINES:
        name = engine.values[0]  # type: ignore[attr-defined]
        for case in CASES if name == "inline" else FEW[name]:
            marks = list(engine.marks)  # type: ignore[attr-defined]
            if name != "inline" and case in five_workers.SLOW[name]:
                marks.append(pytest.mark.slow)
            found.append(pytest.param(case, name, marks=marks, id=f"{name}-{case}"))
    return found


@pytest.mark.parametrize(("case", "engine"), cases())
def test_trains_and_leaves_its_folder(case: str, engine: str, tmp_path: Path) -> None:
    if engine == "inline":
        folder = tmp_path / "run"
        summary = train(case, folder, engine=engine).summary
    else:
        folder = five_workers.folder_of(engine, case)
        summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == set(SUMMARY)
    assert summary["exit"] == "finished"
    assert summary["env_steps"] >= 1200
    assert summary["strategy"] == "apex"
    assert summary["restarts"] == summary["lost_fragments"] == 0
    assert {"rollout", "optimisation", "waiting for data"} <= set(summary["phase_seconds"])
    last = records_of(folder)[-1]
    wanted = SMALL["updates_per_step"] * SMALL["batch_size"]
    # Bounded from both sides; from below only once the rows of the warm-up have been caught up on.
    assert last["samples_per_insert"] <= wanted + 1
    assert last["replay_size"] > 200
    assert all(np.isfinite(w).all() for w in load_file(folder / "policy.safetensors").values())
    policy = mh.load(folder)
    observation = policy.observation_space.sample()
    for deterministic in (True, False):
        assert policy.action_space.contains(policy.act(observation, deterministic))
    assert np.isfinite(policy.value(observation))


@pytest.mark.parametrize("case", ["dqn", "ddpg, two learners, scaled"])
def test_inline_repeats_to_the_bit(case: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(case, tmp_path / name, engine="inline")
    one, two = (load_file(tmp_path / name / "policy.safetensors") for name in ("one", "two"))
    assert all(np.array_equal(one[k], two[k]) for k in one)
    rows = [(tmp_path / name / "episodes.csv").read_text().splitlines() for name in ("one", "two")]
    assert [r.rpartition(",")[0] for r in rows[0]] == [r.rpartition(",")[0] for r in rows[1]]


@pytest.mark.parametrize("learners", [2, 3])
@pytest.mark.parametrize("algorithm", ["dqn", "ddpg"])
def test_several_learners_are_one_with_the_whole_batch(algorithm: str, learners: int) -> None:
    """The same batches, shared out, summed and collected over a group: weights and priorities."""
    alone = learn_from_batches(algorithm, None)

    def program() -> Any:
        from manyhands.engines.attach import attach

        return learn_from_batches(algorithm, attach().group)

    together = inline.run(program, learners, 60.0)
    for weights, _ in together:
        assert np.allclose(weights, alone[0], atol=1e-6)
        assert np.array_equal(weights, together[0][0])
    assert np.allclose(together[0][1], alone[1], atol=1e-6)  # in the order of the batch


def learn_from_batches(algorithm: str, group: Any) -> tuple[Any, Any]:
    """(weights, all TD errors) after some batches that only the main learner has."""
    discrete = algorithm == "dqn"
    space = Discrete(3) if discrete else Box(-2.0, 2.0, (2,))
    build = build_q_network if discrete else build_bounded_actor
    model = build(Box(-1.0, 1.0, (4,)), space, hidden=(16, 8), seed=2)
    learner = SPECS[algorithm].load()(model, SPECS[algorithm].options(), seed=1)
    across = Alone() if group is None else OverGroup(group, Phases())
    rng, told = np.random.default_rng(3), []
    for _ in range(6):
        count = 17  # does not go evenly into two or three
        rows = {
            "obs": rng.normal(size=(count, 4)).astype(np.float32),
            "next_obs": rng.normal(size=(count, 4)).astype(np.float32),
            "action": rng.integers(0, 3, count)
            if discrete
            else rng.uniform(-2, 2, (count, 2)).astype(np.float32),
            "reward": rng.normal(size=count).astype(np.float32),
            "discount": rng.choice([0.0, 0.97], count).astype(np.float32),
            "weight": rng.random(count).astype(np.float32),
        }
        if group is not None and group.rank > 0:
            rows = {name: column[:0] for name, column in rows.items()}
        learner.update(apex.shared_out(rows, group), across, 0.0)
        told.append(apex.collected(learner.errors, group))
    return learner.flat.data.numpy().copy(), np.concatenate(told)


@pytest.mark.parametrize("algorithm", ["dqn", "ddpg"])
def test_single_repeats_to_the_bit_and_counts(algorithm: str, tmp_path: Path) -> None:
    options = SMALL | {"workers": 1, "env": "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"}
    for name in ("one", "two"):
        mh.train(algorithm, run_dir=str(tmp_path / name), engine="inline", **options)
    one, two = (load_file(tmp_path / name / "policy.safetensors") for name in ("one", "two"))
    assert all(np.array_equal(one[k], two[k]) for k in one)
    records = records_of(tmp_path / "one")
    # 4 envs × 16 steps a round; a quarter of a gradient step for each once there are 200 rows
    assert [r["env_steps"] for r in records] == [64 * (i + 1) for i in range(len(records))]
    assert records[0]["gradient_steps"] == 0
    assert records[-1]["gradient_steps"] == 16
    assert {"loss", "td_error", "q_mean", "exploration"} <= set(records[-1])


def test_a_resumed_run_without_its_replay_fills_a_new_one(tmp_path: Path) -> None:
    options = SMALL | {"workers": 1, "engine": "inline", "steps": 640}
    mh.train("dqn", run_dir=str(tmp_path / "run"), **options)
    mh.resume(tmp_path / "run", steps=1280)
    records = records_of(tmp_path / "run")
    sizes = [r["replay_size"] for r in records]
    at = next(i for i in range(1, len(sizes)) if sizes[i] < sizes[i - 1])
    assert records[at]["env_steps"] == 704
    assert records[at]["gradient_steps"] == 0
    assert records[-1]["gradient_steps"] == 16
    notes = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    assert any("--checkpoint-replay" in n.get("text", "") for n in notes)


def test_apex_goes_on_with_its_replay(tmp_path: Path) -> None:
    train("dqn", tmp_path / "run", engine="inline", checkpoint_replay=True)
    before = records_of(tmp_path / "run")[-1]
    mh.resume(tmp_path / "run", steps=2400)
    records = records_of(tmp_path / "run")
    after = records[records.index(before) + 1]
    assert after["replay_size"] >= before["replay_size"]
    assert records[-1]["env_steps"] >= 2400


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ("dqn", {"replay_size": 16}, "smaller than a batch of 32"),
        ("dqn", {"env": "Pendulum-v1"}, "manyhands train ddpg"),
        ("ddpg", {"env": "CartPole-v1"}, "manyhands train dqn"),
        ("dqn", {"n_step": 501}, "longer than an episode"),
        ("dqn", {"n_step": 0}, "at least 1"),
        ("dqn", {"prefetch": -1}, "0 or more"),
        ("dqn", {"batch_size": 0}, "at least 1"),
        ("dqn", {"learning_starts": 5000}, "learning starts with 5,000"),
        ("dqn", {"learners": 3}, "leave nobody to act"),
        ("dqn", {"updates_per_step": 0.0}, "nothing would be learned"),
        ("dqn", {"beta": "linear:0.4:2"}, "from 0 to 1"),
        ("dqn", {"strategy": "allreduce"}, "single or apex"),
        ("ddpg", {"env": "Pendulum-v1", "noise_kind": "pink"}, "normal"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    algorithm: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        mh.train(algorithm, run_dir=str(tmp_path / "run"), **(SMALL | options))
    assert not (tmp_path / "run").exists()


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    bad = {"env": "CartPole-v1", "replay_size": 16, "n_step": 501, "updates_per_step": 0.0}
    with pytest.raises(ConfigError) as error:
        mh.train("ddpg", run_dir=str(tmp_path / "run"), **(SMALL | bad))
    for said in ("smaller than a batch", "longer than an episode", "nothing would", "train dqn"):
        assert said in str(error.value)
