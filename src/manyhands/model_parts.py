"""Parameters of the user's models: which they are, those of a kind together, and back in place."""

from __future__ import annotations

from typing import Any

from manyhands.engines.group import Group
from manyhands.errors import ConfigError
from manyhands.trees import is_tensor


def check_synced(group: Group, model: Any) -> None:
    if hasattr(model, "state_dict"):
        tree = {k: v for k, v in model.state_dict().items() if is_tensor(v)}
    else:
        tree = {str(i): p for i, p in enumerate(parameters(model))}
    group.check_equal("check_synced", tree)


def parameters(model: Any) -> list[Any]:
    found = list(model.parameters() if hasattr(model, "parameters") else model)
    found = [p for p in found if p.requires_grad]
    if not found:
        raise ConfigError("there is no parameter that requires a gradient")
    return found


def by_kind(parameters: list[Any]) -> list[list[Any]]:
    """Parameters of one dtype and device together: one message for each such set."""
    kinds: dict[tuple[Any, Any], list[Any]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    return list(kinds.values())


def pour(flat: Any, tensors: list[Any]) -> None:
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view_as(t))
        at += t.numel()
