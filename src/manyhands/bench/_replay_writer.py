"""An actor of the replay benchmark: adds rows to its shard, at a set rate or as fast as it can.

    python -m manyhands.bench._replay_writer '{"shard": ..., "rate": 0, "seconds": 3, "rows": 50}'

Prints a line when it is ready, waits for one to begin, and at the end prints rows and seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from manyhands.replay.frames import FrameStacker
from manyhands.replay.shard_writer import ShardWriter


def add_rows(description: dict[str, Any], rate: float, seconds: float, rows: int) -> float:
    """Rows added a second: one 84 x 84 frame each, and the row that shows it."""
    writer = ShardWriter.open(description)
    stacker = FrameStacker(writer.frames, rows, 4)
    frames = np.random.default_rng(0).integers(0, 255, (rows, 84, 84), dtype=np.uint8)
    obs, none, ended = stacker.start(frames), frames[:0], np.zeros(rows, bool)
    rest = {
        "action": np.zeros(rows, np.int64),
        "reward": np.ones(rows, np.float32),
        "discount": np.full(rows, 0.97, np.float32),
    }
    errors = np.random.default_rng(1).random(rows)
    print("ready", flush=True)
    sys.stdin.readline()
    added, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        if rate and added > rate * passed:
            time.sleep((added - rate * passed) / rate)
            continue
        reached, now = stacker.step(frames, ended, none)
        writer.append({"obs": obs, "next_obs": reached, **rest}, errors)
        obs = now
        added += rows
    return added / passed


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(add_rows(asked["shard"], asked["rate"], asked["seconds"], asked["rows"]), flush=True)
