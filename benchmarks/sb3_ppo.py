"""Stable-Baselines3's PPO on CartPole-v1, timed. Runs in a virtual environment of its own.

    python sb3_ppo.py '{"steps": 40960, "warm_up": 4096, "threads": 1, "seed": 1, ...}'

Prints one line of JSON. The clock runs from the end of the warm-up's last update to the end of the
last update: starting, importing and building the model are not counted.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any


def run(setting: dict[str, Any]) -> dict[str, Any]:
    import torch
    from stable_baselines3 import PPO  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    torch.set_num_threads(setting["threads"])
    # DummyVecEnv, with the Monitor that records returns: our own runs record them too.
    envs = make_vec_env("CartPole-v1", setting["envs"], seed=setting["seed"])
    hidden = list(setting["hidden"])
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=setting["learning_rate"],
        n_steps=setting["rollout_length"],
        batch_size=setting["minibatch"],
        n_epochs=setting["epochs"],
        policy_kwargs={"net_arch": {"pi": hidden, "vf": hidden}},
        seed=setting["seed"],
        device="cpu",
    )
    model.learn(setting["warm_up"])
    began, before = time.perf_counter(), model.num_timesteps
    model.learn(setting["steps"], reset_num_timesteps=False)
    seconds = time.perf_counter() - began
    returns = [episode["r"] for episode in model.ep_info_buffer]
    return {
        "steps": model.num_timesteps - before,
        "seconds": seconds,
        "mean_return": float(sum(returns) / len(returns)),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("stable-baselines3", "torch", "gymnasium", "numpy")
        },
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
