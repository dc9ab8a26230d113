"""What the engines of `int8`, `int4` and `fp8` share; docs/format.md, "Block-scaled codes", says what it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import Unsupported

ALIGN = 32  # every part's codes begin at a multiple of so many values
SCALE_ALIGN = 16  # bytes: the scales of a frame are filled up to a multiple of it
BLOCKS = (32, 64, 128, 256)  # values that share a scale
INT8, INT4, FP8 = 0, 1, 2  # kinds
_MOST = {INT8: 127.0, INT4: 7.0, FP8: 448.0}  # the largest number that a code stands for
NAN_SCALE, LEAST_SCALE = 0x7FC0, 0x0080  # bfloat16 bits; the smallest scale is 2^-126


class Form(NamedTuple):
    """How values are coded."""

    kind: int
    block: int
    hadamard: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.kind == INT4 else 8

    @property
    def most(self) -> float:
        return _MOST[self.kind]

    @property
    def largest_scale(self) -> int:
        """As bfloat16 bits: the largest code times this is finite."""
        return int((np.finfo(np.float32).max / np.float32(self.most)).view(np.uint32)) >> 16


class Places(NamedTuple):
    """Where the parts of a frame lie in it."""

    scales: npt.NDArray[np.int64]  # number of each part's first scale
    codes: npt.NDArray[np.int64]  # byte of its first code
    size: int  # bytes of the frame


def places(counts: Sequence[int], form: Form) -> Places:
    """A frame whose parts have so many values: all scales, then all codes."""
    lengths = np.array(counts, np.int64)
    blocks = -(-lengths // form.block)
    room = -(-lengths // ALIGN) * ALIGN * form.bits // 8
    begin = -(-2 * int(blocks.sum()) // SCALE_ALIGN) * SCALE_ALIGN
    return Places(np.cumsum(blocks) - blocks, begin + np.cumsum(room) - room, begin + int(room.sum()))


# A part as native/gradzip.h has it.
PART = np.dtype(
    [(name, "<u8") for name in ("values", "out", "n", "start", "key", "signs", "scale_at", "code_at")]
    + [("offset", "<u4"), ("padding", "<u4")]
)


@dataclass
class Parts:
    """The parts of one frame, as an array that is made once and filled in again in each step.

    `values` are a rank's own, flat float32 tensors; `outs` is where decoded ones go.
    """

    form: Form
    values: Sequence[torch.Tensor]
    outs: Sequence[torch.Tensor]
    starts: Sequence[int] | npt.NDArray[np.int64] = ()

    def __post_init__(self) -> None:
        if any(tensor.dtype != torch.float32 for tensor in (*self.values, *self.outs)):
            raise Unsupported("block-scaled codes are made of float32 values: convert the tensor first")
        self.places = places([part.numel() for part in self.outs], self.form)
        self.array = np.zeros(len(self.outs), PART)
        if self.values:
            self.array["values"] = [part.data_ptr() for part in self.values]
        self.array["out"] = [part.data_ptr() for part in self.outs]
        self.array["n"] = [part.numel() for part in self.outs]
        self.array["start"] = self.starts if len(self.starts) else 0
        self.array["scale_at"], self.array["code_at"] = self.places.scales, self.places.codes

    def fill(self, keys: object, signs: object, offset: int = 0) -> Parts:
        """Takes the keys of a step: one for each part, or the same for all."""
        self.array["key"], self.array["signs"], self.array["offset"] = keys, signs, offset
        return self

    def check(self, frames: Sequence[torch.Tensor | None]) -> None:
        """Refuses frames of another size: engines read as much as the parts say."""
        for frame in frames:
            if frame is not None and frame.numel() != self.places.size:
                raise Unsupported(f"a frame of {frame.numel()} bytes for parts that take {self.places.size}")
