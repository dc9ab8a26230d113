"""Any codec of one round for whole messages: an owner's frame holds a frame of the codec for each part.

First come the sizes of these frames, 8 bytes each, then the frames, each padded with zeros to 8 bytes.

What an encode loses is kept by the rank that performs it, for the next step: that of its own gradient under the
parameter's name, that of a sum under the number of the encode and the place of the part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import wire
from ..codecs import Codec, Context
from ..codecs.base import wide
from ..codecs.sparse import scatter
from ..errors import Corrupt
from . import streams
from .coding import Coder, Frames, Message, MessageCodec, Values
from .flattening import flatten, unflatten
from .parts import Part, Table
from .program import Hop

ENTRY = 8  # bytes of a size, and what frames are padded to


class GenericMessages(MessageCodec):
    known_size = False

    def __init__(self, codec: Codec) -> None:
        self.codec, self.text = codec, str(codec)
        self.codes_sums = codec.codes_sums
        # A residual of a sum belongs to a whole part, wherever DDP's buckets and chunks would cut it.
        self.cuttable = codec.cuttable and codec.error_memory is None
        self._bounds: dict[tuple[str, int, torch.dtype], int] = {}

    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        key = table.digest, owner, kind
        if key not in self._bounds:
            parts, codec = table.of_owner(owner), self.codec.densest
            self._bounds[key] = sum(codec.bound(part.numel, kind) + 2 * ENTRY for part in parts)
        return self._bounds[key]

    def coder(self, message: Message) -> Coder:
        return GenericCoder(message, self.codec)


class GenericCoder(Coder):
    def __init__(self, message: Message, codec: Codec) -> None:
        super().__init__(message)
        self.codec = codec
        self._contexts: dict[int, Context] = {}  # of whole tensors
        self._own = Values([])
        self._lost: list[torch.Tensor] = []  # of each of the rank's own tensors, flat

    @property
    def _feeds_back(self) -> bool:
        return self.message.memory is not None and self.codec.error_memory is not None

    # -- the rank's own gradients -------------------------------------------------------------------------------

    def measure(self, values: Values) -> None:
        self._own, memory = values, self.message.memory
        if memory is not None:
            memory.forms |= dict.fromkeys(self.message.names, self.codec.error_memory)
        if memory is None or not self._feeds_back:
            super().measure(values)
            return
        for name, tensor in zip(self.message.names, values.shaped):
            total = memory.compensated(name, tensor, self.message.scale)
            if total is not tensor:
                tensor.copy_(total)
            # Values that go out uncoded lose nothing but this: what rounding to the gradients' own type takes.
            lost = wide(total) - wide(tensor) if tensor.itemsize < 4 else torch.zeros_like(tensor)
            self._lost.append(flatten(lost, tensor))

    def finish(self) -> None:
        memory = self.message.memory
        if memory is None or not self._feeds_back:
            super().finish()
            return
        for name, tensor, lost in zip(self.message.names, self._own.shaped, self._lost):
            memory.lost(name, unflatten(lost, tensor), self.message.scale)

    # -- frames -------------------------------------------------------------------------------------------------

    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        if hop.own:
            streams.current().sleep()  # codecs ask the device for numbers, and backward may take long
        return [self._encode(table, owner, values, hop, room) for owner, room in zip(owners, out)]

    def _encode(self, table: Table, owner: int, values: Values, hop: Hop, room: torch.Tensor) -> int:
        stream, count = streams.current(), len(table.of_owner(owner))
        there = stream.room(room)
        writer = FrameWriter(there, count)
        for part, x in zip(table.of_owner(owner), values.parts(table, owner)):
            writer.add(self._encode_part(part, x, hop, writer.room)[0].numel())
        size = writer.end(room)
        stream.send_back(there[ENTRY * count : size], room[ENTRY * count : size])
        return size

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        parts, stream = table.of_owner(owner), streams.current()
        terms = [None if frame is None else frames_in(frame, len(parts)) for frame in frames]
        there = terms
        if stream.on_device:
            there = [None if frame is None else frames_in(frame, len(parts), stream.there(frame)) for frame in frames]
        mine = None if own is None else own.parts(table, owner)
        for number, (part, target) in enumerate(zip(parts, out.parts(table, owner))):
            kind = torch.promote_types(target.dtype, torch.float32)
            total = target if target.dtype == kind else torch.empty_like(target, dtype=kind)
            for place, (found, near) in enumerate(zip(there, terms)):
                if found is not None and near is not None:
                    self._decode_part(part, found[number], near[number], hop, total, add=place > 0)
                    continue
                assert mine is not None
                term = mine[number] if hop.ring else self._as_decoded(part, mine[number], hop)
                total.add_(term) if place else total.copy_(term)
            if by > 1:
                total.div_(stream.divisor(by))
            if total is not target:
                target.copy_(total)

    # -- parts --------------------------------------------------------------------------------------------------

    def _encode_part(
        self, part: Part, x: torch.Tensor, hop: Hop, room: torch.Tensor
    ) -> tuple[torch.Tensor, Context, Codec]:
        """The frame of a part, and what made it; what it loses is noted."""
        memory, name, total = self.message.memory, self.message.names[part.tensor], x
        if memory is not None and self._feeds_back and not hop.own:
            total = memory.compensated(name, x, self._unit(hop), stage_of(hop, part))
            x = total.to(x.dtype)
        codec, context = self._codec_for(part, x, hop), self._context(part, hop)
        frame = codec.encode(x, context, room)
        if memory is not None and self._feeds_back:
            self._note(part, total, self._decoded(codec, frame, context, x), hop)
        return frame, context, codec

    def _note(self, part: Part, total: torch.Tensor, decoded: torch.Tensor, hop: Hop) -> None:
        """What is lost of a part: that of the rank's own gradient goes to what is lost of the whole."""
        if hop.own:
            self._lost[part.tensor][part.start : part.stop] += wide(total) - wide(decoded)
            return
        assert self.message.memory is not None
        name, lost = self.message.names[part.tensor], wide(total) - wide(decoded)
        self.message.memory.lost(name, lost, self._unit(hop), stage_of(hop, part))

    def _as_decoded(self, part: Part, x: torch.Tensor, hop: Hop) -> torch.Tensor:
        """What others would decode of this rank's own values."""
        codec = self._codec_for(part, x, hop)
        if codec.lossless:
            return x
        room = torch.empty(codec.densest.bound(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        frame, context, codec = self._encode_part(part, x, hop, room)
        return self._decoded(codec, frame, context, x)

    def _decoded(self, codec: Codec, frame: torch.Tensor, context: Context, x: torch.Tensor) -> torch.Tensor:
        if context.sent is None:
            return codec.decode(frame, context)
        out = torch.empty_like(x)
        scatter(*context.sent, out, add=False)
        return out

    def _decode_part(
        self, part: Part, frame: torch.Tensor, near: torch.Tensor, hop: Hop, out: torch.Tensor, add: bool
    ) -> None:
        """`near` is the frame in the host's memory."""
        header = wire.read_header(near)
        if header.numel != part.numel:
            name = self.message.names[part.tensor]
            raise Corrupt(f"{name!r}: the frame holds {header.numel} values instead of {part.numel}")
        codec, context = self.codec.decoder(header.codec_id), self._context(part, hop)
        context.near = near if near is not frame else None
        if header.dtype == out.dtype:
            codec.decode(frame, context, out, add)
        else:
            decoded = codec.decode(frame, context)
            out.add_(decoded) if add else out.copy_(decoded)

    def _codec_for(self, part: Part, x: torch.Tensor, hop: Hop) -> Codec:
        return self.codec if hop.own else self.codec.for_sum(x)

    def _unit(self, hop: Hop) -> float:
        """What is lost of values is divided by it: they carry the loss scale, and may be means."""
        is_mean = not hop.own and not hop.wide
        return self.message.scale / (self.message.world if is_mean else 1)

    # -- contexts -----------------------------------------------------------------------------------------------

    def _whole(self, tensor: int) -> Context:
        """The context of a whole tensor."""
        if tensor not in self._contexts:
            message, name = self.message, self.message.names[tensor]
            floor = message.floors[tensor] if message.floors else None
            about = message.step, message.seed, message.rank, message.world, message.scale
            self._contexts[tensor] = Context(name, *about, floor, state=self._state(name))
        return self._contexts[tensor]

    def _state(self, name: str) -> dict[str, Any]:
        return {} if self.message.memory is None else self.message.memory.state(name, self.codec.name)

    def _context(self, part: Part, hop: Hop) -> Context:
        whole = self._whole(part.tensor)
        is_whole = part.numel == self._own.tensors[part.tensor].numel()
        name = whole.name if is_whole else f"{whole.name}[{part.start}:{part.stop}]"
        floor = None if whole.floor is None else whole.floor[part.start : part.stop]
        if self.codec.cuttable or (is_whole and hop.own):
            state = whole.state
        else:
            state = self._state(name) if hop.own else {}  # of sums nothing is carried from step to step
        return dataclasses.replace(whole, name=name, floor=floor, shift=shift_of(hop, whole.world), state=state)


class FrameWriter:
    """Fills memory with the frames of an owner."""

    def __init__(self, out: torch.Tensor, count: int) -> None:
        self._out, self._sizes, self._at = out, list[int](), ENTRY * count

    @property
    def room(self) -> torch.Tensor:
        """Where the next frame goes."""
        return self._out[self._at :]

    def add(self, size: int) -> None:
        end = self._at + size
        self._at = end + -end % ENTRY
        self._out[end : self._at] = 0
        self._sizes.append(size)

    def end(self, host: torch.Tensor | None = None) -> int:
        """Bytes written, with the sizes; they go to the host's memory, where that is another one."""
        table = np.array(self._sizes, "<i8").view(np.uint8)
        (self._out if host is None else host).numpy()[: table.size] = table
        return self._at


def frames_in(data: torch.Tensor, count: int, there: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The frames that an owner's frame holds; those of `there`, if that is where it was brought."""
    there = data if there is None else there
    at = ENTRY * count
    sizes = data[:at].numpy().view("<i8").tolist() if data.numel() >= at else [-1]
    found = []
    for size in sizes:
        if size < 0 or at + size > data.numel():
            raise Corrupt(f"it does not hold the {count} frames that it should")
        found.append(there[at : at + size])
        at += size + -size % ENTRY
    if at != data.numel():
        raise Corrupt(f"{data.numel() - at} bytes follow the last frame")
    return found


def stage_of(hop: Hop, part: Part) -> str:
    """What Memory calls the residual of a sum."""
    return f"sum{hop.number}.{part.start}-{part.stop}"


def shift_of(hop: Hop, world: int) -> int:
    """How much coarser the grid of a sum is than that of a single rank's gradient (docs/design.md, near mode).

    The first rounding, and that of the whole sum, may go to a grid as coarse as the ranks in the sum allow. Sums on the
    way lie on the first one's grid: on that they are coded exactly.
    """
    return (world if hop.summed == world else hop.first).bit_length() - 1
