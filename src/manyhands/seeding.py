"""Seeds from one tree: streams that never overlap, whoever asks and in whatever order.

Every source of chance has a path such as ("env", worker, env, episode); its seed depends on the
run's seed and that path alone. So any episode can be played again, and adding a worker changes
no other worker's stream.
"""

from __future__ import annotations

import random
import sys
import zlib

import numpy as np


def sequence(seed: int, *path: str | int) -> np.random.SeedSequence:
    """The node of the tree at `path`: words are hashed, numbers are taken as they are."""
    key = tuple(zlib.crc32(p.encode()) if isinstance(p, str) else int(p) for p in path)
    return np.random.SeedSequence(entropy=seed, spawn_key=key)


def generator(seed: int, *path: str | int) -> np.random.Generator:
    return np.random.default_rng(sequence(seed, *path))


def integer(seed: int, *path: str | int) -> int:
    """A seed for libraries that take one number (gymnasium wants less than 2**31)."""
    return int(sequence(seed, *path).generate_state(1, np.uint64)[0] >> 33)


def seed_everything(seed: int, *path: str | int) -> None:
    """Python's, numpy's and (where it is loaded) torch's global generators."""
    words = sequence(seed, *path).generate_state(3, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1] & 0xFFFFFFFF))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(words[2] >> 1))


def part_from_main(rank: int) -> None:
    """Give a worker streams of its own, derived from wherever its generators stand now.

    WHY: a script that seeds once, or not at all (torch then starts from a constant), would draw
    the same actions on every worker. The main worker's streams stay as they are.
    CRUCIAL: each library's stream comes from that library alone. A script that seeds only torch
    leaves the others to chance, and must still repeat to the bit.
    """
    random.seed(_parted(random.getrandbits(64), rank))
    np.random.seed(_parted(int(np.random.randint(2**31)), rank) & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(_parted(torch.initial_seed(), rank) >> 1)


def _parted(seed: int, rank: int) -> int:
    return int(sequence(seed, "part", rank).generate_state(1, np.uint64)[0])
