"""A process that has imported torch and runs scripts and commands in copies of itself.

`import torch` takes longer than most of them. Only libraries of others are imported in advance: a
script still imports manyhands itself, and what it forgets to import is missing.

    shell ── words, folder, variables, streams ──> warm process ── fork, fork ──> script
          <────────── pid, and at last the exit code ──────────┘

A shell finds them as `manyhands` and `python` in the folder `bin` (`warm_command.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = ("torch", "gymnasium", "tensorboard.compat.proto.event_pb2")
OUTPUT = "output.txt"  # in the folder of the script


@dataclass(frozen=True)
class Warm:
    """The process as tests see it."""

    process: subprocess.Popen[str]
    folder: Path
    env: dict[str, str]

    @property
    def variables(self) -> dict[str, str]:
        """What a shell needs so that `manyhands` and `python` are run in copies."""
        path = f"{self.folder / 'bin'}{os.pathsep}{self.env['PATH']}"
        command = str(Path(sys.executable).with_name("manyhands"))
        return {
            "PATH": path,
            "MANYHANDS_WARM": str(self.folder / "line"),
            "MANYHANDS_COMMAND": command,
        }

    def run(self, script: Path) -> tuple[int, str]:
        """The exit code of a script, and all that it has printed; it runs in its own folder."""
        output = script.parent / OUTPUT
        with output.open("w") as file:
            code = subprocess.run(
                [self.folder / "bin" / "python", script.name],
                cwd=script.parent,
                env=self.env | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            ).returncode  # pytest's timeout is the deadline of this wait
        return code, output.read_text(encoding="utf-8")


@contextlib.contextmanager
def warm(env: dict[str, str], libraries: tuple[str, ...] = LIBRARIES) -> Iterator[Warm]:
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        for command in ("manyhands", "python"):
            text = Path(__file__).with_name("warm_command.py").read_text(encoding="utf-8")
            (folder / "bin" / command).write_text(f"#!{sys.executable} -IS\n{text}")
            (folder / "bin" / command).chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder / "line"), *libraries],
            env=env,
            stdin=subprocess.PIPE,  # it ends with this process
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a script that hangs is found below
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"  # pytest's timeout is the deadline
                yield Warm(process, folder, env)
            finally:
                os.killpg(process.pid, signal.SIGKILL)


# -- the process itself ----------------------------------------------------------------------------


def next_script(address: str) -> str:
    """Waits for requests; returns in a new process, which stands where the request came from."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(16)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
        while True:
            if sys.stdin in select.select([door, sys.stdin], [], [])[0]:
                sys.exit()  # closed: pytest has gone
            line, _ = door.accept()
            if not os.fork():
                break
            line.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(line, 4, 3)
    with line.makefile("rb") as asked:
        request = json.loads(asked.read(int.from_bytes(size, "big")))
    child = os.fork()
    if child:
        line.sendall(f"{child}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):  # whoever asked was killed
            line.sendall(f"{code}\n".encode())
        os._exit(0)
    line.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.argv = request["words"]
    script = Path(sys.argv[0])
    more = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:1] = [str(script.parent.resolve()), *(path for path in more if path not in sys.path)]
    return str(script)


if __name__ == "__main__":
    for library in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(library)
    gc.freeze()  # what is there is not looked at again by every script
    runpy.run_path(next_script(sys.argv[1]), run_name="__main__")
