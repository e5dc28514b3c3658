"""`mpiexec -n 2 manyhands train`, also with `torchrun -m` and `srun`: one run on two workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_programs import folder_of

from manyhands.engines import inline, joined
from manyhands.errors import ConfigError
from manyhands.run import train

pytestmark = [pytest.mark.usefixtures("nothing_left")]

BIN = Path(sys.executable).parent
TRAIN = ["train", "ppo", "--env", "CartPole-v1", "--seed", "3", "--num-envs", "4",
         "--rollout-length", "32", "--minibatch", "64", "--steps", "256",
         "--no-tensorboard"]  # fmt: skip
MPIEXEC = [str(BIN / "mpiexec"), "-n", "2", sys.executable, "-m", "manyhands"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "manyhands"]  # fmt: skip
LAUNCHERS = [
    pytest.param("mpiexec", "mpi", id="mpiexec", marks=pytest.mark.mpi),
    pytest.param("torchrun", "torch", id="torchrun"),
    pytest.param("srun", "torch", id="srun"),
]


def start(launcher: str, words: list[str]) -> list[subprocess.Popen[str]]:
    """The processes that stand for one launch."""
    if launcher != "srun":
        command = MPIEXEC if launcher == "mpiexec" else TORCHRUN
        return [_process([*command, *words], {})]
    # SLURM itself is not here; srun sets these for each task of a step.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "77",
            "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": socket.gethostname(),
            "MASTER_PORT": port}  # fmt: skip
    command = [sys.executable, "-m", "manyhands", *words]
    return [
        _process(command, step | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)})
        for r in range(2)
    ]


def _process(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(processes: list[subprocess.Popen[str]]) -> tuple[int, str]:
    """(the worst exit code, everything that was printed)"""
    texts = []
    for process in processes:
        try:
            texts.append(process.communicate(timeout=100)[0])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"still running: {process.communicate()[0]}") from None
    return max(p.returncode for p in processes), "".join(texts)


def policy(folder: Path) -> bytes:
    return (folder / "policy.safetensors").read_bytes()


@pytest.mark.parametrize(("launcher", "engine"), LAUNCHERS)
def test_a_launchers_workers_make_one_run(launcher: str, engine: str, tmp_path: Path) -> None:
    """The same as one whose workers we have started ourselves, to the bit."""
    own, config = folder_of(engine, 2) / "ppo-allreduce", tmp_path / "config.toml"
    config.write_text((own / "config.toml").read_text().replace("quiet = true", "quiet = false"))
    words = ["train", "--config", str(config), "--run-dir", str(tmp_path / "joined")]
    code, said = end(start(launcher, words))
    assert code == 0, said
    assert said.count("training     ppo") == 1, said
    assert f"2, allreduce on the {engine} engine" in said
    summary = json.loads((tmp_path / "joined" / "summary.json").read_text())
    assert (summary["workers"], summary["engine"]) == (2, engine)
    assert summary["env_steps"] == 288
    assert not (tmp_path / "joined" / ".lock").exists()
    assert policy(tmp_path / "joined") == policy(own)

    # The engine is the launcher's, also where the run began on another.
    if launcher == "srun":
        code, said = end(start(launcher, ["resume", str(tmp_path / "joined"), "--steps", "384"]))
        assert code == 0, said
        assert json.loads((tmp_path / "joined" / "summary.json").read_text())["env_steps"] == 384
    else:
        ctrl_c_saves_and_says_so_once(launcher, tmp_path / "joined")


APART = {
    "actor_learner": ["impala"],
    "gradient_server": ["a2c", "--strategy", "gradient_server"],
    "apex": ["dqn", "--learning-starts", "32", "--batch-size", "16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["memory", "network"])
@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize(("launcher", "engine"), LAUNCHERS[:2])
def test_those_that_wait_for_nobody(
    launcher: str, engine: str, strategy: str, way: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One that acts and one that learns; then the run goes on where it was."""
    monkeypatch.setenv("MANYHANDS_PARTS", way)
    folder = tmp_path / "run"
    words = ["train", *APART[strategy], "--env", "CartPole-v1", "--num-envs", "2",
             "--rollout-length", "16", "--steps", "512", "--no-tensorboard"]  # fmt: skip
    code, said = end(start(launcher, [*words, "--run-dir", str(folder)]))
    assert code == 0, said
    assert f"), {strategy} on the {engine} engine" in said
    first = json.loads((folder / "summary.json").read_text())
    assert first["updates"] >= 3
    code, said = end(start(launcher, ["resume", str(folder), "--steps", "2048"]))
    assert code == 0, said
    assert json.loads((folder / "summary.json").read_text())["updates"] > first["updates"]


def ctrl_c_saves_and_says_so_once(launcher: str, folder: Path) -> None:
    """The run of three updates goes on, and is stopped while it does."""
    (process,) = start(launcher, ["resume", str(folder), "--steps", "50000000"])
    deadline, metrics = time.monotonic() + 100, folder / "metrics.jsonl"
    while metrics.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
    code, said = end([process])
    assert code != 0
    assert said.count("SIGINT: finishing this update, then saving") == 1, said
    assert said.count("To continue, type: manyhands resume") == 1, said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit"] == "stopped: SIGINT"
    steps = [json.loads(line)["env_steps"] for line in metrics.open()]
    assert steps == [96 * (n + 1) for n in range(len(steps))]  # without a break at 288
    assert steps[-1] == summary["env_steps"]


@pytest.mark.parametrize(("launcher", "engine"), LAUNCHERS[1:])
def test_another_number_of_workers_is_one_error(launcher: str, engine: str, tmp_path: Path) -> None:
    words = [*TRAIN, "--workers", "4", "--run-dir", str(tmp_path / "run")]
    code, said = end(start(launcher, words))
    assert code != 0
    assert said.count(f"{launcher} has started 2 workers, and --workers says 4") == 1, said
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
def test_what_does_not_go_with_mpiexec_is_said_once(tmp_path: Path) -> None:
    """But for inline. Runs of their own under one mpiexec, as a job array has them: what two of
    them may not share is their folder."""
    words = ["train", "ppo", "--env", "CartPole-v1", "--engine", "inline", "--workers", "1",
             "--num-envs", "4", "--rollout-length", "32", "--minibatch", "64", "--steps", "256",
             "--no-tensorboard", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    code, said = end(start("mpiexec", words))
    assert code == 2, said
    left = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["workers"] == 1
    words = [*TRAIN, "--engine", "torch", "--workers", "4", "--run-dir", str(tmp_path / "run")]
    code, said = end(start("mpiexec", words))
    assert code == 2, said
    assert said.count("2 workers of the mpi engine, and --engine says torch") == 1, said
    assert said.count("mpiexec has started 2 workers, and --workers says 4") == 1, said
    assert said.count("already holds a run") == 1, said
    assert left == {path: path.read_bytes() for path in left}


@pytest.fixture
def unattached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that nobody has called `Parallel()` in: other tests have, in this one."""
    monkeypatch.setattr(inline, "current", lambda: None)


@pytest.mark.usefixtures("unattached")
def test_alone_under_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n 1 manyhands train --workers 8` starts its own eight."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert joined.place_in("local") is None
    assert joined.is_main()
    assert list(joined.faults("local", 8)) == []


@pytest.mark.usefixtures("unattached")
@pytest.mark.parametrize(
    ("env", "name", "engine"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "torchrun", "torch"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpiexec", "mpi"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "mpiexec", "mpi"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "srun", "torch"),
    ],
)
def test_what_was_started_decides_what_was_not_typed(
    env: dict[str, str], name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert joined.defaults(None) == {"engine": engine, "workers": 2}
    assert joined.defaults("inline") == {}
    assert not joined.is_main()
    with pytest.raises(ConfigError, match=f"{name} has started 2 workers, and --workers says 3"):
        train("ppo", env="CartPole-v1", workers=3, num_envs=6)


@pytest.mark.usefixtures("unattached")
@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}, [2, 3, 3, 2]),  # one was late
        ({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, [3, 3, 2]),
        ({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, [2]),  # before we looked
    ],
)
def test_nobody_waits_when_the_main_worker_has_left(
    env: dict[str, str], seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    left = list(seen)
    monkeypatch.setattr(joined, "_started_here", lambda: left.pop(0))
    joined.let_main_speak()
    assert not left


def test_who_runs_beside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # as a worker that this process has started
    before = joined._started_here()
    sleeper = subprocess.Popen(["sleep", "100"])
    assert joined._started_here() == before + 1
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert joined._started_here() == before
    sleeper.wait()
