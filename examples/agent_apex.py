"""Ape-X with your own network, in your own loop: a learner and two actors on CartPole-v1.

    manyhands launch --roles learner=1,actor=2 examples/agent_apex.py
    ... agent_apex.py --algorithm ddpg --env Pendulum-v1          # Ape-X DDPG
    python examples/agent_apex.py                     # the same lines alone: DQN with a replay

Each actor explores in its own way and appends to its own shard of the replay; the learner draws
from all shards by priority. It ends when the mean return of the last 100 episodes is high enough.
"""

import argparse

import manyhands as mh
from torch import nn


class Network(nn.Sequential):
    """Features of observations; a layer for the value of each action comes on top."""

    def __init__(self, observation_space, action_space, width=128):
        inputs = observation_space.shape[0]
        super().__init__(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default="dqn", choices=["dqn", "ddpg"])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = {"target_return": 400, "learning_rate": 5e-4, "max_grad_norm": 0.5}
    if args.algorithm == "ddpg":
        options = {"target_return": -250, "policy_learning_rate": 1e-4}
    par = mh.Parallel()
    par.seed(args.seed)
    envs = par.make_vec(args.env, num_envs=4)
    with mh.Agent(
        args.algorithm, envs, par=par, network=Network, steps=args.steps, seed=args.seed, **options
    ) as agent:
        obs, info = envs.reset()
        while not agent.done:
            if agent.acts:
                action = agent.act(obs)
                obs, reward, terminated, truncated, info = envs.step(action)
                agent.observe(obs, reward, terminated, truncated, info)
            report = agent.update()
            if report and report["update"] % 20 == 0:
                par.print(f"{report['env_steps']} steps, mean return {report['mean_return']:.1f}")
        print(f"{agent.role} {par.rank} has ended at version {agent.version}")
        agent.save("apex-policy")


if __name__ == "__main__":
    main()
