"""A3C with your own networks and your own loop: manyhands launch -n 3 examples/a3c.py

Three workers play CartPole-v0. After every episode each pushes its gradient to one optimiser and
pulls the newest weights; nobody waits for the others. It ends when one of them has solved it: a
smoothed return above 190, five episodes running.
"""

import argparse

import gymnasium
import manyhands as mh
import torch
from torch import nn
from torch.distributions import Categorical


class Actor(nn.Module):
    def __init__(self, state_dim, action_num):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, action_num)

    def forward(self, state, action=None):
        a = torch.relu(self.fc2(torch.relu(self.fc1(state))))
        dist = Categorical(logits=self.fc3(a))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy()


class Critic(nn.Module):
    def __init__(self, state_dim):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 1)

    def forward(self, state):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(state))))).squeeze(-1)


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--max-episodes", type=int, default=1500)
parser.add_argument("--learning-rate", type=float, default=5e-3)
args = parser.parse_args()

par = mh.Parallel()
par.seed(args.seed)
env = gymnasium.make("CartPole-v0")
actor, critic = Actor(4, 2), Critic(4)
server = par.gradient_server(
    "a3c", [actor, critic], lambda p: torch.optim.Adam(p, lr=args.learning_rate), sync="manual"
)
board = par.values("solved")  # where whoever solves it says so
smoothed, solved, episode = 0.0, 0, 0

while episode < args.max_episodes and board.get("by") is None:
    episode += 1
    server.pull()
    states, actions, rewards = [], [], []
    state, _ = env.reset(seed=args.seed * 1000 + par.rank if episode == 1 else None)
    terminated = truncated = False
    while not (terminated or truncated):
        states.append(torch.as_tensor(state))
        with torch.no_grad():
            actions.append(actor(states[-1])[0])
        state, reward, terminated, truncated, _ = env.step(actions[-1].item())
        rewards.append(float(reward))

    states, actions = torch.stack(states), torch.stack(actions)
    with torch.no_grad():  # an episode cut off by the clock would have gone on
        value = 0.0 if terminated else critic(torch.as_tensor(state)).item()
    returns = torch.tensor([value := r + 0.99 * value for r in reversed(rewards)]).flip(0)
    _, logp, entropy = actor(states, actions)
    values = critic(states)
    advantage = (returns - values).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    loss = -(logp * advantage).mean() + 0.5 * nn.functional.smooth_l1_loss(values, returns)
    (loss - 0.01 * entropy.mean()).backward()
    nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
    server.push()

    smoothed = 0.9 * smoothed + 0.1 * sum(rewards)
    solved = solved + 1 if smoothed > 190 else 0
    if solved >= 5 and board.swap("by", None, par.rank):
        print(f"solved by worker {par.rank} in episode {episode}, {server.counters()}")
par.barrier()  # the server stays until all have been served
