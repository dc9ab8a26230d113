"""The codec `noise`: unbiased rounding to a grid that keeps the noise at a stated share of the gradient.

docs/format.md has the arithmetic and the frames ("Noise"), docs/codecs.md what is promised. As a codec of single
tensors it sends one part; an exchange puts many parts into one frame and calls the engines itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import engines, wire
from ..engines import noise_layout
from ..engines.noise_layout import STRIDE, Part
from ..errors import Corrupt, Unsupported
from .base import Codec, Context, deliver, register, require_float32

LEAST, MOST = 0.0001, 0.3


@register
@dataclass(frozen=True)
class Noise(Codec):
    """Multiples of a level, rounded at random; the level makes the noise a share of the tensor's mean square.

    A frame that is encoded by itself is one lossy hop: its ranks' frames are averaged as they are.
    """

    name: ClassVar[str] = "noise"
    wire_id: ClassVar[int] = 17
    summary: ClassVar[str] = "multiples of a level, rounded at random"
    error: ClassVar[str] = "zero-mean noise, a stated share of the mean square"
    fixed_size: ClassVar[bool] = False
    routes: ClassVar[tuple[str, ...]] = ("alltoall",)
    shaped: ClassVar[bool] = True

    share: str | float = 0.01  # of the noise in the mean square: 0.01% to 30%; lower = closer to the gradient

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", read_share(self.share))

    @property
    def small_form(self) -> str:
        """Small tensors travel in the same messages as large ones: there is nothing to gain by another codec."""
        return str(self)

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        require_float32(self, dtype)
        return noise_layout.body_bound(counts_of(numel))

    def _check_claim(self, header: wire.Header) -> None:
        if header.numel > noise_layout.BLOCK * header.body_bytes:
            raise Corrupt(f"{header.numel} values cannot be in a body of {header.body_bytes} bytes")

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        engine = engines.noise(x.device)
        values, shape = x.float(), _shape(ctx, x.numel())
        level = noise_layout.level(engine.statistics(values, shape), float(self.share), ctx.world, hops=1)
        offset = noise_layout.offset_of(ctx.rank, ctx.world)
        parts = []
        for start in _starts(x.numel()):
            key = noise_layout.key_of(ctx.seed, ctx.step, ctx.name, "own", start)
            here = slice(start, start + STRIDE)
            parts.append(Part(values[here], level, None if shape is None else shape[here], start, key, offset))
        size, _ = engine.encode(parts, body, ctx.step)
        return int(size)

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        require_float32(self, out.dtype)
        shape = _shape(ctx, out.numel())
        values = out if out.dtype == torch.float32 else torch.empty(out.numel(), device=out.device)
        parts = []
        for start in _starts(out.numel()):
            here = slice(start, start + STRIDE)
            parts.append(Part(values[here], shape=None if shape is None else shape[here], start=start))
        engines.noise(out.device).decode(body, parts, add and values is out)
        if values is not out:
            deliver(values, out, add)


def read_share(share: float | str) -> float:
    """A share as a number: 0.01 for 0.01, "0.01" and "1%"."""
    text = str(share).strip()
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise Unsupported(f"noise:share={text!r} is not a number: write a share such as 1% or 0.01") from None
    if not LEAST <= value <= MOST:
        cure = "gcomp:mode=lossless sends gradients exactly" if value < LEAST else "more noise feeds on itself"
        raise Unsupported(f"noise:share={text}: choose 0.01% to 30%, such as 1% or 0.01; {cure}")
    return value


def counts_of(numel: int) -> list[int]:
    """The values of each part of a tensor that is sent by itself."""
    return [min(STRIDE, numel - start) for start in _starts(numel)]


def _starts(numel: int) -> range:
    return range(0, max(numel, 1), STRIDE)


def _shape(ctx: Context, numel: int) -> torch.Tensor | None:
    shape = ctx.shape
    if shape is None:
        return None
    if shape.dtype != torch.int8 or shape.numel() != numel:
        raise Unsupported(f"a shape of {shape.numel()} x {shape.dtype} for {numel} values: it has an int8 for each")
    return shape.reshape(-1).contiguous()
