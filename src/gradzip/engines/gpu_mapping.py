"""What each mode maps a value to, on the GPU: floors, q(x) of docs/format.md, and the lane bits that follow."""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import as_bits, load

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

# Arguments of the encoder's kernels that are no reason to compile anew.
NUMBERS = ["n_values", "n_blocks", "index_at", "c0", "c1", "c2", "shift", "keep", "cut", "up", "odd", "mask"]


# --- Floors ------------------------------------------------------------------------------------------------------


@triton.jit
def floors_as_bits(floor, second, FLOOR: tl.constexpr):
    if (FLOOR == THETA_FLOOR) | (FLOOR == THETA_SECOND_FLOOR):
        return as_bits(floor, 4), as_bits(second, 4)
    else:
        return floor, second


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
    """keep=k on any value."""
    magnitude = v & 0x7FFFFFFF
    cut = 23 - keep
    if MODE == TRUNCATE:
        return _finish(v, (magnitude >> cut) << cut)
    else:
        return _finish(v, _round(magnitude, cut))


@triton.jit
def map_keep_usual(v, cut, up, odd, mask):
    """keep=k on values with exponents up to 253; the host makes the last four arguments from k."""
    v = tl.where((v & _INFINITY) == 0, 0, v)
    return (v + up + ((v >> cut) & odd)) & mask


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
        return tl.inline_asm_elementwise(
            "add.ftz.f32 $0, $1, 0f00000000;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _map_to_usual_grid(v, f, INTERPRET: tl.constexpr):
    """The same for f <= 103 and finite v: adding 2^(f+23) leaves a sum whose last place is 2^f, so the adder rounds."""
    e = (v >> 23) & 255
    v = _flush(v, INTERPRET)
    anchor = (((f + 150) << 23) | (v & _SIGN)).to(tl.float32, bitcast=True)
    rounded = ((v.to(tl.float32, bitcast=True) + anchor) - anchor).to(tl.int32, bitcast=True)
    q = tl.where(e >= f + 150, v, rounded)  # on the grid already
    e = (q >> 23) & 255
    return q, tl.where(e == 0, 0, tl.minimum(e - f - 126, 24))  # a multiple of 2^f that is not 0 has e >= f + 127


# --- Any mode ----------------------------------------------------------------------------------------------------


@triton.jit
def load_values(
    x, floor, second, at, mask, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, MASKED: tl.constexpr
):
    """Bit patterns as int32, and what their floors are made of (where there are none: 0)."""
    v = load(x + at, mask, MASKED).to(tl.int32)
    if ITEM == 2:
        v = v & 0xFFFF
    if (MODE == NEAR_GRID) | (MODE == PAPER_LEVEL):
        a, b = load_floor_inputs(floor, second, at, mask, FLOOR, MASKED)
        return v, a, b
    else:
        return v, v, v


@triton.jit
def map_values(
    v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
    MODE: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Mapped bit patterns, and how many bits of each go through the lanes in coding 1 and 2 (else 0).

    `unusual` (equal in all threads) asks for the mapping that takes any value; see `is_unusual`.
    """
    if MODE == LOSSLESS:
        return v, v * 0
    elif MODE == NEAR_GRID:
        f = make_floors(a, b, c0, c1, c2, shift, FLOOR)
        if unusual > 0:
            q, width = _map_to_any_grid(v, f)
        else:
            q, width = _map_to_usual_grid(v, f, INTERPRET)
        return q, width
    elif MODE == PAPER_LEVEL:
        return map_paper(v, make_floors(a, b, c0, c1, c2, shift, FLOOR))
    else:
        if unusual > 0:
            q = map_keep(v, keep, MODE)
        else:
            q = map_keep_usual(v, cut, up, odd, mask)
        return q, v * 0


@triton.jit
def unusualness(v, a, b, c0, c1, c2, shift, MODE: tl.constexpr, FLOOR: tl.constexpr):
    """A number by which `is_unusual` judges the largest of a block."""
    if MODE == NEAR_GRID:
        return tl.maximum(make_floors(a, b, c0, c1, c2, shift, FLOOR), ((v >> 23) & 255) - 151)
    elif (MODE == NEAREST) | (MODE == TRUNCATE):
        return v & 0x7FFFFFFF
    else:
        return v * 0


@triton.jit
def is_unusual(largest, MODE: tl.constexpr):
    """Whether a block has values that the quick mappings do not take: floors above 103, Inf or NaN, near overflow."""
    if MODE == NEAR_GRID:
        return largest > _MAX_FLOAT_FLOOR
    elif (MODE == NEAREST) | (MODE == TRUNCATE):
        return largest >= (254 << 23)
    else:
        return largest < 0  # never
