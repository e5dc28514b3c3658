"""Fixed-length rollouts: T steps of B environments, written once into storage that is kept.

    obs[t]  --policy-->  action[t], logp[t], value[t]  --env-->  reward[t], flags[t], obs[t + 1]

Observations are stored as the policy saw them (normalised), so that what is learned from agrees
with what was acted on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyhands import trees
from manyhands.envs.adapter import Episode, Final, Step, Stepper, VecAdapter
from manyhands.envs.spaces import zeros
from manyhands.math.running_stats import Normaliser
from manyhands.streams import EnvNoise
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
    state: Array = field(default_factory=lambda: np.zeros((0, 0)))  # [B, S] before the first row
    first: Array = field(default_factory=lambda: np.zeros((0, 0), bool))  # [T, B] episodes begin

    @property
    def steps(self) -> int:
        return int(self.valid.sum())

    @property
    def stale_share(self) -> float:
        """How many of the rows, from 0 to 1, an older policy has acted in than the last one."""
        return 0.0


class Collector(Stepper):
    """Steps the environments of one worker with the current policy; T steps of each are a
    rollout. `state_size` is that of the actor's recurrent state; 0: it has none."""

    def __init__(
        self,
        envs: VecAdapter,
        actor: Actor,
        length: int,
        noise: EnvNoise,
        normaliser: Normaliser,
        *,
        state_size: int = 0,
    ) -> None:
        self.envs, self.actor, self.length = envs, actor, length
        self.noise, self.normaliser = noise, normaliser
        b = envs.num_envs
        self._raw = zeros(envs.observation_space, (length + 1, b))
        self._seen = normaliser.room(trees.take(self._raw, slice(length)))
        self._flags = {n: np.zeros((length, b), bool) for n in ("terminated", "truncated", "valid")}
        self._reward = np.zeros((length, b), np.float32)
        self._shown = [trees.take(self._raw, t) for t in range(length + 1)]
        self._rows = [self._row(t) for t in range(length)]
        self._store: Rollout | None = None
        self._at = 0  # the row that is written next; after the last one, `length`
        self._ends: list[tuple[int, Final, Array]] = []  # (row, its end, the state after the row)
        self._memory = np.zeros((b, state_size), np.float32)
        self._first = np.ones((length + 1, b), bool)
        self._before = self._memory.copy()
        self._episodes: list[Episode] = []

    def collect(self) -> Rollout:
        """The next T steps of every environment."""
        self.fill()
        return self.take()

    @property
    def current(self) -> Obs:
        return self._shown[self._at]

    @property
    def row(self) -> Step:
        return self._rows[self._at]

    def act(self) -> Array:
        if self._at == self.length:  # not before: the last rollout's observations lie there
            trees.copy_into(self._shown[0], self._shown[-1])
            self._first[0] = self._first[self.length]
            self._at = 0
        seen = self.normaliser.see(self.current)
        if self._memory.shape[1]:
            acted = self._act_with_memory(seen)
        else:
            acted = self.actor.act(seen, self.noise)
        self._remember(self._at, seen, acted)
        return acted.actions

    def observe(self) -> None:
        row = self.row
        if row.finals:
            memory = self._memory
            self._ends += [(self._at, final, memory[final.env].copy()) for final in row.finals]
            self._episodes += row.episodes
        over = row.terminated | row.truncated
        self.normaliser.scale(row.reward, over)
        if self._memory.shape[1]:
            self._first[self._at + 1] = over | (self._first[self._at] & ~row.valid)
        self._at += 1
        self.full = self._at == self.length

    def take(self) -> Rollout:
        """What has been collected; a rollout that is full."""
        out = self._store
        assert out is not None
        last = self.normaliser.apply(self._shown[-1])
        out.next_value[:-1] = out.value[1:]
        out.next_value[-1] = self._value(last, self._memory)
        out.state, out.first = self._before, self._first[: self.length]
        self._bootstrap(out, self._ends)
        out.episodes, self._ends, self._episodes = self._episodes, [], []
        self.full = False
        return out

    def state(self) -> dict[str, Any]:
        """Plain data and arrays from which `load_state` goes on exactly; between two `collect`s.

        Not in it: the policy and the normaliser, which are not the collector's own.
        """
        envs = self.envs.state(self._shown[-1]) if self.begun else None
        state: dict[str, Any] = {"envs": envs, "noise": self.noise.state()}
        if self._memory.shape[1]:
            state |= {"memory": self._memory, "first": self._first[self.length]}
        return state

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Go on from `state()`; call it on a fresh collector, once the normaliser is loaded.

        Gives back, in words, what could not be restored exactly: environments that begin a new
        episode because theirs could not be continued.
        """
        self.noise.load_state(state["noise"])
        if state["envs"] is None:
            return []
        self.begun, self._at = True, self.length
        restored = self.envs.load_state(state["envs"])
        trees.copy_into(self._shown[-1], restored.obs)
        self.normaliser.forget(restored.restarted)
        if self._memory.shape[1]:
            self._memory = np.array(state["memory"], np.float32)
            self._first[self.length] = state["first"]
            self._first[self.length, restored.restarted] = True
        return restored.reasons

    def state_from(self, states: list[dict[str, Any]], first: int) -> dict[str, Any]:
        """A `state()` of these environments, of which the first has that number; made of the
        states of all workers that have had environments, in order."""
        each = len(states[0]["noise"]["streams"])
        parts = trees.parts_of(states, each, first, self.envs.num_envs)
        state: dict[str, Any] = {"noise": EnvNoise.state_from(trees.inner(parts, "noise"))}
        if states[0]["envs"] is None:
            return state | {"envs": None}
        more = trees.joined(parts, "memory", "first") if self._memory.shape[1] else {}
        return state | more | {"envs": self.envs.state_from(trees.inner(parts, "envs"))}

    def _act_with_memory(self, seen: Obs) -> Acted:
        self._memory[self._first[self._at]] = 0.0  # a new episode remembers nothing
        if self._at == 0:
            self._before = self._memory.copy()
        acted, self._memory = self.actor.act_with(  # type: ignore[attr-defined]
            seen, self.noise, self._memory
        )
        return acted  # type: ignore[no-any-return]

    def _value(self, obs: Obs, memory: Array) -> Array:
        if not memory.shape[1]:
            return self.actor.value(obs)
        return self.actor.value_with(obs, memory)  # type: ignore[attr-defined, no-any-return]

    def _remember(self, t: int, seen: Obs, acted: Acted) -> None:
        if self._store is None:  # shapes are known once the policy has spoken
            self._store = self._storage(acted)
        store = self._store
        store.action[t], store.logp[t] = acted.actions, acted.logp
        store.value[t], store.parameters[t] = acted.values, acted.parameters
        self.normaliser.put(self._seen, t, seen)

    def _storage(self, acted: Acted) -> Rollout:
        def like(x: Array) -> Array:
            return np.zeros((self.length, *x.shape), x.dtype)

        return Rollout(
            obs=self._seen,
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

    def _bootstrap(self, out: Rollout, ends: list[tuple[int, Final, Array]]) -> None:
        """V(final observation) where an episode was cut off but did not terminate."""
        cut = [end for end in ends if not out.terminated[end[0], end[1].env]]
        if not cut:
            return
        finals = trees.stack([final.obs for _, final, _ in cut])
        memory = np.stack([memory for _, _, memory in cut])
        values = self._value(self.normaliser.apply(finals), memory)
        for (t, final, _), value in zip(cut, values, strict=True):
            out.next_value[t, final.env] = value

    def _row(self, t: int) -> Step:
        flags = {name: flag[t] for name, flag in self._flags.items()}
        return Step(obs=self._shown[t + 1], reward=self._reward[t], **flags)


def rows_of(x: Obs, valid: Array) -> Obs:
    """[T, B, ...] -> [rows, ...], environment by environment, valid steps only.

    WHY environment first: joined in order of workers, rows of all workers then stand in the same
    order whatever the number of workers.
    """
    kept = None if valid.all() else valid.swapaxes(0, 1).reshape(-1)

    def flat(part: Array) -> Array:
        rows: Array = part.swapaxes(0, 1).reshape(-1, *part.shape[2:])
        return rows if kept is None else rows[kept]

    return trees.map(flat, x)
