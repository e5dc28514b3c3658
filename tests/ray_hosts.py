"""A Ray cluster on the hosts of `hosts.py`: its head on the first, a node on each of the others."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hosts import Cluster, Host

RAY = str(Path(sys.executable).parent / "ray")
PORT = 6379


@contextlib.contextmanager
def ray_cluster(cluster: Cluster, cpus: int = 1, token: str = "") -> Iterator[dict[str, str]]:
    """Ray on all three; inside: the variables with which a driver on the first host finds it.

    A user's home is where Ray keeps its token, so this one has a home of its own.
    """
    home = Path(tempfile.mkdtemp(prefix="mh-", dir="/tmp"))  # short: for paths of unix sockets
    env = {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    if token:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(token)
    common = ["--num-cpus", str(cpus), "--object-store-memory", str(100 << 20), "--block"]
    common += ["--disable-usage-stats"]
    head, *others = cluster.three
    # CRUCIAL: a host has files of its own. In one folder for all, a node would lay the script's
    # folder anew while another's worker stands in it.
    (home / "ray").mkdir()
    for host in cluster.three:
        (home / host.name).mkdir()
        host.call("mount", "--bind", str(home / host.name), str(home / "ray"))
    started: list[subprocess.Popen[str]] = []
    try:
        words = ["--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir"]
        started.append(_started(head, [*words, str(home / "ray"), *common], env))
        # A second node has to be told that there is a token.
        mode = {"RAY_AUTH_MODE": "token"} if token else {}
        words = ["--address", f"{head.address}:{PORT}", *common]
        for host in others:
            started.append(_started(host, words, env | mode))
        yield env
    finally:
        for host in cluster.three:
            host.kill_processes()
        for process in started:
            process.communicate()
        shutil.rmtree(home, ignore_errors=True)


def _started(host: Host, words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Ray on that host, once it says that it runs; what it says after that is read later.

    A node gives up after 30 seconds, for which there is no option: on a busy machine it is asked
    again.
    """
    for _ in range(3):
        process = host.start([RAY, "start", "--node-ip-address", host.address, *words], env)
        assert process.stdout is not None
        said = ""
        while line := process.stdout.readline():
            said += line
            if "Ray runtime started" in line:
                return process
        process.communicate()
        host.kill_processes()
    raise AssertionError(said)
