"""Whole episodes: all workers step until those that have ended hold enough rows for a batch.

    running   lanes [B, room]: env i writes its steps one behind the other in lane i
    ended     rows [room]: when an episode ends, its lane is copied behind those that ended before
    a batch   the first episodes to have ended, on whichever worker, that together reach
              `batch_steps`, in order of their environments; the rest stay for the next batch

All workers take the same number of steps and tell each other now and then which episodes have
ended, so none waits for another's slowest episode. "First" counts steps, not seconds: the same seed
gives the same batches, row by row, whatever the number of workers.

Nothing is thrown away: an episode that was not needed opens the next batch, and one that still runs
goes on with the new weights. Such rows are some versions old, and are not passed off as new:

    logp, value   of the policy that acted: the ratio in the surrogate is then the true one
    parameters    of the policy that the update starts from. WHY: it is around that policy that the
                  trust region lies. Measured from older ones, a part of the allowed KL would be
                  spent before the first step, and the line search would halve good steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from manyhands import trees
from manyhands.collect.rollout import Rollout
from manyhands.envs.adapter import Episode, Final, Step, Stepper, VecAdapter
from manyhands.errors import WorkerError
from manyhands.math.running_stats import Normaliser
from manyhands.streams import EnvNoise
from manyhands.trees import Array
from manyhands.types import Actor, Obs

LONGEST = 200_000  # steps of one episode; the longest games of Atari take 27,000
_ROOM = 256  # rows to begin with
_LOOKS = 8  # how often workers look at each other's episodes while they collect one batch
_AT_ONCE = 1024  # rows of one forward pass: those of images take much memory
_KEY = "obs/"  # what the names of a Dict observation's columns begin with

Columns = dict[str, Array]
Exchange = Callable[[Any], list[Any]]  # every worker's small plain value, by rank


@dataclass
class EpisodeRollout(Rollout):
    """[N, 1] arrays: episode after episode, each whole. The next `collect` overwrites them."""

    taken: int = 0  # environment steps in this call, whichever batch they will belong to
    versions: Array = field(default_factory=lambda: np.zeros((0, 1), np.int64))  # who acted

    @property
    def steps(self) -> int:
        return self.taken

    @property
    def stale_share(self) -> float:
        return float((self.versions < self.version).sum()) / max(1, len(self.versions))


class Ended(NamedTuple):
    """An episode that no batch has had yet; the order is the same on all workers."""

    clock: int  # steps that its environment had taken, earlier episodes included
    rank: int
    number: int  # counts the episodes of its worker
    length: int


class Queue:
    """The ended episodes of all workers, as every worker knows them after a look."""

    def __init__(self, batch_steps: int, exchange: Exchange) -> None:
        self.batch_steps = batch_steps
        self._exchange = exchange
        self._waiting: list[Ended] = []
        self._news: list[list[int]] = []  # [clock, length] of this worker's, not yet told
        self._reported: list[int] = []  # episodes that each worker has reported
        self.rows = 0  # of the waiting episodes
        self.running = 0  # rows of episodes that still ran, on all workers, at the last look

    def add(self, clock: int, length: int) -> None:
        self._news.append([clock, length])

    def look(self, running: int) -> None:
        """Tell of this worker's episodes and hear of the others'. All workers call it together."""
        said = self._exchange([running, self._news])
        self._news = []
        self._reported = self._reported or [0] * len(said)
        self.running = 0
        for rank, (theirs, episodes) in enumerate(said):
            self.running += theirs
            for clock, length in episodes:
                self._waiting.append(Ended(clock, rank, self._reported[rank], length))
                self._reported[rank] += 1
                self.rows += length
        self._waiting.sort()

    @property
    def full(self) -> bool:
        return self.rows >= self.batch_steps

    def take(self) -> list[Ended]:
        """The next batch: the first episodes that together have enough rows."""
        rows = count = 0
        while rows < self.batch_steps:
            rows += self._waiting[count].length
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self.rows -= rows
        return taken

    def state(self) -> dict[str, Any]:
        """Between two batches, when nothing is left untold."""
        waiting = [list(ended) for ended in self._waiting]
        return {"waiting": waiting, "told": self._reported, "running": self.running}

    def load_state(self, state: dict[str, Any]) -> None:
        self._waiting = [Ended(*ended) for ended in state["waiting"]]
        self._reported, self.running = list(state["told"]), int(state["running"])
        self.rows = sum(ended.length for ended in self._waiting)


class EpisodeCollector(Stepper):
    """Steps the environments of one worker until enough episodes have ended on all of them.

    Args:
        batch_steps: of all workers together.
        rank, size: this worker's number, and how many there are.
        exchange: how they tell each other; None with one worker.
        longest: steps after which an episode is taken for one that never ends.
    """

    def __init__(
        self,
        envs: VecAdapter,
        actor: Actor,
        batch_steps: int,
        noise: EnvNoise,
        normaliser: Normaliser,
        *,
        rank: int = 0,
        size: int = 1,
        exchange: Exchange | None = None,
        longest: int = LONGEST,
    ) -> None:
        self.envs, self.actor = envs, actor
        self.noise, self.normaliser = noise, normaliser
        self.version = -1  # counts batches: between two of them the policy changes once
        self._rank, self._longest = rank, longest
        self._queue = Queue(batch_steps, exchange or (lambda value: [value]))
        self._together = size * envs.num_envs  # rows of all workers in one step
        self._patience = max(1, batch_steps // (self._together * _LOOKS))  # steps between looks
        self._clock = 0
        self._now = envs.blank()  # overwritten by every step
        self._lanes: Columns = {}  # [B, room, ...] the running episodes
        self._numbers = np.arange(envs.num_envs)
        self._lengths = np.zeros(envs.num_envs, np.intp)  # steps in each lane
        self._rows: Columns = {}  # [room, ...] the ended ones
        self._filled = 0  # rows of the ended ones
        self._filed: list[tuple[int, int]] = []  # (env, length) of the ended ones, as they lie
        self._given = 0  # rows of the batch that was handed out last
        self._cut: list[tuple[int, Obs]] = []  # (row, last observation) that await V of it
        self._unused = np.random.default_rng(0)  # for actions that nobody takes
        self._open = False  # whether a batch is being collected
        self._taken = 0  # steps for it
        self._episodes: list[Episode] = []  # that ended in them
        self._until_look = 0  # steps

    def collect(self) -> EpisodeRollout:
        """The next whole episodes; on all workers together at least `batch_steps` rows."""
        self.fill()
        return self.take()

    @property
    def current(self) -> Obs:
        return self._now.obs

    @property
    def row(self) -> Step:
        return self._now

    def take(self) -> EpisodeRollout:
        """A batch, of which there is enough."""
        if not self._open:
            self._begin_batch()
        self._bootstrap()
        self._give(sum(e.rank == self._rank for e in self._queue.take()))
        self._centre()
        self.full, self._open = self._queue.full, False
        return self._rollout(self._episodes, self._taken)

    def _begin_batch(self) -> None:
        self._forget_given()
        self.version += 1
        self._open, self._taken, self._episodes = True, 0, []
        self._until_look = self._steps_to_look()

    def _steps_to_look(self) -> int:
        """Not even if all running episodes ended at once would there be enough before that."""
        queue = self._queue
        missing = queue.batch_steps - queue.rows - queue.running
        return max(self._patience, missing // self._together)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, between two batches: episodes that run, and those not given."""
        if self.version < 0:
            return {"version": -1, "noise": self.noise.state()}
        longest = int(self._lengths.max())
        return {
            "version": self.version,
            "noise": self.noise.state(),
            "envs": self.envs.state(self._now.obs),
            "clock": self._clock,
            "lengths": self._lengths.copy(),
            "lanes": {name: lane[:, :longest].copy() for name, lane in self._lanes.items()},
            "rows": {n: x[self._given : self._filled].copy() for n, x in self._rows.items()},
            "filed": [list(episode) for episode in self._filed],
            "queue": self._queue.state(),
        }

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Go on from a `state()`; in words, what could not be put back."""
        self.version = int(state["version"])
        self.noise.load_state(state["noise"])
        self.begun = self.version >= 0
        if not self.begun:
            return []
        restored = self.envs.load_state(state["envs"])
        self._now.obs = restored.obs
        self._clock = int(state["clock"])
        self._lengths = np.array(state["lengths"], np.intp)
        self._lanes = {
            n: _with_room(x, x.shape[1] + _ROOM, axis=1) for n, x in state["lanes"].items()
        }
        self._rows = {n: _with_room(x, len(x) + _ROOM, axis=0) for n, x in state["rows"].items()}
        self._filed = [(int(env), int(length)) for env, length in state["filed"]]
        self._filled, self._given = len(state["rows"]["logp"]), 0
        self._queue.load_state(state["queue"])
        self.full = self._queue.full
        self._lengths[restored.restarted] = 0  # their half episodes are gone
        self.normaliser.forget(restored.restarted)
        return restored.reasons

    def state_from(self, states: list[dict[str, Any]], first: int) -> dict[str, Any]:
        """As `Collector.state_from`; episodes that no batch has had go where their environment
        goes, and keep their order."""
        one, each, here = states[0], len(states[0]["noise"]["streams"]), self.envs.num_envs
        parts = trees.parts_of(states, each, first, here)
        noise = EnvNoise.state_from(trees.inner(parts, "noise"))
        if one["version"] < 0:
            return {"version": -1, "noise": noise}
        ended = [_ended(state) for state in states]
        counts = [0] * (each * len(states) // here)
        waiting: list[list[int]] = []
        mine: list[tuple[int, Columns]] = []  # (env here, rows)
        for clock, rank, _, length in one["queue"]["waiting"]:
            env, rows = ended[rank].pop(0)
            owner, own = divmod(rank * each + env, here)
            waiting.append([clock, owner, counts[owner], length])
            counts[owner] += 1
            if owner == self._rank:
                mine.append((own, rows))
        no_rows = trees.take(one["rows"], slice(0, 0))
        room = max(int(np.max(state["lengths"][where])) for state, where in parts)
        lanes = [
            {n: _with_room(x[where, :room], room, axis=1) for n, x in state["lanes"].items()}
            for state, where in parts
        ]
        return {
            "version": one["version"],
            "noise": noise,
            "envs": self.envs.state_from(trees.inner(parts, "envs")),
            "clock": one["clock"],
            "lengths": trees.joined(parts, "lengths")["lengths"],
            "lanes": trees.concat(lanes),
            "rows": trees.concat([no_rows, *(rows for _, rows in mine)]),
            "filed": [[env, len(rows["logp"])] for env, rows in mine],
            "queue": one["queue"] | {"waiting": waiting, "told": counts},
        }

    def act(self) -> Array:
        if not self._open:
            self._begin_batch()
        seen = self.normaliser.see(self._now.obs)
        acted = self.actor.act(seen, self.noise)
        columns = _columns_of(seen)
        columns["action"], columns["logp"] = acted.actions, acted.logp
        columns["value"], columns["parameters"] = acted.values, acted.parameters
        if not self._lanes:  # shapes are known once the policy has spoken
            self._make_room(columns)
        place = self._place()
        for name, column in columns.items():
            self._lanes[name][place] = column
        self._lanes["version"][place] = self.version
        return acted.actions

    def observe(self) -> None:
        now = self._now
        self._clock += 1
        self.normaliser.scale(now.reward, now.terminated | now.truncated)
        self._lanes["reward"][self._numbers, self._lengths] = now.reward
        self._lengths += now.valid  # a row that is no transition is written over
        for final in now.finals:
            self._file(final)
        self._taken += int(np.count_nonzero(now.valid))
        self._episodes += now.episodes
        self._until_look -= 1
        if self._until_look == 0:
            self._queue.look(int(self._lengths.sum()))
            self.full, self._until_look = self._queue.full, self._steps_to_look()

    def _place(self) -> tuple[Array, Array]:
        """Where the rows of this step go: one in each lane."""
        longest, room = int(self._lengths.max()), self._lanes["logp"].shape[1]
        if longest >= self._longest:
            raise WorkerError(
                f"an episode of env {int(self._lengths.argmax())} has not ended in {longest:,} "
                "steps. With --collect episodes every episode must end: give the environment a "
                "time limit (--env-kwargs max_episode_steps=1000), or use --collect steps",
                rank=self.envs.worker,
            )
        if longest >= room:
            self._lanes = {n: _with_room(x, 2 * room, axis=1) for n, x in self._lanes.items()}
        return self._numbers, self._lengths

    def _make_room(self, columns: Columns) -> None:
        for name, x in columns.items():
            self._lanes[name] = np.zeros((len(x), _ROOM, *x.shape[1:]), x.dtype)
            self._rows[name] = np.zeros((_ROOM, *x.shape[1:]), x.dtype)
        for name, kind in (("reward", np.float32), ("version", np.int64)):
            self._lanes[name] = np.zeros((self.envs.num_envs, _ROOM), kind)
            self._rows[name] = np.zeros(_ROOM, kind)
        for name in ("terminated", "truncated"):
            self._rows[name] = np.zeros(_ROOM, bool)
        self._rows["next_value"] = np.zeros_like(self._rows["value"])

    def _file(self, final: Final) -> None:
        """Copy the lane of an episode that has just ended behind the others."""
        env, now, rows = final.env, self._now, self._rows
        first, length = self._filled, int(self._lengths[env])
        end, room = first + length, len(rows["logp"])
        if end > room:
            room = max(2 * room, end)
            self._rows = rows = {n: _with_room(x, room, axis=0) for n, x in rows.items()}
        for name, lane in self._lanes.items():
            rows[name][first:end] = lane[env, :length]
        rows["next_value"][first : end - 1] = rows["value"][first + 1 : end]
        rows["next_value"][end - 1] = 0.0
        for name, flag in (("terminated", now.terminated), ("truncated", now.truncated)):
            rows[name][first:end] = False
            rows[name][end - 1] = flag[env]
        if not now.terminated[env]:
            self._cut.append((end - 1, final.obs))
        self._filled = end
        self._filed.append((env, length))
        self._queue.add(self._clock, length)
        self._lengths[env] = 0

    def _bootstrap(self) -> None:
        """V(last observation) where an episode was cut off but did not terminate."""
        if self._cut:
            finals = trees.stack([obs for _, obs in self._cut])
            values = self.actor.value(self.normaliser.apply(finals))
            self._rows["next_value"][[row for row, _ in self._cut]] = values
            self._cut.clear()

    def _give(self, episodes: int) -> None:
        """Take the first episodes for a batch, and sort their rows by environment.

        WHY: workers hold consecutive environments, so the rows of all workers, joined, then stand
        in the same order however many workers there are, and minibatches are the same rows.
        """
        given, self._filed = self._filed[:episodes], self._filed[episodes:]
        lengths = np.array([length for _, length in given], np.intp)
        starts = np.cumsum(lengths) - lengths
        self._given = int(lengths.sum())
        by_env = np.argsort([env for env, _ in given], kind="stable")
        if (by_env[1:] > by_env[:-1]).all():
            return
        rows = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in by_env])
        for x in self._rows.values():
            x[: self._given] = x[rows]

    def _centre(self) -> None:
        """Distribution parameters as the policy gives them now, for rows of older ones."""
        stale = np.flatnonzero(self._rows["version"][: self._given] < self.version)
        for at in range(0, len(stale), _AT_ONCE):
            some = stale[at : at + _AT_ONCE]
            obs = _obs_of({name: x[some] for name, x in self._rows.items() if _is_obs(name)})
            self._rows["parameters"][some] = self.actor.act(obs, self._unused).parameters

    def _forget_given(self) -> None:
        """Move the episodes that no batch has had yet to the front."""
        if not self._given:
            return
        first, last = self._given, self._filled
        for x in self._rows.values():
            x[: last - first] = x[first:last]  # numpy minds that the two may overlap
        self._filled, self._given = last - first, 0

    def _rollout(self, episodes: list[Episode], taken: int) -> EpisodeRollout:
        rows = {name: x[: self._given, None] for name, x in self._rows.items()}  # [N, 1, ...]
        return EpisodeRollout(
            obs=_obs_of({name: x for name, x in rows.items() if _is_obs(name)}),
            action=rows["action"],
            logp=rows["logp"],
            value=rows["value"],
            parameters=rows["parameters"],
            reward=rows["reward"],
            terminated=rows["terminated"],
            truncated=rows["truncated"],
            valid=np.ones((self._given, 1), bool),
            next_value=rows["next_value"],
            episodes=episodes,
            version=self.version,
            taken=taken,
            versions=rows["version"],
        )


def _ended(state: dict[str, Any]) -> list[tuple[int, Columns]]:
    """(env, rows) of the episodes of a worker that no batch has had, in the order in which it has
    reported them."""
    ends = np.cumsum([0, *(length for _, length in state["filed"])])
    return [
        (env, trees.take(state["rows"], slice(start, start + length)))
        for (env, length), start in zip(state["filed"], ends, strict=False)
    ]


def _is_obs(name: str) -> bool:
    return name == "obs" or name.startswith(_KEY)


def _columns_of(obs: Obs) -> Columns:
    return {_KEY + k: v for k, v in obs.items()} if isinstance(obs, dict) else {"obs": obs}


def _obs_of(columns: Columns) -> Obs:
    whole = columns.get("obs")
    return {k.removeprefix(_KEY): v for k, v in columns.items()} if whole is None else whole


def _with_room(x: Array, room: int, *, axis: int) -> Array:
    """The same numbers at the start of a longer array."""
    shape = list(x.shape)
    shape[axis] = room
    longer = np.zeros(shape, x.dtype)
    longer[tuple(slice(n) for n in x.shape)] = x
    return longer
