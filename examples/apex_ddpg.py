"""Ape-X DDPG with your own networks and your own loop: two actors and one learner on Pendulum-v1.

    manyhands launch --roles learner=1,actor=2 examples/apex_ddpg.py [SEED]
Each actor appends to its own shard of the replay; the learner draws from all of them by priority.
It ends when the mean return of 50 episodes is -200.
"""

import contextlib
import copy
import sys

import gymnasium
import manyhands as mh
import numpy as np
import torch
from manyhands.replay.n_step import NStep
from manyhands.replay.sharded import RateLimit, ShardedReplay, ShardWriter
from torch import nn

BATCH, ROW = 64, {"obs": np.zeros(3, "f4"), "action": np.zeros(1, "f4"), "reward": np.float32(0),
                  "next_obs": np.zeros(3, "f4"), "discount": np.float32(0)}  # fmt: skip


def network(inputs, *last):
    hidden = [nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 1), *last)


def errors_of(critic, target_actor, target_critic, rows):
    """TD errors of the actions that were taken, n-step."""
    obs, action, reward, ahead, discount = (torch.as_tensor(rows[k]) for k in ROW)
    best = target_critic(torch.cat([ahead, target_actor(ahead)], 1))[:, 0].detach()
    return critic(torch.cat([obs, action], 1))[:, 0] - (reward + discount * best)


par, seed = mh.Parallel(), int(sys.argv[1]) if len(sys.argv) > 1 else 1
par.seed(seed)
actor, critic = network(3, nn.Tanh()), network(4)  # actions on [-1, 1]; the env takes twice that
policy = par.weight_server("policy", [actor, critic], owner=0, sync="manual")
returns = par.channel("returns", reader=0, capacity=4)
said, actors = par.values("said"), par.roles.counts["actor"]

if par.role == "actor":
    env, steps = gymnasium.make("Pendulum-v1"), 0
    shard, n_step = ShardWriter.connect(par, "replay", par.role_rank), NStep(3, 0.99, 1)
    while said.get("solved") is None:
        policy.pull(wait=0)
        state, over, total = env.reset(seed=seed * 9999 + 10**6 * par.rank + steps)[0], False, 0.0
        while not over:
            with torch.no_grad():
                action = actor(torch.as_tensor(state)).numpy() + 0.1 * np.random.randn(1)
            action = np.random.uniform(-1, 1, 1) if steps < 500 else np.clip(action, -1, 1)
            start = {"obs": state[None], "action": action[None].astype("f4")}
            state, reward, terminated, truncated, _ = env.step(2 * action.astype("f4"))
            rows = n_step.push(start, np.array([reward]), state[None], [terminated], [truncated])
            errors = errors_of(critic, actor, critic, rows).detach()  # first priorities, made here
            shard.append({k: rows[k] for k in ROW}, errors.numpy())
            over, total, steps = terminated or truncated, total + float(reward), steps + 1
        returns.put(total)
    returns.put(None)
else:
    model = nn.ModuleList([actor, critic])
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=1e-3)
    limit = RateLimit(samples_per_insert=32.0, min_size=1000)  # nobody runs ahead
    replay = ShardedReplay(ROW, shards=actors, capacity=50_000, batch_size=BATCH, limit=limit)
    replay.serve(par, "replay")
    policy.push()
    seen, left, updates = [], 0, 0
    while left < actors:
        with contextlib.suppress(mh.CollectiveError):  # nothing new: actors may have gone
            batch = replay.sample(beta=0.4, timeout=2.0)
            errors, obs = errors_of(critic, *target, batch.rows), torch.as_tensor(batch.rows["obs"])
            climb = -critic(torch.cat([obs, actor(obs)], 1)).mean()
            loss = (torch.as_tensor(batch.weights) * errors.square()).mean()
            optimizer.zero_grad()
            climb.backward(inputs=list(actor.parameters()))
            loss.backward(inputs=list(critic.parameters()))
            optimizer.step()
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.005)
            replay.update_priorities(batch.ids, errors.detach().numpy())
            updates += 1
            updates % 10 or policy.push()
        while len(returns):
            total = returns.get()
            left, seen = left + (total is None), seen + ([] if total is None else [total])
        solved = len(seen) >= 50 and np.mean(seen[-50:]) >= -200
        if solved and said.swap("solved", None, True):
            print(f"solved after {len(seen)} episodes")
par.barrier()  # whoever serves stays until all have been served
