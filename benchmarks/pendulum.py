"""The pendulum of the second founding document, dense and sparse: what its homework drew.

    python benchmarks/pendulum.py dense sparse --seed 11

Trains the recipes pendulum-dense and pendulum-sparse with a seed that has chosen no setting (one
worker: the same curve as with two), and writes benchmarks/results/pendulum/REWARD.json, from which
`make results` draws the curve, the critic's loss, maps of torque and value, an episode, and a
moving picture of it.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import manyhands as mh

RESULTS = Path(__file__).parent / "results" / "pendulum"
ENV = "manyhands/PendulumSwingUp-v0"
SIDE = 61  # of a map
SPEED = 10.0  # up to which it is drawn
EPISODES = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rewards", nargs="*", default=["dense", "sparse"], metavar="REWARD")
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args()
    for reward in given.rewards:
        print(measured(reward, given.seed))


def measured(reward: str, seed: int) -> Path:
    folder = Path("runs", "pendulum", f"{reward}-{seed}")
    if not (folder / "summary.json").exists():
        mh.train(recipe=f"pendulum-{reward}", seed=seed, run_dir=str(folder), workers=1,
                 strategy="single", engine="inline", tensorboard=False)  # fmt: skip
    summary = json.loads((folder / "summary.json").read_bytes())
    played = mh.evaluate(folder, episodes=EPISODES)
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mean_return"]]
    found = {
        "reward": reward,
        "seed": seed,
        "steps": summary["env_steps"],
        "machine": summary["cpu"],
        "versions": summary["versions"],
        "upright": sum(played.successes),
        "episodes": EPISODES,
        "curve": [[int(float(r["env_steps"])), round(float(r["mean_return"]), 2)] for r in rows],
        "critic": [[int(float(r["env_steps"])), float(f"{float(r['value_loss']):.3g}")]
                   for r in rows],
        "maps": maps(folder),
        "episode": episode(folder, sparse=reward == "sparse"),
    }  # fmt: skip
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{reward}.json"
    path.write_text(json.dumps(found, separators=(",", ":")).replace('],"', '],\n"') + "\n")
    return path


def maps(folder: Path) -> dict[str, Any]:
    """Torque, and value in units of the normalised reward; rows from the fastest speed down."""
    import torch

    policy = mh.load(folder)
    angles, speeds = np.linspace(-np.pi, np.pi, SIDE), np.linspace(SPEED, -SPEED, SIDE)
    theta, speed = np.meshgrid(angles, speeds)
    seen = np.stack([np.cos(theta), np.sin(theta), speed], axis=-1).reshape(-1, 3)
    torque = policy.act_batch(seen.astype(np.float32)).reshape(SIDE, SIDE)
    with torch.no_grad():
        shown = torch.as_tensor(policy.normaliser.apply(seen.astype(np.float32)))
        value = policy.model.value(shown).numpy().reshape(SIDE, SIDE)
    return {"speed": SPEED, "torque": rounded(torque), "value": rounded(value)}


def rounded(numbers: Any) -> list[list[float]]:
    return [[round(float(x), 2) for x in row] for row in numbers]


def episode(folder: Path, *, sparse: bool) -> list[list[float]]:
    """Angle, speed, torque and reward of each step, from hanging down at rest."""
    policy = mh.load(folder)
    env = gymnasium.make(ENV, sparse=sparse)
    observation, _ = env.reset(seed=1, options={"theta": np.pi, "theta_dot": 0.0})
    rows, over = [], False
    while not over:
        action = policy.act(observation)
        angle, speed = float(np.arctan2(observation[1], observation[0])), float(observation[2])
        observation, reward, terminated, truncated, _ = env.step(action)
        rows.append([round(x, 3) for x in (angle, speed, float(action[0]), float(reward))])
        over = terminated or truncated
    return rows


if __name__ == "__main__":
    main()
