"""What all GPU kernels build on: votes within a warp, scalars that are equal in all threads, pointers, prefetching.

Every kernel codes one block per warp: program = warp, thread = lane of docs/format.md. Arithmetic is on integers, with
two exceptions that IEEE 754 defines exactly: rounding to a grid in gpu_mapping, and the sum that `add=True` asks for.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret

GROUP = tl.constexpr(256)  # blocks whose words are summed up together


# --- Pointers ----------------------------------------------------------------------------------------------------


@triton.jit
def as_bits(pointer, ITEM: tl.constexpr):
    """A pointer to floats of ITEM bytes as one to integers. Casting here saves the host a view per tensor."""
    if ITEM == 4:
        return pointer.to(tl.pointer_type(tl.int32))
    else:
        return pointer.to(tl.pointer_type(tl.int16))


@triton.jit
def load(pointer, mask, MASKED: tl.constexpr):
    """A load that is masked, with 0 elsewhere, or not."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def prefetch_line(pointer, INTERPRET: tl.constexpr):
    """Asks for the lines of 128 bytes that some pointers point into to come to the L2 cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointer.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def block_place(index, sums, block):
    """How many words the blocks before this one have, from the index and the sums of groups of blocks."""
    group = block // GROUP
    place = block.to(tl.int64) * 0
    for first in range(0, group, GROUP):
        number = first + tl.arange(0, GROUP)
        place += tl.sum(tl.load(sums + number, mask=number < group, other=0).to(tl.int64), 0)
    number = group * GROUP + tl.arange(0, GROUP)
    return place + tl.sum(tl.load(index + number, mask=number < block, other=0).to(tl.int32) & 0x3FFF, 0)


# --- Votes -------------------------------------------------------------------------------------------------------


@triton.jit
def population(bits):
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def count_votes(flag, lanes_before, INTERPRET: tl.constexpr):
    """For (32,) flags: how many of the lanes in the mask `lanes_before` are set, and how many of all lanes."""
    if INTERPRET:
        ones = flag.to(tl.int32)
        total = tl.sum(ones, 0)
        inclusive = tl.cumsum(ones, 0)
        # lanes_before is either "lower lanes" (bit 31 clear) or "this and higher lanes".
        rank = tl.where(lanes_before >= 0, inclusive - ones, total - inclusive + ones)
        return rank, tl.full((32,), 0, tl.int32) + total
    else:
        votes = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
            "=r,r",
            [flag.to(tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return population(votes & lanes_before), population(votes)


@triton.jit
def uniform(scalar):
    """The same scalar, but known to be equal in all threads, so that branches on it are cheap and votes are safe."""
    return tl.max(scalar + tl.zeros((32,), tl.int32), 0)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def or_of_all(v, INTERPRET: tl.constexpr):
    """The bitwise or of the values of a 2-D tensor."""
    if INTERPRET:  # which would run `_or` value by value
        union = 0
        for bit in tl.static_range(32):
            union |= tl.max(tl.max((v >> bit) & 1, 1), 0) << bit
        return union
    else:
        return tl.reduce(tl.reduce(v, 1, _or), 0, _or)
