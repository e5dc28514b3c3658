"""n-step transitions from the steps of several environments, assembled as they come.

    (s_t, a_t, r_t + γ r_t+1 + ... + γ^k-1 r_t+k-1, s_t+k, discount)        k = n, or fewer

    discount = γ^k      where s_t+k is worth a bootstrap: the episode goes on, or was truncated
             = 0        where it terminated

    target = reward + discount · Q(s_t+k, ·)    one formula for every case

An episode's end flushes what is pending with the steps that there were: a transition never reaches
over it. s_t+k is then the episode's true last observation, not the next one's first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands import trees
from manyhands.errors import ConfigError
from manyhands.replay.ring import build, layout_of, pick
from manyhands.trees import Array, Tree


class NStep:
    """The steps of `num_envs` environments in, whole n-step transitions out.

    Args:
        n: how many rewards a transition sums up.
        gamma: the discount of one step.
        num_envs: rows of every array that is pushed.
    """

    def __init__(self, n: int, gamma: float, num_envs: int) -> None:
        if n < 1 or num_envs < 1:
            raise ConfigError(f"n-step: n {n} and num_envs {num_envs} must be 1 or more")
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"n-step: gamma {gamma} must lie between 0 and 1")
        self.n, self.gamma, self.num_envs = n, gamma, num_envs
        self._paths: list[str] = []
        self._kept: list[Array] = []  # [n, envs, ...] what was pushed, by column
        self._sums = np.zeros((n, num_envs))
        self._powers = np.zeros((n, num_envs))  # γ^steps of a pending transition, else 0
        self._steps = np.zeros((n, num_envs), np.int64)  # 1 + rewards in it; 0: nothing pending
        self._next = np.zeros(num_envs, np.int64)  # where each environment's next step goes

    def push(
        self, start: Tree, reward: Array, reached: Tree, terminated: Array, truncated: Array,
        valid: Array | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """One step of every environment; the transitions that it completed, oldest first.

        Args:
            start: dict of what belongs to the step's beginning: obs, action and whatever else is
                to be kept with the transition. [E, ...] each.
            reward: [E].
            reached: the observation that the step led to, [E, ...] or a dict of such: at an
                episode's end its true last one (`Step.next_obs()`).
            terminated, truncated: [E]. If both are set, it terminated.
            valid: [E] False where this row is no step at all.

        Returns:
            The columns of `start`, and reward [M] float32, next_obs [M, ...], discount [M]
            float32, steps [M] int64. M may be 0.
        """
        there = np.ones(self.num_envs, bool) if valid is None else np.asarray(valid, bool)
        terminated = np.asarray(terminated, bool)
        ended = terminated | np.asarray(truncated, bool)
        self._keep(start, there)
        self._sums += self._powers * np.where(there, reward, 0.0)
        pending = (self._steps > 0) & there
        self._powers[pending] *= self.gamma
        self._steps[pending] += 1
        ready = pending & (ended | (self._steps > self.n))
        slots, envs = np.nonzero(ready)
        order = np.argsort(-self._steps[slots, envs], kind="stable")
        slots, envs = slots[order], envs[order]
        result = build(self._paths, [column[slots, envs] for column in self._kept])
        result["reward"] = self._sums[slots, envs].astype(np.float32)
        result["next_obs"] = _rows(reached, envs)
        alive = np.where(terminated[envs], 0.0, self._powers[slots, envs])
        result["discount"] = alive.astype(np.float32)
        result["steps"] = self._steps[slots, envs] - 1
        self._steps[slots, envs] = 0
        self._powers[slots, envs] = 0.0
        return result

    def _keep(self, start: Tree, there: Array) -> None:
        if not self._kept:
            row = trees.map(lambda x: np.asarray(x)[0], start)
            taken = {"reward", "next_obs", "discount", "steps"} & set(start)
            if taken:
                raise ConfigError(f"n-step: {sorted(taken)} is added here; give it another name")
            layout = layout_of(row)
            self._paths = [path for path, _, _ in layout]
            shape = (self.n, self.num_envs)
            self._kept = [np.zeros((*shape, *s), dtype) for _, dtype, s in layout]
        envs = np.flatnonzero(there)
        slots = self._next[envs]
        for column, values in zip(self._kept, pick(self._paths, start), strict=True):
            column[slots, envs] = np.asarray(values)[envs]
        self._sums[slots, envs] = 0.0
        self._powers[slots, envs] = 1.0
        self._steps[slots, envs] = 1
        self._next[envs] = (slots + 1) % self.n

    @property
    def pending(self) -> int:
        """Transitions begun but not complete."""
        return int(np.count_nonzero(self._steps))

    def forget(self, envs: Any = slice(None)) -> None:
        """Drop what is pending: those environments begin anew without an end (a restart)."""
        self._steps[:, envs] = 0
        self._powers[:, envs] = 0.0

    def state(self) -> dict[str, Any]:
        return {
            "paths": list(self._paths),
            "kept": [column.copy() for column in self._kept],
            "sums": self._sums.copy(),
            "powers": self._powers.copy(),
            "steps": self._steps.copy(),
            "next": self._next.copy(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        sums = np.asarray(state["sums"])
        if sums.shape != self._sums.shape:
            raise ConfigError(
                f"n-step: the state is of n, envs {list(sums.shape)}; "
                f"this has {[self.n, self.num_envs]}"
            )
        self._paths = [str(path) for path in state["paths"]]
        self._kept = [np.array(column) for column in state["kept"]]
        self._sums, self._powers = np.array(sums), np.array(state["powers"])
        self._steps, self._next = np.array(state["steps"]), np.array(state["next"])


def _rows(tree: Tree, which: Array) -> Tree:
    return trees.map(lambda x: np.asarray(x)[which], tree)
