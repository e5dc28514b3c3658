"""Other libraries, to measure beside our own: `manyhands bench train` and `replay` find this file.

They live in virtual environments of their own, made on demand, and run scripts of this folder
there: `sb3_ppo.py`, and `replay_buffers.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.bench._tools import output_of, version
from manyhands.errors import SupportError, WorkerError

SB3 = "stable-baselines3"
PPO = {"stable_baselines3": [SB3]}
PPO_THREADS = (1, 2)
HOPELESS = 0.5  # of the better setting's speed in the trial: not worth minutes of every round
# libraries -> what to install for them. The compiled part of a TorchRL release loads with one torch
# release only; without it there is no prioritized buffer, and the table says so.
REPLAY: dict[tuple[str, ...], dict[str, list[str]]] = {
    ("cpprb", SB3): {"cpprb": ["cpprb"], "stable_baselines3": [SB3]},
    ("torchrl",): {"torchrl": ["torchrl==0.14.1", "torch==2.14.1"]},
}

_HERE = Path(__file__).parent
_MARK = "made-by-manyhands-bench"  # in a virtual environment that we may complete
_IMPORT_SECONDS = 600.0
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
            f"{' '.join(wanted)}; give another folder, or a new one"
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
            f"{' '.join(wanted)} could not be installed (is there a network?): {error.what}"
        ) from error
    return python


def cache_folder(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "manyhands", "peers", f"{name}-torch-{version('torch')}")


def _imports(python: Path, modules: list[str]) -> bool:
    if not python.exists():
        return False
    words = [str(python), "-c", f"import {', '.join(modules)}"]
    return subprocess.run(words, capture_output=True, timeout=_IMPORT_SECONDS).returncode == 0


# -- Stable-Baselines3's PPO -----------------------------------------------------------------------


def ppo_runs(
    folder: str | None, setting: dict[str, Any], update: int, facts: dict[str, Any]
) -> dict[str, Callable[[int], dict[str, Any]]]:
    """name -> a run with a seed, for the settings worth timing after one update of each."""
    python = python_with(PPO, SB3, folder)

    def contestant(threads: int) -> Callable[[int], dict[str, Any]]:
        return lambda seed: ppo_run(python, threads, setting, seed)

    short = setting | {"steps": update, "warm_up": update}
    speeds = {}
    for threads in PPO_THREADS:
        run = ppo_run(python, threads, short, seed=0)
        speeds[threads] = round(run["steps"] / run["seconds"], 1)
    facts["trial_steps_per_second"] = {str(threads): speed for threads, speed in speeds.items()}
    worth = [n for n in PPO_THREADS if speeds[n] >= HOPELESS * max(speeds.values())]
    return {f"{SB3}, {n} torch thread{'s' * (n > 1)}": contestant(n) for n in worth}


def ppo_run(python: Path, threads: int, setting: dict[str, Any], seed: int) -> dict[str, Any]:
    asked = json.dumps(setting | {"threads": threads, "seed": seed})
    printed = output_of(
        [str(python), str(_HERE / "sb3_ppo.py"), asked], OMP_NUM_THREADS=str(threads)
    )
    run: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return run
