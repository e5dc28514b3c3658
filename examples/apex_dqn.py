"""Ape-X DQN with your own network and your own loop: two actors and two learners on CartPole-v0.

    manyhands launch --roles learner=2,actor=2 examples/apex_dqn.py [SEED]
Each actor appends to its own shard of the replay; the first learner draws from all of them, and the
learners share each batch. It ends when an actor's smoothed return stays above 190.
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

BATCH, ROW = 128, {"obs": np.zeros(4, "f4"), "action": 0, "reward": np.float32(0),
                  "next_obs": np.zeros(4, "f4"), "discount": np.float32(0)}  # fmt: skip


def errors_of(q_net, target, rows):
    """TD errors of the stored actions: double DQN, n-step."""
    obs, action, reward, ahead, discount = (torch.as_tensor(rows[k]) for k in ROW)
    best = target(ahead).gather(1, q_net(ahead).argmax(1, keepdim=True))[:, 0]
    return q_net(obs).gather(1, action[:, None])[:, 0] - (reward + discount * best.detach())


par, seed = mh.Parallel(), int(sys.argv[1]) if len(sys.argv) > 1 else 1
par.seed(seed)
hidden = nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
q_net, actors = nn.Sequential(*hidden, nn.Linear(16, 2)), par.roles.counts["actor"]
policy = par.weight_server("policy", q_net, owner=0, sync="manual")
said = par.values("said")

if par.role == "actor":
    env, smoothed, above, steps, episode = gymnasium.make("CartPole-v0"), 0.0, 0, 0, 0
    shard, n_step = ShardWriter.connect(par, "replay", par.role_rank), NStep(3, 0.99, 1)
    while said.get("solved") is None:
        policy.pull(wait=0)
        state, over, total = env.reset(seed=seed * 9999 + 999 * par.rank + episode)[0], 0, 0
        while not over:  # each actor explores with an epsilon of its own
            epsilon = max(0.02, 1 - steps / 2000) ** (1 + 7 * par.role_rank / max(1, actors - 1))
            best = int(q_net(torch.as_tensor(state)).argmax())
            action = np.random.randint(2) if np.random.random() < epsilon else best
            start = {"obs": state[None], "action": np.array([action])}
            state, reward, terminated, truncated, _ = env.step(action)
            rows = n_step.push(start, np.array([reward]), state[None], [terminated], [truncated])
            errors = errors_of(q_net, q_net, rows).detach()  # first priorities, made here
            shard.append({k: rows[k] for k in ROW}, errors.numpy())
            over, total, steps = terminated or truncated, total + reward, steps + 1
        episode, smoothed = episode + 1, 0.9 * smoothed + 0.1 * total
        above = above + 1 if smoothed > 190 else 0
        if above == 5 and said.swap("solved", None, par.role_rank):
            print(f"solved by actor {par.role_rank} in episode {episode}")
    said.swap(f"bye {par.role_rank}", None, True)
else:
    group, target, updates, rows = par.group_of("learner"), copy.deepcopy(q_net), 0, None
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    empty = {k: np.stack([v] * BATCH) for k, v in (ROW | {"weight": np.float32(0)}).items()}
    if par.rank == 0:
        limit = RateLimit(samples_per_insert=32.0, min_size=500)  # nobody runs ahead
        replay = ShardedReplay(ROW, shards=actors, capacity=50_000, batch_size=BATCH, limit=limit)
        replay.serve(par, "replay")
        policy.push()

    def draw():
        with contextlib.suppress(mh.CollectiveError):
            return replay.sample(beta=0.4, timeout=2.0)
        return None if all(said.get(f"bye {a}") for a in range(actors)) else draw()

    while rows is None or rows["weight"].any():
        batch = draw() if par.rank == 0 else None
        rows = group.broadcast({**batch.rows, "weight": batch.weights} if batch else empty)
        mine = {k: np.split(v, group.size)[par.role_rank] for k, v in rows.items()}
        errors = errors_of(q_net, target, mine)
        optimizer.zero_grad()
        (torch.as_tensor(mine["weight"]) * errors.square()).mean().backward()
        par.average_gradients(q_net, group=group)
        optimizer.step()
        updates, found = updates + 1, group.gather({"errors": errors.detach().numpy()})
        if batch:
            replay.update_priorities(batch.ids, found["errors"])
            updates % 10 or policy.push()
        if updates % 300 == 0:
            target.load_state_dict(q_net.state_dict())
par.barrier()  # whoever serves stays until all have been served
