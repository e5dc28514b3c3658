"""Peers to measure against live in virtual environments of their own, made on demand."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from manyhands.bench._tools import version
from manyhands.errors import SupportError, WorkerError

_MARK = "made-by-manyhands-bench"  # in a virtual environment that is ours to mend
_RUN_SECONDS = 600.0  # the longest that one run may take
_INSTALL_SECONDS = 1200.0


def python_with(packages: dict[str, list[str]], name: str, folder: str | None = None) -> Path:
    """An interpreter that has those packages (name to import -> what to install).

    It is made when there is none, with this environment's own torch version unless another is
    named: the peers then compute with the same kernels as we do. SupportError says why not.
    """
    wanted = [requirement for group in packages.values() for requirement in group]
    if not any(requirement.startswith("torch==") for requirement in wanted):
        wanted.append(f"torch=={version('torch')}")
    home = Path(folder) if folder else cache_folder(name)
    python = home.absolute() / "bin" / "python"
    if _imports(python, list(packages)):
        return python
    if home.exists() and any(home.iterdir()) and not (home / _MARK).exists():
        raise SupportError(
            f"{home} is not empty and holds no virtual environment with "
            f"{' '.join(wanted)}; name a new folder"
        )
    print(f"making a virtual environment in {home} and installing {' '.join(wanted)} (minutes)")
    sys.stdout.flush()
    try:
        home.mkdir(parents=True, exist_ok=True)
        (home / _MARK).touch()
    except OSError as error:
        raise SupportError(f"{home} cannot be written: {error.strerror}") from error
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        output_of([sys.executable, "-m", "venv", str(home)], limit=_INSTALL_SECONDS)
        output_of([*pip, "--retries", "1", *wanted], limit=_INSTALL_SECONDS)
    except WorkerError as error:
        raise SupportError(
            f"the peers could not be installed (is there a network?): {error.what}"
        ) from error
    return python


def cache_folder(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "manyhands", "peers", f"{name}-torch-{version('torch')}")


def _imports(python: Path, modules: list[str]) -> bool:
    if not python.exists():
        return False
    words = [str(python), "-c", f"import {', '.join(modules)}"]
    return subprocess.run(words, capture_output=True, timeout=_RUN_SECONDS).returncode == 0


def output_of(words: list[str], limit: float = _RUN_SECONDS, **environment: str) -> str:
    """What a program prints; WorkerError with the end of its complaint when it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, env=os.environ | environment
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(Path(words[0]).name, f"took more than {limit:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise WorkerError(Path(words[0]).name, said[-1] if said else f"left with {done.returncode}")
    return done.stdout


def tell(process: subprocess.Popen[str], words: str) -> None:
    """One line to a program that waits for it."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{words}\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it is gone; who reads its answer will learn why


def line_of(process: subprocess.Popen[str], name: str, limit: float = _RUN_SECONDS) -> str:
    """The line that a program says next; WorkerError when it ends instead, or takes too long."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], limit)[0]:
        raise WorkerError(name, f"took more than {limit:g} s")
    line = process.stdout.readline()
    if not line:
        raise WorkerError(name, f"left with {process.wait(limit)}")
    return line
