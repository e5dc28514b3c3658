"""A worker that acts raises, exits, is killed, goes silent: it costs its share, and is told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ours
from resume_programs import start, summary, until
from test_async_faults import ranks_of

import manyhands as mh
from manyhands.config import build, validate
from manyhands.engines import base, recovery, supervisor
from manyhands.engines.base import Patience
from manyhands.errors import WorkerError
from manyhands.experiment import checkpoint

pytestmark = [pytest.mark.usefixtures("nothing_left")]
TESTS = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def programs_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))


# -- parts -----------------------------------------------------------------------------------------


def test_time_asleep_is_not_time_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(base.time, "perf_counter", lambda: now[0])
    patience = Patience(60.0)
    for _ in range(59):
        now[0] += 0.9
        assert not patience.over
    now[0] += 3600.0  # the lid was closed
    assert not patience.over
    assert patience.waited == pytest.approx(59 * 0.9 + 1.0)
    for _ in range(7):
        now[0] += 1.0
        patience.waited  # noqa: B018 (a look)
    assert patience.over


def test_pauses_double_and_a_crash_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    restart = recovery.Restart([], {})
    pauses = []
    for _ in range(3):
        assert restart.allowed(3)
        assert restart.due is not None
        pauses.append(restart.due - now[0])
        now[0] += 10.0
    assert pauses == pytest.approx([0.1, 0.2, 0.4])
    assert not restart.allowed(3)
    assert restart.span == 30.0
    now[0] += 61.0  # long ago: forgotten
    assert restart.allowed(3)


def test_a_worker_that_hangs_at_every_start_is_a_crash_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its deaths are further apart than the window in which they count."""
    now = [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    restart = recovery.Restart([], {})
    for _ in range(3):
        now[0] += 2.0 + 300.0
        assert restart.allowed(3, silent=300.0)
    now[0] += 2.0 + 300.0
    assert not restart.allowed(3, silent=300.0)
    assert restart.span == pytest.approx(3 * 302.0)
    now[0] += 61.0 + 300.0  # a minute in which all went well: forgotten
    assert restart.allowed(3, silent=300.0)


def test_output_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    marked = supervisor.label("actor 1")
    line = b"x" * 1023 + b"\n"
    shown = sum(len(marked(line)) for _ in range(10_000))
    assert shown < 2 * supervisor.SHOWN_BYTES
    now[0] += 2.0
    said = marked(b"on\n")
    assert b"bytes are not shown" in said
    assert said.endswith(b"[actor 1] on\n")


def test_who_recovers() -> None:
    def run(algorithm: str, **options: Any) -> Any:
        return build(algorithm, env="CartPole-v1", workers=4, num_envs=6, **options)

    assert run("impala").run.recovery == "restart"
    assert run("ppo", strategy="gather").run.recovery == "stop"
    assert run("ppo", strategy="gather", wait_for=0.8).run.recovery == "restart"
    assert run("ppo", strategy="gather", wait_for=0.8).run.actors == 3
    asked = run("ppo", on_worker_failure="restart")
    fault = validate.faults(asked)[0]
    assert "type: --strategy gather" in fault
    (fault,) = validate.faults(run("ppo", strategy="gather", wait_for=1.5))
    assert "above 0 and up to 1" in fault
    (fault,) = validate.faults(run("impala", on_worker_failure="continue", min_workers=9))
    assert "only 3 act" in fault


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_never_saved(value: float, tmp_path: Path) -> None:
    """A hook spoils one weight: the update ends with its name, and the disk has the one before."""
    folder = tmp_path / "run"

    class Spoil:
        def on_update(self, run: Any) -> None:
            if run.updates == 2:
                run._context.algorithm.flat.data[0] = value

    with pytest.raises(WorkerError, match="weights are NaN or infinite"):
        mh.train("a2c", env="CartPole-v1", engine="inline", steps=2000, hooks=Spoil(), quiet=True,
                 run_dir=str(folder), tensorboard=False, checkpoint_seconds=0.0)  # fmt: skip
    found = checkpoint.newest(folder)[0]
    assert found.facts["update"] == 1
    weights = torch.as_tensor(found.state["algorithm"]["weights"])
    assert torch.isfinite(weights).all()


# -- runs ------------------------------------------------------------------------------------------


def train(folder: Path, algorithm: str, how: dict[str, str], **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "workers": 3, "num_envs": 4, "rollout_length": 64, "steps": 6000, "log_every": 10,
        "quiet": True, "tensorboard": False, "env": "async_programs:faulty_cartpole",
        "env_kwargs": {"how": how},
    }  # fmt: skip
    return mh.train(algorithm, run_dir=str(folder), **(options | more)).summary


def faults(folder: Path) -> list[dict[str, Any]]:
    """The faults that the launcher has noticed, in order of workers."""
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    found = [event for event in events if event["event"] == "worker_fault"]
    return sorted(found, key=lambda event: int(event["worker"]))


def test_gather_outlives_its_workers(tmp_path: Path, capfd: Any) -> None:
    """Of three that act one raises and one is killed by a fault in native code. Both come back."""
    ended = train(
        tmp_path / "run", "ppo", {"1": "raise", "3": "segfault"}, strategy="gather", workers=4,
        num_envs=12, on_worker_failure="restart", steps=16_000,
    )  # fmt: skip
    assert ended["exit"] == "finished"
    raised, killed = faults(tmp_path / "run")
    assert (raised["kind"], raised["worker"], raised["action"]) == ("raised", 1, "restart")
    assert raised["what"] == "raised RuntimeError: failed on purpose"
    assert "in step" in raised["traceback"]
    assert (killed["kind"], killed["worker"], killed["signal"]) == ("killed", 3, "SIGSEGV")
    assert "async_programs.py" in killed["traceback"]  # where in Python it was
    said = capfd.readouterr().err
    assert "it is started again (restart 1)" in said
    assert "RuntimeError: failed on purpose" in said
    assert ended["lost_fragments"] >= 2


SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "actor_learner": ("impala", {}),
    "gradient_server": ("a2c", {"strategy": "gradient_server"}),
    "apex": ("dqn", {"strategy": "apex", "learning_starts": 200}),
    "gather": ("ppo", {"strategy": "gather"}),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SLOW)
@pytest.mark.parametrize("how", ["raise", "leave", "leave at once", "segfault", "kill"])
def test_whatever_ends_a_worker(case: str, how: str, tmp_path: Path) -> None:
    algorithm, options = SLOW[case]
    options = {"on_worker_failure": "restart"} | options
    ended = train(tmp_path / "run", algorithm, {"2": how}, **options)
    assert ended["exit"] == "finished"
    (fault,) = faults(tmp_path / "run")
    assert (fault["worker"], fault["action"]) == (2, "restart")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SLOW)
def test_without_it(case: str, tmp_path: Path) -> None:
    algorithm, options = SLOW[case]
    options = options | {"on_worker_failure": "continue"}
    ended = train(tmp_path / "run", algorithm, {"2": "raise"}, **options)
    assert (ended["exit"], ended["restarts"]) == ("finished", 0)
    (fault,) = faults(tmp_path / "run")
    assert fault["action"] == "continue"
    with pytest.raises(WorkerError, match="--min-workers is 2"):
        train(tmp_path / "too few", algorithm, {"2": "raise"}, **options, min_workers=2)
    (fault,) = faults(tmp_path / "too few")
    assert fault["action"] == "stop"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wait_for", [0.5, 1.0])  # the others go on, or wait until it is found
@pytest.mark.parametrize("how", ["freeze", "sleep", "hold the lock"])
def test_a_silent_worker_says_where_it_was(how: str, wait_for: float, tmp_path: Path) -> None:
    ended = train(
        tmp_path / "run", "ppo", {"2": how}, strategy="gather", on_worker_failure="restart",
        timeout=20.0, steps=10_000, wait_for=wait_for,
    )  # fmt: skip
    assert ended["exit"] == "finished"
    (fault,) = faults(tmp_path / "run")
    assert fault["kind"] == ("stuck" if how == "sleep" else "silent")
    assert "async_programs.py" in fault["traceback"]
    assert "in fail" in fault["traceback"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"gave up after 2 restarts .*(.|\n)*failed on purpose"):
        train(
            tmp_path / "run", "impala", {"2": "raise"}, max_restarts=2, steps=10_000_000,
            env_kwargs={"how": {"2": "raise"}, "always": True},
        )  # fmt: skip
    assert [fault["action"] for fault in faults(tmp_path / "run")] == ["restart", "restart", "stop"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_killed_actor_is_noticed_at_once_and_costs_its_share(tmp_path: Path) -> None:
    """Four actors whose steps take their time without work for the processor: until the one is
    back, three quarters of the throughput are left."""
    folder = tmp_path / "run"
    process = start(
        "train", "impala", "--env", "async_programs:waiting_cartpole", "--env-kwargs",
        "seconds=0.004", "-n", "5", "--num-envs", "4", "--hidden", "8", "--rollout-length", "5",
        "--log-every", "1", "--steps", "1e8", "--run-dir", str(folder), "--quiet",
        "--no-tensorboard",
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, process)
    time.sleep(5.0)
    killed = time.time()
    os.kill(ranks_of(process.pid)[3], signal.SIGKILL)
    until(lambda: faults(folder), process)
    (fault,) = faults(folder)
    until(lambda: told(folder, "restart"), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=150)
    assert summary(folder)["exit"] == "stopped: SIGTERM"
    (begun,), (back,) = told(folder, "start"), told(folder, "restart")
    at = killed - begun["time"] + begun["wall_seconds"]
    before, without = speed(metrics, at - 4.0, at), speed(metrics, at, back["wall_seconds"])
    noticed, down = fault["time"] - killed, back["time"] - killed
    print(
        f"noticed after {1000 * noticed:.0f} ms; {before:.0f} steps/s, without it {without:.0f} "
        f"({without / before:.0%}) for {down:.1f} s"
    )
    assert noticed < 1.0  # 0.1 on a machine that is not busy
    assert without > 0.4 * before  # 0.75, if what starts the new one costs nothing


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SLOW)
def test_all_that_act_are_killed_at_once(case: str, tmp_path: Path) -> None:
    """Nobody is left who acts; all are started again, and the run goes on."""
    algorithm, options = SLOW[case]
    folder, options = tmp_path / "run", {"on_worker_failure": "restart"} | options
    more = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
    process = start(
        "train", algorithm, *more, "--env", "CartPole-v1", "-n", "3", "--num-envs", "4", "--steps",
        "1e8", "--run-dir", str(folder), "--quiet", "--no-tensorboard", "--timeout", "100",
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, process)
    acting = [pid for rank, pid in ranks_of(process.pid).items() if rank]
    assert len(acting) == 2
    for pid in acting:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(told(folder, "restart")) == 2, process)
    before = metrics.stat().st_size
    until(lambda: metrics.stat().st_size > before + 1000, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=150)
    assert summary(folder)["exit"] == "stopped: SIGTERM", said
    assert [(f["worker"], f["signal"]) for f in faults(folder)] == [(1, "SIGKILL"), (2, "SIGKILL")]


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    return [event for event in events if event["event"] == kind]


def speed(metrics: Path, begin: float, end: float) -> float:
    """Steps a second between two moments of a run."""
    rows = [json.loads(line) for line in metrics.open()]
    rows = [row for row in rows if begin <= row["wall_seconds"] <= end]
    seconds = rows[-1]["wall_seconds"] - rows[0]["wall_seconds"]
    return float((rows[-1]["env_steps"] - rows[0]["env_steps"]) / seconds)


def send_to_all(number: signal.Signals) -> None:
    """mpiexec and Ray have process groups of their own."""
    for pid in ours():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def marks_of(engine: str) -> list[Any]:
    return [getattr(pytest.mark, engine)] if engine in ("mpi", "ray") else []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "case"),
    [
        *(("local", case) for case in ("allreduce", *SLOW)),
        *(pytest.param(e, "allreduce", marks=marks_of(e)) for e in ("mpi", "torch", "ray")),
        pytest.param("ray", "actor_learner", marks=marks_of("ray")),
    ],
)
def test_a_laptop_that_sleeps(engine: str, case: str, tmp_path: Path) -> None:
    """All processes are stopped for longer than any wait may take."""
    algorithm, options = SLOW.get(case, ("ppo", {}))
    more = [f"--{k.replace('_', '-')}={v}" for k, v in options.items()]
    process = start(
        "train", algorithm, *more, "--env", "CartPole-v1", "-n", "3", "--num-envs", "6", "--steps",
        "1e8", "--run-dir", str(tmp_path / "run"), "--quiet", "--no-tensorboard", "--timeout", "60",
        "--engine", engine,
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, process)
    send_to_all(signal.SIGSTOP)
    time.sleep(90)
    before = metrics.stat().st_size
    send_to_all(signal.SIGCONT)
    until(lambda: metrics.stat().st_size > before + 2000, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=150)
    assert summary(tmp_path / "run")["exit"] == "stopped: SIGTERM", said
    assert not faults(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gather_does_not_wait_for_the_slowest(tmp_path: Path) -> None:
    """One of four takes ten times as long: its rows come late, and are learned from then."""
    ended = train(
        tmp_path / "run", "ppo", {}, strategy="gather", workers=5, num_envs=4, wait_for=0.7,
        env="async_programs:waiting_cartpole", env_kwargs={"seconds": 0.002, "times": 10.0},
        log_every=1,
    )  # fmt: skip
    assert ended["exit"] == "finished"
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert max(record["lag_max"] for record in records) > 0
    assert not faults(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_ppo_solves_cartpole_that_crashes(seed: int, tmp_path: Path) -> None:
    ended = train(
        tmp_path / "run", "ppo", {}, strategy="gather", workers=4, num_envs=6, seed=seed,
        env="async_programs:crashing_cartpole", env_kwargs={}, on_worker_failure="restart",
        wait_for=0.6, max_restarts=1000, rollout_length=128, steps=1_000_000, target_return=450.0,
    )  # fmt: skip
    found = faults(tmp_path / "run")
    print(f"seed {seed}: {ended['env_steps']:,} steps, {len(found)} crashes")
    assert ended["exit"] == "solved"
    assert len(found) > 5
