"""The encoder's first look at a block: what its form depends on. Also: sampled histograms."""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import as_bits, or_of_all
from .gpu_mapping import NUMBERS, floors_as_bits, is_unusual, load_values, map_values, unusualness


@triton.jit
def _pair_statistics(
    v, a, b, v2, a2, b2, exponents_to, widths_to, i, n, unusual,
    total, lowest, highest, union, widest, count, largest, c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Maps 256 values (i and those 128 further on) and adds them to the running statistics."""
    exponents: tl.constexpr = (1 << EXPONENT) - 1
    j = i + 128
    q, w = map_values(v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET)
    q2, w2 = map_values(v2, a2, b2, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET)
    e = (q >> (FIELD - 1)) & exponents
    e2 = (q2 >> (FIELD - 1)) & exponents
    largest = tl.maximum(largest, unusualness(v, a, b, c0, c1, c2, shift, MODE, FLOOR))
    largest = tl.maximum(largest, unusualness(v2, a2, b2, c0, c1, c2, shift, MODE, FLOOR))
    if CODING > 0:
        tl.store(exponents_to + i, e.to(tl.uint8))
        tl.store(exponents_to + j, e2.to(tl.uint8))
        tl.store(widths_to + i, w.to(tl.uint8))
        tl.store(widths_to + j, w2.to(tl.uint8))
        widest = tl.maximum(widest, tl.maximum(w, w2))
    else:
        union |= q | q2
    total += e + e2
    count += ((e + 255) >> 8) + ((e2 + 255) >> 8)
    highest = tl.maximum(highest, tl.maximum(e, e2))
    if MASKED:
        lowest = tl.minimum(lowest, tl.minimum(tl.where(i < n, e, exponents), tl.where(j < n, e2, exponents)))
    else:
        lowest = tl.minimum(lowest, tl.minimum(e, e2))
    return total, lowest, highest, union, widest, count, largest


@triton.jit
def block_statistics(
    x, floor, second, exponents_to, widths_to, n, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """What a block's form depends on. In coding 1 and 2, exponents and lane bits go to scratch memory.

    Returns the number of values with exponent > 0; sum, minimum and maximum of the exponents; the or of all bit
    patterns (coding 0; else the maximum again); the most lane bits; whether it is to be done again as unusual.
    """
    total = tl.zeros((32, 4), tl.int32)
    lowest = total + 255
    highest = total
    union = total
    widest = total
    count = total
    largest = total
    # Each thread has four neighbours out of 128 values.
    tile = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    STEP: tl.constexpr = 512 if CODING > 0 else 1024
    full = n // STEP * STEP
    if CODING > 0:
        # Stores to scratch memory keep later loads from moving ahead of them, so half a step is loaded ahead by hand.
        v, a, b = load_values(x, floor, second, tile, tile < full, MODE, FLOOR, ITEM, True)
        w, c, d = load_values(x, floor, second, tile + 128, tile < full, MODE, FLOOR, ITEM, True)
        for first in range(0, full, STEP):
            i = first + tile
            p, e, f = load_values(x, floor, second, i + 256, i < n, MODE, FLOOR, ITEM, False)
            q, g, h = load_values(x, floor, second, i + 384, i < n, MODE, FLOOR, ITEM, False)
            total, lowest, highest, union, widest, count, largest = _pair_statistics(
                v, a, b, w, c, d, exponents_to, widths_to, i, n, unusual,
                total, lowest, highest, union, widest, count, largest, c0, c1, c2, shift, keep, cut, up, odd, mask,
                CODING, MODE, FLOOR, EXPONENT, FIELD, False, INTERPRET,
            )  # fmt: skip
            j = tl.minimum(first + STEP, full - STEP) + tile
            v, a, b = load_values(x, floor, second, j, j < n, MODE, FLOOR, ITEM, False)
            w, c, d = load_values(x, floor, second, j + 128, j < n, MODE, FLOOR, ITEM, False)
            total, lowest, highest, union, widest, count, largest = _pair_statistics(
                p, e, f, q, g, h, exponents_to, widths_to, i + 256, n, unusual,
                total, lowest, highest, union, widest, count, largest, c0, c1, c2, shift, keep, cut, up, odd, mask,
                CODING, MODE, FLOOR, EXPONENT, FIELD, False, INTERPRET,
            )  # fmt: skip
    else:
        for first in range(0, full, STEP):
            for part in tl.static_range(0, STEP, 256):
                i = first + part + tile
                v, a, b = load_values(x, floor, second, i, i < n, MODE, FLOOR, ITEM, False)
                w, c, d = load_values(x, floor, second, i + 128, i < n, MODE, FLOOR, ITEM, False)
                total, lowest, highest, union, widest, count, largest = _pair_statistics(
                    v, a, b, w, c, d, exponents_to, widths_to, i, n, unusual,
                    total, lowest, highest, union, widest, count, largest, c0, c1, c2, shift, keep, cut, up, odd, mask,
                    CODING, MODE, FLOOR, EXPONENT, FIELD, False, INTERPRET,
                )  # fmt: skip
    for first in range(full, n, 256):
        i = first + tile
        v, a, b = load_values(x, floor, second, i, i < n, MODE, FLOOR, ITEM, True)
        w, c, d = load_values(x, floor, second, i + 128, i + 128 < n, MODE, FLOOR, ITEM, True)
        total, lowest, highest, union, widest, count, largest = _pair_statistics(
            v, a, b, w, c, d, exponents_to, widths_to, i, n, unusual,
            total, lowest, highest, union, widest, count, largest, c0, c1, c2, shift, keep, cut, up, odd, mask,
            CODING, MODE, FLOOR, EXPONENT, FIELD, True, INTERPRET,
        )  # fmt: skip
    nonzero = tl.sum(tl.sum(count, 1), 0)
    summed = tl.sum(tl.sum(total, 1), 0)
    minimum = tl.min(tl.min(lowest, 1), 0)
    maximum = tl.max(tl.max(highest, 1), 0)
    again = (is_unusual(tl.max(tl.max(largest, 1), 0), MODE) & (unusual == 0)).to(tl.int32)
    if CODING == 0:
        return nonzero, summed, minimum, maximum, or_of_all(union, INTERPRET), n * 0, again
    else:
        return nonzero, summed, minimum, maximum, maximum, tl.max(tl.max(widest, 1), 0), again


@triton.jit
def mean(total, nonzero):
    """The rounded mean of the non-zero exponents."""
    return tl.where(nonzero > 0, (total + nonzero // 2) // tl.maximum(nonzero, 1), 0)


@triton.jit
def symbols(e, base):
    return tl.where(e == 0, 0, (e - base - (e <= base).to(tl.int32)) & 255)


@triton.jit(do_not_specialize=[name for name in NUMBERS if name not in ("n_blocks", "index_at")])
def sample_symbols(
    x, floor, second, counts, n_values, c0, c1, c2, shift, keep, cut, up, odd, mask,
    MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One program per block: adds the symbols of every 16th row to its segment's counts."""
    x = as_bits(x, ITEM)
    floor, second = floors_as_bits(floor, second, FLOOR)
    block = tl.program_id(0)
    start = block.to(tl.int64) * 4096
    i = tl.arange(0, 256)
    i = i // 32 * 512 + i % 32
    here = start + i < n_values
    v, a, b = load_values(x, floor, second, start + i, here, MODE, FLOOR, ITEM, True)
    unusual = is_unusual(tl.max(unusualness(v, a, b, c0, c1, c2, shift, MODE, FLOOR), 0), MODE).to(tl.int32)
    q, _ = map_values(v, a, b, unusual, c0, c1, c2, shift, keep, cut, up, odd, mask, MODE, FLOOR, INTERPRET)
    e = (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
    nonzero = tl.sum((e > 0).to(tl.int32), 0)
    if nonzero > 0:
        bins = tl.histogram(symbols(e, mean(tl.sum(e, 0), nonzero)), 256, mask=here)
        tl.atomic_add(counts + block // 32 * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")
