"""What the codec `noise` makes of gradients, as torch arithmetic, for R runs of W workers and all tensors at once.

A stack is (R, W, N) float32: each tensor begins at a multiple of 4,096 of the last dimension, and zeros fill the gaps
(`Layout`). A rank's own gradients are rounded at random to multiples of its level, the owner of a part adds them up
(its own as they are), rounds the sum, and everyone divides by W. Draws depend on seed, step, name, hop and index alone.

The two passes over the gradients, `squares` and `rounded_mean`, exist as kernels too (noise_kernels.py).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gradzip.engines import noise_layout
from gradzip.wire import mix32

BLOCK, LANES = 4096, 32  # sums of squares: values of a block, and how many are added side by side
PART = 128  # parts of owners begin at multiples of it
DEEPEST = -12  # binades that the shape may go below the tensor's largest
SMALLEST = 2.0**-126
INTEGERS = 2.0**23  # from here on a float32 has no fraction
ENTROPY_BLOCK, ENTROPY_RANGE = 8192, 1024  # for bits: values that share a table, and the integers that have a symbol


class Layout:
    """Where each tensor lies in a row of a stack, and which rank owns which part of it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], world: int, device: torch.device) -> None:
        self.names, self.shapes, self.world, self.device = list(shapes), list(shapes.values()), world, device
        self.sizes = [math.prod(shape) for shape in self.shapes]
        blocks = [-(-size // BLOCK) for size in self.sizes]
        self.first = [sum(blocks[:t]) for t in range(len(blocks))]  # block of each tensor
        self.blocks, self.counts = sum(blocks), blocks
        self.length = self.blocks * BLOCK
        parts = [_part(name, size, world) for name, size in zip(self.names, self.sizes)]

        def on_device(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        self.tensor_of = on_device(t for t, count in enumerate(blocks) for _ in range(count))  # of a block
        self.index_of = on_device(BLOCK * b for count in blocks for b in range(count))  # a block's first, in its tensor
        self.part = on_device(size for _, size in parts)
        self.owner = on_device(rank for rank, _ in parts)  # of the first part
        self.numel = on_device(self.sizes)
        left = (self.numel[self.tensor_of] - self.index_of).clamp(max=BLOCK)
        self.valid = (torch.arange(BLOCK, device=device) < left[:, None]).view(-1)  # false in the gaps
        most = max(blocks)
        inner = torch.arange(most, device=device)
        self._sums = on_device(self.first)[:, None] + inner  # block sums of each tensor
        self._there = inner < on_device(blocks)[:, None]
        self._sums[~self._there] = 0

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor of (..., N) as (..., *shape)."""
        found = []
        for first, size, shape in zip(self.first, self.sizes, self.shapes):
            start = first * BLOCK
            found.append(flat[..., start : start + size].view(*flat.shape[:-1], *shape))
        return found

    def each_value(self, of_tensor: torch.Tensor) -> torch.Tensor:
        """(..., T) as (..., blocks, 1): what all values of a tensor share, for (..., blocks, 4096)."""
        return of_tensor[..., self.tensor_of].unsqueeze(-1)

    def in_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(*flat.shape[:-1], self.blocks, BLOCK)

    def sums(self, of_block: torch.Tensor) -> torch.Tensor:
        """(..., blocks) float64 sums of blocks as (..., T), by the rule of blocks again until one number is left."""
        rows = torch.where(self._there, of_block[..., self._sums], 0.0)
        while rows.shape[-1] > 1:
            count = -(-rows.shape[-1] // BLOCK)
            width = BLOCK if count > 1 else -(-rows.shape[-1] // LANES) * LANES  # lanes beyond the last would add 0.0
            rows = torch.nn.functional.pad(rows, (0, count * width - rows.shape[-1]))
            rows = _lane_sums(rows.view(*rows.shape[:-1], count, width // LANES, LANES))
        return rows[..., 0]

    def owners(self) -> torch.Tensor:
        """(N,) the rank that owns each value."""
        index = self.index_of[:, None] + torch.arange(BLOCK, device=self.device)
        return ((self.owner[self.tensor_of, None] + index // self.part[self.tensor_of, None]) % self.world).view(-1)


def _part(name: str, size: int, world: int) -> tuple[int, int]:
    """The owner of the tensor's first part, and how many values each part has."""
    hashed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    part = max(size, BLOCK) if size < PART * world else -(-size // (world * PART)) * PART
    return hashed % world, part


def _lane_sums(rows: torch.Tensor) -> torch.Tensor:
    """(..., n, 32): each lane in order, then lanes halved."""
    lanes = torch.zeros_like(rows[..., 0, :])
    for i in range(rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def squares(layout: Layout, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., N) float32 to (..., blocks): float64 sums of squares of finite values, and whether any is not finite."""
    rows = x.view(*x.shape[:-1], layout.blocks, BLOCK // LANES, LANES)
    lanes = torch.zeros(*rows.shape[:-2], LANES, dtype=torch.float64, device=x.device)
    for i in range(BLOCK // LANES):
        values = rows[..., i, :].double()
        lanes = lanes + torch.where(values.isfinite(), values * values, 0.0)
    return _lane_sums(lanes.unsqueeze(-2)), ~rows.isfinite().flatten(-2).all(-1)


# --- Shape -----------------------------------------------------------------------------------------------------------


def shape_of(layout: Layout, v: torch.Tensor) -> torch.Tensor:
    """(R, N) second moments to int8: half their exponents, relative to the tensor's largest, at least -12.

    All 0 (no shape) for a tensor whose second moments are all zero or not all finite.
    """
    half = (v.view(torch.int32) >> 24).to(torch.int16)  # half the exponent field; moments have no sign
    top = _over_tensors(layout, layout.in_blocks(half).amax(-1))
    usable = layout.in_blocks(v.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    usable = _over_tensors(layout, usable)
    usable = (usable > 0) & (usable < 0x7F800000)
    d = (layout.in_blocks(half) - layout.each_value(top)).clamp_(min=DEEPEST)
    return torch.where(layout.each_value(usable), d, 0).to(torch.int8).view(v.shape)


def _over_tensors(layout: Layout, of_block: torch.Tensor) -> torch.Tensor:
    """(R, blocks) to (R, T): the largest."""
    index = layout.tensor_of.expand_as(of_block)
    found = torch.zeros(*of_block.shape[:-1], len(layout.names), dtype=of_block.dtype, device=of_block.device)
    return found.scatter_reduce(-1, index, of_block, "amax", include_self=True)


def rows_and_columns(layout: Layout, mean: torch.Tensor) -> torch.Tensor:
    """(R, N) second moments from mean squares of rows and columns of the last mean; zero (no shape) for vectors."""
    v = torch.zeros_like(mean)
    for values, moments in zip(layout.views(mean), layout.views(v)):
        if values.dim() > 2:
            matrix = values.flatten(2).square()
            moments.copy_((matrix.mean(2, keepdim=True) * matrix.mean(1, keepdim=True)).view(moments.shape))
    return v


def weights_of(layout: Layout, d: torch.Tensor | None) -> torch.Tensor:
    """B of each tensor, (R, T) float64: the sum of 4^d, exact."""
    if d is None:
        return layout.numel.double().unsqueeze(0)
    powers = torch.where(layout.valid, torch.ones_like(d, dtype=torch.int32) << (2 * (d.int() - DEEPEST)), 0)
    of_block = layout.in_blocks(powers).sum(-1, dtype=torch.int64)
    total = torch.zeros(len(d), len(layout.names), dtype=torch.int64, device=d.device)
    total.scatter_add_(-1, layout.tensor_of.expand_as(of_block), of_block)
    return total.double() / 4.0**-DEEPEST


# --- Levels and draws ------------------------------------------------------------------------------------------------


@dataclass
class Levels:
    own: torch.Tensor  # (R, W, T) float32
    own_inverse: torch.Tensor
    sum: torch.Tensor  # (R, T)
    sum_inverse: torch.Tensor


def levels_of(a: torch.Tensor, weights: torch.Tensor, budgets: torch.Tensor, finite: torch.Tensor) -> Levels:
    """`a` (R, W, T), `weights` (R or 1, T) and `budgets` (R,) float64; `finite` (R, W, T): all values are."""
    world = a.shape[1]
    exact = (((budgets * (6.0 * world / (world + 1)))[:, None, None] * a) / weights[:, None, :]).sqrt()
    own = exact.float().clamp(min=SMALLEST)
    own = torch.where(a == 0, torch.where(finite, 0.0, torch.nan), own)
    total = torch.zeros_like(a[:, 0])
    for rank in range(world):
        total = total + own[:, rank].double() * own[:, rank].double()
    of_sum = ((world + 1) / (2.0 * world) * total).sqrt().float()
    of_sum = torch.where(of_sum == 0, 0.0, of_sum.clamp(min=SMALLEST))  # NaN stays
    return Levels(own, _inverse(own), of_sum, _inverse(of_sum))


def _inverse(level: torch.Tensor) -> torch.Tensor:
    """0 for a level of 0, so that zeros become integers of 0."""
    return torch.where(level == 0, 0.0, 1.0 / level.double()).float()


@functools.lru_cache(maxsize=64)
def name_keys(seeds: tuple[int, ...], names: tuple[str, ...], hop: str, device: torch.device) -> torch.Tensor:
    """(2, R, T) int64: low and high halves of what the keys of a tensor have in common in all steps."""
    found = [noise_layout.name_key(seed, name, hop, 0) for seed in seeds for name in names]
    low, high = [key & 0xFFFFFFFF for key in found], [key >> 32 for key in found]
    return torch.tensor([low, high], dtype=torch.int64, device=device).view(2, len(seeds), len(names))


def keys_in_step(of_names: torch.Tensor, step: int) -> torch.Tensor:
    """noise_layout.key_in_step for all tensors at once."""
    step &= 0xFFFFFFFF
    mixed, added = int(mix32(torch.tensor(step))), step * 0x9E3779B9 & 0xFFFFFFFF
    return torch.stack([mix32(of_names[0] ^ mixed), mix32((of_names[1] + added) & 0xFFFFFFFF)])


def draws(layout: Layout, keys: torch.Tensor, offset: int) -> torch.Tensor:
    """(R, N) int32 of 24 bits for keys (2, R, T)."""
    index = layout.index_of[:, None] + torch.arange(BLOCK, device=layout.device)
    mixed = mix32(index ^ layout.each_value(keys[0])) + layout.each_value(keys[1]) + offset
    return ((mixed & 0xFFFFFFFF) >> 8).int().view(keys.shape[1], -1)


def offset_of(rank: int, world: int) -> int:
    return (rank << 32) // world


# --- Rounding --------------------------------------------------------------------------------------------------------


def power(d: torch.Tensor) -> torch.Tensor:
    """2^d as float32, d of normal exponents."""
    return ((d.int() + 127) << 23).view(torch.float32)


def quantised(x: torch.Tensor, inverse: torch.Tensor, d: torch.Tensor, h24: torch.Tensor) -> torch.Tensor:
    """Integers as float32, by stochastic rounding of x / (L 2^d)."""
    t = (x * inverse) * power(-d)
    k = t.floor()
    r24 = ((t - k) * 2.0**24).nan_to_num(0.0).int()
    q = k + (r24 + h24 >= 1 << 24)
    return torch.where(t.abs() >= INTEGERS, t, q)


def decoded(q: torch.Tensor, level: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """A level of 0 stands for zeros, NaN for NaN."""
    return torch.where(level == 0, 0.0, (q * level) * power(d))


@dataclass
class Outcome:
    mean: torch.Tensor  # (R, N)
    error: torch.Tensor  # (R,) float64: sum of squares of what was added to the true mean
    signal: torch.Tensor  # (R,) float64: of the true mean
    own: torch.Tensor | None = None  # (R, N) integers of rank 0 as float32, where they were asked for
    sum: torch.Tensor | None = None


def rounded_mean(
    layout: Layout, x: torch.Tensor, d: torch.Tensor | None, levels: Levels, own_keys: torch.Tensor,
    sum_keys: torch.Tensor, integers: bool = False,
) -> Outcome:  # fmt: skip
    """What every rank has in the end, for stack x (R, W, N) and shape d (R, N) or none."""
    runs, world = x.shape[:2]
    shape = layout.in_blocks(torch.zeros(runs, layout.length, dtype=torch.int8, device=x.device) if d is None else d)
    owner, first, total, true = layout.in_blocks(layout.owners()), None, None, None
    for rank in range(world):
        values, level = layout.in_blocks(x[:, rank]), layout.each_value(levels.own[:, rank])
        h24 = layout.in_blocks(draws(layout, own_keys, offset_of(rank, world)))
        q = quantised(values, layout.each_value(levels.own_inverse[:, rank]), shape, h24)
        first = q if first is None else first
        sent = torch.where(owner == rank, values, decoded(q, level, shape))
        total = sent if total is None else total + sent
        true = values if true is None else true + values
    assert total is not None
    assert true is not None
    h24 = layout.in_blocks(draws(layout, sum_keys, 0))
    q = quantised(total, layout.each_value(levels.sum_inverse), shape, h24)
    mean = (decoded(q, layout.each_value(levels.sum), shape) / world).view(runs, -1)
    true = (true / world).view(runs, -1)
    found = Outcome(mean, *differences(mean, true))
    if integers:
        assert first is not None
        found.own, found.sum = first.view(runs, -1), q.view(runs, -1)
    return found


def differences(mean: torch.Tensor, true: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares of the error and of the true mean, (R,) each."""
    return (mean - true).square().sum(-1, dtype=torch.float64), true.square().sum(-1, dtype=torch.float64)


def plain_mean(x: torch.Tensor) -> torch.Tensor:
    """(R, W, N) to (R, N), in the order of ranks."""
    total = x[:, 0]
    for rank in range(1, x.shape[1]):
        total = total + x[:, rank]
    return total / x.shape[1]


def noisy_mean(
    layout: Layout, x: torch.Tensor, d: torch.Tensor | None, budgets: torch.Tensor, seeds: Sequence[int], step: int,
    integers: bool = False, kernels: bool = False,
) -> Outcome:  # fmt: skip
    """One step of `noise` for stack x (R, W, N): budgets (R,) float64, a seed of rounding for each run.

    `kernels`: both passes over the gradients by Triton, the same bits; not with `integers`.
    """
    if kernels:
        from . import noise_kernels

        of_block, broken = noise_kernels.squares(layout, x)
    else:
        of_block, broken = squares(layout, x)
    finite = _over_tensors(layout, broken.int()) == 0
    levels = levels_of(layout.sums(of_block), weights_of(layout, d), budgets, finite)
    names = tuple(layout.names)
    own, of_sum = (keys_in_step(name_keys(tuple(seeds), names, hop, x.device), step) for hop in ("own", "sum"))
    if kernels and not integers:
        return noise_kernels.rounded_mean(layout, x, d, levels, own, of_sum)
    return rounded_mean(layout, x, d, levels, own, of_sum, integers)


def entropy(layout: Layout, q: torch.Tensor) -> torch.Tensor:
    """(R,) mean bits per value of integers (R, N): a table for each 8,192 values of a tensor, tables not counted."""
    starts = [
        first * BLOCK + at
        for first, size in zip(layout.first, layout.sizes)
        for at in range(0, size - ENTROPY_BLOCK + 1, ENTROPY_BLOCK)
    ]
    if not starts:
        return torch.full((len(q),), torch.nan, dtype=torch.float64, device=q.device)
    index = torch.tensor(starts, device=q.device)[:, None] + torch.arange(ENTROPY_BLOCK, device=q.device)
    half, found = ENTROPY_RANGE // 2, []
    base = torch.arange(len(starts), device=q.device)[:, None] * ENTROPY_RANGE
    for row in q:
        symbols = row[index].clamp(-half, half - 1).long() + half
        counts = torch.bincount((base + symbols).view(-1), minlength=len(starts) * ENTROPY_RANGE).view(len(starts), -1)
        p = counts.double() / ENTROPY_BLOCK
        found.append(-(p * p.clamp(min=1e-300).log2()).sum(-1).mean())
    return torch.stack(found)
