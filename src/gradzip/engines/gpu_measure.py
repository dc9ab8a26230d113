"""The encoder's first kernel: for each block its form and its length.

A block's length follows from sums of code lengths: a lane emits a refill byte for every 8 bits that are pushed onto it.
So all lengths are known before a lane runs, and the second kernel writes every block where it belongs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import GROUP, as_bits, load, uniform
from .gpu_mapping import NUMBERS, floors_as_bits, map_values
from .gpu_sparse import sparse_bits, sparse_costs, sparse_words
from .gpu_statistics import block_statistics, mean, symbols
from .gpu_tables import CODE_STRIDE

# A program's scratch memory, in bytes.
COSTS_AT = tl.constexpr(0)  # 256 x [4]: how many bits an exponent takes
EXPONENTS_AT = tl.constexpr(1024)  # 4096 x [1], coding 1 and 2
WIDTHS_AT = tl.constexpr(1024 + 4096)  # 4096 x [1], coding 1 and 2: lane bits
FIXED_SCRATCH = tl.constexpr(1024)
LANES_SCRATCH = tl.constexpr(1024 + 2 * 4096)


@triton.jit
def _write_costs(codes, segment, base, single, costs):
    e = tl.arange(0, 256)
    entry = tl.load(codes + segment * CODE_STRIDE + symbols(e, base))
    escape = tl.load(codes + segment * CODE_STRIDE + 256)
    cost = tl.where(entry == 0, (escape >> 8) + 8, entry >> 8)
    tl.store(costs + e, tl.where(single > 0, 0, cost))


@triton.jit
def _pair_of_values(
    x, exponents, widths, costs, i, n, unusual, bits, loose, fields, rest, minimum, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Adds what 256 values (i and those 128 further on) cost to `bits`.

    In coding 0, where it matters, also counts the exponents that are not 0 and looks at the values of the others.
    """
    j = i + 128
    if CODING > 0:
        e = load(exponents + i, i < n, MASKED).to(tl.int32)
        f = load(exponents + j, j < n, MASKED).to(tl.int32)
        bits += load(widths + i, i < n, MASKED).to(tl.int32) + load(widths + j, j < n, MASKED).to(tl.int32)
        if CODING == 2:
            bits += 2 * (((e + 255) >> 8) + ((f + 255) >> 8))
    else:
        v, w = load(x + i, i < n, MASKED).to(tl.int32), load(x + j, j < n, MASKED).to(tl.int32)
        if ITEM == 2:
            v, w = v & 0xFFFF, w & 0xFFFF
        q, _ = map_values(v, v, v, unusual, 0, 0, 0, 0, keep, cut, up, odd, mask, MODE, 0, INTERPRET)
        r, _ = map_values(w, w, w, unusual, 0, 0, 0, 0, keep, cut, up, odd, mask, MODE, 0, INTERPRET)
        e = (q >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
        f = (r >> (FIELD - 1)) & ((1 << EXPONENT) - 1)
        if (rest > 0) | (minimum == 0):
            fields += ((e + 255) >> 8) + ((f + 255) >> 8)
            loose |= tl.where(e == 0, q, 0) | tl.where(f == 0, r, 0)
    bits += load(costs + e, i < n, MASKED) + load(costs + f, j < n, MASKED)
    return bits, loose, fields


@triton.jit
def _lane_sums(v):
    """Of a (32, 4) tensor of values i = 4 row + column: the sums of equal i mod 32, as (8, 4)."""
    return tl.sum(tl.reshape(v, (4, 8, 4)), 0)


@triton.jit
def _count_refill(
    x, exponents, widths, costs, n, unusual, rest, minimum, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr, FIELD: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """How many refill bytes the lanes will emit, the bits of all lanes; whether all values with exponent 0 are +0."""
    tile = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    bits = tl.zeros((32, 4), tl.int32)
    loose = bits
    fields = bits
    full = n // 256 * 256
    for first in range(0, full, 256):
        bits, loose, fields = _pair_of_values(
            x, exponents, widths, costs, first + tile, n, unusual, bits, loose, fields, rest, minimum,
            keep, cut, up, odd, mask, CODING, MODE, ITEM, EXPONENT, FIELD, False, INTERPRET,
        )  # fmt: skip
    if full < n:
        bits, loose, fields = _pair_of_values(
            x, exponents, widths, costs, full + tile, n, unusual, bits, loose, fields, rest, minimum,
            keep, cut, up, odd, mask, CODING, MODE, ITEM, EXPONENT, FIELD, True, INTERPRET,
        )  # fmt: skip
    lane_bits = _lane_sums(bits)
    pruned = n * 0 + 1
    if CODING == 0:
        pruned = 1 - tl.max(tl.max((loose != 0).to(tl.int32), 1), 0)
        lane = 4 * tl.arange(0, 8)[:, None] + tl.arange(0, 4)[None, :]
        all_fields = n // 32 + (lane < n % 32).to(tl.int32)
        lane_bits += rest * tl.where(pruned > 0, _lane_sums(fields), all_fields)
    return uniform(tl.sum(tl.sum(lane_bits >> 3, 1), 0)), uniform(tl.sum(tl.sum(lane_bits, 1), 0)), pruned


@triton.jit
def _field_width(union, ITEM: tl.constexpr, FIELD: tl.constexpr):
    """w of the format: how many bits of each field are kept."""
    mantissas = union & ((1 << (FIELD - 1)) - 1)
    width = (union >> (ITEM * 8 - 1)) & 1  # if no mantissa has a bit, the sign alone
    for bit in tl.static_range(FIELD - 1):
        width = tl.where((mantissas & -mantissas) == (1 << bit), FIELD - bit, width)
    return width


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["out"])
def measure_blocks(
    x, floor, second, codes, out, sums, records, scratch,
    n_values, n_blocks, index_at, c0, c1, c2, shift, keep, cut, up, odd, mask,
    CODING: tl.constexpr, MODE: tl.constexpr, FLOOR: tl.constexpr, ITEM: tl.constexpr, EXPONENT: tl.constexpr,
    FIELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Writes the body's index, adds up the words of groups of blocks, and notes what write_blocks has to know.

    A block's record is two words: base, flags and widths; and, by its form, refill bytes or D, and the number of values
    that have a field. `cut`, `up`, `odd`, `mask`: see map_keep_usual.
    """
    x = as_bits(x, ITEM)
    floor, second = floors_as_bits(floor, second, FLOOR)
    index = (out + index_at).to(tl.pointer_type(tl.int16))
    if CODING == 0:
        memory = scratch + tl.program_id(0).to(tl.int64) * FIXED_SCRATCH
    else:
        memory = scratch + tl.program_id(0).to(tl.int64) * LANES_SCRATCH
    costs = (memory + COSTS_AT).to(tl.pointer_type(tl.int32))
    exponents = memory + EXPONENTS_AT
    widths = memory + WIDTHS_AT
    block = tl.program_id(0)
    while block < n_blocks:
        start = block.to(tl.int64) * 4096
        n = tl.minimum(n_values - start, 4096).to(tl.int32)
        unusual = n * 0
        nonzero, total, minimum, maximum, union, widest = n * 0, n * 0, n * 0, n * 0, n * 0, n * 0
        again = n * 0 + 1
        while again > 0:
            nonzero, total, minimum, maximum, union, widest, again = block_statistics(
                x + start, floor + start, second + start, exponents, widths, n, unusual,
                c0, c1, c2, shift, keep, cut, up, odd, mask, CODING, MODE, FLOOR, ITEM, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
            unusual |= again
        single = (minimum == maximum).to(tl.int32)
        base = tl.where(single > 0, maximum, mean(total, nonzero))

        kind = n * 0 + 2
        words = n * 0
        extent = n * 0  # refill bytes, or D
        whole = n * 0
        rest = n * 0
        pruned = n * 0 + 1
        m = nonzero
        if union != 0:
            if CODING == 0:
                width = _field_width(union, ITEM, FIELD)
                whole = width // 8
                rest = width % 8
            tl.debug_barrier()
            _write_costs(codes, block // 32, base, single, costs)
            tl.debug_barrier()
            refill, bits, pruned = _count_refill(
                x + start, exponents, widths, costs, n, unusual, rest, minimum, keep, cut, up, odd, mask,
                CODING, MODE, ITEM, EXPONENT, FIELD, INTERPRET,
            )  # fmt: skip
            if CODING == 0:
                m = tl.where(pruned > 0, nonzero, n)
            dense_words = (68 + whole * m + refill + 3) // 4
            raw_words = (n * ITEM + 3) // 4
            kind = tl.where(dense_words < raw_words, 1, 0)
            words = tl.minimum(dense_words, raw_words)
            extent = refill
            if CODING == 1:
                if 2 * nonzero <= n:
                    distances, kept = sparse_costs(
                        exponents, widths, floor + start, second + start, n, c0, c1, c2, shift, FLOOR
                    )
                    size = sparse_words(n, nonzero, distances, kept)
                    smaller = sparse_bits(n, nonzero, distances, kept) < 544 + bits
                    if smaller & (distances <= 65535) & (size < n):
                        kind = n * 0 + 2
                        words = size
                        extent = distances
        tl.store(index + block, (words | (kind << 14)).to(tl.int16))
        tl.atomic_add(sums + block // GROUP, words, sem="relaxed")
        flags = base | (single << 8) | (pruned << 9) | (unusual << 10) | (whole << 11) | (rest << 13) | (widest << 16)
        tl.store(records + 2 * block, flags)
        tl.store(records + 2 * block + 1, extent | (m << 16))
        tl.debug_barrier()
        block += tl.num_programs(0)
