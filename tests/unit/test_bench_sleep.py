"""`manyhands bench sleep`: what it counts, what it claims, and a small one from end to end."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from manyhands import bench
from manyhands.bench import sleep as benchmark
from manyhands.errors import ConfigError


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    benchmark.add_options(parser)
    return parser.parse_args(words)


def records(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"at": at, "env_steps": steps} for at, steps in pairs]


def facts(gather: float, actor_mb: float = 40.0, copies: float = 1.2) -> dict[str, Any]:
    found = {benchmark.SLEEPERS: [{"steps_per_second": 6350.0}]}
    for name, speed in (("actor_learner", 6300.0), ("gather", gather)):
        run = {"us_per_step": 150.0, "actor_mb": actor_mb, "learner_mb": 50.0}
        found[name] = [run | {"steps_per_second": speed}]
    return {
        "settings": {"workers": 64, "sleep": 0.01, "seconds": 10.0, "rounds": 1, "limit": 6400.0},
        "runs": benchmark.rows(found, 6400.0),
        "weights": [
            {"workers": 4, "pull_us": 24.0, "memcpy_us": 20.0, "copies": 1.2},
            {"workers": 64, "pull_us": 72.0, "memcpy_us": 60.0, "copies": copies},
        ],
    }


def test_steps_are_counted_between_two_moments() -> None:
    found = records((10.0, 100.0), (20.0, 1100.0), (30.0, 1300.0))
    assert benchmark.steps_between(found, 15.0, 25.0) == 500.0 + 100.0


def test_steps_after_the_last_record_go_on_as_before_it() -> None:
    """A run that is ended has played steps that no update has counted."""
    found = records((10.0, 0.0), (20.0, 1000.0))
    assert benchmark.steps_between(found, 10.0, 22.0) == pytest.approx(1200.0)


def test_without_an_update_in_that_time_there_is_nothing_to_say() -> None:
    with pytest.raises(ConfigError, match="more --seconds"):
        benchmark.steps_between(records((10.0, 100.0)), 11.0, 12.0)


@pytest.mark.parametrize(
    ("what", "fails"),
    [
        ({"gather": 6300.0}, ""),
        ({"gather": 6100.0}, "gather, 64 workers"),
        ({"gather": 6300.0, "actor_mb": 61.0}, "own memory"),
        ({"gather": 6300.0, "copies": 1.6}, "1 MB of weights"),
    ],
)
def test_each_claim_can_fail(what: dict[str, float], fails: str) -> None:
    failed = [claim.words for claim in benchmark.claims(facts(**what)) if not claim.holds]
    assert [words[: len(fails)] for words in failed[:1]] == ([fails] if fails else [])


def test_what_is_at_most_is_said_so() -> None:
    judged = {"claims": [c.facts for c in benchmark.claims(facts(6300.0))], "not_judged": []}
    machine = {"cores": 2, "cpu": "a CPU", "load": 0.0}
    text = "\n".join(benchmark.table(facts(6300.0) | judged | {"machine": machine}))
    assert "HOLDS  own memory of an actor, MB: 40.00 (claimed: at most 60)" in text
    assert "share of the limit: 0.98 (claimed: at least 0.97)" in text


def test_is_found_and_refuses_nothing_to_measure() -> None:
    assert "sleep" in bench.names()
    with pytest.raises(ConfigError, match="--sleep 0"):
        benchmark.measure(options("--sleep", "0"))


@pytest.mark.usefixtures("nothing_left")
def test_a_small_one_measures_rate_memory_and_weights() -> None:
    words = ("--workers", "2", "--sleep", "0.002", "--seconds", "2", "--rounds", "1")
    found = benchmark.measure(options(*words))
    rows = {row["name"]: row for row in found["runs"]}
    assert set(rows) == {benchmark.SLEEPERS, *benchmark.RUNS}
    for name, row in rows.items():
        assert 0 < row["of_limit"] < 1.05, (name, row)
    for name in benchmark.RUNS:
        assert 0 < rows[name]["us_per_step"] < 1e5
        assert 5 < rows[name]["actor_mb"] < 1000
    (weights,) = found["weights"]
    assert weights["workers"] == 2
    assert 0.9 < weights["copies"] < 100
