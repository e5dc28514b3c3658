"""Kills, full disks, damaged files and second signals: a run can always be resumed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import engine_params, ours, worker_process
from resume_programs import (
    TINY,
    at_update,
    check_same,
    events,
    left_in,
    start,
    summary,
    until,
)
from safetensors.numpy import load_file

from manyhands.cli.main import main
from manyhands.config import build
from manyhands.errors import ConfigError, WorkerError
from manyhands.experiment import checkpoint
from manyhands.experiment.folder import RunFolder, RunLock
from manyhands.run import resume, train

pytestmark = [pytest.mark.usefixtures("nothing_left")]

LIMIT = 15.0  # seconds from a fault to the end of the run; one or two on a quiet machine

# -- kills -----------------------------------------------------------------------------------------

LONG = [
    "ppo", "--env", "CartPole-v1", "--num-envs", "4", "--rollout-length", "32", "--minibatch", "64",
    "--hidden", "16", "--engine", "inline", "-n", "1", "--quiet", "--no-tensorboard",
    "--checkpoint-seconds", "0",
]  # fmt: skip


def _last_step(folder: Path) -> int:
    with contextlib.suppress(OSError):
        names = [int(n) for n in os.listdir(folder / "checkpoints") if n.isdigit()]
        return max(names, default=-1)
    return -1


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_killed_in_mid_training(rank: int, tmp_path: Path) -> None:
    """The run ends soon and names who it was; what it has left is whole, and can be resumed."""
    folder = tmp_path / "run"
    process = start(
        "train", "a2c", "--env", "CartPole-v1", "-n", "2", "--num-envs", "4", "--steps", "1e8",
        "--quiet", "--no-tensorboard", "--checkpoint-seconds", "0.1", "--run-dir", str(folder),
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    until(lambda: _last_step(folder) > 0 and metrics.read_bytes().count(b"\n") >= 5, process)
    os.kill(worker_process(rank), signal.SIGKILL)
    killed = time.monotonic()
    _, said = process.communicate(timeout=150)
    assert time.monotonic() - killed < LIMIT, said
    assert process.returncode not in (0, None)
    ended = summary(folder)["exit"]
    assert ended.startswith("failed: "), ended
    assert summary(folder)["solved"] is False
    for text in (ended, said):
        assert f"worker {rank} of 2" in text
        assert "SIGKILL" in text
    lines = metrics.read_text().splitlines()
    assert len([json.loads(line) for line in lines]) >= 5
    policy = folder / "policy.safetensors"
    if policy.exists():
        assert all(np.isfinite(array).all() for array in load_file(policy).values())
    assert not list(folder.glob("*.tmp"))
    steps = _last_step(folder)
    result = resume(folder, steps=steps + 64, engine="inline")  # another engine will do
    assert result.summary["exit"] == "finished"
    assert result.summary["env_steps"] >= steps + 64


@pytest.mark.parametrize("engine", engine_params("local", "mpi", "ray", "torch", slow="ray"))
def test_the_launcher_is_killed(engine: str, tmp_path: Path) -> None:
    """All of its processes end with it, whatever engine has started them, and the run goes on from
    its last checkpoint."""
    folder = tmp_path / "run"
    process = start(
        "train", "a2c", "--env", "CartPole-v1", "-n", "2", "--num-envs", "4", "--steps", "1e8",
        "--quiet", "--no-tensorboard", "--checkpoint-seconds", "0.1", "--engine", engine,
        "--run-dir", str(folder),
    )  # fmt: skip
    until(lambda: _last_step(folder) > 0, process)
    process.kill()
    killed = time.monotonic()
    limit = 2 * LIMIT if engine == "ray" else LIMIT  # Ray's own notice in their own time
    while (left := ours()) and time.monotonic() - killed < limit:
        time.sleep(0.01)
    seconds = time.monotonic() - killed
    process.communicate()
    assert not left, f"{len(left)} are left after {seconds:.1f} s"
    print(f"{engine}: all gone {seconds:.2f} s after the launcher was killed")
    steps = _last_step(folder)
    result = resume(folder, steps=steps + 64, engine="inline")
    assert result.summary["exit"] == "finished"
    assert result.summary["env_steps"] >= steps + 64


# -- disks -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here (it takes root)")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int = 110_000) -> None:
    """Leave room for metrics and the policy, but not for a checkpoint."""
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_frsize - leave))


@pytest.mark.parametrize("for_good", [False, True])
def test_a_full_disk(
    for_good: bool, small_disk: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = small_disk / "run"
    acts = {3: lambda: fill(small_disk)}
    if not for_good:
        acts[6] = (small_disk / "filler").unlink
    at_update(monkeypatch, acts)
    options = TINY | {"steps": 512, "hidden": (64, 64), "run_dir": str(folder)}
    if for_good:
        with pytest.raises(WorkerError, match="its last checkpoint could not be written: No space"):
            train("a2c", **options)
        assert "its last checkpoint could not be written" in summary(folder)["exit"]
        assert newest_step(folder) == 2 * 64
    else:
        assert train("a2c", **options).summary["exit"] == "finished"
        assert newest_step(folder) == 8 * 64
    failed = events(folder, "checkpoint_failed")
    assert [event["env_steps"] // 64 for event in failed] == list(range(3, 9 if for_good else 6))
    assert "No space left on device" in failed[0]["error"]
    said = capsys.readouterr().err
    assert "could not be written" in said
    assert "No space left on device" in said
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["checkpoint_failures"] == (5 if for_good else 3)
    assert all(name.isdigit() for name in os.listdir(folder / "checkpoints"))
    assert (folder / "policy.safetensors").is_file()


def test_a_disk_without_room_for_a_row(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are lost, whole ones, and told of; when there is room again all goes on."""
    folder = small_disk / "run"
    at_update(monkeypatch, {20: lambda: fill(small_disk, 0), 40: (small_disk / "filler").unlink})
    ended = train("a2c", **TINY, steps=60 * 64, run_dir=str(folder)).summary["exit"]
    assert (ended, newest_step(folder)) == ("finished", 60 * 64)
    assert "are lost: [Errno 28] No space left on device" in capsys.readouterr().err
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    updates = [json.loads(line)["update"] for line in lines]
    assert [*range(1, 21), *range(41, 61)] == [u for u in updates if not 20 < u <= 40]
    assert len(updates) < 60
    assert checkpoint.newest(folder)[0].state["records"]["rows"]["metrics"] == len(updates)


@pytest.mark.skipif(
    shutil.which("strace") is None, reason="no strace; type: apt-get install strace"
)
def test_a_disk_that_fails_to_force_data_out(tmp_path: Path) -> None:
    """EIO from fsync, the real call: never taken for a success, and the training goes on."""
    folder = tmp_path / "run"
    inject = ["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "-e", "trace=fsync"]
    inject += ["-e", "inject=fsync:error=EIO:when=20..30", sys.executable, "-m"]
    words = ["manyhands.cli.main", "train", *LONG, "--steps", "3840", "--run-dir", str(folder)]
    done = subprocess.run([*inject, *words], capture_output=True, text=True, timeout=100)
    if "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    assert "Input/output error" in done.stderr
    failed = [event["env_steps"] for event in events(folder, "checkpoint_failed")]
    made = [event["env_steps"] for event in events(folder, "checkpoint")]
    assert len(failed) > 1
    assert sorted([*failed, *made]) == list(range(0, 3841, 128))
    assert newest_step(folder) == 3840
    with open(folder / "metrics.csv") as file:
        assert len(file.readlines()) == 31


def newest_step(folder: Path) -> int:
    found, damaged = checkpoint.newest(folder)
    assert not damaged
    return int(found.facts["env_steps"])


@pytest.mark.parametrize("name", [checkpoint.ARRAYS, checkpoint.STATE, checkpoint.MANIFEST])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    options = TINY | {"learning_rate": 1e-3}  # a schedule would see how many steps are asked for
    train("a2c", **options, steps=640, run_dir=str(whole))
    train("a2c", **options, steps=448, run_dir=str(folder))
    file = folder / "checkpoints/000000000448" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    resume(folder, steps=640)
    said = capsys.readouterr().err
    assert str(file) in said
    assert "going back to the checkpoint at step 384" in said
    notes = [event["text"] for event in events(folder, "resume_note")]
    assert str(file) in notes[0]
    assert (folder / "checkpoints/damaged-000000000448").is_dir()  # kept, for whoever wants to look
    assert events(folder, "resume")[0]["env_steps"] == 384
    check_same(left_in(whole), left_in(folder))


# -- wrong use -------------------------------------------------------------------------------------


def test_another_network(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train("a2c", **TINY, steps=64, run_dir=str(folder))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("hidden = [\n    16", "hidden = [\n    32"))
    with pytest.raises(WorkerError) as error:
        resume(folder, steps=640)
    named = r"algorithm/shapes/\S+ is \[.*16.*\], and \[.*32.*\] is expected"
    assert re.search(named, str(error.value)), error.value
    assert newest_step(folder) == 64  # untouched


def test_a_folder_in_use_and_others_that_are_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train("a2c", **TINY, steps=64, run_dir=str(folder))
    with RunLock(folder), pytest.raises(ConfigError, match="is in use by process"):
        resume(folder, steps=128)
    with pytest.raises(ConfigError, match="already holds a run"):
        train("a2c", **TINY, steps=64, run_dir=str(folder))
    with pytest.raises(ConfigError, match=f"manyhands resume {folder}"):
        RunFolder(folder).open(build("a2c", **TINY, steps=64, run_dir=str(folder)))
    with pytest.raises(ConfigError, match=r"holds no config\.toml"):
        resume(tmp_path)
    with pytest.raises(ConfigError, match="num_envs cannot change"):
        resume(folder, num_envs=8)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        resume(folder, steps=128)


def test_a_run_that_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    options = TINY | {"target_return": 5.0, "rollout_length": 128, "checkpoint_seconds": 60.0}
    assert train("a2c", **options, steps=20_000, run_dir=str(folder)).solved
    left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["resume", str(folder)]) == 0
    assert "is solved, after" in capsys.readouterr().out
    assert left == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    steps = summary(folder)["env_steps"] + 512
    assert main(["resume", str(folder), "--target-return", "none", "--steps", str(steps)]) == 0
    assert (summary(folder)["exit"], summary(folder)["env_steps"]) == ("finished", steps)
    assert main(["resume", str(folder)]) == 0
    assert f"manyhands resume {folder} --steps {2 * steps}" in capsys.readouterr().out
    (folder / "summary.json").unlink()  # killed between the last checkpoint and the last words
    (folder / "policy.safetensors").unlink()
    assert main(["resume", str(folder)]) == 0
    assert summary(folder)["exit"] == "finished"
    assert (folder / "policy.safetensors").is_file()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"env": "resume_programs:forgetful"}, "does not repeat"),
        ({"env_backend": "vector"}, "cannot be put back into the middle of an episode"),
    ],
)
def test_what_cannot_be_put_back_is_said(
    more: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    options = TINY | {"workers": 2, "normalize_rewards": True} | more
    train("a2c", **options, steps=192, run_dir=str(folder))
    assert resume(folder, steps=384).summary["env_steps"] >= 384
    err = capsys.readouterr().err
    assert said in err
    assert "worker 1: " in err
    assert said in events(folder, "resume_note")[0]["text"]
