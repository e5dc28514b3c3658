"""The algorithms, as data: what everything asks that runs before torch is loaded.

The options of each, frozen dataclasses with the line under each field its help; then one row an
algorithm: the command line, its help, the checks, the table of what runs with what, the
docs and the workers all read it. An algorithm of your own is the same row in a module of your own,
and `manyhands train package.module:NAME` takes it (examples/own_algorithm.py).

    learns_from    what it is given; the strategies' own rows say which of them take it
    rollout        T steps of each environment, of the newest policy
    unroll         the same, from a policy some updates old
    replay         transitions of any age, drawn from a replay
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from manyhands.errors import ConfigError, importing

# -- options ---------------------------------------------------------------------------------------


# Options that algorithms/on_device.py has nothing for.
HOST_ONLY = ("lstm", "critic_learning_rate", "critic_epochs", "kl_penalty", "replay")


@dataclass(frozen=True)
class A2CConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 8
    NORMALIZE_REWARDS: ClassVar[bool] = True

    learning_rate: float | str = "linear:2e-3"
    """Step size; a number, or a schedule over the run such as linear:2e-3 (down to 0)."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 1.0
    """Trade between bias (0) and variance (1) of the advantages; 1 gives n-step returns."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    critic_learning_rate: float | str = 0.0
    """Step size of the critic, which then learns in passes of its own; 0: as the policy."""
    critic_epochs: int = 0
    """Passes over each batch for the critic alone, after the policy's; 0: learns beside it."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus; more keeps exploring for longer."""
    max_grad_norm: float = 0.5
    """Gradients with a larger norm than this are scaled down to it."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    lstm: int = 0
    """Units of an LSTM behind the hidden layers, for tasks that need a memory; 0: none."""


@dataclass(frozen=True)
class PPOConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 256
    NORMALIZE_REWARDS: ClassVar[bool] = True

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
    critic_learning_rate: float | str = 0.0
    """Step size of the critic, which then learns in passes of its own; 0: as the policy."""
    critic_epochs: int = 0
    """Passes over each batch for the critic alone, after the policy's; 0: learns beside it."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus; more keeps exploring for longer."""
    max_grad_norm: float = 0.5
    """Gradients with a larger norm than this are scaled down to it."""
    target_kl: float = 0.0
    """Stop an update once the KL of a minibatch is above 1.5 times this; 0 never stops."""
    kl_penalty: bool = False
    """Penalise KL with an adaptive weight instead of clipping; target_kl is then the aim."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    lstm: int = 0
    """Units of an LSTM behind the hidden layers, for tasks that need a memory; 0: none."""


@dataclass(frozen=True)
class TRPOConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 256
    NORMALIZE_REWARDS: ClassVar[bool] = True

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
    value_minibatch: int = 512
    """Rows of one step of the value function, of all workers together."""
    normalize_advantages: bool = True
    """Advantages with mean 0 and deviation 1 over the rows of all workers."""
    adam_epsilon: float = 1e-5
    """Epsilon of the value function's Adam."""
    lstm: int = 0
    """Units of an LSTM behind the hidden layers, for tasks that need a memory; 0: none."""


@dataclass(frozen=True)
class IMPALAConfig:
    ROLLOUT_LENGTH: ClassVar[int] = 40
    NORMALIZE_REWARDS: ClassVar[bool] = True

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
    clip: float = 0.0
    """As in PPO, for a replay: a row no longer counts once its action has become more likely, or
    less, by more than this share, where the gradient points that way. 0: all rows count."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus; more keeps exploring for longer."""
    max_grad_norm: float = 0.5
    """Gradients with a larger norm than this are scaled down to it."""
    normalize_advantages: bool = False
    """Advantages with mean 0 and deviation 1 over the rows of all learners."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    lstm: int = 0
    """Units of an LSTM behind the hidden layers, for tasks that need a memory; 0: none."""
    replay: int = 0
    """Recent unrolls that each learner keeps to learn from again; 0: each is used once."""
    replay_share: float = 0.5
    """With replay: how much of a batch, from 0 to 1, comes from there."""


@dataclass(frozen=True)
class ReplayConfig:
    """What every algorithm that learns from a replay is set by."""

    ROLLOUT_LENGTH: ClassVar[int] = 32  # steps of each environment between two records of metrics

    learning_rate: float | str = 1e-3
    """Step size of the Q function; a number, or a schedule over the run such as linear:1e-3."""
    gamma: float = 0.99
    """Discount."""
    n_step: int = 3
    """Rewards that are added up before the target network is asked."""
    batch_size: int = 64
    """Rows of one gradient step, of all learners together."""
    replay_size: int = 50_000
    """Transitions that are kept, of all actors together."""
    learning_starts: int = 1_000
    """Transitions that must be there before the first gradient step."""
    updates_per_step: float = 0.5
    """Gradient steps for each environment step. With apex it is held within bounds: a learner or
    actors that are too fast for each other wait."""
    prioritized: bool = True
    """Draw transitions in proportion to their TD error, instead of all alike."""
    priority_alpha: float = 0.6
    """How much the TD error counts for the draw; 0 is uniform."""
    priority_epsilon: float = 0.01
    """Added to every TD error, so that every transition can still be drawn."""
    beta: float | str = "linear:0.4:1"
    """How far importance weights correct for the uneven draw, from 0 to 1; a number or a
    schedule."""
    target_every: int = 0
    """Gradient steps between copies to the target network; 0: it moves a little after each, by
    target_tau."""
    target_tau: float = 0.005
    """How far the target network moves towards the network after each gradient step."""
    huber: float = 1.0
    """TD errors count quadratically up to this, linearly beyond; 0: quadratically always."""
    max_grad_norm: float = 10.0
    """Gradients with a larger norm than this are scaled down to it."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    checkpoint_replay: bool = False
    """Save the replay with every checkpoint: a resumed run then continues exactly. Without it, a
    new replay is filled first."""
    pull_every: int = 16
    """With apex: steps of each environment between two looks for newer weights."""
    prefetch: int = 2
    """With apex: batches that are put together while the learner learns; none where actors and
    learner take turns (inline; local with one actor)."""
    lost_shard: Literal["keep", "drop"] = "keep"
    """With apex: what becomes of the transitions of an actor that was lost."""


@dataclass(frozen=True)
class DQNConfig(ReplayConfig):
    learning_rate: float | str = "linear:1e-3"
    """Step size; a number, or a schedule over the run such as linear:1e-3 (down to 0)."""
    batch_size: int = 128
    """Rows of one gradient step, of all learners together."""
    target_every: int = 200
    """Gradient steps between copies to the target network; 0: it moves a little after each, by
    target_tau."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm than this are scaled down to it."""
    double: bool = True
    """The network chooses the next action and the target network values it."""
    dueling: bool = False
    """The network gives the value of a state and the advantage of each action apart."""
    epsilon: float = 1.0
    """Probability of a random action at the start; with several environments, in the first one."""
    epsilon_final: float = 0.02
    """The same, once epsilon_steps have been made."""
    epsilon_steps: int = 10_000
    """Environment steps over which it falls, in a straight line."""
    ladder_alpha: float = 7.0
    """Environment i of N explores with epsilon ** (1 + ladder_alpha * i / (N - 1)); 0: all
    alike."""


@dataclass(frozen=True)
class DDPGConfig(ReplayConfig):
    huber: float = 0.0
    """TD errors count quadratically up to this, linearly beyond; 0: quadratically always."""
    policy_learning_rate: float | str = 1e-3
    """Step size of the policy; a number, or a schedule over the run."""
    noise_kind: Literal["normal", "ou", "clipped"] = "normal"
    """Noise of the actions: independent, a walk that is pulled back (ou), or independent and
    cut."""
    noise: float = 0.1
    """Its deviation, as a share of half the range of actions; with several environments, in the
    first one."""
    noise_spread: float = 1.0
    """The last environment's noise as a share of the first one's; the others lie in between."""
    noise_clip: float = 2.0
    """With noise_kind=clipped: deviations at which it is cut."""
    ou_theta: float = 0.15
    """With noise_kind=ou: how strongly the walk is pulled back."""


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    HIDDEN: ClassVar[tuple[int, ...]] = (256, 256)
    ACTIVATION: ClassVar[str] = "relu"

    learning_rate: float | str = 3e-4
    """Step size of critics, policy and temperature; a number, or a schedule over the run."""
    n_step: int = 1
    """Rewards that are added up before the target network is asked."""
    batch_size: int = 256
    """Rows of one gradient step, of all learners together."""
    replay_size: int = 1_000_000
    """Transitions that are kept, of all actors together."""
    learning_starts: int = 5_000
    """Transitions that must be there before the first gradient step; until then, actions are drawn
    evenly from their range."""
    updates_per_step: float = 1.0
    """Gradient steps for each environment step. With apex it is held within bounds: a learner or
    actors that are too fast for each other wait."""
    prioritized: bool = False
    """Draw transitions in proportion to their TD error, instead of all alike."""
    huber: float = 0.0
    """TD errors count quadratically up to this, linearly beyond; 0: quadratically always."""
    max_grad_norm: float = float("inf")
    """Gradients with a larger norm than this are scaled down to it."""
    adam_epsilon: float = 1e-8
    """Adam's epsilon."""
    temperature: float = 0.0
    """What a nat of entropy is worth, in reward; 0: learned, so that entropy_per_action is kept."""
    initial_temperature: float = 1.0
    """Where a learned temperature begins."""
    entropy_per_action: float = -1.0
    """With a learned temperature: the entropy that is kept, in nats for each number of an action
    on [-1, 1]; evenly drawn ones have 0.69."""

    def faults(self) -> Iterator[str]:
        if not self.initial_temperature > 0:
            yield (
                f"initial_temperature={self.initial_temperature:g} must be above 0: its logarithm "
                "is learned; type: --initial-temperature 1"
            )


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    HIDDEN: ClassVar[tuple[int, ...]] = (256, 256)
    ACTIVATION: ClassVar[str] = "relu"

    learning_rate: float | str = 3e-4
    """Step size of the critics; a number, or a schedule over the run."""
    policy_learning_rate: float | str = 3e-4
    """Step size of the policy; a number, or a schedule over the run."""
    n_step: int = 1
    """Rewards that are added up before the target network is asked."""
    batch_size: int = 256
    """Rows of one gradient step, of all learners together."""
    replay_size: int = 1_000_000
    """Transitions that are kept, of all actors together."""
    learning_starts: int = 5_000
    """Transitions that must be there before the first gradient step; until then, actions are drawn
    evenly from their range."""
    updates_per_step: float = 1.0
    """Gradient steps for each environment step. With apex it is held within bounds: a learner or
    actors that are too fast for each other wait."""
    prioritized: bool = False
    """Draw transitions in proportion to their TD error, instead of all alike."""
    max_grad_norm: float = float("inf")
    """Gradients with a larger norm than this are scaled down to it."""
    adam_epsilon: float = 1e-8
    """Adam's epsilon."""
    policy_delay: int = 2
    """Gradient steps of the critics for one of the policy and of the target networks."""
    target_noise: float = 0.2
    """Deviation of the noise on the target policy's actions, as a share of half their range."""
    target_noise_clip: float = 0.5
    """Where that noise is cut."""

    def faults(self) -> Iterator[str]:
        if self.policy_delay < 1:
            yield f"policy_delay={self.policy_delay}: at least 1 is needed; type: --policy-delay 2"


# -- rows ------------------------------------------------------------------------------------------

# (experiment, observation space, action space) -> torch.nn.Module
BuildModel = Callable[[Any, Any, Any], Any]

_MODEL = {
    "rollout": "manyhands.networks.build:actor_critic",
    "unroll": "manyhands.networks.build:actor_critic",
    "replay": "manyhands.networks.q:q_network",
}


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm. Functions and classes may be given by name, so that torch is loaded late."""

    name: str
    """As it is typed, and as its options are headed in config.toml."""
    about: str
    """One line for the help."""
    options: type[Any]
    """A frozen dataclass; the string under each field is its help."""
    algorithm: str | type[Any]
    """The class, a subclass of manyhands.algorithms.base.Algorithm, or package.module:Class."""
    learns_from: Literal["rollout", "unroll", "replay"] = "rollout"
    """What it is given; the strategies that it runs with follow from that."""
    model: str | BuildModel = ""
    """Makes its network (default: what suits what it learns from)."""
    actions: Literal["any", "discrete", "bounded"] = "any"
    """Which action spaces it can learn."""
    pushes_gradients: bool = False
    """Whether one gradient of one worker's rows is a whole step: for strategy gradient_server."""
    separate_networks: bool = False
    """Whether policy and value may not share a network."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> why not, where its kind alone does not say it; reads on after the name."""

    def load(self) -> Any:
        """The class; loads torch."""
        return named(self.algorithm) if isinstance(self.algorithm, str) else self.algorithm

    def build_model(self, experiment: Any, observation_space: Any, action_space: Any) -> Any:
        """The network, with the weights that the run's seed begins with; loads torch."""
        model = self.model or _MODEL[self.learns_from]
        build: BuildModel = named(model) if isinstance(model, str) else model
        return build(experiment, observation_space, action_space)


_ALL = (
    AlgorithmSpec(
        name="a2c",
        about="advantage actor-critic: one gradient step on each batch",
        options=A2CConfig,
        algorithm="manyhands.algorithms.a2c:A2C",
        pushes_gradients=True,
    ),
    AlgorithmSpec(
        name="ppo",
        about="proximal policy optimisation: several passes over each batch, the step clipped",
        options=PPOConfig,
        algorithm="manyhands.algorithms.ppo:PPO",
    ),
    AlgorithmSpec(
        name="trpo",
        about="trust region policy optimisation: the natural gradient, KL bounded",
        options=TRPOConfig,
        algorithm="manyhands.algorithms.trpo:TRPO",
        separate_networks=True,
        refuses={
            "gradient_server": "makes a search over one whole batch, no gradient that can be "
            "pushed; use a2c"
        },
    ),
    AlgorithmSpec(
        name="dqn",
        about="deep Q-learning from a prioritized replay, for discrete actions; with apex Ape-X",
        options=DQNConfig,
        algorithm="manyhands.algorithms.dqn:DQN",
        learns_from="replay",
        actions="discrete",
    ),
    AlgorithmSpec(
        name="ddpg",
        about="a deterministic policy that climbs its critic, for continuous actions",
        options=DDPGConfig,
        algorithm="manyhands.algorithms.ddpg:DDPG",
        learns_from="replay",
        model="manyhands.networks.q:bounded_actor",
        actions="bounded",
    ),
    AlgorithmSpec(
        name="sac",
        about="two critics and a policy that stays as random as it can, for continuous actions",
        options=SACConfig,
        algorithm="manyhands.algorithms.sac:SAC",
        learns_from="replay",
        model="manyhands.algorithms.sac:squashed_actor",
        actions="bounded",
    ),
    AlgorithmSpec(
        name="td3",
        about="ddpg with two critics, of which the lower one counts, for continuous actions",
        options=TD3Config,
        algorithm="manyhands.algorithms.td3:TD3",
        learns_from="replay",
        model="manyhands.algorithms.td3:twin_bounded_actor",
        actions="bounded",
    ),
    AlgorithmSpec(
        name="impala",
        about="actors and learners apart: V-trace corrects for data older than the policy",
        options=IMPALAConfig,
        algorithm="manyhands.algorithms.impala:IMPALA",
        learns_from="unroll",
    ),
)
SPECS: dict[str, AlgorithmSpec] = {spec.name: spec for spec in _ALL}


def spec_of(algorithm: str) -> AlgorithmSpec:
    """The algorithm of that name, or of the user's own as package.module:NAME."""
    if algorithm in SPECS:
        return SPECS[algorithm]
    if ":" not in algorithm:
        near = difflib.get_close_matches(algorithm.lower(), SPECS, 3, 0.6)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(SPECS)}"
        raise ConfigError(f"there is no algorithm {algorithm!r}; {hint}")
    found = named(algorithm)
    if not isinstance(found, AlgorithmSpec):
        raise ConfigError(
            f"{algorithm} is a {type(found).__name__}, and an algorithm is given by a "
            "manyhands.AlgorithmSpec; examples/own_algorithm.py shows one"
        )
    if found.name in SPECS:
        raise ConfigError(f"{algorithm} is called {found.name!r}, which is one of ours; rename it")
    return found


def named(path: str) -> Any:
    """`package.module:NAME` -> what it names; ConfigError when it is not there."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{path!r} is not of the form package.module:NAME")
    try:
        with importing(module):
            found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of the user's own imports: the traceback says where
        raise ConfigError(
            f"{path!r} names the module {module!r}, which cannot be imported: {error}. Is it on "
            "PYTHONPATH, or in the folder from which you start?"
        ) from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ConfigError(f"{path!r} cannot be found: {error}") from None
    return found
