"""Environments that change what belongs to their whole process, in the middle of an episode."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

LINE = b"x" * 1023 + b"\n"


def _print_much() -> None:
    for _ in range(20_000):
        os.write(1, LINE)


def _close_streams() -> None:
    for fd in range(3):
        with contextlib.suppress(OSError):  # another environment of this process has done it
            os.close(fd)


def _write_nowhere() -> None:
    with contextlib.suppress(OSError):
        os.write(1, b"this was meant for the terminal\n")


def _replace_streams() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def _fork() -> None:
    if os.fork() == 0:  # a copy that holds all that its parent has open
        time.sleep(1000)
        os._exit(0)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _start_session() -> None:
    if os.getpid() != os.getpgrp():
        os.setsid()


MANNERS: dict[str, Callable[[], Any]] = {
    "prints 20 MB": _print_much,
    "replaces sys.stdout": _replace_streams,
    "closes standard streams": _close_streams,
    "writes to what is closed": _write_nowhere,
    "changes the folder": lambda: os.chdir("/"),
    "changes the umask": lambda: os.umask(0o077),
    "ignores signals": _ignore_signals,
    "forks": _fork,
    "starts a session": _start_session,
    "starts a process": lambda: subprocess.Popen(["sleep", "1000"]),
    "starts a thread": lambda: threading.Thread(target=time.sleep, args=(1000,)).start(),
    "forgets its variables": os.environ.clear,
    "makes numpy raise": lambda: np.seterr(all="raise"),
    "makes warnings errors": lambda: warnings.simplefilter("error"),
    "turns the collector off": gc.disable,
}


class Rude(gymnasium.Wrapper):  # type: ignore[misc]
    """CartPole that does this from its `at`-th step on, one thing in five steps."""

    def __init__(self, manners: list[str], at: int = 20) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._do = {at + 5 * i: MANNERS[name] for i, name in enumerate(manners)}
        self._steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._do.get(self._steps, lambda: None)()
        return super().step(action)


class Fails(gymnasium.Wrapper):  # type: ignore[misc]
    """CartPole whose `count`-th reset raises."""

    def __init__(self, count: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._left = count

    def reset(self, **more: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise RuntimeError("cannot begin again")
        return super().reset(**more)


class Odd(BaseException):
    """What no `except Exception` catches."""


def _raise_odd() -> None:
    raise Odd("neither this nor that")


ENDS: dict[str, Callable[[], Any]] = {
    "sys.exit(0)": lambda: sys.exit(0),
    "an odd exception": _raise_odd,
    "hangs": lambda: time.sleep(1000),
}


class Ends(gymnasium.Wrapper):  # type: ignore[misc]
    """CartPole that does one of these when it is made, in its 20th step, or when it is closed."""

    def __init__(self, how: str, where: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._how, self._where, self._steps = how, where, 0
        if where == "making":
            ENDS[how]()

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._where == "step" and self._steps == 20:
            ENDS[self._how]()
        return super().step(action)

    def close(self) -> None:
        super().close()
        if self._where == "close" and self._steps:
            ENDS[self._how]()


def late(seconds: float = 1000.0, rank: int = -1) -> Any:
    """An environment whose making takes its time: in the launcher (-1), or in one worker."""
    if os.environ.get("MANYHANDS_RANK", "-1") == str(rank):
        time.sleep(seconds)
    return gymnasium.make("CartPole-v1")
