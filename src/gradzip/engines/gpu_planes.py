"""The encoder's planes and raw blocks: what coding 0 keeps of sign and mantissa in whole bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import count_votes
from .gpu_mapping import load_values, map_values


@triton.jit
def load_mapped(
    x, i, present, unusual, keep, cut, up, odd, mask,
    MODE: tl.constexpr, ITEM: tl.constexpr, MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Mapped values in coding 0."""
    v, _, _ = load_values(x, x, x, i, present, MODE, 0, ITEM, MASKED)
    q, _ = map_values(v, v, v, unusual, 0, 0, 0, 0, keep, cut, up, odd, mask, MODE, 0, INTERPRET)
    return q


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
def _write_full_tile(q, place, exponents, whole, down, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    """The exponents of 128 values, and the words of their planes."""
    tile = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(exponents + tile, ((q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)).to(tl.uint8))
    kept = _kept_part(q, down, EXPONENT, FIELD)
    if whole > 0:
        tl.store(place, _plane_words(kept, 0))
    if whole > 1:
        tl.store(place + 1024, _plane_words(kept, 1))
    if whole > 2:
        tl.store(place + 2048, _plane_words(kept, 2))


@triton.jit
def write_full_planes(
    x, target32, exponents, unusual, whole, down, keep, cut, up, odd, mask,
    MODE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The planes of a full block whose values all have a field, from `target32` on; all exponents to scratch memory."""
    row = tl.arange(0, 32)
    tile = 4 * row[:, None] + tl.arange(0, 4)[None, :]
    for first in range(0, 4096, 512):
        i = first + tile
        a = load_mapped(x, i, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        b = load_mapped(x, i + 128, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        c = load_mapped(x, i + 256, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        d = load_mapped(x, i + 384, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        place = target32 + first // 4 + row
        _write_full_tile(a, place, exponents + first, whole, down, EXPONENT, FIELD)
        _write_full_tile(b, place + 32, exponents + first + 128, whole, down, EXPONENT, FIELD)
        _write_full_tile(c, place + 64, exponents + first + 256, whole, down, EXPONENT, FIELD)
        _write_full_tile(d, place + 96, exponents + first + 384, whole, down, EXPONENT, FIELD)


@triton.jit
def _write_plane_row(
    q, i, present, before, target, exponents, m, whole, down, pruned, lower,
    EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One row, values without a field left out of the planes; returns how many have one up to its end."""
    e = (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
    tl.store(exponents + i, e.to(tl.uint8))
    kept = _kept_part(q, down, EXPONENT, FIELD)
    has_field = present & (e >= pruned)
    rank, count = count_votes(has_field, lower, INTERPRET)
    place = target + (before + rank)
    if whole > 0:
        tl.store(place, (kept & 255).to(tl.uint8), mask=has_field)
    if whole > 1:
        tl.store(place + m, ((kept >> 8) & 255).to(tl.uint8), mask=has_field)
    if whole > 2:
        tl.store(place + 2 * m, ((kept >> 16) & 255).to(tl.uint8), mask=has_field)
    return before + count


@triton.jit
def write_planes(
    x, target, exponents, n, m, unusual, whole, down, pruned, keep, cut, up, odd, mask,
    MODE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The planes of any block, from `target` on; all exponents to scratch memory."""
    lane = tl.arange(0, 32)
    lower = (1 << lane) - 1
    before = tl.full((32,), 0, tl.int32)
    full = n // 128 * 128
    for first in range(0, full, 128):
        i = first + lane
        a = load_mapped(x, i, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        b = load_mapped(x, i + 32, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        c = load_mapped(x, i + 64, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        d = load_mapped(x, i + 96, i >= 0, unusual, keep, cut, up, odd, mask, MODE, ITEM, False, INTERPRET)
        before = _write_plane_row(
            a, i, i >= 0, before, target, exponents, m, whole, down, pruned, lower, EXPONENT, FIELD, INTERPRET
        )
        before = _write_plane_row(
            b, i + 32, i >= 0, before, target, exponents, m, whole, down, pruned, lower, EXPONENT, FIELD, INTERPRET
        )
        before = _write_plane_row(
            c, i + 64, i >= 0, before, target, exponents, m, whole, down, pruned, lower, EXPONENT, FIELD, INTERPRET
        )
        before = _write_plane_row(
            d, i + 96, i >= 0, before, target, exponents, m, whole, down, pruned, lower, EXPONENT, FIELD, INTERPRET
        )
    for first in range(full, n, 32):
        i = first + lane
        q = load_mapped(x, i, i < n, unusual, keep, cut, up, odd, mask, MODE, ITEM, True, INTERPRET)
        before = _write_plane_row(
            q, i, i < n, before, target, exponents, m, whole, down, pruned, lower, EXPONENT, FIELD, INTERPRET
        )


@triton.jit
def write_raw(
    x, floor, second, target, n, words, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
    MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A raw block in any coding."""
    if ITEM == 4:
        place = target.to(tl.pointer_type(tl.int32))
    else:
        place = target.to(tl.pointer_type(tl.int16))
    for first in range(0, words * (4 // ITEM), 128):
        i = first + tl.arange(0, 128)
        v, a, b = load_values(x, floor, second, i, i < n, MODE, FLOOR, ITEM, True)
        q, _ = map_values(v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET)
        q = tl.where(i < n, q, 0)
        tl.store(place + i, q.to(place.dtype.element_ty), mask=i < words * (4 // ITEM))
