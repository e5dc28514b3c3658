"""Who ended first, told from processes that have all ended by the time one looks."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator

import pytest

from manyhands.engines.shared import DONE, RUNNING, Board
from manyhands.engines.supervisor import FirstToGo

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd is Linux's")
WORKERS = 3


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(WORKERS)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def board_of(processes: list[subprocess.Popen[bytes]]) -> Board:
    board = Board(WORKERS)
    for rank, process in enumerate(processes):
        board._words[board._base(rank)] = process.pid  # as `arrive` does in that process
        board.set_state(rank, RUNNING)
    return board


def kill(process: subprocess.Popen[bytes], reap: bool) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if reap:
        process.wait()


@pytest.mark.parametrize("reap", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(WORKERS))))
def test_first_of_all_that_ended_before_we_looked(
    order: tuple[int, ...], reap: bool, processes: list[subprocess.Popen[bytes]]
) -> None:
    first = FirstToGo(board_of(processes))
    first.look(0.0)  # they have arrived
    for rank in order:
        kill(processes[rank], reap)
    assert first.rank() == order[0]


def test_worker_that_said_so_is_not_meant(processes: list[subprocess.Popen[bytes]]) -> None:
    board = board_of(processes)
    first = FirstToGo(board)
    first.look(0.0)
    board.set_state(2, DONE)
    for rank in (2, 1, 0):
        kill(processes[rank], reap=True)
    assert first.rank() == 1


def test_only_one_that_was_never_seen(processes: list[subprocess.Popen[bytes]]) -> None:
    first = FirstToGo(board_of(processes))
    kill(processes[1], reap=True)
    assert first.rank() == 1


def test_of_several_that_were_never_seen_nobody_is_named(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    first = FirstToGo(board_of(processes))
    for process in processes:
        kill(process, reap=True)
    assert first.rank() is None


def test_thread_ends_with_the_workers(processes: list[subprocess.Popen[bytes]]) -> None:
    first = FirstToGo(board_of(processes))
    first.start()
    for process in processes:
        process.kill()
        process.wait()
    first._thread.join(30)
    assert not first._thread.is_alive()
