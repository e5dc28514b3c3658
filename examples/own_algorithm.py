"""An algorithm of your own: REINFORCE with a baseline, one torch loss and one row.

    manyhands train own_algorithm:SPEC --env CartPole-v1 --workers 2 --strategy gather

All of single, gather and allreduce, every engine, checkpoints, resume and the report come with it.
"""

from dataclasses import dataclass

from manyhands import AlgorithmSpec
from manyhands.algorithms.base import PolicyGradient, explained_variance, normalised


@dataclass(frozen=True)
class ReinforceOptions:
    learning_rate: float = 3e-3
    """Step size."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 1.0
    """1: returns of all the rewards there are, less the baseline."""
    value_weight: float = 0.5
    """Weight of the baseline's loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: float = 0.5
    """Gradients with a larger norm than this are scaled down to it."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""


class Reinforce(PolicyGradient):
    """L = −log π(a|s) (R − V(s)) + c_v (V − R)² − c_e H, one step a batch."""

    def policy_loss(self, parameters, rows):
        logp = self.model.head.log_prob(parameters, rows["action"])
        return -(logp * rows["advantage"]).sum(), []

    def update(self, batch, across, progress):
        o, fit = self.options, explained_variance(batch, across)
        batch = normalised(batch, across)
        info = self.descend(
            batch, across, epochs=1, minibatch=0, lr=o.learning_rate, max_grad_norm=o.max_grad_norm
        )
        self.version += 1
        return info | {"explained_variance": fit}


SPEC = AlgorithmSpec(
    name="reinforce",
    about="returns less a baseline, one gradient step on each batch",
    options=ReinforceOptions,
    algorithm=Reinforce,
)
