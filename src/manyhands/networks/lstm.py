"""An actor-critic with a memory: encoder, hidden layers, an LSTM, then both heads.

    observation ── encoder ── hidden layers ── LSTM ──┬── policy head -> parameters [N, P]
                                  state ─────────┘    └── value head  -> values [N]

The state of one environment is one row [S]: the LSTM's h and c end to end, so that it travels and
is stored like any other column. A new episode starts from zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands import trees
from manyhands.networks.build import (
    POLICY_GAIN,
    VALUE_GAIN,
    Encoder,
    Observations,
    has_image,
    make_encoder,
    to_tensor,
)
from manyhands.networks.heads import DiagonalGaussian, Head, make_head
from manyhands.networks.mlp import linear, mlp, untouched_chance
from manyhands.networks.numpy.distributions import sample
from manyhands.trees import Array
from manyhands.types import Acted, Obs


class RecurrentActorCritic(nn.Module):
    """step(observations, state) -> (distribution parameters [N, P], values [N], next state)."""

    shared = True  # one trunk and one memory for policy and value

    def __init__(
        self,
        head: Head,
        encoder: Encoder,
        *,
        units: int,
        hidden: Sequence[int],
        activation: str,
        initial_log_std: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.units = units
        self.state_size = 2 * units
        self.policy_encoder = encoder
        self.policy_trunk = mlp(
            encoder.features, hidden, activation=activation, generator=generator
        )
        with untouched_chance():
            self.lstm = nn.LSTMCell(hidden[-1] if hidden else encoder.features, units)
        with torch.no_grad():
            for parameter in self.lstm.parameters():
                bound = 1.0 / math.sqrt(units)  # as torch does, from a stream of our own
                parameter.uniform_(-bound, bound, generator=generator)
        outputs = head.parameter_size
        self.log_std: nn.Parameter | None = None
        if isinstance(head, DiagonalGaussian):
            outputs = head.size
            self.log_std = nn.Parameter(torch.full((head.size,), initial_log_std))
        self.policy_out = linear(units, outputs, POLICY_GAIN, generator)
        self.value_out = linear(units, 1, VALUE_GAIN, generator)

    def step(self, observations: Observations, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of N environments; `state` is [N, S]."""
        features = self.policy_trunk(self.policy_encoder(observations))
        hidden, cell = self.lstm(features, state.chunk(2, 1))
        parameters, values = self._heads(hidden)
        return parameters, values, torch.cat([hidden, cell], 1)

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
        parameters, values = self._heads(together)
        return parameters, values, torch.cat([together, torch.cat(cells)], 1)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        outputs: Tensor = self.policy_out(hidden)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, self.value_out(hidden).squeeze(-1)


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

    @torch.no_grad()
    def value(self, obs: Obs) -> Array:
        """Of the first step of episodes."""
        state = torch.as_tensor(self._zero_state(obs), device=self._device)
        values: Array = self._model.step(to_tensor(obs, self._device), state)[1].cpu().numpy()
        return values

    def _zero_state(self, obs: Obs) -> Array:
        return np.zeros((trees.rows(obs), self._model.state_size), np.float32)


def build_recurrent(
    observation_space: Any,
    action_space: Any,
    *,
    units: int,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    seed: int | None = None,
    encoder: Callable[[], Any] | None = None,
) -> RecurrentActorCritic:
    """A recurrent actor-critic for single Gymnasium spaces; see build_actor_critic."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    made = encoder() if encoder else make_encoder(observation_space, generator)
    return RecurrentActorCritic(
        make_head(action_space),
        made,
        units=units,
        hidden=hidden if hidden is not None else (() if has_image(made) else (64,)),
        activation=activation,
        generator=generator,
    )
