"""Messages on the stream runner of codecs that code each part by itself, in frames of a known size.

What the host codes as a frame for each part (generic.py) lies in one frame for each owner here, without headers, and is
coded for all parts at once: values are copied to rows (part_rows.py), and every step is an operation on all of them. By
the route allgather, which quantised codecs take unless told otherwise, no rank owns a part: each has one frame of whole
tensors, and all ranks add all frames up. By alltoall means are coded as on the host, and residuals are the same: those
of gradients, and of the means that this rank codes. All arithmetic gives the same bits on every device, so that both
runners agree wherever they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...codecs import Codec
from ...codecs.baseline import Cast
from ...codecs.packing import pack, pack_trits, trits_of, unpack
from ...codecs.quantized import QuantizedCodec, draws_key
from ...codecs.scaled import Scaled
from ...codecs.sums import LANES
from ...engines import noise_layout
from ...engines.cuda.scaled import ALIGN, PART, Launch, Work
from ...engines.scaled_layout import places
from ...routes import NAMED
from ..on_host.generic import GenericOnHost, stage_of
from ..parts import Part
from ..program import REDUCE_SCATTER, Program, Recode
from . import compensated
from .compensated import CompensatedMessage
from .message import DeviceMessage, StreamCodec
from .part_rows import PartRows, RowLayout
from .residuals import Piece


class RowCoder(ABC):
    """Makes frames of rows: of a rank's own gradients for each owner, and of the means of its parts."""

    frame_bytes: int

    def begin(self, step: int) -> None:  # noqa: B027  # most have nothing to do
        """Before the frames of a step."""

    @abstractmethod
    def encode(self, x: torch.Tensor, rows: PartRows, frames: torch.Tensor, step: int) -> None:
        """Fills `frames`, a row of bytes each, with float32 values."""

    @abstractmethod
    def decode(self, frames: torch.Tensor, rows: PartRows, out: torch.Tensor, step: int) -> None:
        """Fills `out` with the numbers of frames, in float32; what fills rows up may become anything."""


class QuantizedRows(RowCoder):
    """Statistics of all stretches, then codes of all values."""

    def __init__(
        self, codec: QuantizedCodec, layout: RowLayout, program: Program, rank: int, device: torch.device
    ) -> None:
        self._codec, self._dtype, self._rank = codec, program.dtype, rank
        self._head = 4 * codec.statistics * layout.stretches
        self.frame_bytes = self._head + codec.codes_bytes(LANES * layout.rows)
        self._names = [name_of(program, part) for part in layout.table.parts]
        self._keys, self._device = torch.empty(0), device

    def begin(self, step: int) -> None:
        """Hashes the names of all parts, about 1 us each: the only thing that a step does for each of them."""
        if self._codec.draws:
            keys = np.array([draws_key(name, step, self._rank) for name in self._names], np.uint64)
            self._keys = compensated.upload(keys.view(np.int32).reshape(-1, 2).T.copy(), self._device)

    def encode(self, x: torch.Tensor, rows: PartRows, frames: torch.Tensor, step: int) -> None:
        codec = self._codec
        draws = rows.draws(self._keys, codec.draws) if codec.draws else None
        statistics = codec.measure(x, rows, draws, self._dtype)
        codes = codec.codes(x, [rows.spread(each) for each in statistics], draws, self._dtype)
        head = torch.stack(statistics).view(len(statistics), rows.frames, -1)
        frames[:, : self._head].view(torch.float32).view(rows.frames, len(statistics), -1).copy_(head.transpose(0, 1))
        packed = pack(codes.view(-1), codec.width) if codec.width else pack_trits(codes.view(-1))
        frames[:, self._head :].copy_(packed.view(rows.frames, -1))

    def decode(self, frames: torch.Tensor, rows: PartRows, out: torch.Tensor, step: int) -> None:
        codec = self._codec
        head = frames[:, : self._head].view(torch.float32).view(rows.frames, codec.statistics, -1)
        statistics = [rows.spread(each.reshape(-1)) for each in head.unbind(1)]
        packed = frames[:, self._head :].reshape(-1)
        codes = unpack(packed, out.numel(), codec.width) if codec.width else trits_of(packed)
        out.copy_(codec.values(codes.view(out.shape), statistics, self._dtype))


class CastRows(RowCoder):
    """Values rounded to 16 bits."""

    def __init__(self, codec: Cast, layout: RowLayout) -> None:
        self._to, self.frame_bytes = codec.dtype, 2 * LANES * layout.rows

    def encode(self, x: torch.Tensor, rows: PartRows, frames: torch.Tensor, step: int) -> None:
        frames.view(self._to).view(x.shape).copy_(x)

    def decode(self, frames: torch.Tensor, rows: PartRows, out: torch.Tensor, step: int) -> None:
        out.copy_(frames.view(self._to).view(out.shape))


class ScaledRows(RowCoder):
    """Block-scaled codes, by the kernels that also make them without residuals."""

    def __init__(self, codec: Scaled, layout: RowLayout, program: Program, rank: int) -> None:
        self._form, self._layout, self._program = codec.form, layout, program
        self._offset = noise_layout.offset_of(rank, program.world)
        owners = range(layout.table.owners)
        counts = [[part.numel for part in layout.table.of_owner(owner)] for owner in owners]
        self._laid = [places(each, codec.form) for each in counts]
        self.frame_bytes = max(ALIGN, *(-(-each.size // ALIGN) * ALIGN for each in self._laid))
        self._most = torch.finfo(program.dtype).max
        self._launches: dict[tuple[str, int, int], Launch] = {}  # tables name memory that stays where it is

    def encode(self, x: torch.Tensor, rows: PartRows, frames: torch.Tensor, step: int) -> None:
        self._launch("scaled_encode", x, rows, frames)(step)

    def decode(self, frames: torch.Tensor, rows: PartRows, out: torch.Tensor, step: int) -> None:
        self._launch("scaled_decode", out, rows, frames)(step)
        out.clamp_(-self._most, self._most)  # a code may stand for more than a type of 16 bits holds

    def _launch(self, kernel: str, x: torch.Tensor, rows: PartRows, frames: torch.Tensor) -> Launch:
        key = kernel, x.data_ptr(), frames.data_ptr()
        if key not in self._launches:
            table = np.zeros(len(rows.parts), PART)
            for hop in ("key", "signs"):
                said = "own" if hop == "key" else hop
                names = [name_of(self._program, part) for part in rows.parts]
                table[hop] = np.array([noise_layout.name_key(0, name, said, 0) for name in names], np.uint64)
            table["values"], table["length"] = rows.addresses(x), [part.numel for part in rows.parts]
            at = 0
            for frame, owner in enumerate(rows.owners):
                laid = self._laid[owner]
                here = slice(at, at + len(laid.scales))
                table["scale_at"][here], table["code_at"][here], table["frame"][here] = laid.scales, laid.codes, frame
                at = here.stop
            addresses = [frames.data_ptr() + self.frame_bytes * frame for frame in range(rows.frames)]
            work = (
                Work(kernel, table, frames=addresses, offset=self._offset)
                if kernel == "scaled_encode"
                else Work(kernel, table, [[address] for address in addresses])
            )
            self._launches[key] = Launch(x.device, torch.float32, self._form, work)
        return self._launches[key]


def name_of(program: Program, part: Part) -> str:
    """What the host calls a part of a tensor, or all of it (generic.py)."""
    name, whole = program.names[part.tensor], part.numel == program.sizes[part.tensor]
    return name if whole else f"{name}[{part.start}:{part.stop}]"


class CodedMessage(CompensatedMessage):
    """`x` is in rows; what fills rows up is zero wherever statistics are made of it."""

    def __init__(
        self,
        program: Program,
        codec: Codec,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        device, world = buffer.device, program.world
        self.scatters = program.route == NAMED["alltoall"] or program.route == REDUCE_SCATTER
        layout = RowLayout(program.dealt, codec.stretch if isinstance(codec, QuantizedCodec) else None)
        self._all = PartRows(layout, range(program.dealt.owners), device)
        self._mine = PartRows(layout, [rank], device) if self.scatters else self._all
        own, sums = (
            [Piece(p.tensor, p.start, p.stop, at) for p, at in zip(rows.parts, rows.firsts)]
            for rows in (self._all, self._mine)
        )
        stages = [_stage(program, part) for part in self._mine.parts] if codec.error_memory and self.scatters else []
        super().__init__(program, codec, rank, buffer, tensors, self._all.new(), own, list(zip(stages, sums)))
        self._coder = _coder(codec, layout, program, rank, device)
        size = world * self._coder.frame_bytes
        self.gathered = torch.zeros(size, dtype=torch.uint8, device=device)
        self.sum_frame = self.gathered.view(world, -1)[rank]
        self.sent, self.received = (self.gathered.new_zeros(size if self.scatters else 0) for _ in range(2))
        self._frames = self.sent.view(world, -1) if self.scatters else self.sum_frame.view(1, -1)  # of own gradients
        self._sum, self._term = self._mine.new(), self._mine.new()
        self._decoded = self._all.new()
        self._in_decoded = self._all.views(self._decoded if self.scatters else self._sum)

    def encode(self, step: int) -> None:
        self._coder.begin(step)
        sent, total = self._frames, self._take()
        self._coder.encode(self._x, self._all, sent, step)
        if self.residuals is not None:
            self._coder.decode(sent, self._all, self._decoded, step)
            lost = self._x - self._as_type(self._decoded)
            lost.add_(0.0 if total is None else total.sub_(self._x))  # with 0.0 there is no -0, as on the host
            self._own_lost = self._without(self.residuals.scale, self._all.real(lost))

    def _add_up(self, frames: torch.Tensor, step: int) -> None:
        """Forms the mean of a frame of each rank, in float32 and in their order."""
        for rank, frame in enumerate(frames.view(self.world, 1, -1).unbind()):
            self._coder.decode(frame, self._mine, self._term, step)
            self._as_type(self._term)
            self._sum.add_(self._term) if rank else self._sum.copy_(self._term)
        if self.program.divisor > 1:
            self._sum.div_(self._divisor)
        self._as_type(self._sum.copy_(self._mine.real(self._sum)))

    def keep(self, step: int) -> None:
        self._add_up(self.received, step)
        torch._foreach_copy_(self._own_parts, self._mine.views(self._sum))

    def reduce(self, step: int) -> None:
        self._add_up(self.received, step)
        frame = self.sum_frame.view(1, -1)
        if self.residuals is None:
            self._coder.encode(self._sum, self._mine, frame, step)
            return
        unit = self.residuals.scale / self.world  # they are means
        before = self.residuals.before_of_sums(self._sum)
        if before is not None:
            self._sum.add_(before.view(self._sum.shape) * unit)
        total = self._sum.clone()
        self._coder.encode(self._as_type(self._sum), self._mine, frame, step)
        self._coder.decode(frame, self._mine, self._term, step)
        lost = total.sub_(self._as_type(self._term))
        self._sum_lost = self._without(unit, self._mine.real(lost))

    def decode(self, step: int) -> None:
        if self.scatters:
            self._coder.decode(self.gathered.view(self.world, -1), self._all, self._decoded, step)
        else:
            self._add_up(self.gathered, step)
        torch._foreach_copy_(self._parts, self._in_decoded)


def _stage(program: Program, part: Part) -> str:
    """What Memory calls what is lost of the mean of a part."""
    (recode,) = (step for step in program.steps if isinstance(step, Recode))
    return stage_of(program.hop(recode.target), part)


def _coder(codec: Codec, layout: RowLayout, program: Program, rank: int, device: torch.device) -> RowCoder:
    if isinstance(codec, QuantizedCodec):
        return QuantizedRows(codec, layout, program, rank, device)
    if isinstance(codec, Cast):
        return CastRows(codec, layout)
    assert isinstance(codec, Scaled)
    return ScaledRows(codec, layout, program, rank)


class CodedOnStream(StreamCodec):
    """`sign`, `onebit`, `qsgd`, `terngrad` and `natural`; `cast`, `int8`, `int4` and `fp8` with error feedback."""

    codec: GenericOnHost
    widest = 4

    def __init__(self, codec: Codec, route: str) -> None:
        self.codec, self.text, self.feeds_back = GenericOnHost(codec), str(codec), codec.error_memory is not None
        self.route = NAMED[route]

    @staticmethod
    def serves(codec: Codec) -> bool:
        """Rows of 32 values must not belong to two stretches, and residuals stay on the GPU, in float32."""
        if codec.error_memory not in (None, "fp32"):
            return False
        if isinstance(codec, QuantizedCodec):
            return codec.stretch is None or codec.stretch % LANES == 0
        return isinstance(codec, Cast | Scaled) and codec.error_memory is not None

    def message(
        self,
        program: Program,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int],
    ) -> DeviceMessage:
        return CodedMessage(program, self.codec.codec, rank, buffer, tensors)
