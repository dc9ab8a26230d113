"""A small convolutional net that learns to tell drawn shapes apart: gradients behind ReLU, without a download.

Each picture is 32 x 32 in three colours: one of eight shapes, bright on dark, in a random place, size and colour, in
noise. The net is a plain stack of convolutions with batch norm, 0.7 M parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SIDE = 32
SHAPES = 8
BATCH = 32
NOISE = 0.3


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (count, 3, 32, 32) and the numbers of their shapes (count,)."""
    labels = torch.randint(SHAPES, (count,))
    along = torch.arange(SIDE, dtype=torch.float32)
    centre = 10 + 12 * torch.rand(2, count, 1, 1)
    size = 5 + 5 * torch.rand(count, 1, 1)
    y = (along[:, None] - centre[0]).expand(count, SIDE, SIDE) / size
    x = (along[None, :] - centre[1]).expand(count, SIDE, SIDE) / size
    distance = torch.hypot(x, y)
    square = torch.maximum(x.abs(), y.abs())
    masks = torch.stack(
        [
            distance < 1,
            (distance < 1) & (distance > 0.6),
            square < 0.9,
            (square < 0.9) & (square > 0.55),
            (x.abs() < 0.3) & (y.abs() < 1) | (y.abs() < 0.3) & (x.abs() < 1),
            x.abs() + y.abs() < 1,
            (y.abs() < 0.9) & (x.abs() < (y + 0.9) / 2),
            (square < 0.9) & ((4 * y).long() % 2 == 0),
        ]
    )
    inside = masks[labels, torch.arange(count)][:, None]
    ground, ink = torch.rand(2, count, 3, 1, 1)
    return torch.where(inside, 1 + ink, -ground) + NOISE * torch.randn(count, 3, SIDE, SIDE), labels


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, SHAPES))


def loss(model: nn.Module) -> torch.Tensor:
    """Of a fresh batch."""
    pictures, labels = draw(BATCH)
    return F.cross_entropy(model(pictures), labels)
