"""A host dies, or its link is down for a while: who can goes on, and nothing is lost in silence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from conftest import engine_params
from hosts import Cluster, ended
from ray_hosts import PORT, ray_cluster
from test_several_hosts import start
from training_programs import configuration, read_run

from manyhands.config import from_plain
from manyhands.run import train_experiment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left", "mended")]
SECONDS = 240.0  # for what takes a quarter of it on a quiet machine
COMMON = ["--env", "CartPole-v1", "--no-tensorboard", "--checkpoint-seconds", "1"]
SYNCHRONOUS = ["-m", "manyhands", "train", "ppo", *COMMON, "--strategy", "gather", "--num-envs",
               "6", "--rollout-length", "32", "--minibatch", "64", "--seed", "1"]  # fmt: skip


@pytest.fixture
def mended(hosts: Cluster) -> Iterator[None]:
    yield
    for host in hosts.three:
        host.kill_processes()
        hosts.mend(host)


def wait_until(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not there():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"it does not come: {process.communicate()[0]}")
        time.sleep(0.1)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.ray
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("impala", []),
        ("dqn", ["--hidden", "16", "16", "--learning-starts", "500", "--updates-per-step", "0.1"]),
    ],
)
def test_an_asynchronous_run_goes_on(
    algorithm: str, words: list[str], hosts: Cluster, tmp_path: Path
) -> None:
    run = ["-m", "manyhands", "train", algorithm, *COMMON, *words, "--engine", "ray", "--workers",
           "3", "--num-envs", "4", "--address", f"alpha:{PORT}", "--steps", "50000000",
           "--run-dir", str(tmp_path / "run")]  # fmt: skip
    metrics, events = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "events.jsonl"
    with ray_cluster(hosts) as env:
        process = hosts.alpha.start([sys.executable, *run], env)
        wait_until(lambda: len(lines(metrics)) > 3, process)
        hosts.remove(hosts.gamma)
        wait_until(lambda: any(e["event"] == "restart" for e in lines(events)), process)
        steps = lines(metrics)[-1]["env_steps"]
        wait_until(lambda: lines(metrics)[-1]["env_steps"] > steps, process)
        process.send_signal(signal.SIGINT)
        _, said = ended(process, SECONDS)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == "stopped: SIGINT", said
    assert summary["restarts"] == 1
    assert "on gamma" in said
    assert "it is started again (restart 1)" in said
    if algorithm == "dqn":
        (lost,) = [e for e in lines(events) if e["event"] == "shard_lost"]
        assert lost["what"] == "keep"


@pytest.mark.ray
def test_a_host_that_is_gone_is_done_without(hosts: Cluster, tmp_path: Path) -> None:
    """Where workers come and go, on hosts of their own: nobody waits for the one that has left."""
    run = ["-m", "manyhands", "train", "impala", *COMMON, "--engine", "ray", "--workers", "2..4",
           "--num-envs", "6", "--address", f"alpha:{PORT}", "--steps", "50000000",
           "--run-dir", str(tmp_path / "run")]  # fmt: skip
    metrics, events = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "events.jsonl"
    with ray_cluster(hosts) as env:
        process = hosts.alpha.start([sys.executable, *run], env)
        wait_until(lambda: len(lines(metrics)) > 3, process)
        hosts.remove(hosts.gamma)
        wait_until(lambda: any(e["event"] == "worker_left" for e in lines(events)), process)
        steps = lines(metrics)[-1]["env_steps"]
        wait_until(lambda: lines(metrics)[-1]["env_steps"] > steps, process)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = ended(process, SECONDS)
    assert time.monotonic() - began < 55.0, said  # a wait for the one that has left takes 60
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == "stopped: SIGINT", said
    assert summary["restarts"] == 0
    (left,) = [e for e in lines(events) if e["event"] == "worker_left"]
    assert (left["there"], left["most"]) == (2, 4)
    assert "did not say that they had finished" not in said


@pytest.mark.parametrize("engine", engine_params("mpi", "torch"))
def test_a_synchronous_run_ends_and_says_why(engine: str, hosts: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*SYNCHRONOUS, "--timeout", "8", "--steps", "50000000", "--run-dir", str(folder)]
    with ExitStack() as stack:
        processes = start(hosts, engine, words, stack)
        wait_until(lambda: len(list(folder.glob("checkpoints/*"))) > 1, processes[0])
        hosts.remove(hosts.gamma)
        began = time.monotonic()
        code, said = ended(processes[0], SECONDS)
        for process in processes[1:]:
            ended(process, SECONDS)
    assert code != 0
    assert time.monotonic() - began < 60.0  # the deadline, and what it takes to end
    assert "on gamma" in said, said
    assert list(folder.glob("checkpoints/*"))


@pytest.mark.parametrize("engine", engine_params("mpi", "torch"))
def test_a_link_that_is_down_for_five_seconds(engine: str, hosts: Cluster, tmp_path: Path) -> None:
    """The run has the parameters of one machine's: no row was lost, and none came twice."""
    steps = 6 * 32 * 300
    words = [*SYNCHRONOUS, "--steps", str(steps), "--run-dir", str(tmp_path / "run")]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ExitStack() as stack:
        processes = start(hosts, engine, words, stack)
        wait_until(lambda: len(lines(metrics)) > 3, processes[0])
        hosts.cut(hosts.gamma)
        before = len(lines(metrics))
        time.sleep(5.0)
        assert len(lines(metrics)) <= before + 2  # it did stand still
        hosts.mend(hosts.gamma)
        ends = [ended(process, SECONDS) for process in processes]
    assert max(code for code, _ in ends) == 0, ends
    more = {"rollout_length": 32, "minibatch": 64, "steps": steps, "epochs": 10, "seed": 1}
    case = configuration("ppo", "gather", "inline", 3, str(tmp_path / "inline"), **more)
    train_experiment(from_plain(case))
    there, here = read_run(tmp_path / "run"), read_run(tmp_path / "inline")
    assert there.summary["env_steps"] == here.summary["env_steps"] == steps
    for key, value in here.policy.items():
        np.testing.assert_allclose(there.policy[key], value, rtol=1e-5, atol=1e-5, err_msg=key)
