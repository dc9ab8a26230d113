"""Sparse codecs: a few values of the tensor, the rest counts as zero.

What is not sent is not lost for training: these codecs are biased, so error feedback adds it to the next gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .. import wire
from ..errors import Corrupt, Unsupported
from . import selection, sparse_batch
from .base import Codec, Context, Lossy, Sparse, register, typed, wide
from .packing import pack_positions, position_bytes, unpack_positions
from .random import Keys, key_of, keys_of

SPARSEST = 10**4  # values per value sent, at the most: so much can a frame claim to stand for
_COUNT_BYTES = 8
_KEY_BYTES = 8


def fewest(numel: int) -> int:
    """How many of `numel` values a sparse frame holds at least."""
    return -(-numel // SPARSEST)


@dataclass(frozen=True)
class _Ratio(Lossy):
    """A sparse codec that sends a given part of the values."""

    ratio: float = 0.01  # part of the values that is sent; higher = closer to the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.name, self.ratio)

    @property
    def biased(self) -> bool:
        return True

    def kept(self, numel: int) -> int:
        """How many of `numel` values are sent: at least one."""
        return kept(self.ratio, numel)


def check_ratio(name: str, ratio: float) -> None:
    if not 1 / SPARSEST <= ratio <= 1:
        raise Unsupported(f"{name}:ratio={ratio}: the part that is sent, from {1 / SPARSEST} to 1")


def kept(ratio: float, numel: int) -> int:
    return min(numel, max(fewest(numel), round(ratio * numel)))


class SparseFrame(Codec, ABC):
    """Values with their positions. Body: `[8] count`, the values, and their positions as packing.py writes them."""

    state_fields: ClassVar[tuple[str, ...]] = ()  # of Context.state: a tensor each, with a number for each value

    @abstractmethod
    def most(self, numel: int) -> int:
        """How many of `numel` values a frame holds at the most."""

    @abstractmethod
    def pick(self, x: torch.Tensor, batch: sparse_batch.Batch, ctx: Context) -> sparse_batch.Picked:
        """What `_encode` would send of each of many tensors, on a CPU. `ctx.state` has theirs one behind the other."""

    @property
    def densest(self) -> Codec:
        return TopK(ratio=1.0)

    def for_sum(self, x: torch.Tensor) -> Codec:
        """All values that one of the sparse tensors had: the union of their positions."""
        count = max(int(x.count_nonzero()), fewest(x.numel()))
        return TopK(ratio=count / x.numel(), feedback="false")

    def decoder(self, codec_id: int) -> Codec:
        return self if codec_id == self.wire_id else TopK()  # a union

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return sparse_bytes(numel, self.most(numel), dtype.itemsize)

    def _check_claim(self, header: wire.Header) -> None:
        if (header.body_bytes - _COUNT_BYTES) // header.dtype.itemsize < fewest(header.numel):
            raise Corrupt(f"a frame of {header.body_bytes} bytes claims to stand for {header.numel} values")

    def _write(self, sent: Sparse, numel: int, ctx: Context, body: torch.Tensor) -> int:
        index, values = ctx.sent = sent
        count = index.numel()
        size, positions = sparse_bytes(numel, count, values.itemsize), _COUNT_BYTES + count * values.itemsize
        write_number(body, count)
        body[_COUNT_BYTES:positions] = values.view(torch.uint8)
        body[positions:size] = pack_positions(index, numel)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        near = body if ctx.near is None else ctx.near[ctx.near.numel() - body.numel() :]
        numel, size = out.numel(), body.numel()
        count = read_number(near) if size >= _COUNT_BYTES else -1
        if not fewest(numel) <= count <= numel or size != sparse_bytes(numel, count, out.itemsize):
            raise Corrupt(f"{count} of {numel} values do not make a body of {size} bytes")
        positions = _COUNT_BYTES + count * out.itemsize
        index = unpack_positions(body[positions:], numel, count, near[positions:])
        scatter(index, typed(body[_COUNT_BYTES:positions], out.dtype), out, add)


@register
@dataclass(frozen=True)
class TopK(_Ratio, SparseFrame):
    """The values of largest magnitude, exactly; of equal ones the first in the tensor."""

    name: ClassVar[str] = "topk"
    wire_id: ClassVar[int] = 6
    summary: ClassVar[str] = "the largest values, with their positions"
    error: ClassVar[str] = "the smaller values; fed back"

    def most(self, numel: int) -> int:
        return self.kept(numel)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        index = selection.largest(x, self.kept(x.numel()))
        return self._write(Sparse(index, x[index]), x.numel(), ctx, body)

    def pick(self, x: torch.Tensor, batch: sparse_batch.Batch, ctx: Context) -> sparse_batch.Picked:
        counts = batch.by_size(self.kept)
        index = sparse_batch.largest(x, batch, counts)
        return sparse_batch.Picked(index, x[index], counts)


@register
@dataclass(frozen=True)
class Threshold(Lossy, SparseFrame):
    """The values whose magnitude reaches a threshold, and at least one in ten thousand: the largest."""

    name: ClassVar[str] = "threshold"
    wire_id: ClassVar[int] = 10
    summary: ClassVar[str] = "the values above a threshold, with their positions"
    error: ClassVar[str] = "the values below it; fed back"
    fixed_size: ClassVar[bool] = False

    value: float = 0.001  # the least magnitude that is sent; higher = smaller

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.value < float("inf"):
            raise Unsupported(f"threshold:value={self.value}: the least magnitude that is sent, above 0")

    @property
    def biased(self) -> bool:
        return True

    def most(self, numel: int) -> int:
        return numel

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        index = selection.reaching(x, self.value * ctx.scale)
        if index.numel() < fewest(x.numel()):
            index = selection.largest(x, fewest(x.numel()))
        return self._write(Sparse(index, x[index]), x.numel(), ctx, body)

    def pick(self, x: torch.Tensor, batch: sparse_batch.Batch, ctx: Context) -> sparse_batch.Picked:
        reaching = ~(wide(x).abs() < self.value * ctx.scale)
        index, counts = sparse_batch.at_least(x, batch, reaching, batch.by_size(fewest))
        return sparse_batch.Picked(index, x[index], counts)


def union(x: torch.Tensor, batch: sparse_batch.Batch) -> sparse_batch.Picked:
    """What the codecs that `SparseFrame.for_sum` gives would send of each of many tensors."""
    index, counts = sparse_batch.at_least(x, batch, x != 0, batch.by_size(fewest))
    return sparse_batch.Picked(index, x[index], counts)


@dataclass(frozen=True)
class SharedPlaces(_Ratio):
    """Values at places that all ranks know, so that frames can be averaged as they are.

    Body: `[8] key`, which says what was picked, and the values. A NaN or infinity anywhere makes all of them NaN.
    """

    summable: ClassVar[bool] = True
    codes_rows: ClassVar[bool] = True

    unbiased: bool = False  # scales what is sent by one over its chance, as without error feedback

    @property
    def biased(self) -> bool:
        return not self.unbiased

    @abstractmethod
    def drawn(self, keys: Keys, numel: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which places of rows are picked; and one over the chance that each had."""

    def as_decoded(self, values: torch.Tensor) -> torch.Tensor:
        """What the values of a frame are once they are decoded."""
        return values

    def picked(self, x: torch.Tensor, keys: Keys) -> Sparse:
        """The values of rows that frames of these keys hold."""
        places, factor = self.drawn(keys, x.shape[1], self.kept(x.shape[1]))
        values = x.gather(1, places)
        return Sparse(places, flagged(enlarged(values, factor) if self.unbiased else values, x))

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        if x.dim() == 1:
            key, values = self._encode_one(x, ctx)
            write_number(body, key)
        else:
            keys = keys_of(ctx.seed, ctx.step, ctx.names)
            places, values = self.picked(x, keys)
            body[:, :_KEY_BYTES] = torch.from_numpy(keys.astype("<u8").view(np.uint8).reshape(len(x), _KEY_BYTES))
            ctx.sent = Sparse(places, self.as_decoded(values))
        size = _KEY_BYTES + values.shape[-1] * values.itemsize
        body[..., _KEY_BYTES:size] = values.contiguous().view(torch.uint8)
        return size

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        numel = out.shape[-1]
        count, rest = divmod(body.shape[-1] - _KEY_BYTES, out.itemsize)
        if rest or not fewest(numel) <= count <= numel:
            raise Corrupt(f"no number of values out of {numel} makes a {self.name} body of {body.shape[-1]} bytes")
        values = typed(body[..., _KEY_BYTES:], out.dtype)
        if out.dim() == 1:
            self._decode_one(read_number(body), values, out, add)
            return
        keys = body[:, :_KEY_BYTES].contiguous().numpy().view("<u8").reshape(-1).astype(np.uint64)
        scatter(self.drawn(keys, numel, count)[0], values if add else self.as_decoded(values), out, add)

    @abstractmethod
    def _encode_one(self, x: torch.Tensor, ctx: Context) -> tuple[int, torch.Tensor]:
        """Key and values of one tensor's body, on any device."""

    @abstractmethod
    def _decode_one(self, key: int, values: torch.Tensor, out: torch.Tensor, add: bool) -> None: ...

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return _KEY_BYTES + self.kept(numel) * dtype.itemsize

    def _check_claim(self, header: wire.Header) -> None:
        if (header.body_bytes - _KEY_BYTES) // header.dtype.itemsize < fewest(header.numel):
            raise Corrupt(f"a frame of {header.body_bytes} bytes claims to stand for {header.numel} values")

    def _addends(self, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body[_KEY_BYTES:].view(dtype)


@register
@dataclass(frozen=True)
class RandomK(SharedPlaces):
    """One value, picked at random, out of each of k equal stretches of the tensor."""

    name: ClassVar[str] = "randomk"
    wire_id: ClassVar[int] = 7
    summary: ClassVar[str] = "values at random places that all ranks know"
    error: ClassVar[str] = "the values not picked; fed back"

    def drawn(self, keys: Keys, numel: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return selection.samples(keys, numel, count)

    def _encode_one(self, x: torch.Tensor, ctx: Context) -> tuple[int, torch.Tensor]:
        key = key_of(ctx.seed, ctx.step, ctx.name)
        index, length = selection.sample(key, x.numel(), self.kept(x.numel()), x.device)
        values = x[index]
        return key, flagged(enlarged(values, length) if self.unbiased else values, x)

    def _decode_one(self, key: int, values: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        index, _ = selection.sample(key, out.numel(), values.numel(), out.device)
        scatter(index, values, out, add)


@register
@dataclass(frozen=True)
class RandomBlock(SharedPlaces):
    """One stretch of the tensor that starts at a random place and wraps around at the tensor's end."""

    name: ClassVar[str] = "randomblock"
    wire_id: ClassVar[int] = 9
    summary: ClassVar[str] = "one stretch of values at a random place that all ranks know"
    error: ClassVar[str] = "the values outside; fed back"

    def drawn(self, keys: Keys, numel: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return selection.blocks(keys, numel, count), torch.tensor(numel / count, dtype=torch.float64)

    def as_decoded(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0  # added to zeros, so that there is no -0

    def _encode_one(self, x: torch.Tensor, ctx: Context) -> tuple[int, torch.Tensor]:
        key, k = key_of(ctx.seed, ctx.step, ctx.name), self.kept(x.numel())
        start = selection.block(key, x.numel())
        wrapped = max(0, start + k - x.numel())
        values = torch.cat([x[start : start + k], x[:wrapped]])
        if self.unbiased and k:
            values = enlarged(values, torch.tensor(x.numel() / k, dtype=torch.float64, device=x.device))
        return key, flagged(values, x)

    def _decode_one(self, key: int, values: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        start = selection.block(key, out.numel())
        straight = min(values.numel(), out.numel() - start)
        if not add:
            out.zero_()
        out[start : start + straight] += values[:straight]
        out[: values.numel() - straight] += values[straight:]


def flagged(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values of a tensor, or of each of its rows: all NaN where one of x is not finite."""
    wider = torch.promote_types(x.dtype, torch.float32)
    # A sum is not finite if a term is not, and costs a quarter of looking at each; on a GPU one would wait for it.
    if x.device.type == "cpu" and bool(x.sum(-1, dtype=wider).isfinite().all()):
        return values
    return torch.where(x.isfinite().all(-1, True), values, torch.nan)


def enlarged(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """values times factor, in their own type; what is finite stays so."""
    most = torch.finfo(values.dtype).max
    product = values.double() * factor
    return torch.where(values.isfinite(), product.clamp(-most, most), product).to(values.dtype)


def sparse_bytes(numel: int, count: int, item: int) -> int:
    return _COUNT_BYTES + count * item + position_bytes(numel, count)


def write_number(body: torch.Tensor, number: int) -> None:
    """An unsigned 64-bit number at the start of a body, or of each of its rows."""
    body[..., :8] = torch.frombuffer(bytearray(number.to_bytes(8, "little")), dtype=torch.uint8)


def read_number(body: torch.Tensor) -> int:
    return int.from_bytes(bytes(body[:8].tolist()), "little")


def scatter(index: torch.Tensor, values: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Puts values to their places in `out`, or adds them; all others count as zero. On a CPU in each row, too."""
    if index.dim() > 1:
        if add:
            values = out.gather(-1, index) + values
        else:
            out.zero_()
        out.scatter_(-1, index, values)
        return
    if add:
        values = out[index] + values
    else:
        out.zero_()
    out[index] = values
