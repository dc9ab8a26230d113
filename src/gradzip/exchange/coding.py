"""What a codec offers that codes whole messages, by a table of parts; and the two that need no engine.

A MessageCodec is configuration. For each message of a step it makes a Coder, which knows the step, the rank and the
rank's own values. A frame holds the parts of one owner. Coders see whole tensors and take from them the parts that a
table names, so values need not be collected first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from ..codecs.base import wide
from ..errors import Corrupt
from .parts import Table

Frames = Sequence[torch.Tensor | None]  # None stands for a rank's own values, which it does not send to itself


@dataclass
class Message:
    """What a coder knows of the message and step that it is made for."""

    names: Sequence[str]
    dtype: torch.dtype
    rank: int = 0
    world: int = 1
    step: int = 0
    seed: int = 0  # equal on all ranks
    shapes: Sequence[torch.Tensor | None] = ()  # how coarse each value may be, an int8 each; none: all alike


class Hop(NamedTuple):
    """What is encoded."""

    number: int  # of this encode in the route
    summed: int  # ranks in the sum
    own: bool  # a rank's own gradients, as DDP gave them
    wide: bool  # sums in float32; else values of the gradients' own type


@dataclass
class Values:
    """The tensors of a message, flat; with views of their parts, which are made once for each table."""

    tensors: Sequence[torch.Tensor]
    _views: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    def parts(self, table: Table, owner: int) -> list[torch.Tensor]:
        key = table.digest, owner
        if key not in self._views:
            found = [self.tensors[part.tensor][part.start : part.stop] for part in table.of_owner(owner)]
            self._views[key] = found
        return self._views[key]


class Coder(ABC):
    """Codes one message of one step on one rank."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def measure(self, values: Values) -> None:  # noqa: B027  # most need not
        """Sees the rank's own gradients, whole, before any of them is encoded."""

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
        kind = torch.float32 if after.wide else self.message.dtype
        sums = [torch.empty(0)] * len(table.sizes)
        for part in table.of_owner(owner):
            sums[part.tensor] = torch.empty(table.sizes[part.tensor], dtype=kind)
        total = Values(sums)
        self.decode(table, owner, frames, own, hop, total, by)
        return self.encode(table, [owner], total, after, [out])[0]


class MessageCodec(ABC):
    """A configured codec; its text form is what ranks compare."""

    text: str
    known_size: ClassVar[bool]  # a frame's size follows from its table
    codes_sums: ClassVar[bool] = False  # sums are coded as they are and divided at the end; else their means are coded

    @abstractmethod
    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        """Bytes that a frame of values of that type can have at the most."""

    @abstractmethod
    def coder(self, message: Message) -> Coder: ...


class Raw(MessageCodec):
    """Values one behind the other: as they are (`identity`), or rounded to a type of 16 bits (`cast`)."""

    known_size = True

    def __init__(self, text: str, rounded: torch.dtype | None = None) -> None:
        self.text, self._rounded = text, rounded

    def kind(self, kind: torch.dtype) -> torch.dtype:
        """The type in which values of that type travel."""
        return self._rounded or kind

    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        return table.numel(owner) * self.kind(kind).itemsize

    def coder(self, message: Message) -> Coder:
        return _RawCoder(message, self)


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
            room = frame[:size].view(self._kind(hop))
            parts = values.parts(table, owner)
            if parts:
                torch._foreach_copy_(list(room.split_with_sizes([part.numel() for part in parts])), parts)
            sizes.append(size)
        return sizes

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        targets, kind = out.parts(table, owner), self._kind(hop)
        if not targets:
            return
        sizes = [target.numel() for target in targets]
        total: torch.Tensor | None = None
        for frame in frames:
            if frame is None:
                assert own is not None
                term = torch.cat([part.view(-1) for part in own.parts(table, owner)])
            elif frame.numel() < sum(sizes) * kind.itemsize:
                raise Corrupt(f"a frame of {frame.numel()} bytes came where {sum(sizes)} x {kind} were expected")
            else:
                term = frame[: sum(sizes) * kind.itemsize].view(kind)
            total = wide(term) if total is None else total + wide(term)
        assert total is not None
        mean = total / by if by > 1 else total
        torch._foreach_copy_(targets, list(mean.split_with_sizes(sizes)))
