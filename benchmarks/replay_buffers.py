"""Replay buffers of other libraries, for `manyhands bench replay`.

    python replay_buffers.py '{"library": "cpprb", "case": "4 floats", "seconds": 0.3}'

Runs in a virtual environment of theirs. Rows, tasks and the clock are those of our own buffers
(`manyhands.bench._replay_programs`), which need numpy alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "src"))  # manyhands is not installed there

from manyhands.bench._replay_programs import (
    ALPHA,
    BATCHES,
    BETA,
    BLOCK,
    CASES,
    ERRORS,
    FILL,
    MISSING,
    Task,
    Tasks,
    draws,
    fill,
    rows,
    serve,
)


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
    "cpprb": cpprb,
    "stable-baselines3": sb3,
    "torchrl": torchrl,
}

if __name__ == "__main__":
    serve(LIBRARIES)
