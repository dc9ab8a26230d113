"""The decoder's rows: popping lanes, joining exponents and fields, and storing values.

Loads run ahead of their use: what a row needs is loaded while the rows before it are decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import count_votes, load
from .gpu_mapping import kept_bits, load_floor_inputs, make_floors

# In an entry of a block's table: the length in bits 0-3, the exponent from bit 23 on, and these flags.
ESCAPED = tl.constexpr(16)
IMPOSSIBLE = tl.constexpr(32)  # an exponent that the type does not have

# How decoded values reach the output.
STORE_BITS = tl.constexpr(0)
ADD_FLOAT32 = tl.constexpr(1)
ADD_BFLOAT16 = tl.constexpr(2)
ADD_FLOAT16 = tl.constexpr(3)


@triton.jit
def store_row(out, i, value, mask, ADD: tl.constexpr, ITEM: tl.constexpr, MASKED: tl.constexpr):
    """Stores bit patterns to `out`, or adds them as floats."""
    if ITEM == 4:
        bits = value
        if ADD != STORE_BITS:
            there = load(out + i, mask, MASKED).to(tl.float32, bitcast=True)
            bits = (there + value.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    else:
        bits = value.to(tl.int16)
        if ADD == ADD_BFLOAT16:
            there = load(out + i, mask, MASKED).to(tl.bfloat16, bitcast=True).to(tl.float32)
            total = there + bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
            bits = total.to(tl.bfloat16).to(tl.int16, bitcast=True)
        if ADD == ADD_FLOAT16:
            there = load(out + i, mask, MASKED).to(tl.float16, bitcast=True).to(tl.float32)
            total = there + bits.to(tl.float16, bitcast=True).to(tl.float32)
            bits = total.to(tl.float16).to(tl.int16, bitcast=True)
    if MASKED:
        tl.store(out + i, bits, mask=mask)
    else:
        tl.store(out + i, bits)


# --- Lanes -------------------------------------------------------------------------------------------------------


@triton.jit
def _refill(x, pointer, INTERPRET: tl.constexpr):
    """Appends the byte at `pointer` to states below 256. In assembly because a masked load takes longer."""
    if INTERPRET:
        return tl.where(x < 256, (x << 8) | tl.load(pointer, mask=x < 256, other=0).to(tl.int32), x)
    else:
        return tl.inline_asm_elementwise(
            """{
                .reg .pred low;
                .reg .b32 byte;
                setp.lt.s32 low, $1, 256;
                mov.b32 $0, $1;
                mov.b32 byte, 0;
                @low ld.global.u8 byte, [$2];
                @low mad.lo.s32 $0, $1, 256, byte;
            }""",
            "=&r,r,l",
            [x, pointer.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _pop(x, at, count, block, lowest, upper, INTERPRET: tl.constexpr):
    """Drops `count` bits of each lane and refills those that run low."""
    x = x >> count
    rank, total = count_votes(x < 256, upper, INTERPRET)
    # A stream that runs dry reads a wrong byte of its own block; that it ends elsewhere shows at the end.
    return _refill(x, block + tl.maximum(at - rank, lowest - 1), INTERPRET), at - total


@triton.jit
def _touch(block, at):
    """Reads bytes of a block, so that their neighbours are in the L1 cache when they are popped."""
    return tl.load(block + tl.maximum(at, 0)).to(tl.int32)


@triton.jit
def _pop_exponents(
    x, at, seen, present, block, table, lowest, upper,
    EXPONENT: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Phases 1 and 2: the exponents of a row, in bits 23-30 (other bits are not cleared)."""
    entry = tl.load(table + (x & 255))
    if MASKED:
        entry = tl.where(present, entry, 0)
    seen |= entry
    x, at = _pop(x, at, entry & 15, block, lowest, upper, INTERPRET)
    if tl.max(entry & ESCAPED, 0) > 0:
        escaped = (entry & ESCAPED) != 0
        raw = x & 255
        seen |= tl.where(escaped & ((raw >> EXPONENT) != 0), IMPOSSIBLE, 0)
        entry = tl.where(escaped, raw << 23, entry)
        x, at = _pop(x, at, tl.where(escaped, 8, 0), block, lowest, upper, INTERPRET)
    return x, at, seen, entry


@triton.jit
def _join(entry, field, ITEM: tl.constexpr, FIELD: tl.constexpr):
    """A bit pattern from exponent (in bits 23-30) and field; for 16-bit types higher bits are left over."""
    if ITEM == 4:
        return (entry & 0x7F800000) | (field & 0x7FFFFF) | ((field << 8) & (-(1 << 31)))
    else:
        sign = (field >> (FIELD - 1)) << 15
        return ((entry >> (24 - FIELD)) & ((1 << 15) - (1 << (FIELD - 1)))) | (field & ((1 << (FIELD - 1)) - 1)) | sign


# --- Coding 0 ----------------------------------------------------------------------------------------------------


@triton.jit
def _load_planes(block, i, n, WHOLE: tl.constexpr):
    """The WHOLE bytes of a row's fields, as they lie in the planes; 0 for those that are not there."""
    low = i * 0
    middle = low
    high = low
    if WHOLE > 0:
        low = tl.load(block + 68 + i).to(tl.int32)
    if WHOLE > 1:
        middle = tl.load(block + (68 + n) + i).to(tl.int32)
    if WHOLE > 2:
        high = tl.load(block + (68 + 2 * n) + i).to(tl.int32)
    return low, middle, high


@triton.jit
def _load_plane_rows(block, i, n, WHOLE: tl.constexpr):
    """The same for four rows."""
    l0, m0, h0 = _load_planes(block, i, n, WHOLE)
    l1, m1, h1 = _load_planes(block, i + 32, n, WHOLE)
    l2, m2, h2 = _load_planes(block, i + 64, n, WHOLE)
    l3, m3, h3 = _load_planes(block, i + 96, n, WHOLE)
    return l0, m0, h0, l1, m1, h1, l2, m2, h2, l3, m3, h3


@triton.jit
def _plain_row(
    x, at, seen, least, i, low, middle, high, block, table, out, lowest, upper,
    WHOLE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ADD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    x, at, seen, entry = _pop_exponents(x, at, seen, i >= 0, block, table, lowest, upper, EXPONENT, False, INTERPRET)
    field = (low | (middle << 8) | (high << 16)) << (FIELD - 8 * WHOLE)
    store_row(out, i, _join(entry, field, ITEM, FIELD), i >= 0, ADD, ITEM, False)
    return x, at, seen, tl.minimum(least, entry)


@triton.jit
def _four_plain_rows(
    x, at, seen, least, i, l0, m0, h0, l1, m1, h1, l2, m2, h2, l3, m3, h3, block, table, out, lowest, upper,
    WHOLE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ADD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    x, at, seen, least = _plain_row(
        x, at, seen, least, i, l0, m0, h0, block, table, out, lowest, upper,
        WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
    )  # fmt: skip
    x, at, seen, least = _plain_row(
        x, at, seen, least, i + 32, l1, m1, h1, block, table, out, lowest, upper,
        WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
    )  # fmt: skip
    x, at, seen, least = _plain_row(
        x, at, seen, least, i + 64, l2, m2, h2, block, table, out, lowest, upper,
        WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
    )  # fmt: skip
    return _plain_row(
        x, at, seen, least, i + 96, l3, m3, h3, block, table, out, lowest, upper,
        WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
    )  # fmt: skip


@triton.jit
def plain_rows(
    x, at, seen, block, table, out, lowest, upper, n, never,
    WHOLE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ADD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """All rows (a multiple of 8) of a block in coding 0 whose values all have fields of WHOLE bytes.

    Returns the least exponent, too. While four rows are decoded, the fields of the next four are on their way.
    """
    lane = tl.arange(0, 32)
    least = tl.full((32,), 0x7FFFFFFF, tl.int32)
    touched = lane
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab = _load_plane_rows(block, lane, n, WHOLE)
    for first in range(0, n, 256):
        i = first + lane
        b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, ba, bb = _load_plane_rows(block, i + 128, n, WHOLE)
        seen |= touched & never
        touched = _touch(block, at + (4 * lane - 384))
        x, at, seen, least = _four_plain_rows(
            x, at, seen, least, i, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, block, table, out, lowest, upper,
            WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
        )  # fmt: skip
        j = tl.minimum(first + 256, n - 256) + lane
        a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab = _load_plane_rows(block, j, n, WHOLE)
        seen |= touched & never
        touched = _touch(block, at + (4 * lane - 384))
        x, at, seen, least = _four_plain_rows(
            x, at, seen, least, i + 128, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, ba, bb, block, table, out, lowest,
            upper, WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
        )  # fmt: skip
    return x, at, seen, least


@triton.jit
def _fixed_row(
    x, at, seen, before, i, block, table, out, lowest, upper, lower, m, n, whole, rest, pruned, down,
    ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Any row in coding 0. `before` counts the fields of the rows before."""
    present = i < n
    x, at, seen, entry = _pop_exponents(x, at, seen, present, block, table, lowest, upper, EXPONENT, MASKED, INTERPRET)
    has_field = present & (((entry >> 23) & 255) >= pruned)
    kept = i * 0
    if rest > 0:
        count = tl.where(has_field, rest, 0)
        kept = x & ((1 << count) - 1)
        x, at = _pop(x, at, count, block, lowest, upper, INTERPRET)
    rank, total = count_votes(has_field, lower, INTERPRET)
    if whole > 0:
        place = before + rank
        readable = has_field & (place < m)
        kept |= tl.load(block + 68 + place, mask=readable, other=0).to(tl.int32) << rest
        if whole > 1:
            kept |= tl.load(block + (68 + m) + place, mask=readable, other=0).to(tl.int32) << (rest + 8)
        if whole > 2:
            kept |= tl.load(block + (68 + 2 * m) + place, mask=readable, other=0).to(tl.int32) << (rest + 16)
    store_row(out, i, _join(entry, kept << down, ITEM, FIELD), present, ADD, ITEM, MASKED)
    return x, at, seen, before + total


@triton.jit
def fixed_rows(
    x, at, seen, block, table, out, lowest, upper, lower, m, n, whole, rest, pruned, down, never,
    ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ADD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All rows of any block in coding 0; returns the number of fields, too."""
    lane = tl.arange(0, 32)
    before = tl.full((32,), 0, tl.int32)
    touched = lane
    full = n // 128 * 128
    # Lanes that are equal modulo 4 look after one of the planes, the last ones after none.
    planes = 68 + tl.minimum(lane & 3, tl.maximum(whole - 1, 0)) * m + (lane >> 2) * 32
    for first in range(0, full, 128):
        seen |= touched & never
        touched = _touch(block, at + (4 * lane - 384)) | _touch(block, tl.minimum(planes + before + 128, lowest - 1))
        for row in tl.static_range(0, 128, 32):
            x, at, seen, before = _fixed_row(
                x, at, seen, before, first + row + lane, block, table, out, lowest, upper, lower, m, n, whole, rest,
                pruned, down, ITEM, EXPONENT, FIELD, ADD, False, INTERPRET,
            )  # fmt: skip
    for first in range(full, n, 32):
        x, at, seen, before = _fixed_row(
            x, at, seen, before, first + lane, block, table, out, lowest, upper, lower, m, n, whole, rest,
            pruned, down, ITEM, EXPONENT, FIELD, ADD, True, INTERPRET,
        )  # fmt: skip
    return x, at, seen, tl.max(before, 0)


# --- Coding 1 and 2 ----------------------------------------------------------------------------------------------


@triton.jit
def _pop_chunk(x, at, width, block, lowest, upper, J: tl.constexpr, INTERPRET: tl.constexpr):
    """Pops the bits 8J .. 8J+7 of lane parts of `width` bits."""
    if J == 0:
        count = tl.minimum(width, 8)
    elif J == 1:
        count = tl.minimum(tl.maximum(width - 8, 0), 8)
    else:
        count = tl.maximum(width - 16, 0)
    bits = x & ((1 << count) - 1)
    x, at = _pop(x, at, count, block, lowest, upper, INTERPRET)
    return x, at, bits << (8 * J)


@triton.jit
def _lane_row(
    x, at, seen, fields, i, a, b, block, table, out, lowest, upper, n, c0, c1, c2, shift,
    CODING: tl.constexpr, FLOOR: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A row in coding 1 or 2. `fields` counts each lane's values that are not 0; floors are made from a and b."""
    present = i < n
    x, at, seen, entry = _pop_exponents(x, at, seen, present, block, table, lowest, upper, 8, MASKED, INTERPRET)
    e = (entry >> 23) & 255
    there = e > 0
    fields += there.to(tl.int32)
    if CODING == 2:
        cut = tl.where(there, 6 * (x & 3), 0)
        x, at = _pop(x, at, tl.where(there, 2, 0), block, lowest, upper, INTERPRET)
    else:
        cut = 23 - kept_bits(e, make_floors(a, b, c0, c1, c2, shift, FLOOR))
    width = tl.where(there, 24 - cut, 0)
    widest = tl.max(width, 0)
    x, at, bits = _pop_chunk(x, at, width, block, lowest, upper, 0, INTERPRET)
    if widest > 8:
        x, at, more = _pop_chunk(x, at, width, block, lowest, upper, 1, INTERPRET)
        bits |= more
        if widest > 16:
            x, at, more = _pop_chunk(x, at, width, block, lowest, upper, 2, INTERPRET)
            bits |= more
    store_row(out, i, _join(entry, bits << cut, 4, 24), present, ADD, 4, MASKED)
    return x, at, seen, fields


@triton.jit
def lane_rows(
    x, at, seen, block, table, out, floor, second, start, lowest, upper, n, c0, c1, c2, shift, never,
    CODING: tl.constexpr, FLOOR: tl.constexpr, ADD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All rows of a block in coding 1 or 2; returns the number of values that are not 0, too."""
    lane = tl.arange(0, 32)
    count = tl.full((32,), 0, tl.int32)
    paired = n // 64 * 64
    a, b, touched = lane, lane, lane
    if CODING == 1:
        floor += start
        second += start
        a, b = load_floor_inputs(floor, second, lane, lane < n, FLOOR, True)
    for first in range(0, paired, 64):
        # While a row is decoded, what the next row's floors are made of is on its way.
        i = first + lane
        c, d = lane, lane
        if CODING == 1:
            c, d = load_floor_inputs(floor, second, i + 32, i < n, FLOOR, False)
        seen |= touched & never
        touched = _touch(block, at + (4 * lane - 512))
        x, at, seen, count = _lane_row(
            x, at, seen, count, i, a, b, block, table, out, lowest, upper, n, c0, c1, c2, shift,
            CODING, FLOOR, ADD, False, INTERPRET,
        )  # fmt: skip
        if CODING == 1:
            a, b = load_floor_inputs(floor, second, tl.minimum(first + 64, n - 32) + lane, i < n, FLOOR, False)
        seen |= touched & never
        touched = _touch(block, at + (4 * lane - 512))
        x, at, seen, count = _lane_row(
            x, at, seen, count, i + 32, c, d, block, table, out, lowest, upper, n, c0, c1, c2, shift,
            CODING, FLOOR, ADD, False, INTERPRET,
        )  # fmt: skip
    for first in range(paired, n, 32):
        i = first + lane
        if CODING == 1:
            a, b = load_floor_inputs(floor, second, i, i < n, FLOOR, True)
        x, at, seen, count = _lane_row(
            x, at, seen, count, i, a, b, block, table, out, lowest, upper, n, c0, c1, c2, shift,
            CODING, FLOOR, ADD, True, INTERPRET,
        )  # fmt: skip
    return x, at, seen, tl.sum(count, 0)
