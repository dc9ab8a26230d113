"""The sparse form of a block on the GPU: Elias-Fano positions, unary distances from the grid, mantissas."""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import uniform
from .gpu_mapping import kept_bits, load_floors

_TILE = tl.constexpr(256)
_ITEMS = tl.constexpr(64)

BAD_SPARSE = tl.constexpr(1 << 12)  # a status bit


@triton.jit
def low_width(m, n):
    """The largest l with m * 2^l <= n, for 1 <= m <= n <= 4096."""
    low = 0
    for candidate in tl.static_range(1, 13):
        low = tl.where((m << candidate) <= n, candidate, low)
    return low


@triton.jit
def _distance(e, f):
    """d of the format: how far the exponent lies above the floor."""
    return e - 127 - tl.maximum(f, -128)


@triton.jit
def sparse_costs(exponents, widths, floor, second, n, c0, c1, c2, shift, FLOOR: tl.constexpr):
    """D and the sum of all k."""
    distances = n * 0
    kept = n * 0
    for first in range(0, n, _TILE):
        i = first + tl.arange(0, _TILE)
        e = tl.load(exponents + i, mask=i < n, other=0).to(tl.int32)
        w = tl.load(widths + i, mask=i < n, other=0).to(tl.int32)
        f = load_floors(floor, second, i, i < n, c0, c1, c2, shift, FLOOR, True)
        distances += tl.sum(tl.where(e > 0, _distance(e, f), 0), 0)
        kept += tl.sum(tl.maximum(w - 1, 0), 0)
    return distances, kept


@triton.jit
def sparse_bits(n, m, distances, kept):
    """S of the format: the bits by which the form is chosen."""
    low = low_width(m, n)
    return 32 + m * (low + 3) + ((n - 1) >> low) + distances + kept


@triton.jit
def sparse_words(n, m, distances, kept):
    """The block's length in words: every part is padded to whole bytes, the block to 4."""
    low = low_width(m, n)
    size = 4 + (m * (low + 1) + 7) // 8 + (m + ((n - 1) >> low) + 7) // 8 + (m + distances + 7) // 8 + (kept + 7) // 8
    return (size + 3) // 4


@triton.jit
def _put_bits(words, at, value, width, mask):
    """Ors `width` bits into zeroed words at bit `at`."""
    shift = at & 31
    tl.atomic_or(words + (at >> 5), value << shift, mask=mask, sem="relaxed")
    # Shifts of 32 are undefined, hence in two steps; only reached with shift > 0.
    above = (value >> 1) >> (31 - shift)
    tl.atomic_or(words + (at >> 5) + 1, above, mask=mask & (shift + width > 32), sem="relaxed")


@triton.jit
def write_sparse(
    mapped, floor, second, n, m, distances, target, words, positions, c0, c1, c2, shift, FLOOR: tl.constexpr
):
    """Writes the block to `target` (int32 words). `positions`: int16 scratch for m entries."""
    for first in range(0, words, _TILE):
        at = first + tl.arange(0, _TILE)
        tl.store(target + at, tl.zeros((_TILE,), tl.int32), mask=at < words)
    before = n * 0
    for first in range(0, n, _TILE):
        i = first + tl.arange(0, _TILE)
        there = (tl.load(mapped + i, mask=i < n, other=0) != 0).to(tl.int32)
        rank = before + tl.cumsum(there, 0) - there
        tl.store(positions + rank, i.to(tl.int16), mask=there > 0)
        before += tl.sum(there, 0)
    tl.debug_barrier()

    low = low_width(m, n)
    highs_at = 32 + (m * (low + 1) + 7) // 8 * 8
    unary_at = highs_at + (m + ((n - 1) >> low) + 7) // 8 * 8
    mantissas_at = unary_at + (m + distances + 7) // 8 * 8
    tl.atomic_or(target, m | (distances << 16), sem="relaxed")
    for first in range(0, m, _ITEMS):
        i = first + tl.arange(0, _ITEMS)
        here = i < m
        p = tl.load(positions + i, mask=here, other=0).to(tl.int32)
        q = tl.load(mapped + p)
        f = load_floors(floor, second, p, here, c0, c1, c2, shift, FLOOR, True)
        e = (q >> 23) & 255
        d = tl.where(here, _distance(e, f), 0)
        k = tl.where(here, kept_bits(e, f), 0)
        sign = (q >> 31) & 1
        _put_bits(target, 32 + i * (low + 1), sign | ((p & ((1 << low) - 1)) << 1), low + 1, here)
        _put_bits(target, highs_at + (p >> low) + i, (i * 0) + 1, 1, here)
        _put_bits(target, unary_at + i + tl.cumsum(d, 0), (i * 0) + 1, 1, here)
        mantissa = (q & 0x7FFFFF) >> (23 - k)
        _put_bits(target, mantissas_at + tl.cumsum(k, 0) - k, mantissa, k, here & (k > 0))
        unary_at += tl.sum(d, 0)
        mantissas_at += tl.sum(k, 0)


# --- Decoder -----------------------------------------------------------------------------------------------------


@triton.jit
def _get_bits(data32, at, limit, mask):
    """The 32 bits from bit `at` on; words from `limit` on read as zero."""
    word = at >> 5
    shift = (at & 31).to(tl.uint32)
    low = tl.load(data32 + word, mask=mask & (word < limit), other=0).to(tl.uint32, bitcast=True)
    high = tl.load(data32 + word + 1, mask=mask & (word + 1 < limit), other=0).to(tl.uint32, bitcast=True)
    return ((low >> shift) | ((high << 1) << (31 - shift))).to(tl.int32, bitcast=True)


@triton.jit
def _padding(data32, end, bits, limit):
    """The padding bits of a part of `bits` bits that ends before bit `end`: up to the next whole byte."""
    spare = (8 - bits % 8) % 8
    word = tl.load(data32 + (end >> 5), mask=(spare > 0) & ((end >> 5) < limit), other=0)
    return (word >> (end & 31)) & ((1 << spare) - 1)


@triton.jit
def _ones(data32, at, bits, limit, found, room):
    """Lists the positions of the ones among `bits` bits from bit `at` on; returns their number."""
    before = 0
    for first in range(0, bits, _TILE):
        i = first + tl.arange(0, _TILE)
        here = (i < bits) & (((at + i) >> 5) < limit)
        word = tl.load(data32 + ((at + i) >> 5), mask=here, other=0)
        one = (word >> ((at + i) & 31)) & 1
        rank = before + tl.cumsum(one, 0) - one
        tl.store(found + rank, i, mask=(one > 0) & (rank < room))
        before += tl.sum(one, 0)
    return before


@triton.jit
def _store_values(out, at, value, mask, ADD: tl.constexpr):
    """Stores float32 bit patterns, or adds them as floats."""
    if ADD:
        there = tl.load(out + at, mask=mask, other=0).to(tl.float32, bitcast=True)
        value = (there + value.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    tl.store(out + at, value, mask=mask)


@triton.jit
def store_zeros(out, n, ADD: tl.constexpr):
    for first in range(0, n, _TILE):
        i = first + tl.arange(0, _TILE)
        _store_values(out, i, tl.zeros((_TILE,), tl.int32), i < n, ADD)


@triton.jit
def read_sparse(
    data32, limit, out, floor, second, start, n, highs, unary, c0, c1, c2, shift, FLOOR: tl.constexpr, ADD: tl.constexpr
):
    """Decodes a sparse block of `limit` > 0 words to `out`; `highs` and `unary` are int32 scratch for n entries each.

    Returns whether the block contradicts itself. Whatever it holds, no word outside of the block is read.
    """
    store_zeros(out, n, ADD)
    head = uniform(tl.load(data32))
    claimed = head & 0xFFFF
    distances = (head >> 16) & 0xFFFF
    wrong = (claimed == 0) | (claimed > n)
    m = tl.where(wrong, 0, claimed)
    low = low_width(m, n)
    high_bits = m + ((n - 1) >> low)
    highs_at = 32 + (m * (low + 1) + 7) // 8 * 8
    unary_at = highs_at + (high_bits + 7) // 8 * 8
    mantissas_at = unary_at + (m + distances + 7) // 8 * 8
    wrong |= _padding(data32, 32 + m * (low + 1), m * (low + 1), limit) != 0
    wrong |= _padding(data32, highs_at + high_bits, high_bits, limit) != 0
    wrong |= _padding(data32, unary_at + m + distances, m + distances, limit) != 0
    wrong |= _ones(data32, highs_at, high_bits, limit, highs, n) != m
    wrong |= _ones(data32, unary_at, m + distances, limit, unary, n) != m
    tl.debug_barrier()
    wrong |= tl.load(unary + m - 1, mask=m > 0, other=0) != m + distances - 1

    kept = 0
    faults = 0
    for first in range(0, m, _ITEMS):
        i = first + tl.arange(0, _ITEMS)
        here = i < m
        after = here & (i > 0)
        field = _get_bits(data32, 32 + i * (low + 1), limit, here) & ((2 << low) - 1)
        field_before = _get_bits(data32, 32 + (i - 1) * (low + 1), limit, after) & ((2 << low) - 1)
        p = ((tl.load(highs + i, mask=here, other=0) - i) << low) | (field >> 1)
        p_before = ((tl.load(highs + i - 1, mask=after, other=0) - (i - 1)) << low) | (field_before >> 1)
        ascending = (p >= 0) & (p < n) & ((p > p_before) | (i == 0))
        inside = here & ascending
        d = tl.load(unary + i, mask=here, other=0) - tl.load(unary + i - 1, mask=after, other=-1) - 1
        f = load_floors(floor, second, start + p, inside, c0, c1, c2, shift, FLOOR, True)
        e = d + 127 + tl.maximum(f, -128)
        faults |= tl.max(tl.where(here & ((~ascending) | (e < 1) | (e > 255)), 1, 0), 0)
        k = tl.where(here, kept_bits(e, f), 0)
        bits = _get_bits(data32, mantissas_at + kept + tl.cumsum(k, 0) - k, limit, here) & ((1 << k) - 1)
        kept += tl.sum(k, 0)
        value = ((field & 1) << 31) | ((e & 255) << 23) | (bits << (23 - k))
        _store_values(out, p, value, inside, ADD)
    # What is left behind the mantissas is less than a word, and zero.
    end = mantissas_at + kept
    wrong |= (end + 31) // 32 != limit
    last = tl.load(data32 + limit - 1)
    wrong |= ((end & 31) != 0) & ((last >> (end & 31)) != 0)
    return uniform(wrong.to(tl.int32)) | faults
