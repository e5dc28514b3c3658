"""Checkpoints on disk: complete or absent, and never trusted; one process at a time."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_programs import check_same

from manyhands.errors import ConfigError
from manyhands.experiment import checkpoint
from manyhands.experiment.checkpoint import Damaged, difference, load, newest, pack, save, unpack
from manyhands.experiment.folder import RunLock
from manyhands.experiment.metrics import cut_lines

FILES = (checkpoint.ARRAYS, checkpoint.STATE, checkpoint.MANIFEST)


def state(seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "weights": torch.from_numpy(rng.standard_normal(50).astype(np.float32)),
        "rng": rng.bit_generator.state,  # integers of 128 bits
        "rows": [rng.integers(0, 9, (3, 2)), np.array(2.5), np.zeros((0, 4), np.uint8)],
        "plain": [1, -0.0, 1e-300, None, True, "ü", [], {}],
    }


def steps_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


# -- what is written comes back --------------------------------------------------------------------


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = save(tmp_path, state(), env_steps=12288, update=6, mean_return=1.5)
    assert path.name == "000000012288"
    assert sorted(os.listdir(path)) == sorted(FILES)
    found, damaged = newest(tmp_path)
    assert not damaged
    check_same(found.state, state())
    bare, _ = newest(tmp_path, tensors=False)
    assert isinstance(bare.state["weights"], np.ndarray)
    assert found.state["rng"]["state"]["state"] > 2**64
    facts = {k: found.facts[k] for k in ("format", "env_steps", "update", "mean_return")}
    assert facts == {"format": 1, "env_steps": 12288, "update": 6, "mean_return": 1.5}
    np.random.default_rng().bit_generator.state = found.state["rng"]  # a generator takes it


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3).filter(lambda k: not k.startswith("@")), inner)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=60)
@given(plain_values)
def test_plain_values_come_back(value: Any) -> None:
    check_same(unpack(*pack({"value": value})), {"value": value})


def test_other_kinds() -> None:
    values = {"bytes": b"\0x", "half": torch.ones(2, dtype=torch.bfloat16), "a/b": np.ones(1)}
    values |= {"a": {"b": np.zeros(1)}, "tuple": (1, 2), "scalar": np.float32(0.5)}
    back = unpack(*pack(values))
    assert (back["bytes"], back["tuple"], back["scalar"]) == (b"\0x", [1, 2], 0.5)
    assert back["half"].dtype is torch.bfloat16
    assert (back["a/b"][0], back["a"]["b"][0]) == (1.0, 0.0)  # two paths that read alike
    for wrong, word in (
        ({"x": object()}, "x is object"),
        ({"x": np.array(["a"])}, "dtype"),
        ({1: 2}, "key 1"),
        ({"@array": 2}, "@array"),
    ):
        with pytest.raises(ConfigError, match=word):
            pack(wrong)


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, score in enumerate([None, 3.0, 9.0, 5.0, 9.0, 4.0, 2.0]):
        save(tmp_path, {"step": step}, env_steps=step, mean_return=99.0 - step, score=score)
    assert steps_in(tmp_path) == ["000000000004", "000000000005", "000000000006"]
    assert newest(tmp_path)[0].state == {"step": 6}
    os.utime(tmp_path / "checkpoints/000000000004", (2**31, 2**31))  # by step, not by the clock
    assert newest(tmp_path)[0].state == {"step": 6}


def test_the_same_step_again(tmp_path: Path) -> None:
    save(tmp_path, {"x": 1}, env_steps=5)
    save(tmp_path, {"x": 2}, env_steps=5)
    assert (steps_in(tmp_path), newest(tmp_path)[0].state) == (["000000000005"], {"x": 2})


# -- writers that fail or die ----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "rename", "open"])
def test_a_disk_that_refuses(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each such call of a save: the error comes out, the one before stays, nothing is left."""
    save(tmp_path, {"x": 0}, env_steps=0)
    save(tmp_path, {"x": 1}, env_steps=1)
    real, said = getattr(os, call), []
    for at in range(20):
        count = [0]

        def refuse(*args: Any, count: list[int] = count, at: int = at, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == at + 1:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            said.append(_error_of(lambda: save(tmp_path, {"x": 2}, env_steps=2)))
        if count[0] <= at:
            break  # every call has been tried
        assert not [name for name in steps_in(tmp_path) if name.startswith(".tmp")]
        found, damaged = newest(tmp_path)
        assert not damaged
        assert found.state["x"] in (1, 2)
        shutil.rmtree(tmp_path / "checkpoints/000000000002", ignore_errors=True)
    assert said[0] == "No space left on device"
    assert (said[-1], newest(tmp_path)[0].state) == ("", {"x": 2})


def _error_of(act: Any) -> str:
    try:
        act()
    except OSError as error:
        return str(error.strerror)
    return ""


WRITER = """
import sys
import numpy as np
from manyhands.experiment.checkpoint import save
step = int(sys.argv[2])
print("go", flush=True)
while True:
    step += 1
    save(sys.argv[1], {"step": step, "x": np.full(20000, step)}, env_steps=step)
"""


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """At random moments: there is always a whole checkpoint, and never an older one than before."""
    rng, last = random.Random(3), 0
    save(tmp_path, {"step": 0, "x": np.zeros(1)}, env_steps=0)
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(rng.uniform(0.0, 0.08))
            writer.kill()
        found, damaged = newest(tmp_path)
        assert not damaged
        assert found.state["step"] >= last
        assert (found.state["x"] == found.state["step"]).all()
        last = found.state["step"]
        checkpoint.sweep(tmp_path)
        assert not [name for name in steps_in(tmp_path) if not name.isdigit()]
    assert last > 0


# -- readers that are lied to ----------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    save(tmp_path, state(1), env_steps=1)
    save(tmp_path, state(2), env_steps=2)
    return tmp_path


def json_of(data: bytearray) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except ValueError:
        return {}


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere(name: str, two: Path) -> None:
    file = two / "checkpoints/000000000002" / name
    data = file.read_bytes()
    places = range(len(data)) if len(data) < 700 else range(0, len(data), len(data) // 150)
    for at in places:
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        file.write_bytes(broken)
        if name == checkpoint.MANIFEST and json_of(broken).get("format", 1) != 1:
            continue  # another format is another matter: see below
        found, damaged = newest(two)
        assert found.facts["env_steps"] == 1, (at, data[max(0, at - 20) : at + 1])
        ((path, reason),) = damaged
        assert (path.name, str(file) in reason) == ("000000000002", True)
    file.write_bytes(data)
    assert newest(two)[0].facts["env_steps"] == 2


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["empty", "half", "longer", "gone", "link", "pipe", "folder"])
def test_a_file_that_is_not_what_it_was(how: str, name: str, two: Path) -> None:
    file = two / "checkpoints/000000000002" / name
    data = file.read_bytes()
    if how in ("empty", "half", "longer"):
        file.write_bytes({"empty": b"", "half": data[: len(data) // 2]}.get(how, data + b"\0"))
    else:
        file.unlink()
    if how == "link":  # to a good file even: what is linked to may change
        file.symlink_to(two / "checkpoints/000000000001" / name)
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    found, damaged = newest(two)
    assert found.facts["env_steps"] == 1
    assert str(file) in damaged[0][1]
    aside = checkpoint.set_aside(damaged[0][0])
    assert aside.name == "damaged-000000000002"
    assert newest(two) [1] == []  # fmt: skip


def test_none_that_is_good(two: Path) -> None:
    for name in ("000000000001", "000000000002"):
        (two / "checkpoints" / name / checkpoint.STATE).unlink()
    with pytest.raises(ConfigError) as error:
        newest(two)
    assert "000000000001/state.json" in str(error.value)
    assert "000000000002/state.json" in str(error.value)
    assert "not started from scratch" in str(error.value)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        newest(two / "nothing")


def forge(folder: Path, arrays: bytes | None = None, text: bytes | None = None) -> Path:
    """A checkpoint with other contents and checksums that fit them: made on purpose."""
    path = save(folder, state(), env_steps=9)
    manifest = json.loads((path / checkpoint.MANIFEST).read_bytes())
    del manifest["sha256"]
    for name, data in ((checkpoint.ARRAYS, arrays), (checkpoint.STATE, text)):
        if data is not None:
            (path / name).write_bytes(data)
            manifest["files"][name] = checkpoint._print_of(data)
    (path / checkpoint.MANIFEST).write_bytes(checkpoint._manifest_text(manifest))
    return path


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("how", ["pickle", "torch"])
@pytest.mark.parametrize("where", ["arrays", "text"])
def test_nothing_is_ever_unpickled(how: str, where: str, two: Path) -> None:
    import pickle

    canary, payload = two / "canary", two / "payload"
    with open(payload, "wb") as file:
        bomb = {"weights": Bomb(str(canary))}
        torch.save(bomb, file) if how == "torch" else pickle.dump(bomb, file)
    path = forge(two, **{where: payload.read_bytes()})
    found, damaged = newest(two)
    assert found.facts["env_steps"] == 2
    assert path.name in damaged[0][1]
    assert not canary.exists()
    with open(payload, "rb") as file:
        pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert canary.exists()  # the payload is a real one


def test_absurd_headers_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
    absurd = {
        "length": struct.pack("<Q", 2**62) + b"{}",
        "shape": struct.pack("<Q", len(header)) + header.encode(),
        "nothing": b"",
    }
    for data in absurd.values():
        with pytest.raises(Damaged, match=r"state\.safetensors"):
            load(forge(tmp_path, arrays=data))
    deep = b"[" * 100_000 + b"]" * 100_000
    for text in (deep, b'{"x":{"@array":"none","@kind":"numpy"}}', b"\xff", b"9" * 10_000):
        with pytest.raises(Damaged, match=r"state\.json"):
            load(forge(tmp_path, text=text))


def test_another_format_is_no_damage(two: Path) -> None:
    file = two / "checkpoints/000000000002" / checkpoint.MANIFEST
    manifest = json.loads(file.read_bytes()) | {"format": 7, "manyhands": "9.9"}
    del manifest["sha256"]
    file.write_bytes(checkpoint._manifest_text(manifest))
    with pytest.raises(ConfigError, match=r"format 7, written by manyhands 9\.9.*format 1"):
        newest(two)


def test_difference_names_key_shape_and_dtype() -> None:
    expected = {"w": torch.zeros(3), "shapes": {"policy": [4, 2]}, "step": 1}
    assert difference(expected, {**expected, "step": 99}) == ""
    cases = [
        ({**expected, "w": torch.zeros(4)}, "w is float32[4], and float32[3] is expected"),
        ({**expected, "w": np.zeros(3)}, "w is float64[3], and float32[3] is expected"),
        (
            {**expected, "shapes": {"policy": [4, 9]}},
            "a/shapes/policy is [4, 9], and [4, 2] is expected",
        ),
        ({"w": torch.zeros(3), "step": 1}, "a/shapes is expected, and is not there"),
        ({**expected, "more": 1}, "a/more is there, and is not expected"),
        ({**expected, "step": "x"}, "a/step is str, and a number is expected"),
    ]
    for found, words in cases:
        assert difference(expected, found, "a").endswith(words)


# -- the lock --------------------------------------------------------------------------------------


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError) as error, RunLock(tmp_path):
        pass
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(error.value)
    assert not (tmp_path / ".lock").exists()
    hold = f"from manyhands.experiment.folder import RunLock\nwith RunLock({str(tmp_path)!r}):\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold + "  print('in', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"in\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"), RunLock(tmp_path):
            pass
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert (tmp_path / ".lock").exists()  # stale
        # Nobody has waited for it yet: it is still in the list of processes.
        with RunLock(tmp_path):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("says", "free"),
    [
        ({"boot": "an earlier start of this machine"}, True),
        ({"started": "1"}, True),  # the number is another process's now
        ({}, False),  # it lives, on a file system without locks
        ({"host": "elsewhere"}, False),  # nobody can know
    ],
)
def test_stale_locks_are_seen(says: dict[str, str], free: bool, tmp_path: Path) -> None:
    from manyhands.experiment import folder as lock

    parent = os.getppid()
    told = lock._me() | {"pid": parent, "started": lock._started(parent)} | says
    (tmp_path / ".lock").write_text(json.dumps(told))
    if free:
        with RunLock(tmp_path):
            return
    with pytest.raises(ConfigError, match="in use by process"), RunLock(tmp_path):
        pass


def test_lines_are_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("a\nb\nc\nhalf")
    assert cut_lines(path, None) == 3
    assert path.read_text() == "a\nb\nc\n"
    assert (cut_lines(path, 2), path.read_text()) == (2, "a\nb\n")
    assert (cut_lines(path, 5), path.read_text()) == (2, "a\nb\n")
    assert (cut_lines(path, 0), path.read_text()) == (0, "")
    assert cut_lines(tmp_path / "none", 3) == 0


def test_one_array_is_not_read_a_million_times(two: Path) -> None:
    """A megabyte of arrays and a line of text for each copy of it: memory has a bound."""
    from safetensors.numpy import save as to_safetensors

    arrays = to_safetensors({"x": np.zeros(1 << 20, np.uint8)})
    text = json.dumps([{"@array": "x", "@kind": "bytes"}] * 4000).encode()
    path = forge(two, arrays=arrays, text=text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Damaged, match=r"state\.json is not a state \(KeyError: 'x'"):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10
