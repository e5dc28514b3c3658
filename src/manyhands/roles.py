"""Who plays which part: `actor=2,learner=2` are four workers, ranks in that order.

Torch-free: the launcher, the command line and the checks read it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from manyhands.errors import ConfigError

VARIABLE = "MANYHANDS_ROLES"
_PART = re.compile(r"\s*([A-Za-z][\w-]*)\s*=\s*(\d+)\s*")


class Part(NamedTuple):
    """One worker's place among those of its role."""

    role: str
    rank: int
    size: int


class Roles:
    """Roles in order of rank, each with the number of its workers."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(counts)
        self.size = sum(self.counts.values())

    @property
    def text(self) -> str:
        """As it is typed after --roles."""
        return ",".join(f"{role}={count}" for role, count in self.counts.items())

    def ranks(self, role: str) -> list[int]:
        """Ranks of the workers with that role; none if there is no such role."""
        first = 0
        for name, count in self.counts.items():
            if name == role:
                return list(range(first, first + count))
            first += count
        return []

    def of(self, rank: int) -> Part:
        first = 0
        for role, count in self.counts.items():
            if rank < first + count:
                return Part(role, rank - first, count)
            first += count
        raise ConfigError(f"worker {rank} has no role in {self.text!r}")

    def name(self, rank: int) -> str:
        """`actor 1 (worker 3 of 4)`, or `worker 3 of 4` where all play the same part."""
        part = self.of(rank)
        who = f"worker {rank} of {self.size}"
        return who if part.role == "worker" else f"{part.role} {part.rank} ({who})"


def parse(text: str) -> Roles:
    """`actor=2,learner=2` -> Roles; ConfigError says what is wrong with it."""
    counts: dict[str, int] = {}
    for piece in text.split(","):
        match = _PART.fullmatch(piece)
        if match is None:
            raise ConfigError(
                f"--roles {text!r}: {piece.strip()!r} is not of the form ROLE=NUMBER; type, e.g. "
                "--roles actor=2,learner=2"
            )
        role, count = match.group(1), int(match.group(2))
        if role in counts:
            raise ConfigError(f"--roles {text!r}: {role} appears twice")
        if count < 1:
            raise ConfigError(f"--roles {text!r}: {role}={count}, but a role needs at least 1")
        counts[role] = count
    return Roles(counts)


def from_environment(size: int, env: Mapping[str, str] = os.environ) -> Roles:
    """What the launcher has given out; everybody is a worker where it has not."""
    text = env.get(VARIABLE, "")
    given = parse(text) if text else Roles({"worker": size})
    return given if given.size == size else Roles({"worker": size})
