"""Where transitions rest: rings, priorities, shards, frames.

Everything works with numpy alone. Where numba is installed, what numpy cannot do in one call is
done by compiled loops (loops.py).
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Any

from manyhands import devices


@functools.cache
def compiled_loops() -> Any:
    """The module with the loops; None without numba, or with one that does not know this numpy."""
    try:
        with devices.no_garbage_collection():
            return importlib.import_module("manyhands.replay.loops")
    except ImportError:
        return None
    except Exception as error:  # numba has many; none of them is a reason not to go on
        warnings.warn(f"numba cannot compile here, so numpy does it: {error}", stacklevel=2)
        return None


def in_use() -> str:
    """What does the work, for people."""
    return f"numba {sys.modules['numba'].__version__}" if compiled_loops() else "numpy"
