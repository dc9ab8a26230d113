"""Any codec of one round for whole messages: an owner's frame holds a frame of the codec for each part.

First come the sizes of these frames, 8 bytes each, then the frames, each padded with zeros to 8 bytes. On CPUs, parts
of one size are coded together where the codec takes rows (equal_parts.py): the same bytes by fewer calls.

What an encode loses is kept by the rank that performs it, for the next step: that of its own gradient under the
parameter's name, that of a sum under the number of the encode and the place of the part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import wire
from ...codecs import Codec, Context
from ...codecs.base import wide
from ...codecs.gcomp import is_reach
from ...codecs.sparse import scatter
from ...errors import Corrupt
from ...feedback import Memory, is_exact
from ..coding import Coder, Frames, Message, MessageCodec, Values
from ..flattening import flatten, unflatten
from ..parts import Column, Part, Table
from ..program import Hop
from . import streams
from .equal_parts import ENTRY, LONGEST, EqualParts, PartRun, frames_of_group
from .residuals import LostTogether, Split


class GenericOnHost(MessageCodec):
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
        self._lost: Sequence[torch.Tensor] = []  # of each of the rank's own tensors, flat

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
        together = self._keeps_together(values, memory)
        if together and isinstance(kept := memory.kept_by(values, self.message.names), LostTogether):
            assert values.joined is not None
            values.joined.add_(kept.lost.flat, alpha=self.message.scale)
            self._lost = Split.zeros([tensor.numel() for tensor in values.tensors])
            return
        totals = memory.compensated_all(self.message.names, values.shaped, self.message.scale)
        for tensor, total in zip(values.shaped, totals):
            if total is not tensor:
                tensor.copy_(total)
        if together:
            self._lost = Split.zeros([tensor.numel() for tensor in values.tensors])
            return
        # Values that go out uncoded lose nothing but this: what rounding to the gradients' own type takes.
        self._lost = [
            flatten(wide(total) - wide(tensor), tensor) if tensor.itemsize < 4 else tensor.new_zeros(tensor.numel())
            for tensor, total in zip(values.shaped, totals)
        ]

    def _keeps_together(self, values: Values, memory: Memory) -> bool:
        """Whether what is lost of all gradients is one tensor, as far as these and Memory allow that."""
        message, simple = self.message, self.codec.error_memory == "fp32" and is_exact(self.message.scale)
        if not simple or memory.patient or message.dtype != torch.float32 or streams.current().on_device:
            return False
        if "together" not in values.kept:
            shaped = all(tensor.is_contiguous() for tensor in values.shaped)
            values.kept["together"] = shaped and values.joined is not None
        return bool(values.kept["together"])

    def finish(self) -> None:
        memory = self.message.memory
        if memory is None or not self._feeds_back:
            super().finish()
            return
        if isinstance(self._lost, Split):
            flat, shapes = self._lost.flat, [tensor.shape for tensor in self._own.shaped]
            flat = flat if self.message.scale == 1 else flat.div_(self.message.scale)
            memory.keep_all(self._own, self.message.names, "", LostTogether(self._lost.shaped(flat, shapes)))
            return
        lost, scale = list(self._lost), self.message.scale
        residuals = lost if scale == 1 else torch._foreach_div(lost, scale)
        for name, tensor, residual in zip(self.message.names, self._own.shaped, residuals):
            memory.keep(name, unflatten(residual, tensor))

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
        writer, equal, xs = FrameWriter(there, count), self._equal_parts(table, owner, hop), values.parts(table, owner)
        flat = values.joined if equal.groups else None
        coded = [self._encode_rows(equal, group, xs, hop, flat) for group in range(len(equal.groups))]
        for run in equal.runs:
            if run.group >= 0:
                frames, _ = coded[run.group]
                writer.add_rows(frames[run.row : run.row + run.count])
                continue
            for number in range(run.first, run.first + run.count):
                writer.add(self._encode_part(equal.parts[number], xs[number], hop, writer.room)[0].numel())
        size = writer.end(room)
        stream.send_back(there[ENTRY * count : size], room[ENTRY * count : size])
        return size

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        parts = table.of_owner(owner)
        terms = [None if frame is None else Places(frame, len(parts)) for frame in frames]
        mine = None if own is None else own.parts(table, owner)
        equal, targets = self._equal_parts(table, owner, hop), out.parts(table, owner)
        left = set(range(len(parts)))
        for group in range(len(equal.groups)):
            flats = None if own is None else own.joined, out.joined
            if self._decode_rows(equal, group, terms, mine, hop, targets, by, *flats):
                left.difference_update(equal.groups[group])
        self._decode_each(sorted(left), parts, terms, mine, hop, targets, by)

    def _decode_each(
        self,
        numbers: Sequence[int],
        parts: Sequence[Part],
        terms: Sequence[Places | None],
        mine: Sequence[torch.Tensor] | None,
        hop: Hop,
        targets: Sequence[torch.Tensor],
        by: int,
    ) -> None:
        """`decode` of some of an owner's parts, one by one."""
        stream = streams.current()
        there = [None if term is None or not numbers else stream.there(term.data) for term in terms]
        for number in numbers:
            part, target = parts[number], targets[number]
            kind = torch.promote_types(target.dtype, torch.float32)
            total = target if target.dtype == kind else torch.empty_like(target, dtype=kind)
            for place, (found, near) in enumerate(zip(there, terms)):
                if found is not None and near is not None:
                    self._decode_part(part, near.of(number, found), near.of(number), hop, total, add=place > 0)
                    continue
                assert mine is not None
                term = mine[number] if hop.ring else self._as_decoded(part, mine[number], hop)
                total.add_(term) if place else total.copy_(term)
            if by > 1:
                total.div_(stream.divisor(by))
            if total is not target:
                target.copy_(total)

    # -- parts of one size --------------------------------------------------------------------------------------

    def _equal_parts(self, table: Table, owner: int, hop: Hop) -> EqualParts:
        """An owner's parts; in groups where these are coded together."""
        codec, kept = self.codec, self._own.kept
        batches = codec.codes_rows and self.message.dtype == torch.float32 and not streams.current().on_device
        batches &= hop.own or type(codec).for_sum is Codec.for_sum
        key = table.digest, owner, "rows" if batches else "parts"
        if key not in kept:
            sizes = [tensor.numel() for tensor in self._own.tensors]
            kept[key] = EqualParts(table.of_owner(owner), LONGEST if batches else 0, sizes)
        equal: EqualParts = kept[key]
        return equal

    def _encode_rows(
        self, equal: EqualParts, group: int, of_owner: Sequence[torch.Tensor], hop: Hop, flat: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`_encode_part` for a group: frames as rows; and what others decode, where that is known.

        `flat`: all values of the message, where they lie as one.
        """
        memory, codec, names = self.message.memory, self.codec, equal.names(self._name)[group]
        parts, xs = [equal.parts[number] for number in equal.groups[group]], equal.of_group(group, of_owner)
        feeds_back = memory is not None and self._feeds_back
        if memory is not None and feeds_back and not hop.own:
            of_tensors = [self.message.names[part.tensor] for part in parts]
            xs = [
                memory.compensated(name, x, self._unit(hop), stage_of(hop, part))
                for name, x, part in zip(of_tensors, xs, parts)
            ]
            flat = None
        x, message = equal.rows_in(group, flat), self.message
        x = torch.stack(xs) if x is None else x
        context = Context("", message.step, message.seed, message.rank, message.world, message.scale, names=names)
        size, start = codec.bound(x.shape[1], x.dtype), wire.HEADER_BYTES
        frames = torch.zeros(len(parts), size + -size % ENTRY, dtype=torch.uint8)
        body = codec._encode(x, context, frames[:, start:size])
        assert start + body == size, f"{codec}: rows need frames of one size"
        head = wire.pack_header(codec.wire_id, x.dtype, x.shape[1], body, check=False)
        frames[:, :start] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if not feeds_back:
            return frames[:, :size], None
        decoded = torch.empty_like(x)
        if context.sent is None:
            codec._decode(frames[:, start:size], context, decoded, False)
        else:
            scatter(*context.sent, decoded, add=False)
        of_all = x - decoded
        noted = equal.rows_in(group, self._lost.flat if isinstance(self._lost, Split) else None)
        if hop.own and noted is not None:
            noted += of_all
            return frames[:, :size], decoded
        lost = list(of_all.unbind())
        if hop.own:
            torch._foreach_add_([self._lost[part.tensor][part.start : part.stop] for part in parts], lost)
        for part, of_part in zip(parts, lost) if not hop.own else ():
            assert memory is not None
            memory.lost(message.names[part.tensor], of_part, self._unit(hop), stage_of(hop, part))
        return frames[:, :size], decoded

    def _decode_rows(
        self,
        equal: EqualParts,
        group: int,
        terms: Sequence[Places | None],
        mine: Sequence[torch.Tensor] | None,
        hop: Hop,
        targets: Sequence[torch.Tensor],
        by: int,
        flat_own: torch.Tensor | None,
        flat_out: torch.Tensor | None,
    ) -> bool:
        """Adds up a group's parts; False: nothing is done, they are to be decoded one by one."""
        count, numel = len(equal.groups[group]), equal.parts[equal.groups[group][0]].numel
        frames = [None if term is None else term.rows(equal.runs_of[group]) for term in terms]
        codecs = [None if found is None else self._decoder_of_rows(found, numel) for found in frames]
        if any(term is not None and codec is None for term, codec in zip(terms, codecs)):
            return False
        there = equal.rows_in(group, flat_out if flat_out is not None and flat_out.dtype == torch.float32 else None)
        total, context = torch.empty(count, numel) if there is None else there, Context()
        for place, (found, codec) in enumerate(zip(frames, codecs)):
            if found is not None and codec is not None:
                codec._decode(found[:, wire.HEADER_BYTES :], context, total, place > 0)
                continue
            assert mine is not None
            term = self._rows_as_decoded(equal, group, mine, hop, flat_own)
            total.add_(term) if place else total.copy_(term)
        if by > 1:
            total.div_(by)
        if there is None:
            torch._foreach_copy_(equal.of_group(group, targets), list(total.unbind()))
        return True

    def _decoder_of_rows(self, frames: torch.Tensor, numel: int) -> Codec | None:
        """What decodes frames that begin alike; None: they are not what was expected, or not to be decoded as rows."""
        header = wire.read_header(frames[0])
        codec = self.codec.decoder(header.codec_id)
        expected = codec.wire_id, torch.float32, numel, None
        found = header.codec_id, header.dtype, header.numel, header.checksum
        return codec if codec.codes_rows and found == expected else None

    def _rows_as_decoded(
        self, equal: EqualParts, group: int, mine: Sequence[torch.Tensor], hop: Hop, flat: torch.Tensor | None
    ) -> torch.Tensor:
        """What others would decode of this rank's own values."""
        if hop.ring:
            return torch.stack(equal.of_group(group, mine))
        frames, decoded = self._encode_rows(equal, group, mine, hop, flat)
        if decoded is None:
            decoded = torch.empty(len(frames), equal.parts[equal.groups[group][0]].numel)
            self.codec._decode(frames[:, wire.HEADER_BYTES :], Context(), decoded, False)
        return decoded

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
            lost, found = self._lost[part.tensor][part.start : part.stop], wide(decoded)
            lost += torch.sub(wide(total), found, out=found)  # what was decoded is needed no more
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

    def _name(self, part: Part) -> str:
        """Of its tensor, and which part of that it is."""
        name = self.message.names[part.tensor]
        is_whole = part.numel == self._own.tensors[part.tensor].numel()
        return name if is_whole else f"{name}[{part.start}:{part.stop}]"

    def _context(self, part: Part, hop: Hop) -> Context:
        whole, name = self._whole(part.tensor), self._name(part)
        is_whole = part.numel == self._own.tensors[part.tensor].numel()
        floor = None if whole.floor is None else whole.floor[part.start : part.stop]
        if self.codec.cuttable or (is_whole and hop.own):
            state = whole.state
        else:
            state = self._state(name) if hop.own else {}  # of sums nothing is carried from step to step
        shift = reach_shift_of(hop) if is_reach(floor) else shift_of(hop, whole.world)
        return dataclasses.replace(whole, name=name, floor=floor, shift=shift, state=state)


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

    def add_rows(self, frames: torch.Tensor) -> None:
        """Frames of one size, as rows."""
        count, size = frames.shape
        padded = size + -size % ENTRY
        room = self._out[self._at : self._at + count * padded].view(count, padded)
        room[:, :size], room[:, size:] = frames, 0
        self._at += count * padded
        self._sizes += [size] * count

    def wrote(self, sizes: Column) -> None:
        """Frames of so many bytes have been written to `room`, padded."""
        self._at += int((sizes + -sizes % ENTRY).sum())
        self._sizes += sizes.tolist()

    def end(self, host: torch.Tensor | None = None) -> int:
        """Bytes written, with the sizes; they go to the host's memory, where that is another one."""
        table = np.array(self._sizes, "<i8").view(np.uint8)
        (self._out if host is None else host).numpy()[: table.size] = table
        return self._at


class Places:
    """Where the frames that an owner's frame holds are, which lies in the host's memory."""

    def __init__(self, data: torch.Tensor, count: int) -> None:
        at = ENTRY * count
        sizes = data[:at].numpy().view("<i8") if data.numel() >= at else np.array([-1])
        ends = at + np.cumsum(sizes + -sizes % ENTRY)
        if (sizes < 0).any() or (sizes > data.numel()).any() or ends[-1:].sum() > data.numel():
            raise Corrupt(f"it does not hold the {count} frames that it should")
        if (last := int(ends[-1]) if count else at) != data.numel():
            raise Corrupt(f"{data.numel() - last} bytes follow the last frame")
        self.data, self.sizes = data, sizes
        self.starts: Column = ends - (sizes + -sizes % ENTRY)

    def of(self, number: int, there: torch.Tensor | None = None) -> torch.Tensor:
        """A frame; of `there`, if that is where all were brought."""
        start = int(self.starts[number])
        return (self.data if there is None else there)[start : start + int(self.sizes[number])]

    def rows(self, runs: Sequence[PartRun]) -> torch.Tensor | None:
        """Those of a group, as in `frames_of_group`."""
        return frames_of_group(self.data, self.starts, self.sizes, runs)


def frames_in(data: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The frames that an owner's frame holds."""
    places = Places(data, count)
    return [places.of(number) for number in range(count)]


def stage_of(hop: Hop, part: Part) -> str:
    """What Memory calls the residual of a sum."""
    return f"sum{hop.number}.{part.start}-{part.stop}"


def shift_of(hop: Hop, world: int) -> int:
    """How much coarser the grid of a sum is than that of a single rank's gradient (docs/design.md, near mode).

    The first rounding, and that of the whole sum, may go to a grid as coarse as the ranks in the sum allow. Sums on the
    way lie on the first one's grid: on that they are coded exactly.
    """
    return (world if hop.summed == world else hop.first).bit_length() - 1


def reach_shift_of(hop: Hop) -> int:
    """The same for reaches, with which values are compared: only sums not divided yet are larger than means."""
    return hop.summed.bit_length() - 1 if hop.wide else 0
