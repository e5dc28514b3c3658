"""A sweep of real processes, two at once: Ctrl-C, a kill, runs that fail, and the same table as if
nothing had happened.

One sweep goes through all of it, since every run imports torch: two runs that go well, and two of a
setting that fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import manyhands as mh
from manyhands.viewing import scores

SECONDS = 120.0  # for anything that must happen, on a machine at twice its load

ENV = """\
import os, time
from gymnasium.envs.classic_control import CartPoleEnv

class Env(CartPoleEnv):
    '''Slow until a file says go; where it should fail, it does so in its hundredth step.'''

    def __init__(self, fails=False, slow=True):
        super().__init__()
        self.fails, self.slow, self.steps = fails, slow, 0

    def step(self, action):
        self.steps += 1
        if self.fails and self.steps >= 100:
            raise RuntimeError("the pole is broken")
        if self.slow and not os.path.exists("go"):
            time.sleep(0.005)
        return super().step(action)
"""
OPTIONS = {"steps": 1024, "num_envs": 2, "rollout_length": 32, "minibatch": 32, "epochs": 2,
           "checkpoint_seconds": 0.0, "tensorboard": False}  # fmt: skip
FAILS = "env_kwargs.fails"


def words(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        found += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return found


@contextlib.contextmanager
def started(folder: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """The command, which is gone at the end whatever happens."""
    command = [sys.executable, "-m", "manyhands", *argv]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def until(there: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    while not there():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("[0-9]*"))


def test_stopped_killed_and_failed_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep_env.py").write_text(ENV)
    sweep = tmp_path / "swept"
    good = [sweep / f"{FAILS}=false" / f"seed-{seed}" for seed in (1, 2)]
    bad = [sweep / f"{FAILS}=true" / f"seed-{seed}" for seed in (1, 2)]

    # Ctrl-C: both runs save, and the words say how to go on.
    argv = f"sweep ppo --env sweep_env:Env --grid {FAILS}=false,true --seeds 1..2 --at-once 2"
    with started(tmp_path, *argv.split(), *words(OPTIONS), "--dir", "swept") as process:
        until(lambda: all(map(has_checkpoint, good)), process)
        assert not any(run.exists() for run in bad)  # two at once, and no more
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 130, said
    assert "SIGINT: 2 runs save and stop; press again to stop now" in said
    assert "0 of 4 runs have finished. To continue, type: manyhands resume swept" in said
    for run in good:
        assert json.loads((run / "summary.json").read_text())["exit"] == "stopped: SIGTERM"
    assert not (sweep / "results.json").exists()

    # Killed while two others run: these end too, at once.
    (tmp_path / "go").touch()
    with started(tmp_path, "resume", "swept", "--at-once", "2") as process:
        until(lambda: any((run / "output.txt").exists() for run in bad), process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.kill()
        until(lambda: not any(c.is_running() and c.status() != "zombie" for c in children))
    done = [run for run in good if (run / "summary.json").exists()]
    assert done
    before = {run: (run / "summary.json").stat().st_mtime_ns for run in done}

    # To the end: what has finished is not repeated, what fails does not stop the others.
    with started(tmp_path, "resume", "swept", "--at-once", "2") as process:
        said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 1, said
    assert {run: (run / "summary.json").stat().st_mtime_ns for run in done} == before
    for seed in (1, 2):
        line = f"{FAILS}=true, seed {seed}: RuntimeError: the pole is broken"
        assert f"failed    {line}" in said
    assert "To try them again, type: manyhands resume swept" in said
    assert (sweep / "curves.png").stat().st_size > 10_000
    assert not list(sweep.glob("**/planned.toml"))

    # The same table as of runs that nobody stopped.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    results = json.loads((sweep / "results.json").read_text())
    for run in good:
        mh.train("ppo", env="sweep_env:Env", engine="inline", quiet=True,
                 env_kwargs={"fails": False}, seed=int(run.name[-1]),
                 run_dir=str(Path("whole", run.relative_to(sweep))), **OPTIONS)  # fmt: skip
        whole = Path("whole", run.relative_to(sweep), "policy.safetensors")
        assert (run / "policy.safetensors").read_bytes() == whole.read_bytes()
    rows = [{k: row[k] for k in ("run", "setting", "seed", "env", "state", "error")}
            for row in results["runs"]]  # fmt: skip
    assert scores.rank(Path("whole"), rows, "final") == results
    best, last = results["settings"]
    assert (best["setting"], best["scored"]) == ({FAILS: False}, 2)
    assert (last["setting"], last["scored"], last["iqm"]) == ({FAILS: True}, 0, None)
    assert scores.table(results) in said
    _all_tools_know_it(sweep)


def _all_tools_know_it(sweep: Path) -> None:
    curves = mh.plot(sweep, sweep / "again.svg", x="steps").curves
    assert len(curves) == 2
    page = mh.report(sweep).path.read_text()
    assert page.count("the pole is broken") == 2
    assert "<td>0 of 2</td>" in page


@pytest.mark.slow
@pytest.mark.alone
def test_two_at_once_take_little_more_than_half_the_time(tmp_path: Path) -> None:
    """Nine runs on two cores; the tables are the same."""
    assert (os.cpu_count() or 1) >= 2
    argv = "sweep ppo --env CartPole-v1 --steps 81920 --grid gamma=0.9,0.98,0.99 --seeds 3"
    seconds, tables = {}, {}
    for at_once in (1, 2):
        began = time.monotonic()
        with started(
            tmp_path, *argv.split(), "--at-once", str(at_once), "--dir", f"{at_once}"
        ) as p:
            said = p.communicate(timeout=600)[0]
        assert p.returncode == 0, said
        seconds[at_once] = time.monotonic() - began
        tables[at_once] = (tmp_path / str(at_once) / "results.md").read_text()
    assert tables[1] == tables[2]
    assert seconds[2] <= 0.6 * seconds[1], seconds
