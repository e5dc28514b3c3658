"""`manyhands bench devices`: seconds of an update by phase, and what it says where GPUs are few."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from manyhands import bench
from manyhands.bench import devices as benchmark
from manyhands.errors import ConfigError


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    benchmark.add_options(parser)
    return parser.parse_args(words)


def measured(experiments: list[Any]) -> dict[str, Any]:
    """A run of 4 updates that are counted, twice as fast with two workers."""
    seconds = 8.0 / experiments[0].run.workers
    phases = dict.fromkeys(benchmark.PHASES, 0.0) | {"rollout": seconds / 4}
    return {"steps_per_second": 8000 / seconds, "seconds": seconds, "phases": phases}


@pytest.mark.parametrize(("gpus", "missing"), [(0, 2), (1, 1), (2, 0)])
def test_a_row_for_each_that_there_are_gpus_for(
    monkeypatch: pytest.MonkeyPatch, gpus: int, missing: int
) -> None:
    monkeypatch.setenv("MANYHANDS_SIMULATED_GPUS", str(gpus))
    monkeypatch.setattr(benchmark, "measured", measured)
    facts = benchmark.measure(options("--updates", "5", "--rounds", "2"))
    assert [run["name"] for run in facts["runs"]] == list(benchmark.ROWS)[: 4 - missing]
    assert len(facts["missing"]) == missing
    one, two = facts["runs"][:2]
    assert (one["update"], one["rollout"], two["update"]) == (2.0, 0.5, 1.0)
    text = "\n".join(benchmark.table(facts))
    assert "CPU, 1 worker" in text
    assert ("not measured" in text) == bool(missing)


@pytest.mark.usefixtures("nothing_left")
def test_its_experiments_train() -> None:
    run = benchmark.measured([benchmark._experiment("cpu", 1, 2, "8")])
    assert run["steps_per_second"] > 0
    assert run["phases"]["rollout"] > 0
    assert run["phases"]["optimisation"] > 0


def test_is_found_and_refuses_what_it_cannot_read() -> None:
    assert "devices" in bench.names()
    with pytest.raises(ConfigError, match="--updates 1"):
        benchmark.measure(options("--updates", "1"))
    with pytest.raises(ConfigError, match="--hidden wide"):
        benchmark.measure(options("--hidden", "wide"))
