"""Acting in numpy: the forward pass and the sampling of an MLP actor-critic, without torch.

WHY: on a handful of rows torch spends its time on dispatch, not on arithmetic. The weights are
read through views of the torch parameters: nothing is copied, and a change made *in place* (an
optimiser step, load_state_dict, set_flat_parameters, par.sync) is seen at once. A change that
gives a parameter other memory (`parameter.data = …`, `.to(device)`) needs `refresh()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from manyhands.errors import ConfigError
from manyhands.networks.build import ActorCritic, Observations, has_image
from manyhands.networks.heads import (
    HALF_LOG_2PI,
    Array,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
)

Activation = Callable[[Array], Array]
Layers = list[tuple[Array, Array, Activation | None]]  # weights [in, out], bias, activation


class Act(NamedTuple):
    """What acting gives for N observations."""

    actions: Array  # [N, *action_shape], before head.to_env
    logp: Array  # behaviour log-probability, [N]
    values: Array  # [N]
    parameters: Array  # of the distribution, [N, P]


def can_act(model: nn.Module) -> bool:
    """Whether FastActor takes this model: an ActorCritic without images, on the CPU."""
    return (
        isinstance(model, ActorCritic)
        and not has_image(model.policy_encoder)
        and all(p.device.type == "cpu" for p in model.parameters())
    )


class FastActor:
    """act, forward and value of an ActorCritic, in numpy, on float32."""

    def __init__(self, model: ActorCritic) -> None:
        if not can_act(model):
            raise ConfigError(
                "acting in numpy needs an ActorCritic without images on the CPU; "
                "use the model itself instead"
            )
        self.model = model
        self.head = model.head
        self._encode: Callable[[Observations], Array] = model.policy_encoder.encode  # type: ignore[assignment]
        self.refresh()

    def refresh(self) -> None:
        """Look up the memory of all parameters again."""
        model = self.model
        self._policy_trunk = _layers(model.policy_trunk)
        own = model.value_trunk
        self._value_trunk = self._policy_trunk if own is None else _layers(own)
        self._policy_out = _layers(model.policy_out)
        self._value_out = _layers(model.value_out)
        self._log_std = None if model.log_std is None else model.log_std.detach().numpy()

    def forward(self, observations: Observations) -> tuple[Array, Array]:
        """(distribution parameters [N, P], values [N])."""
        x = self._encode(observations)
        features = _run(self._policy_trunk, x)
        parameters = self._with_log_std(_run(self._policy_out, features))
        if not self.model.shared:
            features = _run(self._value_trunk, x)
        return parameters, _run(self._value_out, features)[:, 0]

    def value(self, observations: Observations) -> Array:
        """Values only, [N]."""
        features = _run(self._value_trunk, self._encode(observations))
        return _run(self._value_out, features)[:, 0]

    def act(self, observations: Observations, rng: np.random.Generator) -> Act:
        """Sample an action for every row; `rng` is the only source of chance."""
        parameters, values = self.forward(observations)
        actions, logp = sample(self.head, parameters, rng)
        return Act(actions, logp, values, parameters)

    def mode(self, observations: Observations) -> Array:
        """The likeliest action for every row."""
        features = _run(self._policy_trunk, self._encode(observations))
        return mode(self.head, _run(self._policy_out, features))

    def _with_log_std(self, means: Array) -> Array:
        if self._log_std is None:
            return means
        parameters = np.empty((len(means), 2 * means.shape[1]), np.float32)
        parameters[:, : means.shape[1]] = means
        parameters[:, means.shape[1] :] = self._log_std
        return parameters


def sample(head: Any, parameters: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """(actions [N, *action_shape], log-probabilities [N]) of one draw per row."""
    if isinstance(head, Categorical):
        return _sample_categorical(head, parameters, rng)
    if isinstance(head, DiagonalGaussian):
        mean, log_std = parameters[:, : head.size], parameters[:, head.size :]
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        actions = mean + noise * np.exp(log_std)
        logp = -(0.5 * noise * noise + log_std).sum(axis=1)
        logp -= np.float32(head.size * HALF_LOG_2PI)
        return actions.reshape(-1, *head.action_shape), logp
    if isinstance(head, MultiCategorical):
        columns, total = [], np.zeros(len(parameters), np.float32)
        for part, logits in zip(head.parts, _split(head, parameters), strict=True):
            column, logp = _sample_categorical(part, logits, rng)
            columns.append(column)
            total += logp
        return np.stack(columns, axis=-1).reshape(-1, *head.action_shape), total
    if isinstance(head, Bernoulli):
        # log P(yes) = −log(1 + e^−l), written so that no exponential overflows.
        yes = rng.random(parameters.shape) < 0.5 * (1.0 + np.tanh(0.5 * parameters))
        logp = -np.logaddexp(np.float32(0.0), np.where(yes, -parameters, parameters)).sum(axis=1)
        return yes.astype(np.int8).reshape(-1, *head.action_shape), logp
    raise ConfigError(f"no numpy sampling for {type(head).__name__}")


def mode(head: Any, outputs: Array) -> Array:
    """The likeliest action per row; `outputs` are logits, or the means of a Gaussian."""
    if isinstance(head, Categorical):
        return np.asarray(outputs.argmax(axis=1) + head.start)
    if isinstance(head, MultiCategorical):
        parts = zip(head.parts, _split(head, outputs), strict=True)
        columns = [logits.argmax(axis=1) + part.start for part, logits in parts]
        return np.stack(columns, axis=-1).reshape(-1, *head.action_shape)
    if isinstance(head, Bernoulli):
        outputs = (outputs > 0).astype(np.int8)
    return outputs.reshape(-1, *head.action_shape)


def _sample_categorical(
    head: Categorical, logits: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    # Bare ufuncs: on a few rows the array methods spend more time in their wrappers.
    shifted = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
    below = np.add.accumulate(np.exp(shifted), axis=1)  # distribution function times its last
    total = below[:, -1:]  # value
    index = np.add.reduce(below <= rng.random((len(logits), 1)) * total, axis=1)
    logp = shifted[np.arange(len(logits)), index] - np.log(total[:, 0])
    return (index + head.start if head.start else index), logp


def _split(head: MultiCategorical, parameters: Array) -> list[Array]:
    return np.split(parameters, np.cumsum(head.sizes)[:-1], axis=1)


def _run(layers: Layers, x: Array) -> Array:
    for weight, bias, activation in layers:
        x = x @ weight
        x += bias
        if activation is not None:
            x = activation(x)
    return x


def _layers(module: nn.Module) -> Layers:
    layers: Layers = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            weight, bias = part.weight.detach().numpy(), part.bias.detach().numpy()
            layers.append((weight.T, bias, None))
        elif type(part) in _ACTIVATIONS:
            weight, bias, _ = layers.pop()
            layers.append((weight, bias, _ACTIVATIONS[type(part)]))
        elif not isinstance(part, nn.Sequential):
            raise ConfigError(f"acting in numpy does not know the layer {type(part).__name__}")
    return layers


# Each writes into its argument, which _run has just made.
_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
    nn.ELU: lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
}
