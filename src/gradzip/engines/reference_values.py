"""Values in the reference engine: what each mode maps them to, and how they split (docs/format.md)."""

from __future__ import annotations

import numpy as np
import torch

from .layout import COARSEST, EXACT, FIXED, LANES, PAPER, SAMPLE_ROWS, FloatLayout, Floor, Job

_INFINITY = 0x7F800000
_QUIET_NAN = 0x7FC00000


def map_values(bits: np.ndarray, job: Job, floors: np.ndarray | None) -> np.ndarray:
    """q(x) on the bit patterns of float32 values."""
    if job.mode == "lossless":
        return bits
    sign, magnitude = bits & 0x80000000, (bits & 0x7FFFFFFF).astype(np.int64)
    exponent = magnitude >> 23
    if job.mode == "keep":
        kept = np.full(bits.shape, job.keep, np.int64)
    elif job.mode == "near":
        assert floors is not None
        kept = np.where(floors == EXACT, 23, np.minimum(23, exponent - 127 - floors))
    else:
        assert floors is not None
        kept = 23 - 6 * paper_levels(exponent, floors)
    cut = 23 - np.clip(kept, 0, 23)  # bits that go
    truncated = magnitude >> cut << cut
    if job.mode == "paper" or (job.mode == "keep" and job.truncate):
        result = truncated
    else:
        # Ties to even multiples of the grid. With no bit kept the multiple is the implicit 1, which is odd.
        odd = np.where(cut == 23, 1, magnitude >> cut & 1)
        half = (1 << cut) >> 1
        rounded = (magnitude + np.where(cut > 0, half - 1 + odd, 0)) >> cut << cut
        if job.mode == "keep":
            result = np.where(rounded < _INFINITY, rounded, truncated)
        else:
            assert floors is not None
            # Below the grid: more than half a step rounds up to one step, the rest to zero.
            one_step = (np.maximum(floors, -126).astype(np.int64) + 127) << 23
            up = (kept == -1) & (magnitude & 0x7FFFFF != 0)
            result = np.where(kept < 0, np.where(up, one_step, 0), rounded)
    result = np.where(exponent == 0, 0, result)
    special = np.where(magnitude > _INFINITY, _QUIET_NAN, _INFINITY)
    result = np.where(exponent == 255, special, result)
    return np.where(result == 0, 0, result | sign).astype(np.uint32)


def paper_levels(exponent: np.ndarray, reach: np.ndarray) -> np.ndarray:
    span = reach.astype(np.int64) - (exponent.astype(np.int64) - 127) - 1
    level = (span >= 6).astype(np.int64) + (span >= 12) + (span >= 18)
    return np.where((reach == EXACT) | (exponent == 255), 0, level)


def floor_values(floor: torch.Tensor | Floor | None, job: Job) -> np.ndarray | None:
    if floor is None or job.coding == FIXED:
        return None
    floors = (floor.tensor() if isinstance(floor, Floor) else floor).numpy().astype(np.int64)
    shifted = np.minimum(floors + job.shift, COARSEST)
    return np.where(floors == EXACT, EXACT, shifted)


def split(values: np.ndarray, layout: FloatLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exponents, mantissas and signs as int64."""
    mantissa_bits = layout.field_bits - 1
    v = values.astype(np.int64)
    exponent = v >> mantissa_bits & ((1 << layout.exponent_bits) - 1)
    return exponent, v & ((1 << mantissa_bits) - 1), v >> (8 * layout.item_bytes - 1)


def symbols_of(exponent: np.ndarray) -> tuple[np.ndarray, int]:
    """Symbols relative to the base of a block, and that base."""
    base = base_of(exponent)
    return np.where(exponent == 0, 0, (exponent - base - (exponent <= base)) & 255), base


def base_of(exponent: np.ndarray) -> int:
    """The one exponent of a block, or the rounded mean of the non-zero ones in its sampled rows."""
    if (exponent == exponent[0]).all():
        return int(exponent[0])
    sample = sampled(exponent)
    count = int((sample > 0).sum())
    return (int(sample.sum()) + count // 2) // count if count else 0


def sampled(values: np.ndarray) -> np.ndarray:
    """Rows 0, 16, 32, ... of a block."""
    return np.concatenate([values[at : at + LANES] for at in range(0, values.size, SAMPLE_ROWS * LANES)])


def lane_part(
    exponent: np.ndarray, mantissa: np.ndarray, sign: np.ndarray, coding: int, floors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bits that go through the lanes in coding 1 and 2, and how many."""
    kept = kept_bits(exponent, coding, floors)
    bits = sign << kept | mantissa >> (23 - kept)
    return np.where(exponent == 0, 0, bits), np.where(exponent == 0, 0, 1 + kept)


def kept_bits(exponent: np.ndarray, coding: int, floors: np.ndarray) -> np.ndarray:
    if coding == PAPER:
        return 23 - 6 * paper_levels(exponent, floors)
    kept = np.clip(exponent - 127 - floors, 0, 23)
    return np.where((floors == EXACT) | (exponent == 255), 23, kept)


def pad4(data: bytearray) -> bytearray:
    return data + bytes(-len(data) % 4)
