"""A command that runs in a copy of the warm process (`warm.py`); to whoever starts it, a program.

It becomes a file of the command's name, of which the first line names Python.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run(words: list[str]) -> int:
    """Hand a command to the process: its words, where it stands, and its three streams."""
    address = os.environ["MANYHANDS_WARM"]
    request = json.dumps({"words": words, "folder": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        child, early = 0, []

        def pass_on(number: int, frame: FrameType | None) -> None:
            if child:
                os.kill(child, number)
            else:
                early.append(number)

        # CRUCIAL: before there is a copy. It may run, and somebody send it a signal, before we know
        # its number; by default that would end us and leave the copy behind.
        for number in SIGNALS:
            signal.signal(number, pass_on)
        socket.send_fds(line, [len(request).to_bytes(4, "big")], [0, 1, 2])
        line.sendall(request)
        answers = line.makefile()
        child = int(answers.readline())
        for number in early:
            os.kill(child, number)
        return int(answers.readline())


def main() -> None:
    words = sys.argv[1:]
    if os.path.basename(sys.argv[0]) != "python":
        words = [os.environ["MANYHANDS_COMMAND"], *words]
    # mpiexec leaves its ranks descriptors by number; `-m` and `-c` are not for copies.
    if "PMI_FD" in os.environ or not words or words[0].startswith("-"):
        os.execv(sys.executable, [sys.executable, *words])
    code = run(words)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
