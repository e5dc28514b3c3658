"""The gradient of an MLP actor-critic written out in numpy, equal to autograd's.

    forward    h_0 = x,   h_l = f(h_{l−1} W_lᵀ + b_l)          f: tanh, relu or elu
    backward   d_l = ∂loss/∂h_l · f′(h_l)                      row by row
               ∂loss/∂W_l = d_lᵀ h_{l−1},   ∂loss/∂b_l = Σ d_l,   ∂loss/∂h_{l−1} = d_l W_l

WHY: for networks of 64 x 64 and minibatches of hundreds of rows torch spends more time on graph
and dispatch than on arithmetic. Policy and value net have equal shapes, so their activations lie
end to end, [nets, N, width], and element-wise work is one call for both. Work arrays are kept
between calls, whatever their number of rows: touching fresh memory costs a page fault for every
4 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from manyhands.errors import ConfigError
from manyhands.math.densities import has_density
from manyhands.networks.build import ActorCritic, Observations, has_image
from manyhands.networks.flat import FlatParameters
from manyhands.networks.heads import Array

KEPT_SIZES = 256  # views of the work arrays, one set for each number of rows


class Activation(NamedTuple):
    """An element-wise function, and its derivative in terms of the function's value."""

    apply: Callable[[Array], object]  # in place
    slope: Callable[[Array, Array], object]  # (f(x), where to write f′(x))


class Layer(NamedTuple):
    """Views of one linear layer and of its gradient."""

    weight: Array  # [out, in]
    bias: Array  # [out]
    d_weight: Array
    d_bias: Array


def can_learn(model: nn.Module) -> bool:
    """Whether FastGradient takes this model: an MLP ActorCritic on the CPU, all of it trainable."""
    # Not isinstance: a subclass may have a forward of its own, which numpy would not follow.
    return (
        type(model) is ActorCritic
        and has_density(model.head)
        and not has_image(model.policy_encoder)
        and all(_is_plain(p) for p in model.parameters())
        and _is_plain_trunk(model.policy_trunk)
        and (model.value_trunk is None or _alike(model.policy_trunk, model.value_trunk))
    )


class _Nets:
    """Trunks of equal shapes side by side: what a gradient of one net or of two has in common."""

    def __init__(self, model: ActorCritic, flat: FlatParameters, trunks: list[str]) -> None:
        if not can_learn(model):
            raise ConfigError(
                "a gradient in numpy needs a plain ActorCritic without images, on the CPU, in "
                "float32 and with nothing frozen; use autograd instead"
            )
        if flat.model is not model:
            raise ConfigError("the flat parameters are those of another model")
        flat.check()
        self._views, self._grad_views = flat.views(), flat.grad_views()
        self._encode: Callable[[Observations], Array] = model.policy_encoder.encode  # type: ignore[assignment]
        # [depth][net]: the layers of equal depth together.
        self._trunk = [
            [self._layer(f"{trunk}.{index}") for trunk in trunks]
            for index, part in enumerate(model.policy_trunk)
            if isinstance(part, nn.Linear)
        ]
        kinds = [_ACTIVATIONS[type(p)] for p in model.policy_trunk if type(p) in _ACTIVATIONS]
        self._activation = kinds[0] if kinds else None
        self._nets = len(trunks)
        self._outputs = self._parameter_size = 0  # of the policy, where there is one
        self._memory = _Memory(0)
        self._kept: dict[int, _Work] = {}
        self._last: _Work | None = None

    def _features(self, observations: Observations) -> list[Array]:
        """What the trunks make of the observations, one array a net; kept for the way back."""
        x = self._encode(observations)
        work = self._last = self._work(len(x))
        inputs = work.inputs = [x] * self._nets
        for layers, hidden in zip(self._trunk, work.hidden, strict=True):
            for layer, h, out in zip(layers, inputs, hidden.nets, strict=True):
                np.dot(h, layer.weight.T, out=out)
                out += layer.bias
            assert self._activation is not None
            self._activation.apply(hidden.values)
            inputs = hidden.nets
        return inputs

    def _through_trunk(self, work: _Work) -> None:
        """From ∂loss/∂features, which lies in the last `d_nets`, down to the first layer."""
        assert self._activation is not None
        for depth in range(len(self._trunk) - 1, -1, -1):
            hidden = work.hidden[depth]
            self._activation.slope(hidden.values, hidden.scratch)
            hidden.d_values *= hidden.scratch
            below = work.hidden[depth - 1] if depth else None
            inputs = below.nets if below is not None else work.inputs
            for net, layer in enumerate(self._trunk[depth]):
                d = hidden.d_nets[net]
                _into_layer(layer, d, inputs[net], work.ones)
                if below is not None:
                    np.dot(d, layer.weight, out=below.d_nets[net])

    def _after_forward(self) -> _Work:
        if self._last is None:
            raise ConfigError("backward needs a forward before it")
        return self._last

    def _layer(self, name: str) -> Layer:
        names = (f"{name}.weight", f"{name}.bias")
        views, grads = self._views, self._grad_views
        return Layer(*(views[n] for n in names), *(grads[n] for n in names))

    def _work(self, rows: int) -> _Work:
        work = self._kept.get(rows)
        if work is None:
            # WHY views of one memory: with several workers each has another number of a minibatch's
            # rows every time, and fresh arrays for each cost more than the arithmetic.
            if rows > self._memory.rows or len(self._kept) == KEPT_SIZES:
                self._kept.clear()
                self._memory = _Memory(max(rows + rows // 4, self._memory.rows))
            widths = [len(layers[0].bias) for layers in self._trunk]
            sizes = (self._nets, widths, self._outputs, self._parameter_size)
            work = self._kept[rows] = _Work(self._memory, rows, *sizes)
        return work


class FastGradient(_Nets):
    """forward and backward of an ActorCritic in float32 numpy, into `flat.grad`."""

    def __init__(self, model: ActorCritic, flat: FlatParameters) -> None:
        trunks = ["policy_trunk"] if model.shared else ["policy_trunk", "value_trunk"]
        super().__init__(model, flat, trunks)
        self._policy_out = self._layer("policy_out")
        self._value_out = self._layer("value_out")
        self._log_std = self._views.get("log_std")
        self._d_log_std = self._grad_views.get("log_std")
        self._outputs = len(self._policy_out.bias)
        self._parameter_size = model.head.parameter_size

    def forward(self, observations: Observations) -> tuple[Array, Array]:
        """(distribution parameters [N, P], values [N]).

        Both are work arrays: the next forward overwrites them. The observations
        are needed again in backward and are not copied: leave them as they are until then.
        """
        features = self._features(observations)
        work = self._after_forward()
        policy_out, value_out = self._policy_out, self._value_out
        np.dot(policy_out.weight, features[0].T, out=work.outputs)
        work.outputs += policy_out.bias[:, None]
        if self._log_std is not None:
            work.log_stds[...] = self._log_std[:, None]
        np.dot(features[-1], value_out.weight[0], out=work.values)
        work.values += value_out.bias
        return work.parameters, work.values

    def backward(self, d_parameters: Array, d_values: Array) -> None:
        """Overwrite `flat.grad` with the gradient of the loss whose derivatives are given.

        Args:
            d_parameters: ∂loss/∂parameters of the last forward, [N, P].
            d_values: ∂loss/∂values of the last forward, [N].
        """
        work = self._after_forward()
        if d_parameters.shape != work.parameters.shape or d_values.shape != work.values.shape:
            raise ConfigError(
                f"backward got derivatives of shapes {d_parameters.shape} and {d_values.shape} "
                f"for outputs of shapes {work.parameters.shape} and {work.values.shape}"
            )
        d_parameters = np.asarray(d_parameters, np.float32)
        d_values = np.asarray(d_values, np.float32)
        size = self._outputs
        d_outputs = d_parameters[:, :size]
        features = work.features
        _into_layer(self._policy_out, d_outputs, features[0], work.ones)
        if self._d_log_std is not None:
            np.dot(work.ones, d_parameters[:, size:], out=self._d_log_std)
        _into_value(self._value_out, d_values, features[-1], work.ones)
        if work.hidden:
            self._into_features(work, d_outputs, d_values[:, None])
            self._through_trunk(work)

    def _into_features(self, work: _Work, d_outputs: Array, d_values: Array) -> None:
        last = work.hidden[-1]
        np.dot(d_outputs, self._policy_out.weight, out=last.d_nets[0])
        if self._nets == 2:
            np.dot(d_values, self._value_out.weight, out=last.d_nets[1])
        else:
            np.dot(d_values, self._value_out.weight, out=last.scratch[0])
            last.d_values += last.scratch


class FastValueGradient(_Nets):
    """forward and backward of the value net alone; the policy's part of `flat.grad` stays."""

    def __init__(self, model: ActorCritic, flat: FlatParameters) -> None:
        if model.shared:
            raise ConfigError("a shared trunk has no gradient of the value alone")
        super().__init__(model, flat, ["value_trunk"])
        self._value_out = self._layer("value_out")

    def forward(self, observations: Observations) -> Array:
        """Values [N]: a work array, as in FastGradient."""
        (features,) = self._features(observations)
        work = self._after_forward()
        np.dot(features, self._value_out.weight[0], out=work.values)
        work.values += self._value_out.bias
        return work.values

    def backward(self, d_values: Array) -> None:
        """Overwrite the value net's part of `flat.grad`; `d_values` is ∂loss/∂values, [N]."""
        work = self._after_forward()
        _into_value(self._value_out, d_values, work.features[0], work.ones)
        if work.hidden:
            np.dot(d_values[:, None], self._value_out.weight, out=work.hidden[-1].d_nets[0])
            self._through_trunk(work)


class _Memory:
    """Named arrays for up to so many rows. zeros, not empty: the page faults come here, not in the
    loop."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._flat: dict[str, Array] = {}

    def take(self, name: str, rows: int, *shape: int, axis: int = 0) -> Array:
        """A contiguous array of `shape` with an axis of `rows` put in; whoever takes it again, for
        another number of rows, gets the same memory."""
        each = math.prod(shape)
        if name not in self._flat:
            self._flat[name] = np.zeros(self.rows * each, np.float32)
        return self._flat[name][: rows * each].reshape(*shape[:axis], rows, *shape[axis:])


class _Hidden:
    """What one depth of the trunks keeps: h and ∂loss/∂h, [nets, N, width], and room to work."""

    def __init__(self, memory: _Memory, depth: int, rows: int, nets: int, width: int) -> None:
        self.values = memory.take(f"h {depth}", rows, nets, width, axis=1)
        self.d_values = memory.take(f"d {depth}", rows, nets, width, axis=1)
        self.scratch = memory.take(f"scratch {width}", rows, nets, width, axis=1)
        self.nets, self.d_nets = list(self.values), list(self.d_values)


class _Work:
    """The work arrays of one number of rows: views of the memory that all of them share."""

    def __init__(
        self,
        memory: _Memory,
        rows: int,
        nets: int,
        widths: list[int],
        outputs: int,
        parameter_size: int,
    ) -> None:
        self.hidden = [_Hidden(memory, i, rows, nets, width) for i, width in enumerate(widths)]
        self.inputs: list[Array] = []
        # [P, N] in memory, [N, P] to the outside: the layout that densities.py is fast on.
        columns = memory.take("parameters", rows, parameter_size, axis=1)
        self.parameters = columns.T
        self.outputs, self.log_stds = columns[:outputs], columns[outputs:]
        self.values = memory.take("values", rows)
        self.ones = memory.take("ones", rows)
        self.ones.fill(1.0)

    @property
    def features(self) -> list[Array]:
        """What the last layers look at, one array a net."""
        return self.hidden[-1].nets if self.hidden else self.inputs


def _into_layer(layer: Layer, d: Array, inputs: Array, ones: Array) -> None:
    np.dot(d.T, inputs, out=layer.d_weight)
    np.dot(ones, d, out=layer.d_bias)  # twice as fast as a sum over rows


def _into_value(layer: Layer, d_values: Array, features: Array, ones: Array) -> None:
    np.dot(d_values, features, out=layer.d_weight[0])
    layer.d_bias[0] = np.dot(ones, d_values)


def _is_plain(parameter: nn.Parameter) -> bool:
    return (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.requires_grad
    )


def _is_plain_trunk(trunk: nn.Sequential) -> bool:
    """Whether it is linear layer, activation, linear layer, …, with one known activation."""
    parts = list(trunk)
    linears, activations = parts[::2], parts[1::2]
    return (
        len(linears) == len(activations)
        and all(type(part) is nn.Linear and part.bias is not None for part in linears)
        and all(type(part) in _ACTIVATIONS for part in activations)
        and len({repr(part) for part in activations}) <= 1
        and all(getattr(part, "alpha", 1.0) == 1.0 for part in activations)  # of an ELU
    )


def _alike(one: nn.Sequential, other: nn.Sequential) -> bool:
    return repr(one) == repr(other)  # which names every layer with its sizes and options


def _elu(x: Array) -> None:
    negative = np.expm1(np.minimum(x, 0.0))
    np.maximum(x, 0.0, out=x)
    x += negative


def _tanh_slope(h: Array, out: Array) -> None:
    np.multiply(h, h, out=out)
    np.subtract(1.0, out, out=out)


def _elu_slope(h: Array, out: Array) -> None:
    np.minimum(h, 0.0, out=out)
    out += 1.0


_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: Activation(lambda x: np.tanh(x, out=x), _tanh_slope),
    nn.ReLU: Activation(
        lambda x: np.maximum(x, 0.0, out=x), lambda h, out: np.greater(h, 0.0, out=out)
    ),
    nn.ELU: Activation(_elu, _elu_slope),
}
