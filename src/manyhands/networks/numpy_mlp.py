"""A multi-layer perceptron in numpy: forward, and the way back written out.

    forward    h_0 = x,   h_l = f(h_{l−1} W_lᵀ + b_l)               f: tanh or relu; none at the end
    backward   d_l = ∂loss/∂h_l · f′(h_l)
               ∂loss/∂W_l = d_lᵀ h_{l−1},   ∂loss/∂b_l = Σ d_l,   ∂loss/∂h_{l−1} = d_l W_l

WHY: an update of DQN or DDPG is several passes of a small network over some dozens of rows; there
torch spends its time on dispatch. The weights are views of the flat parameters: nothing is copied,
and an optimiser's step is seen at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import nn

from manyhands.networks.flat import FlatParameters
from manyhands.trees import Array


class Layer(NamedTuple):
    weight: Array  # [out, in]
    bias: Array
    d_weight: Array
    d_bias: Array
    activation: str  # "tanh", "relu" or "" for none


class NumpyMLP:
    """One trunk and the linear layer behind it.

    Args:
        flat: the parameters, and the gradient into which `backward` writes.
        trunk: the Sequential of the hidden layers, and its name in the model.
        out: the name of the last linear layer.
    """

    def __init__(self, flat: FlatParameters, trunk: nn.Sequential, name: str, out: str) -> None:
        views, grads = flat.views(), flat.grad_views()

        def layer(path: str, activation: str) -> Layer:
            weight, bias = f"{path}.weight", f"{path}.bias"
            return Layer(views[weight], views[bias], grads[weight], grads[bias], activation)

        parts = list(trunk)
        kinds = ["tanh" if isinstance(part, nn.Tanh) else "relu" for part in parts[1::2]]
        self._layers = [layer(f"{name}.{2 * i}", kind) for i, kind in enumerate(kinds)]
        self._layers.append(layer(out, ""))
        self._kept: list[Array] = []

    def look(self, x: Array) -> Array:
        """The outputs, with nothing kept for a way back."""
        for layer in self._layers:
            x = _through(layer, x)
        return x

    def forward(self, x: Array) -> Array:
        """The outputs; leave `x` as it is until `backward` is done."""
        self._kept = [x]
        for layer in self._layers:
            x = _through(layer, x)
            self._kept.append(x)
        return x

    def backward(self, d_out: Array, *, into_parameters: bool = True, down: bool = False) -> Array:
        """From ∂loss/∂outputs to the gradient, which is overwritten; ∂loss/∂x where `down`."""
        d = d_out
        for depth in range(len(self._layers) - 1, -1, -1):
            layer, above, below = self._layers[depth], self._kept[depth + 1], self._kept[depth]
            if layer.activation == "tanh":
                d *= 1.0 - above * above
            elif layer.activation == "relu":
                d *= above > 0.0
            if into_parameters:
                np.dot(d.T, below, out=layer.d_weight)
                np.add.reduce(d, axis=0, out=layer.d_bias)
            if depth or down:
                d = d @ layer.weight
        return d


def _through(layer: Layer, x: Array) -> Array:
    x = x @ layer.weight.T
    x += layer.bias
    if layer.activation == "tanh":
        np.tanh(x, out=x)
    elif layer.activation == "relu":
        np.maximum(x, 0.0, out=x)
    return x
