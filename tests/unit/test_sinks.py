"""TensorBoard and Weights & Biases get the numbers of metrics.jsonl, and never stop a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_programs import cells, configuration

from manyhands import support
from manyhands.config import build, from_plain
from manyhands.errors import SupportError, install
from manyhands.experiment import sinks as module
from manyhands.experiment.sinks import (
    Sinks,
    TensorBoard,
    WeightsAndBiases,
    make_sinks,
    numbers_of,
    tag_of,
)
from manyhands.run import train_experiment

CHECKSUM = module._Checksum()
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def record(steps: int, **more: Any) -> dict[str, Any]:
    return {"env_steps": steps, "update": steps // 100, "mean_return": steps / 3, **more}


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: tag -> (step, value)."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags}


def steps_shown(folder: Path, tag: str) -> list[int]:
    """The same by the reader that the TensorBoard program itself uses; it purges by other rules."""
    name = "tensorboard.backend.event_processing.plugin_event_accumulator"
    reader = pytest.importorskip(name).EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return [event.step for event in reader.Tensors(tag)]


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("mean_return", "return/mean"),
        ("policy_loss", "loss/policy"),
        ("value_loss", "loss/value"),
        ("seconds/rollout", "time/rollout"),
        ("steps_per_second", "speed/steps_per_second"),
        ("update", "run/update"),
        ("wall_seconds", "run/wall_seconds"),
        ("lag", "lag/mean"),
        ("lag_max", "lag/max"),
        ("explained_variance", "learning/explained_variance"),
        ("own/name", "own/name"),
    ],
)
def test_tags(name: str, tag: str) -> None:
    assert tag_of(name) == tag


def test_only_finite_numbers_are_curves() -> None:
    values = {
        "env_steps": 7,
        "mean_return": None,
        "value_loss": float("inf"),
        "kl": float("nan"),
        "entropy": np.float32(0.5),
        "note": "words",
        "episodes": 3,
    }
    assert numbers_of(values) == {"learning/entropy": 0.5, "run/episodes": 3.0}


# -- TensorBoard -----------------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    for steps in range(100, 400, 100):
        late = {"value_loss": 1e39 if steps == 300 else 0.1}  # more than a float32 holds
        sink.write(record(steps, kl=float("nan"), **late))
    sink.close()
    seen = curves(tmp_path)
    assert seen["return/mean"] == [(s, float(np.float32(s / 3))) for s in (100, 200, 300)]
    assert seen["run/update"] == [(100, 1.0), (200, 2.0), (300, 3.0)]
    assert seen["loss/value"] == [(s, float(np.float32(0.1))) for s in (100, 200)]
    assert set(seen) == {"return/mean", "run/update", "loss/value"}


def test_a_reader_sees_a_record_at_once(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(record(100))
    assert curves(tmp_path)["run/update"] == [(100, 1.0)]
    sink.close()


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for steps in range(100, 600, 100):
        first.write(record(steps, kl=1.0))
    first.close()
    # The checkpoint is at 300: what was written after it happened in vain.
    again = TensorBoard(tmp_path, purge_step=301)
    for steps in range(400, 700, 100):
        again.write(record(steps, kl=2.0))
    again.close()
    seen = curves(tmp_path)["learning/kl"]
    assert seen == [(100, 1.0), (200, 1.0), (300, 1.0), (400, 2.0), (500, 2.0), (600, 2.0)]
    assert [step for step, _ in seen] == steps_shown(tmp_path, "learning/kl")


def test_files_are_in_order_even_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for clock, purge in ((2_000_000_000.0, None), (1_700_000_000.0, 201), (1_700_000_000.0, 301)):
        monkeypatch.setattr(module.time, "time", lambda clock=clock: clock)
        sink = TensorBoard(tmp_path, purge)
        for steps in range(purge or 100, 600, 100):
            sink.write(record(steps))
        sink.close()
    steps = [step for step, _ in curves(tmp_path)["run/update"]]
    assert steps == [100, 200, 201, 301, 401, 501]


@settings(deadline=None)
@given(st.binary(min_size=4, max_size=3000))
def test_checksums_are_those_of_the_definition(data: bytes) -> None:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert CHECKSUM(data) == masked.to_bytes(4, "little")


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink._file.close()
    sink._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed by the sink)
    said: list[str] = []
    sinks = Sinks([sink], said.append)
    for steps in range(3):
        sinks.write(record(steps))
    sinks.close()
    assert len(said) == 1
    assert "TensorBoard gets no more metrics" in said[0]
    assert "No space left" in said[0]
    sink.close()


def test_a_missing_tensorboard_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    said: list[str] = []
    run = build("ppo", env="CartPole-v1").run
    sinks = make_sinks(run, tmp_path, {}, say=said.append)
    sinks.write(record(1))
    sinks.close()
    assert len(said) == 1
    assert "tensorboard is not installed" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_asked_for_is_not_made(tmp_path: Path) -> None:
    without = build("ppo", env="CartPole-v1", tensorboard=False).run
    make_sinks(without, tmp_path, {}).write(record(1))
    asked = build("ppo", env="CartPole-v1").run
    make_sinks(asked, None, {}).write(record(1))  # a worker that does not write
    assert list(tmp_path.iterdir()) == []
    sinks = make_sinks(asked, tmp_path, {})
    sinks.write(record(100))
    sinks.close()
    assert curves(tmp_path)["run/update"] == [(100, 1.0)]


def test_writing_for_tensorboard_imports_little(tmp_path: Path) -> None:
    """Its own writer brings a sixth of a second and a thread."""
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from manyhands.experiment.sinks import TensorBoard\n"
        f"sink = TensorBoard(Path({str(tmp_path)!r}))\n"
        "sink.write({'env_steps': 1, 'kl': 0.5}); sink.close()\n"
        "assert threading.active_count() == 1\n"
        "assert not {'tensorflow', 'torch', 'wandb', 'tensorboard.summary'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


# -- Weights & Biases ------------------------------------------------------------------------------


class FakeRun:
    """What we use of a run of wandb."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.ModuleType("wandb")
    fake.asked = []  # type: ignore[attr-defined]
    fake.run = FakeRun()  # type: ignore[attr-defined]

    def init(**asked: Any) -> FakeRun:
        fake.asked.append(asked)  # type: ignore[attr-defined]
        return fake.run  # type: ignore[attr-defined,no-any-return]

    fake.init = init  # type: ignore[attr-defined]
    fake.Settings = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_same_numbers(wandb: Any, tmp_path: Path) -> None:
    run = build("ppo", env="CartPole-v1", wandb="us/pole", tensorboard=False).run
    sinks = make_sinks(run, tmp_path, {"algorithm": "ppo"})
    sinks.write(record(300, policy_loss=0.5, kl=None))
    sinks.close()
    asked = wandb.asked[0]
    assert (asked["entity"], asked["project"]) == ("us", "pole")
    assert asked["config"] == {"algorithm": "ppo"}
    assert asked["settings"]["console"] == "off"
    assert wandb.run.logged == [
        (300, {"run/update": 3.0, "return/mean": 100.0, "loss/policy": 0.5})
    ]
    assert wandb.run.finished


def test_a_resumed_run_goes_on_in_the_same_one(wandb: Any, tmp_path: Path) -> None:
    WeightsAndBiases("pole", {}, tmp_path)
    wandb.run.step = 301  # what the service knows of it
    again = WeightsAndBiases("pole", {}, tmp_path)
    for steps in (200, 300, 400):
        again.write(record(steps))
    assert wandb.asked[0]["id"] == wandb.asked[1]["id"]
    assert wandb.asked[1]["resume"] == "allow"
    assert [step for step, _ in wandb.run.logged] == [400]


def test_a_service_that_fails_does_not_stop_the_run(wandb: Any, tmp_path: Path) -> None:
    def broken(values: Any, step: int) -> None:
        raise ConnectionError("no route")

    wandb.run.log = broken
    said: list[str] = []
    sinks = Sinks([WeightsAndBiases("pole", {}, tmp_path)], said.append)
    sinks.write(record(1))
    sinks.write(record(2))
    sinks.close()
    assert said == ["WeightsAndBiases gets no more metrics (ConnectionError: no route)"]


def test_an_end_that_hangs_is_left(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr(module, "_FINISH_SECONDS", 0.05)
    release = threading.Event()
    wandb.run.finish = lambda: release.wait(60)
    said: list[str] = []
    Sinks([WeightsAndBiases("pole", {}, tmp_path)], said.append).close()
    release.set()
    assert len(said) == 1
    assert "wandb sync" in said[0]


def test_a_missing_wandb_is_an_error_with_the_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = build("ppo", env="CartPole-v1", wandb="pole").run
    with pytest.raises(SupportError, match=re.escape(install("wandb"))):
        make_sinks(run, tmp_path, {})


def test_a_wandb_that_cannot_start_says_what_to_type(wandb: Any, tmp_path: Path) -> None:
    def init(**asked: Any) -> None:
        raise RuntimeError("api_key not configured")

    wandb.init = init
    with pytest.raises(SupportError, match=r"api_key not configured; type: wandb login"):
        WeightsAndBiases("pole", {}, tmp_path)


@pytest.mark.slow
def test_the_real_wandb_takes_it(tmp_path: Path) -> None:
    """Offline, in a process of its own: wandb leaves threads and a service behind until its end."""
    pytest.importorskip("wandb")
    code = (
        "from pathlib import Path\n"
        "from manyhands.experiment.sinks import WeightsAndBiases\n"
        "for first in (100, 200):\n"
        f"    sink = WeightsAndBiases('pole', {{'algorithm': 'ppo'}}, Path({str(tmp_path)!r}))\n"
        "    sink.write({'env_steps': first, 'kl': 0.5})\n"
        "    sink.close()\n"
    )
    offline = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    runs = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert runs
    assert len({path.name for path in runs}) == 1  # one id, however often it is resumed
    assert all(b"learning/kl" in path.read_bytes() for path in runs)


# -- the page about metrics ------------------------------------------------------------------------


def documented() -> set[str]:
    """Names in the first column of the tables about metrics.jsonl."""
    text = PAGE.read_text(encoding="utf-8")
    text = text.partition("\n## metrics.jsonl")[2].partition("\n### TensorBoard")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def every_kind() -> list[Any]:
    """One tiny run for each cell of the support table, and for options that add metrics."""
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        (algorithm, strategy, {})
        for workers in (1, 2)
        for algorithm, strategy in cells(workers)
        if support.why_not(algorithm, strategy, "inline") == ""
    ]
    kinds.append(("ppo", "single", {"kl_penalty": True}))
    kinds.append(("ppo", "single", {"collect": "episodes", "batch_steps": 64}))
    return [pytest.param(*kind, id="-".join([*kind[:2], *kind[2]])) for kind in kinds]


@pytest.mark.parametrize(("algorithm", "strategy", "more"), every_kind())
def test_every_metric_is_on_the_page(
    algorithm: str, strategy: str, more: dict[str, Any], tmp_path: Path
) -> None:
    workers = 1 if strategy == "single" else 2
    plain = configuration(algorithm, strategy, "inline", workers, str(tmp_path), **more)
    train_experiment(from_plain(plain))
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = {name for line in lines for name in json.loads(line)} - {"not_finite"}
    assert len(names) > 10
    assert len(documented()) > 20
    assert names <= documented()
