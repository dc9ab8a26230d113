"""Code lengths and canonical codes (docs/format.md, "Code tables" and "Choosing code lengths")."""

from __future__ import annotations

import numpy as np

from ..errors import Corrupt
from .layout import ESCAPE, TABLE_BYTES

MAX_LENGTH = 8
MIN_SHARE = 1024  # a symbol rarer than 1/1024 is left to the escape


def code_lengths(histogram: np.ndarray, limit: int = MAX_LENGTH) -> np.ndarray:
    """Optimal lengths (256,) uint8 under the limit; 0 means: no code, use the escape."""
    total = int(histogram.sum())
    coded = [s for s in range(256) if histogram[s] > 0 and int(histogram[s]) * MIN_SHARE >= total]
    coded.sort(key=lambda s: (-int(histogram[s]), s))
    coded = coded[: (1 << limit) - 1]  # the escape needs a place as well
    escaped = total - sum(int(histogram[s]) for s in coded)
    items = [(int(histogram[s]), s) for s in coded] + [(max(1, escaped), ESCAPE)]
    lengths = np.zeros(256, np.uint8)
    for symbol, length in package_merge(items, limit).items():
        if symbol != ESCAPE:
            lengths[symbol] = length
    return lengths


def package_merge(items: list[tuple[int, int]], limit: int) -> dict[int, int]:
    """Length of each symbol of (weight, symbol) items in an optimal prefix code of at most `limit` bits."""
    if len(items) == 1:
        return {items[0][1]: 0}
    leaves = [(weight, (symbol,)) for weight, symbol in sorted(items)]
    level: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(limit):
        pairs = zip(level[0::2], level[1::2])
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
        level = sorted(leaves + packages, key=lambda item: item[0])  # stable: leaves come before equal packages
    lengths = {symbol: 0 for _, symbol in items}
    for _, symbols in level[: 2 * len(items) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def pack_table(lengths: np.ndarray) -> np.ndarray:
    packed: np.ndarray = (lengths[0::2] | (lengths[1::2] << 4)).astype(np.uint8)
    return packed


def unpack_table(table: np.ndarray) -> np.ndarray:
    """The 256 lengths of a stored table; Corrupt if they are no complete code."""
    assert table.size == TABLE_BYTES
    lengths = np.empty(256, np.uint8)
    lengths[0::2], lengths[1::2] = table & 15, table >> 4
    escape_length(lengths)
    return lengths


def escape_length(lengths: np.ndarray) -> int:
    """The escape takes what the others leave of the code space, which must be a power of two."""
    if lengths.max() > MAX_LENGTH:
        raise Corrupt("a code table holds a length above 8")
    used = int((1 << (MAX_LENGTH - lengths[lengths > 0].astype(np.int64))).sum())
    left = (1 << MAX_LENGTH) - used
    if left <= 0 or left & (left - 1):
        raise Corrupt("a code table is no complete code")
    return MAX_LENGTH - (left.bit_length() - 1)


def codes(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bit-reversed canonical codes and lengths of the 257 symbols, (257,) uint32 each."""
    full = np.append(lengths, 0).astype(np.uint32)
    full[ESCAPE] = escape_length(lengths)
    reversed_codes = np.zeros(257, np.uint32)
    code = previous = 0
    coded = [s for s in range(257) if full[s] > 0]
    for symbol in sorted(coded, key=lambda s: (full[s], s)):
        length = int(full[symbol])
        code <<= length - previous
        reversed_codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, previous = code + 1, length
    return reversed_codes, full


def decode_table(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symbol and length for each value of a state's low 8 bits, (256,) each."""
    reversed_codes, full = codes(lengths)
    symbol_of = np.full(256, ESCAPE, np.int64)
    for symbol in range(257):
        if full[symbol] > 0:
            symbol_of[reversed_codes[symbol] :: 1 << full[symbol]] = symbol
    return symbol_of, full[symbol_of].astype(np.int64)
