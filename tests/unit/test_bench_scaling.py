"""`manyhands bench scaling`: the limit it measures, and when it judges what it claims."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from manyhands import bench
from manyhands.bench import _tools as quiet
from manyhands.bench import scaling as benchmark
from manyhands.config import Experiment
from manyhands.errors import ConfigError, WorkerError

ROOT = Path(__file__).parents[2]
PLAN = [("single", 1), ("allreduce", 2), ("gather", 2), ("independent", 2)]


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    benchmark.add_options(parser)
    return parser.parse_args(words)


def turn(speed: float, rollout: float = 8.0) -> dict[str, Any]:
    phases = dict.fromkeys(benchmark.PHASES, 0.0) | {"rollout": rollout}
    return {"steps_per_second": speed, "seconds": 10.0, "phases": phases}


def rounds(*speeds: tuple[float, float, float, float]) -> list[dict[tuple[str, int], Any]]:
    return [dict(zip(PLAN, map(turn, row), strict=True)) for row in speeds]


def medians(*speeds: tuple[float, float, float, float]) -> dict[str, dict[str, Any]]:
    return {name: benchmark._medians(rounds(*speeds), name, n) for name, n in PLAN}


def machine(
    cores: int = 2, before: float | None = 0.0, meanwhile: float | None = 0.0
) -> dict[str, Any]:
    return {
        "cores": cores, "cpu": "a CPU", "others_before": before, "others_meanwhile": meanwhile,
    }  # fmt: skip


# -- the limit -----------------------------------------------------------------------------------


def records(began: float, steps_per_second: float, updates: int = 5) -> list[dict[str, Any]]:
    return [
        {"at": began + k, "wall_seconds": float(k), "env_steps": k * steps_per_second}
        for k in range(1, updates + 1)
    ]


def test_independent_runs_are_counted_while_all_of_them_run() -> None:
    alone = [{"at": 5.5, "env_steps": 0.0}, {"at": 6.5, "env_steps": 7.0}]
    fast_at_the_end = [*records(2.0, 100.0), {"at": 8.0, "env_steps": 10_000.0}]
    assert benchmark.speed_together([records(0.0, 100.0)]) == pytest.approx(100.0)
    # both run between the seconds 3 and 5; the second has speeded up when it was alone
    both = [records(0.0, 100.0), fast_at_the_end]
    assert benchmark.speed_together(both) == pytest.approx(200.0)
    with pytest.raises(ConfigError, match="use more --updates"):
        benchmark.speed_together([records(0.0, 100.0), alone])


def test_the_share_of_the_limit_is_taken_round_by_round() -> None:
    found = medians((100, 180, 160, 200), (50, 72, 70, 80), (100, 170, 160, 190))
    assert found["allreduce"]["speed_up"] == 1.7
    assert found["allreduce"]["limit"] == 1.9
    assert found["allreduce"]["of_limit"] == 0.9  # of 0.9, 0.9 and 0.895, not 1.7 / 1.9
    assert found["independent"]["of_limit"] == 1.0
    assert found["single"]["limit"] == found["single"]["of_limit"] == 1.0


def test_gather_is_bound_by_its_serial_learner_on_top_of_the_limit() -> None:
    found = medians((100, 160, 150, 160))
    # 8 of 10 seconds are shared, by workers who make 1.6 of one
    assert found["gather"]["bound"] == pytest.approx(10 / (8 / 1.6 + 2), abs=1e-3)
    assert found["allreduce"]["bound"] == found["allreduce"]["limit"] == 1.6


# -- judging -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "before", "meanwhile", "reasons"),
    [
        (2, 0.0, 0.09, []),
        (16, 0.7, 0.7, []),
        (2, 0.5, 0.0, ["other programs kept 0.50 of 2 cores busy before it began"]),
        (2, 0.0, 1.3, ["other programs kept 1.30 of 2 cores busy meanwhile"]),
        (1, 0.0, 0.0, ["2 workers need as many cores, and there are 1"]),
        (1, 0.0, 0.9, ["2 workers need as many cores", "other programs kept 0.90 of 1"]),
        (2, None, None, ["this system does not say what else runs on it"]),
    ],
)
def test_a_claim_is_judged_on_a_quiet_machine_with_the_cores(
    cores: int, before: float | None, meanwhile: float | None, reasons: list[str]
) -> None:
    runs = list(medians((100, 100, 100, 200)).values())  # both claims fail
    said = benchmark.judgement(runs, machine(cores, before, meanwhile), "local")
    assert len(said["not_judged"]) == len(reasons)
    for given, expected in zip(said["not_judged"], reasons, strict=True):
        assert given.startswith(expected)
    assert [claim["holds"] for claim in said["claims"]] == ([] if reasons else [False, False])


@pytest.mark.parametrize(("speed", "holds"), [(162.0, True), (160.0, False)])
def test_the_claim_of_allreduce_is_a_share_of_the_limit(speed: float, holds: bool) -> None:
    runs = list(medians((100, speed, 150, 180)).values())
    allreduce, _ = benchmark.claims(runs)
    assert allreduce.holds is holds


def test_rays_own_processes_are_no_reason_to_fail_a_claim() -> None:
    said = benchmark.judgement([{"workers": 2}], machine(), "ray")
    assert said["claims"] == []
    assert "Ray's own processes" in said["not_judged"][0]


def test_the_table_says_why_it_does_not_judge() -> None:
    runs = list(medians((100, 190, 150, 200)).values())
    facts: dict[str, Any] = {
        "machine": machine(meanwhile=1.5),
        "settings": {
            "algorithm": "trpo", "env": "X", "engine": "local", "num_envs": 32,
            "rollout_length": 256,
        },
        "runs": runs,
    }  # fmt: skip
    busy = benchmark.table(facts | benchmark.judgement(runs, facts["machine"], "local"))
    assert any(line.startswith("NOT JUDGED  other programs kept 1.50 of 2") for line in busy)
    assert not any(line.startswith(("HOLDS", "FAILS")) for line in busy)
    quiet_facts = facts | benchmark.judgement(runs, machine(), "local")
    judged = benchmark.table(quiet_facts)
    assert any(
        line.startswith("HOLDS  allreduce with two workers, share of two independent runs: 0.95")
        for line in judged
    )
    (row,) = [line for line in judged if line.startswith("allreduce ")]
    assert "95%" in row


# -- what else runs ------------------------------------------------------------------------------


def test_busy_time_is_of_the_cores_that_may_be_used(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    tick = os.sysconf("SC_CLK_TCK")
    elsewhere = max(os.sched_getaffinity(0)) + 1
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu{core} {tick} 1 2 {50 * tick} 60 3 4 5 6 7\n"
        f"cpu{elsewhere} {9 * tick} 0 0 0 0 0 0 0 0 0\nintr 1 2\n"
    )
    assert quiet.busy_seconds(str(stat)) == pytest.approx((tick + 15) / tick)
    assert quiet.busy_seconds(str(tmp_path / "none")) is None


def test_our_own_work_and_that_of_ended_children_is_not_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, clock = iter([100.0, 103.0]), iter([10.0, 12.0])
    monkeypatch.setattr(quiet, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(quiet.time, "monotonic", lambda: next(clock))
    own = iter([1.0, 3.0])
    monkeypatch.setattr(quiet, "own_seconds", lambda: next(own))
    assert quiet.OtherPrograms().cores() == pytest.approx(0.5)  # 3 s busy, 2 ours, in 2 s


def test_seconds_of_a_child_are_ours_once_it_has_ended() -> None:
    before = quiet.own_seconds()
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", spin], check=True, timeout=200)
    assert quiet.own_seconds() - before > 0.25  # the system counts in hundredths


# -- running ---------------------------------------------------------------------------------------


def test_a_wrong_option_is_refused_before_anything_runs() -> None:
    assert "scaling" in bench.names()
    began = time.monotonic()
    with pytest.raises(ConfigError, match="there is no environment"):
        benchmark.measure(options("--env", "CartPol-v1", "--workers", "2"))
    with pytest.raises(ConfigError, match="at least 2"):
        benchmark.measure(options("--updates", "1"))
    assert time.monotonic() - began < 30


def test_a_run_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(words: list[str], **given: Any) -> Any:
        return popen([sys.executable, "-c", "raise SystemExit('no room')"], **given)

    popen = subprocess.Popen
    monkeypatch.setattr(benchmark.subprocess, "Popen", refuses)
    common = {"env": "CartPole-v1", "engine": "inline"}
    with pytest.raises(WorkerError, match="no room"):
        benchmark.measured(benchmark._experiments("ppo", "independent", 2, common))


SMALL = ("--env", "CartPole-v1", "--algorithm", "a2c", "--engine", "inline", "--workers", "2")


def folders(experiments: Sequence[Experiment], folder: Path) -> list[Path]:
    """What runs of 100 steps a second and worker would leave, each begun 0.5 s after the other."""
    homes = []
    for i, experiment in enumerate(experiments):
        home = folder / str(i)
        home.mkdir()
        began = {"event": "start", "time": 1000.0 + 0.5 * i}
        (home / "events.jsonl").write_text(json.dumps(began) + "\n")
        rows = [
            {"env_steps": 100 * k * experiment.run.workers, "wall_seconds": float(k),
             "seconds/rollout": 0.8 * k}
            for k in range(1, 6)
        ]  # fmt: skip
        (home / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        homes.append(home)
    return homes


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(benchmark, "_train_at_once", folders)
    monkeypatch.setattr(benchmark, "others_now", lambda: 0.0)
    return benchmark.measure(options(*SMALL, "--rounds", "2"))


def test_every_round_measures_the_limit_too(measured: dict[str, Any]) -> None:
    assert [(run["strategy"], run["workers"]) for run in measured["runs"]] == PLAN
    assert [run["steps_per_second"] for run in measured["runs"]] == [100.0, 200.0, 200.0, 200.0]
    assert [len(run["speed_up_by_round"]) for run in measured["runs"]] == [2] * 4
    assert measured["runs"][1]["of_limit"] == 1.0
    assert bool(measured["claims"]) != bool(measured["not_judged"])


@pytest.mark.slow
@pytest.mark.alone
def test_a_real_round() -> None:
    words = (*SMALL, "--batch", "256", "--updates", "400", "--rounds", "1")
    facts = json.loads(json.dumps(benchmark.measure(options(*words))))
    assert all(run["steps_per_second"] > 0 for run in facts["runs"])
    benchmark.table(facts)


def test_its_json_is_documented(measured: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "how-to" / "tune-and-scale.md").read_text(encoding="utf-8")
    section = text.partition("## Does it scale here?")[2].partition("\n## ")[0]
    told = set(re.findall(r"(?m)^\| `([\w.]+)` \|", section))
    own = {"others_before", "others_meanwhile", "cores"}
    keys = {key for key in measured if key not in ("machine", "runs")}
    keys |= {f"machine.{key}" for key in own}
    keys |= {f"runs.{key}" for key in measured["runs"][0]}
    assert own <= set(measured["machine"])
    assert told == keys
