"""Several programs of tests one after the other in the same workers: one start for many tests."""

from __future__ import annotations

import importlib
from typing import Any

from manyhands.devices import no_garbage_collection

with no_garbage_collection():
    import torch  # noqa: F401 (here, so that workers are forked behind it)


def suite(plan: list[list[Any]]) -> dict[str, Any]:
    """What each program gives.

    Args:
        plan: (name, module:function, arguments) of each.
    """
    found = {}
    for name, what, *args in plan:
        module, _, function = what.partition(":")
        found[name] = getattr(importlib.import_module(module), function)(*args)
    return found
