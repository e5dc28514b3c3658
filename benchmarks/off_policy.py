"""Updates a second of SAC and TD3 beside Stable-Baselines3's, at equal settings, on one thread.

    PYTHONPATH=FOLDER python benchmarks/off_policy.py --rounds 7 --out results/off_policy.json

FOLDER has Stable-Baselines3 in it (`pip install --target FOLDER --no-deps stable-baselines3`), so
that both compute with the same torch. 256 x 256 units, batches of 256, a replay of 100,000 rows of
HalfCheetah's shapes; drawing the batch counts. One process; the two take turns, `--updates` each,
and what is reported is the median over the rounds of processor time, which a busy machine moves
less than the clock.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch
from gymnasium import Env
from gymnasium.spaces import Box

from manyhands.algorithms.base import Alone
from manyhands.bench._tools import fingerprint
from manyhands.config import build
from manyhands.replay.buffer import Replay

OBSERVATIONS, ACTIONS = Box(-np.inf, np.inf, (17,), np.float32), Box(-1.0, 1.0, (6,), np.float32)
BATCH, FILLED = 256, 100_000


def table() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(FILLED, 17)).astype(np.float32),
        "action": rng.uniform(-1.0, 1.0, (FILLED, 6)).astype(np.float32),
        "reward": rng.normal(size=FILLED).astype(np.float32),
        "next_obs": rng.normal(size=(FILLED, 17)).astype(np.float32),
        "discount": np.full(FILLED, 0.99, np.float32),
    }


def ours(name: str) -> Callable[[int], None]:
    experiment = build(name, env="HalfCheetah-v5", batch_size=BATCH, hidden=(256, 256))
    model = experiment.spec.build_model(experiment, OBSERVATIONS, ACTIONS)
    learner = experiment.spec.load()(model, experiment.options, seed=1)
    rows = table()
    replay = Replay(FILLED, {key: column[0] for key, column in rows.items()})
    replay.append(rows)

    def updates(count: int) -> None:
        for _ in range(count):
            drawn = replay.sample(BATCH)
            learner.update({**drawn.rows, "weight": drawn.weights}, Alone(), 0.0)

    return updates


class Shapes(Env):  # type: ignore[misc]
    """An environment that is asked for its spaces alone."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def reset(self, **_: Any) -> Any:
        return np.zeros(17, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(17, np.float32), 0.0, False, False, {}


def theirs(name: str) -> Callable[[int], None]:
    import stable_baselines3  # type: ignore[import-not-found]
    from stable_baselines3.common.logger import Logger  # type: ignore[import-not-found]

    kind = getattr(stable_baselines3, name.upper())
    hidden = {"net_arch": [256, 256]}
    model = kind("MlpPolicy", Shapes(), buffer_size=FILLED, batch_size=BATCH, device="cpu",
                 policy_kwargs=hidden, seed=1)  # fmt: skip
    model.set_logger(Logger(None, []))
    rows, buffer = table(), model.replay_buffer
    buffer.observations[:, 0], buffer.next_observations[:, 0] = rows["obs"], rows["next_obs"]
    buffer.actions[:, 0], buffer.rewards[:, 0] = rows["action"], rows["reward"]
    buffer.full = True
    return lambda count: model.train(gradient_steps=count, batch_size=BATCH)


def measure(name: str, rounds: int, updates: int) -> dict[str, Any]:
    contestants = {"manyhands": ours(name), "stable-baselines3": theirs(name)}
    spent: dict[str, list[float]] = {who: [] for who in contestants}
    for run in contestants.values():
        run(20)
    for _ in range(rounds):
        for who, run in contestants.items():
            began = time.process_time()
            run(updates)
            spent[who].append((time.process_time() - began) / updates)
    ratios = [b / a for a, b in zip(*spent.values(), strict=True)]
    return {
        "milliseconds": {who: round(1e3 * statistics.median(s), 3) for who, s in spent.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, given.rounds, given.updates) for name in ("sac", "td3")}
    versions = {n: importlib.metadata.version(n) for n in ("torch", "stable-baselines3")}
    setting = {"batch": BATCH, "hidden": [256, 256], "rounds": given.rounds,
               "updates": given.updates, "threads": 1}  # fmt: skip
    facts = {"setting": setting, "machine": fingerprint(), "versions": versions, "found": found}
    text = json.dumps(facts, indent=2)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
