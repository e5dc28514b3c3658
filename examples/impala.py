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


class Network(nn.Sequential):
    def __init__(self, inputs, outputs):
        hidden = [nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(16, outputs))


class Actor(Network):
    def forward(self, state, action=None):
        dist = Categorical(logits=super().forward(state))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action)


def loss_of(e):
    n, seen = len(e["logp"]), torch.cat([e["states"], e["final"][None]])
    values, (_, logp) = critic(seen).squeeze(-1), actor(e["states"], e["actions"])
    last = torch.arange(n)[:, None] == n - 1  # an episode cut off by the clock would have gone on
    ends = last & e["terminated"], last & (not e["terminated"])
    columns = (e["logp"], logp, torch.ones(n), values[:-1], values[1:])
    targets, advantages = vtrace(*(c.detach()[:, None] for c in columns), *ends, discounts=0.99)
    return 0.5 * (values[:-1] - targets[:, 0]).square().sum() - (logp * advantages[:, 0]).sum()


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--max-episodes", type=int, default=500)
args = parser.parse_args()
par = mh.Parallel()
par.seed(args.seed)
actor, critic = Actor(4, 2), Network(4, 1)
mh.check_actor(actor, torch.zeros(1, 4))
actors, learners = par.roles.counts["actor"], par.roles.ranks("learner")
policy = par.weight_server("policy", [actor, critic], owner=learners[0], sync="manual")
inboxes = [par.channel(f"episodes {r}", reader=r, capacity=1) for r in learners]
solved_by = par.values("solved by")

if par.role == "actor":
    env, smoothed, above, episode = gymnasium.make("CartPole-v0"), 0.0, 0, 0
    while episode < args.max_episodes and solved_by.get("actor") is None:
        policy.pull(wait=60 if episode else 0)  # let the learners keep up
        rows, (state, _) = [], env.reset(seed=args.seed * 9999 + par.rank * 999 + episode)
        terminated = truncated = False
        while not (terminated or truncated):
            with torch.no_grad():
                rows.append((torch.as_tensor(state), *actor(torch.as_tensor(state))))
            state, _, terminated, truncated, _ = env.step(rows[-1][1].item())
        sent = dict(zip(("states", "actions", "logp"), map(torch.stack, zip(*rows))))  # noqa: B905
        sent |= {"terminated": terminated, "final": torch.as_tensor(state)}
        inboxes[(par.role_rank + episode) % len(inboxes)].put(sent)  # to the learners in turn
        episode, smoothed = episode + 1, 0.9 * smoothed + 0.1 * len(rows)
        above = above + 1 if smoothed > 190 else 0
        if above >= 5 and solved_by.swap("actor", None, par.role_rank):
            print(f"solved by actor {par.role_rank} in episode {episode}")
    for inbox in inboxes:
        inbox.put("bye")
else:
    group, replay, left = par.group_of("learner"), [], 0
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    while not group.all(left == actors):
        got = inboxes[par.role_rank].get() if left < actors else None
        left += got == "bye"
        replay += [got] if isinstance(got, dict) else []
        for _ in range(20):
            batch = random.sample(replay, min(2, len(replay)))
            optimizer.zero_grad()
            (sum(loss_of(e) for e in batch) / sum(len(e["logp"]) for e in batch)).backward()
            par.average_gradients(parameters, group=group)
            optimizer.step()
        if par.rank == learners[0]:
            policy.push()
par.barrier()  # whoever serves stays until all have been served
