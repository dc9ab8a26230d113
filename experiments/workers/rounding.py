"""What gcomp's modes make of float32 values, as torch arithmetic: decode(encode(x)) without the bits between.

docs/format.md defines it, tests/test_workers.py compares both. Zero comes out as +0, subnormals as 0, NaN as a NaN.
"""

from __future__ import annotations

import torch

from gradzip.codecs.gcomp import paper_levels
from gradzip.engines.layout import COARSEST, EXACT

_TINIEST = 2.0**-126  # of the normal numbers
_WHOLE = 2.0**24  # from here on every float32 is an integer
_INFINITY = 0x7F800000


def near(x: torch.Tensor, floors: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """x rounded to multiples of 2^(floors + shift), ties to even; as it is where the floor is EXACT.

    `floors` are int8, and broadcast over the workers in x's first dimension.
    """
    exponent = floors.int()
    exponent = torch.where(exponent == EXACT, 0, (exponent + shift).clamp(max=COARSEST))
    step = ((exponent + 127) << 23).view(torch.float32)  # a power of two by its exponent field
    step = torch.where(exponent == -127, 2.0**-127, step)  # the one that is subnormal
    x = _flushed(x)
    scaled = x / step
    rounded = torch.where((scaled.abs() >= _WHOLE) | (floors == EXACT), x, scaled.round() * step)
    return _flushed(rounded)


def keep(x: torch.Tensor, bits: int, truncate: bool = False) -> torch.Tensor:
    """x with so many mantissa bits, rounded to nearest even; cut where that would overflow, or with `truncate`."""
    x, cut = _flushed(x), 23 - bits
    if cut == 0:
        return x
    pattern = x.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    cut_off = magnitude >> cut << cut
    if truncate:
        result = cut_off
    else:
        odd = 1 if cut == 23 else (magnitude >> cut) & 1
        rounded = (magnitude + ((1 << (cut - 1)) - 1) + odd) >> cut << cut
        result = torch.where((rounded < _INFINITY) & (rounded >= 0), rounded, cut_off)
    result = torch.where(magnitude >= _INFINITY, magnitude, result) | (pattern & -0x80000000)
    return result.view(torch.float32)


def paper(x: torch.Tensor, reaches: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """x without the 0, 6, 12 or 18 bits that GComp's rule drops; `reaches` broadcast over the workers as above."""
    x = _flushed(x)
    pattern, cut = x.view(torch.int32), 6 * paper_levels(x, reaches.expand_as(x), shift).int()
    result = torch.where(cut > 0, pattern >> cut << cut, pattern)  # the sign stays: shifts are arithmetic
    return torch.where(x.isfinite(), result.view(torch.float32), x)


def _flushed(x: torch.Tensor) -> torch.Tensor:
    """Subnormals and -0 as +0."""
    return torch.where(x.abs() < _TINIEST, 0.0, x)
