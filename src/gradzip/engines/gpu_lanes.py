# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""What the GPU kernels of encoder and decoder share: the mapping of values, floors, and votes within a warp.

Every kernel runs one block per warp: program = warp, thread = lane of docs/format.md. Integers only, with two
exceptions that IEEE 754 defines exactly: the additions in `round_to_grid`, and the sum that `add=True` asks for.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret

# How a value is mapped before it is coded (Job.mode and Job.truncate).
LOSSLESS = tl.constexpr(0)
NEAREST = tl.constexpr(1)
TRUNCATE = tl.constexpr(2)
NEAR_GRID = tl.constexpr(3)
PAPER_LEVEL = tl.constexpr(4)

# Where floors come from.
NO_FLOOR = tl.constexpr(0)
INT8_FLOOR = tl.constexpr(1)
THETA_FLOOR = tl.constexpr(2)
THETA_SECOND_FLOOR = tl.constexpr(3)

KEEP_EXACT = tl.constexpr(-1024)  # inside kernels: the floor of values that stay exact; so low that no test needs it
_MAX_FLOAT_FLOOR = tl.constexpr(103)  # up to here 2^(f+23) + x stays finite
_SIGN = tl.constexpr(-(1 << 31))
_INFINITY = tl.constexpr(0x7F800000)
_QUIET_NAN = tl.constexpr(0x7FC00000)


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


@triton.jit
def prefetch(pointer, at, end):
    """Asks for the lines of 128 bytes from byte `at` (any tensor) of a buffer of `end` bytes to come to the L2 cache."""
    address = pointer.to(tl.int64) + tl.minimum(at, end - 1)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


# --- Floors ------------------------------------------------------------------------------------------------------


@triton.jit
def load(pointer, mask, MASKED: tl.constexpr):
    """A load that is masked, with 0 elsewhere, or not."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_floor_inputs(floor, second, at, mask, FLOOR: tl.constexpr, MASKED: tl.constexpr):
    """What floors are made of: given ones, or the bit patterns of theta and second moment."""
    a = load(floor + at, mask, MASKED).to(tl.int32)
    if FLOOR == THETA_SECOND_FLOOR:
        return a, load(second + at, mask, MASKED)
    else:
        return a, a


@triton.jit
def make_floors(a, b, c0, c1, c2, shift, FLOOR: tl.constexpr):
    """The floor of each value, int32; KEEP_EXACT where the value stays exact."""
    if FLOOR == INT8_FLOOR:
        return tl.where(a == -128, KEEP_EXACT, tl.minimum(a + shift, 127))
    else:
        theta = (a >> 23) & 255
        f = theta + c0
        if FLOOR == THETA_SECOND_FLOOR:
            f += tl.maximum(((b >> 23) & 255) + c1, c2) >> 1
        # min(min(f, 127) + shift, 127) is min(f + shift, 127) because shift >= 0
        return tl.where((theta == 0) | (f < -127), KEEP_EXACT, tl.minimum(f + shift, 127))


@triton.jit
def load_floors(floor, second, at, mask, c0, c1, c2, shift, FLOOR: tl.constexpr, MASKED: tl.constexpr):
    a, b = load_floor_inputs(floor, second, at, mask, FLOOR, MASKED)
    return make_floors(a, b, c0, c1, c2, shift, FLOOR)


@triton.jit
def prefetch_floors(floor, second, start, n_values, FLOOR: tl.constexpr):
    """Brings what a block's floors are made of to the L2 cache."""
    line = 128 * tl.arange(0, 32)
    if FLOOR == INT8_FLOOR:
        prefetch(floor, start + line, n_values)
    elif FLOOR != NO_FLOOR:
        for part in tl.static_range(0, 16384, 4096):
            prefetch(floor, 4 * start + part + line, 4 * n_values)
            if FLOOR == THETA_SECOND_FLOOR:
                prefetch(second, 4 * start + part + line, 4 * n_values)


@triton.jit
def kept_bits(exponent, f):
    """k of the format's "Lane part" in coding 1."""
    return tl.where(exponent == 255, 23, tl.minimum(tl.maximum(exponent - 127 - f, 0), 23))


@triton.jit
def paper_level(exponent, reach):
    span = reach - (exponent - 127) - 1
    level = (span >= 6).to(tl.int32) + (span >= 12).to(tl.int32) + (span >= 18).to(tl.int32)
    return tl.where(exponent == 255, 0, level)


# --- What each mode maps a value to, and how many bits of it go through the lanes in coding 1 and 2 ---------------


@triton.jit
def _finish(v, result):
    """The rules that all lossy modes share; `result` is the mapped magnitude."""
    magnitude = v & 0x7FFFFFFF
    exponent = magnitude >> 23
    result = tl.where(exponent == 0, 0, result)
    result = tl.where(exponent == 255, tl.where(magnitude > _INFINITY, _QUIET_NAN, _INFINITY), result)
    return tl.where(result == 0, 0, result | (v & _SIGN))


@triton.jit
def _round(magnitude, cut):
    """Round away the low `cut` bits, ties to even; a value that would overflow is cut instead."""
    # With no bit kept the multiple is the implicit 1, which is odd.
    odd = tl.where(cut == 23, 1, (magnitude >> cut) & 1)
    up = tl.where(cut > 0, ((1 << cut) >> 1) - 1 + odd, 0)
    rounded = ((magnitude + up) >> cut) << cut
    return tl.where(rounded < _INFINITY, rounded, (magnitude >> cut) << cut)


@triton.jit
def map_keep(v, keep, MODE: tl.constexpr):
    magnitude = v & 0x7FFFFFFF
    cut = 23 - keep
    if MODE == TRUNCATE:
        return _finish(v, (magnitude >> cut) << cut)
    else:
        return _finish(v, _round(magnitude, cut))


@triton.jit
def map_paper(v, reach):
    magnitude = v & 0x7FFFFFFF
    e = magnitude >> 23
    cut = 6 * paper_level(e, reach)
    return _finish(v, (magnitude >> cut) << cut), tl.where(e == 0, 0, 24 - cut)


@triton.jit
def _map_to_any_grid(v, f):
    magnitude = v & 0x7FFFFFFF
    kept = tl.minimum(23, (magnitude >> 23) - 127 - f)
    result = _round(magnitude, 23 - tl.maximum(kept, 0))
    # Below the grid: more than half a step rounds up to one step, the rest to zero.
    one_step = (tl.maximum(f, -126) + 127) << 23
    up = (kept == -1) & ((magnitude & 0x7FFFFF) != 0)
    q = _finish(v, tl.where(kept < 0, tl.where(up, one_step, 0), result))
    e = (q >> 23) & 255
    return q, tl.where(e == 0, 0, 1 + kept_bits(e, f))


@triton.jit
def _flush(v, INTERPRET: tl.constexpr):
    """+0 for -0 and subnormals."""
    if INTERPRET:
        return tl.where((v & _INFINITY) == 0, 0, v)
    else:
        return tl.inline_asm_elementwise("add.ftz.f32 $0, $1, 0f00000000;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _map_to_usual_grid(v, e, f, INTERPRET: tl.constexpr):
    """The same for f <= 103 and e < 255: adding 2^(f+23) leaves a sum whose last place is 2^f, so the adder rounds."""
    v = _flush(v, INTERPRET)
    anchor = (((f + 150) << 23) | (v & _SIGN)).to(tl.float32, bitcast=True)
    rounded = ((v.to(tl.float32, bitcast=True) + anchor) - anchor).to(tl.int32, bitcast=True)
    q = tl.where(e >= f + 150, v, rounded)  # on the grid already
    e = (q >> 23) & 255
    return q, tl.where(e == 0, 0, tl.minimum(e - f - 126, 24))  # a multiple of 2^f that is not 0 has e >= f + 127


@triton.jit
def near_limit(v, f):
    """Above 103 where a value cannot be mapped by `_map_to_usual_grid`."""
    return tl.maximum(f, ((v >> 23) & 255) - 151)


@triton.jit
def map_near(v, f, limit, INTERPRET: tl.constexpr):
    """Near mode: the nearest multiple of 2^f, ties to even multiples. `limit`: the largest near_limit."""
    if limit > _MAX_FLOAT_FLOOR:
        q, width = _map_to_any_grid(v, f)
    else:
        q, width = _map_to_usual_grid(v, (v >> 23) & 255, f, INTERPRET)
    return q, width
