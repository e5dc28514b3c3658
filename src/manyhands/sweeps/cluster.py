"""The runs of a sweep on the nodes of a Ray cluster: `--ray HOST:PORT`.

    here    the sweep: its folder, its table, who runs next
    node    an actor a run, which has its CPUs; it starts the run's process, hands signals on to
            it, and says how it ended

A run is the same process as on one machine, so the folder of the sweep lies on a disk that all
nodes share, at the same path. That, and whether all nodes run the same versions, is looked at
before anything starts. A run ends with its actor, and the actors end with the sweep, however it
ends. Ray core only; what passes between the processes is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyhands.config import Experiment
from manyhands.engines import hosts
from manyhands.engines.ray.session import Session
from manyhands.errors import ConfigError
from manyhands.sweeps.jobs import cores_of
from manyhands.viewing.runs import SWEEP

_LOOK_SECONDS = 60.0  # at all nodes; a process on a busy one takes its time to begin
_POLL_SECONDS = 0.1  # between two looks at a process
# WHY not preexec_fn: between fork and exec it would run Python beside Ray's threads.
_FOLLOW = (
    "import sys; from manyhands.engines.process import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1))); from manyhands.cli.main import start; start()"
)


def check_engines(address: str, tried: list[Experiment]) -> None:
    if address and any(one.run.engine == "ray" for one in tried):
        raise ConfigError(
            "with --ray each run is on one node, and --engine ray would spread it over several; "
            "leave one of them out"
        )


@contextlib.contextmanager
def joined(address: str, folder: Path, tried: list[Experiment]) -> Iterator[Cluster | None]:
    """The cluster, for the length of a sweep; None without an address: the runs stay here.

    Args:
        tried: of every setting one experiment.
    """
    if not address:
        yield None
        return
    most = max(map(cores_of, tried))
    with Session(most, 1.0, address, {}) as session:
        del session  # Ray itself is what is used from here on
        cluster = Cluster(folder)
        cluster.check(most)
        yield cluster


class Cluster:
    """Ray, as a sweep sees it."""

    def __init__(self, folder: Path) -> None:
        import ray

        self._ray, self._folder = ray, folder
        self._witness = _digest(folder)
        self._actor = ray.remote(max_restarts=0)(Follower)

    def cpus(self) -> float:
        """All there are now: nodes may come and go."""
        return float(self._ray.cluster_resources().get("CPU", 0))

    def check(self, most: int) -> None:
        """ConfigError unless every node sees the sweep's folder, runs what this machine runs, and
        one of them has room for the largest run."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        largest = max(node["Resources"].get("CPU", 0) for node in nodes)
        if most > largest:
            raise ConfigError(
                f"a run has {most} workers, all on one node, and the largest node has {largest:g} "
                f"CPUs; type: --workers {max(1, int(largest))}"
            )
        look = self._ray.remote(num_cpus=0, max_retries=0)(what_is_there)
        refs = [
            look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(str(self._folder))
            for node in nodes
        ]
        self._ray.wait(refs, num_returns=len(refs), timeout=_LOOK_SECONDS)
        said = [self._answer(ref, node) for ref, node in zip(refs, nodes, strict=True)]
        names = ["this machine", *(f"{s['host']} ({s['address']})" for s in said)]
        hosts.compare(names, [hosts.what_runs(script=False), *(s["runs"] for s in said)])
        blind = [
            name for name, s in zip(names[1:], said, strict=True) if s["sees"] != self._witness
        ]
        if blind:
            raise ConfigError(_not_shared(self._folder, blind))

    def _answer(self, ref: Any, node: dict[str, Any]) -> dict[str, Any]:
        where = node["NodeManagerAddress"]
        try:
            found: dict[str, Any] = json.loads(self._ray.get(ref, timeout=0))
        except self._ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"the node {where} has started nothing for {_LOOK_SECONDS:g} s; is it there?"
            ) from None
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().rsplit("\n", 1)[-1]
            raise ConfigError(f"the node {where} cannot run manyhands: {last}") from None
        return found | {"address": where}

    def begin(self, words: list[str], output: Path, experiment: Experiment) -> RayProcess:
        """Start `manyhands ...` on a node with room for it, as soon as there is one."""
        order = {
            "words": words,
            "output": str(output),
            "path": os.pathsep.join(p for p in sys.path if p),
            "folder": os.getcwd(),
            "sweep": str(self._folder),
            "witness": self._witness,
        }
        gpus = 1 if experiment.run.device == "cuda" else 0
        actor = self._actor.options(num_cpus=cores_of(experiment), num_gpus=gpus).remote()
        return RayProcess(actor, json.dumps(order))


class RayProcess:
    """A run's process on some node, as its driver sees it (`Process` in jobs.py)."""

    def __init__(self, actor: Any, order: str) -> None:
        import ray

        self._ray, self._actor = ray, actor
        self._up, self._end = actor.is_there.remote(), actor.run.remote(order)
        self._code: int | None = None
        self._killed = False
        self.fd, self.why = -1, ""

    def poll(self) -> int | None:
        if self._code is None and self._over(self._end):
            self._read()
        return self._code

    def _over(self, ref: Any, seconds: float = 0.0) -> bool:
        return bool(self._ray.wait([ref], timeout=seconds)[0])

    def _read(self) -> None:
        try:
            said = json.loads(self._ray.get(self._end))
            self._code, self.why = said["code"], said["why"]
        except self._ray.exceptions.RayError:
            self._code = -signal.SIGKILL
            if not self._killed:
                self.why = "its node, or Ray's process there, is gone"

    def send(self, number: int) -> None:
        if self.poll() is not None:
            return
        # One that still waits for a node has nothing to save.
        if number == signal.SIGKILL or not self._over(self._up):
            self._killed = True
            self._ray.kill(self._actor)
        else:
            self._actor.send.remote(number)

    def wait(self, seconds: float) -> bool:
        return self._over(self._end, seconds) and self.poll() is not None

    def close(self) -> None:
        """Its CPUs go to the next."""
        self._ray.kill(self._actor)


# -- on a node -------------------------------------------------------------------------------------


class Follower:
    """The actor of a run. Everything in it runs in one thread, with which its process dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def is_there(self) -> bool:
        return True

    async def run(self, order_json: str) -> str:
        order = json.loads(order_json)
        if _digest(Path(order["sweep"])) != order["witness"]:  # a node that has come since
            why = _not_shared(order["sweep"], [socket.gethostname()])
            return json.dumps({"code": 1, "why": why})
        there = os.path.isdir(order["folder"])
        with open(order["output"], "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _FOLLOW, str(os.getpid()), *order["words"]],
                env=os.environ | {"PYTHONPATH": order["path"]},
                cwd=order["folder"] if there else None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return json.dumps({"code": code, "why": ""})

    async def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def what_is_there(folder: str) -> str:
    """What a node runs, and the sweep that it finds in the folder."""
    return json.dumps(
        {
            "host": socket.gethostname(),
            "runs": hosts.what_runs(script=False),
            "sees": _digest(Path(folder)),
        }
    )


def _digest(folder: Path) -> str:
    """Of the plan of a sweep; "" where there is none."""
    with contextlib.suppress(OSError):
        return hashlib.sha256((folder / SWEEP).read_bytes()).hexdigest()
    return ""


def _not_shared(folder: Any, names: list[str]) -> str:
    return (
        f"{', '.join(names)}: {folder} is not there as it is on the machine of the sweep; give the "
        "sweep a folder on a disk that all nodes share: --dir"
    )
