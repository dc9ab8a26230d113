"""What a codec offers that codes whole messages, by a table of parts; and the two that need no engine.

A MessageCodec is configuration. For each message of a step it makes a Coder, which knows the step, the rank and the
rank's own values. A frame holds the parts of one owner. Coders see whole tensors and take from them the parts that a
table names, so values need not be collected first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..codecs.base import wide
from ..codecs.books import Book
from ..engines.layout import Floor
from ..engines.noise_layout import Shapes
from ..errors import Corrupt
from ..feedback import Memory
from .on_host import streams
from .parts import Column, Table
from .program import Hop

# None stands for a rank's own values: in a ring as they are, else as if it had sent a frame of them to itself.
Frames = Sequence[torch.Tensor | None]


@dataclass
class Message:
    """What a coder knows of the message and step that it is made for."""

    names: Sequence[str]
    dtype: torch.dtype
    rank: int = 0
    world: int = 1
    step: int = 0
    seed: int = 0  # equal on all ranks
    shapes: Shapes | None = None  # how coarse each value may be, an int8 each; None: all alike
    scale: float = 1.0  # the loss scale that the gradients carry
    memory: Memory | None = None  # residuals and codec state, from step to step; None: there are none
    floors: Sequence[Floor | torch.Tensor | None] = ()  # of each tensor, as in codecs.Context; (): none
    lossless: bool = False  # ranks have other floors: gradients go lossless in this step
    book: Book | None = None  # the shared code book; None: the prior
    count: Callable[[torch.Tensor], None] | None = None  # is told how often the gradients have each exponent
    hops: int = 2  # how often a value is encoded on its way: in a reduce-scatter once


class AddedNoise(NamedTuple):
    """What rounding at random adds to the means of a message."""

    noise: float  # the sum of its squares that is to be expected
    squares: float  # the sum of squares of the means; NaN if one of them is not finite
    share: float  # how much of that the noise may be, on average over steps
    coarser: int  # frames that were rounded more coarsely than that asks for, to fit their slots


@dataclass
class Values:
    """The tensors of a message, flat and contiguous; with views of their parts, which are made once for each table."""

    tensors: Sequence[torch.Tensor]
    kept: dict[object, Any] = field(default_factory=dict)  # what coders keep about them from step to step
    _views: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    shaped: Sequence[torch.Tensor] = ()  # the same memory as the user's tensors have it; (): the flat ones

    def __post_init__(self) -> None:
        self.shaped = self.shaped or self.tensors

    def parts(self, table: Table, owner: int) -> list[torch.Tensor]:
        key = table.digest, owner
        if key not in self._views:
            found = [self.tensors[part.tensor][part.start : part.stop] for part in table.of_owner(owner)]
            self._views[key] = found
        return self._views[key]

    def addresses(self, table: Table, owner: int) -> Column:
        """Where the values of each part begin in memory."""
        if "addresses" not in self.kept:
            self.kept["addresses"] = np.array([tensor.data_ptr() for tensor in self.tensors], np.int64)
        columns = table.columns(owner)
        starts: Column = self.kept["addresses"][columns.tensor] + columns.start * self.tensors[0].itemsize
        return starts

    @property
    def joined(self) -> torch.Tensor | None:
        """One view of all tensors, where they lie one behind the other in memory as those of DDP's buckets do."""
        if "joined" not in self.kept:
            self.kept["joined"] = _joined(self.tensors)
        joined: torch.Tensor | None = self.kept["joined"]
        return joined

    def divide(self, table: Table, owner: int, by: int) -> None:
        """Divides an owner's parts, in place."""
        torch._foreach_div_(self.parts(table, owner), by)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first, end = tensors[0], tensors[0].data_ptr()
    if first.device.type != "cpu":
        return None
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.data_ptr() != end or tensor.dtype != first.dtype or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


class Stretch(Values):
    """Memory for the parts of one owner, at their places in its frame."""

    joined = None  # they do not lie as whole tensors do

    def __init__(self, table: Table, owner: int, kind: torch.dtype) -> None:
        self._flat = torch.empty(table.length(owner), dtype=kind, device=streams.current().device)
        super().__init__([self._flat])

    @property
    def flat(self) -> torch.Tensor:
        """All parts, and what fills up the places between them."""
        return self._flat

    def parts(self, table: Table, owner: int) -> list[torch.Tensor]:
        return [self._flat[part.place : part.place + part.numel] for part in table.of_owner(owner)]

    def addresses(self, table: Table, owner: int) -> Column:
        places: Column = self._flat.data_ptr() + table.columns(owner).place * self._flat.itemsize
        return places

    def divide(self, table: Table, owner: int, by: int) -> None:
        self._flat.div_(by)  # what lies between parts has no meaning


def in_float32(values: Values, fill: bool = True) -> Values:
    """The values, or a copy of those of 16 bits, which stays for the next step."""
    if "float32" not in values.kept:
        narrow = any(tensor.dtype != torch.float32 for tensor in values.tensors)
        copies = Values([torch.empty(tensor.numel()) for tensor in values.tensors]) if narrow else None
        values.kept["float32"] = copies
    wide: Values | None = values.kept["float32"]
    if wide is None:
        return values
    if fill:
        torch._foreach_copy_(list(wide.tensors), list(values.tensors))
    return wide


class Coder(ABC):
    """Codes one message of one step on one rank."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._added = False  # what was lost before

    def measure(self, values: Values) -> None:
        """Sees the rank's own gradients, whole, before any of them is encoded; adds what was lost of them before."""
        message, memory = self.message, self.message.memory
        self._added = memory is not None and memory.residuals
        if memory is not None and self._added:
            totals = memory.compensated_all(message.names, values.shaped, message.scale)
            for tensor, total in zip(values.shaped, totals):
                if total is not tensor:
                    tensor.copy_(total)

    def finish(self) -> None:
        """Takes note of what is lost of the rank's own gradients, after the last step: of most codecs nothing."""
        if self.message.memory is not None and self._added:
            self.message.memory.lost_all(self.message.names, [None] * len(self.message.names))

    def added_noise(self, values: Values) -> AddedNoise | None:
        """What the codec added to the means, which are in `values`; None: it does not round at random."""
        return None

    @abstractmethod
    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        """Writes a frame for each of these owners into byte tensors that are long enough; returns the frames' bytes."""

    @abstractmethod
    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        """Adds up frames of an owner's parts, in float32 and in their order; writes the sum divided by `by`.

        A frame may be followed by bytes of no meaning. `hop` is that of the frames' encode.
        """

    def decode_all(
        self,
        table: Table,
        owners: Sequence[int],
        frames: Sequence[Frames],
        own: Values | None,
        hop: Hop,
        out: Values,
        by: int,
    ) -> None:
        """`decode` for several owners."""
        for owner, of_owner in zip(owners, frames):
            self.decode(table, owner, of_owner, own, hop, out, by)

    def check(self) -> None:  # noqa: B027  # most coders have nothing to say
        """Raises what was wrong with frames that a device has decoded meanwhile; waits for it."""

    def recode(
        self,
        table: Table,
        owner: int,
        frames: Frames,
        own: Values | None,
        hop: Hop,
        by: int,
        after: Hop,
        out: torch.Tensor,
    ) -> int:
        """Encodes what `decode` would write, as hop `after`, into one frame; returns its bytes."""
        dtype = self.message.dtype
        total = Stretch(table, owner, torch.promote_types(dtype, torch.float32) if after.wide else dtype)
        self.decode(table, owner, frames, own, hop, total, by)
        return self.encode(table, [owner], total, after, [out])[0]


class MessageCodec(ABC):
    """A configured codec; its text form is what ranks compare."""

    text: str
    codes_sums: bool = False  # sums are coded as they are and divided at the end; else their means are coded
    cuttable: bool = True  # chunks may cut parts
    adds_frames: bool = False  # plain values in another type: where a route codes nothing, these are averaged instead
    widest: int = 8  # bytes of a value, at the most
    # Values for each rank in a chunk on CPUs: coding one overlaps with sending another. A chunk costs two milliseconds
    # of processor time, so where frames are small, and little is gained while they are sent, it is longer.
    chunk: int = 1 << 19

    @abstractmethod
    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        """Bytes that a frame of values of that type can have at the most."""

    @abstractmethod
    def coder(self, message: Message) -> Coder: ...


class Raw(MessageCodec):
    """Values one behind the other: as they are (`identity`), or rounded to a type of 16 bits (`cast`)."""

    def __init__(self, text: str, rounded: torch.dtype | None = None) -> None:
        self.text, self._rounded, self.adds_frames = text, rounded, rounded is not None

    def kind(self, kind: torch.dtype) -> torch.dtype:
        """The type in which values of that type travel."""
        return self._rounded or kind

    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        return table.numel(owner) * self.kind(kind).itemsize

    def coder(self, message: Message) -> Coder:
        return _RawCoder(message, self)


RAW = Raw("raw")


class _RawCoder(Coder):
    def __init__(self, message: Message, codec: Raw) -> None:
        super().__init__(message)
        self._codec = codec

    def _kind(self, hop: Hop) -> torch.dtype:
        return self._codec.kind(
            torch.promote_types(self.message.dtype, torch.float32) if hop.wide else self.message.dtype
        )

    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        sizes = []
        for owner, frame in zip(owners, out):
            size = table.numel(owner) * self._kind(hop).itemsize
            stream, frame = streams.current(), frame[:size]
            there = stream.room(frame)
            parts = values.parts(table, owner)
            if parts:
                room = there.view(self._kind(hop))
                torch._foreach_copy_(list(room.split_with_sizes([part.numel() for part in parts])), parts)
                stream.send_back(there, frame)
            sizes.append(size)
        return sizes

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        targets = out.parts(table, owner)
        if targets:
            mean = self._mean(table, owner, frames, own, hop, by)
            torch._foreach_copy_(targets, list(mean.split_with_sizes([target.numel() for target in targets])))

    def recode(
        self,
        table: Table,
        owner: int,
        frames: Frames,
        own: Values | None,
        hop: Hop,
        by: int,
        after: Hop,
        out: torch.Tensor,
    ) -> int:
        size = table.numel(owner) * self._kind(after).itemsize
        if size:
            mean = self._mean(table, owner, frames, own, hop, by)
            rounded = mean if after.wide else mean.to(self.message.dtype)
            there = streams.current().room(out[:size])
            there.view(self._kind(after)).copy_(rounded)
            streams.current().send_back(there, out[:size])
        return size

    def _mean(self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, by: int) -> torch.Tensor:
        """The sum of frames, in their order, divided; one part behind the other."""
        count, kind = table.numel(owner), self._kind(hop)
        total: torch.Tensor | None = None
        for frame in frames:
            if frame is None:
                assert own is not None
                term = torch.cat(own.parts(table, owner))
            elif frame.numel() < count * kind.itemsize:
                raise Corrupt(f"a frame of {frame.numel()} bytes came where {count} x {kind} were expected")
            else:
                term = streams.current().there(frame)[: count * kind.itemsize].view(kind)
            total = wide(term) if total is None else total + wide(term)
        assert total is not None
        return total / streams.current().divisor(by) if by > 1 else total
