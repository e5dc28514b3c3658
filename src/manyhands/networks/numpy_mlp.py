"""Multi-layer perceptrons in numpy: forward, and the way back written out, equal to autograd's.

    forward    h_0 = x,   h_l = f(h_{l−1} W_lᵀ + b_l)          f: tanh, relu or elu; none at the end
    backward   d_l = ∂loss/∂h_l · f′(h_l)                      row by row
               ∂loss/∂W_l = d_lᵀ h_{l−1},   ∂loss/∂b_l = Σ d_l,   ∂loss/∂h_{l−1} = d_l W_l

    FastActor            an actor-critic that acts: a few rows
    FastGradient         an actor-critic that learns: minibatches of hundreds of rows
    FastValueGradient    its value net alone
    NumpyMLP             one network of DQN or DDPG: several passes over some dozens of rows

WHY: on networks of 64 x 64 torch spends its time on graph and dispatch, not on arithmetic (for wide
ones: wide_mlp.py). Weights are read through views of the torch parameters: nothing is copied, and a
change made *in place* (an optimiser step, load_state_dict, set_flat_parameters, par.sync) is seen
at once. A change that gives a parameter other memory (`parameter.data = …`, `.to(device)`) is not:
make these anew after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from manyhands.errors import ConfigError
from manyhands.networks.build import ActorCritic
from manyhands.networks.encoders import DictEncoder, Observations, OneHotEncoder, VectorEncoder
from manyhands.networks.flat import FlatParameters
from manyhands.networks.numpy_distributions import has_density, masked, sample
from manyhands.trees import Array
from manyhands.types import Acted

KEPT_SIZES = 256  # views of the work arrays, one set for each number of rows
_NOWHERE: Array = np.empty(0, np.float32)  # the gradient of who does not learn


class Activation(NamedTuple):
    """An element-wise function, and its derivative in terms of the function's value."""

    apply: Callable[[Array], object]  # in place
    slope: Callable[[Array, Array], object]  # (f(x), where to write f′(x))


class Layer(NamedTuple):
    """Views of one linear layer and of its gradient, and what follows it."""

    weight: Array  # [out, in]
    bias: Array  # [out]
    activation: Activation | None
    d_weight: Array = _NOWHERE
    d_bias: Array = _NOWHERE


def _run(layers: list[Layer], x: Array) -> Array:
    for weight, bias, activation, _, _ in layers:
        x = x.dot(weight.T)  # WHY the method: on a few rows np.dot takes a quarter longer
        x += bias
        if activation is not None:
            activation.apply(x)
    return x


def _into_layer(layer: Layer, d: Array, inputs: Array, ones: Array | None = None) -> None:
    """∂loss/∂W and ∂loss/∂b from ∂loss/∂outputs. `ones` [N] makes the sum over rows a product: with
    hundreds of rows that is twice as fast."""
    np.dot(d.T, inputs, out=layer.d_weight)
    if ones is None:
        np.add.reduce(d, axis=0, out=layer.d_bias)
    else:
        np.dot(ones, d, out=layer.d_bias)


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


def _layers(module: nn.Module) -> list[Layer]:
    """To be looked at: the layers of a Linear, or of a Sequential of them and activations."""
    layers: list[Layer] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            layers.append(Layer(part.weight.detach().numpy(), part.bias.detach().numpy(), None))
        elif type(part) in _ACTIVATIONS:
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[type(part)])
        elif not isinstance(part, nn.Sequential):
            raise ConfigError(f"acting in numpy does not know the layer {type(part).__name__}")
    return layers


def _trained(
    flat: FlatParameters, trunk: nn.Sequential, name: str, *outs: str
) -> tuple[list[Layer], list[Layer]]:
    """To be moved: the layers of a trunk, and those that stand alone, by their names."""
    views, grads = flat.views(), flat.grad_views()

    def layer(path: str, activation: Activation | None = None) -> Layer:
        weight, bias = f"{path}.weight", f"{path}.bias"
        return Layer(views[weight], views[bias], activation, grads[weight], grads[bias])

    kinds = [_ACTIVATIONS[type(part)] for part in list(trunk)[1::2]]
    hidden = [layer(f"{name}.{2 * i}", kind) for i, kind in enumerate(kinds)]
    return hidden, [layer(out) for out in outs]


# -- observations ---------------------------------------------------------------------------------


def can_encode(encoder: nn.Module) -> bool:
    """Whether `encoding` knows it: not an image's, nor a network of the user's own."""
    if isinstance(encoder, DictEncoder):
        return all(can_encode(part) for part in encoder.parts)
    return isinstance(encoder, VectorEncoder | OneHotEncoder)


def encoding(encoder: nn.Module) -> Callable[[Observations], Array]:
    """What an encoder makes of observations, in numpy: float32 [N, features]."""
    if isinstance(encoder, DictEncoder):
        keys, encode = encoder.keys, [encoding(part) for part in encoder.parts]
        return lambda x: np.concatenate([e(x[k]) for k, e in zip(keys, encode, strict=True)], -1)
    if isinstance(encoder, OneHotEncoder):
        return partial(_one_hot, encoder.sizes, encoder.starts)
    if isinstance(encoder, VectorEncoder):
        features = encoder.features
        return lambda x: np.asarray(x, np.float32).reshape(len(x), features)
    raise ConfigError(f"numpy does not know the encoder {type(encoder).__name__}")


def _one_hot(sizes: list[int], starts: list[int], x: Array) -> Array:
    columns = x.reshape(len(x), len(sizes)).T
    codes = np.zeros((len(x), sum(sizes)), np.float32)
    rows, offset = np.arange(len(x)), 0
    for column, n, start in zip(columns, sizes, starts, strict=True):
        codes[rows, offset + column - start] = 1.0
        offset += n
    return codes


# -- acting ---------------------------------------------------------------------------------------


def can_act(model: nn.Module) -> bool:
    """Whether FastActor takes this model: an ActorCritic without images, on the CPU."""
    return (
        isinstance(model, ActorCritic)
        and can_encode(model.policy_encoder)
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
        self.head = model.head
        self._encode = encoding(model.policy_encoder)
        own = model.value_trunk
        self._policy_trunk = _layers(model.policy_trunk)
        self._value_trunk = None if own is None else _layers(own)
        self._policy_out = _layers(model.policy_out)
        self._value_out = _layers(model.value_out)
        self._log_std = None if model.log_std is None else model.log_std.detach().numpy()

    def forward(self, observations: Observations) -> tuple[Array, Array]:
        """(distribution parameters [N, P], values [N])."""
        x = self._encode(observations)
        features = _run(self._policy_trunk, x)
        parameters = self._with_log_std(masked(_run(self._policy_out, features), observations))
        if self._value_trunk is not None:
            features = _run(self._value_trunk, x)
        return parameters, _run(self._value_out, features)[:, 0]

    def value(self, observations: Observations) -> Array:
        """Values only, [N]."""
        trunk = self._policy_trunk if self._value_trunk is None else self._value_trunk
        return _run(self._value_out, _run(trunk, self._encode(observations)))[:, 0]

    def act(self, observations: Observations, rng: np.random.Generator) -> Acted:
        """Sample an action for every row; `rng` is the only source of chance."""
        parameters, values = self.forward(observations)
        actions, logp = sample(self.head, parameters, rng)
        return Acted(actions, logp, values, parameters)

    def _with_log_std(self, means: Array) -> Array:
        if self._log_std is None:
            return means
        parameters = np.empty((len(means), 2 * means.shape[1]), np.float32)
        parameters[:, : means.shape[1]] = means
        parameters[:, means.shape[1] :] = self._log_std
        return parameters


# -- learning, one network ------------------------------------------------------------------------


class NumpyMLP:
    """One trunk and the linear layer behind it.

    Args:
        flat: the parameters, and the gradient into which `backward` writes.
        trunk: the Sequential of the hidden layers, and its name in the model.
        out: the name of the last linear layer.
    """

    def __init__(self, flat: FlatParameters, trunk: nn.Sequential, name: str, out: str) -> None:
        hidden, outs = _trained(flat, trunk, name, out)
        self._layers = hidden + outs
        self._kept: list[Array] = []

    def look(self, x: Array) -> Array:
        """The outputs, with nothing kept for a way back."""
        return _run(self._layers, x)

    def forward(self, x: Array) -> Array:
        """The outputs; leave `x` as it is until `backward` is done."""
        self._kept = [x]
        for layer in self._layers:
            x = _run([layer], x)
            self._kept.append(x)
        return x

    def backward(self, d_out: Array, *, into_parameters: bool = True, down: bool = False) -> Array:
        """From ∂loss/∂outputs to the gradient, which is overwritten; ∂loss/∂x where `down`."""
        d = d_out
        for depth in range(len(self._layers) - 1, -1, -1):
            layer, above, below = self._layers[depth], self._kept[depth + 1], self._kept[depth]
            if layer.activation is not None:
                slope = np.empty_like(above)
                layer.activation.slope(above, slope)
                d *= slope
            if into_parameters:
                _into_layer(layer, d, below)
            if depth or down:
                d = d @ layer.weight
        return d


# -- learning, policy and value together ----------------------------------------------------------


def can_learn(model: nn.Module) -> bool:
    """Whether FastGradient takes this model: an MLP ActorCritic on the CPU, all of it trainable."""
    # Not isinstance: a subclass may have a forward of its own, which numpy would not follow.
    return (
        type(model) is ActorCritic
        and has_density(model.head)
        and can_encode(model.policy_encoder)
        and all(_is_plain(p) for p in model.parameters())
        and _is_plain_trunk(model.policy_trunk)
        and (model.value_trunk is None or _alike(model.policy_trunk, model.value_trunk))
    )


class _Nets:
    """Trunks of equal shapes side by side: what a gradient of one net or of two has in common.

    WHY: the nets' activations lie end to end, [nets, N, width], so that element-wise work is one
    call for all. Work arrays are kept between calls, whatever their number of rows: touching fresh
    memory costs a page fault for every 4 KiB.
    """

    def __init__(self, model: ActorCritic, flat: FlatParameters, names: list[str]) -> None:
        if not can_learn(model):
            raise ConfigError(
                "a gradient in numpy needs a plain ActorCritic without images, on the CPU, in "
                "float32 and with nothing frozen; use autograd instead"
            )
        if flat.model is not model:
            raise ConfigError("the flat parameters are those of another model")
        flat.check()
        self._encode = encoding(model.policy_encoder)
        outs = ("policy_out", "value_out")
        trunks = [_trained(flat, model.policy_trunk, name, *outs) for name in names]
        self._policy_out, self._value_out = trunks[0][1]
        # [depth][net]: the layers of equal depth together.
        self._trunk = list(zip(*(trunk for trunk, _ in trunks), strict=True))
        self._activation = self._trunk[0][0].activation if self._trunk else None  # alike in all
        self._nets = len(names)
        self._outputs = self._parameter_size = 0  # of the policy, where it is part of it
        self._memory = _Memory(0)
        self._kept: dict[int, _Work] = {}
        self._last: _Work | None = None

    def _through(self, observations: Observations) -> _Work:
        """The observations through the trunks: `features` of the work arrays is what they make of
        them. Kept for the way back."""
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
        return work

    def _back_through(self, work: _Work) -> None:
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
        names = ["policy_trunk"] if model.shared else ["policy_trunk", "value_trunk"]
        super().__init__(model, flat, names)
        self._log_std = flat.views().get("log_std")
        self._d_log_std = flat.grad_views().get("log_std")
        self._outputs = len(self._policy_out.bias)
        self._parameter_size = model.head.parameter_size

    def forward(self, observations: Observations) -> tuple[Array, Array]:
        """(distribution parameters [N, P], values [N]).

        Both are work arrays: the next forward overwrites them. The observations
        are needed again in backward and are not copied: leave them as they are until then.
        """
        work = self._through(observations)
        features = work.features
        policy_out, value_out = self._policy_out, self._value_out
        np.dot(policy_out.weight, features[0].T, out=work.outputs)
        work.outputs += policy_out.bias[:, None]
        if self._log_std is not None:
            work.log_stds[...] = self._log_std[:, None]
        masked(work.outputs.T, observations)  # the slopes of impossible actions are then 0
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
            self._back_through(work)

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

    def forward(self, observations: Observations) -> Array:
        """Values [N]: a work array, as in FastGradient."""
        work = self._through(observations)
        np.dot(work.features[0], self._value_out.weight[0], out=work.values)
        work.values += self._value_out.bias
        return work.values

    def backward(self, d_values: Array) -> None:
        """Overwrite the value net's part of `flat.grad`; `d_values` is ∂loss/∂values, [N]."""
        work = self._after_forward()
        _into_value(self._value_out, d_values, work.features[0], work.ones)
        if work.hidden:
            np.dot(d_values[:, None], self._value_out.weight, out=work.hidden[-1].d_nets[0])
            self._back_through(work)


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
        # [P, N] in memory, [N, P] to the outside: the layout that distributions.py is fast on.
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
