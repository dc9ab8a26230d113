"""The two passes of noise.py over the gradients as Triton kernels: the same bits in a tenth of the memory traffic."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .noise import BLOCK, INTEGERS, LANES, Layout, Levels, Outcome, offset_of

_INTEGERS = tl.constexpr(INTEGERS)
_LANES, _ROWS = tl.constexpr(LANES), tl.constexpr(BLOCK // LANES)
_BLOCK = tl.constexpr(BLOCK)
SPAN = 1024  # values of a program


@triton.jit
def _squares(x, out, broken, blocks):  # type: ignore[no-untyped-def]
    block, row = tl.program_id(0), tl.program_id(1)
    start = (row.to(tl.int64) * blocks + block) * _BLOCK
    lanes = tl.zeros([_LANES], tl.float64)
    bad = tl.zeros([_LANES], tl.int32)
    for i in range(_ROWS):
        values = tl.load(x + start + i * _LANES + tl.arange(0, _LANES))
        wide = values.to(tl.float64)
        finite = tl.abs(values) < float("inf")
        lanes += tl.where(finite, wide * wide, 0.0)
        bad |= tl.where(finite, 0, 1)
    lanes = tl.sum(tl.reshape(lanes, [2, 16]), 0)  # lane j and lane j + 16
    lanes = tl.sum(tl.reshape(lanes, [2, 8]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 4]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 2]), 0)
    tl.store(out + row.to(tl.int64) * blocks + block, tl.sum(lanes, 0))
    tl.store(broken + row.to(tl.int64) * blocks + block, tl.max(bad, 0))


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, inverse, level, up, down, h24):  # type: ignore[no-untyped-def]
    """Decoded values; `up` is 2^-d, `down` 2^d."""
    t = (x * inverse) * up
    k = tl.floor(t)
    r24 = ((t - k) * 16777216.0).to(tl.int32)
    q = k + tl.where(r24 + h24 >= 16777216, 1.0, 0.0)
    q = tl.where(tl.abs(t) >= _INTEGERS, t, q)
    return tl.where(level == 0.0, 0.0, (q * level) * down)


@triton.jit
def _mean(  # type: ignore[no-untyped-def]
    x, d, mean, error, signal, tensor_of, index_of, part_of, owner_of, own, own_inverse, of_sum, sum_inverse,
    own_keys, sum_keys, offsets, length, tensors, runs, spans, world: tl.constexpr, shaped: tl.constexpr,
    span: tl.constexpr,
):  # fmt: skip
    at, run = tl.program_id(0), tl.program_id(1)
    block = at // (_BLOCK // span)
    tensor = tl.load(tensor_of + block)
    lane = tl.arange(0, span)
    position = at.to(tl.int64) * span + lane
    index = tl.load(index_of + block) + (at % (_BLOCK // span)) * span + lane
    rank_of = (tl.load(owner_of + tensor) + index // tl.load(part_of + tensor)) % world
    if shaped:
        shape = tl.load(d + run.to(tl.int64) * length + position).to(tl.int32)
    else:
        shape = tl.zeros([span], tl.int32)
    up = ((127 - shape) << 23).to(tl.float32, bitcast=True)
    down = ((127 + shape) << 23).to(tl.float32, bitcast=True)
    low = tl.load(own_keys + run * tensors + tensor).to(tl.uint32)
    high = tl.load(own_keys + (runs + run) * tensors + tensor).to(tl.uint32)
    drawn = _mix(index.to(tl.uint32) ^ low) + high
    total = tl.zeros([span], tl.float32)
    true = tl.zeros([span], tl.float32)
    for rank in tl.static_range(world):
        values = tl.load(x + (run.to(tl.int64) * world + rank) * length + position)
        place = (run * world + rank) * tensors + tensor
        h24 = ((drawn + tl.load(offsets + rank).to(tl.uint32)) >> 8).to(tl.int32)
        sent = _rounded(values, tl.load(own_inverse + place), tl.load(own + place), up, down, h24)
        sent = tl.where(rank_of == rank, values, sent)
        if rank == 0:
            total, true = sent, values
        else:
            total, true = total + sent, true + values
    low = tl.load(sum_keys + run * tensors + tensor).to(tl.uint32)
    high = tl.load(sum_keys + (runs + run) * tensors + tensor).to(tl.uint32)
    h24 = ((_mix(index.to(tl.uint32) ^ low) + high) >> 8).to(tl.int32)
    place = run * tensors + tensor
    result = _rounded(total, tl.load(sum_inverse + place), tl.load(of_sum + place), up, down, h24)
    result = tl.div_rn(result, tl.full([span], world, tl.float32))
    true = tl.div_rn(true, tl.full([span], world, tl.float32))
    tl.store(mean + run.to(tl.int64) * length + position, result)
    away = result - true
    tl.store(error + run * spans + at, tl.sum(away * away, 0))
    tl.store(signal + run * spans + at, tl.sum(true * true, 0))


def squares(layout: Layout, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, shape = x.numel() // layout.length, (*x.shape[:-1], layout.blocks)
    out = torch.empty(shape, dtype=torch.float64, device=x.device)
    broken = torch.empty(shape, dtype=torch.int32, device=x.device)
    _squares[(layout.blocks, rows)](x, out, broken, layout.blocks, num_warps=1)
    return out, broken


@functools.cache
def _offsets(world: int, device: torch.device) -> torch.Tensor:
    """Made once: to copy from host memory is to wait for the GPU."""
    return torch.tensor([offset_of(rank, world) for rank in range(world)], device=device)


def rounded_mean(
    layout: Layout, x: torch.Tensor, d: torch.Tensor | None, levels: Levels, own_keys: torch.Tensor,
    sum_keys: torch.Tensor,
) -> Outcome:  # fmt: skip
    runs, world = x.shape[:2]
    mean = torch.empty(runs, layout.length, device=x.device)
    spans = layout.length // SPAN
    error, signal = (torch.empty(runs, spans, device=x.device) for _ in range(2))
    _mean[(spans, runs)](
        x, x if d is None else d, mean, error, signal, layout.tensor_of, layout.index_of, layout.part, layout.owner,
        levels.own.contiguous(), levels.own_inverse.contiguous(), levels.sum, levels.sum_inverse, own_keys, sum_keys,
        _offsets(world, x.device), layout.length, len(layout.names), runs, spans, world=world, shaped=d is not None,
        span=SPAN, enable_fp_fusion=False,
    )  # fmt: skip
    return Outcome(mean, error.sum(-1, dtype=torch.float64), signal.sum(-1, dtype=torch.float64))
