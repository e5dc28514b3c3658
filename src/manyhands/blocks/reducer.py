"""The arithmetic of a gradient server: k pushes become one gradient, and none is lost silently.

    offer    a push is taken, or refused because it is too old; both are counted
    full     k pushes are here
    take     their mean or their sum; the next k may come

Sums of several pushes may be offered as one (`count`), which is how levels are built: a reducer
near the workers adds some up and offers the sum further on. Mean and sum come out as if all had
come to one place.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from manyhands.errors import ConfigError
from manyhands.trees import Array

Reduce = Literal["mean", "sum"]


class Reducer:
    """Adds up flat gradients.

    Args:
        pushes: How many make one step.
        reduce: What they become: "mean" or "sum".
        max_lag: A push made from weights more than so many versions old is refused; None: never.
    """

    def __init__(
        self, pushes: int = 1, reduce: Reduce = "mean", max_lag: int | None = None
    ) -> None:
        if pushes < 1:
            raise ConfigError(f"pushes={pushes}: a step needs at least 1")
        if reduce not in ("mean", "sum"):
            raise ConfigError(f"reduce={reduce!r} is not mean or sum")
        if max_lag is not None and max_lag < 0:
            raise ConfigError(f"max_lag={max_lag} must not be negative; None never refuses")
        self.pushes, self.reduce, self.max_lag = pushes, reduce, max_lag
        self.offered = self.refused = self.applied = 0  # pushes since the beginning
        self.oldest: int | None = None  # version of the oldest push that waits here
        self._sum: Array | None = None
        self._count = 0

    def offer(self, gradient: Array, version: int, newest: int, count: int = 1) -> bool:
        """Take a push, or the sum of `count` pushes; False when it was refused.

        Args:
            gradient: Flat, of the shape that the first one had.
            version: Of the weights that it was computed with, the oldest of a sum's.
            newest: Version of the weights that it would be applied to.
            count: How many pushes it is the sum of.
        """
        if self._sum is not None and gradient.shape != self._sum.shape:
            raise ConfigError(
                f"a gradient of shape {gradient.shape} was pushed, and those before it had "
                f"{self._sum.shape}: the networks differ between workers"
            )
        self.offered += count
        if self.max_lag is not None and newest - version > self.max_lag:
            self.refused += count
            return False
        self._sum = gradient.copy() if self._sum is None else _added(self._sum, gradient)
        self._count += count
        self.oldest = version if self.oldest is None else min(self.oldest, version)
        return True

    @property
    def waiting(self) -> int:
        """Pushes taken and not yet applied."""
        return self._count

    @property
    def full(self) -> bool:
        return self._count >= self.pushes

    def take(self) -> Array:
        """The mean or the sum of what waits; it counts as applied."""
        total, count = self.take_sum()
        self.applied += count
        return total / np.asarray(count, total.dtype) if self.reduce == "mean" else total

    def take_sum(self) -> tuple[Array, int]:
        """(sum, how many pushes): to be offered further on, where it will be counted."""
        if self._sum is None:
            raise ConfigError("there is no gradient to take: nothing was pushed")
        total, count = self._sum, self._count
        self._sum, self._count, self.oldest = None, 0, None
        return total, count

    def drop(self) -> int:
        """Refuse what waits: the run ends before there is enough for a step."""
        dropped, self._sum, self._count, self.oldest = self._count, None, 0, None
        self.refused += dropped
        return dropped

    def counters(self) -> dict[str, Any]:
        return {
            "pushed": self.offered,
            "applied": self.applied,
            "refused": self.refused,
            "waiting": self._count,
        }


def _added(total: Array, more: Array) -> Array:
    total += more
    return total
