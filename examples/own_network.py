"""A network of your own, by its name: the rest of the run stays as it is.

    manyhands train ppo --env CartPole-v1 --network own_network:build --network-kwargs width=128

`build` makes features of observations; a linear layer for each output of the algorithm comes behind
it, so that it suits every algorithm. `PolicyAndValue` is a whole network, for a2c, ppo and impala.
"""

import math

from torch import nn


class Residual(nn.Module):
    """x + f(x): the layer below can be left as it was."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.layers(x)


def build(observation_space, action_space, width: int = 64, blocks: int = 2) -> nn.Module:
    """[N, *observation_space.shape] -> features [N, width]."""
    inputs = math.prod(observation_space.shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), *(Residual(width) for _ in range(blocks))
    )


class PolicyAndValue(nn.Module):
    """[N, *observation_space.shape] -> logits [N, n] of Discrete(n) actions, and values [N]."""

    def __init__(self, observation_space, action_space, width: int = 64) -> None:
        super().__init__()
        self.features = build(observation_space, action_space, width)
        self.logits = nn.Linear(width, int(action_space.n))
        self.value = nn.Linear(width, 1)

    def forward(self, x):
        features = self.features(x)
        return self.logits(features), self.value(features).squeeze(-1)


if __name__ == "__main__":
    import manyhands as mh

    result = mh.train(
        "ppo", env="CartPole-v1", network=build, network_kwargs={"width": 128}, steps=20_000
    )
    print(mh.load(result.run_dir).act([0.0, 0.0, 0.0, 0.0]))
