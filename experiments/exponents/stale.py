"""What a code book costs on other data than it was made for: exponents of gradients, arithmetic only.

Three ways to make a code from a histogram:

    native    Huffman without a limit; every symbol has a code, however rare
    cut       GComp's: of the native codes those longer than 8 bits are replaced by one of 8 bits and the raw byte
    limited   gradzip's: the best code of at most 8 bits, with an escape for what is rarer than 1/1024
"""

from __future__ import annotations

import heapq

import numpy as np
import torch

from gradzip.engines import huffman
from gradzip.engines.layout import BLOCK, LANES, SAMPLE_ROWS, SEGMENT, float_layout
from gradzip.engines.reference_values import split, symbols_of

LIMIT = 8
RAW_BITS = 8  # of an exponent behind the escape


def raw_exponents(gradient: torch.Tensor) -> np.ndarray:
    """Histogram (256,) of the exponent fields."""
    return np.bincount(_exponents(gradient), minlength=256)


def relative_symbols(gradient: torch.Tensor) -> np.ndarray:
    """Histogram (256,) of the symbols of docs/format.md: exponents relative to the mean of their block.

    Blocks of zeros alone are left out: they cost no code bits.
    """
    exponents = _exponents(gradient)
    counts = np.zeros(256, np.int64)
    for start in range(0, exponents.size, BLOCK):
        block = exponents[start : start + BLOCK]
        if block.any():
            counts += np.bincount(symbols_of(block)[0], minlength=256)
    return counts


def _exponents(gradient: torch.Tensor) -> np.ndarray:
    return split(gradient.view(torch.int32).numpy().view(np.uint32), float_layout(torch.float32))[0]


def native(source: np.ndarray) -> np.ndarray:
    """Bits (256,) that each symbol costs in the Huffman code of a histogram; counts of zero are taken as one."""
    heap: list[tuple[int, int, tuple[int, ...]]] = [(max(1, int(n)), s, (s,)) for s, n in enumerate(source)]
    heapq.heapify(heap)
    bits = np.zeros(256, np.int64)
    while len(heap) > 1:
        (weight, order, symbols), (other_weight, _, others) = heapq.heappop(heap), heapq.heappop(heap)
        bits[list(symbols + others)] += 1
        heapq.heappush(heap, (weight + other_weight, order, symbols + others))
    return bits


def cut(source: np.ndarray) -> np.ndarray:
    bits = native(source)
    return np.where(bits > LIMIT, LIMIT + RAW_BITS, bits)


def limited(source: np.ndarray) -> np.ndarray:
    lengths = huffman.code_lengths(source, LIMIT)
    return np.where(lengths > 0, lengths, huffman.escape_length(lengths) + RAW_BITS).astype(np.int64)


def mean_bits(bits: np.ndarray, target: np.ndarray, values: int) -> float:
    """Per value, of a histogram that stands for so many values."""
    return float((bits * target).sum() / values)


def entropy(target: np.ndarray, values: int) -> float:
    shares = target[target > 0] / target.sum()
    return float(-(shares * np.log2(shares)).sum() * target.sum() / values)


def windowed_entropy(gradient: torch.Tensor, window: int = 1 << 14) -> float:
    """Of the raw exponents, each window of values by itself: what no code with a table per window can beat."""
    parts = torch.split(gradient, window)
    return sum(entropy(raw_exponents(part), gradient.numel()) for part in parts)


def segment_bits(gradient: torch.Tensor, relative: bool) -> float:
    """Bits per exponent with one table per segment, made from a sixteenth of it, as the encoder does."""
    total = 0.0
    for segment in torch.split(gradient, SEGMENT):
        blocks = torch.split(segment, BLOCK)
        samples = [torch.cat(torch.split(block, LANES)[::SAMPLE_ROWS]) for block in blocks]
        if relative:
            source = sum((relative_symbols(sample) for sample in samples), np.zeros(256, np.int64))
            target = relative_symbols(segment)
        else:
            source, target = raw_exponents(torch.cat(samples)), raw_exponents(segment)
        total += float((limited(source) * target).sum())
    return total / gradient.numel()
