"""Multi-layer perceptrons for hundreds of units, in torch calls: forward, and the way back.

The formulas are those of numpy_mlp.py. WHY in torch calls: on layers of 256 units its element-wise
kernels are several times as fast as numpy's. WHY not autograd: of the critics' part in the policy's
loss it works out the weights' gradient, too, and nobody needs it.

Products: torch gives float32 to MKL; oneDNN, which it has for its compiler, can be twice as fast.
256 rows, 256 x 256, one core of an AMD EPYC (Zen 5): MKL 290 µs, oneDNN 140. A call costs 12 µs,
however small: below SMALL it is MKL's. Other processors have not been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 2**20  # multiplications of a product

# Name of f to oneDNN; f in place; d · f′ in terms of f's value h, written into `out`.
_ACTIVATIONS: dict[type[nn.Module], tuple[str, Callable[[Any], Any], Callable[..., Any]]] = {
    nn.ReLU: (
        "relu",
        torch.relu_,
        lambda d, h, out: torch.ops.aten.threshold_backward.grad_input(d, h, 0.0, grad_input=out),
    ),
    nn.Tanh: (
        "tanh",
        torch.tanh_,
        lambda d, h, out: torch.ops.aten.tanh_backward.grad_input(d, h, grad_input=out),
    ),
}


class WideMLPs:
    """Networks of one shape, end to end in memory: [N, in] -> [nets, N, out].

    The first layers, which have the same inputs, are one product.

    Args:
        layers: weights [nets, out, in] and biases [nets, 1, out] of each layer; tanh or relu
            between them.
        gradients: the same of the gradient, into which `backward` writes.
    """

    def __init__(
        self,
        layers: list[tuple[Tensor, Tensor]],
        gradients: list[tuple[Tensor, Tensor]],
        activation: type[nn.Module],
    ) -> None:
        weight, bias = layers[0]
        d_weight, d_bias = gradients[0]
        self._width = weight.shape[1]
        self._first = (weight.flatten(0, 1), bias.flatten())
        self._layers = [[(w, b[0]) for w, b in zip(*pair, strict=True)] for pair in layers[1:]]
        self._d_first = (d_weight.flatten(0, 1), d_bias.flatten())
        self._gradients = [
            [(w, b[0]) for w, b in zip(*pair, strict=True)] for pair in gradients[1:]
        ]
        self._name, self._apply, self._slope = _ACTIVATIONS[activation]
        self._inputs = torch.empty(0)
        self._hidden: list[list[Tensor]] = []  # [depth][net], [N, width] each

    def forward(self, x: Tensor) -> Tensor:
        """The outputs. Leave `x` as it is until `backward` is done."""
        self._inputs, self._hidden = x, []
        wide = self._layer(x, self._first, last=not self._layers)
        values = [part.contiguous() for part in torch.split(wide, self._width, 1)]
        for layers in self._layers:
            self._hidden.append(values)
            last = layers is self._layers[-1]
            values = [self._layer(h, own, last) for h, own in zip(values, layers, strict=True)]
        return torch.stack(values)

    def _layer(self, h: Tensor, own: tuple[Tensor, Tensor], last: bool) -> Tensor:
        weight, bias = own
        if _is_large(h, weight):
            found: Tensor = _onednn()(h, weight, bias, "none" if last else self._name, [], None)
            return found
        out = torch.addmm(bias, h, weight.t())
        if not last:
            self._apply(out)
        return out

    def backward(self, d_out: Tensor, *, into_parameters: bool = True, down: int = 0) -> Tensor:
        """From ∂loss/∂outputs [nets, N, out] to the gradient, which is overwritten; ∂loss/∂x of the
        last `down` inputs, of all nets together: [N, down]."""
        slopes = list(d_out.unbind())
        wide = torch.empty(self._inputs.shape[0], self._first[0].shape[0])
        if not self._layers:
            wide = torch.cat(slopes, 1)
        for depth in range(len(self._layers) - 1, -1, -1):
            below = self._hidden[depth]
            if into_parameters:
                for own, d, h in zip(self._gradients[depth], slopes, below, strict=True):
                    _into(own, d, h)
            rooms = torch.split(wide, self._width, 1) if depth == 0 else [None] * len(slopes)
            together = zip(slopes, self._layers[depth], below, rooms, strict=True)
            slopes = [self._through(d, weight, h, room) for d, (weight, _), h, room in together]
        if into_parameters:
            _into(self._d_first, wide, self._inputs)
        return times(wide, self._first[0][:, -down:].t()) if down else wide

    def _through(self, d: Tensor, weight: Tensor, h: Tensor, room: Tensor | None) -> Tensor:
        """∂loss/∂h · f′(h), into `room` if there is one."""
        d_h = times(d, weight.t())
        room = d_h if room is None else room
        self._slope(d_h, h, room)
        return room


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ, for x [N, in] and W [out, in], which may be a transposed view."""
    if _is_large(x, weight):
        found: Tensor = _onednn()(x, weight, None, "none", [], None)
        return found
    return torch.mm(x, weight.t())


def _into(own: tuple[Tensor, Tensor], d: Tensor, h: Tensor) -> None:
    """dᵀ h and Σ d, where a layer's gradient lies."""
    d_weight, d_bias = own
    torch.sum(d, 0, out=d_bias)
    if not _is_large(d.t(), h.t()):
        torch.mm(d.t(), h, out=d_weight)
    elif h.shape[1] < d.shape[1]:  # few inputs: twice as fast the other way round
        d_weight.copy_(times(h.t(), d.t()).t())
    else:
        d_weight.copy_(times(d.t(), h.t()))


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is to have it. DANGER: with a weight that has gaps between its rows it takes a
    thousand times as long."""
    return (
        x.numel() * weight.shape[0] >= SMALL  # len() of a tensor takes longer
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and _onednn() is not None
    )


@cache
def _onednn() -> Any:
    """oneDNN's product, which torch.compile calls. Not a public name: where it is missing, or does
    not give what MKL does, None."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    x, weight, bias = torch.rand(3, 8).t(), torch.rand(5, 3), torch.rand(5)
    try:
        found = torch.ops.mkldnn._linear_pointwise.default
        same = torch.allclose(
            found(x, weight, bias, "relu", [], None), torch.relu(x @ weight.t() + bias), atol=1e-5
        )
    except (AttributeError, RuntimeError, TypeError):
        return None
    return found if same else None
