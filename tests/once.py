"""What is made once for all tests of a run, whichever of pytest's processes asks for it first.

A launch costs seconds: workers import torch, Ray starts. What runs in it costs milliseconds.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "MANYHANDS_TEST_SHARED"  # the variable that tells pytest's worker processes where it is


def open_folder() -> None:
    """By pytest's first process, before it starts others."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="manyhands-tests-")


def remove_folder() -> None:
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


def shared_folder() -> Path:
    return Path(os.environ[FOLDER])


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Like functools.cache, over all of pytest's processes; a failure, too, is made only once.

    What is made has to be a tree that can travel between workers; arguments are told apart by
    their names.
    """

    @functools.cache
    def made(*args: Any) -> Any:
        from manyhands import wire  # not above: numpy has to find its variables set (conftest.py)

        path = shared_folder() / "-".join([make.__name__, *map(str, args)])
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's timeout is the deadline of this wait
            if not path.exists():
                path.write_bytes(wire.encode(_outcome(make, args)))
        outcome: Any = wire.decode(path.read_bytes())
        if "failed" in outcome:
            raise AssertionError(f"what this test shares with others failed\n{outcome['failed']}")
        return outcome["made"]

    return made


def _outcome(make: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"made": make(*args)}
    except Exception:
        return {"failed": traceback.format_exc()}
