"""IMPALA with your own networks and your own loop: two actors and two learners on CartPole-v0.

manyhands launch --roles actor=2,learner=2 examples/impala.py

Actors send whole episodes with the log-probabilities of their actions; learners replay them with
V-trace and average their gradients. It ends when an actor's smoothed return stays above 190.
"""

import argparse
import random

import gymnasium
import manyhands as mh
import torch
from manyhands.math.vtrace import vtrace
from torch import nn
from torch.distributions import Categorical


def network(outputs):
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs)]
    return nn.Sequential(*layers)


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--max-episodes", type=int, default=500)
parser.add_argument("--updates", type=int, default=20, help="of a learner for each episode it gets")
parser.add_argument("--learning-rate", type=float, default=1e-3)
args = parser.parse_args()

par = mh.Parallel()
par.seed(args.seed)
actor, critic = network(2), network(1)
learner_ranks = par.roles.ranks("learner")
policy = par.weight_server("policy", [actor, critic], owner=learner_ranks[0], sync="manual")
episodes = [par.channel(f"episodes {r}", reader=r, capacity=1) for r in learner_ranks]
solved_by = par.values("solved by")


def act():
    env = gymnasium.make("CartPole-v0")
    smoothed, solved, episode = 0.0, 0, 0
    while episode < args.max_episodes and not solved_by.keys():
        policy.pull()
        steps, (state, _) = [], env.reset(seed=args.seed * 9999 + par.rank * 999 + episode)
        terminated = truncated = False
        while not (terminated or truncated):
            with torch.no_grad():
                choice = Categorical(logits=actor(torch.as_tensor(state)))
            action = choice.sample()
            after, reward, terminated, truncated, _ = env.step(action.item())
            steps.append((state, action.item(), choice.log_prob(action).item(), float(reward)))
            state = after
        states, actions, logp, rewards = (torch.as_tensor(x) for x in map(list, zip(*steps)))
        sent = {"states": states, "actions": actions, "logp": logp, "rewards": rewards}
        sent |= {"final": torch.as_tensor(state), "terminated": terminated}
        episodes[(par.role_rank + episode) % len(episodes)].put(sent)  # to the learners in turn
        episode += 1
        smoothed = 0.9 * smoothed + 0.1 * len(steps)
        solved = solved + 1 if smoothed > 190 else 0
        if solved >= 5 and solved_by.swap("actor", None, par.role_rank):
            print(f"solved by actor {par.role_rank} in episode {episode}")
    for channel in episodes:
        channel.put("bye")


def loss_of(e):
    seen, n = torch.cat([e["states"], e["final"][None]]), len(e["rewards"])
    values, choice = critic(seen).squeeze(-1), Categorical(logits=actor(e["states"]))
    logp, last = choice.log_prob(e["actions"]), torch.arange(n)[:, None] == n - 1
    over, cut = last & e["terminated"], last & (not e["terminated"])
    columns = (e["logp"], logp, e["rewards"], values[:-1], values[1:])
    v, advantage = vtrace(*(c.detach().view(n, 1) for c in columns), over, cut, discounts=0.99)
    return 0.5 * (values[:-1] - v[:, 0]).square().sum() - (logp * advantage[:, 0]).sum()


def learn():
    learners, replay, left = par.group_of("learner"), [], 0
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], args.learning_rate)
    policy.pull()
    while not learners.all(left == par.roles.counts["actor"]):
        got = episodes[par.role_rank].get() if left < par.roles.counts["actor"] else "bye"
        left, replay = left + (got == "bye"), replay if got == "bye" else [*replay, got]
        for _ in range(args.updates):
            batch = random.sample(replay, min(2, len(replay)))
            rows = sum(len(e["rewards"]) for e in batch)
            optimizer.zero_grad()
            (sum(loss_of(e) for e in batch) / rows).backward()
            par.average_gradients([*actor.parameters(), *critic.parameters()], group=learners)
            optimizer.step()
        if par.rank == learner_ranks[0]:
            policy.push()


act() if par.role == "actor" else learn()
par.barrier()  # whoever serves stays until all have been served
