"""The options of each algorithm: frozen dataclasses, the line under each field its help.

WHY apart from the algorithms: reading a configuration, checking it and `--help` need no torch, and
its import takes a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class A2CConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 8

    learning_rate: float | str = "linear:2e-3"
    """Step size; a number, or a schedule over the run such as linear:2e-3 (down to 0)."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 1.0
    """Trade between bias (0) and variance (1) of the advantages; 1 gives n-step returns."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus; more keeps exploring for longer."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened to it."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""


@dataclass(frozen=True)
class PPOConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 256

    learning_rate: float | str = "linear:1e-3"
    """Step size; a number, or a schedule over the run such as linear:1e-3 (down to 0)."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Trade between bias (0) and variance (1) of the advantages."""
    epochs: int = 10
    """Passes over each batch."""
    minibatch: int = 256
    """Rows of one gradient step, of all workers together."""
    clip: float = 0.2
    """How far the probability ratio may go from 1 before its gradient stops."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus; more keeps exploring for longer."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened to it."""
    target_kl: float = 0.0
    """Stop an update once the KL of a minibatch is above 1.5 times this; 0 never stops."""
    kl_penalty: bool = False
    """Penalise KL with an adaptive weight instead of clipping; target_kl is then the aim."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""


@dataclass(frozen=True)
class TRPOConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 256

    max_kl: float = 0.01
    """Radius of the trust region: KL between the policies before and after an update."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.97
    """Trade between bias (0) and variance (1) of the advantages."""
    cg_iterations: int = 10
    """Steps of conjugate gradient."""
    cg_damping: float = 0.1
    """Added to the diagonal of the Fisher matrix."""
    fisher_every: int = 5
    """Fisher products use every k-th row only."""
    line_search_tries: int = 10
    """Halvings of the step before it is given up."""
    value_learning_rate: float | str = 1e-3
    """Step size of the value function."""
    value_epochs: int = 10
    """Passes of the value function over each batch."""
    value_minibatch: int = 256
    """Rows of one step of the value function, of all workers together."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Epsilon of the value function's Adam."""


@dataclass(frozen=True)
class IMPALAConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 20

    learning_rate: float | str = "linear:2e-3"
    """Step size; a number, or a schedule over the run such as linear:2e-3 (down to 0)."""
    gamma: float = 0.99
    """Discount."""
    vtrace_lambda: float = 1.0
    """Lambda of V-trace: below 1, value targets look less far ahead."""
    rho_bar: float = 1.0
    """Importance weights of value targets and advantages are cut to this."""
    c_bar: float = 1.0
    """Importance weights by which corrections travel back in time are cut to this."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus; more keeps exploring for longer."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are shortened to it."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all learners."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    lstm: int = 0
    """Units of an LSTM behind the hidden layers, for tasks that need a memory; 0: none."""
    replay: int = 0
    """Recent unrolls that each learner keeps to learn from again; 0: each is used once."""
    replay_share: float = 0.5
    """With replay: how much of a batch, from 0 to 1, comes from there."""


CONFIGS: dict[str, type[Any]] = {
    "a2c": A2CConfig,
    "ppo": PPOConfig,
    "trpo": TRPOConfig,
    "impala": IMPALAConfig,
}
