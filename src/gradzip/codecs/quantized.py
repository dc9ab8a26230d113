"""Quantised codecs: every value is sent, in a few bits.

`sign` and `onebit` are biased and live on error feedback. `qsgd`, `terngrad` and `natural` round at random so that the
mean of what is decoded is the tensor itself. Ranks draw different random numbers: equal ones would make equal errors,
which an average does not reduce.

Each is made of statistics, a few float32 numbers for each stretch of values, and of a code for each value. The
arithmetic is written once, for any number of stretches that lie in any way (Stretches): a frame of a single tensor has
a matrix of them, and messages on a GPU have rows of all parts at once (exchange/on_stream/part_rows.py). Every
operation gives the same bits on every device. So nothing is divided by a number of the host, which CUDA multiplies by
its reciprocal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch.nn.functional import pad

from .. import wire
from ..errors import Corrupt, Unsupported
from .base import Context, Lossy, deliver, register, require_float32, typed
from .packing import pack, pack_trits, packed_bytes, trit_bytes, unpack, unpack_trits
from .random import key_of, keys_of, stream, streams
from .sums import ordered_sum

TRITS = 0  # as the number of bits of a code: three values, five to a byte
_AT_ONCE = 5 << 16  # values that a CPU codes at once: their codes are whole bytes, whatever the width


class Stretches(Protocol):
    """Values that share statistics, in float32 and filled up with zeros; statistics have an entry for each stretch."""

    @property
    def sizes(self) -> torch.Tensor:
        """Values of each, without zeros that fill it up."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest number of each, which is not below zero; NaN if one is."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each, in float64 (sums.py)."""

    def count(self, mask: torch.Tensor) -> torch.Tensor:
        """How often the mask is set."""

    def spread(self, statistic: torch.Tensor) -> torch.Tensor:
        """A statistic beside the values of its stretch."""

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """x, with zeros again where stretches are filled up."""


class Matrix:
    """Stretches of equal length, but for the last one: of a tensor, or of each of several in rows."""

    def __init__(self, x: torch.Tensor, width: int | None) -> None:
        """`width`: None for one stretch. There is one at least."""
        self._of, self._numel = x.shape[:-1], x.shape[-1]
        self._width = max(self._numel if width is None else min(width, self._numel), 1)
        self._each = max(-(-self._numel // self._width), 1)  # of a tensor
        self._missing = self._each * self._width - self._numel
        self.values = self.filled(x.float())

    @cached_property
    def sizes(self) -> torch.Tensor:
        sizes = torch.full((len(self.values),), self._width, device=self.values.device)
        if self._missing:
            sizes.view(-1, self._each)[:, -1] -= self._missing
        return sizes

    def flat(self, x: torch.Tensor, at: int = 0) -> torch.Tensor:
        """Without what fills it up; `at`: where a piece begins."""
        return x.reshape(*self._of, -1)[..., : self._numel - at]

    def pieces(self) -> list[tuple[int, slice, slice]]:
        """Where values begin that are coded at once, and their rows and columns: on a CPU few, which stay in the cache.

        Of rows of tensors, which are short, and on a GPU all.
        """
        height, width = self.values.shape
        if self._of or self.values.device.type != "cpu":
            return [(0, slice(None), slice(None))]
        if height == 1:
            return [(at, slice(None), slice(at, at + _AT_ONCE)) for at in range(0, width, _AT_ONCE)]
        each = max(_AT_ONCE // (40 * width), 1) * 40  # their codes are whole bytes
        return [(at * width, slice(at, at + each), slice(None)) for at in range(0, height, each)]

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `flat` for all values."""
        return (pad(x, (0, self._missing)) if self._missing else x).reshape(-1, self._width)

    def by_tensor(self, statistic: torch.Tensor) -> torch.Tensor:
        return statistic.view(*self._of, self._each)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(1)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return ordered_sum(x)

    def count(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.count_nonzero(1)

    def spread(self, statistic: torch.Tensor) -> torch.Tensor:
        return statistic[:, None]

    def real(self, x: torch.Tensor) -> torch.Tensor:
        return self.filled(self.flat(x))


class QuantizedCodec(Lossy, ABC):
    """What they share: statistics of stretches, codes of values, and a body whose size follows from numel."""

    codes_rows: ClassVar[bool] = True
    draws: ClassVar[int] = 0  # random bits for each value
    statistics: ClassVar[int] = 1  # of each stretch

    @property
    def stretch(self) -> int | None:
        """Values that share statistics; None: all of a tensor, or of a part of it."""
        return None

    @property
    @abstractmethod
    def width(self) -> int:
        """Bits of a code, or TRITS."""

    @abstractmethod
    def measure(
        self, x: torch.Tensor, over: Stretches, draws: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Statistics of float32 values, which were of that type before; `draws` has random bits for each."""

    @abstractmethod
    def codes(
        self, x: torch.Tensor, statistics: Sequence[torch.Tensor], draws: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """The codes of values, beside which the statistics are spread."""

    @abstractmethod
    def values(self, codes: torch.Tensor, statistics: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The float32 values of codes, beside which the statistics are spread; they will be rounded to that type."""

    def codes_bytes(self, numel: int) -> int:
        return packed_bytes(numel, self.width) if self.width else trit_bytes(numel)

    # -- frames of one tensor, or of rows of tensors --------------------------------------------------------------

    def _head_bytes(self, numel: int) -> int:
        return 4 * self.statistics

    def _head(self, statistics: list[torch.Tensor]) -> torch.Tensor:
        """The first bytes of a body, whose statistics are in the last dimension."""
        return torch.cat(statistics, -1).view(torch.uint8)

    def _body_bytes(self, numel: int) -> int:
        return self._head_bytes(numel) + self.codes_bytes(numel)

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

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        head, size = self._head_bytes(x.shape[-1]), self._body_bytes(x.shape[-1])
        matrix = Matrix(x, self.stretch)
        draws = matrix.filled(_drawn(ctx, x, self.draws)) if self.draws else None
        statistics = self.measure(matrix.values, matrix, draws, x.dtype)
        first = self._head([matrix.by_tensor(each) for each in statistics])
        body[..., :head] = first[..., :head]  # of an empty tensor less than one stretch
        spread = [matrix.spread(each) for each in statistics]
        for at, rows, columns in matrix.pieces():
            drawn = None if draws is None else draws[rows, columns]
            codes = self.codes(matrix.values[rows, columns], [each[rows] for each in spread], drawn, x.dtype)
            codes = matrix.flat(codes, at)
            packed = pack(codes, self.width) if self.width else pack_trits(codes)
            body[..., head + self.codes_bytes(at) : head + self.codes_bytes(at + codes.shape[-1])] = packed
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        self._check_size(body, out)
        head = self._head_bytes(out.shape[-1])
        statistics = typed(body[..., :head], torch.float32).split_with_sizes([1] * (head // 4), -1)
        for piece, codes in self._codes_in(body[..., head:], out):
            deliver(self.values(codes, statistics, out.dtype), out[..., piece], add)

    def _codes_in(self, packed: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Codes of the values of `out`; on a CPU some at a time, so that what is made of them stays in the cache."""
        numel = out.shape[-1]
        at_once = _AT_ONCE if out.device.type == "cpu" and out.dim() == 1 else max(numel, 1)
        for first in range(0, numel, at_once):
            last = min(first + at_once, numel)
            found = packed[..., self.codes_bytes(first) : self.codes_bytes(last)]
            codes = unpack(found, last - first, self.width) if self.width else unpack_trits(found, last - first)
            yield slice(first, last), codes


def _drawn(ctx: Context, x: torch.Tensor, bits: int) -> torch.Tensor:
    """So many random bits for each value, this rank's own."""
    if x.dim() > 1:
        keys = keys_of(ctx.seed, ctx.step, [f"{name}#{ctx.rank}" for name in ctx.names])  # as draws_key
        return streams(keys, x.shape[-1], bits)
    return stream(draws_key(ctx.name, ctx.step, ctx.rank, ctx.seed), x.numel(), bits, x.device)


def _first_bytes(body: torch.Tensor, size: int, own: int | None = None) -> list[int]:
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


def draws_key(name: str, step: int, rank: int, seed: int = 0) -> int:
    """What a rank's random bits follow from: no other rank has the same."""
    return key_of(seed, step, f"{name}#{rank}")


def _uniform(draws: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 values in [0, 1)."""
    return draws.float().mul_(2.0**-bits)


def _either(bits: torch.Tensor, one: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """`one` where the bit is set, `zero` elsewhere. With single numbers torch.where is five times as slow on a CPU."""
    if bits.device.type != "cpu":
        return torch.where(bits.view(torch.bool), one, zero)
    pattern = zero.view(torch.int32)
    return bits.int().mul_(pattern ^ one.view(torch.int32)).bitwise_xor_(pattern).view(torch.float32)


@register
@dataclass(frozen=True)
class Sign(QuantizedCodec):
    """Signs, times the mean magnitude (EF-SignSGD). Body: `[4] float32 scale`, one bit per value, set for minus."""

    name: ClassVar[str] = "sign"
    wire_id: ClassVar[int] = 12
    summary: ClassVar[str] = "signs and the mean magnitude"
    error: ClassVar[str] = "the differences in magnitude; fed back"
    width: ClassVar[int] = 1

    @property
    def biased(self) -> bool:
        return True

    def measure(
        self, x: torch.Tensor, over: Stretches, draws: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        # in float64 the mean of equal values is that value
        return [(over.total(x.abs()) / over.sizes.clamp(min=1)).float()]

    def codes(
        self, x: torch.Tensor, statistics: Sequence[torch.Tensor], draws: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        return x.signbit().view(torch.uint8)

    def values(self, codes: torch.Tensor, statistics: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        (scale,) = statistics
        return _either(codes, -scale, scale)


@register
@dataclass(frozen=True)
class OneBit(QuantizedCodec):
    """The mean of the values from zero up, and that of those below: 1-bit SGD.

    Body: `[4] float32` the upper mean, `[4] float32` the lower, one bit per value, set for below zero.
    """

    name: ClassVar[str] = "onebit"
    wire_id: ClassVar[int] = 13
    summary: ClassVar[str] = "which values are negative, and the means of both kinds"
    error: ClassVar[str] = "the differences among both kinds; fed back"
    statistics: ClassVar[int] = 2
    width: ClassVar[int] = 1

    @property
    def biased(self) -> bool:
        return True

    def measure(
        self, x: torch.Tensor, over: Stretches, draws: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        count = over.count(x < 0)
        negative = x.clamp(max=0).nan_to_num_(0, math.inf, -math.inf)  # NaN is not below zero
        lower = over.total(negative) / count.clamp(min=1)
        upper = over.total(x.clamp(min=0)) / (over.sizes - count).clamp(min=1)
        return [upper.float(), lower.float()]

    def codes(
        self, x: torch.Tensor, statistics: Sequence[torch.Tensor], draws: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        return (x < 0).view(torch.uint8)

    def values(self, codes: torch.Tensor, statistics: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        upper, lower = statistics
        return _either(codes, lower, upper)


@register
@dataclass(frozen=True)
class QSGD(QuantizedCodec):
    """Multiples of a step that each bucket of values has for itself, rounded up or down at random.

    Levels run from -s to s with s = 2^(bits-1) - 1. The step is the bucket's norm over s: its largest magnitude, or
    (`norm=l2`) its Euclidean norm as in the paper's analysis, which makes more zeros and more noise.

    Body: `[1] bits`, `[3]` zero, `[4] bucket`, a float32 step for each bucket, `bits` bits of level + s for each value.
    """

    name: ClassVar[str] = "qsgd"
    wire_id: ClassVar[int] = 14
    summary: ClassVar[str] = "multiples of a step per bucket, rounded at random"
    error: ClassVar[str] = "noise of up to a step, zero on average"
    draws: ClassVar[int] = 24

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

    @property
    def width(self) -> int:
        return self.bits

    @property
    def stretch(self) -> int:
        return self.bucket

    def measure(
        self, x: torch.Tensor, over: Stretches, draws: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        most = (1 << self.bits - 1) - 1
        if self.norm == "max":
            norm = over.largest(x.abs())
        else:
            length = over.total(x.double().square_()).sqrt_()
            norm = torch.where(length.isfinite(), length.clamp(max=torch.finfo(torch.float32).max), length).float()
        return [_short(norm / torch.full_like(norm, most))]

    def codes(
        self, x: torch.Tensor, statistics: Sequence[torch.Tensor], draws: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        assert draws is not None
        (step,), most = statistics, (1 << self.bits - 1) - 1
        level = (x.abs() / step).nan_to_num_(0, 0)
        whole = level.floor()
        whole += _uniform(draws, self.draws) < level - whole
        return whole.clamp_(max=most).copysign_(x).add_(most).to(torch.uint8)

    def values(self, codes: torch.Tensor, statistics: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        (step,) = statistics
        values = codes.float().sub_((1 << self.bits - 1) - 1).mul_(step)
        # A step that was rounded up may reach beyond what the type holds; NaN, from a step that is not finite, stays.
        return values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)

    def _head_bytes(self, numel: int) -> int:
        return 8 + 4 * -(-numel // self.bucket)

    def _head(self, statistics: list[torch.Tensor]) -> torch.Tensor:
        (step,) = statistics
        head = torch.tensor([self.bits, 0, 0, 0, *self.bucket.to_bytes(4, "little")], dtype=torch.uint8)
        return torch.cat([head.to(step.device).expand(*step.shape[:-1], 8), step.view(torch.uint8)], -1)

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        head, numel = _first_bytes(body, 8), out.shape[-1]
        bits, bucket = (head[0], int.from_bytes(bytes(head[4:]), "little")) if len(head) == 8 else (0, 0)
        if not 2 <= bits <= 8 or any(head[1:4]) or not 1 <= bucket < 1 << 31:
            raise Corrupt("the head of the qsgd body makes no sense")
        sender = QSGD(bits, bucket)
        sender._check_size(body, out)
        steps_end = sender._head_bytes(numel)
        step = typed(body[..., 8:steps_end], torch.float32)
        most, width = (1 << bits - 1) - 1, min(bucket, numel)
        for piece, codes in sender._codes_in(body[..., steps_end:], out):
            if bool((codes > 2 * most).any()):
                raise Corrupt(f"a level is above {most}")
            first, last = piece.start // width, -(-piece.stop // width)  # buckets
            steps = step[..., first:last].repeat_interleave(width, -1, output_size=(last - first) * width)
            steps = steps[..., piece.start - first * width : piece.stop - first * width]
            deliver(sender.values(codes, [steps], out.dtype), out[..., piece], add)


def _short(step: torch.Tensor) -> torch.Tensor:
    """A float32 step rounded up to 16 significant bits, but not to infinity: its multiples by 8 bits are exact then."""
    bits = (step.view(torch.int32) + 0xFF) & ~0xFF
    finite = bits.clamp(max=0x7F7FFF00).view(torch.float32)
    return torch.where(step.isfinite(), finite, step)


@register
@dataclass(frozen=True)
class TernGrad(QuantizedCodec):
    """-s, 0 or s at random, s the largest magnitude. Body: `[4] float32 s`, five values to a byte."""

    name: ClassVar[str] = "terngrad"
    wire_id: ClassVar[int] = 15
    summary: ClassVar[str] = "-s, 0 or s at random, s the largest magnitude"
    error: ClassVar[str] = "noise of up to the largest value, zero on average"
    draws: ClassVar[int] = 24
    width: ClassVar[int] = TRITS

    clip: float = 0.0  # cuts values at so many standard deviations first (2.5 in the paper), which is biased; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip < math.inf:
            raise Unsupported(f"terngrad:clip={self.clip}: in standard deviations, or 0 for no limit")

    @property
    def biased(self) -> bool:
        return self.clip > 0

    def measure(
        self, x: torch.Tensor, over: Stretches, draws: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        scale = over.largest(x.abs())
        if self.clip:
            numel = over.sizes.clamp(min=1)
            off = over.real(x.double() - over.spread(over.total(x) / numel))
            deviation = (over.total(off.square_()) / numel).sqrt_()
            scale = torch.where(scale.isfinite(), scale.minimum((self.clip * deviation).float()), scale)
        return [scale]

    def codes(
        self, x: torch.Tensor, statistics: Sequence[torch.Tensor], draws: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        assert draws is not None
        drawn = _uniform(draws, self.draws) < (x.abs() / statistics[0]).nan_to_num_(0, 0)
        return drawn.view(torch.uint8) << (x < 0).view(torch.uint8)  # 1, or 2 for minus

    def values(self, codes: torch.Tensor, statistics: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        sign = (codes - 3 * (codes >> 1)).view(torch.int8)  # 2 stands for -1
        return sign.float() * statistics[0]


@register
@dataclass(frozen=True)
class Natural(QuantizedCodec):
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
    draws: ClassVar[int] = 23

    bits: int = 8  # per value, 3 to 8; higher = a longer way down to zero

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 3 <= self.bits <= 8:
            raise Unsupported(f"natural:bits={self.bits}: 3 to 8 per value")

    @property
    def width(self) -> int:
        return self.bits

    @property
    def _powers(self) -> int:
        """How many have a code."""
        return (1 << self.bits - 1) - 1

    def _field(self, x: torch.Tensor, draws: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The exponent field of one of the powers around each value, at random."""
        assert draws is not None
        pattern = x.abs().view(torch.int32)
        # Adding noise below the exponent carries into it with the chance that the mantissa stands for, also where the
        # number is subnormal.
        largest = 142 if dtype == torch.float16 else 254
        return torch.where(pattern < 255 << 23, (pattern + draws >> 23).clamp_(max=largest), 255)

    def measure(
        self, x: torch.Tensor, over: Stretches, draws: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        # subnormals round to zero or to the smallest normal power, field 1
        top = over.largest(self._field(x, draws, dtype)).maximum((over.largest(x.abs()) != 0).int())
        return [top.float()]

    def codes(
        self, x: torch.Tensor, statistics: Sequence[torch.Tensor], draws: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        assert draws is not None
        magnitude, powers, top = x.abs(), self._powers, statistics[0].int()
        lowest = (top - powers + 1).clamp(min=1)
        least = (lowest << 23).view(torch.float32)
        rises = _uniform(draws, self.draws) < magnitude / least
        field = torch.where(magnitude < least, torch.where(rises, lowest, 0), self._field(x, draws, dtype))
        code = torch.where(field > 0, field - top + powers + (x.signbit().int() << self.bits - 1), 0)
        return code.to(torch.uint8)

    def values(self, codes: torch.Tensor, statistics: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """NaN for codes that stand for no power of two."""
        code, powers = codes.int(), self._powers
        place = code & powers
        field = place + (statistics[0].int() - powers)
        value = torch.where(place > 0, field << 23, 0).view(torch.float32)
        value = torch.where(code > powers, -value, value)
        return value.masked_fill_((place > 0) & (field < 1) | (place == 0) & (code > 0), math.nan)

    def _head(self, statistics: list[torch.Tensor]) -> torch.Tensor:
        (top,) = statistics
        head = torch.full((*top.shape[:-1], 4), self.bits, dtype=torch.uint8, device=top.device)
        head[..., 1:2], head[..., 2:] = top, 0
        return head

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        bits, _, *reserved = [*_first_bytes(body, 4, own=1), 0, 0][:4]
        if body.shape[-1] < 4 or not 3 <= bits <= 8 or any(reserved):
            raise Corrupt("the head of the natural body makes no sense")
        sender = Natural(bits)
        sender._check_size(body, out)
        every = torch.arange(1 << bits, dtype=torch.uint8, device=body.device)
        top, offset = body[..., 1:2], None
        if out.dim() > 1:  # rows of equal tops share a table
            tops, table = torch.unique(top, return_inverse=True)
            top, offset = tops[:, None], table.int() << bits
        value = sender.values(every, [top], out.dtype).view(-1)
        for piece, codes in sender._codes_in(body[..., 4:], out):
            found = codes.int() if offset is None else codes.int() + offset
            values = value.index_select(0, found.view(-1)).view(found.shape)
            # Infinities of both signs add up to NaN as well, but a sum takes a fifth of the time.
            if bool(values.sum().isnan()) and bool(values.isnan().any()):
                raise Corrupt("a code stands for no power of two")
            deliver(values, out[..., piece], add)
