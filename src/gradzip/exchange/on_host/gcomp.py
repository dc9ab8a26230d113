"""GComp for whole messages: all parts of a frame in one call of the native engine, during which other threads run.

The same bytes and sums that exchange/on_host/generic.py makes part by part, which codes what the engine cannot take:
16-bit gradients, paper mode, and engines without such calls. A rank's own values are not decoded from a frame: the
engine rounds them to what decoding would give.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ... import engines, wire
from ...codecs import Codec, books
from ...codecs.gcomp import GComp, checked_floor, is_reach
from ...engines.layout import Floor, Job
from ...errors import Corrupt
from ...feedback import Memory, is_exact
from ..coding import Coder, Frames, Message, Stretch, Values
from ..flattening import unflatten
from ..parts import Column, Part, Table
from ..program import Hop
from . import streams
from .generic import FrameWriter, GenericCoder, GenericOnHost, frames_in, shift_of, stage_of
from .residuals import LostOfSums, LostWithSums, Split

_POINTED = {"given": 1, "theta": 4, "second": 4}  # bytes of a value that floors point to


class GCompOnHost(GenericOnHost):
    def __init__(self, codec: GComp) -> None:
        super().__init__(codec)
        self._gcomp = codec

    def coder(self, message: Message) -> Coder:
        if streams.current().on_device:
            from .gcomp_from_device import GCompDeviceCoder

            return GCompDeviceCoder(message, self._gcomp)
        return GCompCoder(message, self._gcomp)


class _KnownFloors(NamedTuple):
    given: list[Floor | torch.Tensor | None]
    checked: Sequence[Floor | torch.Tensor]
    columns: dict[str, Column]

    def are(self, floors: Sequence[Floor | torch.Tensor | None]) -> bool:
        return len(floors) == len(self.given) and all(map(operator.is_, floors, self.given))


class GCompCoder(GenericCoder):
    codec: GComp

    def __init__(self, message: Message, codec: GComp) -> None:
        if message.lossless and codec.mode in ("near", "paper"):
            codec, message = codec.exact, dataclasses.replace(message, floors=())
        super().__init__(message, codec)
        self._exact = [False] * len(message.names)  # gradients that go lossless as long as they are this rank's own
        self._engine: ModuleType | None = None  # None: part by part
        self._floors: Sequence[Floor | torch.Tensor] = ()  # kept here, as the engine knows their addresses alone
        self._grids: dict[str, Column] = {}  # what they are, by tensor
        self._lengths: torch.Tensor | None = None  # of the shared book
        self._jobs: dict[int, Job] = {}  # by shift
        self._before: LostWithSums | None = None  # what the step before has left, where that is kept as one
        self._of_sums: dict[object, LostOfSums] = {}  # what is lost in this step

    def measure(self, values: Values) -> None:
        memory = self.message.memory
        self._begin(values)
        if self._engine is None or memory is None or not self._feeds_back:
            self._measure_part_by_part(values)
            return
        memory.forms |= dict.fromkeys(self.message.names, self.codec.error_memory)
        if self._keeps_together(values, memory):
            self._lost = self._split_for_lost(values, memory)
            return
        for name, tensor in zip(self.message.names, values.shaped):
            memory.compensate(name, tensor, self.message.scale)
        rooms = [memory.room(name, tensor) for name, tensor in zip(self.message.names, values.shaped)]
        torch._foreach_zero_(rooms)  # values that go out uncoded lose nothing
        self._lost = rooms

    def _split_for_lost(self, values: Values, memory: Memory) -> Split:
        """Room for what will be lost of all gradients; what was lost of them before is added to them."""
        kept, names, scale = memory.kept_by(values, self.message.names), self.message.names, self.message.scale
        if not isinstance(kept, LostWithSums):
            totals = memory.compensated_all(names, values.shaped, scale)
            for tensor, total in zip(values.shaped, totals):
                if total is not tensor:
                    tensor.copy_(total)
            return Split.zeros([tensor.numel() for tensor in values.tensors])
        assert values.joined is not None
        values.joined.add_(kept.lost.flat, alpha=scale)
        self._before, room = kept, kept.spare
        room = torch.zeros_like(kept.lost.flat) if room is None else room.zero_()  # what goes out uncoded loses nothing
        return kept.lost.shaped(room, ())

    def _begin(self, values: Values) -> None:
        """What is asked of the gradients before anything is added to them: that has bits of its own."""
        self._own, flat = values, list(values.tensors)
        if self.codec.mode == "near":
            self._exact = self._own_exact(flat)
        if self.message.count is not None:
            self.message.count(self._exponents(flat))
        self._engine = self._engine_for(flat)

    def _own_exact(self, flat: Sequence[torch.Tensor]) -> list[bool]:
        message, memory = self.message, self.message.memory
        if memory is not None:
            states = memory.states(message.names, self.codec.name)
            if (known := self.codec.known_own_exact(message.step, self._all_floors(), states)) is not None:
                return known
        contexts = [self._whole(number) for number in range(len(flat))]
        return self.codec.own_exact(flat, contexts, [GenericCoder._state(self, ctx.name) for ctx in contexts])

    def _all_floors(self) -> Sequence[Floor | torch.Tensor | None]:
        return self.message.floors or [None] * len(self.message.names)

    def _measure_part_by_part(self, values: Values) -> None:
        super().measure(values)

    def finish(self) -> None:
        memory = self.message.memory
        if self._engine is None or memory is None or not self._feeds_back:
            super().finish()
            return
        if isinstance(self._lost, Split):
            before, kept = self._before, self._own.kept
            if "shapes" not in kept:
                kept["shapes"] = [tensor.shape for tensor in self._own.shaped]
            of_sums = self._of_sums if before is None else {**before.of_sums, **self._of_sums}
            left = LostWithSums(self._lost.shaped(self._lost.flat, kept["shapes"]), of_sums, before)
            memory.keep_all(self._own, self.message.names, "", left)
            return
        for name, tensor, lost in zip(self.message.names, self._own.shaped, self._lost):
            memory.keep(name, unflatten(lost, tensor))  # the engine has divided it by the scale

    def _state(self, name: str) -> dict[str, Any]:
        return {"book": self.message.book} if self.codec.book == "shared" else super()._state(name)

    def _codec_for(self, part: Part, x: torch.Tensor, hop: Hop) -> Codec:
        return self.codec.exact if hop.own and self._exact[part.tensor] else self.codec

    def _exponents(self, flat: Sequence[torch.Tensor]) -> torch.Tensor:
        """(256,) counts of a sample of exponents."""
        counts = torch.zeros(256, dtype=torch.int64)
        for number, x in enumerate(flat):
            ctx, near = self._whole(number), self.codec.mode == "near"
            floor = ctx.floor if near and x.dtype == torch.float32 and not self._exact[number] else None
            mode = self.codec if floor is not None or not near else self.codec.exact
            counts += engines.pick(x.device).histogram(x, mode._job(ctx), floor).sum(0).cpu()
        return counts

    # -- all parts in one call ----------------------------------------------------------------------------------

    def _engine_for(self, flat: Sequence[torch.Tensor]) -> ModuleType | None:
        """The engine that takes a table of parts; None where parts have to be coded one by one."""
        engine = engines.pick("cpu")
        if not hasattr(engine, "encode_pieces") or self.message.dtype != torch.float32:
            return None
        if self.codec.mode in ("near", "paper") and not self._take_floors(engine, flat):
            return None
        if self.codec.book == "shared":
            self._lengths = self._shared_lengths(max(x.numel() for x in flat))
        return engine

    def _take_floors(self, engine: ModuleType, flat: Sequence[torch.Tensor]) -> bool:
        """Checks floors and finds out where they lie; once for those that are the same in the next step.

        False for reaches: they are compared with the very values that are encoded, which are not known before a sum is
        formed.
        """
        given, kept = self._all_floors(), self._own.kept
        found: _KnownFloors | None = kept.get("floors")
        if found is None or not found.are(given):
            if any(is_reach(floor) for floor in given):
                return False
            who = f"gcomp in {self.codec.mode} mode"
            checked = [checked_floor(floor, x.numel(), x.device, who) for floor, x in zip(given, flat)]
            found = _KnownFloors(list(given), checked, engine.floor_columns(checked))
            if all(isinstance(floor, Floor) for floor in given):  # tensors may have to be copied
                kept["floors"] = found
        self._floors, self._grids = found.checked, found.columns
        return True

    def _shared_lengths(self, longest: int) -> torch.Tensor:
        """Of the shared book, for as many segments as a tensor of that size has."""
        return books.lengths(books.current(self._whole(0)).id, longest)

    def _job(self, hop: Hop) -> Job:
        shift = shift_of(hop, self.message.world)
        if shift not in self._jobs:
            self._jobs[shift] = dataclasses.replace(self.codec._job(self._whole(0)), shift=shift)
        return self._jobs[shift]

    def _exact_job(self, hop: Hop) -> Job:
        return dataclasses.replace(self._job(hop), mode="lossless")

    def _pieces(
        self, engine: ModuleType, values: Values, table: Table, owner: int, hop: Hop, lost: Column | None = None
    ) -> npt.NDArray[np.void]:
        """The rows that tell the engine of an owner's parts."""
        columns = table.columns(owner)
        rows = np.zeros(len(columns.tensor), engine.PIECE)
        rows["values"], rows["n"] = values.addresses(table, owner), columns.length
        for name, of_tensor in self._grids.items():
            found = of_tensor[columns.tensor]
            rows[name] = np.where(found != 0, found + columns.start * _POINTED[name], 0) if name in _POINTED else found
        if self._lengths is not None:  # the same ones for every segment of every part
            rows["lengths"] = self._lengths.data_ptr()
        if hop.own:
            rows["exact"] = np.asarray(self._exact)[columns.tensor]
        if lost is not None:
            rows["lost"] = lost
        return rows

    def _encode(self, table: Table, owner: int, values: Values, hop: Hop, room: torch.Tensor) -> int:
        engine, parts = self._engine, table.of_owner(owner)
        if engine is None or not parts:
            return super()._encode(table, owner, values, hop, room)
        rooms = self._rooms_for_lost(table, owner, values, hop)
        addresses = self._addresses_of_lost(table, owner, hop, rooms, values)
        pieces = self._pieces(engine, values, table, owner, hop, addresses)
        size = engine.encode_pieces(pieces, torch.float32, self._job(hop), self.codec.wire_id, room, self._unit(hop))
        self._keep_sums_lost(parts, hop, rooms)
        return int(size)

    def _rooms_for_lost(self, table: Table, owner: int, values: Values, hop: Hop) -> list[torch.Tensor]:
        """Where what is lost of sums goes; what was lost of them before is added to them, in place."""
        memory, rooms = self.message.memory, list[torch.Tensor]()
        if memory is None or not self._feeds_back or hop.own or isinstance(self._lost, Split):
            return rooms
        for part, x in zip(table.of_owner(owner), values.parts(table, owner)):
            name, stage = self.message.names[part.tensor], stage_of(hop, part)
            memory.compensate(name, x, self._unit(hop), stage)
            rooms.append(memory.room(name, x, stage))
        return rooms

    def _addresses_of_lost(
        self, table: Table, owner: int, hop: Hop, rooms: Sequence[torch.Tensor], values: Values | None = None
    ) -> Column | None:
        """`values`: those of the parts, where what is lost of sums is kept as one, and added to them."""
        if not self._feeds_back:
            return None
        split = self._lost if isinstance(self._lost, Split) else None
        if not hop.own:
            if split is not None and values is not None:
                return self._addresses_of_sums(table, owner, hop, values)
            return np.array([room.data_ptr() for room in rooms], np.int64)
        columns = table.columns(owner)
        wholes = np.array([x.data_ptr() for x in self._lost], np.int64) if split is None else split.addresses
        found: Column = wholes[columns.tensor] + 4 * columns.start
        return found

    def _addresses_of_sums(self, table: Table, owner: int, hop: Hop, values: Values) -> Column:
        """Where what is lost of sums goes that is kept as one; what was lost before is added to them."""
        assert self.message.memory is not None
        key, unit, before, room = (table.digest, owner, hop.number), self._unit(hop), self._before, None
        parts = table.of_owner(owner)
        lost = None if before is None else before.of_sums.get(key)
        if lost is None:
            stages = [stage_of(hop, part) for part in parts]
            for part, stage, x in zip(parts, stages, values.parts(table, owner)):
                self.message.memory.compensate(self.message.names[part.tensor], x, unit, stage)
        else:
            assert before is not None
            stages, room, added = list(lost.stages), before.spares_of_sums.get(key), lost.flat
            if not is_exact(unit):
                added, unit = added * unit, 1.0
            if isinstance(values, Stretch):
                values.flat.add_(added, alpha=unit)
            else:
                of_parts = [added[part.place : part.place + part.numel] for part in parts]
                torch._foreach_add_(values.parts(table, owner), of_parts, alpha=unit)
        room = torch.zeros(table.length(owner)) if room is None else room
        self._of_sums[key] = LostOfSums(parts, stages, room)
        places: Column = room.data_ptr() + table.columns(owner).place * room.itemsize
        return places

    def _keep_sums_lost(self, parts: Sequence[Part], hop: Hop, rooms: Sequence[torch.Tensor]) -> None:
        for part, room in zip(parts, rooms):
            assert self.message.memory is not None
            self.message.memory.keep(self.message.names[part.tensor], room, stage_of(hop, part))

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        engine, parts = self._engine, table.of_owner(owner)
        if engine is None or not parts:
            super().decode(table, owner, frames, own, hop, out, by)
            return
        terms: list[torch.Tensor | Column] = [frame for frame in frames if frame is not None]
        add = hop.ring and len(terms) < len(frames)
        if own is not None and add:  # own values are added as they are
            torch._foreach_copy_(out.parts(table, owner), own.parts(table, owner))
        elif own is not None:
            place = frames.index(None)
            terms.insert(place, own.addresses(table, owner))
            self._note_own(engine, table, owner, own, hop)
        pieces, job = self._pieces(engine, out, table, owner, hop), self._job(hop)
        try:
            engine.sum_pieces(terms, pieces, torch.float32, job, self.codec.wire_id, add, by)
        except engine.DamagedFrames as damage:
            self._explain(table, owner, terms[damage.part], hop)

    def _note_own(self, engine: ModuleType, table: Table, owner: int, own: Values, hop: Hop) -> None:
        """What is lost of values that count as if they had been coded and decoded."""
        if not self._feeds_back:
            return
        rooms = self._rooms_for_lost(table, owner, own, hop)
        lost = self._addresses_of_lost(table, owner, hop, rooms, own)
        pieces = self._pieces(engine, own, table, owner, hop, lost)
        engine.note_lost_pieces(pieces, torch.float32, self._job(hop), self._unit(hop))
        self._keep_sums_lost(table.of_owner(owner), hop, rooms)

    def _explain(self, table: Table, owner: int, frame: torch.Tensor | Column, hop: Hop) -> None:
        """Raises what is wrong with a frame, by decoding it part by part."""
        if isinstance(frame, torch.Tensor):
            super().decode(table, owner, [frame], None, hop, Stretch(table, owner, torch.float32), 1)
        raise Corrupt("a frame that exchanges do not make")

    # -- rings --------------------------------------------------------------------------------------------------

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
        """In a ring, where nothing has to be known of what is lost, decodes, adds and encodes in one pass."""
        engine, parts = self._engine, table.of_owner(owner)
        if engine is not None and own is not None and hop.ring and after.ring and parts and not self._feeds_back:
            (frame, _), kind = frames, wire.body_offset(False)
            assert frame is not None
            found = frames_in(frame, len(parts))
            if all(part[kind : kind + 1].tolist() == [self._job(hop).coding] for part in found):
                writer = FrameWriter(out, len(parts))
                for part, incoming, local in zip(parts, found, own.parts(table, owner)):
                    writer.add(self._add(engine, part, incoming, local, hop, after, writer.room))
                return writer.end()
        return super().recode(table, owner, frames, own, hop, by, after, out)

    def _add(
        self,
        engine: ModuleType,
        part: Part,
        frame: torch.Tensor,
        local: torch.Tensor,
        hop: Hop,
        after: Hop,
        out: torch.Tensor,
    ) -> int:
        """Writes the frame of local + what is in `frame`; returns its bytes."""
        header, start, job = wire.read_header(frame), wire.body_offset(False), self._job(after)
        if header.numel != local.numel():
            raise Corrupt(f"the frame holds {header.numel} values instead of {local.numel()}")
        book = books.lengths(job.book, local.numel()) if job.book else None
        floor, body, shift = self._context(part, hop).floor, frame[header.body_offset :], self._job(hop).shift
        size = int(engine.decode_add_encode(body, local, job, out[start:], floor, shift, book, book))
        wire.write_header(out, self.codec.wire_id, local.dtype, local.numel(), size, False)
        return start + size
