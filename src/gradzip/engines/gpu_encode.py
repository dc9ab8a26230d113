# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The encoder's kernel: one warp codes one block from statistics to final bytes, reading its input once.

The lanes write their refill bytes to a staging area of the program first, because only then the block's length is
known. Blocks claim their place in the body by decoupled look-back: a block publishes its own length, adds up the
lengths of the blocks before it until it meets one whose end is known, and publishes its own end. Blocks are taken
from a counter, so those before it are always done or running. Which program codes which block leaves no trace in
the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import (
    LOSSLESS,
    NEAR_GRID,
    PAPER_LEVEL,
    count_votes,
    load,
    load_floors,
    map_keep,
    map_near,
    map_paper,
    or_of_all,
)
from .gpu_sparse import sparse_costs, sparse_words, write_sparse
from .gpu_tables import CODE_STRIDE

# A program's scratch memory, in bytes. Refill: at most 42 bits per value (paper mode), head and states before it.
TABLE_AT = tl.constexpr(0)  # 256 x [8]
MAPPED_AT = tl.constexpr(2048)  # 4096 x [4]: mapped values
WIDTHS_AT = tl.constexpr(2048 + 16384)  # 4096 x [1]: lane bits of each value, coding 1 and 2
STAGE_AT = tl.constexpr(2048 + 16384 + 4096)
SCRATCH_BYTES = tl.constexpr(2048 + 16384 + 4096 + 22528)

_ESCAPED = tl.constexpr(1 << 16)  # in the code half of a table entry
_WINDOW = tl.constexpr(128)  # claims that one look-back step reads
_PUBLISHED = tl.constexpr(1)
_RESOLVED = tl.constexpr(2)


# --- Statistics --------------------------------------------------------------------------------------------------


@triton.jit
def _load_values(
    x, floor, second, at, mask, c0, c1, c2, shift,
    MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Bit patterns as int32, and floors (where there are none: 0)."""
    v = load(x + at, mask, MASKED).to(tl.int32)
    if ITEM == 2:
        v = v & 0xFFFF
    if (MODE == NEAR_GRID) | (MODE == PAPER_LEVEL):
        return v, load_floors(floor, second, at, mask, c0, c1, c2, shift, FLOOR, MASKED)
    else:
        return v, v * 0


@triton.jit
def _map_values(v, f, highest_floor, keep, MODE: tl.constexpr):
    """Mapped bit patterns, and lane bits in coding 1 and 2 (else 0)."""
    if MODE == LOSSLESS:
        return v, v * 0
    elif MODE == NEAR_GRID:
        return map_near(v, f, highest_floor)
    elif MODE == PAPER_LEVEL:
        return map_paper(v, f)
    else:
        return map_keep(v, keep, MODE), v * 0


@triton.jit
def _pair_statistics(
    x, floor, second, mapped, widths, start, first, n, total, lowest, highest, union, widest, c0, c1, c2, shift, keep,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Maps 256 values and adds them to the running statistics. Each thread has four neighbours of either half."""
    exponents: tl.constexpr = (1 << EXPONENT) - 1
    i = first + 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    j = i + 128
    # All loads come before the first store, which might alias them for all the compiler knows.
    v, f = _load_values(x, floor, second, start + i, i < n, c0, c1, c2, shift, MODE, FLOOR, ITEM, MASKED)
    v2, f2 = _load_values(x, floor, second, start + j, j < n, c0, c1, c2, shift, MODE, FLOOR, ITEM, MASKED)
    top = n * 0
    if MODE == NEAR_GRID:
        top = tl.max(tl.max(tl.maximum(f, f2), 1), 0)
    q, w = _map_values(v, f, top, keep, MODE)
    q2, w2 = _map_values(v2, f2, top, keep, MODE)
    if MODE != LOSSLESS:
        tl.store(mapped + i, q)
        tl.store(mapped + j, q2)
    if CODING > 0:
        tl.store(widths + i, w.to(tl.int8))
        tl.store(widths + j, w2.to(tl.int8))
        widest = tl.maximum(widest, tl.maximum(w, w2))
    else:
        union |= q | q2
    e = (q >> (FIELD - 1)) & exponents
    e2 = (q2 >> (FIELD - 1)) & exponents
    total += e + e2
    highest = tl.maximum(highest, tl.maximum(e, e2))
    if MASKED:
        lowest = tl.minimum(lowest, tl.minimum(tl.where(i < n, e, exponents), tl.where(j < n, e2, exponents)))
    else:
        lowest = tl.minimum(lowest, tl.minimum(e, e2))
    return total, lowest, highest, union, widest


@triton.jit
def _count_zeros(source, n, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    """How many values have exponent 0, and whether any of them is not +0."""
    zeros = tl.zeros((32, 4), tl.int32)
    loose = zeros
    for first in range(0, n, 128):
        i = first + 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
        q = tl.load(source + i, mask=i < n, other=-1).to(tl.int32)
        none = ((q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)) == 0
        zeros += none.to(tl.int32)
        loose |= tl.where(none, q, 0)
    return tl.sum(tl.sum(zeros, 1), 0), tl.max(tl.max((loose != 0).to(tl.int32), 1), 0)


@triton.jit
def _block_statistics(
    x, floor, second, mapped, widths, source, start, n, c0, c1, c2, shift, keep,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """What a block's form depends on; mapped values and lane bits go to scratch memory.

    Returns the number of values with exponent > 0, the base, whether the block is single, the or of all bit patterns
    (coding 0, else the largest exponent), the most lane bits, and whether all values with exponent 0 are +0.
    """
    total = tl.zeros((32, 4), tl.int32)
    lowest = total + 255
    highest = total
    union = total
    widest = total
    full = n // 512 * 512
    for first in range(0, full, 512):
        for part in tl.static_range(0, 512, 256):
            total, lowest, highest, union, widest = _pair_statistics(
                x, floor, second, mapped, widths, start, first + part, n, total, lowest, highest, union, widest,
                c0, c1, c2, shift, keep, CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, False,
            )  # fmt: skip
    for first in range(full, n, 256):
        total, lowest, highest, union, widest = _pair_statistics(
            x, floor, second, mapped, widths, start, first, n, total, lowest, highest, union, widest,
            c0, c1, c2, shift, keep, CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, True,
        )  # fmt: skip
    maximum = tl.max(tl.max(highest, 1), 0)
    minimum = tl.min(tl.min(lowest, 1), 0)
    nonzero = n
    pruned = n * 0 + 1
    if minimum == 0:
        if MODE != LOSSLESS:
            tl.debug_barrier()
        zeros, loose = _count_zeros(source, n, EXPONENT, FIELD)
        nonzero = n - zeros
        pruned = 1 - loose
    single = minimum == maximum
    base = tl.where(single, maximum, _mean(tl.sum(tl.sum(total, 1), 0), nonzero))
    if CODING == 0:
        return nonzero, base, single, or_of_all(union, INTERPRET), n * 0, pruned
    else:
        return nonzero, base, single, maximum, tl.max(tl.max(widest, 1), 0), pruned


@triton.jit
def _mean(total, nonzero):
    """The rounded mean of the non-zero exponents."""
    return tl.where(nonzero > 0, (total + nonzero // 2) // tl.maximum(nonzero, 1), 0)


@triton.jit
def _symbols(e, base):
    return tl.where(e == 0, 0, (e - base - (e <= base).to(tl.int32)) & 255)


@triton.jit
def _write_block_table(codes, segment, base, single, table):
    """For each exponent of this block what pushing it means: 2^length in the low word, the code in the high one."""
    e = tl.arange(0, 256)
    entry = tl.load(codes + segment * CODE_STRIDE + _symbols(e, base))
    escape = tl.load(codes + segment * CODE_STRIDE + 256)
    code = tl.where(entry == 0, (escape & 255) | _ESCAPED, entry & 255)
    factor = 1 << tl.where(entry == 0, escape >> 8, entry >> 8)
    code = tl.where(single, 0, code)
    factor = tl.where(single, 1, factor)
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
    x, at, q, e, width, entry, stage, lower, down, rest, pruned, chunks,
    CODING: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, ESCAPES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes one row: phases 4 to 1 of the format. `entry` is the exponent's table entry; 1 pushes nothing."""
    if CODING == 0:
        if rest > 0:
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
    if ESCAPES:
        escaped = code >= _ESCAPED
        x, at = _push(x, at, tl.where(escaped, 256, 1), tl.where(escaped, e, 0), stage, lower, INTERPRET)
        code = code & 255
    return _push(x, at, entry.to(tl.int32), code, stage, lower, INTERPRET)


@triton.jit
def _load_row(source, widths, table, i, mask, CODING: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        q = tl.load(source + i, mask=mask, other=0).to(tl.int32)
        e = tl.where(mask, (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1), -1)
        entry = tl.load(table + e, mask=mask, other=1)
    else:
        q = tl.load(source + i).to(tl.int32)
        e = (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
        entry = tl.load(table + e)
    if CODING == 0:
        width = q
    else:
        if MASKED:
            width = tl.load(widths + i, mask=mask, other=0).to(tl.int32)
        else:
            width = tl.load(widths + i).to(tl.int32)
    return q, e, width, entry


@triton.jit
def _code_lanes(
    source, widths, table, stage, n, rest, pruned, width, widest,
    CODING: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes a whole block, rows last to first; returns final states, refill bytes and whether escapes occur."""
    lane = tl.arange(0, 32)
    lower = (1 << lane) - 1
    x = tl.full((32,), 256, tl.int32)
    at = tl.full((32,), 0, tl.int32)
    escapes = 0
    down = FIELD - width
    chunks = (widest + 7) // 8
    # Rows that do not fill a group of four are at the end of the last block alone.
    groups = n // 128
    for back in range(0, (n - groups * 128 + 31) // 32):
        row = (n + 31) // 32 - 1 - back
        i = row * 32 + lane
        q, e, w, entry = _load_row(source, widths, table, i, i < n, CODING, EXPONENT, FIELD, True)
        escapes |= tl.max((entry >> 32).to(tl.int32), 0) >> 16
        x, at = _push_row(x, at, q, e, w, entry, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, True, INTERPRET)
    for back in range(0, groups):
        i = (groups - 1 - back) * 128 + lane
        q0, e0, w0, t0 = _load_row(source, widths, table, i, i < n, CODING, EXPONENT, FIELD, False)
        q1, e1, w1, t1 = _load_row(source, widths, table, i + 32, i < n, CODING, EXPONENT, FIELD, False)
        q2, e2, w2, t2 = _load_row(source, widths, table, i + 64, i < n, CODING, EXPONENT, FIELD, False)
        q3, e3, w3, t3 = _load_row(source, widths, table, i + 96, i < n, CODING, EXPONENT, FIELD, False)
        escaped = tl.max(((t0 | t1 | t2 | t3) >> 32).to(tl.int32), 0) >> 16
        if escaped > 0:
            escapes = 1
            x, at = _push_row(x, at, q3, e3, w3, t3, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, True, INTERPRET)
            x, at = _push_row(x, at, q2, e2, w2, t2, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, True, INTERPRET)
            x, at = _push_row(x, at, q1, e1, w1, t1, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, True, INTERPRET)
            x, at = _push_row(x, at, q0, e0, w0, t0, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, True, INTERPRET)
        else:
            x, at = _push_row(x, at, q3, e3, w3, t3, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, False, INTERPRET)
            x, at = _push_row(x, at, q2, e2, w2, t2, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, False, INTERPRET)
            x, at = _push_row(x, at, q1, e1, w1, t1, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, False, INTERPRET)
            x, at = _push_row(x, at, q0, e0, w0, t0, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, False, INTERPRET)
    return x, tl.max(at, 0), escapes


# --- The place in the body ---------------------------------------------------------------------------------------


@triton.jit
def _claim(claims, block, words):
    """Publishes this block's length and returns the words of all blocks before it."""
    start = words.to(tl.int64) * 0
    if block > 0:
        tl.atomic_xchg(claims + block, (words.to(tl.int64) << 2) | _PUBLISHED, sem="relaxed")
        place = tl.arange(0, _WINDOW)
        last = block - 1
        looking = 1
        while looking > 0:
            number = last - place
            claim = tl.load(claims + number, mask=number >= 0, other=_RESOLVED, volatile=True)
            state = (claim & 3).to(tl.int32)
            nearest = tl.min(tl.where(state == _RESOLVED, place, _WINDOW), 0)
            missing = tl.min(tl.where(state == 0, place, _WINDOW), 0)
            if missing > nearest:
                start += tl.sum(tl.where(place <= nearest, claim >> 2, 0), 0)
                looking = 0
            else:
                if missing == _WINDOW:  # and no end in sight: go on before this window
                    start += tl.sum(claim >> 2, 0)
                    last -= _WINDOW
    tl.atomic_xchg(claims + block, ((start + words) << 2) | _RESOLVED, sem="relaxed")
    return start


# --- Final bytes -------------------------------------------------------------------------------------------------


@triton.jit
def _kept_part(q, down, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    """The field's bits from bit `down` on."""
    field = ((q >> EXPONENT) & (1 << (FIELD - 1))) | (q & ((1 << (FIELD - 1)) - 1))
    return field >> down


@triton.jit
def _write_full_planes(source, target32, n, whole, down, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    """The planes of whole bytes where every value has a field and n is a multiple of 128; words from plane 0 on."""
    row = tl.arange(0, 32)
    column = tl.arange(0, 4)
    for first in range(0, n, 128):
        q = tl.load(source + first + 4 * row[:, None] + column[None, :]).to(tl.int32)
        kept = _kept_part(q, down, EXPONENT, FIELD)
        place = target32 + first // 4 + row
        tl.store(place, tl.sum((kept & 255) << (8 * column[None, :]), 1))
        if whole > 1:
            tl.store(place + n // 4, tl.sum(((kept >> 8) & 255) << (8 * column[None, :]), 1))
        if whole > 2:
            tl.store(place + n // 2, tl.sum(((kept >> 16) & 255) << (8 * column[None, :]), 1))


@triton.jit
def _write_planes(
    source, target, n, m, whole, down, pruned, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr
):
    """The planes of whole bytes in general: bytes from plane 0 on, values without a field left out."""
    lane = tl.arange(0, 32)
    lower = (1 << lane) - 1
    before = tl.full((32,), 0, tl.int32)
    for first in range(0, n, 32):
        i = first + lane
        q = tl.load(source + i, mask=i < n, other=0).to(tl.int32)
        kept = _kept_part(q, down, EXPONENT, FIELD)
        e = tl.where(i < n, (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1), -1)
        has_field = e >= pruned
        rank, count = count_votes(has_field, lower, INTERPRET)
        place = target + (before + rank)
        before += count
        tl.store(place, (kept & 255).to(tl.uint8), mask=has_field)
        if whole > 1:
            tl.store(place + m, ((kept >> 8) & 255).to(tl.uint8), mask=has_field)
        if whole > 2:
            tl.store(place + 2 * m, ((kept >> 16) & 255).to(tl.uint8), mask=has_field)


@triton.jit
def _copy_words(source, target, words):
    """Copies words; four rows at a time without masks, then the rest."""
    lane = tl.arange(0, 32)
    full = words // 128 * 128
    for first in range(0, full, 128):
        a = tl.load(source + first + lane)
        b = tl.load(source + first + lane + 32)
        c = tl.load(source + first + lane + 64)
        d = tl.load(source + first + lane + 96)
        tl.store(target + first + lane, a)
        tl.store(target + first + lane + 32, b)
        tl.store(target + first + lane + 64, c)
        tl.store(target + first + lane + 96, d)
    for first in range(full, words, 32):
        here = first + lane < words
        tl.store(target + first + lane, tl.load(source + first + lane, mask=here, other=0), mask=here)


_NUMBERS = ["n_values", "n_blocks", "index_at", "blocks_at", "c0", "c1", "c2", "shift", "keep"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["out", "out16", "out32", "result"])
def encode_blocks(
    x, floor, second, codes, out, out16, out32, claims, counters, status, result, scratch,
    n_values, n_blocks, index_at, blocks_at, c0, c1, c2, shift, keep,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    memory = scratch + tl.program_id(0).to(tl.int64) * SCRATCH_BYTES
    table = (memory + TABLE_AT).to(tl.pointer_type(tl.int64))
    mapped = (memory + MAPPED_AT).to(tl.pointer_type(tl.int32))
    widths = (memory + WIDTHS_AT).to(tl.pointer_type(tl.int8))
    stage = (memory + STAGE_AT).to(tl.pointer_type(tl.uint8))
    stage32 = (memory + STAGE_AT).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, 32)

    block = tl.atomic_add(counters, 1, sem="relaxed")
    while block < n_blocks:
        start = block.to(tl.int64) * 4096
        n = tl.minimum(n_values - start, 4096).to(tl.int32)
        segment = block // 32
        if MODE == LOSSLESS:
            source = x + start
        else:
            source = mapped
        nonzero, base, single, union, widest, pruned = _block_statistics(
            x, floor, second, mapped, widths, source, start, n, c0, c1, c2, shift, keep,
            CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, INTERPRET,
        )  # fmt: skip
        kind = n * 0 + 2
        words = n * 0
        whole = n * 0
        width = n * 0
        refill_at = n * 0
        m = nonzero + 0
        if union != 0:
            _write_block_table(codes, segment, base, single, table)
            tl.debug_barrier()
            if CODING == 0:
                mantissas = union & ((1 << (FIELD - 1)) - 1)
                width = (union >> (ITEM * 8 - 1)) & 1  # if no mantissa has a bit, the sign alone
                for bit in tl.static_range(FIELD - 1):
                    width = tl.where((mantissas & -mantissas) == (1 << bit), FIELD - bit, width)
                whole = width // 8
                m = tl.where(pruned > 0, nonzero, n)
            rest = width % 8
            kind = n * 0 + 1
            if CODING == 1:
                if 2 * nonzero <= n:
                    distances, kept, bits, dense_bits = sparse_costs(
                        mapped, widths, codes, segment, base, single, floor, second, start, n, nonzero,
                        c0, c1, c2, shift, FLOOR,
                    )  # fmt: skip
                    words = sparse_words(n, nonzero, distances, kept)
                    if (distances <= 65535) & (bits < dense_bits) & (words < n):
                        kind = n * 0 + 2
                        tl.debug_barrier()
                        write_sparse(
                            mapped, floor, second, start, n, nonzero, distances, stage32, words,
                            widths.to(tl.pointer_type(tl.int16)), c0, c1, c2, shift, FLOOR,
                        )  # fmt: skip
            if kind == 1:
                skew = (whole * m) % 4  # the staged refill stream has the alignment of its final place
                states, refill, escapes = _code_lanes(
                    source, widths, table, stage + 68 + skew, n, rest, pruned, width, widest,
                    CODING, EXPONENT, FIELD, INTERPRET,
                )  # fmt: skip
                refill_at = 68 + whole * m
                end = refill_at + refill
                words = (end + 3) // 4
                raw_words = (n * ITEM + 3) // 4
                if words < raw_words:
                    padding = words * 4 - end
                    head = whole | (rest << 2) | (pruned << 5) | (escapes << 6) | (single.to(tl.int32) << 7)
                    head |= (base << 8) | (m << 16) | (padding << 30)
                    tl.store(stage32, head)
                    tl.store(stage.to(tl.pointer_type(tl.int16)) + 2 + lane, states.to(tl.int16))
                    tl.store(stage + 68 + skew + refill + lane, tl.zeros((32,), tl.uint8), mask=lane < padding)
                else:
                    kind = n * 0
                    words = raw_words
            tl.debug_barrier()

        place = _claim(claims, block, words)
        tl.store(out16 + index_at // 2 + block, (words | (kind << 14)).to(tl.int16))
        target32 = out32 + (blocks_at // 4 + place)
        target = out + (blocks_at + 4 * place)
        if kind == 0:
            if ITEM == 4:
                _copy_words(source, target32, words)
            else:
                target16 = target.to(tl.pointer_type(tl.int16))
                for first in range(0, n + 1, 32):  # up to one zero as padding
                    i = first + lane
                    tl.store(target16 + i, tl.load(source + i, mask=i < n, other=0), mask=i < 2 * words)
        else:
            if (CODING == 0) & (words > 0):
                down = FIELD - whole * 8
                if m == n and n % 128 == 0:
                    if whole > 0:
                        _write_full_planes(source, target32 + 17, n, whole, down, EXPONENT, FIELD)
                elif whole > 0:
                    _write_planes(source, target + 68, n, m, whole, down, pruned, EXPONENT, FIELD, INTERPRET)
                # Head and states; refill bytes up to a word boundary; words.
                _copy_words(stage32, target32, 17)
                staged = 68 + refill_at % 4
                ahead = -refill_at & 3
                loose = (lane < ahead) & (refill_at + lane < 4 * words)
                tl.store(target + refill_at + lane, tl.load(stage + staged + lane, mask=loose, other=0), mask=loose)
                skip = (refill_at + ahead) // 4
                _copy_words(stage32 + (staged + ahead) // 4, target32 + skip, words - skip)
            else:
                _copy_words(stage32, target32, words)
        if block == n_blocks - 1:
            tl.store(result, blocks_at + 4 * (place + words))
            tl.store(result + 1, tl.load(status).to(tl.int64))
        tl.debug_barrier()
        block = tl.atomic_add(counters, 1, sem="relaxed")


# --- Histograms --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_values", "c0", "c1", "c2", "shift", "keep"])
def sample_symbols(
    x, floor, second, counts, n_values, c0, c1, c2, shift, keep,
    MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
):  # fmt: skip
    """One program per block: adds the symbols of every 16th row to its segment's counts."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * 4096
    i = tl.arange(0, 256)
    i = i // 32 * 512 + i % 32
    here = start + i < n_values
    v, f = _load_values(x, floor, second, start + i, here, c0, c1, c2, shift, MODE, FLOOR, ITEM, True)
    q, _ = _map_values(v, f, tl.max(f, 0), keep, MODE)
    e = (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
    nonzero = tl.sum((e > 0).to(tl.int32), 0)
    if nonzero > 0:
        bins = tl.histogram(_symbols(e, _mean(tl.sum(e, 0), nonzero)), 256, mask=here)
        tl.atomic_add(counts + block // 32 * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")
