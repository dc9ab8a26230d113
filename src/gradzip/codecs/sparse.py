"""Sparse codecs: a few values of the tensor, the rest counts as zero.

What is not sent is not lost for training: both codecs are biased, so error feedback adds it to the next gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import wire
from ..errors import Corrupt, Unsupported
from .base import Context, Lossy, register, typed
from .random import key_of, keyed_bits

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEY_BYTES = 8
_SPARSEST = 10**6  # values per value sent, at the most


@dataclass(frozen=True)
class _Sparse(Lossy):
    """What TopK and RandomK share: how many values are kept."""

    ratio: float = 0.01  # part of the values that is sent; higher = closer to the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 / _SPARSEST <= self.ratio <= 1:
            raise Unsupported(f"{self.name}:ratio={self.ratio}: the part that is sent, from {1 / _SPARSEST} to 1")

    @property
    def biased(self) -> bool:
        return True

    def kept(self, numel: int) -> int:
        """How many of `numel` values are sent: at least one."""
        return min(numel, max(1, round(self.ratio * numel)))

    def _check_claim(self, header: wire.Header) -> None:
        if header.numel > header.body_bytes * _SPARSEST:
            raise Corrupt(f"a frame of {header.body_bytes} bytes claims to stand for {header.numel} values")


@register
@dataclass(frozen=True)
class TopK(_Sparse):
    """The values of largest magnitude, exactly; of equal ones the first in the tensor.

    Body: the indices in ascending order, int32, padded to the size of a value; then the values.
    """

    name: ClassVar[str] = "topk"
    wire_id: ClassVar[int] = 6
    summary: ClassVar[str] = "the largest values, with their positions"

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return _topk_bytes(self.kept(numel), dtype.itemsize)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        if x.numel() >= 1 << 31:
            raise Unsupported(f"topk codes tensors of less than 2^31 values, not {x.numel()}: positions are int32")
        k = self.kept(x.numel())
        size = _topk_bytes(k, x.itemsize)
        start = size - k * x.itemsize
        index = largest(x, k)
        body[: 4 * k] = index.to(torch.int32).view(torch.uint8)
        body[4 * k : start] = 0
        body[start:size] = x[index].view(torch.uint8)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        item = out.itemsize
        k = body.numel() // (4 + item)
        if body.numel() != _topk_bytes(k, item) or k > out.numel() or (k == 0) != (out.numel() == 0):
            raise Corrupt(f"no number of values out of {out.numel()} makes a topk body of {body.numel()} bytes")
        start = body.numel() - k * item
        if bool(body[4 * k : start].any()):
            raise Corrupt("the padding behind the indices is not zero")
        index = typed(body[: 4 * k], torch.int32).to(torch.int64)
        if k and (int(index[0]) < 0 or int(index[-1]) >= out.numel() or bool((index[1:] <= index[:-1]).any())):
            raise Corrupt(f"the indices do not ascend from 0 to {out.numel() - 1}")
        _scatter(index, typed(body[start:], out.dtype), out, add)


@register
@dataclass(frozen=True)
class RandomK(_Sparse):
    """One value, picked at random, out of each of k equal stretches of the tensor.

    All ranks pick the same places, so only values travel and frames can be averaged as they are.

    Body: `[8] key`, which says what was picked, and the values. A NaN or infinity anywhere makes all of them NaN.
    """

    name: ClassVar[str] = "randomk"
    wire_id: ClassVar[int] = 7
    summary: ClassVar[str] = "values at random places that all ranks know"
    summable: ClassVar[bool] = True

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return _KEY_BYTES + self.kept(numel) * dtype.itemsize

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        k = self.kept(x.numel())
        size = _KEY_BYTES + k * x.itemsize
        key = key_of(ctx.seed, ctx.step, ctx.name)
        values = x[sample(key, x.numel(), k, x.device)]
        if not bool(x.isfinite().all()):
            values = torch.full_like(values, torch.nan)
        body[:_KEY_BYTES] = torch.frombuffer(bytearray(key.to_bytes(_KEY_BYTES, "little")), dtype=torch.uint8)
        body[_KEY_BYTES:size] = values.view(torch.uint8)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        k, rest = divmod(body.numel() - _KEY_BYTES, out.itemsize)
        if k < 0 or rest or k > out.numel() or (k == 0) != (out.numel() == 0):
            raise Corrupt(f"no number of values out of {out.numel()} makes a randomk body of {body.numel()} bytes")
        key = int.from_bytes(bytes(body[:_KEY_BYTES].tolist()), "little")
        _scatter(sample(key, out.numel(), k, out.device), typed(body[_KEY_BYTES:], out.dtype), out, add)

    def _addends(self, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body[_KEY_BYTES:].view(dtype)


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """The ascending indices of the k values of largest magnitude; NaN counts as larger than infinity.

    torch.topk leaves open which of several equal values it takes; here it is the first, on every device.
    """
    magnitude = x.view(_INTEGERS[x.itemsize]) & torch.iinfo(_INTEGERS[x.itemsize]).max
    if k == x.numel():
        return torch.arange(k, device=x.device)
    limit = magnitude.topk(k, sorted=False).values.min()
    above, equal = magnitude > limit, magnitude == limit
    room = k - above.sum()
    return (above | (equal & (equal.cumsum(0) <= room))).nonzero().view(-1)


def sample(key: int, numel: int, k: int, device: torch.device) -> torch.Tensor:
    """k different indices below `numel`, ascending: a random one from each of k stretches of almost equal length."""
    bounds = torch.arange(k + 1, dtype=torch.int64, device=device) * numel // max(k, 1)
    start, length = bounds[:-1], bounds.diff()
    return start + (keyed_bits(key, start) * length >> 32)


def _scatter(index: torch.Tensor, values: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    if add:
        values = out[index] + values
    else:
        out.zero_()
    out[index] = values


def _topk_bytes(k: int, item: int) -> int:
    return -(-4 * k // item) * item + k * item
