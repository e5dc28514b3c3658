"""IMPALA with your own network, in your own loop: two learners and two actors on CartPole-v1.

    manyhands launch --roles learner=2,actor=2 examples/agent_impala.py
    python examples/agent_impala.py                   # the same lines alone

Actors send what they have played, with the log-probabilities of their actions; learners correct
for the older policy by V-trace and take the same step. It ends when the mean return of the last
100 episodes is above 400.
"""

import argparse

import manyhands as mh
from torch import nn


class Network(nn.Sequential):
    """Features of observations; a layer for the policy and one for the value come on top."""

    def __init__(self, observation_space, action_space, width=64):
        inputs = observation_space.shape[0]
        hidden = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        super().__init__(*hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    par = mh.Parallel()
    par.seed(args.seed)
    envs = par.make_vec("CartPole-v1", num_envs=4)
    with mh.Agent(
        "impala", envs, par=par, network=Network, steps=args.steps, seed=args.seed,
        target_return=400,
    ) as agent:  # fmt: skip
        obs, info = envs.reset()
        while not agent.done:
            if agent.acts:
                action = agent.act(obs)
                obs, reward, terminated, truncated, info = envs.step(action)
                agent.observe(obs, reward, terminated, truncated, info)
            report = agent.update()
            if report and report["update"] % 100 == 0:
                par.print(f"{report['env_steps']} steps, mean return {report['mean_return']:.1f}")
        print(f"{agent.role} {par.rank} has ended at version {agent.version}")
        agent.save("impala-policy")


if __name__ == "__main__":
    main()
