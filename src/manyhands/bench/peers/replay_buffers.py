"""One library's replay buffers against the clock: fills them, and does each task it is asked for.

    python replay_buffers.py '{"library": "cpprb", "case": "4 floats", "seconds": 0.3}'
    > {"tasks": [...], "version": ..., "missing": ...}
    < uniform 32
    > 2065046.3                                         rows a second

Runs in the peers' own virtual environment, and in ours for our own buffers: the same script, the
same rows, the same clock. Between tasks it waits, so that libraries can take turns task by task.
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


def cpprb(case: str) -> Tasks:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer  # type: ignore[import-not-found]

    shape, dtype, capacity = CASES[case]
    columns = {
        "obs": {"shape": shape, "dtype": dtype},
        "action": {"dtype": np.int64},
        "reward": {"dtype": np.float32},
        "next_obs": {"shape": shape, "dtype": dtype},
        "terminated": {"dtype": bool},
    }
    uniform = ReplayBuffer(capacity, columns)
    prioritized = PrioritizedReplayBuffer(capacity, columns, alpha=ALPHA)
    block, much = rows(case, BLOCK), rows(case, FILL)
    one = {name: column[0] for name, column in block.items()}
    for replay in (uniform, prioritized):
        fill(lambda replay=replay: replay.add(**much), FILL, capacity)  # type: ignore[misc]

    def learn(count: int) -> None:
        batch = prioritized.sample(count, beta=BETA)
        prioritized.update_priorities(batch["indexes"], ERRORS[count])

    return {
        "add 1": (1, lambda: uniform.add(**one)),
        f"add {BLOCK}": (BLOCK, lambda: uniform.add(**block)),
        **draws(uniform.sample, learn),
    }


def sb3(case: str) -> Tasks:
    """Stable-Baselines3 has no prioritized buffer."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer  # type: ignore[import-not-found]

    shape, dtype, capacity = CASES[case]
    high = 255 if dtype == np.uint8 else np.inf
    space = spaces.Box(0 if dtype == np.uint8 else -np.inf, high, shape, dtype)

    def adder(envs: int) -> tuple[Any, Task]:
        replay = ReplayBuffer(capacity, space, spaces.Discrete(2), device="cpu", n_envs=envs,
                              handle_timeout_termination=False)  # fmt: skip
        r = rows(case, envs)
        infos: list[dict[str, Any]] = [{}] * envs
        action = r["action"][:, None]
        return replay, lambda: replay.add(
            r["obs"], r["next_obs"], action, r["reward"], r["terminated"], infos
        )

    many, add_many = adder(BLOCK)
    fill(add_many, BLOCK, capacity)
    _, add_one = adder(1)
    return {
        "add 1": (1, add_one),
        f"add {BLOCK}": (BLOCK, add_many),
        **draws(many.sample),
    }


def torchrl(case: str) -> Tasks:
    import torch
    from tensordict import TensorDict  # type: ignore[import-not-found]
    from torchrl.data import (  # type: ignore[import-not-found]
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    capacity = CASES[case][2]

    def tensors(count: int) -> Any:
        parts = {name: torch.from_numpy(c) for name, c in rows(case, count).items()}
        return TensorDict(parts, batch_size=[count])

    block, one, much = tensors(BLOCK), tensors(1)[0], tensors(FILL)
    uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCHES[0])
    fill(lambda: uniform.extend(much), FILL, capacity)
    tasks: Tasks = {
        "add 1": (1, lambda: uniform.add(one)),
        f"add {BLOCK}": (BLOCK, lambda: uniform.extend(block)),
        **draws(uniform.sample),
    }
    try:
        prioritized = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(capacity),
            batch_size=BATCHES[0],
        )  # fmt: skip
    except (RuntimeError, ImportError, NameError) as error:
        MISSING["prioritized"] = f"its compiled part was built for another torch ({error})"
        return tasks
    fill(lambda: prioritized.extend(much), FILL, capacity)
    errors = {count: torch.from_numpy(numbers).float() for count, numbers in ERRORS.items()}

    def learn(count: int) -> None:
        batch = prioritized.sample(count)
        prioritized.update_priority(batch["index"], errors[count])

    return {**tasks, **draws(None, learn)}


LIBRARIES: dict[str, Callable[[str], Tasks]] = {
    "manyhands": manyhands,
    "manyhands, numpy only": manyhands_numpy,
    "manyhands, frames once": manyhands_frames,
    "cpprb": cpprb,
    "stable-baselines3": sb3,
    "torchrl": torchrl,
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


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # some libraries say things when they are imported
    asked = json.loads(sys.argv[1])
    tasks = LIBRARIES[asked["library"]](asked["case"])
    package = asked["library"].partition(",")[0]
    version = importlib.metadata.version(package)
    if package == "manyhands":
        from manyhands.replay.compiled import in_use

        version += f" with {in_use()}"
    print(
        json.dumps({"tasks": list(tasks), "version": version, "missing": MISSING}),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        print(rate(*tasks[line.strip()], asked["seconds"]), file=answers, flush=True)


if __name__ == "__main__":
    main()
