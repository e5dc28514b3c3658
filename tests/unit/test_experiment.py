"""The run folder, its files, where time goes, and what is printed."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from manyhands.config import Experiment, build, load_toml
from manyhands.errors import ConfigError
from manyhands.experiment import folder as folders
from manyhands.experiment.bottleneck import Phases, merged
from manyhands.experiment.folder import SUMMARY, RunFolder, default_run_dir
from manyhands.experiment.hooks import FinishedEpisode
from manyhands.experiment.metrics import Csv, Returns, to_json, write_json
from manyhands.experiment.progress import end_table, start_table


@pytest.fixture
def experiment() -> Experiment:
    return build("ppo", env="CartPole-v1", workers=4, seed=3)


@pytest.fixture
def folder(tmp_path: Path, experiment: Experiment) -> Any:
    with RunFolder(tmp_path / "run") as made:
        made.open(experiment)
        yield made


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# -- folder ----------------------------------------------------------------------------------------


def test_config_repeats_the_run(folder: RunFolder, experiment: Experiment) -> None:
    assert folder.path is not None
    again = load_toml(folder.path / "config.toml")
    assert again.strategy == again.run.strategy == "allreduce"
    assert again.options == experiment.options
    assert again.run.run_dir == ""


def test_lines_are_there_at_once(folder: RunFolder) -> None:
    """Read while the files are open: a killed run loses nothing."""
    path = folder.path
    assert path is not None
    folder.metrics({"step": np.int64(1024), "loss": np.float32(0.5), "kl": float("nan")})
    folder.metrics({"step": 2048, "loss": 0.1, "new": float("-inf")})
    folder.episodes(1024, 1.23456, [FinishedEpisode(np.float64(200.0), np.int32(200), 2, 1, {})])
    folder.event("checkpoint", path=Path("x"), steps=np.arange(2))
    first, second = read_jsonl(path / "metrics.jsonl")
    assert first == {"step": 1024, "loss": 0.5, "kl": None, "not_finite": {"kl": "nan"}}
    assert second == {"step": 2048, "loss": 0.1, "new": None, "not_finite": {"new": "-inf"}}
    assert read_csv(path / "metrics.csv") == [
        {"step": "1024", "loss": "0.5", "kl": "nan", "new": ""},
        {"step": "2048", "loss": "0.1", "kl": "", "new": "-inf"},
    ]
    (episode,) = read_csv(path / "episodes.csv")
    assert episode == {
        "global_step": "1024", "worker": "1", "env": "2", "return": "200.0", "length": "200",
        "wall_seconds": "1.235",
    }  # fmt: skip
    (event,) = read_jsonl(path / "events.jsonl")
    assert (event["event"], event["path"], event["steps"]) == ("checkpoint", "x", [0, 1])
    assert abs(event["time"] - time.time()) < 60
    assert 0 <= event["wall_seconds"] < 60


def test_summary_has_every_key(folder: RunFolder) -> None:
    written = folder.summary(
        {"env_steps": 1000, "wall_seconds": 4.0, "mean_return": np.float32(1.5),
         "phase_seconds": {"rollout": 3.0, "learning": float("inf")}}
    )  # fmt: skip
    assert folder.path is not None
    read = json.loads((folder.path / "summary.json").read_text())
    assert set(read) == {*SUMMARY, "not_finite"}
    assert set(written) == set(SUMMARY)
    assert {"manyhands", "python", "torch", "numpy", "gymnasium"} <= set(read["versions"])
    assert "cores" in read["cpu"]
    facts = {k: read[k] for k in ("algorithm", "strategy", "engine", "workers", "seed", "exit")}
    assert facts == {
        "algorithm": "ppo", "strategy": "allreduce", "engine": "local", "workers": 4, "seed": 3,
        "exit": "finished",
    }  # fmt: skip
    assert (read["steps_per_second"], read["mean_return"], read["solved"]) == (250.0, 1.5, False)
    assert read["not_finite"] == {"phase_seconds.learning": "inf"}
    assert sorted(os.listdir(folder.path)) == [
        "config.toml", "episodes.csv", "events.jsonl", "metrics.csv", "metrics.jsonl",
        "summary.json",
    ]  # fmt: skip


def test_summary_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "s.json", {"a": 1})

    def broken(fd: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", broken)
        with pytest.raises(OSError, match="disk full"):
            write_json(tmp_path / "s.json", {"a": 2})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}


def test_a_run_is_never_written_over(folder: RunFolder, experiment: Experiment) -> None:
    assert folder.path is not None
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(folder.path).open(experiment)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder("/proc/run").open(experiment)


def test_episodes_of_an_update_are_rows_of_one_stroke(folder: RunFolder) -> None:
    """A key of the info that some have and others have not is a column all the same."""
    infos: list[dict[str, float]] = [{}, {"success": 1.0}, {}]
    episodes = [FinishedEpisode(float(i), 10 * i, i, 0, info) for i, info in enumerate(infos)]
    folder.episodes(64, 0.5, episodes)
    folder.episodes(128, 0.6, [])
    assert folder.path is not None
    rows = read_csv(folder.path / "episodes.csv")
    assert [(row["return"], row["length"], row["info/success"]) for row in rows] == [
        ("0.0", "0", ""), ("1.0", "10", "1.0"), ("2.0", "20", ""),
    ]  # fmt: skip


def test_other_workers_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: Experiment
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder(None) as nowhere:
        nowhere.open(experiment)
        nowhere.metrics({"a": 1})
        nowhere.episodes(1, 0.1, [FinishedEpisode(1.0, 1, 0, 0, {})])
        nowhere.event("start")
        assert nowhere.summary({"env_steps": 5})["env_steps"] == 5
    assert os.listdir() == []


def test_folder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders.time, "strftime", lambda form: "20250102-030405")
    experiment = build("a2c", env="ALE/Pong-v5", seed=7)
    with RunFolder.of(experiment) as first:
        assert first.path == tmp_path / "runs/ALE-Pong-v5/a2c-single/7-20250102-030405"
    assert default_run_dir(experiment).name == "7-20250102-030405-2"
    with RunFolder.of(build("a2c", env="X", run_dir="mine")) as named:
        assert named.path == tmp_path / "mine"
    assert default_run_dir(build("a2c", env="../..:x")).parts[:2] == ("runs", "-..-x")


# -- growing files ---------------------------------------------------------------------------------


def test_csv_header_grows_and_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = Csv(path)
    table.write({"a": 1})
    table.write({"b": 'x, "y"\nz', "a": None})
    table.close()
    table = Csv(path, ("ignored",))
    table.write({"c": [1, 2], "b": True})
    table.close()
    assert read_csv(path) == [
        {"a": "1", "b": "", "c": ""},
        {"a": "", "b": 'x, "y"\nz', "c": ""},
        {"a": "", "b": "True", "c": "[1, 2]"},
    ]


def test_csv_floats_read_back_exactly(tmp_path: Path) -> None:
    table = Csv(tmp_path / "t.csv")
    values = [0.1, 1 / 3, 1e-300, float(np.float32(0.1))]
    for value in values:
        table.write({"x": value})
    table.close()
    assert [float(row["x"]) for row in read_csv(tmp_path / "t.csv")] == values


def test_json_takes_numpy_and_torch() -> None:
    torch = pytest.importorskip("torch")
    record = {"n": np.bool_(True), "t": torch.tensor(2.0), "a": np.array([1.0, np.nan])}
    assert json.loads(to_json(record)) == {
        "n": True, "t": 2.0, "a": [1.0, None], "not_finite": {"a[1]": "nan"},
    }  # fmt: skip


def test_returns() -> None:
    returns = Returns(last=3)
    assert (returns.mean, returns.best, returns.episodes) == (None, None, 0)
    assert not returns.solved(-1e9)
    for total in (10.0, -1.0):
        returns.add(total)
    assert not returns.solved(-5.0)  # two episodes are not three
    for total in (2.0, 5.0):
        returns.add(total)
    assert (returns.mean, returns.best, returns.episodes) == (2.0, 10.0, 4)
    assert returns.solved(2.0)
    assert not returns.solved(2.1)
    assert not returns.solved(None)


# -- time ------------------------------------------------------------------------------------------


def test_phases_never_count_a_second_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(Phases, "clock", staticmethod(lambda: float(next(clock))))
    phases = Phases()
    with phases("learning"):  # 0
        with phases("sync"):  # 1
            pass  # 2
        with phases("learning"), phases("sync"):  # 3, 4
            pass  # 5, 6
    # 7: learning has 0-1, 2-4, 5-7
    assert phases.totals() == {"learning": 5.0, "sync": 2.0}
    with phases("rollout"):  # 8
        assert phases.totals()["rollout"] == 1.0  # up to now, 9
    assert phases.totals()["rollout"] == 2.0
    phases.add("sync", 3.0)
    assert phases.totals()["sync"] == 5.0


def test_phases_survive_errors() -> None:
    phases = Phases()
    with pytest.raises(KeyError), phases("a"), phases("b"):
        raise KeyError
    before = phases.totals()
    time.sleep(0.002)
    assert phases.totals() == before  # nothing is open any more


def test_phases_are_cheap() -> None:
    phases = Phases()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(2000):
            with phases("rollout"):
                pass
        best = min(best, (time.perf_counter() - start) / 2000)
    assert best < 2e-6


def test_phases_of_workers_side_by_side() -> None:
    assert merged([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 1.0}


# -- printed ---------------------------------------------------------------------------------------


def test_start_table(experiment: Experiment) -> None:
    text = start_table(experiment, {"threads": 1, "device": "cpu", "run_dir": "runs/x", "gpus": 0})
    assert text.splitlines() == [
        "training     ppo on CartPole-v1, seed 3",
        "workers      4, allreduce on the local engine, 1 thread per process",
        "device       cpu",
        "batch        4 workers × 2 envs each × 256 steps = 2,048 steps an update",
        "updates      49 (100,000 steps / 2,048 an update)",
        "minibatches  8 of 256 steps (all workers), 10 epochs: 80 gradient steps an update",
        "results      runs/x",
        "gpus         0",
    ]


def test_start_table_of_episodes() -> None:
    experiment = build(
        "trpo", env="X", collect="episodes", batch_steps=4000, target_return=475, workers=2
    )
    text = start_table(experiment, {})
    assert "2 workers × 4 envs each: whole episodes, at least 4,000 steps an update" in text
    assert "at most 25 (100,000 steps / 4,000 an update)" in text
    assert "mean return of the last 100 episodes at least 475" in text
    assert "minibatches" not in text


def test_end_table(experiment: Experiment) -> None:
    summary = SUMMARY | {
        "env_steps": 100_352, "updates": 98, "episodes": 700, "wall_seconds": 10.0, "workers": 2,
        "steps_per_second": 10_035.2, "mean_return": 480.123, "best_return": 500.0, "solved": True,
        "phase_seconds": {"optimisation": 2.0, "rollout": 7.0},
    }  # fmt: skip
    lines = end_table(experiment, summary).splitlines()
    assert lines[0] == "end     solved after 100,352 steps, 98 updates, 700 episodes"
    assert lines[1] == "speed   10,035 steps/s, 10.0 s"
    assert lines[2] == "return  480.12 on average over the last 100 episodes, 500.00 at best"
    assert [line.split()[-2:] for line in lines[3:6]] == [
        ["s", "70.0%"], ["s", "20.0%"], ["s", "10.0%"],
    ]  # fmt: skip
    assert lines[5].split()[:2] == ["everything", "else"]
    assert lines[6].startswith("bottleneck: rollout, 70% of the time")
    assert "no episode has finished" in end_table(experiment, SUMMARY)


# -- who may read it -------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_every_file_of_a_run_follows_the_umask(umask: int, tmp_path: Path) -> None:
    import manyhands as mh
    from manyhands.viewing import report
    from manyhands.viewing.video import film, go_headless

    go_headless()
    run = tmp_path / "run"
    before = os.umask(umask)
    try:
        mh.train("a2c", env="CartPole-v1", engine="inline", num_envs=2, steps=400, hidden=(8,),
                 quiet=True, run_dir=str(run))  # fmt: skip
        mh.resume(run, steps=800)
        if umask == 0o007:  # no mode that is written down somewhere looks like it
            policy = mh.load(run)
            policy.export(run / "policy.pt")
            policy.export(run / "policy.onnx")
            film(policy, run / "film.gif", max_length=3)
            mh.plot(run)
            with mock.patch.object(report, "make_page", return_value="a page"):
                mh.report(run)
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in run.rglob("*")}
    expected = {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in found}
    assert found == expected
    names = {path.name for path in found}
    written = "config.toml metrics.csv metrics.jsonl episodes.csv events.jsonl summary.json"
    assert {*written.split(), "policy.safetensors", "tensorboard", "state.safetensors"} <= names
    if umask == 0o007:
        assert {"policy.pt", "policy.onnx", "film.gif", "curves.png", "report.html"} <= names
