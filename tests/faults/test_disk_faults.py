"""A folder that goes away, cannot be written to any more, or holds what nobody of us wrote."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from resume_programs import TINY, at_update

from manyhands.errors import ConfigError, ManyhandsError
from manyhands.experiment import checkpoint
from manyhands.policy import load
from manyhands.run import resume, train

pytestmark = [pytest.mark.usefixtures("nothing_left")]


def test_a_folder_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training goes on to its end, saying what it cannot write; its last word names where."""
    folder = tmp_path / "run"
    at_update(monkeypatch, {3: lambda: shutil.rmtree(folder)})
    with pytest.raises(ManyhandsError, match=str(folder)):
        train("a2c", **TINY, steps=512, run_dir=str(folder))
    said = capsys.readouterr().err
    assert "could not be written" in said
    assert str(folder) in said
    assert not folder.exists()  # and it is not made again behind the back of whoever removed it


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A disk, and the words that make it read-only: root may write to any folder that is not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here (it takes root)")
    yield disk, ["mount", "-o", "remount,ro", str(disk)]
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_read_only(frozen_disk: tuple[Path, list[str]]) -> None:
    """Said before anything starts."""
    disk, freeze = frozen_disk
    subprocess.run(freeze, check=True)
    with pytest.raises(ConfigError) as error:
        train("a2c", **TINY, steps=64, run_dir=str(disk / "run"))
    assert str(disk / "run") in str(error.value)
    assert "Read-only" in str(error.value)


ODD = ["x" * 255, "a b\tc", "line\nbreak", "ünï 名", os.fsdecode(b"\xff\xfe")]
IMPOSSIBLE = ["x" * 256, "y/" * 4000, "zero\0byte", "circle", "circle/run", "file", "file/run"]


@pytest.mark.parametrize("name", [*ODD, *IMPOSSIBLE], ids=lambda name: repr(name)[:20])
def test_a_folder_with_an_odd_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works, or is refused by its name before anything starts."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("circle").symlink_to("circle")
    before = sorted(os.listdir())
    if name in ODD:
        train("a2c", **TINY, steps=64, run_dir=name)
        assert resume(name, steps=128).summary["env_steps"] == 128
        return
    with pytest.raises(ConfigError) as error:
        train("a2c", **TINY, steps=64, run_dir=name)
    assert name.partition("\0")[0][:20] in str(error.value)
    assert sorted(os.listdir()) == before


def command(data: bytes, good: bytes, bad: bytes, kind: bytes) -> bytes:
    """A function of Python in place of one that makes something, and what it is to do."""
    assert good in data
    table = b'[run.%b_kwargs]\ncommand = "touch canary"\n' % kind
    return data.replace(good, bad).replace(b"[run.%b_kwargs]\n" % kind, table)


CONFIGS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2 + 3],
    "oversized": lambda data: data + b"#" * (2 << 20),
    "not UTF-8": lambda data: data + b"\xff\xfe",
    "nested without end": lambda data: data + b"x = " + b"[" * 100_000,
    "a number without end": lambda data: data.replace(b"steps = 64", b"steps = " + b"9" * 9999),
    "another run's": lambda data: data.replace(b'"a2c"', b'"ppo"'),
    "a command": lambda data: command(data, b'env = "CartPole-v1"', b'env = "os:system"', b"env"),
    "a network that is a command": lambda data: command(
        data, b'network = ""', b'network = "subprocess:run"', b"network"
    ),
    "empty": lambda data: b"",
}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk") / "run"
    train("a2c", **TINY, steps=64, run_dir=str(folder))
    return folder


@pytest.mark.parametrize("how", CONFIGS)
def test_a_hostile_configuration(
    how: str, a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = a_run / "config.toml"
    data = file.read_bytes()
    left = sorted(p.name for p in (a_run / "checkpoints").iterdir())
    try:
        file.write_bytes(CONFIGS[how](data))
        assert file.read_bytes() != data
        with pytest.raises(ManyhandsError) as error:
            resume(a_run, steps=128)
        named = "is part of Python" if "command" in how else str(file)
        assert named in str(error.value)
        assert not list(tmp_path.iterdir())  # nothing was executed
    finally:
        file.write_bytes(data)
    assert sorted(p.name for p in (a_run / "checkpoints").iterdir()) == left
    assert checkpoint.newest(a_run)[0].facts["env_steps"] == 64


@pytest.mark.parametrize("name", ["config.toml", "policy.safetensors"])
@pytest.mark.parametrize("how", ["a pipe", "four terabytes"])
def test_a_file_that_none_of_ours_is(how: str, name: str, a_run: Path) -> None:
    """A pipe that nobody writes to was waited for; a file with holes would have been read."""
    file = a_run / name
    os.rename(file, a_run / "aside")
    try:
        if how == "a pipe":
            os.mkfifo(file)
        else:
            file.touch()
            os.truncate(file, 1 << 42)
        with pytest.raises(ManyhandsError, match=name.replace(".", r"\.")):
            load(a_run)
        if name == "config.toml":
            with pytest.raises(ManyhandsError, match=r"config\.toml"):
                resume(a_run, steps=128)
    finally:
        os.replace(a_run / "aside", file)
    assert load(a_run).act(np.zeros(4, np.float32)) in (0, 1)


def test_flipped_bits_of_a_configuration(a_run: Path) -> None:
    """Refused with the name of the file, or a configuration still; never anything else."""
    from manyhands.config import load_toml

    file, chance = a_run / "config.toml", random.Random(1)
    data = file.read_bytes()
    try:
        for _ in range(300):
            broken = bytearray(data)
            broken[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(broken)
            try:
                load_toml(file)
            except ConfigError as error:
                told = str(error)
                assert str(file) in told
    finally:
        file.write_bytes(data)


def test_a_checkpoint_larger_than_memory(tmp_path: Path) -> None:
    """A file with holes, and a manifest that agrees with it: refused before it is read."""
    path = checkpoint.save(tmp_path, {"x": 1}, env_steps=1)
    manifest = json.loads((path / checkpoint.MANIFEST).read_bytes())
    del manifest["sha256"]
    manifest["files"][checkpoint.ARRAYS]["size"] = 1 << 42
    (path / checkpoint.MANIFEST).write_bytes(checkpoint._manifest_text(manifest))
    os.truncate(path / checkpoint.ARRAYS, 1 << 42)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(checkpoint.Damaged, match=r"state\.safetensors has 4,398,046,511,104 bytes"):
        checkpoint.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
