"""The encoder's second kernel: one warp writes one block to its final place.

In coding 0 planes come first, and leave the exponents in scratch memory for the lanes. In coding 1 and 2 the lanes
map values anew as they go. Loads run ahead of their use: while four rows are pushed, the next four are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import as_bits, block_place, count_votes, load, uniform
from .gpu_mapping import NUMBERS, floors_as_bits, load_values, map_values
from .gpu_planes import write_full_planes, write_planes, write_raw
from .gpu_sparse import write_sparse
from .gpu_statistics import symbols
from .gpu_tables import CODE_STRIDE

# A program's scratch memory, in bytes.
TABLE_AT = tl.constexpr(0)  # 256 x [8]: what pushing an exponent means
EXPONENTS_AT = tl.constexpr(2048)  # 4096 x [1] in coding 0; positions of sparse blocks in coding 1
MAPPED_AT = tl.constexpr(2048 + 4096)  # 4096 x [4]: mapped values of sparse blocks
FIXED_SCRATCH = tl.constexpr(2048 + 4096)
LANES_SCRATCH = tl.constexpr(2048 + 4096 + 16384)

_ESCAPED = tl.constexpr(1 << 16)  # in the high word of a table entry, above the code


@triton.jit
def _write_block_table(codes, segment, base, single, table):
    """For each exponent of this block what pushing it means: 2^length in the low word, the code in the high one."""
    e = tl.arange(0, 256)
    entry = tl.load(codes + segment * CODE_STRIDE + symbols(e, base))
    escape = tl.load(codes + segment * CODE_STRIDE + 256)
    code = tl.where(entry == 0, (escape & 255) | _ESCAPED, entry & 255)
    factor = 1 << tl.where(entry == 0, escape >> 8, entry >> 8)
    if single > 0:
        code, factor = code * 0, code * 0 + 1
    tl.store(table + e, (code.to(tl.int64) << 32) | factor.to(tl.int64))


# --- Lanes -------------------------------------------------------------------------------------------------------


@triton.jit
def _push(x, at, factor, code, stage, lower, INTERPRET: tl.constexpr):
    """Pushes log2(factor) bits of value `code` onto each lane; `at` counts the refill bytes of all lanes."""
    grown = x * factor + code
    full = grown >= 65536
    rank, count = count_votes(full, lower, INTERPRET)
    tl.store(stage + (at + rank), (x & 255).to(tl.uint8), mask=full)
    return tl.where(full, (x >> 8) * factor + code, grown), at + count


@triton.jit
def _push_chunk(x, at, bits, width, stage, lower, J: tl.constexpr, INTERPRET: tl.constexpr):
    """Pushes the bits 8J .. 8J+7 of a lane part of `width` bits."""
    if J == 0:
        count = tl.minimum(width, 8)
    elif J == 1:
        count = tl.minimum(tl.maximum(width - 8, 0), 8)
    else:
        count = tl.maximum(width - 16, 0)
    # `bits` has no more than `width` bits, so the byte holds no others.
    return _push(x, at, 1 << count, (bits >> (8 * J)) & 255, stage, lower, INTERPRET)


@triton.jit
def _push_row(
    x, at, q, e, width, entry, escaped, stage, lower, down, rest, pruned, chunks,
    CODING: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, REST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes one row: phases 4 to 1 of the format. `entry` is the exponent's table entry; 1 pushes nothing.

    `escaped`: whether the row may have escapes; equal in all threads.
    """
    if CODING == 0:
        if REST:
            field = ((q >> EXPONENT) & (1 << (FIELD - 1))) | (q & ((1 << (FIELD - 1)) - 1))
            factor = tl.where(e >= pruned, 1 << rest, 1)
            x, at = _push(x, at, factor, (field >> down) & (factor - 1), stage, lower, INTERPRET)
    else:
        field = ((q >> 8) & 0x800000) | (q & 0x7FFFFF)
        bits = field >> (24 - width)
        if chunks > 2:
            x, at = _push_chunk(x, at, bits, width, stage, lower, 2, INTERPRET)
        if chunks > 1:
            x, at = _push_chunk(x, at, bits, width, stage, lower, 1, INTERPRET)
        x, at = _push_chunk(x, at, bits, width, stage, lower, 0, INTERPRET)
        if CODING == 2:
            level = ((24 - width) * 43) >> 8  # a sixth
            x, at = _push(x, at, tl.where(width > 0, 4, 1), tl.where(width > 0, level, 0), stage, lower, INTERPRET)
    code = (entry >> 32).to(tl.int32)
    if escaped > 0:
        here = (code & _ESCAPED) != 0
        x, at = _push(x, at, tl.where(here, 256, 1), tl.where(here, e, 0), stage, lower, INTERPRET)
    return _push(x, at, entry.to(tl.int32), code & 255, stage, lower, INTERPRET)


@triton.jit
def _load_row(
    x, floor, second, exponents, i, mask, CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr,
    ITEM: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a row is made of: values and floors; in coding 0 exponents, and values only if they have lane bits."""
    if CODING == 0:
        e = load(exponents + i, mask, MASKED).to(tl.int32)
        if REST:
            v, _, _ = load_values(x, x, x, i, mask, MODE, 0, ITEM, MASKED)
            return v, e, e
        else:
            return i, e, e
    else:
        return load_values(x, floor, second, i, mask, MODE, FLOOR, ITEM, MASKED)


@triton.jit
def _make_row(
    v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, REST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Mapped values, exponents and lane bits of a row."""
    if CODING == 0:
        if REST:
            q, _ = map_values(v, v, v, unusual, 0, 0, 0, 0, keep, cut, up, odd, mask, MODE, 0, INTERPRET)
            return q, a, a
        else:
            return v, a, a
    else:
        q, w = map_values(v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET)
        return q, (q >> 23) & 255, w


@triton.jit
def _load_rows(
    x, floor, second, exponents, i,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Four rows."""
    v0, a0, b0 = _load_row(x, floor, second, exponents, i, i >= 0, CODING, MODE, FLOOR, ITEM, REST, False)
    v1, a1, b1 = _load_row(x, floor, second, exponents, i + 32, i >= 0, CODING, MODE, FLOOR, ITEM, REST, False)
    v2, a2, b2 = _load_row(x, floor, second, exponents, i + 64, i >= 0, CODING, MODE, FLOOR, ITEM, REST, False)
    v3, a3, b3 = _load_row(x, floor, second, exponents, i + 96, i >= 0, CODING, MODE, FLOOR, ITEM, REST, False)
    return v0, a0, b0, v1, a1, b1, v2, a2, b2, v3, a3, b3


@triton.jit
def _push_rows(
    x, at, escapes, v0, a0, b0, v1, a1, b1, v2, a2, b2, v3, a3, b3, table, stage, lower, down, rest, pruned, chunks,
    unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    REST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes four rows, the last one first."""
    q0, e0, w0 = _make_row(
        v0, a0, b0, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, CODING, MODE, FLOOR, REST, INTERPRET
    )
    q1, e1, w1 = _make_row(
        v1, a1, b1, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, CODING, MODE, FLOOR, REST, INTERPRET
    )
    q2, e2, w2 = _make_row(
        v2, a2, b2, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, CODING, MODE, FLOOR, REST, INTERPRET
    )
    q3, e3, w3 = _make_row(
        v3, a3, b3, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, CODING, MODE, FLOOR, REST, INTERPRET
    )
    t0, t1, t2, t3 = tl.load(table + e0), tl.load(table + e1), tl.load(table + e2), tl.load(table + e3)
    escaped = tl.max(((t0 | t1 | t2 | t3) >> 32).to(tl.int32) & _ESCAPED, 0)
    x, at = _push_row(
        x, at, q3, e3, w3, t3, escaped, stage, lower, down, rest, pruned, chunks,
        CODING, EXPONENT, FIELD, REST, INTERPRET,
    )  # fmt: skip
    x, at = _push_row(
        x, at, q2, e2, w2, t2, escaped, stage, lower, down, rest, pruned, chunks,
        CODING, EXPONENT, FIELD, REST, INTERPRET,
    )  # fmt: skip
    x, at = _push_row(
        x, at, q1, e1, w1, t1, escaped, stage, lower, down, rest, pruned, chunks,
        CODING, EXPONENT, FIELD, REST, INTERPRET,
    )  # fmt: skip
    x, at = _push_row(
        x, at, q0, e0, w0, t0, escaped, stage, lower, down, rest, pruned, chunks,
        CODING, EXPONENT, FIELD, REST, INTERPRET,
    )  # fmt: skip
    return x, at, escapes | escaped


@triton.jit
def _push_block(
    values, floor, second, exponents, table, stage, n, rest, pruned, down, widest, unusual,
    c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, REST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes a whole block, rows last to first, refill bytes going to `stage`; returns final states and escapes."""
    lane = tl.arange(0, 32)
    lower = (1 << lane) - 1
    x = tl.full((32,), 256, tl.int32)
    at = tl.full((32,), 0, tl.int32)
    escapes = n * 0
    chunks = (widest + 7) // 8
    # Only the last block has rows that do not fill a group of eight.
    grouped = n // 256 * 256
    for back in range(0, (n - grouped + 31) // 32):
        i = ((n + 31) // 32 - 1 - back) * 32 + lane
        v, a, b = _load_row(values, floor, second, exponents, i, i < n, CODING, MODE, FLOOR, ITEM, REST, True)
        q, e, w = _make_row(
            v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, CODING, MODE, FLOOR, REST, INTERPRET
        )
        e = tl.where(i < n, e, -1)
        w = tl.where(i < n, w, 0)
        entry = tl.load(table + e, mask=i < n, other=1)
        escaped = tl.max((entry >> 32).to(tl.int32) & _ESCAPED, 0)
        escapes |= escaped
        x, at = _push_row(
            x, at, q, e, w, entry, escaped, stage, lower, down, rest, pruned, chunks,
            CODING, EXPONENT, FIELD, REST, INTERPRET,
        )  # fmt: skip
    if grouped > 0:
        i = grouped - 128 + lane
        va, aa, ba, vb, ab, bb, vc, ac, bc, vd, ad, bd = _load_rows(
            values, floor, second, exponents, i, CODING, MODE, FLOOR, ITEM, REST
        )
        for _ in range(0, grouped, 256):
            ve, ae, be, vf, af, bf, vg, ag, bg, vh, ah, bh = _load_rows(
                values, floor, second, exponents, i - 128, CODING, MODE, FLOOR, ITEM, REST
            )
            x, at, escapes = _push_rows(
                x, at, escapes, va, aa, ba, vb, ab, bb, vc, ac, bc, vd, ad, bd, table, stage, lower, down, rest, pruned,
                chunks, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
                CODING, MODE, FLOOR, EXPONENT, FIELD, REST, INTERPRET,
            )  # fmt: skip
            i = tl.maximum(i - 256, lane)
            va, aa, ba, vb, ab, bb, vc, ac, bc, vd, ad, bd = _load_rows(
                values, floor, second, exponents, i, CODING, MODE, FLOOR, ITEM, REST
            )
            x, at, escapes = _push_rows(
                x, at, escapes, ve, ae, be, vf, af, bf, vg, ag, bg, vh, ah, bh, table, stage, lower, down, rest, pruned,
                chunks, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
                CODING, MODE, FLOOR, EXPONENT, FIELD, REST, INTERPRET,
            )  # fmt: skip
    return x, tl.where(escapes > 0, 1, 0)


# --- The kernel --------------------------------------------------------------------------------------------------


@triton.jit
def _map_block(
    x, floor, second, mapped, n, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
    MODE: tl.constexpr, FLOOR: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Mapped values to scratch memory, for the sparse form."""
    for first in range(0, n, 128):
        i = first + tl.arange(0, 128)
        v, a, b = load_values(x, floor, second, i, i < n, MODE, FLOOR, 4, True)
        q, _ = map_values(v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET)
        tl.store(mapped + i, q)


@triton.jit(do_not_specialize=[*NUMBERS, "blocks_at"], do_not_specialize_on_alignment=["out", "result"])
def write_blocks(
    x, floor, second, codes, out, sums, records, status, result, scratch,
    n_values, n_blocks, index_at, blocks_at, c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Writes all blocks as measure_blocks has planned them, and the body's length and the status to `result`."""
    x = as_bits(x, ITEM)
    floor, second = floors_as_bits(floor, second, FLOOR)
    index = (out + index_at).to(tl.pointer_type(tl.int16))
    if CODING == 0:
        memory = scratch + tl.program_id(0).to(tl.int64) * FIXED_SCRATCH
    else:
        memory = scratch + tl.program_id(0).to(tl.int64) * LANES_SCRATCH
    table = (memory + TABLE_AT).to(tl.pointer_type(tl.int64))
    exponents = memory + EXPONENTS_AT
    mapped = (memory + MAPPED_AT).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, 32)
    block = tl.program_id(0)
    while block < n_blocks:
        start = block.to(tl.int64) * 4096
        n = tl.minimum(n_values - start, 4096).to(tl.int32)
        values = x + start
        entry = uniform(tl.load(index + block).to(tl.int32) & 0xFFFF)
        flags = uniform(tl.load(records + 2 * block))
        counts = uniform(tl.load(records + 2 * block + 1))
        words = entry & 0x3FFF
        kind = entry >> 14
        base = flags & 255
        single = (flags >> 8) & 1
        pruned = (flags >> 9) & 1
        unusual = (flags >> 10) & 1
        whole = (flags >> 11) & 3
        rest = (flags >> 13) & 7
        widest = (flags >> 16) & 31
        extent = counts & 0xFFFF
        m = (counts >> 16) & 0xFFFF
        place = block_place(index, sums, block)
        target = out + (blocks_at + 4 * place)
        if block == n_blocks - 1:
            tl.store(result, blocks_at + 4 * (place + words))
            tl.store(result + 1, tl.load(status).to(tl.int64))

        tl.debug_barrier()  # until all lanes are through with the scratch memory of the block before
        if kind == 1:
            _write_block_table(codes, block // 32, base, single, table)
            refill_at = 68 + whole * m
            down = FIELD - 8 * whole
            if CODING == 0:
                if (m == n) & (n == 4096):
                    write_full_planes(
                        values, target.to(tl.pointer_type(tl.int32)) + 17, exponents, unusual, whole, down,
                        keep, cut, up, odd, mask, MODE, ITEM, EXPONENT, FIELD, INTERPRET,
                    )  # fmt: skip
                else:
                    write_planes(
                        values, target + 68, exponents, n, m, unusual, whole, down, pruned, keep, cut, up, odd, mask,
                        MODE, ITEM, EXPONENT, FIELD, INTERPRET,
                    )  # fmt: skip
            tl.debug_barrier()
            states, escapes = lane, n * 0
            if (CODING == 0) & (rest > 0):
                states, escapes = _push_block(
                    values, floor + start, second + start, exponents, table, target + refill_at, n, rest, pruned,
                    down - rest, widest, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
                    CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, CODING == 0, INTERPRET,
                )  # fmt: skip
            else:
                states, escapes = _push_block(
                    values, floor + start, second + start, exponents, table, target + refill_at, n, rest, pruned,
                    down - rest, widest, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
                    CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, False, INTERPRET,
                )  # fmt: skip
            padding = -(refill_at + extent) & 3
            head = whole | (rest << 2) | (pruned << 5) | (escapes << 6) | (single << 7) | (base << 8) | (m << 16)
            tl.store(target.to(tl.pointer_type(tl.int32)), head | (padding << 30))
            tl.store(target.to(tl.pointer_type(tl.int16)) + 2 + lane, states.to(tl.int16))
            tl.store(target + refill_at + extent + lane, tl.zeros((32,), tl.uint8), mask=lane < padding)
        elif kind == 0:
            write_raw(
                values, floor + start, second + start, target, n, words, unusual,
                c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, ITEM, INTERPRET,
            )  # fmt: skip
        elif words > 0:
            if CODING == 1:
                _map_block(
                    values, floor + start, second + start, mapped, n, unusual,
                    c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET,
                )  # fmt: skip
                tl.debug_barrier()
                write_sparse(
                    mapped, floor + start, second + start, n, m, extent, target.to(tl.pointer_type(tl.int32)), words,
                    exponents.to(tl.pointer_type(tl.int16)), c0, c1, c2, shift, FLOOR,
                )  # fmt: skip
        block += tl.num_programs(0)
