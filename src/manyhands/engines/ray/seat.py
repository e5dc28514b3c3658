"""The Ray actor that hosts one worker, and its process: what it starts with, and how it ends."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from typing import Any

from manyhands import wire
from manyhands.engines import hosts, process
from manyhands.engines.ray import CLIENT
from manyhands.errors import CollectiveError, WorkerError, described


class Seat:
    """The actor: hosts one worker. Its one long call runs the program in the main thread."""

    def __init__(self, coordinator: Any, rank: int, size: int, restarts: int = 0) -> None:
        from manyhands.engines.ray.parts import Client

        self._rank = rank
        self._brought = os.getcwd()  # where Ray has laid the folder of the script, if it travels
        process.die_with_parent(os.getppid())  # the raylet: Ray itself takes a while to notice
        CLIENT[:] = [Client(coordinator, rank, size, restarts)]

    def __repr__(self) -> str:
        """What Ray writes before each line that comes from another node."""
        return f"worker {self._rank}"

    def where(self, output: str) -> str:
        import ray

        if output:
            _take_output(output)
        node = ray.get_runtime_context().get_node_id()
        return json.dumps(
            {
                "host": socket.gethostname(),
                "node": node,
                "pid": os.getpid(),
                "runs": hosts.what_runs(script=False),
            }
        )

    def _at_home(self, order: dict[str, Any]) -> dict[str, Any]:
        """With the script, and where it imports from, as they were brought here."""
        there, here = order["travels"], self._brought

        def moved(path: str) -> str:
            return here + path[len(there) :] if (path + os.sep).startswith(there + os.sep) else path

        payload = order["payload"] | {"script": moved(order["payload"]["script"])}
        return order | {"payload": payload, "path": [moved(path) for path in order["path"]]}

    def run(self, order_json: str) -> bytes:
        order = json.loads(order_json)
        if order["travels"]:
            order = self._at_home(order)
        os.environ.update(order["env"])
        sys.path[:0] = [p for p in order["path"] if p not in sys.path]
        if os.path.isdir(order["folder"]):
            os.chdir(order["folder"])
        try:
            if order["runs"]:  # it comes after the start, at which all were compared
                names = "worker 0", f"worker {self._rank} on {socket.gethostname()}"
                hosts.compare(names, [order["runs"], hosts.what_runs(script=False)])
            module, _, name = order["run"].partition(":")
            value = getattr(importlib.import_module(module), name)(order["payload"])
            reply = bytes(wire.encode({"ok": True, "value": value}))
        except SystemExit as leave:
            reply = _leaving(leave)
        except BaseException as error:  # also KeyboardInterrupt: the driver decides what ends
            reply = _failure(error)
        worker = process.current()
        if worker is not None:
            worker.close()
            process.forget()
        sys.stdout.flush()
        sys.stderr.flush()
        return reply


def _leaving(leave: SystemExit) -> bytes:
    if leave.code in (None, 0):
        return bytes(wire.encode({"ok": True, "value": None}))
    code = leave.code if isinstance(leave.code, int) else 1
    error = WorkerError(f"left with exit code {leave.code}", exit_code=code)
    return _failure(error.with_traceback(leave.__traceback__))


def _failure(error: BaseException) -> bytes:
    worker = process.current()
    if worker is not None:
        worker.fail(error)
    said = {
        "ok": False,
        "summary": described(error),
        "traceback": "".join(traceback.format_exception(process.trim(error))),
        "secondary": isinstance(error, CollectiveError),
        "differs": isinstance(error, hosts.Differs),
        "exit_code": error.exit_code if isinstance(error, WorkerError) else 1,
    }
    return bytes(wire.encode(said))


def _take_output(address: str) -> None:
    """Write where the driver writes: no prefix, no delay, and no last line lost."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(5.0)
        line.connect(address)
        _, fds, _, _ = socket.recv_fds(line, 1, 2)
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
