"""Count, mean and spread of a stream, per feature, merged over workers without double counting.

Two sets of moments are kept apart:

    agreed    what all workers have agreed on; the only one that `normalise` uses
    pending   what this worker has seen since; invisible until it has been merged

WHY: (1) all workers normalise alike, and an observation is normalised in the update exactly as it
was when the policy acted on it; (2) only `pending` ever travels, so history that all workers share
is counted once, not once per worker and merge.

Moments are merged by Chan's formula in float64: sums of squares would lose the small spread of a
feature with a large mean. `Normaliser` is what a run uses them for: observations and rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands import trees
from manyhands.errors import ConfigError
from manyhands.trees import Array, Parts
from manyhands.types import MASK, Obs

# Rows and bytes (in float64) of which the moments are taken at once: on the few rows of one step
# numpy's calls cost far more than its sums. Rows as large as images are taken as they come.
_TOGETHER, _BYTES = 256, 1 << 20


@dataclass(frozen=True)
class Moments:
    """count, mean and M2 = Σ (x − mean)², the last two per feature, float64."""

    count: int
    mean: Array
    m2: Array

    @staticmethod
    def empty(shape: tuple[int, ...]) -> Moments:
        return Moments(0, np.zeros(shape), np.zeros(shape))

    @staticmethod
    def of(batch: Array) -> Moments:
        """Moments of a batch [N, ...]; N may be zero."""
        if len(batch) == 0:
            return Moments.empty(batch.shape[1:])
        rows = np.asarray(batch, np.float64)
        mean = rows.mean(axis=0)
        return Moments(len(rows), mean, np.square(rows - mean).sum(axis=0))

    def merge(self, other: Moments) -> Moments:
        """Moments of both streams together (Chan, Golub and LeVeque, 1979)."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        m2 = self.m2 + other.m2 + np.square(gap) * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def state(self) -> dict[str, Array]:
        """Plain arrays: can be sent between workers and saved."""
        return {"count": np.array(self.count, np.int64), "mean": self.mean, "m2": self.m2}

    @staticmethod
    def from_state(state: Mapping[str, Array]) -> Moments:
        mean, m2 = (np.array(state[key], np.float64) for key in ("mean", "m2"))
        return Moments(int(state["count"]), mean, m2)


class RunningStats:
    """Running moments of observations (or returns) of one shape.

    Each worker calls `update` as it sees data, then all workers together call `synchronise`; or
    somebody gathers every worker's `delta` and all `absorb` the same list.
    """

    def __init__(self, shape: tuple[int, ...], *, epsilon: float = 1e-8) -> None:
        self.shape = tuple(shape)
        self.epsilon = epsilon
        self.agreed = Moments.empty(self.shape)
        self._pending = Moments.empty(self.shape)
        self._waiting: list[Array] = []  # batches that are to go into the pending moments
        self._rows = 0  # of those
        self._enough = min(_TOGETHER, _BYTES // (8 * math.prod(self.shape) or 8))
        self._refresh()

    @property
    def pending(self) -> Moments:
        """What this worker has seen since the last merge."""
        self._settle()
        return self._pending

    @pending.setter
    def pending(self, moments: Moments) -> None:
        self._pending = moments
        self._waiting, self._rows = [], 0

    @property
    def count(self) -> int:
        return self.agreed.count

    @property
    def mean(self) -> Array:
        return self.agreed.mean

    @property
    def variance(self) -> Array:
        """Of the agreed data, population form; ones until there is any."""
        if self.agreed.count == 0:
            return np.ones(self.shape)
        return self.agreed.m2 / self.agreed.count

    def update(self, batch: Array) -> None:
        """Add a batch [N, *shape] of this worker's data to the pending moments."""
        if batch.shape[1:] != self.shape:
            raise ConfigError(
                f"running statistics are over [N, {', '.join(map(str, self.shape))}], "
                f"got a batch {batch.shape}"
            )
        self._waiting.append(batch.copy())
        self._rows += len(batch)
        if self._rows >= self._enough:
            self._settle()

    def delta(self) -> dict[str, Array]:
        """What this worker has seen since the last merge, as plain arrays. Hand it over once."""
        return self.pending.state()

    def absorb(self, deltas: Iterable[Mapping[str, Array]]) -> None:
        """Merge the deltas of all workers, this one's included, and forget what was pending.

        CRUCIAL: every worker gives the same deltas in the same order (by rank), or the last bits
        of their statistics differ.
        """
        agreed = self.agreed
        for delta in deltas:
            agreed = agreed.merge(Moments.from_state(delta))
        self.agreed = agreed
        self.pending = Moments.empty(self.shape)
        self._refresh()

    def synchronise(self, total: Callable[[Array], Array] | None = None) -> None:
        """Merge the pending moments of all workers: a collective call with two sums.

        Args:
            total: Sum of an array over workers; None with one worker.
        """
        if total is not None:
            self.pending = _pooled(self.pending, total)
        self.absorb([self.pending.state()])

    def normalise(self, x: Array, *, clip: float = 10.0, center: bool = True) -> Array:
        """(x − mean) / std, clipped to ±clip, float32; x is [..., *shape].

        Without any data yet x passes unchanged but for the clip. `center=False` only scales: for
        rewards, whose sign must survive.
        """
        y = np.subtract(x, self._offset, dtype=np.float32) if center else np.array(x, np.float32)
        y *= self._scale
        np.maximum(y, -clip, out=y)  # two bare ufuncs: half the time of np.clip on a few rows
        np.minimum(y, clip, out=y)
        return y

    def state(self) -> dict[str, Array]:
        """Plain arrays; with the pending part, so that a resumed run continues exactly."""
        state = self.agreed.state()
        state |= {f"pending_{key}": value for key, value in self._pending.state().items()}
        if self._waiting:  # as they are: merged now, they would round differently later
            state["waiting"] = np.concatenate(self._waiting)
        return state

    def load_state(self, state: Mapping[str, Array]) -> None:
        agreed = Moments.from_state(state)
        if agreed.mean.shape != self.shape:
            raise ConfigError(
                f"saved statistics have shape {agreed.mean.shape}, this run needs {self.shape}"
            )
        self.agreed = agreed
        self.pending = Moments.from_state(
            {key: state[f"pending_{key}"] for key in ("count", "mean", "m2")}
        )
        if "waiting" in state:
            self.update(np.array(state["waiting"]))
        self._refresh()

    def _settle(self) -> None:
        if self._waiting:
            self._pending = self._pending.merge(Moments.of(np.concatenate(self._waiting)))
            self._waiting, self._rows = [], 0

    def _refresh(self) -> None:
        # float32 copies made once per merge: `normalise` runs on every step of every worker.
        self._offset = np.asarray(self.mean, np.float32)
        self._scale = np.asarray(1.0 / np.sqrt(self.variance + self.epsilon), np.float32)


def normalised_parts(observation_space: Any) -> list[str]:
    """What statistics are kept of: a Box ("", all of it; or all there is beside a mask), or those
    parts of a Dict that are Boxes of floats. Images of bytes, choices and masks stay as they are.
    """
    if type(observation_space).__name__ == "Box":
        return [""]
    inner = getattr(observation_space, "spaces", {}) or {}
    parts = {k: p for k, p in inner.items() if k != MASK and type(p).__name__ == "Box"}
    if MASK in inner and len(inner) == 2:
        return list(parts)
    return [name for name, part in parts.items() if part.dtype.kind == "f"]


class Normaliser:
    """Observations and rewards on a common scale, from statistics of all workers.

    Each part of a Dict observation that `normalised_parts` names has statistics of its own.
    The reward is divided by the deviation of the discounted return so far; its sign survives.
    """

    def __init__(self, observation_space: Any, obs: bool, rewards: bool, gamma: float) -> None:
        self.parts: dict[str, RunningStats] = {}
        for name in normalised_parts(observation_space) if obs else ():
            part = observation_space[name] if name else observation_space
            self.parts[name] = RunningStats(tuple(part.shape))
        self.returns = RunningStats(()) if rewards else None
        self._gamma = gamma
        self._running: Array | None = None  # discounted return so far, per environment
        self.waiting: Array | None = None  # [B] whose observations and rewards mean nothing now
        self._counted: Any = ...  # the others, of this step

    @property
    def statistics(self) -> dict[str, RunningStats]:
        """By the name in files and messages: "obs", or "obs/camera/left"; "returns"."""
        found = {f"obs/{name}" if name else "obs": stats for name, stats in self.parts.items()}
        return found if self.returns is None else found | {"returns": self.returns}

    def see(self, raw: Obs) -> Obs:
        """Count raw observations [B, ...] and give them normalised."""
        if self.waiting is not None:
            self._counted = np.flatnonzero(~self.waiting)
        for name, stats in self.parts.items():
            stats.update((raw[name] if name else raw)[self._counted])
        return self.apply(raw)

    def apply(self, raw: Obs) -> Obs:
        """Normalise without counting: final observations, evaluation."""
        if not self.parts:
            return raw
        if "" in self.parts:
            return self.parts[""].normalise(raw)
        return raw | {name: stats.normalise(raw[name]) for name, stats in self.parts.items()}

    def room(self, raw: Obs) -> Obs:
        """Where observations [T, B, ...] are kept as they are seen. What is not normalised is the
        raw storage itself."""
        if not self.parts:
            return raw
        if "" in self.parts:
            return np.zeros(raw.shape, np.float32)
        return raw | {name: np.zeros(raw[name].shape, np.float32) for name in self.parts}

    def put(self, room: Obs, t: int, seen: Obs) -> None:
        """Write row t of such room."""
        for name in self.parts:
            if name:
                room[name][t] = seen[name]
            else:
                room[t] = seen

    def scale(self, reward: Array, ended: Array) -> None:
        """Scale rewards [B] in place."""
        if self.returns is None:
            return
        if self._running is None:
            self._running = np.zeros(len(reward))
        self._running = self._running * self._gamma + reward
        self.returns.update(self._running[self._counted])
        reward[:] = self.returns.normalise(reward, center=False)
        self._running[ended] = 0.0

    def synchronise(self, total: Callable[[Array], Array] | None) -> None:
        """Merge what all workers have seen. CRUCIAL: only when no value is to be computed from
        observations that were normalised before."""
        for stats in self.statistics.values():
            stats.synchronise(total)

    def state(self) -> dict[str, Any]:
        """What a trained policy needs: the statistics."""
        return {name: stats.state() for name, stats in self.statistics.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, stats in self.statistics.items():
            stats.load_state(state[name])

    def training_state(self) -> dict[str, Any]:
        """What a resumed run needs: the discounted returns of the running episodes as well."""
        return {"statistics": self.state(), "running": self._running}

    def load_training_state(self, state: dict[str, Any]) -> None:
        self.load_state(state["statistics"])
        running = state["running"]
        self._running = None if running is None else np.array(running)

    @staticmethod
    def training_state_from(parts: Parts) -> dict[str, Any]:
        """The same for environments that others have had. After an update all have agreed on the
        same statistics, and nothing is pending."""
        state = dict(parts[0][0])
        return state if state["running"] is None else state | trees.joined(parts, "running")

    def forget(self, envs: list[int]) -> None:
        """These environments begin new episodes: their discounted returns begin at zero."""
        if self._running is not None:
            self._running[envs] = 0.0


def _pooled(own: Moments, total: Callable[[Array], Array]) -> Moments:
    """Moments of all workers' parts together, in two passes as in the definition."""
    flat = own.mean.ravel()
    sums = total(np.concatenate([[own.count], own.count * flat]))
    count = round(float(sums[0]))
    if count == 0:
        return own
    mean = sums[1:] / count
    m2 = total(own.m2.ravel() + own.count * np.square(flat - mean))
    return Moments(count, mean.reshape(own.mean.shape), m2.reshape(own.m2.shape))
