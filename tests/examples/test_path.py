"""The picture of a step's path shows the files that run, and they are few."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import FrameType

import path_picture
import pytest

import manyhands as mh
from manyhands.experiment import records as records_of_a_run
from manyhands.strategies.progress import RunProgress

ROOT = os.path.dirname(os.path.abspath(mh.__file__)) + os.sep
PICTURE = Path(__file__).parents[2] / "docs/concepts/path-of-a-step.svg"


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == path_picture.picture(), "type: make docs"


@pytest.mark.parametrize("path", path_picture.PATHS)
def test_these_files_run_between_two_records(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_of_a_run, "KEEP_SECONDS", 3600.0)  # what is not done at each step
    algorithm, strategy, most = path_picture.PATHS[path]
    ran: set[str] = set()
    metrics, tracing, enough = tmp_path / "run/metrics.jsonl", False, threading.Event()
    goes_on = RunProgress.goes_on
    until_seen = lambda self: not enough.is_set() and goes_on(self)  # noqa: E731
    monkeypatch.setattr(RunProgress, "goes_on", until_seen)

    def look(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if tracing and event == "call" and name.startswith(ROOT):
            ran.add(name[len(ROOT) :])

    def train() -> None:
        with contextlib.suppress(mh.WorkerError):  # it may be over for one of the workers first
            mh.train(
                algorithm, env="CartPole-v1", strategy=strategy, engine="inline", workers=2, seed=1,
                rollout_length=32, steps=10**8, quiet=True, checkpoint_seconds=3600,
                tensorboard=False, run_dir=str(tmp_path / "run"),
            )  # fmt: skip

    def records() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    threading.setprofile(look)  # type: ignore[arg-type]
    try:
        thread = threading.Thread(target=train)
        thread.start()
        while thread.is_alive() and records() < 5:
            thread.join(0.02)
        tracing, seen = True, records()
        while thread.is_alive() and records() < seen + 4:
            thread.join(0.02)
        tracing = False
    finally:
        threading.setprofile(None)
        enough.set()
        thread.join(200)
    assert not thread.is_alive()
    core = {name for name in ran if not name.startswith(("engines/", "experiment/"))}
    assert core == path_picture.files_of(path)
    assert len(core) <= most
