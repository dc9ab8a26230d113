"""What the codec noise is tested with: values of many kinds, and parts with their levels."""

from __future__ import annotations

import math

import torch

from gradzip.engines import noise_layout as layout
from gradzip.engines import reference_noise
from gradzip.engines.noise_layout import Part

VALUES = {
    "gauss": lambda n, g: torch.randn(n, generator=g),
    "heavy": lambda n, g: torch.randn(n, generator=g) * torch.exp(2 * torch.randn(n, generator=g)),
    "zeros": lambda n, g: torch.zeros(n),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.02),
    "empty rows": lambda n, g: torch.randn(n, generator=g) * (torch.arange(n) // 300 % 3 == 1),
    "giants": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.01, 1e20, 1.0) * torch.randn(n, generator=g),
    "subnormal": lambda n, g: torch.randn(n, generator=g) * 1e-41,
    "largest": lambda n, g: torch.full((n,), torch.finfo(torch.float32).max),
    "failed": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.01, math.nan, 1.0) * torch.randn(n, generator=g),
    "infinite": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, math.inf, -1.0),
    "nan": lambda n, g: torch.full((n,), math.nan),
    "minus zero": lambda n, g: torch.full((n,), -0.0),
}


def part_of(x: torch.Tensor, share: float = 0.01, *, shape: torch.Tensor | None = None, start: int = 0) -> Part:
    level = layout.level(reference_noise.statistics(x, shape), share, 4)
    return Part(x, level, shape, start, layout.key_of(1, 2, "w", "own", start), layout.offset_of(1, 4))
