"""What MuJoCo's C library says while it compiles and steps models: only what matters to a user.

Left to itself it writes every deprecation of every model file once an environment, on every worker,
`--quiet` or not, and keeps a MUJOCO_LOG.TXT in the working directory.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any


def pass_on_what_matters(entry_point: Any = "") -> None:
    """Call it before an environment is made. Imports MuJoCo only for an environment of its own."""
    if str(entry_point).startswith("gymnasium.envs.mujoco"):
        with suppress(ImportError):  # making the environment says so, with what to type
            importlib.import_module("mujoco")
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:  # else it is the user's own
        mujoco.set_mju_user_warning(_say)


def _say(text: str) -> None:
    """Deprecated parts of a model file are its author's affair; an unstable simulation is not."""
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr, flush=True)
