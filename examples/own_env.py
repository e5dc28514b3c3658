"""An environment of your own: write it, check it, step eight of them.

    python examples/own_env.py

Anywhere an environment id is asked for, "own_env:Thermostat" works too, when this file's folder
is on PYTHONPATH.
"""

import gymnasium
import numpy as np
from manyhands.envs import check_env, make_vec


class Thermostat(gymnasium.Env):
    """Keep a room at 20 degrees. Actions: heater off or on. A day is 100 steps."""

    def __init__(self, outside=5.0):
        self.outside = outside
        self.observation_space = gymnasium.spaces.Box(-50.0, 100.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # makes self.np_random: draw every random number from it
        self.room = self.np_random.uniform(10.0, 25.0)
        self.hour = 0
        return self._observation(), {}

    def step(self, action):
        draught = self.np_random.normal(0.0, 0.1)
        self.room += 1.5 * action - 0.05 * (self.room - self.outside) + draught
        self.hour += 1
        reward = -abs(self.room - 20.0)
        terminated = bool(self.room > 40.0)  # on fire: nothing comes after, its value is 0
        truncated = self.hour >= 100  # the day is over, but the room is still there
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self):
        return np.array([self.room, self.outside], dtype=np.float32)


def main():
    findings = check_env(Thermostat)
    print("\n".join(findings) or "check_env found nothing wrong")

    envs = make_vec(Thermostat, num_envs=8, seed=1, outside=0.0)
    observation = envs.reset()
    for _ in range(200):
        action = (observation[:, 0] < 20.0).astype(np.int64)  # a policy of one line
        step = envs.step(action)
        observation = step.obs
        for episode in step.episodes:
            print(f"env {episode.env}: return {episode.total_return:.1f}, seed {episode.seed}")
    envs.close()


if __name__ == "__main__":
    main()
