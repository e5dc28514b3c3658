"""The seeds of one sub-environment's episodes, quickly.

`seeding.integer(seed, "env", worker, env, episode)` builds a whole `SeedSequence` for each episode:
12 µs, a tenth of a short CartPole episode. The episode is the last word that enters the hash, so
everything before it is worked out once; the rest is a dozen integer operations. The numbers are the
same ones: a test compares them, and would fail if numpy ever changed its hash.
"""

from __future__ import annotations

import numpy as np

from manyhands import seeding

# numpy's SeedSequence (after M. E. O'Neill's seed_seq_fe), constants as in its source.
_WORD = 0xFFFFFFFF
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = 0xCA01F9DD, 0x4973F715
_POOL = 4  # words in the pool


class EpisodeSeeds:
    """`seeds(episode) == seeding.integer(seed, "env", worker, env, episode)`."""

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
        """Of the global streams that an environment may draw from; see `own_chance.py`."""
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
