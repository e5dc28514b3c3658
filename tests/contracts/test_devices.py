"""Every worker takes the GPU of its place on its machine, on every engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ALL_ENGINES
from training_programs import told

import manyhands as mh
from manyhands import devices
from manyhands.cli.main import main
from manyhands.devices import Seat

pytestmark = [pytest.mark.usefixtures("nothing_left")]


def test_a_pure_choice() -> None:
    assert [devices.name("cuda", rank, 2) for rank in range(4)] == [
        "cuda:0", "cuda:1", "cuda:0", "cuda:1",
    ]  # fmt: skip
    assert devices.name("auto", 3, 4) == "cuda:3"
    assert devices.name("auto", 1, 0) == "cpu"
    assert devices.name("cpu", 1, 4) == "cpu"


@pytest.mark.parametrize(("asked", "usable"), [("", 2), ("1", 1), ("0", 0), ("5", 2)])
def test_gpus_may_be_fewer(asked: str, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.SIMULATED, "2")
    if asked:
        monkeypatch.setenv("MANYHANDS_GPUS", asked)
    assert devices.usable() == usable
    assert devices.present() == 2


@pytest.mark.parametrize(
    ("seats", "words"),
    [
        ([Seat("worker 0", "a", "cpu"), Seat("worker 1", "a", "cpu")], "cpu"),
        ([Seat("worker 0", "a", "cuda:0")], "cuda:0"),
        (
            [Seat("worker 0", "a", "cuda:0"), Seat("worker 1", "a", "cuda:1")],
            "cuda:0, worker 0; cuda:1, worker 1",
        ),
        (
            [Seat(f"worker {i}", "a", f"cuda:{i % 2}") for i in range(5)],
            "cuda:0, shared by workers 0, 2 and 4; cuda:1, shared by workers 1 and 3",
        ),
        (
            [Seat("learner 0", "a", "cuda:0"), Seat("learner 1", "b", "cuda:0")],
            "cuda:0 on a, learner 0; cuda:0 on b, learner 1",
        ),
    ],
)
def test_who_shares_what(seats: list[Seat], words: str) -> None:
    assert devices.described(seats) == words


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_two_workers_on_two_gpus_get_one_each(engine: str) -> None:
    both = "cuda:0, worker 0; cuda:1, worker 1"
    assert told(engine, "devices") == [["cuda:0", both, both], ["cuda:1", both, both]]


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        (
            "impala",
            {"workers": 3, "learners": 2, "unrolls": 2},
            "cuda:0, learner 0; cuda:1, learner 1",
        ),
        ("impala", {"workers": 3}, "cuda:0"),
        ("dqn", {"workers": 1, "learning_starts": 64}, "cuda:0"),
        ("a2c", {"workers": 3, "strategy": "gradient_server"}, "cuda:0"),
    ],
)
def test_those_that_learn_take_gpus(
    algorithm: str, options: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(devices.SIMULATED, "2")
    options |= {"num_envs": 4, "rollout_length": 16, "steps": 256, "hidden": (8,), "quiet": True}
    options |= {"engine": "inline", "device": "auto", "run_dir": str(tmp_path / "run")}
    mh.train(algorithm, env="CartPole-v1", **options)
    assert f'"device": "{words}"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_the_start_table_says_who_shares_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(devices.SIMULATED, "1")
    words = [
        "train", "a2c", "--env", "CartPole-v1", "--workers", "2", "--engine", "inline", "--device",
        "cuda", "--num-envs", "4", "--rollout-length", "16", "--steps", "64", "--no-tensorboard",
        "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert main(words) == 0
    assert re.search(r"(?m)^device +cuda:0, shared by workers 0 and 1$", capsys.readouterr().out)
