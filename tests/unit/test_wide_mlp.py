"""Wide networks by hand against autograd, with oneDNN's products and without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.networks import wide_mlp
from manyhands.networks.wide_mlp import SMALL, WideMLPs, times

ROWS, INPUTS, ACTIONS = 64, 20, 6


def nets(count: int, hidden: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    sizes = itertools.pairwise([INPUTS, *hidden, 3])
    return [
        (torch.randn(count, out, below) / below**0.5, torch.randn(count, 1, out))
        for below, out in sizes
    ]


@pytest.fixture(params=["oneDNN", "MKL alone"])
def products(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "MKL alone":
        monkeypatch.setattr(wide_mlp, "_onednn", lambda: None)
    elif wide_mlp._onednn() is None:
        pytest.skip("this torch has no product of oneDNN's")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("hidden", [[], [512], [256, 256], [256, 128, 256]])
def test_equal_to_autograd(activation: type[nn.Module], count: int, hidden: list[int]) -> None:
    layers = nets(count, hidden)
    gradients = [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in layers]
    x, d_out = torch.randn(ROWS, INPUTS), torch.randn(count, ROWS, 3)
    mlps = WideMLPs(layers, gradients, activation)
    out = mlps.forward(x)
    inputs = x.clone().requires_grad_()
    own = [(w.clone().requires_grad_(), b.clone().requires_grad_()) for w, b in layers]
    h = inputs.expand(count, ROWS, INPUTS)
    for i, (weight, bias) in enumerate(own):
        h = torch.baddbmm(bias, activation()(h) if i else h, weight.mT)
    assert torch.allclose(out, h, atol=1e-4)
    h.backward(d_out)
    assert inputs.grad is not None
    down = mlps.backward(d_out, into_parameters=False, down=ACTIONS)
    assert torch.allclose(down, inputs.grad[:, -ACTIONS:], atol=1e-3)
    assert not any(part.any() for pair in gradients for part in pair)
    mlps.backward(d_out)
    for made, expected in zip(gradients, own, strict=True):
        for one, other in zip(made, expected, strict=True):
            assert other.grad is not None
            assert torch.allclose(one, other.grad, atol=1e-3)


def test_weights_with_gaps_are_not_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise AssertionError("given to oneDNN, which takes a thousand times as long for it")

    monkeypatch.setattr(wide_mlp, "_onednn", refuse)
    x, weight = torch.randn(128, 256), torch.randn(256, 512)[:, ::2]
    assert x.numel() * len(weight) >= SMALL
    assert torch.allclose(times(x, weight), x @ weight.t())
    with pytest.raises(AssertionError, match="thousand"):
        times(x, weight.contiguous())
