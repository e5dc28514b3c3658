"""What goes wrong between hosts: it works all the same, or is said by name within seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import engine_params
from hosts import Cluster, Host, ended
from test_several_hosts import BIN, OVER_TCP

pytestmark = [pytest.mark.usefixtures("nothing_left")]
ENGINES = engine_params("mpi", "torch")
QUICK = 45.0  # seconds: 15 on a quiet machine, and not the minutes of torch's and MPI's own limits
SCRIPT = """\
from manyhands import Parallel

par = Parallel(timeout=60)
print("mean", par.mean(float(par.rank)), flush=True)
"""


def start(cluster: Cluster, engine: str, words: list[str]) -> list[subprocess.Popen[str]]:
    """As mpiexec does, and as torchrun does, without its own two seconds."""
    python = [sys.executable, *words]
    if engine == "mpi":
        names = cluster.folder / "hostfile"
        names.write_text("alpha\nbeta\ngamma\n")
        ssh = ["-launcher", "ssh", "-launcher-exec", str(cluster.rsh), "-f", str(names)]
        return [cluster.login.start([str(BIN / "mpiexec"), *ssh, "-n", "3", *python], OVER_TCP)]
    common = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "alpha", "MASTER_PORT": "29511"}
    return [h.start(python, common | {"RANK": str(r)}) for r, h in enumerate(cluster.three)]


def run(cluster: Cluster, engine: str, words: list[str]) -> tuple[int, str]:
    began = time.monotonic()
    ends = [ended(process) for process in start(cluster, engine, words)]
    assert time.monotonic() - began < QUICK
    return max(code for code, _ in ends), "".join(said for _, said in ends)


@contextmanager
def laid_over(host: Host, path: Path, content: Path) -> Iterator[None]:
    """On that host, another file lies in the place of one."""
    host.call("mount", "--bind", str(content), str(path))
    try:
        yield
    finally:
        host.call("umount", str(path))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_own_names_that_lead_nowhere(
    engine: str, hosts: Cluster, script: Path, tmp_path: Path
) -> None:
    """127.0.1.1, as Debian has it, on two of them; the third does not know its own name."""
    with ExitStack() as stack:
        for host in hosts.three:
            lines = [x for x in hosts.names.read_text().splitlines() if host.name not in x]
            lines += [] if host.name == "beta" else [f"127.0.1.1 {host.name}"]
            own = tmp_path / host.name
            own.write_text("\n".join(lines) + "\n")
            stack.enter_context(laid_over(host, Path("/etc/hosts"), own))
        code, said = run(hosts, engine, [str(script)])
    assert code == 0, said
    assert said.count("mean 1.0") == 3
    assert engine == "mpi" or "by eth0, 10.77.0.1" in said


@pytest.mark.parametrize("engine", ENGINES)
def test_another_version_of_the_script(
    engine: str, hosts: Cluster, script: Path, tmp_path: Path
) -> None:
    older = tmp_path / "older.py"
    older.write_text(SCRIPT.replace("mean", "sum"))
    with laid_over(hosts.beta, script, older):
        code, said = run(hosts, engine, [str(script)])
    assert code != 0
    assert "workers do not all run the same:\n  the script:\n" in said
    for rank, host in enumerate(("alpha", "beta", "gamma")):
        assert f"worker {rank} of 3 on {host}: {script} (" in said
    assert "mean 1.0" not in said


@pytest.mark.parametrize("engine", engine_params("torch"))
def test_who_cannot_reach_whom(engine: str, hosts: Cluster, script: Path) -> None:
    """All reach the first host; two of them do not reach each other. (MPICH's MPI_Init itself does
    not return then: what ends it is its watchdog.)"""
    hosts.beta.call("ip", "route", "add", "blackhole", hosts.gamma.address)
    try:
        code, said = run(hosts, engine, [str(script)])
    finally:
        hosts.beta.call("ip", "route", "del", "blackhole", hosts.gamma.address)
    assert code != 0
    assert "not all hosts reach each other" in said
    assert "beta cannot reach gamma at 10.77.0.3" in said
    assert "alpha cannot" not in said
