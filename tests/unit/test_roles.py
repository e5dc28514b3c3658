"""Who plays which part: from the command line to every worker."""

from __future__ import annotations

import async_programs
import pytest
from conftest import SOME_ENGINES_RAY_LATER

from manyhands import launch, roles
from manyhands.cli import launch as cli
from manyhands.config import RunConfig, build
from manyhands.errors import ConfigError


def test_ranks_are_in_the_order_given() -> None:
    given = roles.parse("actor=2, learner=3")
    assert given.size == 5
    assert given.ranks("actor") == [0, 1]
    assert given.ranks("learner") == [2, 3, 4]
    assert given.ranks("nobody") == []
    assert [tuple(given.of(r)) for r in (1, 2)] == [("actor", 1, 2), ("learner", 0, 3)]
    assert given.name(3) == "learner 1 (worker 3 of 5)"
    assert roles.parse(given.text).counts == given.counts
    with pytest.raises(ConfigError, match="worker 5 has no role"):
        given.of(5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actor", "'actor' is not of the form ROLE=NUMBER"),
        ("actor=2,", "'' is not of the form"),
        ("actor=two", "'actor=two' is not"),
        ("actor=0,learner=1", "actor=0, but a role needs at least 1"),
        ("actor=1,actor=2", "actor appears twice"),
    ],
)
def test_roles_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        roles.parse(text)


def test_roles_and_workers_must_agree(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"makes 4 workers, but -n says 3.*type: -n 4"):
        cli.launch(["--roles", "actor=2,learner=2", "-n", "3", "nothing.py"])


def test_parts_of_a_training_run() -> None:
    def run_of(algorithm: str, strategy: str, **options: int) -> RunConfig:
        return build(algorithm, env="CartPole-v1", strategy=strategy, **options).run

    assert run_of("ppo", "allreduce", workers=4).roles.counts == {"worker": 4}
    impala = run_of("impala", "actor_learner", workers=5, learners=2)
    assert impala.roles.counts == {"learner": 2, "actor": 3}
    server = run_of("a2c", "gradient_server", workers=6, reducers=2)
    assert server.roles.counts == {"server": 1, "reducer": 2, "worker": 3}
    assert (server.actors, server.roles.ranks("worker")) == (3, [3, 4, 5])
    run = build("impala", env="CartPole-v1", workers=5, learners=1, num_envs=8).run
    assert (run.strategy, run.actors, run.envs_per_worker, run.batch) == (
        "actor_learner", 4, 2, 4 * 2 * run.rollout_length,
    )  # fmt: skip


@pytest.mark.parametrize("engine", SOME_ENGINES_RAY_LATER)
def test_a_role_has_its_own_group(engine: str) -> None:
    told = launch(async_programs.in_roles, roles="actor=2,learner=2", engine=engine, timeout=60)
    assert [t[:3] for t in told] == [
        ["actor", 0, 2], ["actor", 1, 2], ["learner", 0, 2], ["learner", 1, 2],
    ]  # fmt: skip
    assert told[1][3].startswith("actor 1 (worker 1 of 4) on ")
    assert [t[4] for t in told] == [None, None, 2.5, 2.5]
    assert "actor 0 (worker 0 of 4)" in told[0][5]
    assert "actor=2,learner=2" in told[0][5]
    assert told[2][5] == ""
