"""The sparse block of near mode in the reference engine (docs/format.md, "Sparse block")."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import Corrupt
from . import huffman
from .layout import ESCAPE, NEAR, float_layout
from .reference_values import kept_bits, pad4, split, symbols_of


def _low_bits(m: int, n: int) -> int:
    """The largest l with m * 2^l <= n."""
    return (n // m).bit_length() - 1


def encode_sparse(values: np.ndarray, floors: np.ndarray, lengths: np.ndarray) -> bytes | None:
    """The sparse form, or None where the dense form is chosen."""
    exponent, mantissa, sign = split(values, float_layout(torch.float32))
    at = np.flatnonzero(exponent)
    m, n = at.size, values.size
    if 2 * m > n:
        return None
    low = _low_bits(m, n)
    distance = exponent[at] - 127 - floors[at]
    kept = kept_bits(exponent[at], NEAR, floors[at])
    total = int(distance.sum())
    if total > 65535:
        return None
    symbols, _ = symbols_of(exponent)
    _, full = huffman.codes(lengths)
    code_cost = np.where(lengths[symbols] > 0, lengths[symbols], full[ESCAPE] + 8).sum()
    if (exponent == exponent[0]).all():
        code_cost = 0
    sparse_bits = 32 + m * (low + 1) + m + ((n - 1) >> low) + m + total + int(kept.sum())
    dense_bits = 544 + int(code_cost) + int((1 + kept).sum())
    if sparse_bits >= dense_bits:
        return None

    number = np.arange(m)
    highs = np.zeros(m + ((n - 1) >> low), np.uint8)
    highs[(at >> low) + number] = 1
    unary = np.zeros(m + total, np.uint8)
    unary[number + np.cumsum(distance)] = 1
    parts = (
        _bit_string(sign[at] | (at & ((1 << low) - 1)) << 1, np.full(m, low + 1)),
        highs,
        unary,
        _bit_string(mantissa[at] >> (23 - kept), kept),
    )
    blob = m.to_bytes(2, "little") + total.to_bytes(2, "little")
    blob += b"".join(np.packbits(part, bitorder="little").tobytes() for part in parts)
    return bytes(pad4(bytearray(blob)))


def decode_sparse(data: np.ndarray, n: int, floors: np.ndarray) -> np.ndarray:
    m, total = (int(v) for v in data[:4].view("<u2"))
    if m == 0 or m > n:
        raise Corrupt("a sparse block claims an impossible number of values")
    low = _low_bits(m, n)
    at = 4

    def section(bits: int) -> np.ndarray:
        nonlocal at
        size = (bits + 7) // 8
        if at + size > data.size:
            raise Corrupt("a sparse block is shorter than its head says")
        flags = np.unpackbits(data[at : at + size], bitorder="little")
        at += size
        if flags[bits:].any():
            raise Corrupt("padding bits of a sparse block are set")
        return flags[:bits]

    lows = _bit_fields(section(m * (low + 1)), np.full(m, low + 1))
    highs = np.flatnonzero(section(m + ((n - 1) >> low)))
    unary = np.flatnonzero(section(m + total))
    if highs.size != m or unary.size != m or unary[-1] != m + total - 1:
        raise Corrupt("the bit vectors of a sparse block do not hold as many ones as it has values")
    position = (highs - np.arange(m)) << low | lows >> 1
    if position[-1] >= n or (np.diff(position) <= 0).any():
        raise Corrupt("the positions of a sparse block do not ascend")
    exponent = np.diff(unary, prepend=-1) - 1 + 127 + floors[position]
    if (exponent < 1).any() or (exponent > 255).any():
        raise Corrupt("an exponent of a sparse block is out of range (or the floors differ from the encoder's)")
    kept = kept_bits(exponent, NEAR, floors[position])
    mantissa = _bit_fields(section(int(kept.sum())), kept) << (23 - kept)
    if data.size != (at + 3) // 4 * 4 or data[at:].any():
        raise Corrupt("a sparse block has the wrong size or padding")
    values = np.zeros(n, np.uint32)
    values[position] = (lows & 1) << 31 | exponent << 23 | mantissa
    return values


def _bit_string(values: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The values' bits one after the other, lowest first, as an array of 0 and 1."""
    bits = [(int(v) >> i) & 1 for v, w in zip(values, widths) for i in range(int(w))]
    return np.array(bits, np.uint8)


def _bit_fields(bits: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The inverse of _bit_string."""
    values, at = [], 0
    for width in widths:
        field = bits[at : at + int(width)]
        values.append(int(sum(int(bit) << i for i, bit in enumerate(field))))
        at += int(width)
    return np.array(values, np.int64)
