"""Ways to try what the policy would not do: ε-greedy for choices, noise for numbers.

Every draw comes from the environment's own stream (EnvNoise), so that runs repeat and a run with
four actors plays the episodes of a run with one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.errors import ConfigError
from manyhands.streams import EnvNoise
from manyhands.trees import Array

KINDS = ("normal", "ou", "clipped")


def ladder(base: float, alpha: float, first: int, here: int, total: int) -> Array:
    """ε_i = ε^(1 + α i / (N − 1)) of environments first .. first + here − 1 out of N.

    PAPER: arXiv:1803.00933, section 4. Number 0 explores most; with one alone it is ε itself.
    """
    i = np.arange(first, first + here, dtype=np.float64)
    exponents: Array = 1.0 + alpha * i / max(total - 1, 1)
    return np.asarray(base**exponents)


def annealed(start: float, end: float, over: int, steps: int) -> float:
    """From start to end in a straight line over so many steps, then constant."""
    done = min(1.0, steps / over) if over else 1.0
    return (1.0 - done) * start + done * end


def epsilon_greedy(q: Array, epsilon: Array, chance: EnvNoise) -> Array:
    """The best of each row of Q [N, n], or any action at all with probability ε [N]."""
    drawn = chance.random((len(q), 2))
    anything = np.minimum((drawn[:, 1] * q.shape[1]).astype(np.int64), q.shape[1] - 1)
    return np.asarray(np.where(drawn[:, 0] < epsilon, anything, q.argmax(axis=1)))


class ActionNoise:
    """Noise on [-1, 1] for actions of `size` numbers, one stream an environment.

        normal     σ ε                             ε ~ N(0, 1), anew at every step
        clipped    the same, cut to ±clip σ
        ou         x ← x + θ (0 − x) dt + σ √dt ε   a walk that is pulled back to 0; PAPER:
                                                   arXiv:1509.02971; it begins at 0 in each episode

    Args:
        kind: normal, ou or clipped.
        scales: σ of each environment, [E].
        size: numbers of an action.
        theta, dt: of the walk.
        clip: deviations beyond which clipped noise is cut.
    """

    def __init__(
        self, kind: str, scales: Array, size: int, *, theta: float = 0.15, dt: float = 1.0,
        clip: float = 2.0,
    ) -> None:  # fmt: skip
        if kind not in KINDS:
            raise ConfigError(f"there is no noise {kind!r}; there are {', '.join(KINDS)}")
        self.kind, self.theta, self.dt, self.clip = kind, theta, dt, clip
        self._scales = np.asarray(scales, np.float32)[:, None]
        self._walk = np.zeros((len(scales), size), np.float32)

    def draw(self, chance: EnvNoise) -> Array:
        """[E, size] for one step."""
        fresh = chance.standard_normal(self._walk.shape)
        if self.kind == "clipped":
            fresh = np.clip(fresh, -self.clip, self.clip)
        if self.kind != "ou":
            return np.asarray(self._scales * fresh)
        pull = self.theta * self.dt * self._walk
        self._walk = self._walk - pull + self._scales * np.float32(np.sqrt(self.dt)) * fresh
        return self._walk.copy()

    def restart(self, ended: Array) -> None:
        """Those environments [E] begin an episode."""
        if self.kind == "ou":
            self._walk[ended] = 0.0

    def state(self) -> dict[str, Any]:
        return {"walk": self._walk.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._walk = np.array(state["walk"], np.float32)
