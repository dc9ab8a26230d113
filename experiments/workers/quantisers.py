"""Other ways to send gradients, for comparison with noise: two hops, as noise has, on stacks (R, W, N) of noise.py.

Own gradients are quantised, added up in the order of ranks, and the sum is quantised again. An owner keeps nothing of
its own exact here: torch's and torchft's all-reduces do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .noise import Layout

Hop = Callable[[torch.Tensor], torch.Tensor]  # (R, N) to what the receiver has


def two_hops(x: torch.Tensor, hop: Hop) -> torch.Tensor:
    """The mean (R, N) of a stack."""
    total = hop(x[:, 0])
    for rank in range(1, x.shape[1]):
        total = total + hop(x[:, rank])
    return hop(total) / x.shape[1]


def integers(bits: int, block: int, rng: torch.Generator) -> Hop:
    """Blocks of a power of two of values that share a bfloat16 scale; stochastic rounding. bits + 16 / block in all."""
    most = 2 ** (bits - 1) - 1

    def hop(x: torch.Tensor) -> torch.Tensor:
        values = x.view(len(x), -1, block)
        scale = values.abs().amax(-1, keepdim=True) / most * (1 + 2.0**-7)  # as bfloat16 not below the largest
        scale = scale.bfloat16().float()
        drawn = torch.rand(values.shape, device=x.device, generator=rng)
        q = (values / torch.where(scale == 0, 1.0, scale) + drawn).floor_().clamp_(-most, most)
        return (q * scale).view(x.shape)

    return hop


def fp8_rows(layout: Layout) -> Hop:
    """float8 e4m3, to nearest, a float32 scale for each row of a matrix: what torchft's quantised all-reduce does."""
    rows, count = torch.zeros(layout.length, dtype=torch.int64, device=layout.device), 1  # row 0: the gaps
    for view, shape in zip(layout.views(rows), layout.shapes):
        wide = shape[-1] if len(shape) > 1 else view.numel()
        view.copy_((count + torch.arange(view.numel(), device=layout.device) // wide).view(view.shape))
        count += view.numel() // wide

    def hop(x: torch.Tensor) -> torch.Tensor:
        largest = torch.zeros(len(x), count, device=x.device)
        largest.scatter_reduce_(1, rows.expand_as(x), x.abs(), "amax")
        scale = torch.where(largest == 0, 1.0, largest / 448.0)[:, rows]
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    return hop


def bf16_mean(x: torch.Tensor) -> torch.Tensor:
    """torch's bf16_compress_hook: each share of the mean as bfloat16, added up in bfloat16."""
    world = x.shape[1]
    total = x[:, 0].bfloat16() / world
    for rank in range(1, world):
        total = total + x[:, rank].bfloat16() / world
    return total.float()
