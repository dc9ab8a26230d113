"""Sparse codecs on the stream runner: as many values of each tensor as is known beforehand.

`randomk` and `randomblock` pick values at places that all ranks know, so their numbers are averaged as if they were a
message of the codec `identity`. `topk` sends values and places; a sum has the union of all places, whose size nobody
knows, so every rank gets every frame by one all-gather and adds them up by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...codecs.packing import pack_positions, position_bytes, unpack_positions
from ...codecs.random import bits_of, keys_of
from ...codecs.selection import magnitudes
from ...codecs.sparse import RandomBlock, RandomK, TopK, enlarged
from ...routes import NAMED
from ..coding import RAW
from ..compiler import compile_route
from ..on_host.generic import GenericOnHost
from ..program import Program
from ..topology import Topology
from . import compensated
from .compensated import CompensatedMessage
from .message import DeviceMessage, RawMessage, StreamCodec
from .residuals import Piece


class _Sparse(CompensatedMessage):
    """All values of all tensors one behind the other; those that are sent are known by their places among them."""

    def __init__(
        self,
        program: Program,
        codec: RandomK | RandomBlock | TopK,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        sizes, device = np.array(program.sizes, np.int64), buffer.device
        self._values, self._firsts = sizes, np.cumsum(sizes) - sizes  # of each tensor
        pieces = [Piece(tensor, 0, size, int(self._firsts[tensor])) for tensor, size in enumerate(program.sizes)]
        x = torch.zeros(int(sizes.sum()), device=device)
        super().__init__(program, codec, rank, buffer, tensors, x, pieces)
        self._counts = [codec.kept(int(size)) for size in sizes]
        self._out = torch.zeros(len(x), dtype=program.dtype, device=device)
        self._in_out = self._views(self._out)


class PickedMessage(_Sparse):
    def __init__(
        self,
        program: Program,
        codec: RandomK | RandomBlock,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(program, codec, rank, buffer, tensors)
        device, counts = buffer.device, np.array(self._counts)
        self._codec = codec
        numbers = torch.zeros(int(counts.sum()), dtype=program.dtype, device=device)
        topology = Topology(rank, program.hosts)
        inner = compile_route(RAW.text, NAMED["alltoall"], program.names, self._counts, program.dtype, topology)
        self._inner = RawMessage(inner, RAW, rank, numbers, numbers.split_with_sizes(self._counts))
        self._numbers = numbers
        self.sent, self.received = self._inner.sent, self._inner.received
        self.gathered, self.sum_frame = self._inner.gathered, self._inner.sum_frame

        def table(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(column.astype(np.int64)).to(device)

        sizes, of = self._values, np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each number in its tensor
        begin, end = number * sizes[of] // counts[of], (number + 1) * sizes[of] // counts[of]
        self._of, self._first, self._number = table(of), table(self._firsts[of]), table(number)
        self._begin, self._length = table(begin), table(end - begin)
        self._sizes, self._size_of = table(sizes), table(sizes[of])
        chance = end - begin if isinstance(codec, RandomK) else sizes[of] / counts[of]
        self._factor = torch.from_numpy(chance.astype(np.float64)).to(device)  # one over it
        self._index = self._begin

    def encode(self, step: int) -> None:
        total = self._take()
        self._index = self._picked(step)
        values = self._x.index_select(0, self._index).to(self.program.dtype)
        if self._codec.unbiased:
            values = enlarged(values, self._factor)
        norms = torch.stack(list(torch._foreach_norm(self._in_x, dtype=torch.float64)))
        finite = norms.isfinite().index_select(0, self._of)
        values = torch.where(finite, values, torch.nan)
        self._numbers.copy_(values)
        if self.residuals is not None:
            total = self._x.clone() if total is None else total
            total.index_add_(0, self._index, self._codec.as_decoded(values).float(), alpha=-1)
            self._own_lost = self._without(self.residuals.scale, total)
        self._inner.encode(step)

    def _picked(self, step: int) -> torch.Tensor:
        """Where the values that are sent lie. Names are hashed, about 1 us each; all else is done on the device."""
        keys = keys_of(0, step, self.program.names)
        halves = np.stack([keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)]).astype(np.int64)
        low, high = compensated.upload(halves, self._x.device)
        if isinstance(self._codec, RandomK):
            low, high = low.index_select(0, self._of), high.index_select(0, self._of)
            return self._first + self._begin + (bits_of(low, high, self._begin) * self._length >> 32)
        start = bits_of(low, high, torch.zeros_like(self._sizes)) * self._sizes >> 32
        at = start.index_select(0, self._of) + self._number
        return self._first + torch.where(at < self._size_of, at, at - self._size_of)

    def reduce(self, step: int) -> None:
        self._inner.reduce(step)

    def decode(self, step: int) -> None:
        self._inner.decode(step)
        self._out.zero_().index_copy_(0, self._index, self._codec.as_decoded(self._numbers))
        torch._foreach_copy_(self._parts, self._in_out)


class TopMessage(_Sparse):
    scatters = False

    def __init__(
        self, program: Program, codec: TopK, rank: int, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(program, codec, rank, buffer, tensors)
        device, kind = buffer.device, torch.int16 if self._narrow else torch.int32
        counts, sizes = np.array(self._counts), self._values
        self._count, numel = int(counts.sum()), int(sizes.sum())
        self._values_end = self._count * program.dtype.itemsize
        self._end = self._values_end + position_bytes(numel, self._count)
        frame = -(-self._end // 16) * 16
        self.sent = self.received = torch.empty(0, dtype=torch.uint8, device=device)
        self.gathered = torch.zeros(self.world * frame, dtype=torch.uint8, device=device)
        self.sum_frame = self.gathered.view(self.world, -1)[rank]
        # A sort brings the values of each tensor together, the largest first; these are taken.
        within = np.arange(self._count) - np.repeat(np.cumsum(counts) - counts, counts)
        self._taken = torch.from_numpy(np.repeat(self._firsts, counts) + within).to(device)
        above = (np.arange(len(sizes), dtype=np.int64) << 32) + torch.iinfo(kind).max
        self._above = torch.from_numpy(np.repeat(above, sizes)).to(device)
        self._total, self._term = torch.zeros_like(self._x), torch.zeros_like(self._x)

    def encode(self, step: int) -> None:
        total = self._take()
        x = self._x.to(self.program.dtype)
        order = (self._above - magnitudes(x)).sort(stable=True).indices
        index = order.index_select(0, self._taken).sort().values
        self.sum_frame[: self._values_end].view(x.dtype).copy_(x.index_select(0, index))
        self.sum_frame[self._values_end : self._end].copy_(pack_positions(index, len(x)))
        if self.residuals is not None:
            lost = self._x.index_fill(0, index, 0)
            lost.add_(0.0 if total is None else total.sub_(self._x))  # with 0.0 there is no -0, as on the host
            self._own_lost = self._without(self.residuals.scale, lost)

    def reduce(self, step: int) -> None:
        raise AssertionError("every rank has all frames")

    def decode(self, step: int) -> None:
        for rank, frame in enumerate(self.gathered.view(self.world, -1).unbind()):
            values = frame[: self._values_end].view(self.program.dtype).float()
            index = unpack_positions(frame[self._values_end : self._end], len(self._x), self._count, checked=False)
            if rank == 0:
                self._total.zero_().index_copy_(0, index, values)
            elif self._narrow:  # the host adds zeros, too, where types differ: of -0 they make +0
                self._total.add_(self._term.zero_().index_copy_(0, index, values))
            else:
                self._total.index_add_(0, index, values)  # no place twice, so that there is no order
        self._out.copy_(self._total.div_(self._divisor))
        torch._foreach_copy_(self._parts, self._in_out)


class SparseOnStream(StreamCodec):
    """`randomk`, `randomblock` and `topk`."""

    codec: GenericOnHost
    widest = 4

    def __init__(self, codec: RandomK | RandomBlock | TopK) -> None:
        self.codec, self.text, self.feeds_back = GenericOnHost(codec), str(codec), codec.error_memory is not None
        self.route = NAMED["allgather" if isinstance(codec, TopK) else "allreduce"]

    def message(
        self,
        program: Program,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int],
    ) -> DeviceMessage:
        codec = self.codec.codec
        if isinstance(codec, TopK):
            return TopMessage(program, codec, rank, buffer, tensors)
        assert isinstance(codec, RandomK | RandomBlock)
        return PickedMessage(program, codec, rank, buffer, tensors)
