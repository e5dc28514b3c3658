"""Shared memory: segments that leave nothing behind, and the board."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from manyhands.engines.base import Roster
from manyhands.engines.local.transport import LocalTransport
from manyhands.engines.shared import DONE, FAILED, RUNNING, Board, ResultPool, Segment
from manyhands.errors import CollectiveError


def test_two_openings_see_the_same_bytes() -> None:
    made = Segment(1000)
    opened = Segment(address=made.address)
    opened.bytes[:] = 7
    assert (made.bytes == 7).all()
    assert opened.size == 1000


def test_another_process_can_open_it() -> None:
    made = Segment(64)
    code = (
        "import sys; from manyhands.engines.shared import Segment; "
        "Segment(address=sys.argv[1]).bytes[:3] = 5"
    )
    subprocess.run([sys.executable, "-c", code, made.address], check=True, timeout=30)
    assert made.bytes[:4].tolist() == [5, 5, 5, 0]


def test_arrays_outlive_the_file() -> None:
    made = Segment(64)
    view = made.fresh_view(64)
    view[:] = 3
    made.close()
    made.close()
    del made
    gc.collect()
    assert (view == 3).all()


def test_no_file_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        segment = Segment(4096)
        Segment(address=segment.address)
        del segment
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_pool_uses_memory_again_once_every_view_is_gone() -> None:
    pool = ResultPool()
    segment, array = pool.take(10_000)
    view = array[10:20].view(np.uint8)
    del array
    assert pool.take(10_000)[0] is not segment, "a view still lives on it"
    del view
    gc.collect()
    assert any(pool.take(10_000)[0] is segment for _ in range(3))


def test_pool_keeps_a_bounded_number() -> None:
    pool = ResultPool()
    taken = [pool.take(1000) for _ in range(30)]
    del taken
    gc.collect()
    assert len(pool._free) <= ResultPool.KEEP


def test_board_tells_what_was_written() -> None:
    board = Board(2)
    seen = Board.open(Board.token(board.address), 2)
    assert seen is not None
    board.enter(1, "actor")
    board.beat(1, "train.py:8")
    board.set_note(1, "service/x", "/tmp/x")
    assert seen.state(1) == RUNNING
    assert seen.pid(1) == os.getpid()
    assert seen.text(1, "role") == "actor"
    assert seen.text(1, "where") == "train.py:8"
    assert seen.notes(1) == {"service/x": "/tmp/x"}
    assert (seen.note(1, "service/x"), seen.note(1, "service")) == ("/tmp/x", None)
    assert seen.beat_age(1) < 5
    board.set_state(1, FAILED, "failed:\nValueError: é", code=300, secondary=True)
    assert (seen.state(1), seen.code(1), seen.secondary(1)) == (FAILED, 300, True)
    assert seen.text(1, "report").endswith("ValueError: é")
    board.set_state(0, DONE)
    assert seen.state(0) == DONE
    assert seen.notes(0) == {}


def test_long_reports_keep_their_end() -> None:
    board = Board(1)
    board.set_state(0, FAILED, "x" * 100_000 + "ValueError: the end")
    text = board.text(0, "report")
    assert text.startswith("... ")
    assert text.endswith("ValueError: the end")


def test_first_abort_stands() -> None:
    board = Board(1)
    assert board.aborted == ""
    board.abort("the first reason")
    board.abort("another")
    assert board.aborted == "the first reason"


@pytest.mark.parametrize("token", ["elsewhere|/proc/1/fd/3", f"{os.uname().nodename}|/no/such", ""])
def test_board_out_of_reach_is_none(token: str) -> None:
    assert Board.open(token, 2) is None


def test_memory_of_a_worker_that_has_just_died_is_no_fault_of_who_opens_it() -> None:
    """Killed, and not noticed yet: the error follows from that death, and is not its cause."""
    roster = Roster(["worker 0 of 2", "worker 1 of 2"])
    transport = LocalTransport.__new__(LocalTransport)
    transport.roster, transport._note_now = roster, b'["sum", []]'
    with pytest.raises(CollectiveError, match="worker 1 of 2 is gone"):
        transport._reach("/proc/0/fd/3", 1)
