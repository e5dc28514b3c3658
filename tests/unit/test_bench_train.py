"""`manyhands bench train`: what it counts, what it claims, and what it does without the peer."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from manyhands import bench
from manyhands.bench import train as benchmark
from manyhands.bench._tools import output_of, peers, version
from manyhands.errors import ConfigError, SupportError, WorkerError

OWN, BOTH, GATHER = benchmark.OURS
PEERS = [f"{benchmark.PEER}, 1 torch thread", f"{benchmark.PEER}, 2 torch threads"]


def runs(**speeds: list[float]) -> dict[str, Any]:
    names = {"own": OWN, "both": BOTH, "gather": GATHER, "one": PEERS[0], "two": PEERS[1]}
    return {
        names[k]: {"steps_per_second": v, "median": sorted(v)[len(v) // 2], "mean_return": [20.0]}
        for k, v in speeds.items()
    }


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    benchmark.add_options(parser)
    return parser.parse_args(words)


def test_is_found_and_its_peers_are_no_benchmarks() -> None:
    assert "train" in bench.names()
    assert "peers" not in bench.names()
    assert "Stable-Baselines3" in bench.summary("train")


def test_the_clock_runs_between_the_warm_up_and_the_last_update() -> None:
    records = [
        {"env_steps": n * 100, "wall_seconds": 5.0 + n, "mean_return": float(n)}
        for n in range(1, 8)
    ]
    assert benchmark.timed(records, warm_up=250) == {
        "steps": 400,
        "seconds": 4.0,
        "mean_return": 7.0,
    }


def test_ratios_are_to_the_peers_better_setting() -> None:
    found = benchmark.ratios(runs(own=[60.0] * 3, one=[20.0] * 3, two=[10.0] * 3))
    assert found == {OWN: {"ratio": 3.0, "low": 3.0, "high": 3.0, "to": PEERS[0]}}


def test_the_interval_holds_the_ratio_and_is_the_same_every_time() -> None:
    ours, theirs = [90.0, 100.0, 110.0, 95.0, 105.0], [10.0, 11.0, 9.0, 10.5, 9.5]
    low, high = benchmark.interval(ours, theirs)
    assert low < 10.0 < high
    assert (low, high) == benchmark.interval(ours, theirs)


def test_a_slow_round_hits_both_and_leaves_the_ratio() -> None:
    ours, theirs = [100.0, 50.0, 100.0], [10.0, 5.0, 10.0]  # the second round: half the speed
    assert benchmark.interval(ours, theirs) == (10.0, 10.0)


@pytest.mark.parametrize(("speed", "holds"), [(30.0, True), (29.0, False)])
def test_the_claim_is_about_two_workers(speed: float, holds: bool) -> None:
    found = benchmark.ratios(runs(own=[90.0], both=[5.0], gather=[speed], one=[10.0]))
    (claim,) = benchmark.claims(found)
    assert claim.holds is holds


def test_without_the_peer_there_is_no_claim_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> Path:
        raise SupportError("no network")

    def fake(steps: int) -> dict[str, Any]:
        run = {"steps": 10, "seconds": 2.0, "mean_return": None}
        return dict.fromkeys(benchmark.OURS, lambda seed: run)

    monkeypatch.setattr(peers(), "python_with", missing)
    monkeypatch.setattr(benchmark, "_ours", fake)
    facts = benchmark.measure(options("--repeats", "2"))
    assert "going on without stable-baselines3: no network" in capsys.readouterr().out
    assert facts["claims"] == []
    assert facts["runs"][OWN]["steps_per_second"] == [5.0, 5.0]
    json.dumps(facts)
    assert "stable-baselines3: not measured: no network" in benchmark.table(facts)


def test_a_hopeless_peer_setting_is_left_out_but_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(python: Path, threads: int, setting: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"steps": setting["steps"], "seconds": 1.0 if threads == 1 else 50.0}

    monkeypatch.setattr(peers(), "ppo_run", run)
    monkeypatch.setattr(peers(), "python_with", lambda *_: Path("python"))
    facts: dict[str, Any] = {}
    assert list(peers().ppo_runs(None, benchmark._setting(4096), 2048, facts)) == PEERS[:1]
    assert facts["trial_steps_per_second"] == {"1": 2048.0, "2": 41.0}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SupportError, match="not empty"):
        peers().python_with(peers().PPO, benchmark.PEER, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_install_is_one_clear_line_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[list[str]] = []

    def fails(words: list[str], **_: Any) -> str:
        called.append(words)
        if "pip" in words:
            raise WorkerError("pip", "ERROR: No matching distribution found")
        return ""

    monkeypatch.setattr(peers(), "output_of", fails)
    for _ in range(2):  # what the first try left behind does not stop the second
        with pytest.raises(SupportError, match=r"is there a network.*No matching distribution"):
            peers().python_with(peers().PPO, benchmark.PEER, str(tmp_path / "peer"))
    assert f"torch=={version('torch')}" in called[1], "unpinned, it pulls gigabytes"
    assert "installing stable-baselines3" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--steps", "0"]])
def test_nothing_to_measure_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        benchmark.measure(options(*words))


def test_a_failed_run_says_what_the_program_said() -> None:
    import sys

    with pytest.raises(WorkerError, match="no such luck"):
        output_of([sys.executable, "-c", "raise SystemExit('no such luck')"])


def test_a_run_of_our_own_is_timed() -> None:
    run = benchmark._own_run(1, "single", benchmark.BATCH, seed=1)
    assert run["steps"] == benchmark.BATCH
    assert run["seconds"] > 0
