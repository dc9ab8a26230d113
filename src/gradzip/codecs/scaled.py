"""Block-scaled codecs: the values of a block share a scale, and each has a code of 8 or 4 bits, rounded at random.

docs/format.md, "Block-scaled codes", has the arithmetic. As codecs of single tensors they send one part; an exchange
puts many parts into one frame and calls the engines itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import engines, wire
from ..engines import noise_layout, scaled_layout
from ..engines.scaled_layout import BLOCKS, FP8, INT4, INT8, Form, Parts
from ..errors import Corrupt, Unsupported
from .base import Context, Lossy, deliver, register, require_float32

_HEAD = struct.Struct("<HBB4xQ")  # block, hadamard, zero; key of the signs


@dataclass(frozen=True)
class Scaled(Lossy):
    """What they share. A scale is the block's largest magnitude over the largest number that a code stands for."""

    kind: ClassVar[int]
    error: ClassVar[str] = "noise of up to a step of its block, zero on average"
    routes: ClassVar[tuple[str, ...]] = ("alltoall",)

    block: int = 128  # values that share a scale: 32, 64, 128 or 256; fewer = closer to the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block not in BLOCKS:
            raise Unsupported(f"{self.name}:block={self.block}: choose {', '.join(map(str, BLOCKS))}")

    @property
    def form(self) -> Form:
        return Form(self.kind, self.block, bool(getattr(self, "hadamard", False)))

    @property
    def small_form(self) -> str:
        """Small tensors travel in the same messages as large ones: there is nothing to gain by another codec."""
        return str(self) if self.error_memory is None else "identity"

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        require_float32(self, dtype)
        return _HEAD.size + scaled_layout.places([numel], self.form).size

    def _check_claim(self, header: wire.Header) -> None:
        if header.numel > 2 * header.body_bytes:
            raise Corrupt(f"{header.numel} values cannot be in a body of {header.body_bytes} bytes")

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size, values = self._body_bound(x.numel(), x.dtype), [x.float()]
        signs = noise_layout.key_of(ctx.seed, ctx.step, ctx.name, "signs", 0) if self.form.hadamard else 0
        parts = Parts(self.form, values, values).fill(
            noise_layout.key_of(ctx.seed, ctx.step, ctx.name, "own", 0), signs,
            noise_layout.offset_of(ctx.rank, ctx.world) & 0xFFFFFFFF,
        )  # fmt: skip
        head = bytearray(_HEAD.pack(self.block, self.form.hadamard, 0, signs))
        body[: _HEAD.size] = torch.frombuffer(head, dtype=torch.uint8).to(body.device)
        engines.scaled(x.device).code(parts, [], out=body[_HEAD.size : size])
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        require_float32(self, out.dtype)
        if body.numel() < _HEAD.size:
            raise Corrupt(f"a {self.name} body of {body.numel()} bytes ends inside its head")
        head = bytes(body[: _HEAD.size].cpu().numpy())
        block, hadamard, zero, signs = _HEAD.unpack(head)
        form = Form(self.kind, block, bool(hadamard))
        if block not in BLOCKS or hadamard > (self.kind != FP8) or zero or any(head[4:8]):
            raise Corrupt(f"the head of the {self.name} body makes no sense")
        values = out if out.dtype == torch.float32 and not add else torch.empty(out.numel(), device=out.device)
        parts = Parts(form, [], [values]).fill(0, signs)
        frame = body[_HEAD.size :]
        if frame.numel() != parts.places.size:
            raise Corrupt(f"{out.numel()} values do not fit a {self.name} body of {body.numel()} bytes")
        engines.scaled(out.device).code(parts, [frame])
        if values is not out:
            most = torch.finfo(out.dtype).max  # a code may stand for more than a type of 16 bits holds
            deliver(values.clamp_(-most, most), out, add)


@register
@dataclass(frozen=True)
class Int8(Scaled):
    """Integers from -127 to 127."""

    name: ClassVar[str] = "int8"
    wire_id: ClassVar[int] = 18
    summary: ClassVar[str] = "8-bit integers with a scale per block, rounded at random"
    kind: ClassVar[int] = INT8

    hadamard: bool = False  # a random-sign Walsh-Hadamard transform of each block first: spreads large values


@register
@dataclass(frozen=True)
class Int4(Scaled):
    """Integers from -7 to 7."""

    name: ClassVar[str] = "int4"
    wire_id: ClassVar[int] = 19
    summary: ClassVar[str] = "4-bit integers with a scale per block, rounded at random"
    kind: ClassVar[int] = INT4

    block: int = 32  # values that share a scale: 32, 64, 128 or 256; fewer = closer to the gradient
    hadamard: bool = False  # a random-sign Walsh-Hadamard transform of each block first: spreads large values


@register
@dataclass(frozen=True)
class Fp8(Scaled):
    """Floats of 8 bits, float8_e4m3fn."""

    name: ClassVar[str] = "fp8"
    wire_id: ClassVar[int] = 20
    summary: ClassVar[str] = "8-bit floats (e4m3) with a scale per block, rounded at random"
    kind: ClassVar[int] = FP8
