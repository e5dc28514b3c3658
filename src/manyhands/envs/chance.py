"""An environment's own chance: seeds of its episodes, noise of its actions, global generators.

    EpisodeSeeds   what `env.reset(seed)` is given, episode by episode
    EnvNoise       what a policy draws for its actions there
    OwnChance      `random`, `np.random` and torch as the environment itself sees them

WHY one of each for every environment, and none for a worker: an environment then draws the same
numbers whichever worker steps it. A run with four workers plays the episodes of a run with one, and
a resumed run plays the running ones again, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manyhands import seeding, streams
from manyhands.trees import Array

# numpy's SeedSequence (after M. E. O'Neill's seed_seq_fe), constants as in its source.
_WORD = 0xFFFFFFFF
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = 0xCA01F9DD, 0x4973F715
_POOL = 4  # words in the pool

_AHEAD = 128  # steps drawn at once: a call of a generator costs more than the numbers

_TRIAL = 64  # steps in which all generators change hands
_LOOK = 1024  # steps between two looks
_MOST_TRIALS = 4  # what draws outside of environments (a network with dropout) looks the same
_OUTSIDE, _BETWEEN = -1, -2  # no environment: the worker's streams are in place, or nobody's

Path = Callable[[int, int], np.random.SeedSequence]  # of (environment, episode)


class EpisodeSeeds:
    """`seeds(episode) == seeding.integer(seed, "env", worker, env, episode)`, quickly.

    That builds a whole `SeedSequence` for each episode: 12 µs, a tenth of a short CartPole episode.
    The episode is the last word that enters the hash, so everything before it is worked out once;
    the rest is a dozen integer operations. The numbers are the same ones: a test compares them, and
    would fail if numpy ever changed its hash.
    """

    def __init__(self, seed: int, worker: int, env: int) -> None:
        parent = seeding.sequence(seed, "env", worker, env)
        self._key = (seed, worker, env)
        self._pool = [int(word) for word in parent.pool]
        words = max(_POOL, -(-seed.bit_length() // 32)) + len(parent.spawn_key)
        # Each use of the hash moves its constant on: 4 to fill the pool, 12 to stir it, and 4 for
        # every word beyond the first four.
        uses = _POOL + _POOL * (_POOL - 1) + _POOL * (words - _POOL)
        constant = _INIT_A * pow(_MULT_A, uses, 2**32) & _WORD
        self._constants = []  # (before, after) for each word of the pool
        for _ in range(_POOL):
            moved = constant * _MULT_A & _WORD
            self._constants.append((constant, moved))
            constant = moved

    def chance(self, episode: int) -> np.random.SeedSequence:
        """Of the global streams that an environment may draw from; see `OwnChance`."""
        seed, worker, env = self._key
        return seeding.sequence(seed, "chance", worker, env, episode)

    def __call__(self, episode: int) -> int:
        if episode > _WORD or max(self._key[1:]) > _WORD:  # more than one word: the long way
            seed, worker, env = self._key
            return seeding.integer(seed, "env", worker, env, episode)
        low, high = self._stirred(episode, 0), self._stirred(episode, 1)
        before, after = _INIT_B, _INIT_B * _MULT_B & _WORD
        low = (low ^ before) * after & _WORD
        before, after = after, after * _MULT_B & _WORD
        high = (high ^ before) * after & _WORD
        low, high = low ^ low >> 16, high ^ high >> 16
        return (high << 32 | low) >> 33

    def _stirred(self, word: int, place: int) -> int:
        """Word `place` of the pool once `word` has been mixed in."""
        before, after = self._constants[place]
        hashed = (word ^ before) * after & _WORD
        hashed ^= hashed >> 16
        mixed = (_MIX_L * self._pool[place] - _MIX_R * hashed) & _WORD
        return mixed ^ mixed >> 16


class EnvNoise:
    """Chance for actions: looks like a numpy Generator; row i is environment `first + i`."""

    def __init__(self, seed: int, first: int, envs: int) -> None:
        self._streams = [seeding.generator(seed, "action", first + i) for i in range(envs)]
        self._drawn: dict[tuple[str, tuple[int, ...]], tuple[Array, int]] = {}

    def random(self, size: tuple[int, ...]) -> Array:
        return self._next("random", size[1:])

    def standard_normal(self, size: tuple[int, ...], dtype: Any = np.float32) -> Array:
        return self._next("standard_normal", size[1:])

    def _next(self, kind: str, shape: tuple[int, ...]) -> Array:
        block, at = self._drawn.get((kind, shape), (np.empty(0), _AHEAD))
        if at == _AHEAD:
            rows = [getattr(s, kind)((_AHEAD, *shape), dtype=np.float32) for s in self._streams]
            block, at = np.stack(rows, axis=1), 0  # [ahead, envs, ...]
        self._drawn[(kind, shape)] = (block, at + 1)
        values: Array = block[at]
        return values

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs to draw the same numbers."""
        drawn = [[k, list(s), block, at] for (k, s), (block, at) in self._drawn.items()]
        return {"streams": [s.bit_generator.state for s in self._streams], "drawn": drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.bit_generator.state = saved
        self._drawn = {(k, tuple(s)): (block, at) for k, s, block, at in state["drawn"]}


class OwnChance:
    """Streams of its own for each environment that draws from `random`, `np.random` or torch.

    An episode follows from its seed and actions only if nobody else draws from its generators in
    between. Most environments draw from none of them, and a change of hands costs as much as a step
    of CartPole. So all generators change hands for the first steps, then those that were drawn
    from. Every so often a look at the others shows whether somebody has begun to use them: then
    there is another trial.

    `enter(i)` before environment i does something, `leave()` when all have; `begin(i)` with each
    episode; `tick()` with each step of all.
    """

    def __init__(self, count: int, path: Path) -> None:
        self._path = path
        self.kinds: Sequence[str] = streams.KINDS  # those that change hands
        self._used: set[str] = set()
        self._streams: list[dict[str, Any]] = [{} for _ in range(count)]
        self._fresh: list[dict[str, int]] = [{} for _ in range(count)]  # marks, at the beginning
        self._outside: dict[str, Any] = {}
        self._marks: dict[str, int] = {}  # of the worker's own, at the last look
        self._episodes = [0] * count
        self._inside = _OUTSIDE
        self._left = _TRIAL  # steps of this trial, or until the next look
        self._trial = True
        self._trials = 1

    def enter(self, env: int) -> None:
        if self._inside == env or not self.kinds:
            return
        if self._inside == _OUTSIDE:
            self._outside = {kind: streams.take(kind) for kind in self.kinds}
        elif self._inside != _BETWEEN:
            self._set_aside()
        self._inside = env
        streams.put_all(self._streams[env])

    def begin(self, env: int, episode: int) -> None:
        """An environment begins an episode; it is entered."""
        if self._inside == env:
            self._set_aside()
            self._inside = _BETWEEN
        self._notice(env)
        self._episodes[env] = episode
        self._renew(env, self.kinds)
        self.enter(env)

    def leave(self) -> None:
        """The worker's own streams are in place again."""
        if self._inside != _OUTSIDE:
            self._set_aside()
            self._inside = _OUTSIDE
            streams.put_all(self._outside)

    def tick(self) -> bool:
        """Once a step of all environments, outside of them; whether `kinds` are others now."""
        self._left -= 1
        if self._left > 0:
            return False
        if self._trial:
            return self._end_trial()
        return self._look()

    def _end_trial(self) -> bool:
        for env in range(len(self._streams)):
            self._notice(env)
        self._trial = False
        self._change_to([kind for kind in streams.KINDS if kind in self._used])
        self._marks = self._marks_outside()
        self._left = _LOOK
        return True

    def _look(self) -> bool:
        marks, before = self._marks_outside(), self._marks
        self._marks, self._left = marks, _LOOK
        if marks == before or self._trials == _MOST_TRIALS:
            return False
        self._trial, self._left = True, _TRIAL
        self._trials += 1
        self._change_to(streams.KINDS)
        return True

    def _change_to(self, kinds: Sequence[str]) -> None:
        for env, mine in enumerate(self._streams):
            self._streams[env] = {kind: mine[kind] for kind in kinds if kind in mine}
        self.kinds = kinds
        for env in range(len(self._streams)):  # nobody has drawn from those that were not in use
            self._renew(env, [kind for kind in kinds if kind not in self._streams[env]])

    def _renew(self, env: int, kinds: Sequence[str]) -> None:
        """Streams as they are at the beginning of the running episode."""
        if not kinds:
            return
        path = self._path(env, self._episodes[env])
        words = path.generate_state(len(streams.KINDS), np.uint64)
        for kind, word in zip(streams.KINDS, words, strict=True):
            if kind in kinds:
                self._streams[env][kind] = streams.seeded(kind, int(word >> 1))
                if self._trial:
                    self._fresh[env][kind] = streams.mark(kind, self._streams[env][kind])

    def _notice(self, env: int) -> None:
        """Which generators this environment has drawn from in its episode."""
        for kind, stream in self._streams[env].items() if self._trial else ():
            if streams.mark(kind, stream) != self._fresh[env][kind]:
                self._used.add(kind)

    def _set_aside(self) -> None:
        mine = self._streams[self._inside]
        for kind in self.kinds:
            mine[kind] = streams.take(kind, whole=False)

    def _marks_outside(self) -> dict[str, int]:
        others = [kind for kind in streams.KINDS if kind not in self._used]
        return {kind: streams.mark(kind, streams.take(kind)) for kind in others}

    # -- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Without the streams: they follow from the episodes, which are played again."""
        return {
            "used": sorted(self._used),
            "kinds": list(self.kinds),
            "marks": self._marks,
            "left": self._left,
            "trial": self._trial,
            "trials": self._trials,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Before the running episodes are played again."""
        self._used, self.kinds = set(state["used"]), tuple(state["kinds"])
        self._marks = {kind: int(mark) for kind, mark in state["marks"].items()}
        self._left, self._trial = int(state["left"]), bool(state["trial"])
        self._trials = int(state["trials"])

    def streams_of(self, env: int) -> dict[str, Any]:
        """As plain data: for an environment whose episode is not played again."""
        mine = self._streams[env]
        return {kind: streams.to_plain(kind, mine[kind]) for kind in self.kinds if kind in mine}

    def load_streams_of(self, env: int, plain: dict[str, Any]) -> None:
        """After `begin`, and outside."""
        for kind, stream in plain.items():
            self._streams[env][kind] = streams.from_plain(kind, stream)
