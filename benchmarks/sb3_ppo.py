"""Stable-Baselines3's PPO on CartPole-v1 or on a game of ALE from pixels, timed.

    python sb3_ppo.py '{"env": ..., "steps": 40960, "warm_up": 4096, "threads": 1, "seed": 1, ...}'

For CartPole it runs in a virtual environment of its own.

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

    torch.set_num_threads(setting["threads"])
    policy, envs, more = pixels(setting) if setting["env"].startswith("ALE/") else numbers(setting)
    model = PPO(
        policy,
        envs,
        learning_rate=setting["learning_rate"],
        n_steps=setting["rollout_length"],
        batch_size=setting["minibatch"],
        n_epochs=setting["epochs"],
        seed=setting["seed"],
        device="cpu",
        **more,
    )
    model.learn(setting["warm_up"])
    began, before = time.perf_counter(), model.num_timesteps
    model.learn(setting["steps"], reset_num_timesteps=False)
    seconds = time.perf_counter() - began
    returns = [episode["r"] for episode in model.ep_info_buffer]
    return {
        "steps": model.num_timesteps - before,
        "seconds": seconds,
        "mean_return": float(sum(returns) / len(returns)) if returns else None,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("stable-baselines3", "torch", "gymnasium", "numpy")
        },
    }


def numbers(setting: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """DummyVecEnv, with the Monitor that records returns: our own runs record them too."""
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    hidden = list(setting["hidden"])
    envs = make_vec_env("CartPole-v1", setting["envs"], seed=setting["seed"])
    return "MlpPolicy", envs, {"policy_kwargs": {"net_arch": {"pi": hidden, "vf": hidden}}}


def pixels(setting: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """84 x 84 grey, four frames held and four stacked, sticky actions, whole games, as ours."""
    import ale_py
    import gymnasium
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack  # type: ignore[import-not-found]

    gymnasium.register_envs(ale_py)
    envs = make_atari_env(
        setting["env"],
        setting["envs"],
        seed=setting["seed"],
        env_kwargs={"frameskip": 1, "repeat_action_probability": 0.0},
        wrapper_kwargs={"terminal_on_life_loss": False, "action_repeat_probability": 0.25},
    )
    return "CnnPolicy", VecFrameStack(envs, 4), {"clip_range": 0.1, "ent_coef": 0.01}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
