"""CartPole with a slot in shared memory through which `chaos.py` tells it what to do wrong.

One slot a worker: its process, how many steps it has taken, the number of the last order it was
given, what that was, and the number of the last order it has obeyed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

import gymnasium
import numpy as np

ORDERS = ("", "raise", "exit", "segfault", "hang", "slow", "oom", "leak")
PID, STEPS, NUMBER, ORDER, OBEYED = range(5)
WORDS = 8  # of eight bytes, a slot
SLOTS = 64
SLOW_SECONDS = 0.3
OOM_BYTES = 512 << 20


class Slots:
    """The memory of all workers' slots, in a file."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, SLOTS * WORDS * 8)
            memory = mmap.mmap(fd, SLOTS * WORDS * 8)
        finally:
            os.close(fd)
        self.words: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(memory, np.int64).reshape(
            SLOTS, WORDS
        )


class Chaos(gymnasium.Wrapper):  # type: ignore[misc]
    """Does what its worker's slot says, in the middle of a step."""

    def __init__(self, slots: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        rank = int(os.environ.get("MANYHANDS_RANK", "0"))
        self._slot = Slots(slots).words[rank]

    def step(self, action: Any) -> Any:
        slot = self._slot
        if slot[PID] != os.getpid():  # a new process: orders to the one before are void
            slot[OBEYED] = slot[NUMBER]
            slot[PID] = os.getpid()
        slot[STEPS] += 1
        if slot[NUMBER] != slot[OBEYED]:
            slot[OBEYED] = slot[NUMBER]
            obey(ORDERS[slot[ORDER]])
        return self.env.step(action)


def obey(order: str) -> None:
    if order == "raise":
        raise RuntimeError("chaos: the simulator has exploded")
    if order == "exit":
        os._exit(3)
    if order == "segfault":
        ctypes.string_at(0)
    if order == "hang":
        time.sleep(10_000)
    if order == "slow":
        time.sleep(SLOW_SECONDS)
    if order == "oom":  # with a limit on this process: the kernel kills it, or Python says so
        block = bytearray(OOM_BYTES)
        block[:: mmap.PAGESIZE] = b"x" * len(block[:: mmap.PAGESIZE])
