"""Fixed-length rollouts: T steps of B environments, written once into storage that is kept.

    obs[t]  --policy-->  action[t], logp[t], value[t]  --env-->  reward[t], flags[t], obs[t + 1]

Observations are stored as the policy saw them (normalised), so that what is learned from agrees
with what was acted on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyhands.collect.noise import EnvNoise
from manyhands.collect.observations import copy_into, pick, stacked
from manyhands.envs.adapter import Episode, Final, Step, VecAdapter
from manyhands.envs.spaces import zeros
from manyhands.math.running_stats import RunningStats
from manyhands.trees import Array
from manyhands.types import Acted, Actor, Obs


@dataclass
class Rollout:
    """[T, B] arrays of one worker. They are overwritten by the next `collect`."""

    obs: Obs
    action: Array
    logp: Array
    value: Array
    parameters: Array
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    next_value: Array  # V of where each step led: 0 is not yet put in where it terminated
    episodes: list[Episode] = field(default_factory=list)
    version: int = 0  # of the policy that acted

    @property
    def steps(self) -> int:
        return int(self.valid.sum())

    @property
    def stale_share(self) -> float:
        """How many of the rows, from 0 to 1, an older policy has acted in than the last one."""
        return 0.0


class Normaliser:
    """Observations and rewards on a common scale, from statistics of all workers.

    The reward is divided by the deviation of the discounted return so far; its sign survives.
    """

    def __init__(self, observation_space: Any, obs: bool, rewards: bool, gamma: float) -> None:
        shape = tuple(observation_space.shape or ())
        self.obs = RunningStats(shape) if obs else None
        self.returns = RunningStats(()) if rewards else None
        self._gamma = gamma
        self._running: Array | None = None  # discounted return so far, per environment

    def see(self, raw: Obs) -> Obs:
        """Count raw observations [B, ...] and give them normalised."""
        if self.obs is None:
            return raw
        self.obs.update(raw)
        return self.obs.normalise(raw)

    def apply(self, raw: Obs) -> Obs:
        """Normalise without counting: final observations, evaluation."""
        return raw if self.obs is None else self.obs.normalise(raw)

    def scale(self, reward: Array, ended: Array) -> None:
        """Scale rewards [B] in place."""
        if self.returns is None:
            return
        if self._running is None:
            self._running = np.zeros(len(reward))
        self._running = self._running * self._gamma + reward
        self.returns.update(self._running)
        reward[:] = self.returns.normalise(reward, center=False)
        self._running[ended] = 0.0

    def synchronise(self, total: Callable[[Array], Array] | None) -> None:
        """Merge what all workers have seen. CRUCIAL: only when no value is to be computed from
        observations that were normalised before."""
        for stats in (self.obs, self.returns):
            if stats is not None:
                stats.synchronise(total)

    def state(self) -> dict[str, Any]:
        """What a trained policy needs: the statistics."""
        parts = {"obs": self.obs, "returns": self.returns}
        return {name: stats.state() for name, stats in parts.items() if stats is not None}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, stats in (("obs", self.obs), ("returns", self.returns)):
            if stats is not None:
                stats.load_state(state[name])

    def training_state(self) -> dict[str, Any]:
        """What a resumed run needs: the discounted returns of the running episodes as well."""
        return {"statistics": self.state(), "running": self._running}

    def load_training_state(self, state: dict[str, Any]) -> None:
        self.load_state(state["statistics"])
        running = state["running"]
        self._running = None if running is None else np.array(running)

    def forget(self, envs: list[int]) -> None:
        """These environments begin new episodes: their discounted returns begin at zero."""
        if self._running is not None:
            self._running[envs] = 0.0


class Collector:
    """Steps the environments of one worker with the current policy."""

    def __init__(
        self, envs: VecAdapter, actor: Actor, length: int, noise: EnvNoise, normaliser: Normaliser
    ) -> None:
        self.envs, self.actor, self.length = envs, actor, length
        self.noise, self.normaliser = noise, normaliser
        b = envs.num_envs
        self._raw = zeros(envs.observation_space, (length + 1, b))
        self._normal = (
            None if normaliser.obs is None else np.zeros((length, b, *normaliser.obs.shape), "f4")
        )
        self._flags = {n: np.zeros((length, b), bool) for n in ("terminated", "truncated", "valid")}
        self._reward = np.zeros((length, b), np.float32)
        self._rows = [self._row(t) for t in range(length)]
        self._store: Rollout | None = None
        self._begun = False

    def collect(self) -> Rollout:
        """The next T steps of every environment."""
        if not self._begun:
            self._begun = True
            self.envs.reset(pick(self._raw, 0))
        else:
            copy_into(pick(self._raw, 0), pick(self._raw, self.length))
        ends: list[tuple[int, Final]] = []
        episodes: list[Episode] = []
        for t, row in enumerate(self._rows):
            seen = self.normaliser.see(pick(self._raw, t))
            acted = self.actor.act(seen, self.noise)
            out = self._remember(t, seen, acted)
            self.envs.step(acted.actions, row)
            if row.finals:
                ends += [(t, final) for final in row.finals]
                episodes += row.episodes
            self.normaliser.scale(row.reward, row.terminated | row.truncated)
        last = self.normaliser.apply(pick(self._raw, self.length))
        out.next_value[:-1] = out.value[1:]
        out.next_value[-1] = self.actor.value(last)
        self._bootstrap(out, ends)
        out.episodes = episodes
        return out

    def state(self) -> dict[str, Any]:
        """Plain data and arrays from which `load_state` goes on exactly; between two `collect`s.

        Not in it: the policy and the normaliser, which are not the collector's own.
        """
        envs = self.envs.state(pick(self._raw, self.length)) if self._begun else None
        return {"envs": envs, "noise": self.noise.state()}

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Go on from `state()`; call it on a fresh collector, once the normaliser is loaded.

        Gives back, in words, what could not be restored exactly: environments that begin a new
        episode because theirs could not be gone on with.
        """
        self.noise.load_state(state["noise"])
        if state["envs"] is None:
            return []
        self._begun = True
        restored = self.envs.load_state(state["envs"])
        copy_into(pick(self._raw, self.length), restored.obs)
        self.normaliser.forget(restored.restarted)
        return restored.reasons

    def _remember(self, t: int, seen: Obs, acted: Acted) -> Rollout:
        if self._store is None:  # shapes are known once the policy has spoken
            self._store = self._storage(acted)
        store = self._store
        store.action[t], store.logp[t] = acted.actions, acted.logp
        store.value[t], store.parameters[t] = acted.values, acted.parameters
        if self._normal is not None:
            self._normal[t] = seen
        return store

    def _storage(self, acted: Acted) -> Rollout:
        def like(x: Array) -> Array:
            return np.zeros((self.length, *x.shape), x.dtype)

        obs = self._normal if self._normal is not None else pick(self._raw, slice(self.length))
        return Rollout(
            obs=obs,
            action=like(acted.actions),
            logp=like(acted.logp),
            value=like(acted.values),
            parameters=like(acted.parameters),
            reward=self._reward,
            next_value=like(acted.values),
            terminated=self._flags["terminated"],
            truncated=self._flags["truncated"],
            valid=self._flags["valid"],
        )

    def _bootstrap(self, out: Rollout, ends: list[tuple[int, Final]]) -> None:
        """V(final observation) where an episode was cut off but did not terminate."""
        cut = [(t, final) for t, final in ends if not out.terminated[t, final.env]]
        if not cut:
            return
        finals = stacked([final.obs for _, final in cut])
        values = self.actor.value(self.normaliser.apply(finals))
        for (t, final), value in zip(cut, values, strict=True):
            out.next_value[t, final.env] = value

    def _row(self, t: int) -> Step:
        flags = {name: flag[t] for name, flag in self._flags.items()}
        return Step(obs=pick(self._raw, t + 1), reward=self._reward[t], **flags)


def rows_of(x: Obs, valid: Array) -> Obs:
    """[T, B, ...] -> [rows, ...], environment by environment, valid steps only.

    WHY environment first: joined in order of workers, rows of all workers then stand in the same
    order whatever the number of workers.
    """
    if isinstance(x, dict):
        return {k: rows_of(v, valid) for k, v in x.items()}
    flat = x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
    return flat if valid.all() else flat[valid.swapaxes(0, 1).reshape(-1)]
