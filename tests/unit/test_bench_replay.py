"""`manyhands bench replay`: what it claims, and what it does without peers."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from manyhands import bench
from manyhands.bench import _replay_programs as replay_buffers
from manyhands.bench import replay as benchmark
from manyhands.errors import ConfigError, SupportError, WorkerError


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    benchmark.add_options(parser)
    return parser.parse_args(words)


def test_it_is_found() -> None:
    assert "replay" in bench.names()
    assert "cpprb" in bench.summary("replay")


@pytest.mark.parametrize(("theirs", "holds"), [([9.0, 4.0, 9.0], True), ([11.0, 4.0, 11.0], False)])
def test_rounds_are_compared_one_by_one(theirs: list[float], holds: bool) -> None:
    """In the second round the machine was slow for both."""
    rounds = {"4 floats": {"manyhands": {"add 1": [10.0, 5.0, 10.0]}, "sb3": {"add 1": theirs}}}
    (claim,) = benchmark.claims(rounds)
    assert (claim.words, claim.holds) == ("add 1, 4 floats: times sb3", holds)


def test_the_nearest_peer_and_our_better_way_count_but_not_another_installation() -> None:
    found = {
        "manyhands": {"add 1": [10.0]},
        "manyhands, numpy only": {"add 1": [99.0]},
        "manyhands, frames once": {"add 1": [20.0]},
        "slow": {"add 1": [4.0]},
        "near": {"add 1": [16.0]},
        "other": {"uniform 32": [16.0]},
    }
    (claim,) = benchmark.claims({"pictures": found})
    assert (claim.words, claim.measured) == ("add 1, pictures: times near", 1.25)


def test_contention_is_what_is_lost_of_the_papers_rates() -> None:
    adding, drawing, both, *others = benchmark.SETTINGS
    found: dict[str, Any] = {
        adding: {"adds": 12_500.0},
        drawing: {"samples": 9_700.0},
        both: {"adds": 12_500.0, "samples": 8_000.0},
        **{name: {"adds": 1.0, "samples": 1.0} for name in others},
    }
    assert [claim.holds for claim in benchmark.apex_claims(found)] == [True, False, True, False]
    assert benchmark.apex_claims({}) == []


class Thousand:
    """A library that always does a thousand rows a second."""

    def __init__(self, *_: object) -> None:
        self.tasks = set(benchmark.TASKS)

    def start(self) -> dict[str, Any]:
        return {"version": "1", "missing": {}}

    def rate(self, task: str) -> float:
        return 1000.4

    def __enter__(self) -> Thousand:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_library_does_what_it_is_told_and_leaves() -> None:
    with benchmark.Buffers(sys.executable, "manyhands", "4 floats", 0.01) as buffers:
        said = buffers.start()
        assert buffers.tasks == set(benchmark.TASKS)
        assert said["version"].startswith("0.")
        assert buffers.rate("add 64") > buffers.rate("add 1") > 0.0
    assert buffers._process.returncode is not None


def test_a_library_that_is_not_there_says_why() -> None:
    with (
        benchmark.Buffers(sys.executable, "cpprb", "4 floats", 0.01) as buffers,
        pytest.raises(WorkerError, match=r"cpprb.*No module named 'cpprb'"),
    ):
        buffers.start()


def test_without_peers_it_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise SupportError("no network")

    monkeypatch.setattr(benchmark.peers(), "python_with", missing)
    monkeypatch.setattr(benchmark, "Buffers", Thousand)
    facts = benchmark.measure(options("--repeats", "2", "--no-apex"))
    assert "going on without torchrl: no network" in capsys.readouterr().out
    assert facts["claims"] == []
    assert facts["rounds"]["4 floats"]["manyhands"]["add 1"] == [1000, 1000]
    assert "manyhands, frames once" not in facts["rounds"]["4 floats"]
    json.dumps(facts)
    assert "not measured: torchrl: no network" in benchmark.table(facts)


def test_our_own_tasks_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: (shape, kind, 600) for name, (shape, kind, _) in replay_buffers.CASES.items()}
    monkeypatch.setattr(replay_buffers, "CASES", small)
    for library, case in (("manyhands", "17 floats"), ("manyhands, frames once", "4x84x84 bytes")):
        tasks = replay_buffers.LIBRARIES[library](case)
        assert set(tasks) == set(benchmark.TASKS)
        for rows, task in tasks.values():
            assert replay_buffers.rate(rows, task, 0.01) > 0.0


def test_the_papers_rates_at_once_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of their own processes, a learner here; how fast is not looked at."""
    monkeypatch.setattr(benchmark, "CAPACITY", 2_000)
    monkeypatch.setattr(benchmark, "FILL_SECONDS", 0.2)
    adding, _, both, *_ = benchmark.SETTINGS
    monkeypatch.setattr(
        benchmark, "SETTINGS", {name: benchmark.SETTINGS[name] for name in (adding, both)}
    )
    found = benchmark.apex(repeats=1, seconds=0.3)
    assert found[adding].keys() == {"adds"}
    assert found[both].keys() == {"adds", "samples", "median_ms", "p99_ms"}
    assert min(found[both].values()) > 0.0


@pytest.mark.parametrize("words", [("--repeats", "0"), ("--seconds", "0")])
def test_bad_options(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="at least 1 round"):
        benchmark.measure(options(*words))
