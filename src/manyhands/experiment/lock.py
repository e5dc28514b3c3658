"""One process at a time in a run folder.

A file `.lock`, held by flock for as long as the process runs, says who: process, host, and which
start of that machine. The kernel lets go when the process ends, however it ends; what the file says
is for the message, and for file systems whose locks do not reach other machines.

By hand, and not with filelock: before version 4 that empties the file of whoever holds it when
another only asks, so that nobody could say who; and it gives up where a file system has no locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from manyhands.errors import ConfigError

NAME = ".lock"


class RunLock:
    """`with RunLock(run_dir): ...`; ConfigError when another live process is in the folder."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir, NAME)
        self._fd = -1
        self._made = False

    def __enter__(self) -> RunLock:
        try:
            self._made = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(
                f"{self.path.parent} cannot be written: {error.strerror or error}"
            ) from error
        data = json.dumps(_me()).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # before the lock goes: whoever waits finds a fresh file
        os.close(self._fd)
        self._fd = -1
        if self._made:
            with contextlib.suppress(OSError):  # not empty, as it should be
                os.rmdir(self.path.parent)  # a run that could not begin leaves nothing

    def _open(self) -> int:
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            free, holder = _take(fd), _holder(fd)
            if not free or _is_alive(holder):
                os.close(fd)
                raise ConfigError(self._in_use(holder))
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)  # its holder removed it while we waited: look again

    def _in_use(self, holder: dict[str, Any]) -> str:
        folder, host = self.path.parent, holder.get("host", "this machine")
        text = f"{folder} is in use by process {holder.get('pid', '?')} on {host}"
        if host not in (socket.gethostname(), "this machine"):
            text += f"; if that machine no longer runs it, remove {self.path}"
        return text


def _take(fd: int) -> bool:
    """Whether nobody else holds the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: what the file says must do
        return True
    return True


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "host": socket.gethostname(),
        "boot": _boot(),
    }


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether what the file says may still be true although the lock was free."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True  # another machine: we cannot know
    if holder.get("boot") != _boot() or holder.get("pid") == os.getpid():
        return False
    started = _started(int(holder.get("pid", 0)))
    return bool(started) and started == holder.get("started")


def _holder(fd: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(fd, 4096, 0) or b"{}"))
    except (ValueError, TypeError):  # its writer died in the middle of it
        return {}


def _boot() -> str:
    """Which start of this machine it is; "" where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine's start: numbers of processes come again."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
