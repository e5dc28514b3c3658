"""`manyhands bench pixels`: what it counts, what it claims, and what it does without the peer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from manyhands import bench
from manyhands.bench import pixels as benchmark
from manyhands.errors import ConfigError

OWN, BOTH, *_ = benchmark.OURS


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    benchmark.add_options(parser)
    return parser.parse_args(words)


def test_ratios_are_of_runs_of_one_round() -> None:
    speeds = {
        benchmark.LIMIT: [1000.0, 100.0, 500.0],
        OWN: [500.0, 50.0, 100.0],
        benchmark.PEER: [250.0, 10.0, 50.0],
    }
    row = next(r for r in benchmark.rows(speeds) if r["name"] == OWN)
    assert (row["median"], row["of_limit"], row["times_peer"]) == (100.0, 0.5, 2.0)


@pytest.mark.parametrize(("fastest", "holds"), [(260.0, True), (240.0, False)])
def test_the_better_of_our_ppo_runs_is_held_against_the_peer(fastest: float, holds: bool) -> None:
    found = benchmark.rows({OWN: [150.0], BOTH: [fastest], benchmark.PEER: [100.0]})
    (claim,) = benchmark.claims(found)
    assert claim.holds is holds


def test_runs_on_a_gpu_are_held_against_the_emulator_alone() -> None:
    impala, ppo, *_ = benchmark.ON_GPU
    found = benchmark.rows({benchmark.LIMIT: [1000.0], OWN: [20.0], impala: [900.0], ppo: [600.0]})
    assert [claim.holds for claim in benchmark.claims(found)] == [True, False]


def test_without_the_peer_nothing_is_claimed_and_the_table_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "others_now", lambda: 0.0)
    monkeypatch.setattr(benchmark, "_emulated", lambda seed: 1000.0)
    monkeypatch.setattr(benchmark, "_contestant", lambda *what: lambda seed: 200.0)
    facts: dict[str, Any] = benchmark.measure(options("--no-peer", "--repeats", "2"))
    assert facts["claims"] == []
    text = "\n".join(benchmark.table(facts))
    assert "not measured: not asked for" in text
    assert "20%" in text
    assert "round 2" in capsys.readouterr().out


def test_is_found_and_refuses_nothing_to_measure() -> None:
    assert "pixels" in bench.names()
    with pytest.raises(ConfigError, match="at least 1"):
        benchmark.measure(options("--repeats", "0"))
