"""Observations are one array or a dict of arrays; what follows treats both alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from manyhands.types import Obs


def pick(obs: Obs, where: Any) -> Obs:
    """What stands at an index, a slice or a list of rows of the first axis: numpy's rules."""
    return {k: v[where] for k, v in obs.items()} if isinstance(obs, dict) else obs[where]


def copy_into(target: Obs, source: Obs) -> None:
    if isinstance(target, dict):
        for key, part in target.items():
            part[...] = source[key]
    else:
        target[...] = source


def stacked(items: Sequence[Obs]) -> Obs:
    """Single observations as the rows of one."""
    if isinstance(items[0], dict):
        return {k: np.stack([i[k] for i in items]) for k in items[0]}
    return np.stack(items)


def appended(parts: Sequence[Obs]) -> Obs:
    """Rows one behind the other; a single part is given as it is, not copied."""
    if isinstance(parts[0], dict):
        return {k: appended([p[k] for p in parts]) for k in parts[0]}
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
