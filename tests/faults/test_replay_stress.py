"""Four writers, one sampler and priority updates on shards so small that rows are overwritten all
the time: no row may ever be torn or mixed. Each carries a check sum."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import replay_programs
from replay_programs import EXAMPLE, torn

from manyhands.replay.sharded import ShardedReplay, ShardWriter

pytestmark = [pytest.mark.usefixtures("nothing_left")]

WRITERS = 4
PROGRAM = Path(replay_programs.__file__)
ADDS, SAMPLES = 12_500, 9_700  # a second, in the Ape-X paper


def start(
    replay: ShardedReplay, shard: int, seconds: float, rows: int, rate: float = 0.0
) -> subprocess.Popen[str]:
    description = json.dumps(replay.describe(shard))
    words = [sys.executable, str(PROGRAM), description, str(seconds), str(rows), str(rate)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def all_writing(replay: ShardedReplay, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while min(replay.size(k) for k in range(replay.shards)) < 1:
        assert time.monotonic() < deadline, "a writer did not start"
        time.sleep(0.01)


def stress(
    seconds: float, rows: int, capacity: int, batch_size: int, prefetch: int = 0,
    adds: int = 0, samples: int = 0, rate: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """For that long, or until so many rows have been added and drawn, if that comes first."""
    replay = ShardedReplay(
        EXAMPLE, shards=WRITERS, capacity=capacity, batch_size=batch_size, prefetch=prefetch
    )
    writers = [start(replay, k, seconds, rows, rate / WRITERS) for k in range(WRITERS)]
    rng, bad, checked = np.random.default_rng(0), 0, 0
    with replay:
        all_writing(replay)
        late: list[np.ndarray] = []
        while any(w.poll() is None for w in writers):
            batch = replay.sample(timeout=30)
            bad += torn(batch.rows)
            checked += batch_size
            late.append(batch.ids)
            if len(late) > 3:  # a learner that is three batches behind
                replay.update_priorities(late.pop(0), rng.exponential(size=batch_size))
            done = replay.counters
            if adds and done["sampled"] >= samples and done["inserted"] >= adds:
                for writer in writers:
                    writer.kill()
    written = [w.communicate()[0] for w in writers]
    if not adds:
        assert all(w.returncode == 0 for w in writers)
        assert replay.counters["inserted"] == sum(map(int, written))
    return {**replay.counters, "bad": bad, "checked": checked}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_torn_row(prefetch: int) -> None:
    counters = stress(2.0, rows=16, capacity=4 * 64, batch_size=128, prefetch=prefetch)
    assert counters["bad"] == 0
    assert counters["checked"] > 0
    # The test means nothing unless writers really got in the way.
    assert counters["redrawn"] > 0
    assert counters["stale_updates"] > 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(700)
def test_ten_minutes_of_the_papers_rates_in_one() -> None:
    """Ten times the rate of adding; drawing as fast as it goes. A minute, on free cores."""
    counters = stress(
        600.0, rows=50, capacity=4 * 4096, batch_size=512,
        adds=600 * ADDS, samples=600 * SAMPLES, rate=10 * ADDS,
    )  # fmt: skip
    print(counters)
    assert counters["bad"] == 0
    assert counters["checked"] == counters["sampled"]  # every row that came out
    assert counters["redrawn"] > 0
    assert counters["stale_updates"] > 0
    assert counters["inserted"] >= 600 * ADDS
    assert counters["sampled"] >= 600 * SAMPLES


@pytest.mark.parametrize("on_loss", ["keep", "drop"])
def test_killed_writers_leave_no_torn_row_and_block_nobody(on_loss: str) -> None:
    """Killed in the middle of a write, again and again; each time another takes the shard over."""
    replay = ShardedReplay(
        EXAMPLE, shards=2, capacity=2 * 512, batch_size=32, on_loss=on_loss, timeout=30
    )
    steady = start(replay, 0, 20.0, 16)  # ends by itself, should this test fail before
    counted = 0
    for round_number in range(4):
        doomed = start(replay, 1, 20.0, 16)
        before = replay._rings[1].written
        deadline = time.monotonic() + 30
        while replay._rings[1].written < before + 500:
            assert time.monotonic() < deadline
            assert torn(replay.sample().rows) == 0
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.communicate()
        counted += replay.lose(1)
        for _ in range(20):
            batch = replay.sample()
            assert torn(batch.rows) == 0
            replay.update_priorities(batch.ids, np.ones(32))
        assert replay.counters["lost_shards"] == round_number + 1
    counters = replay.counters
    assert counters["kept_rows" if on_loss == "keep" else "dropped_rows"] == counted > 0
    assert (replay.size(1) == 0) is (on_loss == "drop")
    # One more takes over where the dead one stopped.
    writer = ShardWriter.open(replay.describe(1))
    ticket = writer.written
    writer.append(replay_programs.checked_rows(1, 0, 64))
    assert writer.written == ticket + 64
    assert replay.size(1) == (64 if on_loss == "drop" else 512)
    steady.kill()
    steady.communicate()
    assert torn(replay.sample().rows) == 0
