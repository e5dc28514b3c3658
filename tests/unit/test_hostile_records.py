"""Records of runs that somebody else has written: an error that names the file, or curves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.config import build, save_toml
from manyhands.errors import ConfigError
from manyhands.viewing.runs import read_run
from manyhands.viewing.watch import Followed, Tail

GOOD = b'{"env_steps": 8, "update": 1}\n'
LINES = {
    "a list": b"[1, 2]\n",
    "a number without end": b'{"x": ' + b"9" * 5000 + b"}\n",
    "a number larger than a float": b'{"env_steps": 1' + b"0" * 400 + b"}\n",
    "nested without end": b"[" * 100_000 + b"\n",
    "no UTF-8": b"\xff\xfe\n",
    "null": b"null\n",
}
FILES = ("metrics.jsonl", "events.jsonl", "episodes.csv", "summary.json", "live.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_toml(tmp_path / "config.toml", build("a2c", env="CartPole-v1"))
    return tmp_path


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("line", LINES)
def test_records_of_a_stranger(line: str, file: str, folder: Path) -> None:
    (folder / file).write_bytes(LINES[line] + GOOD)
    try:
        read_run(folder)
    except ConfigError as error:
        said = str(error)
        assert str(folder / file) in said
    followed = Followed(folder)
    assert followed.news(-1, 0, 0)["state"] in ("running", "silent", "ended")


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80), file=st.sampled_from(FILES))
def test_bytes_of_a_stranger(
    data: bytes, file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    save_toml(folder / "config.toml", build("a2c", env="CartPole-v1"))
    (folder / file).write_bytes(data)
    try:
        read_run(folder)
    except ConfigError as error:
        said = str(error)
        assert str(folder / file) in said
    Followed(folder).news(-1, 0, 0)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "metrics.jsonl")
    os.mkfifo(folder / "live.json")
    assert Tail(folder / "metrics.jsonl").read() == (False, [])
    assert Followed(folder).news(-1, 0, 0)["live"] is None
