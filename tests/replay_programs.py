"""What workers do in tests of the sharded replay. Found by name in worker processes."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np

from manyhands.parallel import Parallel
from manyhands.replay.frames import Frames, FrameStacker
from manyhands.replay.sharded import FarRing, RateLimit, ShardedReplay, ShardWriter

EXAMPLE = {"writer": np.int64(0), "number": np.int64(0), "data": np.zeros(64), "sum": np.int64(0)}


def checked_rows(writer: int, first: int, count: int) -> dict[str, np.ndarray]:
    """Rows that carry their own check sum."""
    numbers = np.arange(first, first + count)
    data = np.random.default_rng([writer, first]).random((count, 64))
    sums = [_sum(row, writer, number) for row, number in zip(data, numbers, strict=True)]
    return {
        "writer": np.full(count, writer),
        "number": numbers,
        "data": data,
        "sum": np.array(sums),
    }


def _sum(data: np.ndarray, writer: int, number: int) -> int:
    return zlib.crc32(data, (int(writer) << 24) + int(number))


def torn(rows: dict[str, np.ndarray]) -> int:
    """Rows whose check sum is wrong."""
    sums = list(map(_sum, rows["data"], rows["writer"], rows["number"]))
    return int(np.count_nonzero(np.array(sums) != rows["sum"]))


def actors_and_learner(per_actor: int, far: bool = False) -> dict[str, Any]:
    """Worker 0 learns, the others act: append with priorities, under a bound on samples."""
    par = Parallel()
    actors, name = par.size - 1, f"replay, far: {far}"
    if par.rank == 0:
        limit = RateLimit(samples_per_insert=4.0, min_size=20, error_buffer=64)
        replay = ShardedReplay(
            EXAMPLE, shards=actors, capacity=60 * actors, batch_size=32, limit=limit, timeout=30
        )
        replay.serve(par, name)
        bad, batches, surplus = 0, 0, []
        # The last batches that the bound allows: 4 samples an insert, but for the buffer.
        while replay.counters["sampled"] + 64 + 32 <= 4 * per_actor * actors:
            batch = replay.sample()
            bad += torn(batch.rows)
            batches += 1
            replay.update_priorities(batch.ids, np.abs(batch.rows["data"][:, 0]))
            surplus.append(replay._pace.surplus)
        par.barrier()
        counters = replay.counters
        sizes = [replay.size(k) for k in range(actors)]
        replay.all_clear()
        return {
            "bad": bad, "batches": batches, "counters": counters, "sizes": sizes,
            "surplus": [min(surplus), max(surplus)], "after_clear": replay.all_size,
        }  # fmt: skip
    shard = par.rank - 1
    writer = ShardWriter.connect(par, name, shard, timeout=30)
    if far:  # as if the learner were on another machine
        service = par.service(name)
        writer = ShardWriter(
            FarRing(service, shard, service.call("describe", shard)), shard, wait=writer._wait
        )
    for first in range(0, per_actor, 5):
        rows = checked_rows(par.rank, first, min(5, per_actor - first))
        writer.append(rows, None if first % 2 else rows["data"][:, 0])
    writer.flush()
    par.barrier()
    return {"in_memory": not isinstance(writer._ring, FarRing), "written": writer.written}


def frames_from_afar(far: bool) -> Any:
    """One actor writes frames and rows; the learner sees whole stacks; others look on."""
    par, name = Parallel(), f"frames, far: {far}"
    example = {"obs": np.zeros((2, 4, 4), np.uint8), "next_obs": np.zeros((2, 4, 4), np.uint8),
               "number": np.int64(0)}  # fmt: skip
    if par.rank == 0:
        replay = ShardedReplay(
            example, shards=1, capacity=100, batch_size=16, frames=Frames(), timeout=30
        )
        replay.serve(par, name)
        par.barrier()
        rows = replay.sample().rows
        return bool(
            (rows["obs"][:, 1, 0, 0] == rows["number"] % 250).all()
            and (rows["next_obs"][:, 1, 3, 3] == rows["number"] % 250 + 1).all()
            and (rows["next_obs"][:, 0] == rows["obs"][:, 1]).all()
        )
    if par.rank > 1:
        par.barrier()
        return None
    writer = ShardWriter.connect(par, name, 0)
    if far:
        service = par.service(name)
        writer = ShardWriter(FarRing(service, 0, service.call("describe", 0)), 0)
    stacker = FrameStacker(writer.frames, 1, 2)
    obs, none = stacker.start(np.zeros((1, 4, 4), np.uint8)), np.zeros((0, 4, 4), np.uint8)
    for number in range(150):
        picture = np.full((1, 4, 4), number % 250 + 1, np.uint8)
        reached, current = stacker.step(picture, np.array([False]), none)
        writer.append({"obs": obs, "next_obs": reached, "number": np.array([number])})
        obs = current
    writer.flush()
    par.barrier()
    return writer.written


def write_for(
    description: dict[str, Any], seconds: float, rows_at_once: int, rate: float = 0.0
) -> int:
    """Append checked rows, `rate` a second or as fast as possible; how many."""
    writer = ShardWriter.open(description)
    number, start = writer.written, time.monotonic()
    first = number
    blocks = [checked_rows(writer.shard, i * rows_at_once, rows_at_once) for i in range(50)]
    while (passed := time.monotonic() - start) < seconds:
        ahead = (number - first) * rows_at_once - rate * passed
        if rate and ahead > 0:
            time.sleep(ahead / rate)
            continue
        writer.append(blocks[number % 50], blocks[number % 50]["data"][:, 0])
        number += 1
    return writer.written


if __name__ == "__main__":  # a writer of its own process: DESCRIPTION SECONDS ROWS RATE
    import json
    import sys

    _, told, seconds, rows, rate = sys.argv
    print(write_for(json.loads(told), float(seconds), int(rows), float(rate)))
