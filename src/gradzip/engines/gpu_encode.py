# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The encoder's kernel: one warp codes one block from statistics to final bytes.

The lanes write their refill bytes to a staging area of the program first, because only then the block's length is
known. Blocks claim their place in the body by decoupled look-back: a block publishes its own length, adds up the
lengths of the blocks before it until it meets one whose end is known, and publishes its own end. Blocks are taken
from a counter, so those before it are always done or running. Which program codes which block leaves no trace in
the output.

In coding 1 and 2 a program looks at its next block before it asks for the place of the last one: the answer is there
by then. Few programs run at a time, so that what they come back to is still in the caches, and within a program loads
run ahead of their use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import LOSSLESS, count_votes, prefetch, prefetch_floors
from .gpu_sparse import sparse_costs, sparse_words, write_sparse
from .gpu_statistics import block_statistics, symbols
from .gpu_tables import CODE_STRIDE

# A program's scratch memory, in bytes. Refill: at most 42 bits per value (paper mode), head and states before it.
TABLE_AT = tl.constexpr(0)  # 256 x [8]
WIDTHS_AT = tl.constexpr(2048)  # 4096 x [1]: lane bits of each value, coding 1 and 2
STAGE_AT = tl.constexpr(2048 + 4096)
MAPPED_AT = tl.constexpr(2048 + 4096 + 22528)  # 4096 x [4]: mapped values
SCRATCH_BYTES = tl.constexpr(2048 + 4096 + 22528 + 16384)

_ESCAPED = tl.constexpr(1 << 16)  # in the code half of a table entry
_WINDOW = tl.constexpr(128)  # claims that one look-back step reads
_PUBLISHED = tl.constexpr(1)
_RESOLVED = tl.constexpr(2)


@triton.jit
def _write_block_table(codes, segment, base, single, table):
    """For each exponent of this block what pushing it means: 2^length in the low word, the code in the high one."""
    e = tl.arange(0, 256)
    entry = tl.load(codes + segment * CODE_STRIDE + symbols(e, base))
    escape = tl.load(codes + segment * CODE_STRIDE + 256)
    code = tl.where(entry == 0, (escape & 255) | _ESCAPED, entry & 255)
    factor = 1 << tl.where(entry == 0, escape >> 8, entry >> 8)
    code = tl.where(single > 0, 0, code)
    factor = tl.where(single > 0, 1, factor)
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
    CODING: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes one row: phases 4 to 1 of the format. `entry` is the exponent's table entry; 1 pushes nothing.

    `escaped`: whether the row may have escapes; equal in all threads.
    """
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
    if escaped > 0:
        here = code >= _ESCAPED
        x, at = _push(x, at, tl.where(here, 256, 1), tl.where(here, e, 0), stage, lower, INTERPRET)
    return _push(x, at, entry.to(tl.int32), code & 255, stage, lower, INTERPRET)


@triton.jit
def _load_rows(source, widths, i, CODING: tl.constexpr):
    """Four rows of mapped values and lane bits."""
    q0 = tl.load(source + i).to(tl.int32)
    q1 = tl.load(source + i + 32).to(tl.int32)
    q2 = tl.load(source + i + 64).to(tl.int32)
    q3 = tl.load(source + i + 96).to(tl.int32)
    if CODING == 0:
        return q0, q1, q2, q3, q0, q1, q2, q3
    else:
        w0 = tl.load(widths + i).to(tl.int32)
        w1 = tl.load(widths + i + 32).to(tl.int32)
        w2 = tl.load(widths + i + 64).to(tl.int32)
        w3 = tl.load(widths + i + 96).to(tl.int32)
        return q0, q1, q2, q3, w0, w1, w2, w3


@triton.jit
def _push_rows(
    x, at, escapes, q0, q1, q2, q3, w0, w1, w2, w3, table, stage, lower, down, rest, pruned, chunks,
    CODING: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Pushes four rows, the last one first."""
    exponents: tl.constexpr = (1 << EXPONENT) - 1
    e0, e1 = (q0 >> (FIELD - 1)) & exponents, (q1 >> (FIELD - 1)) & exponents
    e2, e3 = (q2 >> (FIELD - 1)) & exponents, (q3 >> (FIELD - 1)) & exponents
    t0, t1, t2, t3 = tl.load(table + e0), tl.load(table + e1), tl.load(table + e2), tl.load(table + e3)
    escaped = tl.max(((t0 | t1 | t2 | t3) >> 32).to(tl.int32), 0) >> 16
    x, at = _push_row(
        x, at, q3, e3, w3, t3, escaped, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, INTERPRET
    )
    x, at = _push_row(
        x, at, q2, e2, w2, t2, escaped, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, INTERPRET
    )
    x, at = _push_row(
        x, at, q1, e1, w1, t1, escaped, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, INTERPRET
    )
    x, at = _push_row(
        x, at, q0, e0, w0, t0, escaped, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, INTERPRET
    )
    return x, at, escapes | escaped


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
    escapes = n * 0
    down = FIELD - width
    chunks = (widest + 7) // 8
    # Only the last block has rows that do not fill a group of eight.
    grouped = n // 256 * 256
    for back in range(0, (n - grouped + 31) // 32):
        i = ((n + 31) // 32 - 1 - back) * 32 + lane
        q = tl.load(source + i, mask=i < n, other=0).to(tl.int32)
        w = q
        if CODING > 0:
            w = tl.load(widths + i, mask=i < n, other=0).to(tl.int32)
        e = tl.where(i < n, (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1), -1)
        entry = tl.load(table + e, mask=i < n, other=1)
        escaped = tl.max((entry >> 32).to(tl.int32), 0) >> 16
        escapes |= escaped
        x, at = _push_row(
            x, at, q, e, w, entry, escaped, stage, lower, down, rest, pruned, chunks, CODING, EXPONENT, FIELD, INTERPRET
        )
    if grouped > 0:
        i = grouped - 128 + lane
        q0, q1, q2, q3, w0, w1, w2, w3 = _load_rows(source, widths, i, CODING)
        for _ in range(0, grouped, 256):
            # While four rows are coded, the next four are on their way.
            r0, r1, r2, r3, v0, v1, v2, v3 = _load_rows(source, widths, i - 128, CODING)
            x, at, escapes = _push_rows(
                x, at, escapes, q0, q1, q2, q3, w0, w1, w2, w3, table, stage, lower, down, rest, pruned, chunks,
                CODING, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
            i = tl.maximum(i - 256, lane)
            q0, q1, q2, q3, w0, w1, w2, w3 = _load_rows(source, widths, i, CODING)
            x, at, escapes = _push_rows(
                x, at, escapes, r0, r1, r2, r3, v0, v1, v2, v3, table, stage, lower, down, rest, pruned, chunks,
                CODING, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
    return x, tl.max(at, 0), escapes


# --- The place in the body ---------------------------------------------------------------------------------------


@triton.jit
def _publish(claims, block, words):
    tl.atomic_xchg(claims + block, (words.to(tl.int64) << 2) | _PUBLISHED, sem="relaxed")


@triton.jit
def _find_place(claims, block, words):
    """The words of all blocks before this one, whose length has been published; publishes its end."""
    start = words.to(tl.int64) * 0
    place = tl.arange(0, _WINDOW)
    last = block - 1
    looking = (block > 0).to(tl.int32)
    while looking > 0:
        number = last - place
        claim = tl.load(claims + number, mask=number >= 0, other=_RESOLVED, volatile=True)
        state = (claim & 3).to(tl.int32)
        nearest = tl.min(tl.where(state == _RESOLVED, place, _WINDOW), 0)
        missing = tl.min(tl.where(state == 0, place, _WINDOW), 0)
        if missing > nearest:
            start += tl.sum(tl.where(place <= nearest, claim >> 2, 0), 0)
            looking = block * 0
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
def _plane_words(kept, J: tl.constexpr):
    """Byte J of each row's four values as one word."""
    return tl.sum(((kept >> (8 * J)) & 255) << (8 * tl.arange(0, 4)[None, :]), 1)


@triton.jit
def _write_plane_pair(q, r, place, whole, down, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    a = _kept_part(q.to(tl.int32), down, EXPONENT, FIELD)
    b = _kept_part(r.to(tl.int32), down, EXPONENT, FIELD)
    tl.store(place, _plane_words(a, 0))
    tl.store(place + 32, _plane_words(b, 0))
    if whole > 1:
        tl.store(place + 1024, _plane_words(a, 1))
        tl.store(place + 1024 + 32, _plane_words(b, 1))
    if whole > 2:
        tl.store(place + 2048, _plane_words(a, 2))
        tl.store(place + 2048 + 32, _plane_words(b, 2))


@triton.jit
def _write_full_planes(source, target32, whole, down, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    """The planes of whole bytes of a full block whose values all have a field; words from plane 0 on."""
    row = tl.arange(0, 32)
    tile = 4 * row[:, None] + tl.arange(0, 4)[None, :]
    for first in range(0, 4096, 512):
        place = target32 + first // 4 + row
        q, r = tl.load(source + first + tile), tl.load(source + first + 128 + tile)
        s, t = tl.load(source + first + 256 + tile), tl.load(source + first + 384 + tile)
        _write_plane_pair(q, r, place, whole, down, EXPONENT, FIELD)
        _write_plane_pair(s, t, place + 64, whole, down, EXPONENT, FIELD)


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
    """Copies words; eight rows at a time without masks, then the rest."""
    lane = tl.arange(0, 32)
    full = words // 256 * 256
    for first in range(0, full, 256):
        i = first + lane
        a, b, c, d = tl.load(source + i), tl.load(source + i + 32), tl.load(source + i + 64), tl.load(source + i + 96)
        i += 128
        e, f, g, h = tl.load(source + i), tl.load(source + i + 32), tl.load(source + i + 64), tl.load(source + i + 96)
        tl.store(target + i, e)
        tl.store(target + i + 32, f)
        tl.store(target + i + 64, g)
        tl.store(target + i + 96, h)
        i -= 128
        tl.store(target + i, a)
        tl.store(target + i + 32, b)
        tl.store(target + i + 64, c)
        tl.store(target + i + 96, d)
    for first in range(full, words, 32):
        here = first + lane < words
        tl.store(target + first + lane, tl.load(source + first + lane, mask=here, other=0), mask=here)


@triton.jit
def _write_block(
    source, stage, target, n, kind, words, whole, m, pruned,
    CODING: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Writes a block to its final place. Coding 1 and 2 have staged it whole, coding 0 without planes or raw values."""
    lane = tl.arange(0, 32)
    stage32 = stage.to(tl.pointer_type(tl.int32))
    target32 = target.to(tl.pointer_type(tl.int32))
    if CODING > 0:
        _copy_words(stage32, target32, words)
    elif kind == 0:
        if ITEM == 4:
            _copy_words(source, target32, words)
        else:
            target16 = target.to(tl.pointer_type(tl.int16))
            for first in range(0, n + 1, 32):  # up to one zero as padding
                i = first + lane
                tl.store(target16 + i, tl.load(source + i, mask=i < n, other=0), mask=i < 2 * words)
    elif words > 0:
        down = FIELD - whole * 8
        if whole > 0:
            if (m == n) & (n == 4096):
                _write_full_planes(source, target32 + 17, whole, down, EXPONENT, FIELD)
            else:
                _write_planes(source, target + 68, n, m, whole, down, pruned, EXPONENT, FIELD, INTERPRET)
        # Head and states; refill bytes up to a word boundary; words.
        _copy_words(stage32, target32, 17)
        refill_at = 68 + whole * m
        staged = 68 + refill_at % 4
        ahead = -refill_at & 3
        loose = (lane < ahead) & (refill_at + lane < 4 * words)
        tl.store(target + refill_at + lane, tl.load(stage + staged + lane, mask=loose, other=0), mask=loose)
        skip = (refill_at + ahead) // 4
        _copy_words(stage32 + (staged + ahead) // 4, target32 + skip, words - skip)


@triton.jit
def _finish(
    source, stage, out, out16, claims, status, result, block, n_blocks, index_at, blocks_at,
    n, kind, words, whole, m, pruned,
    CODING: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Finds the place of a block whose length has been published, and writes it there."""
    place = _find_place(claims, block, words)
    tl.store(out16 + index_at // 2 + block, (words | (kind << 14)).to(tl.int16))
    target = out + (blocks_at + 4 * place)
    _write_block(source, stage, target, n, kind, words, whole, m, pruned, CODING, ITEM, EXPONENT, FIELD, INTERPRET)
    if block == n_blocks - 1:
        tl.store(result, blocks_at + 4 * (place + words))
        tl.store(result + 1, tl.load(status).to(tl.int64))


# --- A block from statistics to staged bytes ---------------------------------------------------------------------


@triton.jit
def _field_width(union, ITEM: tl.constexpr, FIELD: tl.constexpr):
    """w of the format: how many bits of each field are kept."""
    mantissas = union & ((1 << (FIELD - 1)) - 1)
    width = (union >> (ITEM * 8 - 1)) & 1  # if no mantissa has a bit, the sign alone
    for bit in tl.static_range(FIELD - 1):
        width = tl.where((mantissas & -mantissas) == (1 << bit), FIELD - bit, width)
    return width


@triton.jit
def _code_block(
    source, widths, table, stage, codes, floor, second, start, n, segment, nonzero, base, single, union, widest, pruned,
    c0, c1, c2, shift,
    CODING: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Chooses the block's form and stages its bytes. Returns kind, words, whole bytes per field, number of fields."""
    lane = tl.arange(0, 32)
    stage32 = stage.to(tl.pointer_type(tl.int32))
    kind = n * 0 + 2
    words = n * 0
    whole = n * 0
    m = nonzero
    if union != 0:
        kind = n * 0 + 1
        width = n * 0
        if CODING == 0:
            width = _field_width(union, ITEM, FIELD)
            whole = width // 8
            m = tl.where(pruned > 0, nonzero, n)
        rest = width % 8
        if CODING == 1:
            if 2 * nonzero <= n:
                distances, kept, bits, dense_bits = sparse_costs(
                    source, widths, codes, segment, base, single, floor, second, start, n, nonzero,
                    c0, c1, c2, shift, FLOOR,
                )  # fmt: skip
                words = sparse_words(n, nonzero, distances, kept)
                if (distances <= 65535) & (bits < dense_bits) & (words < n):
                    kind = n * 0 + 2
                    tl.debug_barrier()
                    write_sparse(
                        source, floor, second, start, n, nonzero, distances, stage32, words,
                        widths.to(tl.pointer_type(tl.int16)), c0, c1, c2, shift, FLOOR,
                    )  # fmt: skip
        if kind == 1:
            _write_block_table(codes, segment, base, single, table)
            tl.debug_barrier()
            refill_at = 68 + whole * m
            staged = 68 + refill_at % 4  # the staged refill stream has the alignment of its final place
            states, refill, escapes = _code_lanes(
                source, widths, table, stage + staged, n, rest, pruned, width, widest, CODING, EXPONENT, FIELD, INTERPRET
            )
            words = (refill_at + refill + 3) // 4
            raw_words = (n * ITEM + 3) // 4
            if words < raw_words:
                padding = 4 * words - refill_at - refill
                head = whole | (rest << 2) | (pruned << 5) | (escapes << 6) | (single << 7) | (base << 8) | (m << 16)
                tl.store(stage32, head | (padding << 30))
                tl.store(stage.to(tl.pointer_type(tl.int16)) + 2 + lane, states.to(tl.int16))
                tl.store(stage + staged + refill + lane, tl.zeros((32,), tl.uint8), mask=lane < padding)
            else:
                kind = n * 0
                words = raw_words
                if CODING > 0:
                    tl.debug_barrier()
                    _copy_words(source, stage32, words)
    return kind, words, whole, m


_NUMBERS = ["n_values", "n_blocks", "index_at", "blocks_at", "c0", "c1", "c2", "shift", "keep", "ahead"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["out", "out16", "result"])
def encode_blocks(
    x, floor, second, codes, out, out16, claims, counters, status, result, scratch,
    n_values, n_blocks, index_at, blocks_at, c0, c1, c2, shift, keep, ahead,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Encodes all blocks; `ahead`: how many blocks ahead of its own a program has input brought to the L2 cache."""
    memory = scratch + tl.program_id(0).to(tl.int64) * SCRATCH_BYTES
    table = (memory + TABLE_AT).to(tl.pointer_type(tl.int64))
    widths = (memory + WIDTHS_AT).to(tl.pointer_type(tl.int8))
    stage = (memory + STAGE_AT).to(tl.pointer_type(tl.uint8))

    block = tl.atomic_add(counters, 1, sem="relaxed")
    previous = block * 0 - 1
    kind, words = previous, previous
    while (block < n_blocks) | (previous >= 0):
        start = block.to(tl.int64) * 4096
        n = tl.minimum(n_values - start, 4096).to(tl.int32)
        if MODE == LOSSLESS:
            source = x + start
            mapped = source
        else:
            mapped = (memory + MAPPED_AT).to(tl.pointer_type(tl.int32))
            source = mapped
        nonzero, base, single, union, widest, pruned = block * 0, block * 0, block * 0, block * 0, block * 0, block * 0
        if block < n_blocks:
            if not INTERPRET:
                if block + ahead < n_blocks:
                    later = start + ahead.to(tl.int64) * 4096
                    for part in tl.static_range(0, 4096 * ITEM, 4096):
                        prefetch(x, later * ITEM + part + 128 * tl.arange(0, 32), n_values * ITEM)
                    prefetch_floors(floor, second, later, n_values, FLOOR)
            nonzero, base, single, union, widest, pruned = block_statistics(
                x, floor, second, mapped, widths, source, start, n, c0, c1, c2, shift, keep,
                CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
        if previous >= 0:
            _finish(
                source, stage, out, out16, claims, status, result, previous, n_blocks, index_at, blocks_at,
                n, kind, words, words, words, words, CODING, ITEM, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
        previous = block * 0 - 1
        if block < n_blocks:
            tl.debug_barrier()
            kind, words, whole, m = _code_block(
                source, widths, table, stage, codes, floor, second, start, n, block // 32,
                nonzero, base, single, union, widest, pruned, c0, c1, c2, shift,
                CODING, FLOOR, ITEM, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
            _publish(claims, block, words)
            tl.debug_barrier()
            if CODING == 0:
                # The planes are made from values that are still in the L1 cache.
                _finish(
                    source, stage, out, out16, claims, status, result, block, n_blocks, index_at, blocks_at,
                    n, kind, words, whole, m, pruned, CODING, ITEM, EXPONENT, FIELD, INTERPRET,
                )  # fmt: skip
            else:
                previous = block
            block = tl.atomic_add(counters, 1, sem="relaxed")
