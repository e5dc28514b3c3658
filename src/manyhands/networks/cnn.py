"""Convolutional encoder for images: bytes in, features out.

The network of Nature 518, 529 (2015) for images of at least 36 × 36; for the tiny pictures of grid
worlds, where it does not fit, one layer of 3 × 3 filters as in MinAtar (arXiv:1903.03176).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyhands.errors import ConfigError
from manyhands.networks.mlp import HIDDEN_GAIN, linear, orthogonal, untouched_chance

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # (filters, kernel, stride)
SMALL = ((16, 3, 1),)
NATURE_FEATURES, SMALL_FEATURES = 512, 128
SMALLEST_NATURE = 36  # the side at which the third layer still has one pixel


class ImageEncoder(nn.Module):
    """uint8 [N, C, H, W] or [N, H, W, C] -> [N, features]; values are divided by 255."""

    def __init__(
        self, shape: tuple[int, int, int], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.channels_last = channels_are_last(shape)
        channels, height, width = (
            (shape[2], shape[0], shape[1]) if self.channels_last else (shape[0], shape[1], shape[2])
        )
        side = min(height, width)
        if side < 3:
            raise ConfigError(f"an image of shape {shape} is too small for a convolution: 3 x 3")
        nature = side >= SMALLEST_NATURE
        layers: list[nn.Module] = []
        for filters, kernel, stride in NATURE if nature else SMALL:
            with untouched_chance():
                layer = nn.Conv2d(channels, filters, kernel, stride)
            layers += [orthogonal(layer, HIDDEN_GAIN, generator), nn.ReLU()]
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            channels = filters
        self.features = NATURE_FEATURES if nature else SMALL_FEATURES
        flat = channels * height * width
        layers += [nn.Flatten(), linear(flat, self.features, HIDDEN_GAIN, generator), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.permute(0, 3, 1, 2)
        features: Tensor = self.layers(images.to(torch.float32) * (1.0 / 255.0))
        return features


def channels_are_last(shape: tuple[int, ...]) -> bool:
    """Channels are the fewer: [84, 84, 3] has them last, [4, 84, 84] first."""
    return shape[2] < shape[0]
