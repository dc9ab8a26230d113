# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The decoder's kernel: one warp decodes one block.

Payloads are not trusted: every load is masked to the block it belongs to, and what contradicts docs/format.md is
or-ed into a status word that the host reads at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import (
    count_votes,
    kept_bits,
    load,
    load_floor_inputs,
    make_floors,
    prefetch,
    prefetch_floors,
    uniform,
)
from .gpu_sparse import BAD_SPARSE, read_sparse
from .gpu_tables import LOOKUP_STRIDE

# Status bits; those of the tables are in gpu_tables.
SHORT_BODY = tl.constexpr(1 << 4)
LONG_BODY = tl.constexpr(1 << 5)
BAD_KIND = tl.constexpr(1 << 6)
BAD_RAW = tl.constexpr(1 << 7)
SHORT_DENSE = tl.constexpr(1 << 8)
BAD_DENSE_HEAD = tl.constexpr(1 << 9)
BAD_LANES = tl.constexpr(1 << 10)
BAD_FIELDS = tl.constexpr(1 << 11)
STRAY_SPARSE = tl.constexpr(1 << 13)

GROUP = tl.constexpr(256)  # blocks whose words are summed by one program of prepare_decode
TABLE_BYTES_PER_PROGRAM = tl.constexpr(1024)
LIST_BYTES_PER_PROGRAM = tl.constexpr(2 * 4 * 4096)  # near mode alone: for sparse blocks

_ESCAPED = tl.constexpr(16)  # in an entry of a block's table; the length is in bits 0-3, the exponent from bit 23 on
_IMPOSSIBLE = tl.constexpr(32)  # an exponent that the type does not have

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


@triton.jit
def _write_block_table(lookup, base, single, table, EXPONENT: tl.constexpr):
    """What each value of a state's low 8 bits means in this block."""
    entry = tl.arange(0, 256)
    found = tl.load(lookup + entry)
    symbol = found & 511
    length = found >> 9
    e = symbol + base
    e = tl.where(symbol == 0, 0, (e + (e > 255).to(tl.int32)) & 255)
    flags = tl.where((e >> EXPONENT) != 0, _IMPOSSIBLE, 0)
    e = tl.where(symbol == 256, 0, e)
    flags = tl.where(symbol == 256, _ESCAPED, flags)
    meaning = tl.where(single, base << 23, length | flags | (e << 23))
    tl.store(table + entry, meaning)


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
    x, at, seen, present, block, table, lowest, upper, EXPONENT: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr
):
    """Phases 1 and 2: the exponents of a row, in bits 23-30 (other bits are not cleared)."""
    entry = tl.load(table + (x & 255))
    if MASKED:
        entry = tl.where(present, entry, 0)
    seen |= entry
    x, at = _pop(x, at, entry & 15, block, lowest, upper, INTERPRET)
    if tl.max(entry & _ESCAPED, 0) > 0:
        escaped = (entry & _ESCAPED) != 0
        raw = x & 255
        seen |= tl.where(escaped & ((raw >> EXPONENT) != 0), _IMPOSSIBLE, 0)
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
def _plain_rows(
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
            x, at, seen, least, i + 128, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, ba, bb, block, table, out, lowest, upper,
            WHOLE, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
        )  # fmt: skip
    return x, at, seen, least


@triton.jit
def _fixed_row(
    x, at, seen, before, i, block, table, out, lowest, upper, lower, m, n, whole, rest, pruned, down,
    ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ADD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Any row in coding 0. `before` counts the fields of the rows before."""
    present = i < n
    x, at, seen, entry = _pop_exponents(x, at, seen, present, block, table, lowest, upper, EXPONENT, True, INTERPRET)
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
    store_row(out, i, _join(entry, kept << down, ITEM, FIELD), present, ADD, ITEM, True)
    return x, at, seen, before + total


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
def _decode_lanes(
    x, head, block, end, table, out, floor, second, start, n, c0, c1, c2, shift, never,
    CODING: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    ADD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All rows of a dense block with final states `x`; returns status bits.

    What is touched must seem to matter, else the compiler drops it; `never` is 0, but only the host knows that.
    """
    lane = tl.arange(0, 32)
    lower = (1 << lane) - 1
    upper = ~lower
    whole = head & 3
    rest = (head >> 2) & 7
    pruned = (head >> 5) & 1
    m = (head >> 16) & 0x3FFF
    down = FIELD - 8 * whole - rest
    lowest = 68 + whole * m
    at = tl.full((32,), 0, tl.int32) + end
    seen = tl.full((32,), 0, tl.int32)
    fields = n * 0
    if CODING == 0:
        if (m == n) & (rest == 0) & (n % 256 == 0):
            if whole == 0:
                x, at, seen, least = _plain_rows(
                    x, at, seen, block, table, out, lowest, upper, n, never, 0, ITEM, EXPONENT, FIELD, ADD, INTERPRET
                )
            elif whole == 1:
                x, at, seen, least = _plain_rows(
                    x, at, seen, block, table, out, lowest, upper, n, never, 1, ITEM, EXPONENT, FIELD, ADD, INTERPRET
                )
            elif ITEM == 4 and whole == 2:
                x, at, seen, least = _plain_rows(
                    x, at, seen, block, table, out, lowest, upper, n, never, 2, ITEM, EXPONENT, FIELD, ADD, INTERPRET
                )
            else:
                x, at, seen, least = _plain_rows(
                    x, at, seen, block, table, out, lowest, upper, n, never, 3 if ITEM == 4 else 1, ITEM, EXPONENT, FIELD, ADD, INTERPRET
                )
            # With `pruned`, a value with exponent 0 would have no field.
            fields = tl.where((pruned > 0) & (tl.min(least, 0) < (1 << 23)), -1, m)
        else:
            before = tl.full((32,), 0, tl.int32)
            touched = lane
            for first in range(0, n, 32):
                seen |= touched & never
                touched = _touch(block, at + (4 * lane - 384))
                x, at, seen, before = _fixed_row(
                    x, at, seen, before, first + lane, block, table, out, lowest, upper, lower, m, n, whole, rest,
                    pruned, down, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
                )  # fmt: skip
            fields = tl.max(before, 0)
    else:
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
        fields = tl.sum(count, 0)
    wrong = (x != 256) | (at != lowest) | ((seen & _IMPOSSIBLE) != 0)
    wrong |= ((seen & _ESCAPED) != 0) & ((head & 64) == 0)
    status = tl.where(fields != m, BAD_FIELDS, 0)
    return tl.where(tl.max(wrong.to(tl.int32), 0) > 0, BAD_LANES, status)


@triton.jit
def _decode_dense(
    block, words, table, lookup, out, floor, second, start, n, c0, c1, c2, shift, never,
    CODING: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    ADD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Decodes a dense block; returns status bits."""
    lane = tl.arange(0, 32)
    status = n * 0
    if words < 17:
        status = n * 0 + SHORT_DENSE
    else:
        block32 = block.to(tl.pointer_type(tl.int32))
        head = uniform(tl.load(block32))
        whole = head & 3
        width = 8 * whole + ((head >> 2) & 7)
        single = (head & 128) != 0
        base = (head >> 8) & 255
        m = (head >> 16) & 0x3FFF
        padding = (head >> 30) & 3
        end = 4 * words - padding
        if CODING == 0:
            wrong = width > FIELD
        else:
            wrong = (width != 0) | ((head & 32) == 0)
        wrong |= ((base >> EXPONENT) != 0) | (m > n) | (single & ((head & 64) != 0)) | (68 + whole * m > end)
        # The padding is the last word's upper bytes.
        wrong |= (padding > 0) & ((uniform(tl.load(block32 + words - 1)) >> ((32 - 8 * padding) & 31)) != 0)
        states = tl.load(block.to(tl.pointer_type(tl.int16)) + 2 + lane).to(tl.int32) & 0xFFFF
        if wrong:
            status = n * 0 + BAD_DENSE_HEAD
        elif tl.min(states, 0) < 256:
            status = n * 0 + BAD_LANES
        else:
            tl.debug_barrier()
            _write_block_table(lookup, base, single, table, EXPONENT)
            tl.debug_barrier()
            status = _decode_lanes(
                states, head, block, end, table, out, floor, second, start, n, c0, c1, c2, shift, never,
                CODING, FLOOR, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
            )  # fmt: skip
    return status


_NUMBERS = ["body_bytes", "n_values", "n_blocks", "index_at", "blocks_at", "c0", "c1", "c2", "shift", "ahead", "never"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["data", "out", "floor", "second"])
def decode_blocks(
    data, lookup, sums, out, floor, second, status, scratch,
    body_bytes, n_values, n_blocks, index_at, blocks_at, c0, c1, c2, shift, ahead, never,
    CODING: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    ADD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if CODING == 1:
        memory = scratch + program.to(tl.int64) * (TABLE_BYTES_PER_PROGRAM + LIST_BYTES_PER_PROGRAM)
    else:
        memory = scratch + program.to(tl.int64) * TABLE_BYTES_PER_PROGRAM
    table = memory.to(tl.pointer_type(tl.int32))
    index = (data + index_at).to(tl.pointer_type(tl.int16))
    if uniform(tl.load(data).to(tl.int32)) != CODING:
        n_blocks = 0  # prepare_decode has told the host
    block = program
    while block < n_blocks:
        start = block.to(tl.int64) * 4096
        n = tl.minimum(n_values - start, 4096).to(tl.int32)
        group = block // GROUP
        place = start * 0
        for first in range(0, group, GROUP):
            number = first + tl.arange(0, GROUP)
            place += tl.sum(tl.load(sums + number, mask=number < group, other=0).to(tl.int64), 0)
        number = group * GROUP + tl.arange(0, GROUP)
        place += tl.sum(tl.load(index + number, mask=number < block, other=0).to(tl.int32) & 0x3FFF, 0)
        entry = uniform(tl.load(index + block).to(tl.int32) & 0xFFFF)
        words = entry & 0x3FFF
        kind = entry >> 14
        end = blocks_at + 4 * (place + words)
        here = data + (blocks_at + 4 * place)
        target = out + start
        fault = n * 0
        if not INTERPRET:
            # Blocks ahead are about as long as this one.
            later = blocks_at + 4 * (place + words * ahead.to(tl.int64))
            for part in tl.static_range(0, 4):
                line = 128 * (32 * part + tl.arange(0, 32))
                if part * 4096 < 4 * words:
                    prefetch(data, later + line, body_bytes)
            if CODING == 1:
                if block + ahead < n_blocks:
                    prefetch_floors(floor, second, start + ahead.to(tl.int64) * 4096, n_values, FLOOR)
        if uniform((end > body_bytes).to(tl.int32)) > 0:
            fault = n * 0 + SHORT_BODY
        else:
            if (block == n_blocks - 1) & (end != body_bytes):
                fault = n * 0 + LONG_BODY
            if kind == 0:
                if words != (n * ITEM + 3) // 4:
                    fault = n * 0 + BAD_RAW
                else:
                    if ITEM == 4:
                        source = here.to(tl.pointer_type(tl.int32))
                    else:
                        source = here.to(tl.pointer_type(tl.int16))
                    for first in range(0, n, 512):
                        i = first + tl.arange(0, 512)
                        value = tl.load(source + i, mask=i < n, other=0).to(tl.int32)
                        store_row(target, i, value, i < n, ADD, ITEM, True)
                    if n * ITEM < 4 * words:
                        if tl.load(source + n).to(tl.int32) != 0:
                            fault = n * 0 + BAD_RAW
            elif kind == 1:
                fault |= _decode_dense(
                    here, words, table, lookup + block // 32 * LOOKUP_STRIDE, target, floor, second, start, n,
                    c0, c1, c2, shift, never, CODING, FLOOR, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
                )  # fmt: skip
            elif kind == 2:
                if words == 0:
                    for first in range(0, n, 512):
                        i = first + tl.arange(0, 512)
                        store_row(target, i, tl.zeros((512,), tl.int32), i < n, ADD, ITEM, True)
                else:
                    if CODING == 1:
                        highs = table + 256
                        tl.debug_barrier()
                        wrong = read_sparse(
                            here.to(tl.pointer_type(tl.int32)), words, target, floor, second, start, n,
                            highs, highs + 4096, c0, c1, c2, shift, FLOOR, ADD,
                        )  # fmt: skip
                        fault |= tl.where(wrong > 0, BAD_SPARSE, 0)
                    else:
                        fault |= STRAY_SPARSE
            else:
                fault |= BAD_KIND
        if fault != 0:
            tl.atomic_or(status, fault)
        block += tl.num_programs(0)
