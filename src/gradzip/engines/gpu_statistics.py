# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The encoder's first look at a block: mapping its values, and what its form depends on. Also: sampled histograms."""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import (
    LOSSLESS,
    NEAR_GRID,
    PAPER_LEVEL,
    load,
    load_floor_inputs,
    make_floors,
    map_keep,
    map_near,
    map_paper,
    near_limit,
    or_of_all,
)


@triton.jit
def _load_values(
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
def _map_values(v, f, limit, keep, MODE: tl.constexpr, INTERPRET: tl.constexpr):
    """Mapped bit patterns, and lane bits in coding 1 and 2 (else 0)."""
    if MODE == LOSSLESS:
        return v, v * 0
    elif MODE == NEAR_GRID:
        return map_near(v, f, limit, INTERPRET)
    elif MODE == PAPER_LEVEL:
        return map_paper(v, f)
    else:
        return map_keep(v, keep, MODE), v * 0


@triton.jit
def _pair_statistics(
    v, a, b, v2, a2, b2, mapped, widths, i, n, total, lowest, highest, union, widest, count, c0, c1, c2, shift, keep,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Maps 256 values (i and those 128 further on) and adds them to the running statistics."""
    exponents: tl.constexpr = (1 << EXPONENT) - 1
    j = i + 128
    f, f2, limit = a, a2, n * 0
    if CODING > 0:
        f = make_floors(a, b, c0, c1, c2, shift, FLOOR)
        f2 = make_floors(a2, b2, c0, c1, c2, shift, FLOOR)
    if MODE == NEAR_GRID:
        limit = tl.max(tl.max(tl.maximum(near_limit(v, f), near_limit(v2, f2)), 1), 0)
    q, w = _map_values(v, f, limit, keep, MODE, INTERPRET)
    q2, w2 = _map_values(v2, f2, limit, keep, MODE, INTERPRET)
    if MODE != LOSSLESS:
        tl.store(mapped + i, q)
        tl.store(mapped + j, q2)
    if CODING > 0:
        tl.store(widths + i, w.to(tl.int8))
        tl.store(widths + j, w2.to(tl.int8))
        widest = tl.maximum(widest, tl.maximum(w, w2))
        count += ((w + 31) >> 5) + ((w2 + 31) >> 5)
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
    return total, lowest, highest, union, widest, count


@triton.jit
def _zeros_of_tile(source, i, n, zeros, loose, EXPONENT: tl.constexpr, FIELD: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        q = tl.load(source + i, mask=i < n, other=-1).to(tl.int32)
    else:
        q = tl.load(source + i).to(tl.int32)
    none = ((q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)) == 0
    return zeros + none.to(tl.int32), loose | tl.where(none, q, 0)


@triton.jit
def _count_zeros(source, n, EXPONENT: tl.constexpr, FIELD: tl.constexpr):
    """How many values have exponent 0, and whether any of them is not +0."""
    tile = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    zeros = tl.zeros((32, 4), tl.int32)
    loose = zeros
    full = n // 512 * 512
    for first in range(0, full, 512):
        for part in tl.static_range(0, 512, 128):
            zeros, loose = _zeros_of_tile(source, first + part + tile, n, zeros, loose, EXPONENT, FIELD, False)
    for first in range(full, n, 128):
        zeros, loose = _zeros_of_tile(source, first + tile, n, zeros, loose, EXPONENT, FIELD, True)
    return tl.sum(tl.sum(zeros, 1), 0), tl.max(tl.max((loose != 0).to(tl.int32), 1), 0)


@triton.jit
def block_statistics(
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
    count = total
    # Each thread has four neighbours out of 128 values.
    tile = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    x += start
    floor += start
    second += start
    STEP: tl.constexpr = 512 if CODING > 0 else 1024
    full = n // STEP * STEP
    if CODING > 0:
        # Stores to scratch memory keep later loads from moving ahead of them, so half a step is loaded ahead by hand.
        v, a, b = _load_values(x, floor, second, tile, tile < full, MODE, FLOOR, ITEM, True)
        w, c, d = _load_values(x, floor, second, tile + 128, tile < full, MODE, FLOOR, ITEM, True)
        for first in range(0, full, STEP):
            i = first + tile
            p, e, f = _load_values(x, floor, second, i + 256, i < n, MODE, FLOOR, ITEM, False)
            q, g, h = _load_values(x, floor, second, i + 384, i < n, MODE, FLOOR, ITEM, False)
            total, lowest, highest, union, widest, count = _pair_statistics(
                v, a, b, w, c, d, mapped, widths, i, n, total, lowest, highest, union, widest, count,
                c0, c1, c2, shift, keep, CODING, MODE, FLOOR, EXPONENT, FIELD, False, INTERPRET,
            )  # fmt: skip
            j = tl.minimum(first + STEP, full - STEP) + tile
            v, a, b = _load_values(x, floor, second, j, j < n, MODE, FLOOR, ITEM, False)
            w, c, d = _load_values(x, floor, second, j + 128, j < n, MODE, FLOOR, ITEM, False)
            total, lowest, highest, union, widest, count = _pair_statistics(
                p, e, f, q, g, h, mapped, widths, i + 256, n, total, lowest, highest, union, widest, count,
                c0, c1, c2, shift, keep, CODING, MODE, FLOOR, EXPONENT, FIELD, False, INTERPRET,
            )  # fmt: skip
    else:
        for first in range(0, full, STEP):
            for part in tl.static_range(0, STEP, 256):
                i = first + part + tile
                v, a, b = _load_values(x, floor, second, i, i < n, MODE, FLOOR, ITEM, False)
                w, c, d = _load_values(x, floor, second, i + 128, i < n, MODE, FLOOR, ITEM, False)
                total, lowest, highest, union, widest, count = _pair_statistics(
                    v, a, b, w, c, d, mapped, widths, i, n, total, lowest, highest, union, widest, count,
                    c0, c1, c2, shift, keep, CODING, MODE, FLOOR, EXPONENT, FIELD, False, INTERPRET,
                )  # fmt: skip
    for first in range(full, n, 256):
        i = first + tile
        v, a, b = _load_values(x, floor, second, i, i < n, MODE, FLOOR, ITEM, True)
        w, c, d = _load_values(x, floor, second, i + 128, i + 128 < n, MODE, FLOOR, ITEM, True)
        total, lowest, highest, union, widest, count = _pair_statistics(
            v, a, b, w, c, d, mapped, widths, i, n, total, lowest, highest, union, widest, count,
            c0, c1, c2, shift, keep, CODING, MODE, FLOOR, EXPONENT, FIELD, True, INTERPRET,
        )  # fmt: skip
    maximum = tl.max(tl.max(highest, 1), 0)
    minimum = tl.min(tl.min(lowest, 1), 0)
    nonzero = n
    pruned = n * 0 + 1
    if CODING > 0:
        nonzero = tl.sum(tl.sum(count, 1), 0)
    elif minimum == 0:
        if MODE != LOSSLESS:
            tl.debug_barrier()
        zeros, loose = _count_zeros(source, n, EXPONENT, FIELD)
        nonzero = n - zeros
        pruned = 1 - loose
    single = (minimum == maximum).to(tl.int32)
    base = tl.where(single > 0, maximum, _mean(tl.sum(tl.sum(total, 1), 0), nonzero))
    if CODING == 0:
        return nonzero, base, single, or_of_all(union, INTERPRET), n * 0, pruned
    else:
        return nonzero, base, single, maximum, tl.max(tl.max(widest, 1), 0), pruned


@triton.jit
def _mean(total, nonzero):
    """The rounded mean of the non-zero exponents."""
    return tl.where(nonzero > 0, (total + nonzero // 2) // tl.maximum(nonzero, 1), 0)


@triton.jit
def symbols(e, base):
    return tl.where(e == 0, 0, (e - base - (e <= base).to(tl.int32)) & 255)


@triton.jit(do_not_specialize=["n_values", "c0", "c1", "c2", "shift", "keep"])
def sample_symbols(
    x, floor, second, counts, n_values, c0, c1, c2, shift, keep,
    MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program per block: adds the symbols of every 16th row to its segment's counts."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * 4096
    i = tl.arange(0, 256)
    i = i // 32 * 512 + i % 32
    here = start + i < n_values
    v, a, b = _load_values(x, floor, second, start + i, here, MODE, FLOOR, ITEM, True)
    f = a
    if (MODE == NEAR_GRID) | (MODE == PAPER_LEVEL):
        f = make_floors(a, b, c0, c1, c2, shift, FLOOR)
    q, _ = _map_values(v, f, tl.max(near_limit(v, f), 0), keep, MODE, INTERPRET)
    e = (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
    nonzero = tl.sum((e > 0).to(tl.int32), 0)
    if nonzero > 0:
        bins = tl.histogram(symbols(e, _mean(tl.sum(e, 0), nonzero)), 256, mask=here)
        tl.atomic_add(counts + block // 32 * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")
