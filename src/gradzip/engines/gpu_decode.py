"""The decoder's kernel: one warp decodes one block.

Payloads are not trusted: every load is masked to the block it belongs to, and what contradicts docs/format.md is
or-ed into a status word that the host reads at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_lanes import as_bits, block_place, prefetch_line, uniform
from .gpu_mapping import floors_as_bits
from .gpu_rows import ESCAPED, IMPOSSIBLE, fixed_rows, lane_rows, plain_rows, store_row
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

TABLE_BYTES_PER_PROGRAM = tl.constexpr(1024)
LIST_BYTES_PER_PROGRAM = tl.constexpr(2 * 4 * 4096)  # near mode alone: for sparse blocks


@triton.jit
def _write_block_table(lookup, base, single, table, EXPONENT: tl.constexpr):
    """What each value of a state's low 8 bits means in this block."""
    entry = tl.arange(0, 256)
    found = tl.load(lookup + entry)
    symbol = found & 511
    length = found >> 9
    e = symbol + base
    e = tl.where(symbol == 0, 0, (e + (e > 255).to(tl.int32)) & 255)
    flags = tl.where((e >> EXPONENT) != 0, IMPOSSIBLE, 0)
    e = tl.where(symbol == 256, 0, e)
    flags = tl.where(symbol == 256, ESCAPED, flags)
    meaning = tl.where(single, base << 23, length | flags | (e << 23))
    tl.store(table + entry, meaning)


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
        plain = (m == n) & (rest == 0) & (n % 256 == 0)
        if plain & (whole == 1):
            x, at, seen, least = plain_rows(
                x, at, seen, block, table, out, lowest, upper, n, never, 1, ITEM, EXPONENT, FIELD, ADD, INTERPRET
            )
            # With `pruned`, a value with exponent 0 would have no field.
            fields = tl.where((pruned > 0) & (tl.min(least, 0) < (1 << 23)), -1, m)
        elif plain & (whole == 3):
            x, at, seen, least = plain_rows(
                x, at, seen, block, table, out, lowest, upper, n, never,
                3 if ITEM == 4 else 1, ITEM, EXPONENT, FIELD, ADD, INTERPRET,
            )  # fmt: skip
            fields = tl.where((pruned > 0) & (tl.min(least, 0) < (1 << 23)), -1, m)
        else:
            x, at, seen, fields = fixed_rows(
                x, at, seen, block, table, out, lowest, upper, lower, m, n, whole, rest, pruned, down, never,
                ITEM, EXPONENT, FIELD, ADD, INTERPRET,
            )  # fmt: skip
    else:
        x, at, seen, fields = lane_rows(
            x, at, seen, block, table, out, floor, second, start, lowest, upper, n, c0, c1, c2, shift, never,
            CODING, FLOOR, ADD, INTERPRET,
        )  # fmt: skip
    wrong = (x != 256) | (at != lowest) | ((seen & IMPOSSIBLE) != 0)
    wrong |= ((seen & ESCAPED) != 0) & ((head & 64) == 0)
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
    out = as_bits(out, ITEM)
    floor, second = floors_as_bits(floor, second, FLOOR)
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
        place = block_place(index, sums, block)
        entry = uniform(tl.load(index + block).to(tl.int32) & 0xFFFF)
        words = entry & 0x3FFF
        kind = entry >> 14
        end = blocks_at + 4 * (place + words)
        here = data + (blocks_at + 4 * place)
        target = out + start
        fault = n * 0
        if uniform((end > body_bytes).to(tl.int32)) > 0:
            fault = n * 0 + SHORT_BODY
        else:
            if CODING == 0:
                # Blocks some way on are about as long as this one; have them brought to the L2 cache.
                later = blocks_at + 4 * (place + words * ahead.to(tl.int64))
                for part in tl.static_range(0, 16384, 4096):
                    if part < 4 * words:
                        line = tl.minimum(later + part + 128 * tl.arange(0, 32), body_bytes - 1)
                        prefetch_line(data + line, INTERPRET)
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
