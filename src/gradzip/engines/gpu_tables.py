"""Code tables on the GPU: lengths from histograms, canonical codes for the encoder, lookup tables for the decoder."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gpu_lanes import GROUP
from .huffman import MAX_LENGTH, MIN_SHARE
from .layout import ESCAPE

CODE_STRIDE = tl.constexpr(260)  # words per segment in the encoder's table: 257 entries of code | length << 8
LOOKUP_STRIDE = tl.constexpr(512)  # words per segment in the decoder's: 256 x symbol | length << 9, then scratch

BAD_TABLE = tl.constexpr(1)  # status bits
BAD_HEAD = tl.constexpr(2)
BAD_INDEX_PADDING = tl.constexpr(4)


def code_lengths(histograms: torch.Tensor, limit: int = MAX_LENGTH) -> torch.Tensor:
    """Code lengths for each row of (segments, 256) counts: `huffman.code_lengths` for all rows at once.

    Package-merge, run backwards: of a level's sorted list a prefix is chosen, so that counting the leaves in it says
    which symbols grow by one bit and how long the prefix of the level below is.
    """
    counts = histograms.to(torch.int64)
    segments = counts.shape[0]
    total = counts.sum(1, keepdim=True)
    never = torch.iinfo(torch.int64).max // 4
    places = (1 << limit) - 1  # the escape needs one as well
    by_count = torch.sort(counts, dim=1, descending=True, stable=True)
    coded = (by_count.values > 0) & (by_count.values * MIN_SHARE >= total)
    coded[:, places:] = False
    escaped = (total[:, 0] - torch.where(coded, by_count.values, 0).sum(1)).clamp(min=1)

    # Leaves in the order of (weight, symbol); what has no code sorts last.
    weights = torch.full((segments, 257), never, dtype=torch.int64, device=counts.device)
    weights.scatter_(1, by_count.indices, torch.where(coded, by_count.values, never))
    weights[:, ESCAPE] = escaped
    leaves = torch.sort(weights, dim=1, stable=True)
    levels = [torch.ones_like(leaves.values, dtype=torch.bool)]  # for each level: is the n-th item a leaf?
    level = leaves.values
    for _ in range(limit - 1):
        paired = level[:, : level.shape[1] // 2 * 2].view(segments, -1, 2).sum(2).clamp(max=never)
        merged = torch.sort(torch.cat([leaves.values, paired], 1), dim=1, stable=True)
        level = merged.values
        levels.append(merged.indices < 257)
    chosen = 2 * coded.sum(1)  # 2n - 2 of the n = coded + 1 leaves
    lengths = torch.zeros_like(weights)
    for is_leaf in reversed(levels):
        prefix = torch.arange(is_leaf.shape[1], device=counts.device) < chosen[:, None]
        taken = (is_leaf & prefix).sum(1)
        lengths += torch.arange(257, device=counts.device) < taken[:, None]
        chosen = 2 * (chosen - taken)
    by_symbol = torch.zeros_like(lengths).scatter_(1, leaves.indices, lengths)
    return by_symbol[:, :ESCAPE].to(torch.uint8)


@triton.jit
def _complete(lengths):
    """Whether the lengths leave a power of two to the escape, and the escape's length."""
    used = tl.sum(tl.where(lengths > 0, 256 >> lengths, 0), 0)
    left = 256 - used
    good = (tl.max(lengths, 0) <= 8) & (left > 0) & ((left & (left - 1)) == 0)
    escape = 8
    for length in tl.static_range(8):
        escape = tl.where(left == (256 >> length), length, escape)
    return good, escape


@triton.jit
def _canonical(lengths, escape_length):
    """Canonical codes (not yet reversed) of 256 symbols and of the escape, and each symbol's place in code order."""
    code = 0
    before = 0
    codes = lengths * 0
    places = lengths * 0
    escape_code = 0
    for length in tl.static_range(1, 9):
        here = (lengths == length).to(tl.int32)
        count = tl.sum(here, 0)
        rank = tl.cumsum(here, 0) - here
        codes = tl.where(here > 0, code + rank, codes)
        places = tl.where(here > 0, before + rank, places)
        escape_code = tl.where(escape_length == length, code + count, escape_code)
        count += (escape_length == length).to(tl.int32)
        before += count
        code = (code + count) << 1
    return codes, places, escape_code


@triton.jit
def _reverse(code, length):
    """The low `length` bits in reverse order."""
    code = ((code & 0x55) << 1) | ((code >> 1) & 0x55)
    code = ((code & 0x33) << 2) | ((code >> 2) & 0x33)
    code = ((code & 0x0F) << 4) | ((code >> 4) & 0x0F)
    return code >> (8 - length)


@triton.jit(
    do_not_specialize=["coding", "book", "n_blocks", "blocks_at"], do_not_specialize_on_alignment=["lengths", "out"]
)
def prepare_encode(lengths, codes, out, sums, status, coding, book, n_blocks, blocks_at):
    """One program per segment: its codes, its stored table, cleared sums; program 0 also writes the body's head."""
    out32 = out.to(tl.pointer_type(tl.int32))
    segment = tl.program_id(0)
    symbol = tl.arange(0, 256)
    length = tl.load(lengths + segment * 256 + symbol).to(tl.int32)
    good, escape_length = _complete(length)
    if not good:
        tl.atomic_or(status, BAD_TABLE)
    code, _, escape_code = _canonical(length, escape_length)
    tl.store(codes + segment * CODE_STRIDE + symbol, tl.where(length > 0, _reverse(code, length) | (length << 8), 0))
    tl.store(codes + segment * CODE_STRIDE + 256, _reverse(escape_code, escape_length) | (escape_length << 8))
    if book == 0:
        pair = tl.arange(0, 128)
        even = tl.load(lengths + segment * 256 + 2 * pair)
        odd = tl.load(lengths + segment * 256 + 2 * pair + 1)
        tl.store(out + 8 + segment * 128 + pair, even | (odd << 4))
    if segment * GROUP < n_blocks:
        tl.store(sums + segment, 0)
    if segment == 0:
        tl.store(out32, coding | ((book != 0).to(tl.int32) << 8))
        tl.store(out32 + 1, book)
        # The last word of the index may be half padding; its block overwrites the other half.
        tl.store(out32 + (blocks_at // 4 - 1), 0)


@triton.jit(
    do_not_specialize=["coding", "n_blocks", "index_at", "blocks_at", "segments", "groups"],
    do_not_specialize_on_alignment=["data", "book_lengths"],
)
def prepare_decode(
    data, book_lengths, lookup, sums, status, coding, n_blocks, index_at, blocks_at, segments, groups,
    SHARED: tl.constexpr,
):  # fmt: skip
    """One program per segment: its lookup table; and one per group of blocks: the words that the group takes."""
    data32 = data.to(tl.pointer_type(tl.int32))
    program = tl.program_id(0)
    entry = tl.arange(0, 256)
    if program < segments:
        if SHARED:
            length = tl.load(book_lengths + program * 256 + entry).to(tl.int32)
        else:
            nibbles = tl.load(data + 8 + program * 128 + entry // 2).to(tl.int32)
            length = (nibbles >> (4 * (entry & 1))) & 15
        good, escape_length = _complete(length)
        if not good:
            tl.atomic_or(status, BAD_TABLE)
        length = tl.minimum(length, 8)
        _, place, _ = _canonical(length, escape_length)
        sorted_symbols = lookup + program * LOOKUP_STRIDE + 256
        tl.store(sorted_symbols + entry, entry)  # where a damaged table leaves gaps
        tl.debug_barrier()
        tl.store(sorted_symbols + (place & 255), entry, mask=length > 0)
        tl.debug_barrier()
        first = _reverse(entry, 8)  # the state's low bits, first bit of the code on top
        found = entry * 0 + 256 + (escape_length << 9)
        start = 0
        before = 0
        for bits in tl.static_range(1, 9):
            count = tl.sum((length == bits).to(tl.int32), 0)
            rank = (first >> (8 - bits)) - start
            hit = (rank >= 0) & (rank < count)
            symbol = tl.load(sorted_symbols + ((before + rank) & 255), mask=hit, other=0)
            found = tl.where(hit, symbol | (bits << 9), found)
            count += (escape_length == bits).to(tl.int32)
            before += count
            start = (start + count) << 1
        tl.store(lookup + program * LOOKUP_STRIDE + entry, found)
    if program < groups:
        block = program * GROUP + tl.arange(0, GROUP)
        low = tl.load(data + index_at + 2 * block, mask=block < n_blocks, other=0).to(tl.int32)
        high = tl.load(data + index_at + 2 * block + 1, mask=block < n_blocks, other=0).to(tl.int32)
        tl.store(sums + program, tl.sum((low | (high << 8)) & 0x3FFF, 0))
    if program == 0:
        head = tl.load(data32)
        book = tl.load(data32 + 1)
        if SHARED:
            wrong = ((head >> 8) != 1) | (book == 0)
        else:
            wrong = ((head >> 8) != 0) | (book != 0)
        if wrong | ((head & 255) > 2):
            tl.atomic_or(status, BAD_HEAD)
        if (head & 255) != coding:
            tl.atomic_or(status, ((head & 255) + 1) << 24)  # tell the host which kernel it should have been
        if n_blocks % 2 == 1:
            if (tl.load(data32 + (blocks_at // 4 - 1)) >> 16) != 0:
                tl.atomic_or(status, BAD_INDEX_PADDING)
