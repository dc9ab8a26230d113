"""What all engines share: the constants of docs/format.md and the description of one coding job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import Unsupported

BLOCK = 4096  # values per block
LANES = 32
SEGMENT = 32 * BLOCK  # values that share a code table
TABLE_BYTES = 128
ESCAPE = 256
BODY_HEAD_BYTES = 8
DENSE_HEAD_BYTES = 4 + 2 * LANES
SAMPLE_ROWS = 16  # every 16th row of a block is sampled for its base and for the code lengths
EXACT = -128  # the floor that means: keep this value as it is
COARSEST = 103  # floors above are taken as this one: adding 2^(floor + 23) rounds to the grid and stays finite

MOST_SHIFT = 127  # of floors, for sums; more than any number of ranks needs

RAW, DENSE, SPARSE = 0, 1, 2

FIXED, NEAR, PAPER = 0, 1, 2
Count = TypeVar("Count", int, npt.NDArray[np.int64])  # of values: of one tensor, or of many

CODINGS = {"lossless": FIXED, "keep": FIXED, "near": NEAR, "paper": PAPER}


@dataclass(frozen=True)
class FloatLayout:
    """How a float type splits into exponent and field (sign and mantissa)."""

    code: int  # its dtype code on the wire
    item_bytes: int
    exponent_bits: int
    field_bits: int


FLOATS = {
    torch.float32: FloatLayout(0, 4, 8, 24),
    torch.bfloat16: FloatLayout(1, 2, 8, 8),
    torch.float16: FloatLayout(2, 2, 5, 11),
}


def float_layout(dtype: torch.dtype) -> FloatLayout:
    try:
        return FLOATS[dtype]
    except KeyError:
        raise Unsupported(f"gcomp codes float32, bfloat16 and float16, not {dtype}: convert the tensor first") from None


@dataclass(frozen=True)
class Job:
    """One coding job: the mode and its numbers, as the engines need them."""

    mode: str  # lossless, keep, near or paper
    keep: int = 23  # mantissa bits, for mode keep
    truncate: bool = False  # cut instead of rounding, for mode keep
    limit: int = 8  # longest code
    shift: int = 0  # added to every floor: a sum of N ranks is coded on a grid 2^floor(log2 N) coarser
    book: int = 0  # id of a shared book; 0: tables in the frame

    @property
    def coding(self) -> int:
        return CODINGS[self.mode]


@dataclass(frozen=True)
class Floor:
    """Floors that are computed where they are used, from the parameter and the optimizer's second moment.

    With E the exponent field: f = E(theta) + (max(E(second) + c1, c2) >> 1) + c0, without the middle term if
    `second` is None. A zero or subnormal theta, and a result below -127, give EXACT; above COARSEST is COARSEST.
    """

    theta: torch.Tensor  # (n,) float32
    second: torch.Tensor | None  # (n,) float32
    c0: int
    c1: int = 0
    c2: int = 0

    def numel(self) -> int:
        return self.theta.numel()

    def __getitem__(self, part: slice) -> Floor:
        second = None if self.second is None else self.second[part]
        return Floor(self.theta[part], second, self.c0, self.c1, self.c2)

    def to(self, device: torch.device) -> Floor:
        second = None if self.second is None else self.second.to(device)
        return Floor(self.theta.to(device), second, self.c0, self.c1, self.c2)

    def tensor(self) -> torch.Tensor:
        """The floors as an int8 tensor, in plain torch operations."""
        theta = (self.theta.detach().reshape(-1).view(torch.int32) >> 23) & 255
        f = theta + self.c0
        if self.second is not None:
            second = (self.second.detach().reshape(-1).view(torch.int32) >> 23) & 255
            f = f + ((second + self.c1).clamp(min=self.c2) >> 1)
        f = torch.where((theta == 0) | (f < -127), EXACT, f.clamp(max=COARSEST))
        return f.to(torch.int8)


def blocks_of(numel: Count) -> Count:
    return -(-numel // BLOCK)


def segments_of(numel: Count) -> Count:
    return -(-numel // SEGMENT)


def index_offset(numel: Count, book: int) -> Count:
    """Where the block index starts in the body."""
    return (0 if book else TABLE_BYTES) * segments_of(numel) + BODY_HEAD_BYTES


def blocks_offset(numel: Count, book: int) -> Count:
    """Where the first block starts in the body."""
    return index_offset(numel, book) + (2 * blocks_of(numel) + 3) // 4 * 4


def body_bound(numel: Count, dtype: torch.dtype, book: int = 0) -> Count:
    """No body is longer: every block raw."""
    item = float_layout(dtype).item_bytes
    return blocks_offset(numel, book) + (numel * item + 3) // 4 * 4
