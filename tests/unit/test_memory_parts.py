"""Channels in shared memory: messages of every size, and slots that somebody has written over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manyhands.engines.base import Place, Roster
from manyhands.engines.parts.memory import MemoryChannel, MemoryParts
from manyhands.engines.shared import Board
from manyhands.errors import CollectiveError

FD, GENERATION, USED = range(3)  # words of a slot


@pytest.fixture
def ends() -> tuple[MemoryChannel, MemoryChannel]:
    """(writer's end, reader's end) of one channel; both workers are this process."""
    board, roster = Board(2), Roster(["worker 0", "worker 1"])
    for rank in (0, 1):
        board.enter(rank)
    parts = [MemoryParts(board, roster, Place("local", rank, 2), 0.3) for rank in (0, 1)]
    reader, writer = (one.channel("box", reader=0, capacity=4) for one in parts)
    assert isinstance(reader, MemoryChannel)
    assert isinstance(writer, MemoryChannel)
    return writer, reader


def test_every_size_comes_as_it_was_put(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    """Around the room that a slot has, which grows by a quarter more than is needed."""
    writer, reader = ends
    for size in (0, 1, 63, 64, 65, 255, 256, 257, 1000, 1 << 16, (1 << 16) + 1, 3, 1 << 20, 0):
        data = np.arange(size, dtype=np.uint8)
        writer.put({"x": data, "b": data.tobytes()})
        got = reader.get()
        assert got["x"].tobytes() == got["b"] == data.tobytes()
    assert reader.lost == 0


def no_such_file(words: Any, slot: int) -> None:
    words[slot + FD], words[slot + GENERATION] = 1 << 40, 77


def no_bytes(words: Any, slot: int) -> None:
    words[slot + USED] = 0


def bytes_without_end(words: Any, slot: int) -> None:
    words[slot + USED] = 1 << 62


POKES: dict[str, Callable[[Any, int], None]] = {
    f.__name__: f for f in (no_such_file, no_bytes, bytes_without_end)
}


@pytest.mark.parametrize("name", POKES)
def test_a_slot_that_was_written_over(name: str, ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    """What cannot be read is counted; what can, and all that comes later, arrives."""
    writer, reader = ends
    writer.put(1)
    ring = writer._ring()
    POKES[name](ring.words, ring._SLOTS)
    try:
        got = [reader.get()]
    except CollectiveError:
        got = []
    assert len(got) + reader.lost == 1
    for i in range(2, 8):
        writer.put(i)
        assert reader.get() == i


def test_a_message_that_was_written_over(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    writer, reader = ends
    writer.put({"x": np.ones(100)})
    writer.put(2)
    ring = writer._ring()
    ring.slots._own[0].view[:64] = b"\xff" * 64
    assert reader.get() == 2
    assert reader.lost == 1
