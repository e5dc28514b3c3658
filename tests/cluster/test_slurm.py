"""Batch files of `--slurm` on a real slurmctld with two nodes: told, saved, resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.cli.main import main

NEEDED = ("munged", "slurmctld", "slurmd")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TRAIN = ["train", "ppo", "--env", "CartPole-v1", "-n", "2", "--steps", "1e8", "--quiet"]
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
SlurmUser=root
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdLogFile={home}/slurmd-%n.log
SlurmdSpoolDir={home}/spool-%n
StateSaveLocation={home}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
MessageTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def program(name: str) -> str:
    return shutil.which(name, path=SBIN) or ""


def wait_for(what: Callable[[], object], seconds: float, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.5)


def ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()


def steps_left(number: str) -> list[str]:
    """SLURM's own processes for parts of a job."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(file.read_bytes().decode(errors="replace"))
    return [words for words in found if words.startswith(f"slurmstepd: [{number}.")]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes on this machine, of one processor each, and what their daemons are told."""
    if missing := [name for name in NEEDED if not program(name)]:
        pytest.skip(
            f"{missing[0]} is not here: apt-get install slurmctld slurmd slurm-client munge"
        )
    if os.getuid() != 0:
        pytest.skip("slurmd must be root to start jobs")
    home = tmp_path_factory.mktemp("slurm")
    for folder in (home, *home.parents[:2]):  # munge trusts no folder that others may write
        folder.chmod(0o755)
    (home / "state").mkdir()
    key = home / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().split(".")[0]
    (home / "slurm.conf").write_text(CONF.format(home=home, host=host, ports=free_ports(3)))
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    files = {"key-file": key} | {f"{n}-file": home / f"munge.{n}" for n in ("pid", "log", "seed")}
    munge = [f"--{name}={path}" for name, path in files.items()]
    daemons = [
        [program("munged"), "--foreground", "--force", f"--socket={home}/munge.socket", *munge],
        [program("slurmctld"), "-D"],
        *([program("slurmd"), "-D", "-N", node] for node in ("n1", "n2")),
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            with open(home / "daemons.log", "ab") as log:
                running.append(subprocess.Popen(words, stdout=log, stderr=log))
            if words is daemons[0]:
                said = (home / "daemons.log").read_text
                wait_for((home / "munge.socket").exists, 30, said)
        idle = lambda: ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2"  # noqa: E731
        wait_for(idle, 120, lambda: ask("sinfo") + (home / "daemons.log").read_text())
        yield home
    finally:
        ask("scancel", "--user=root")
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)
        patch.undo()


def events(run: Path, kind: str) -> list[dict[str, object]]:
    file = run / "events.jsonl"
    rows = [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["event"] == kind]


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(rows[-1])["env_steps"]) if rows else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["torch", "mpi", "ray"])
def test_told_saved_queued_again_and_resumed(
    slurm: Path, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"mpi": "mpi4py"}.get(engine, engine))
    monkeypatch.chdir(tmp_path)
    job = f"{engine}.sbatch"
    assert main([*TRAIN, "--engine", engine, "--nodes", "2", "--slurm", job]) == 0
    number = ask("sbatch", "--parsable", job)
    run = tmp_path / "runs" / f"slurm-{number}"

    def said() -> str:
        logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("*.log")))
        return ask("squeue") + ask("scontrol", "show", "job", number) + logs[-6000:]

    try:
        wait_for(lambda: steps_of(run) > 0, 240, said)
        ask("scancel", "--signal=USR1", "--batch", number)  # as SLURM does before the time is up
        wait_for(lambda: events(run, "end"), 120, said)
        saved = events(run, "end")[-1]
        assert saved["exit"] == "stopped: SIGUSR1"
        wait_for(lambda: ask("squeue", "-h", "-j", number, "-o", "%T") == "PENDING", 120, said)
        # SLURM waits two minutes, so that all of the job has ended; we look instead.
        wait_for(lambda: not steps_left(number), 120, said)
        wait_for(lambda: ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 120, said)
        ask("scontrol", "update", f"jobid={number}", "StartTime=now")
        wait_for(lambda: events(run, "resume"), 240, said)
        assert events(run, "resume")[-1]["env_steps"] == saved["env_steps"]
        wait_for(lambda: steps_of(run) > int(str(saved["env_steps"])), 240, said)
        if engine != "ray":  # whose nodes get the signal too
            ends = len(events(run, "end"))
            ask("scontrol", "requeue", number)  # as preemption: SIGTERM, and back into the queue
            wait_for(lambda: len(events(run, "end")) > ends, 120, said)
            assert events(run, "end")[-1]["exit"] == "stopped: SIGTERM"
    finally:
        ask("scancel", number)
        wait_for(lambda: not ask("squeue", "-h", "-j", number), 120, said)


@pytest.mark.parametrize("engine", ["local", "torch", "mpi", "ray"])
def test_batch_files_are_shell_and_say_what_they_start(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    nodes = "1" if engine == "local" else "2"
    own = ["launch", "-n", "4", "--engine", engine, "--nodes", nodes, "--slurm", "own.sbatch"]
    assert main([*own, "mine.py", "--name", "two words"]) == 0
    ready = [*TRAIN[:-1], "--engine", engine, f"--nodes={nodes}", "--run-dir", "runs/mine"]
    assert main([*ready, "--slurm=job.sbatch"]) == 0
    assert "type: sbatch job.sbatch" in capsys.readouterr().out
    texts = [(tmp_path / name).read_text() for name in ("own.sbatch", "job.sbatch")]
    for text in texts:
        done = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        assert f"#SBATCH --nodes={nodes}\n" in text
        assert f"PATH={os.path.dirname(sys.executable)}:$PATH" in text
    assert "mine.py --name 'two words'" in texts[0]
    assert "\nrun=runs/mine\n" in texts[1]
    assert texts[1].count("runs/mine") == 1
    each = {"local": "cpus-per-task=2", "ray": "cpus-per-task=1"}
    assert f"#SBATCH --{each.get(engine, 'ntasks-per-node=1 ')}" in texts[1]
    assert main([*own, "mine.py"]) == 2  # it may have been edited
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "torch", "--nodes", "3", "--slurm", "x"], "type: --nodes 3 --workers 3"),
        (["--engine", "local", "--nodes", "2", "--slurm", "x"], "type: --engine torch"),
        (["--engine", "inline", "--slurm", "x"], "choose local, torch, mpi, ray"),
        (["--nodes", "2"], "--nodes 2 goes with --slurm FILE"),
        (["--nodes", "two", "--slurm", "x"], "--nodes two is not a whole number"),
        (["--nodes", "0", "--slurm", "x"], "do not divide by --nodes 0; type: --nodes 1"),
        (["--slurm"], "--slurm needs a value"),
        (["--slurm", "/nowhere/at/all"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("local", "launch -n 2 --engine local --timeout 7 --threads 3 --debug-collectives mine.py"),
        ("torch", "command=(env MANYHANDS_TIMEOUT=7 MANYHANDS_DEBUG=1 python mine.py)"),
    ],
)
def test_every_option_of_launch_is_in_the_batch_file(
    engine: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    own = ["launch", "-n", "2", "--engine", engine, "--timeout", "7", "--threads", "3"]
    assert main([*own, "--debug-collectives", "--slurm", "own.sbatch", "mine.py"]) == 0
    text = (tmp_path / "own.sbatch").read_text()
    assert said in text
    assert f"#SBATCH --cpus-per-task={6 if engine == 'local' else 3}\n" in text
    assert "export OMP_NUM_THREADS=3 " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "SLURM gives tasks their GPUs; see --gpus-per-task in the file"),
        (["--engine", "ray", "--address", "a:1"], "the batch file starts Ray on its own nodes"),
    ],
)
def test_what_slurm_does_itself_is_said(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    assert main(["launch", "-n", "2", *words, "--slurm", "own.sbatch", "mine.py"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "own.sbatch").exists()
