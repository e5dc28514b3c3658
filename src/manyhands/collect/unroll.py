"""Unrolls: what an actor sends and a learner learns from, with all that V-trace needs.

    obs, action, logp, reward, terminated, truncated, valid     [T, B], as in a rollout
    edges      observations whose value follows a row although the next row does not show them: the
               one after the last row, and the final one of an episode that was cut off
    edge_at    [E, 2] the (t, b) of those rows
    state      [B, S] an LSTM's state before the first row; `first` [T, B] where an episode begins
    version    of the policy that acted
    actor, restarts, number, steps, episodes    who made it, and what happened

The learner computes every value with its own weights, so values do not travel. With whole episodes
an unroll is one episode, [T, 1] with a T of its own; `joined` pads.

Unrolls travel as plain dicts of arrays: written once, where the learner reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from manyhands import trees
from manyhands.envs.adapter import Final, Step, Stepper, VecAdapter
from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError
from manyhands.math.running_stats import Normaliser
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import Acted, Actor, Obs

Unroll = dict[str, Any]
COLUMNS = ("action", "logp", "reward", "terminated", "truncated", "valid")
_NEEDED = (*COLUMNS, "obs", "edges", "edge_at", "version")
LONGEST = 200_000  # steps of one episode, as in episodes.py


class Finished(NamedTuple):
    """An episode that has ended in this actor's environments."""

    env: int
    total_return: float
    length: int
    info: tuple[float, ...] = ()


class UnrollCollector(Stepper):
    """Steps the environments of one actor; `collect` gives the unrolls that are ready to go.

    Args:
        envs, actor, noise, normaliser: as of a rollout's collector.
        length: steps of each environment between two looks for newer weights.
        whole_episodes: an unroll is one episode, given out when it has ended.
        state_size: of the actor's recurrent state; 0: it has none.
    """

    def __init__(
        self,
        envs: VecAdapter,
        actor: Actor,
        length: int,
        noise: EnvNoise,
        normaliser: Normaliser,
        *,
        whole_episodes: bool = False,
        state_size: int = 0,
    ) -> None:
        self.envs, self.actor, self.length = envs, actor, length
        self.noise, self.normaliser = noise, normaliser
        self.finished: list[Finished] = []  # since they were last taken
        self.valid_steps = 0  # of the last `collect`, and those carried over
        self._carried = 0
        self._whole = whole_episodes
        b = envs.num_envs
        self._raw = zeros(envs.observation_space, (length + 1, b))
        self._seen = normaliser.room(self._raw)
        flags = ("terminated", "truncated", "valid")
        self._store: dict[str, Array] = {n: np.zeros((length, b), bool) for n in flags}
        self._store["reward"] = np.zeros((length, b), np.float32)
        self._rows = [
            Step(
                obs=trees.take(self._raw, t + 1),
                reward=self._store["reward"][t],
                **{name: self._store[name][t] for name in flags},
            )
            for t in range(length)
        ]
        self._at = 0  # the row that is written next; after the last one, `length`
        self._ends: list[tuple[int, Final]] = []
        self._before = np.zeros((b, state_size), np.float32)  # the state at the first row
        self.memory = np.zeros((b, state_size), np.float32)
        self._first = np.ones((length + 1, b), bool)
        self._lanes: list[list[Unroll]] = [[] for _ in range(b)]  # of episodes that still run
        self._began = [-1] * b  # the version with which each running episode began

    def collect(self, version: int) -> list[Unroll]:
        """The next T steps of every environment with the policy of that version."""
        self.fill()
        return self.take(version)

    @property
    def current(self) -> Obs:
        return trees.take(self._raw, self._at)

    @property
    def row(self) -> Step:
        return self._rows[self._at]

    def act(self) -> Array:
        if self._at == self.length:
            trees.copy_into(trees.take(self._raw, 0), trees.take(self._raw, self.length))
            self._first[0] = self._first[self.length]
            self._at = 0
        t = self._at
        if t == 0:
            self._before = self.memory.copy()
        seen = self.normaliser.see(self.current)
        self.normaliser.put(self._seen, t, seen)
        acted = self._act(seen, t)
        self._remember(t, acted)
        return acted.actions

    def observe(self) -> None:
        t, row = self._at, self.row
        if row.finals:
            self._ends += [(t, final) for final in row.finals]
            self.finished += [
                Finished(e.env, e.total_return, e.length, e.info) for e in row.episodes
            ]
        over = row.terminated | row.truncated
        self._first[t + 1] = over | (self._first[t] & ~row.valid)
        self.normaliser.scale(row.reward, over)
        self._at += 1
        self.full = self._at == self.length

    def take(self, version: int) -> list[Unroll]:
        """What has been collected, with the policy of that version."""
        last = self.normaliser.apply(trees.take(self._raw, self.length))
        self.normaliser.put(self._seen, self.length, last)
        self.valid_steps = int(self._store["valid"].sum()) + self._carried
        self._carried = 0
        whole = self._as_one(self._before, self._ends, version)
        self._ends, self.full = [], False
        return self._into_episodes(whole, version) if self._whole else [_owned(whole)]

    def state(self) -> dict[str, Any]:
        """Plain data and arrays from which `load_state` goes on exactly; between two `collect`s."""
        envs = self.envs.state(trees.take(self._raw, self.length)) if self.begun else None
        return {
            "envs": envs,
            "noise": self.noise.state(),
            "memory": self.memory,
            "first": self._first[self.length],
            "lanes": self._lanes,
            "began": self._began,
        }

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Go on from `state()`; in words, what could not be restored exactly."""
        self.noise.load_state(state["noise"])
        if state["envs"] is None:
            return []
        self.begun, self._at = True, self.length
        restored = self.envs.load_state(state["envs"])
        trees.copy_into(trees.take(self._raw, self.length), restored.obs)
        self.normaliser.forget(restored.restarted)
        self.memory = np.array(state["memory"], np.float32)
        self._first[self.length] = state["first"]
        self._lanes, self._began = [list(lane) for lane in state["lanes"]], list(state["began"])
        for b in restored.restarted:
            self._first[self.length, b], self._lanes[b], self._began[b] = True, [], -1
        return restored.reasons

    def carry(self, steps: int) -> None:
        """Steps that have not been reported yet: no unroll was ready to go."""
        self._carried = steps

    def _act(self, seen: Obs, t: int) -> Acted:
        if self.memory.shape[1] == 0:
            return self.actor.act(seen, self.noise)
        self.memory[self._first[t]] = 0.0  # a new episode remembers nothing
        acted, self.memory = self.actor.act_with(  # type: ignore[attr-defined]
            seen, self.noise, self.memory
        )
        return acted  # type: ignore[no-any-return]

    def _remember(self, t: int, acted: Acted) -> None:
        for name, value in (("action", acted.actions), ("logp", acted.logp)):
            if name not in self._store:  # shapes are known once the policy has spoken
                self._store[name] = np.zeros((self.length, *value.shape), value.dtype)
            self._store[name][t] = value

    def _as_one(self, state: Array, ends: list[tuple[int, Final]], version: int) -> Unroll:
        """All environments in one unroll; its arrays are views of storage that is used again."""
        store, last = self._store, self.length - 1
        cut = [(t, f) for t, f in ends if not store["terminated"][t, f.env]]
        open_envs = np.flatnonzero(~(store["terminated"][last] | store["truncated"][last]))
        at = [(last, int(b)) for b in open_envs] + [(t, f.env) for t, f in cut]
        edges = trees.take(trees.take(self._seen, self.length), open_envs)
        if cut:
            finals = self.normaliser.apply(trees.stack([f.obs for _, f in cut]))
            edges = trees.concat([edges, finals])
        unroll = {name: store[name] for name in COLUMNS} | {
            "obs": trees.take(self._seen, slice(self.length)),
            "edges": edges,
            "edge_at": np.array(at, np.int64).reshape(-1, 2),
            "version": version,
        }
        if state.shape[1]:
            unroll |= {"state": state, "first": self._first[: self.length].copy()}
        return unroll

    # -- whole episodes ------------------------------------------------------------------------

    def _into_episodes(self, whole: Unroll, version: int) -> list[Unroll]:
        """Cut environment by environment where episodes end; the rest waits in its lane."""
        ready = []
        for b in range(self.envs.num_envs):
            if self._began[b] < 0:
                self._began[b] = version
            over = whole["terminated"][:, b] | whole["truncated"][:, b]
            at = 0
            for end in np.flatnonzero(over):
                piece = _piece(whole, b, at, int(end) + 1)
                ready.append(_end_to_end([*self._lanes[b], piece], self._began[b]))
                self._lanes[b], self._began[b], at = [], version, int(end) + 1
            if at < self.length:
                self._lanes[b].append(_piece(whole, b, at, self.length))
            if len(self._lanes[b]) * self.length > LONGEST:
                raise ConfigError(
                    f"env {b} has run for {LONGEST:,} steps without an end, and whole episodes "
                    "were asked for; type: --collect steps, or give the environment a time limit"
                )
        return ready


def check(unroll: Unroll) -> None:
    """ConfigError unless everything is there that V-trace needs."""
    missing = [name for name in _NEEDED if name not in unroll]
    if "logp" in missing:
        raise ConfigError(
            "an unroll came without the log-probability of its actions (logp). V-trace weighs each "
            "action by how likely it was for the policy that acted: let the actor's `act` return "
            "it, and send it along"
        )
    if missing:
        raise ConfigError(f"an unroll came without {', '.join(missing)}")


def joined(unrolls: Sequence[Unroll]) -> Unroll:
    """Several unrolls side by side, [T, B1 + B2 + …]; shorter ones are padded with invalid rows."""
    for unroll in unrolls:
        check(unroll)
    if len(unrolls) == 1:
        return dict(unrolls[0])
    length = max(len(u["reward"]) for u in unrolls)
    out: Unroll = {name: _beside([u[name] for u in unrolls], length) for name in COLUMNS}
    out["obs"] = _beside([u["obs"] for u in unrolls], length)
    out["edges"] = trees.concat([u["edges"] for u in unrolls])
    widths = [u["reward"].shape[1] for u in unrolls]
    shifts = np.cumsum([0, *widths[:-1]])
    at = [u["edge_at"] + [0, shift] for u, shift in zip(unrolls, shifts, strict=True)]
    out["edge_at"] = np.concatenate(at)
    out["version"] = min(int(u["version"]) for u in unrolls)
    if "state" in unrolls[0]:
        out["state"] = np.concatenate([u["state"] for u in unrolls])
        out["first"] = _beside([u["first"] for u in unrolls], length)
    return out


def _beside(parts: list[Obs], length: int) -> Obs:
    def padded(part: Array) -> Array:
        if len(part) == length:
            return part
        room = np.zeros((length, *part.shape[1:]), part.dtype)
        room[: len(part)] = part
        return room

    return trees.map(lambda *xs: np.concatenate([padded(x) for x in xs], axis=1), *parts)


def _owned(whole: Unroll) -> Unroll:
    """Copied out of storage that will be used again. WHY: where one worker acts and learns, no
    channel copies it, and a replay, or an update of several unrolls, would hold the newest only."""
    owned: Unroll = trees.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, whole)
    return owned


def _piece(whole: Unroll, b: int, start: int, stop: int) -> Unroll:
    """Rows of one environment, copied out of storage that will be used again."""
    names = (*COLUMNS, "obs", *(["first"] if "first" in whole else []))
    piece: Unroll = trees.map(
        lambda x: x[start:stop, b : b + 1].copy(), {name: whole[name] for name in names}
    )
    at = whole["edge_at"]
    mine = (at[:, 1] == b) & (at[:, 0] >= start) & (at[:, 0] < stop)
    mine &= at[:, 0] == stop - 1  # an end; where the piece merely stops, its lane goes on
    piece["edges"], piece["edge_at"] = trees.take(whole["edges"], mine), at[mine] - [start, b]
    if "state" in whole:
        # An LSTM starts an episode from nothing: only the first piece of a lane keeps it, as zeros.
        piece["state"] = np.zeros((1, whole["state"].shape[1]), np.float32)
    return piece


def _end_to_end(pieces: list[Unroll], version: int) -> Unroll:
    """The pieces of one episode as one unroll; only the last one's edge is an edge of it."""
    last, before = pieces[-1], sum(len(p["reward"]) for p in pieces[:-1])
    names = [n for n in last if n not in ("edges", "edge_at", "state")]
    out: Unroll = {n: trees.concat([p[n] for p in pieces]) for n in names}
    out |= {"edges": last["edges"], "edge_at": last["edge_at"] + [before, 0], "version": version}
    if "state" in last:
        out["state"] = last["state"]
    return out
