"""Run folders of the version before: they load, they are evaluated, they are resumed.

Each folder under tests/data was written by the version in its name, inline, with `mh.train`: 512
steps of 4 CartPoles, networks of (8, 8), seed 3, no TensorBoard, replays saved.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import manyhands as mh
from manyhands.viewing.evaluation import evaluate

FOLDERS = sorted(p for p in (Path(__file__).parents[1] / "data").glob("version-*/*") if p.is_dir())


@pytest.fixture(params=FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def test_there_are_folders() -> None:
    assert len(FOLDERS) >= 4


def test_it_loads_and_is_evaluated(folder: Path) -> None:
    policy = mh.load(folder)
    action = policy.act(np.zeros(4, np.float32), deterministic=True)
    assert action in (0, 1)
    assert len(evaluate(folder, episodes=2).returns) == 2


def test_it_is_resumed(folder: Path) -> None:
    before = (folder / "metrics.jsonl").read_text().splitlines()
    weights = (folder / "policy.safetensors").read_bytes()
    result = mh.resume(folder, steps=1024)
    assert result.summary["env_steps"] >= 1024
    assert result.summary["exit"] == "finished"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before
    first, last = json.loads(lines[len(before)]), json.loads(lines[-1])
    assert 512 < first["env_steps"] <= last["env_steps"] == result.summary["env_steps"]
    assert (folder / "policy.safetensors").read_bytes() != weights
    assert "resume_note" not in (folder / "events.jsonl").read_text()
