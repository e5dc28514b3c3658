"""PPO on CartPole-v1 in one file, to be read from top to bottom.

Three versions stand side by side; `diff before.py after_allreduce.py` shows what it takes.

    before.py            one process, a plain script
    after_allreduce.py   N workers; each learns from its own rows, the gradients are averaged
    after_gather.py      N workers; their rows are joined on the main worker, which alone updates
"""

from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn

SEED = 1
NUM_ENVS = 8  # environments side by side
LENGTH = 32  # steps of each environment between two updates
UPDATES = 400
EPOCHS = 20
MINIBATCHES = 1
GAMMA, LAMBDA = 0.98, 0.8
CLIP, VALUE_WEIGHT, MAX_GRAD_NORM = 0.2, 0.5, 0.5
LEARNING_RATE = 1e-3

torch.manual_seed(SEED)


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [
        nn.Linear(inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, outputs),
    ]
    for layer, scale in ((layers[0], 2**0.5), (layers[2], 2**0.5), (layers[4], gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """A policy over discrete actions and a value, in separate networks."""

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.policy = mlp(inputs, int(envs.single_action_space.n), gain=0.01)
        self.critic = mlp(inputs, 1, gain=1.0)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs).squeeze(-1)

    def log_probs(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.policy(obs), dim=-1)


class Rollout:
    """Steps the environments and remembers where they stand."""

    def __init__(self, envs: gym.vector.VectorEnv, agent: Agent) -> None:
        self.envs, self.agent = envs, agent
        self.obs, _ = envs.reset(seed=SEED)
        self.resetting = np.zeros(envs.num_envs, dtype=bool)
        self.running = np.zeros(envs.num_envs)
        self.returns: deque[float] = deque(maxlen=12 * envs.num_envs)

    @torch.no_grad()
    def collect(self) -> dict[str, torch.Tensor]:
        """LENGTH steps of each environment, with advantages; rows of all steps joined."""
        shape = (LENGTH, self.envs.num_envs)
        obs = np.zeros((LENGTH + 1, *self.obs.shape), dtype=np.float32)
        reward, terminated, done = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        valid = np.zeros(shape, dtype=bool)
        action, log_prob = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for t in range(LENGTH):
            obs[t] = self.obs
            log_probs = self.agent.log_probs(torch.from_numpy(obs[t]))
            action[t] = torch.multinomial(log_probs.exp(), 1).squeeze(-1)
            log_prob[t] = log_probs.gather(-1, action[t, :, None]).squeeze(-1)
            # A step that only resets a finished environment is not a transition.
            valid[t] = ~self.resetting
            self.obs, reward[t], terminated[t], truncated, _ = self.envs.step(action[t].numpy())
            done[t] = np.logical_or(terminated[t], truncated)
            self.count_returns(reward[t], done[t])
            self.resetting = done[t].astype(bool)
        obs[LENGTH] = self.obs
        values = self.agent.value(torch.from_numpy(obs)).numpy()
        advantage = gae(reward, values, terminated, done)
        rows = {
            "obs": torch.from_numpy(obs[:-1]),
            "action": action,
            "log_prob": log_prob,
            "advantage": torch.from_numpy(advantage).float(),
            "target": torch.from_numpy(advantage + values[:-1]).float(),
        }
        return {name: x.flatten(0, 1)[torch.from_numpy(valid.ravel())] for name, x in rows.items()}

    def count_returns(self, reward: np.ndarray, done: np.ndarray) -> None:
        self.running += reward
        for i in np.flatnonzero(done):
            self.returns.append(float(self.running[i]))
            self.running[i] = 0.0


def gae(reward: np.ndarray, value: np.ndarray, terminated: np.ndarray, done: np.ndarray):
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t).

    The value after a terminated step is 0; after a truncated one it is that of the final
    observation, which is what a vector environment returns there. Either ends the sum.
    """
    advantage = np.zeros_like(reward)
    last = np.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        delta = reward[t] + GAMMA * value[t + 1] * (1 - terminated[t]) - value[t]
        advantage[t] = last = delta + GAMMA * LAMBDA * (1 - done[t]) * last
    return advantage


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch["obs"])).chunk(MINIBATCHES):
            minibatch = {name: x[rows] for name, x in batch.items()}
            advantage = minibatch["advantage"]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            log_probs = agent.log_probs(minibatch["obs"])
            log_prob = log_probs.gather(-1, minibatch["action"][:, None]).squeeze(-1)
            ratio = (log_prob - minibatch["log_prob"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = (agent.value(minibatch["obs"]) - minibatch["target"]).square().mean()
            loss = policy_loss + VALUE_WEIGHT * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def main() -> None:
    envs = gym.make_vec("CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="sync")
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    rollout = Rollout(envs, agent)
    for number in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (UPDATES + 1))
        batch = rollout.collect()
        update(agent, optimizer, batch)
        if number % 40 == 0:
            mean = np.mean(rollout.returns)
            verdict = "   solved" if mean >= 475 else ""
            print(f"update {number:4d}   return {mean:6.1f}{verdict}")


if __name__ == "__main__":
    main()
