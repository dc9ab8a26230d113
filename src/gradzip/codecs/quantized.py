"""Quantised codecs: every value is sent, in a few bits.

`sign` and `onebit` are biased and live on error feedback. `qsgd`, `terngrad` and `natural` round at random so that the
mean of what is decoded is the tensor itself. Ranks draw different random numbers: equal ones would make equal errors,
which an average does not reduce.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from .. import wire
from ..errors import Corrupt, Unsupported
from .base import Context, Lossy, deliver, register, require_float32, typed
from .packing import pack, pack_trits, packed_bytes, trit_bytes, unpack, unpack_trits
from .random import key_of, stream, streams

_NOISE_BITS = 24


class _Quantized(Lossy, ABC):
    """What they share: a body whose size follows from numel, and arithmetic in float32."""

    codes_rows: ClassVar[bool] = True

    @abstractmethod
    def _body_bytes(self, numel: int) -> int: ...

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        require_float32(self, dtype)
        return self._body_bytes(numel)

    def _check_claim(self, header: wire.Header) -> None:
        if header.numel > 8 * header.body_bytes:
            raise Corrupt(f"{header.numel} values cannot be in a body of {header.body_bytes} bytes")

    def _check_size(self, body: torch.Tensor, out: torch.Tensor) -> None:
        require_float32(self, out.dtype)
        if body.shape[-1] != self._body_bytes(out.shape[-1]):
            raise Corrupt(f"{out.shape[-1]} values do not fit a {self.name} body of {body.shape[-1]} bytes")


def _drawn(ctx: Context, x: torch.Tensor, bits: int) -> torch.Tensor:
    """So many random bits for each value, this rank's own."""
    if x.dim() > 1:
        return streams([_key(ctx, name) for name in ctx.names], x.shape[-1], bits)
    return stream(_key(ctx, ctx.name), x.numel(), bits, x.device)


def _key(ctx: Context, name: str) -> int:
    return key_of(ctx.seed, ctx.step, f"{name}#{ctx.rank}")


def _noise(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """Uniform float32 values in [0, 1) for each value."""
    return _drawn(ctx, x, _NOISE_BITS).float().mul_(2.0**-_NOISE_BITS)


def _head(body: torch.Tensor, size: int, own: int | None = None) -> list[int]:
    """The first bytes of a body; of rows, which have the same but for byte `own`."""
    first = body if body.dim() == 1 else body[0]
    if body.dim() > 1:
        differ = body[:, :size] != first[:size]
        if own is not None:
            differ[:, own : own + 1] = False
        if bool(differ.any()):
            raise Corrupt("bodies that were made together have different heads")
    found: list[int] = first[:size].tolist()
    return found


def _either(bits: torch.Tensor, one: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """`one` where the bit is set, `zero` elsewhere. With single numbers torch.where is five times as slow on a CPU."""
    if bits.device.type != "cpu":
        return torch.where(bits.view(torch.bool), one, zero)
    pattern = zero.view(torch.int32)
    return bits.int().mul_(pattern ^ one.view(torch.int32)).bitwise_xor_(pattern).view(torch.float32)


def _as_bytes(*numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack(numbers, -1).float().view(torch.uint8)


@register
@dataclass(frozen=True)
class Sign(_Quantized):
    """Signs, times the mean magnitude (EF-SignSGD). Body: `[4] float32 scale`, one bit per value, set for minus."""

    name: ClassVar[str] = "sign"
    wire_id: ClassVar[int] = 12
    summary: ClassVar[str] = "signs and the mean magnitude"
    error: ClassVar[str] = "the differences in magnitude; fed back"

    @property
    def biased(self) -> bool:
        return True

    def _body_bytes(self, numel: int) -> int:
        return 4 + packed_bytes(numel, 1)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size = self._body_bytes(x.shape[-1])
        # in float64 the mean of equal values is that value, whatever the order of summation
        body[..., :4] = _as_bytes(x.abs().sum(-1, dtype=torch.float64) / max(x.shape[-1], 1))
        body[..., 4:size] = pack(x.signbit().view(torch.uint8), 1)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        self._check_size(body, out)
        scale = typed(body[..., :4], torch.float32)
        deliver(_either(unpack(body[..., 4:], out.shape[-1], 1), -scale, scale), out, add)


@register
@dataclass(frozen=True)
class OneBit(_Quantized):
    """The mean of the values from zero up, and that of those below: 1-bit SGD.

    Body: `[4] float32` the upper mean, `[4] float32` the lower, one bit per value, set for below zero.
    """

    name: ClassVar[str] = "onebit"
    wire_id: ClassVar[int] = 13
    summary: ClassVar[str] = "which values are negative, and the means of both kinds"
    error: ClassVar[str] = "the differences among both kinds; fed back"

    @property
    def biased(self) -> bool:
        return True

    def _body_bytes(self, numel: int) -> int:
        return 8 + packed_bytes(numel, 1)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size = self._body_bytes(x.shape[-1])
        below = x < 0
        count = below.count_nonzero(-1)
        negative = x.clamp(max=0).nan_to_num_(0, math.inf, -math.inf)  # NaN is not below zero
        lower = negative.sum(-1, dtype=torch.float64) / count.clamp(min=1)
        upper = x.clamp(min=0).sum(-1, dtype=torch.float64) / (x.shape[-1] - count).clamp(min=1)
        body[..., :8] = _as_bytes(upper, lower)
        body[..., 8:size] = pack(below.view(torch.uint8), 1)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        self._check_size(body, out)
        means = typed(body[..., :8], torch.float32)
        upper, lower = means[..., :1], means[..., 1:]
        deliver(_either(unpack(body[..., 8:], out.shape[-1], 1), lower, upper), out, add)


@register
@dataclass(frozen=True)
class QSGD(_Quantized):
    """Multiples of a step that each bucket of values has for itself, rounded up or down at random.

    Levels run from -s to s with s = 2^(bits-1) - 1. The step is the bucket's norm over s: its largest magnitude, or
    (`norm=l2`) its Euclidean norm as in the paper's analysis, which makes more zeros and more noise.

    Body: `[1] bits`, `[3]` zero, `[4] bucket`, a float32 step for each bucket, `bits` bits of level + s for each value.
    """

    name: ClassVar[str] = "qsgd"
    wire_id: ClassVar[int] = 14
    summary: ClassVar[str] = "multiples of a step per bucket, rounded at random"
    error: ClassVar[str] = "noise of up to a step, zero on average"

    bits: int = 8  # per value, 2 to 8; higher = closer to the gradient
    bucket: int = 512  # values that share a step
    norm: str = "max"  # or l2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.bits <= 8:
            raise Unsupported(f"qsgd:bits={self.bits}: 2 to 8 per value")
        if not 1 <= self.bucket < 1 << 31:
            raise Unsupported(f"qsgd:bucket={self.bucket}: the number of values that share a step, at least 1")
        if self.norm not in ("max", "l2"):
            raise Unsupported(f"qsgd:norm={self.norm!r}: choose max or l2")

    def _body_bytes(self, numel: int) -> int:
        return 8 + 4 * -(-numel // self.bucket) + packed_bytes(numel, self.bits)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        numel = x.shape[-1]
        size, steps_end = self._body_bytes(numel), 8 + 4 * -(-numel // self.bucket)
        most = (1 << self.bits - 1) - 1
        width = max(min(self.bucket, numel), 1)
        buckets = pad(x.float(), (0, -numel % width)).view(*x.shape[:-1], -(-numel // width), width)
        if self.norm == "max":
            norm = buckets.abs().amax(-1)
        else:
            length = torch.linalg.vector_norm(buckets, dim=-1, dtype=torch.float64)
            norm = torch.where(length.isfinite(), length.clamp(max=torch.finfo(torch.float32).max), length).float()
        step = _short(norm / most)
        level = (buckets.abs() / step[..., None]).nan_to_num_(0, 0).flatten(-2)[..., :numel]
        whole = level.floor()
        whole += _noise(ctx, x) < level - whole
        code = whole.clamp_(max=most).copysign_(x.float()).add_(most).to(torch.uint8)
        body[..., :8] = torch.tensor([self.bits, 0, 0, 0, *self.bucket.to_bytes(4, "little")], dtype=torch.uint8)
        body[..., 8:steps_end] = step.view(torch.uint8)
        body[..., steps_end:size] = pack(code, self.bits)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        head, numel = _head(body, 8), out.shape[-1]
        bits, bucket = (head[0], int.from_bytes(bytes(head[4:]), "little")) if len(head) == 8 else (0, 0)
        if not 2 <= bits <= 8 or any(head[1:4]) or not 1 <= bucket < 1 << 31:
            raise Corrupt("the head of the qsgd body makes no sense")
        QSGD(bits, bucket)._check_size(body, out)
        steps_end = 8 + 4 * -(-numel // bucket)
        step = typed(body[..., 8:steps_end], torch.float32)
        code = unpack(body[..., steps_end:], numel, bits)
        most = (1 << bits - 1) - 1
        if bool((code > 2 * most).any()):
            raise Corrupt(f"a level is above {most}")
        values = code.float().sub_(most)
        width = min(bucket, numel)
        values *= step.repeat_interleave(width, -1, output_size=step.shape[-1] * width)[..., :numel]
        # A step that was rounded up may reach beyond what the type holds; NaN, from a step that is not finite, stays.
        deliver(values.clamp_(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max), out, add)


def _short(step: torch.Tensor) -> torch.Tensor:
    """A float32 step rounded up to 16 significant bits, but not to infinity: its multiples by 8 bits are exact then."""
    bits = (step.view(torch.int32) + 0xFF) & ~0xFF
    finite = bits.clamp(max=0x7F7FFF00).view(torch.float32)
    return torch.where(step.isfinite(), finite, step)


@register
@dataclass(frozen=True)
class TernGrad(_Quantized):
    """-s, 0 or s at random, s the largest magnitude. Body: `[4] float32 s`, five values to a byte."""

    name: ClassVar[str] = "terngrad"
    wire_id: ClassVar[int] = 15
    summary: ClassVar[str] = "-s, 0 or s at random, s the largest magnitude"
    error: ClassVar[str] = "noise of up to the largest value, zero on average"

    clip: float = 0.0  # cuts values at so many standard deviations first (2.5 in the paper), which is biased; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip < math.inf:
            raise Unsupported(f"terngrad:clip={self.clip}: in standard deviations, or 0 for no limit")

    @property
    def biased(self) -> bool:
        return self.clip > 0

    def _body_bytes(self, numel: int) -> int:
        return 4 + trit_bytes(numel)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size = self._body_bytes(x.shape[-1])
        magnitude = x.float().abs()
        scale = magnitude.amax(-1) if x.numel() else magnitude.sum(-1)
        if self.clip and x.numel():
            deviation = x.double().std(-1, correction=0)
            scale = torch.where(scale.isfinite(), scale.minimum((self.clip * deviation).float()), scale)
        drawn = _noise(ctx, x) < (magnitude / scale[..., None]).nan_to_num_(0, 0)
        body[..., :4] = _as_bytes(scale)
        body[..., 4:size] = pack_trits(drawn.view(torch.uint8) << (x < 0).view(torch.uint8))  # 1, or 2 for minus
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        self._check_size(body, out)
        scale = typed(body[..., :4], torch.float32)
        code = unpack_trits(body[..., 4:], out.shape[-1])
        sign = (code - 3 * (code >> 1)).view(torch.int8)  # 2 stands for -1
        deliver(sign.float() * scale, out, add)


@register
@dataclass(frozen=True)
class Natural(_Quantized):
    """Powers of two: one of the two around each magnitude, at random. All that is left is sign and exponent.

    With `bits` = b, the 2^(b-1) - 1 binades from the largest power downwards have a code; between the lowest of them
    and zero it is either of the two, at random as well.

    Body: `[1] bits`, `[1] exponent field of the largest power`, `[2]` zero, `bits` bits for each value: the sign in the
    highest, and below it 0 for zero or 2^(b-1) - 1 for the largest power, one less for its half and so on.
    """

    name: ClassVar[str] = "natural"
    wire_id: ClassVar[int] = 16
    summary: ClassVar[str] = "powers of two, rounded at random"
    error: ClassVar[str] = "noise of up to the value itself, zero on average"

    bits: int = 8  # per value, 3 to 8; higher = a longer way down to zero

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 3 <= self.bits <= 8:
            raise Unsupported(f"natural:bits={self.bits}: 3 to 8 per value")

    def _body_bytes(self, numel: int) -> int:
        return 4 + packed_bytes(numel, self.bits)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        size, codes = self._body_bytes(x.shape[-1]), (1 << self.bits - 1) - 1
        noise = _drawn(ctx, x, 23)
        magnitude = x.float().abs()
        pattern = magnitude.view(torch.int32)
        # Adding noise below the exponent carries into it with the chance that the mantissa stands for, also where the
        # number is subnormal.
        largest = 142 if x.dtype == torch.float16 else 254
        field = torch.where(pattern < 255 << 23, (pattern + noise >> 23).clamp_(max=largest), 255)
        top = field.amax(-1, True) if x.numel() else field.sum(-1, True, dtype=torch.int32)
        top = top.maximum(
            magnitude.any(-1, True).int()
        )  # subnormals round to zero or to the smallest normal power, field 1
        lowest = (top - codes + 1).clamp(min=1)
        least = (lowest << 23).view(torch.float32)
        rises = noise.float().mul_(2.0**-23) < magnitude / least
        field = torch.where(magnitude < least, torch.where(rises, lowest, 0), field)
        code = torch.where(field > 0, field - top + codes + (x.signbit().int() << self.bits - 1), 0)
        body[..., :4] = torch.tensor([self.bits, 0, 0, 0], dtype=torch.uint8)
        body[..., 1:2] = top.to(torch.uint8)
        body[..., 4:size] = pack(code.to(torch.uint8), self.bits)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        bits, _, *reserved = [*_head(body, 4, own=1), 0, 0][:4]
        if body.shape[-1] < 4 or not 3 <= bits <= 8 or any(reserved):
            raise Corrupt("the head of the natural body makes no sense")
        Natural(bits)._check_size(body, out)
        codes = (1 << bits - 1) - 1
        code = torch.arange(1 << bits, dtype=torch.int32, device=body.device)
        place = code & codes
        field = place + (body[..., 1:2].int() - codes)
        value = torch.where(place > 0, field << 23, 0).view(torch.float32)
        value = torch.where(code > codes, -value, value)
        value[(place > 0) & (field < 1) | (place == 0) & (code > 0)] = math.nan
        found = unpack(body[..., 4:], out.shape[-1], bits).int()
        if found.dim() > 1:  # each row has a table of its own
            found = found + (torch.arange(len(found), dtype=torch.int32) << bits)[:, None]
        values = value.view(-1).index_select(0, found.view(-1)).view(found.shape)
        if bool(values.isnan().any()):
            raise Corrupt("a code stands for no power of two")
        deliver(values, out, add)
