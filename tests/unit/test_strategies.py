"""A strategy is one row and one program: everything else reads the row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands import support
from manyhands.cli.train import teach
from manyhands.config import RunConfig, build, help_of, validate
from manyhands.roles import Roles
from manyhands.strategies.experience import rollout_collector
from manyhands.strategies.progress import EveryWorker, RunProgress
from manyhands.strategies.registry import OK, SPECS, StrategySpec, default_of


def averaged(context: Any, progress: RunProgress) -> None:
    """Every worker learns from its own rows alone; after an update all take the mean."""
    collector = rollout_collector(context)
    algorithm = context.algorithm
    progress.begin(EveryWorker(context, collector))
    context.share_weights()
    while progress.goes_on():
        rollout = collector.collect()
        info = algorithm.update(
            algorithm.prepare(rollout), mh.algorithms.base.Alone(), progress.fraction
        )
        algorithm.flat.data.copy_(context.group.mean(algorithm.flat.data))
        progress.close_update(info, rollout)


def too_many(experiment: Any) -> Iterator[str]:
    if experiment.run.workers > 4:
        yield f"averaged has 4 workers at most, and {experiment.run.workers} were asked for"


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> StrategySpec:
    made = StrategySpec(
        name="averaged",
        about="every worker learns alone, weights are averaged",
        program=f"{__name__}:averaged",
        refuses={"unroll": "wants a learner", "replay": "wants a replay"},
        options=("learners",),
        faults=too_many,
    )
    monkeypatch.setitem(SPECS, made.name, made)
    return made


def test_one_row_is_enough_to_train(row: StrategySpec, tmp_path: Path) -> None:
    result = mh.train(
        "ppo", env="CartPole-v1", strategy="averaged", workers=2, engine="inline", steps=1024,
        rollout_length=64, minibatch=128, quiet=True, tensorboard=False,
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["strategy"], summary["updates"], summary["workers"]) == ("averaged", 2, 2)
    assert mh.load(result.run_dir).model is not None


def test_one_row_is_read_by_all_that_ask(row: StrategySpec) -> None:
    assert f"averaged         {row.about}\n" in teach()
    told = help_of(RunConfig)
    assert "averaged" in told["strategy"]
    assert told["learners"].startswith("With strategy=apex, actor_learner or averaged:")
    assert support.cells_of(build("ppo", env="X").spec)["averaged"] == OK
    assert support.why_not("impala", "averaged", "local") == (
        "impala with averaged: impala wants a learner"
    )
    assert support.why_not("ppo", "averaged", "mpi") == ""
    asked = build("ppo", env="CartPole-v1", strategy="averaged", workers=8, learners=2)
    assert asked.run.roles.counts == {"worker": 8}
    assert validate.faults(asked) == ["averaged has 4 workers at most, and 8 were asked for"]
    for wrong in ("averagd", "Averaged"):
        (fault,) = validate.faults(build("ppo", env="CartPole-v1", strategy=wrong))
        assert "did you mean averaged" in fault


def test_every_kind_of_algorithm_has_a_default_and_a_strategy_for_one() -> None:
    for kind in ("rollout", "unroll", "replay"):
        assert SPECS[default_of(kind, workers=1)].one_worker
        assert kind not in SPECS[default_of(kind)].refuses


@pytest.mark.parametrize("strategy", SPECS.values(), ids=lambda s: s.name)
def test_every_row_names_what_is_there(strategy: StrategySpec) -> None:
    assert callable(strategy.load())
    run = RunConfig(env="X", strategy=strategy.name, workers=6, rollout_length=4, num_envs=60)
    for option in strategy.options:
        assert hasattr(run, option)
    assert set(strategy.engine_parts) <= set(support.PARTS)
    roles = strategy.roles(run)
    assert isinstance(roles, Roles)
    assert roles.size == run.workers
    assert strategy.restarts == "" or roles.ranks(strategy.restarts)
    if strategy.synchronous and strategy.restarts:  # all wait for it, unless they are asked not to
        asked = replace(run, on_worker_failure="restart")
        assert not run.elastic
        assert asked.elastic
        assert asked.actors == run.actors - 1  # what an environment does cannot hurt the learner
    assert strategy.batch(run) >= 1


@pytest.mark.parametrize(
    ("algorithm", "options", "actors", "batch"),
    [
        ("ppo", {"workers": 4}, 4, 24 * 10),
        ("ppo", {"workers": 4, "strategy": "gather"}, 4, 24 * 10),
        ("ppo", {"workers": 4, "strategy": "gather", "overlap": True}, 3, 24 * 10),
        ("a2c", {"workers": 4, "strategy": "gradient_server", "pushes": 2}, 3, 2 * 8 * 10),
        ("a2c", {"workers": 6, "strategy": "gradient_server", "pushes": 2, "reducers": 2}, 3,
         2 * 8 * 10),
        ("impala", {"workers": 4}, 3, 3 * 8 * 10),
        ("impala", {"workers": 5, "learners": 2, "unrolls": 4}, 3, 4 * 8 * 10),
        ("impala", {"workers": 1}, 1, 24 * 10),
        ("dqn", {"workers": 4}, 3, 24 * 10),
        ("ppo", {"workers": 4, "collect": "episodes", "batch_steps": 500}, 4, 500),
    ],
)  # fmt: skip
def test_batch_arithmetic(algorithm: str, options: dict[str, Any], actors: int, batch: int) -> None:
    """docs/concepts/batch-arithmetic.md has the formulas."""
    run = build(algorithm, env="CartPole-v1", num_envs=24, rollout_length=10, **options).run
    assert (run.actors, run.batch) == (actors, batch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlap": True, "strategy": "allreduce"}, "overlap is for strategies single and gather, "
         "and this is allreduce; type: --strategy single or gather, or leave --overlap out"),
        ({"overlap": True}, "overlap on one worker is for ppo and a2c on ALE's images with a GPU "
         "(--device cuda), without lstm, kl_penalty and a critic of its own; type: --strategy "
         "gather, or leave --overlap out"),
        ({"overlap": True, "strategy": "gather"}, "overlap needs one worker that learns and others "
         "that act, and has 1; type: --workers 2, or more"),
        ({"learners": 2}, "learners=2 is for strategies apex and actor_learner, and this is "
         "single; leave --learners out"),
        ({"pushes": 4}, "pushes=4 is for strategy gradient_server, and this is single; leave "
         "--pushes out"),
        ({"wait_for": 0.5}, "wait_for=0.5 is for strategy gather, and this is single; type: "
         "--strategy gather, or leave --wait-for out"),
    ],
)  # fmt: skip
def test_options_of_another_strategy_are_refused(options: dict[str, Any], said: str) -> None:
    assert validate.faults(build("ppo", env="CartPole-v1", **options)) == [said]
