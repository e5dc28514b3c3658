"""Streams of random numbers: an owner's own of the global generators, and an environment's.

Python's, numpy's and torch's global generators are shared by all that runs in a process. At any
time the streams of one owner are in place; those of the others are set aside. Owners are the
workers of the inline engine, and environments that draw from these generators.

An environment's own chance is in three parts:

    EpisodeSeeds   what `env.reset(seed)` is given, episode by episode
    EnvNoise       what a policy draws for its actions there
    OwnChance      `random`, `np.random` and torch as the environment itself sees them

WHY one of each for every environment, and none for a worker: an environment then draws the same
numbers whichever worker steps it. A run with four workers plays the episodes of a run with one, and
a resumed run plays the running ones again, to the bit.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from manyhands import seeding, trees
from manyhands.trees import Array, Parts

KINDS = ("python", "numpy", "torch")


@contextmanager
def given_back() -> Iterator[None]:
    """Whatever is drawn or seeded inside, outside it was never there."""
    before = take_all()
    put_all(copy_all(before))
    try:
        yield
    finally:
        put_all(before)


def take_all() -> dict[str, Any]:
    """The streams that are in place; they may be put back once others have been."""
    return {kind: take(kind) for kind in KINDS}


def put_all(streams: dict[str, Any]) -> None:
    for kind, stream in streams.items():
        put(kind, stream)


def copy_all(streams: dict[str, Any]) -> dict[str, Any]:
    """Streams that begin where these stand and then go their own way."""
    numpy = streams["numpy"]
    bits = type(numpy.bits)()
    bits.state = numpy.bits.state
    copy = NumpyStream.of(bits)._replace(has_gauss=numpy.has_gauss, gauss=numpy.gauss)
    return streams | {"numpy": copy}  # the others are values


def seeded(kind: str, word: int) -> Any:
    """A stream of that kind from a number of 63 bits."""
    if kind == "python":
        return random.Random(word).getstate()
    if kind == "numpy":
        return NumpyStream.of(np.random.MT19937(word))
    torch = sys.modules.get("torch")
    return None if torch is None else torch.Generator().manual_seed(word).get_state()


def take(kind: str, *, whole: bool = True) -> Any:
    """The stream of that kind that is in place.

    With `whole` also the half of a pair of normal numbers that numpy has still to give: a look that
    costs as much as all the rest.
    """
    if kind == "python":
        return random.getstate()
    if kind == "numpy":
        return _NUMPY.take(whole)
    torch = sys.modules.get("torch")
    return None if torch is None else torch.default_generator.get_state()


def put(kind: str, stream: Any) -> None:
    if kind == "python":
        random.setstate(stream)
    elif kind == "numpy":
        _NUMPY.put(stream)
    elif stream is not None:
        sys.modules["torch"].default_generator.set_state(stream)


def mark(kind: str, stream: Any) -> int:
    """A number by which one sees later whether anybody has drawn from the stream."""
    if stream is None:
        return 0
    if kind == "python":
        return zlib.crc32(np.array(stream[1], np.uint32).tobytes())
    if kind == "numpy":
        return zlib.crc32(stream.words)
    return zlib.crc32(stream.numpy().tobytes())


# -- plain data, for checkpoints -------------------------------------------------------------------


def global_chance() -> dict[str, Any]:
    """Where the generators stand."""
    return {kind: to_plain(kind, take(kind)) for kind in KINDS}


def load_global_chance(state: dict[str, Any]) -> None:
    for kind in KINDS:
        put(kind, from_plain(kind, state[kind]))


def to_plain(kind: str, stream: Any) -> Any:
    if kind == "python":
        version, words, gauss = stream
        return {"version": version, "words": np.array(words, np.uint64), "gauss": gauss}
    if kind == "numpy":
        return stream.bits.state | {"has_gauss": stream.has_gauss, "gauss": stream.gauss}
    return stream


def from_plain(kind: str, plain: Any) -> Any:
    if kind == "python":
        words = tuple(int(word) for word in plain["words"])
        return int(plain["version"]), words, plain["gauss"]
    if kind == "numpy":
        bits = getattr(np.random, plain["bit_generator"])()
        bits.state = plain
        return NumpyStream.of(bits)._replace(has_gauss=plain["has_gauss"], gauss=plain["gauss"])
    return plain


# -- numpy's ---------------------------------------------------------------------------------------


class NumpyStream(NamedTuple):
    """numpy's changes hands as an object: its state would have to be copied word by word."""

    bits: Any  # np.random.BitGenerator
    address: int  # of its memory; 0 where that is not known
    has_gauss: int = 0
    gauss: float = 0.0

    @classmethod
    def of(cls, bits: Any) -> NumpyStream:
        known = isinstance(bits, np.random.MT19937)  # any other is the user's own choice
        return cls(bits, bits.ctypes.state_address if known else 0)

    @property
    def words(self) -> bytes:
        if not self.address:
            return repr(self.bits.state).encode()
        return ctypes.string_at(self.address, 625 * 4)  # 624 words, and the place among them


class _Numpy:
    def __init__(self) -> None:
        self._last: tuple[NumpyStream, bytes] | None = None  # what was put, and its words then

    def take(self, whole: bool) -> NumpyStream:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if self._last is None or self._last[0].bits is not bits:
            here = NumpyStream.of(bits)
        else:
            here, words = self._last
            # With no number in waiting, none can be now unless the generator has moved.
            if not whole or (not here.has_gauss and here.words == words):
                return here._replace(has_gauss=0)
        state = np.random.get_state(legacy=False)
        return here._replace(has_gauss=state["has_gauss"], gauss=state["gauss"])

    def put(self, stream: NumpyStream) -> None:
        # It forgets a number in waiting.
        np.random.set_bit_generator(stream.bits)  # type: ignore[attr-defined]
        if stream.has_gauss:
            state = np.random.get_state(legacy=False)
            np.random.set_state(state | {"has_gauss": stream.has_gauss, "gauss": stream.gauss})
        self._last = stream, stream.words


_NUMPY = _Numpy()


# -- an environment's own chance -------------------------------------------------------------------


# numpy's SeedSequence (after M. E. O'Neill's seed_seq_fe), constants as in its source.
_WORD = 0xFFFFFFFF
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = 0xCA01F9DD, 0x4973F715
_POOL = 4  # words in the pool

_BLOCK = 128  # steps drawn at once: a call of a generator costs more than the numbers

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
        block, at = self._drawn.get((kind, shape), (np.empty(0), _BLOCK))
        if at == _BLOCK:
            rows = [getattr(s, kind)((_BLOCK, *shape), dtype=np.float32) for s in self._streams]
            block, at = np.stack(rows, axis=1), 0  # [block, envs, ...]
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

    @staticmethod
    def state_from(parts: Parts) -> dict[str, Any]:
        """The state of environments that others have had. All have drawn equally often."""
        (one, _), *_ = parts
        drawn = []
        for i, (kind, shape, _, at) in enumerate(one["drawn"]):
            blocks = [state["drawn"][i][2][:, where] for state, where in parts]
            drawn.append([kind, shape, np.concatenate(blocks, axis=1), at])
        return trees.joined(parts, "streams") | {"drawn": drawn}


class RowChance:
    """The same for rows that come and go: row i draws from the i-th of these generators."""

    def __init__(self, streams: Sequence[np.random.Generator]) -> None:
        self._streams = streams

    def random(self, size: tuple[int, ...]) -> Array:
        return np.stack([s.random(size[1:], np.float32) for s in self._streams])

    def standard_normal(self, size: tuple[int, ...], dtype: Any = np.float32) -> Array:
        return np.stack([s.standard_normal(size[1:], dtype) for s in self._streams])


class OwnChance:
    """Streams of its own for each environment that draws from `random`, `np.random` or torch.

    An episode follows from its seed and actions only if nobody else draws from its generators in
    between. Most environments draw from none of them, and an exchange costs as much as a step
    of CartPole. So all generators change hands for the first steps, then those that were drawn
    from. Every so often a look at the others shows whether somebody has begun to use them: then
    there is another trial.

    `enter(i)` before environment i does something, `leave()` when all have; `begin(i)` with each
    episode; `tick()` with each step of all.
    """

    def __init__(self, count: int, path: Path) -> None:
        self._path = path
        self.kinds: Sequence[str] = KINDS  # those that change hands
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
            self._outside = {kind: take(kind) for kind in self.kinds}
        elif self._inside != _BETWEEN:
            self._set_aside()
        self._inside = env
        put_all(self._streams[env])

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
            put_all(self._outside)

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
        self._change_to([kind for kind in KINDS if kind in self._used])
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
        self._change_to(KINDS)
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
        words = path.generate_state(len(KINDS), np.uint64)
        for kind, word in zip(KINDS, words, strict=True):
            if kind in kinds:
                self._streams[env][kind] = seeded(kind, int(word >> 1))
                if self._trial:
                    self._fresh[env][kind] = mark(kind, self._streams[env][kind])

    def _notice(self, env: int) -> None:
        """Which generators this environment has drawn from in its episode."""
        for kind, stream in self._streams[env].items() if self._trial else ():
            if mark(kind, stream) != self._fresh[env][kind]:
                self._used.add(kind)

    def _set_aside(self) -> None:
        mine = self._streams[self._inside]
        for kind in self.kinds:
            mine[kind] = take(kind, whole=False)

    def _marks_outside(self) -> dict[str, int]:
        others = [kind for kind in KINDS if kind not in self._used]
        return {kind: mark(kind, take(kind)) for kind in others}

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

    @staticmethod
    def state_from(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of one worker that has environments of all of these: what any of them draws
        from changes hands, and where one is in a trial, all are."""
        used = {kind for state in states for kind in state["used"]}
        trial = any(state["trial"] for state in states)
        return {
            "used": sorted(used),
            "kinds": [kind for kind in KINDS if trial or kind in used],
            "marks": {},  # of generators that are other ones here
            "left": min(state["left"] for state in states if state["trial"] == trial),
            "trial": trial,
            "trials": max(state["trials"] for state in states),
        }

    def streams_of(self, env: int) -> dict[str, Any]:
        """As plain data: for an environment whose episode is not played again."""
        mine = self._streams[env]
        return {kind: to_plain(kind, mine[kind]) for kind in self.kinds if kind in mine}

    def load_streams_of(self, env: int, plain: dict[str, Any]) -> None:
        """After `begin`, and outside."""
        for kind, stream in plain.items():
            self._streams[env][kind] = from_plain(kind, stream)
