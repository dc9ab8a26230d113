"""How small a codec's output could be: the bound that its size is compared with.

A float's exponent is coded, its sign and mantissa are kept as they are. So the bound is the order-0 entropy of the
exponents, taken afresh every 16384 values, plus one sign bit and the kept mantissa bits of every value; a zero
carries its exponent's code and nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..codecs import Codec, baseline
from ..codecs.gcomp import GComp
from ..engines.layout import EXACT, Floor

WINDOW = 16384
MANTISSA_BITS = 23


def bound_bits(codec: Codec, values: torch.Tensor, floor: torch.Tensor | Floor | None = None) -> float | None:
    """Bits per value at the least for `values`, what a codec made of a float32 tensor (that is, as decoded).

    None for codecs that do not keep every value's exponent: the bound says nothing about them.
    """
    bits = values.detach().reshape(-1).numpy().view(np.uint32)
    if not bits.size:
        return None
    exponent = (bits >> MANTISSA_BITS & 255).astype(np.int64)
    kept = _kept_bits(codec, exponent, floor)
    if kept is None:
        return None
    fields = np.where(bits == 0, 0, 1 + kept).sum()
    return (exponent_bits(exponent) + float(fields)) / bits.size


def exponent_bits(exponent: npt.NDArray[np.int64]) -> float:
    """Order-0 entropy of the exponents in bits, summed over windows."""
    total = 0.0
    for start in range(0, exponent.size, WINDOW):
        count = np.bincount(exponent[start : start + WINDOW], minlength=256)
        count = count[count > 0]
        total += float((count * np.log2(count.sum() / count)).sum())
    return total


def _kept_bits(
    codec: Codec, exponent: npt.NDArray[np.int64], floor: torch.Tensor | Floor | None
) -> npt.NDArray[np.int64] | int | None:
    if codec.lossless:
        return MANTISSA_BITS
    if isinstance(codec, baseline.Cast) and codec.to == "bf16":
        return 7
    if not isinstance(codec, GComp):
        return None
    if codec.keep is not None:
        return codec.keep
    if floor is None:
        return None
    f = (floor.tensor() if isinstance(floor, Floor) else floor).reshape(-1).numpy().astype(np.int64)
    exact = (f == EXACT) | (exponent == 255)
    if codec.mode == "near":
        kept = np.clip(exponent - 127 - f, 0, MANTISSA_BITS)
        return np.where(exact, MANTISSA_BITS, kept)
    level = np.clip((f - (exponent - 127) - 1) // 6, 0, 3)  # paper mode: 2 bits say how many sixths are cut
    return 2 + MANTISSA_BITS - 6 * np.where(exact, 0, level)
