"""From Gymnasium spaces to a policy with its value.

    observation ── encoder ── hidden layers ── policy head  -> distribution parameters [N, P]
               └── encoder ── hidden layers ── value head   -> values [N]

Separate trunks by default; one shared trunk for images, where the encoder is nearly all the cost.
With a memory it is one trunk:

    observation ── encoder ── hidden layers ── LSTM ──┬── policy head -> parameters [N, P]
                                  state ─────────┘    └── value head  -> values [N]

or, where fitting the value must not move the policy, one of these for each. The state of one
environment is one row [S]: h and c of each LSTM end to end, so that it travels and is stored like
any other column. A new episode starts from zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands import trees
from manyhands.networks import own
from manyhands.networks.encoders import (
    Encoder,
    Observations,
    has_image,
    linear,
    make_encoder,
    mlp,
    untouched_chance,
)
from manyhands.networks.heads import DiagonalGaussian, Head, make_head, masked
from manyhands.networks.numpy_distributions import sample
from manyhands.trees import Array
from manyhands.types import Acted, Obs

POLICY_GAIN, VALUE_GAIN = 0.01, 1.0
# Of an LSTM's forget gates at the beginning. WHY: at 0 half of what is remembered is lost in every
# step, and a cue ten steps back has no gradient to speak of. PAPER: Jozefowicz et al., ICML 2015.
FORGET_BIAS = 1.0


def actor_critic(experiment: Any, observations: Any, actions: Any) -> nn.Module:
    """Policy and value; with a memory where the algorithm's options ask for one."""
    units = getattr(experiment.options, "lstm", 0)
    # What remembers stands between features and outputs.
    takes = (own.FEATURES,) if units else (own.FEATURES, own.POLICY_AND_VALUE)
    modules = own.modules(experiment, observations, actions, *takes)
    if modules is not None and modules.kind == own.POLICY_AND_VALUE:
        return modules.actor_critic()
    common = own.common(experiment, modules)
    if units:
        spec = experiment.spec
        # IMPALA's begins as it always did: a run of an earlier version can be made again.
        common["remember"] = FORGET_BIAS if spec.learns_from == "rollout" else 0.0
        shared = not spec.separate_networks
        return build_recurrent(observations, actions, units=units, shared=shared, **common)
    shared = experiment.run.shared_network
    return build_actor_critic(observations, actions, shared=shared, **common)


def to_tensor(x: Any, device: torch.device) -> Any:
    """An array, or a tree of arrays, on the device."""
    return trees.map(lambda leaf: torch.as_tensor(leaf).to(device), x)


class ActorCritic(nn.Module):
    """forward(observations) -> (distribution parameters [N, P], values [N])."""

    def __init__(
        self,
        head: Head,
        policy_encoder: Encoder,
        value_encoder: Encoder | None,
        *,
        hidden: Sequence[int],
        activation: str,
        initial_log_std: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.head = head
        self.shared = value_encoder is None

        def trunk() -> nn.Sequential:
            return mlp(policy_encoder.features, hidden, activation=activation, generator=generator)

        # Drawn in this order, kept in another: what belongs to the value alone comes last, so that
        # it is one piece of the flat parameters.
        policy_trunk = trunk()
        # None, not a second name for the same module: a checkpoint would hold its weights twice.
        value_trunk = None if self.shared else trunk()
        width = hidden[-1] if hidden else policy_encoder.features
        outputs = head.parameter_size
        self.log_std: nn.Parameter | None = None
        if isinstance(head, DiagonalGaussian):
            outputs = head.size
            self.log_std = nn.Parameter(torch.full((head.size,), initial_log_std))
        self.policy_encoder = policy_encoder
        self.policy_trunk = policy_trunk
        self.policy_out = linear(width, outputs, POLICY_GAIN, generator)
        self.value_encoder = value_encoder
        self.value_trunk = value_trunk
        self.value_out = linear(width, 1, VALUE_GAIN, generator)

    def forward(self, observations: Observations) -> tuple[Tensor, Tensor]:
        features = self._policy_features(observations)
        parameters = self._distribution(features, observations)
        if not self.shared:
            features = self._value_features(observations)
        return parameters, self.value_out(features).squeeze(-1)

    def policy(self, observations: Observations) -> Tensor:
        """Distribution parameters only, [N, P]."""
        return self._distribution(self._policy_features(observations), observations)

    def value(self, observations: Observations) -> Tensor:
        """Values only, [N]."""
        values: Tensor = self.value_out(self._value_features(observations))
        return values.squeeze(-1)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Everything the policy depends on, a shared trunk included: what a TRPO step moves."""
        own: list[nn.Parameter] = [] if self.log_std is None else [self.log_std]
        return own + list(_of(self.policy_encoder, self.policy_trunk, self.policy_out))

    def value_parameters(self) -> list[nn.Parameter]:
        """What can be changed without changing the policy: only the last layer if shared."""
        if self.value_encoder is None or self.value_trunk is None:
            return list(_of(self.value_out))
        return list(_of(self.value_encoder, self.value_trunk, self.value_out))

    def _policy_features(self, observations: Observations) -> Tensor:
        features: Tensor = self.policy_trunk(self.policy_encoder(observations))
        return features

    def _value_features(self, observations: Observations) -> Tensor:
        if self.value_encoder is None or self.value_trunk is None:
            return self._policy_features(observations)
        features: Tensor = self.value_trunk(self.value_encoder(observations))
        return features

    def _distribution(self, features: Tensor, observations: Observations) -> Tensor:
        outputs: Tensor = self.policy_out(features)
        if self.log_std is None:
            return masked(outputs, observations)
        return torch.cat([outputs, self.log_std.expand_as(outputs)], -1)


def build_actor_critic(
    observation_space: Any,
    action_space: Any,
    *,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    shared: bool | None = None,
    initial_log_std: float = 0.0,
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> ActorCritic:
    """An actor-critic for *single* (not vectorised) Gymnasium spaces.

    Args:
        observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these.
        action_space: Discrete, MultiDiscrete, MultiBinary or a Box of floats.
        hidden: Widths of the hidden layers; None: (64, 64), or none after an image encoder.
        activation: tanh, relu or elu.
        shared: One trunk for policy and value; None: only with images.
        initial_log_std: Of a Gaussian policy, on the unit scale of actions.
        seed: Makes the initial weights repeatable without touching torch's global stream.
        encoder: Makes what comes before the hidden layers, if not what suits the space.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    head = make_head(action_space)
    make = encoder or partial(make_encoder, observation_space, generator)
    policy_encoder = make()
    images = has_image(policy_encoder)
    shared = images if shared is None else shared
    return ActorCritic(
        head,
        policy_encoder,
        None if shared else make(),
        hidden=hidden if hidden is not None else (() if images else (64, 64)),
        activation=activation,
        initial_log_std=initial_log_std,
        generator=generator,
    )


def _of(*modules: nn.Module) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters()


# -- with a memory ---------------------------------------------------------------------------------


class RecurrentActorCritic(nn.Module):
    """step(observations, state) -> (distribution parameters [N, P], values [N], next state)."""

    def __init__(
        self,
        head: Head,
        encoder: Encoder,
        value_encoder: Encoder | None = None,
        *,
        units: int,
        hidden: Sequence[int],
        activation: str,
        remember: float = 0.0,
        initial_log_std: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.units = units
        self.shared = value_encoder is None  # one trunk and one memory for policy and value
        self.state_size = 2 * units if self.shared else 4 * units

        def trunk() -> nn.Sequential:
            return mlp(encoder.features, hidden, activation=activation, generator=generator)

        inputs = hidden[-1] if hidden else encoder.features
        self.policy_encoder = encoder
        self.policy_trunk = trunk()
        self.lstm = _lstm_cell(inputs, units, remember, generator)
        outputs = head.parameter_size
        self.log_std: nn.Parameter | None = None
        if isinstance(head, DiagonalGaussian):
            outputs = head.size
            self.log_std = nn.Parameter(torch.full((head.size,), initial_log_std))
        self.policy_out = linear(units, outputs, POLICY_GAIN, generator)
        # As in ActorCritic: what belongs to the value alone comes last.
        self.value_encoder = value_encoder
        self.value_trunk = None if self.shared else trunk()
        self.value_lstm: nn.LSTMCell | None = None
        if not self.shared:
            self.value_lstm = _lstm_cell(inputs, units, remember, generator)
        self.value_out = linear(units, 1, VALUE_GAIN, generator)

    def step(self, observations: Observations, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of N environments; `state` is [N, S]."""
        after: list[Tensor] = []
        hiddens: list[Tensor] = []
        before = state.tensor_split(self.state_size // (2 * self.units), 1)
        for (lstm, features), memory in zip(self._memories(observations), before, strict=True):
            hidden, cell = lstm(features, memory.chunk(2, 1))
            hiddens.append(hidden)
            after += [hidden, cell]
        parameters, values = self._heads(hiddens, observations)
        return parameters, values, torch.cat(after, 1)

    def policy(self, observations: Observations) -> Tensor:
        """Distribution parameters at the first step of episodes, [N, P]."""
        return self.step(observations, self._zero_state(observations))[0]

    def value(self, observations: Observations) -> Tensor:
        """Values at the first step of episodes, [N]."""
        return self.step(observations, self._zero_state(observations))[1]

    def _zero_state(self, observations: Observations) -> Tensor:
        rows, device = trees.rows(observations), self.policy_out.weight.device
        return torch.zeros(rows, self.state_size, device=device)

    def unroll(
        self, observations: Observations, state: Tensor, first: Tensor, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """T steps of B environments, rows time first: (parameters, values, state after each row).

        `state` [B, S] is that before the first row; it is forgotten where `first` [T, B] is true.
        One memory for policy and value.
        """
        features = self.policy_trunk(self.policy_encoder(observations)).unflatten(0, (length, -1))
        hidden, cell = state.chunk(2, 1)
        keep = (~first).to(features.dtype).unsqueeze(-1)
        hiddens, cells = [], []
        for x, kept in zip(features, keep, strict=True):
            hidden, cell = self.lstm(x, (hidden * kept, cell * kept))
            hiddens.append(hidden)
            cells.append(cell)
        together = torch.cat(hiddens)
        parameters, values = self._heads([together], observations)
        return parameters, values, torch.cat([together, torch.cat(cells)], 1)

    def sequences(
        self, observations: Observations, state: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(parameters [B T, P], values [B T]) of B environments, T steps of each in a row.

        `state` [B, S] is that before the first step; it is forgotten where `first` [B, T] is true.

        WHY in episodes: none knows of the one before, so all of them go through the LSTM side by
        side, and it takes as many steps as the longest of them has.
        """
        width, length = first.shape
        begins = first.clone()
        begins[:, 0] = True
        rows = torch.arange(width * length, device=first.device)
        episode = begins.reshape(-1).cumsum(0) - 1  # [B T] of each row
        start = rows[begins.reshape(-1)]  # [E] the first row of each episode
        at = rows - start[episode]  # [B T] the step of each row
        goes_on = ~first.reshape(-1)[start]  # from the rollout before
        before = state[start // length] * goes_on.to(state.dtype).unsqueeze(-1)
        hiddens = []
        parts = before.tensor_split(self.state_size // (2 * self.units), 1)
        for (lstm, features), memory in zip(self._memories(observations), parts, strict=True):
            side_by_side = features.new_zeros(int(at.max()) + 1, len(start), features.shape[-1])
            side_by_side = side_by_side.index_put((at, episode), features)
            hiddens.append(_through(lstm, side_by_side, memory)[at, episode])
        return self._heads(hiddens, observations)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Everything the policy depends on, as of an ActorCritic."""
        own: list[nn.Parameter] = [] if self.log_std is None else [self.log_std]
        parts = (self.policy_encoder, self.policy_trunk, self.lstm, self.policy_out)
        return own + list(_of(*parts))

    def value_parameters(self) -> list[nn.Parameter]:
        """What can be changed without changing the policy: only the last layer if shared."""
        parts = (self.value_encoder, self.value_trunk, self.value_lstm, self.value_out)
        return list(_of(*(part for part in parts if part is not None)))

    def _memories(self, observations: Observations) -> Iterator[tuple[nn.LSTMCell, Tensor]]:
        """Each LSTM with what it is shown: the policy's, and the value's where that has its own."""
        yield self.lstm, self.policy_trunk(self.policy_encoder(observations))
        if self.value_encoder is not None and self.value_trunk is not None:
            assert self.value_lstm is not None
            yield self.value_lstm, self.value_trunk(self.value_encoder(observations))

    def _heads(self, hiddens: list[Tensor], observations: Observations) -> tuple[Tensor, Tensor]:
        """From the policy's memory and, last, the value's; with one it is both."""
        outputs: Tensor = masked(self.policy_out(hiddens[0]), observations)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, self.value_out(hiddens[-1]).squeeze(-1)


def _through(lstm: nn.LSTMCell, inputs: Tensor, memory: Tensor) -> Tensor:
    """h after each of L steps, [L, E, H], from inputs [L, E, F] and the state before [E, 2 H]."""
    hidden, cell = memory.chunk(2, 1)
    if inputs.device.type == "cpu":  # in one call: up to twenty times as fast
        weights = [lstm.weight_ih, lstm.weight_hh, lstm.bias_ih, lstm.bias_hh]
        before = hidden.unsqueeze(0).contiguous(), cell.unsqueeze(0).contiguous()
        return torch.lstm(inputs, before, weights, True, 1, 0.0, True, False, False)[0]
    steps = []  # that of CUDA cannot be differentiated twice, as TRPO does
    for x in inputs:
        hidden, cell = lstm(x, (hidden, cell))
        steps.append(hidden)
    return torch.stack(steps)


def _lstm_cell(
    inputs: int, units: int, remember: float, generator: torch.Generator | None
) -> nn.LSTMCell:
    with untouched_chance():
        lstm = nn.LSTMCell(inputs, units)
    with torch.no_grad():
        for parameter in lstm.parameters():
            bound = 1.0 / math.sqrt(units)  # as torch does, from a stream of our own
            parameter.uniform_(-bound, bound, generator=generator)
        lstm.bias_ih[units : 2 * units] += remember  # in, forget, cell, out
    return lstm


class RecurrentActor:
    """Acts with a RecurrentActorCritic; whoever asks keeps the state."""

    def __init__(self, model: RecurrentActorCritic, device: torch.device) -> None:
        self._model, self._device = model, device

    @torch.no_grad()
    def act_with(self, obs: Obs, noise: Any, state: Array) -> tuple[Acted, Array]:
        """(what is done, the next state [N, S])."""
        parameters, values, after = self._model.step(
            to_tensor(obs, self._device), torch.as_tensor(state, device=self._device)
        )
        numbers = parameters.cpu().numpy()
        actions, logp = sample(self._model.head, numbers, noise)
        return Acted(actions, logp, values.cpu().numpy(), numbers), after.cpu().numpy()

    def act(self, obs: Obs, noise: Any) -> Acted:
        """The first step of episodes."""
        return self.act_with(obs, noise, self._zero_state(obs))[0]

    def value(self, obs: Obs) -> Array:
        """Of the first step of episodes."""
        return self.value_with(obs, self._zero_state(obs))

    @torch.no_grad()
    def value_with(self, obs: Obs, state: Array) -> Array:
        """Values [N] of observations that follow on these states [N, S]."""
        before = torch.as_tensor(state, device=self._device)
        values: Array = self._model.step(to_tensor(obs, self._device), before)[1].cpu().numpy()
        return values

    def _zero_state(self, obs: Obs) -> Array:
        return np.zeros((trees.rows(obs), self._model.state_size), np.float32)


def build_recurrent(
    observation_space: Any,
    action_space: Any,
    *,
    units: int,
    shared: bool = True,
    remember: float = 0.0,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> RecurrentActorCritic:
    """A recurrent actor-critic for single Gymnasium spaces; see build_actor_critic."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    make = encoder or partial(make_encoder, observation_space, generator)
    made = make()
    return RecurrentActorCritic(
        make_head(action_space),
        made,
        None if shared else make(),
        units=units,
        hidden=hidden if hidden is not None else (() if has_image(made) else (64,)),
        activation=activation,
        remember=remember,
        generator=generator,
    )
