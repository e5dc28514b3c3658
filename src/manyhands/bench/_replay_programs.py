"""What the replay benchmark runs in processes of their own: buffers against the clock, and actors.

    python -m manyhands.bench._replay_programs '{"library": "manyhands", "case": "4 floats", ...}'
    > {"tasks": [...], "version": ..., "missing": ...}
    < uniform 32
    > 2065046.3                                         rows a second

It fills buffers and does each task it is asked for; between tasks it waits, so that libraries can
take turns task by task. Other libraries' buffers (`benchmarks/replay_buffers.py`) have the same
rows and the same clock; they run where manyhands is not installed: numpy alone is imported here.

    python -m manyhands.bench._replay_programs '{"shard": ..., "rate": 0, "seconds": 3, "rows": 50}'

is an actor: it adds rows to its shard, at a set rate or as fast as it can. It prints a line when it
is ready, waits for one to begin, and prints rows a second at the end.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

BATCHES = (512, 32)  # rows that a learner draws: of Ape-X, and of DQN
BLOCK = 64
SLICES = 5
FILL = 4_000  # rows at once before the clock starts
ALPHA, BETA = 0.6, 0.4
# case -> shape of an observation, dtype, capacity
CASES: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "4 floats": ((4,), np.float32, 1_000_000),
    "17 floats": ((17,), np.float32, 1_000_000),
    "4x84x84 bytes": ((4, 84, 84), np.uint8, 4_000),  # 450 MB
}
Task = Callable[[], Any]
Tasks = dict[str, tuple[int, Task]]  # name -> rows a call, call
MISSING: dict[str, str] = {}  # tasks that the library cannot do here, and why
ERRORS = {batch: np.random.default_rng(0).random(batch) for batch in BATCHES}


def rows(case: str, count: int) -> dict[str, np.ndarray]:
    shape, dtype, _ = CASES[case]
    rng = np.random.default_rng(0)
    observations = (rng.random((2, count, *shape)) * 255).astype(dtype)
    return {
        "obs": observations[0],
        "action": np.zeros(count, np.int64),
        "reward": np.ones(count, np.float32),
        "next_obs": observations[1],
        "terminated": np.zeros(count, bool),
    }


def fill(add: Callable[[], Any], rows_a_call: int, capacity: int) -> None:
    for _ in range(-(-capacity // rows_a_call)):
        add()


def draws(uniform: Any = None, learn: Any = None) -> Tasks:
    """Drawing a batch, and drawing one by priority and giving its rows new ones."""
    return {
        f"{name} {count}": (count, partial(call, count))
        for count in BATCHES
        for name, call in (("uniform", uniform), ("prioritized", learn))
        if call is not None
    }


def manyhands(case: str) -> Tasks:
    from manyhands.replay.buffer import PrioritizedReplay, Replay

    block, one, much = rows(case, BLOCK), rows(case, 1), rows(case, FILL)
    example = {name: column[0] for name, column in block.items()}
    capacity = CASES[case][2]
    uniform = Replay(capacity, example)
    prioritized = PrioritizedReplay(capacity, example, alpha=ALPHA)
    for replay in (uniform, prioritized):
        fill(lambda replay=replay: replay.append(much), FILL, capacity)  # type: ignore[misc]

    def learn(count: int) -> None:
        batch = prioritized.sample(count, beta=BETA)
        prioritized.update_priorities(batch.ids, ERRORS[count])

    return {
        "add 1": (1, lambda: uniform.append(one)),
        f"add {BLOCK}": (BLOCK, lambda: uniform.append(block)),
        **draws(uniform.sample, learn),
    }


def manyhands_numpy(case: str) -> Tasks:
    """As it is without numba."""
    sys.modules["numba"] = None  # type: ignore[assignment]
    return manyhands(case)


def manyhands_frames(case: str) -> Tasks:
    """Frames stored once: what is added is the newest frame of each observation."""
    from manyhands.replay.buffer import PrioritizedReplay, Replay
    from manyhands.replay.frames import Frames, FrameStacker

    block = rows(case, BLOCK)
    example = {name: column[0] for name, column in block.items()}
    shape, _, capacity = CASES[case]
    uniform = Replay(capacity, example, frames=Frames())
    prioritized = PrioritizedReplay(capacity, example, alpha=ALPHA, frames=Frames())
    none = block["obs"][:0, -1]

    def adder(replay: Replay, count: int) -> Task:
        stacker = FrameStacker(replay.frames, count, shape[0])
        frames = np.ascontiguousarray(block["obs"][:count, -1])
        ended = np.zeros(count, bool)
        rest = {name: block[name][:count] for name in ("action", "reward", "terminated")}
        seen = [stacker.start(frames)]

        def add() -> None:
            reached, now = stacker.step(frames, ended, none)
            replay.append({"obs": seen[0], "next_obs": reached, **rest})
            seen[0] = now

        return add

    for replay in (uniform, prioritized):
        fill(adder(replay, BLOCK), BLOCK, capacity)

    def learn(count: int) -> None:
        batch = prioritized.sample(count, beta=BETA)
        prioritized.update_priorities(batch.ids, ERRORS[count])

    return {
        **draws(uniform.sample, learn),
        f"add {BLOCK}": (BLOCK, adder(uniform, BLOCK)),
        "add 1": (1, adder(uniform, 1)),
    }


LIBRARIES: dict[str, Callable[[str], Tasks]] = {
    "manyhands": manyhands,
    "manyhands, numpy only": manyhands_numpy,
    "manyhands, frames once": manyhands_frames,
}


def rate(rows_a_call: int, task: Task, seconds: float) -> float:
    """Rows a second: of several slices of that time the median, after one more to warm up."""
    found = []
    for _ in range(1 + SLICES):
        calls, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds / SLICES:
            for _ in range(4):
                task()
            calls += 4
        found.append(calls * rows_a_call / passed)
    return statistics.median(found[1:])


def serve(libraries: dict[str, Callable[[str], Tasks]]) -> None:
    """Fill the buffers of the library that the command line names, then do what stdin asks for."""
    answers, sys.stdout = sys.stdout, sys.stderr  # some libraries print when they are imported
    asked = json.loads(sys.argv[1])
    tasks = libraries[asked["library"]](asked["case"])
    package = asked["library"].partition(",")[0]
    version = importlib.metadata.version(package)
    if package == "manyhands":
        from manyhands.replay import in_use

        version += f" with {in_use()}"
    print(
        json.dumps({"tasks": list(tasks), "version": version, "missing": MISSING}),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        print(rate(*tasks[line.strip()], asked["seconds"]), file=answers, flush=True)


def add_rows(description: dict[str, Any], rate: float, seconds: float, rows: int) -> float:
    """Rows added a second: one 84 x 84 frame each, and the row that shows it."""
    from manyhands.replay.frames import FrameStacker
    from manyhands.replay.sharded import ShardWriter

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
    given = json.loads(sys.argv[1])
    if "shard" in given:
        print(add_rows(given["shard"], given["rate"], given["seconds"], given["rows"]), flush=True)
    else:
        serve(LIBRARIES)
