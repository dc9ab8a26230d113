"""GComp for whole messages on a GPU: the frames of all owners in one batch of launches, with one wait for their sizes.

Bodies are made on the device and copied from there straight into the host's pinned memory; the host writes the headers
between them. Frames that came are brought to the device as they are, their headers are read by the host, and sums are
formed without waiting. A rank's own values are not coded: a kernel rounds them to what decoding would give.

The same bytes and sums as those of exchange/on_host/gcomp.py. What the batched kernels cannot take (16-bit gradients,
paper mode) goes part by part, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ... import wire
from ...codecs import books
from ...codecs.gcomp import checked_floor, is_reach
from ...engines.cuda import pieces
from ...engines.layout import FIXED, NEAR, SEGMENT, blocks_offset, body_bound, segments_of
from ...engines.native import Pieces
from ...errors import Corrupt, Truncated
from ..coding import Coder, Frames, Values
from ..parts import Column, Table
from ..program import Hop
from . import streams
from .equal_parts import ENTRY
from .gcomp import GCompCoder

_SEEN = wire.HEADER_BYTES + ENTRY  # of each frame, by the host: its header, and the head of its body


class GCompDeviceCoder(GCompCoder):
    # -- the rank's own gradients -------------------------------------------------------------------------------

    def measure(self, values: Values) -> None:
        memory = self.message.memory
        self._begin(values)
        if self._engine is None or memory is None or not self._feeds_back:
            self._measure_part_by_part(values)
            return
        memory.forms |= dict.fromkeys(self.message.names, self.codec.error_memory)
        totals = memory.compensated_all(self.message.names, values.shaped, self.message.scale)
        for tensor, total in zip(values.shaped, totals):
            if total is not tensor:
                tensor.copy_(total)
        rooms = [memory.room(name, tensor) for name, tensor in zip(self.message.names, values.shaped)]
        torch._foreach_zero_(rooms)  # values that go out uncoded lose nothing
        self._lost = rooms

    def _engine_for(self, flat: Sequence[torch.Tensor]) -> ModuleType | None:
        floors = self.message.floors
        if any(x.dtype != torch.float32 for x in flat) or any(map(is_reach, floors)) or self.codec.mode == "paper":
            return None
        if self.codec.mode == "near":
            who = "gcomp in near mode"
            checked = [checked_floor(floor, x.numel(), x.device, who) for floor, x in zip(self._all_floors(), flat)]
            self._floors, self._grids = checked, pieces.floor_columns(checked)
        if self.codec.book == "shared":
            segments = max(segments_of(x.numel()) for x in flat)
            self._lengths = _lengths_on(flat[0].device, books.current(self._whole(0)).id, segments)
        return pieces

    # -- frames -------------------------------------------------------------------------------------------------

    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        engine, stream = self._engine, streams.current()
        if engine is None:
            return super().encode(table, owners, values, hop, out)
        each, kept = [], []
        for owner in owners:
            rooms = self._rooms_for_lost(table, owner, values, hop)
            lost = self._addresses_of_lost(table, owner, hop, rooms)
            each.append(self._pieces(engine, values, table, owner, hop, lost))
            kept.append((table.of_owner(owner), rooms))
        rows = _joined(each)
        if not len(rows):
            return [0] * len(owners)
        bounds = body_bounds(rows["n"])
        until = bounds.cumsum()
        bodies = torch.empty(int(until[-1]), dtype=torch.uint8, device=stream.device)
        stream.keep(bodies)
        sources: Column = bodies.data_ptr() + until - bounds
        job = self._job(hop)
        sizes = engine.encode(rows, sources, job, stream.device, stream.sleep)
        targets, written, first = np.zeros(len(rows), np.int64), list[int](), 0
        for of_owner, room in zip(each, out):
            some = slice(first, first + len(of_owner))
            first = some.stop
            targets[some], size = self._write_heads(of_owner["n"].astype(np.int64), sizes[some], room)
            written.append(size)
        engine.copy(sources, targets, sizes, stream.device)
        if self._feeds_back:
            engine.round_values(rows, job, stream.device, None, unit=self._unit(hop))
            for parts, rooms in kept:
                self._keep_sums_lost(parts, hop, rooms)
        return written

    def _write_heads(self, numels: Column, sizes: Column, room: torch.Tensor) -> tuple[Column, int]:
        """What the host writes of an owner's frame; where its bodies belong, and its bytes."""
        frames = sizes + wire.HEADER_BYTES
        padded = frames + -frames % ENTRY
        until = ENTRY * len(sizes) + padded.cumsum()
        if not len(sizes):
            return until, 0
        starts, host = until - padded, room.numpy()
        host[: ENTRY * len(sizes)] = frames.astype("<i8").view(np.uint8)
        host[starts[:, None] + np.arange(wire.HEADER_BYTES)] = wire.pack_headers(
            self.codec.wire_id, torch.float32, numels, sizes
        )
        short = until[padded > frames]  # bodies are of whole words
        host[short[:, None] - 4 + np.arange(4)] = 0
        bodies: Column = room.data_ptr() + starts + wire.HEADER_BYTES
        return bodies, int(until[-1])

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        self.decode_all(table, [owner], [frames], own, hop, out, by)

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
        """Enqueues it. What the host can see of damage is raised at once, the rest by `check`, or the next encode."""
        engine, stream = self._engine, streams.current()
        if engine is None:
            for owner, of_owner in zip(owners, frames):
                super().decode(table, owner, of_owner, own, hop, out, by)
            return
        filled = [(owner, terms) for owner, terms in zip(owners, frames) if table.of_owner(owner)]
        if not filled:
            return
        owners = [owner for owner, _ in filled]
        rows = _joined([self._pieces(engine, out, table, owner, hop) for owner in owners])
        terms, job = list(zip(*(terms for _, terms in filled))), self._job(hop)
        if hop.ring:  # where its own values are those that become the sum: they are read first
            terms.sort(key=lambda term: term[0] is not None)
        for place, term in enumerate(terms):
            if term[0] is None:
                assert own is not None
                self._add_own(engine, table, owners, own, hop, rows["values"].astype(np.int64), place > 0)
                continue
            numels, at, found = rows["n"].astype(np.int64), 0, list[_Bodies]()
            for owner, frame in zip(owners, term):
                count = len(table.of_owner(owner))
                assert frame is not None
                seen, there = self._bodies(frame, numels[at : at + count]), stream.there(frame)
                stream.keep(there)  # only its address is used
                found.append(seen._replace(places=seen.places + there.data_ptr()))
                at += count
            places, sizes, near = (np.concatenate(column) for column in zip(*found))
            engine.decode(places, sizes, near, rows, job.shift, place > 0, stream.device)
        if by > 1:
            into = [part for owner in owners for part in out.parts(table, owner)]
            torch._foreach_div_(into, stream.divisor(by))

    def check(self) -> None:
        if self._engine is not None:
            self._engine.check(streams.current().device)

    def _add_own(
        self, engine: ModuleType, table: Table, owners: Sequence[int], own: Values, hop: Hop, to: Column, add: bool
    ) -> None:
        """This rank's own values: as others decode them, or in a ring as they are."""
        device, each, kept = streams.current().device, list[Pieces](), []
        for owner in owners:
            noted = not hop.ring
            rooms = self._rooms_for_lost(table, owner, own, hop) if noted else []
            lost = self._addresses_of_lost(table, owner, hop, rooms) if noted else None
            each.append(self._pieces(engine, own, table, owner, hop, lost))
            kept.append((table.of_owner(owner), rooms))
        job = self._exact_job(hop) if hop.ring else self._job(hop)
        engine.round_values(_joined(each), job, device, to, add, self._unit(hop))
        for parts, rooms in kept:
            self._keep_sums_lost(parts, hop, rooms)

    def _bodies(self, frame: torch.Tensor, numels: Column) -> _Bodies:
        """Where the bodies are in an owner's frame, by what the host has of it."""
        data, count = frame.numpy(), len(numels)
        if len(data) < ENTRY * count:
            raise Truncated("a frame ends inside its table")
        sizes = data[: ENTRY * count].view("<i8").astype(np.int64)
        if (sizes < _SEEN).any() or (sizes > len(data)).any():
            raise Corrupt("a frame has a size that it cannot have")
        padded = sizes + -sizes % ENTRY
        until = ENTRY * count + padded.cumsum()
        starts = until - padded
        if int(until[-1]) != len(data):
            raise Corrupt(f"the table of a frame of {len(data)} bytes says {int(until[-1])}")
        bodies, book = sizes - wire.HEADER_BYTES, self._job(_ANY).book
        first, numel, body_bytes, head = data[starts[:, None] + np.arange(_SEEN)].view("<i8").T
        if (first != _first_word(self.codec.wire_id)).any() or (numel != numels).any() or (body_bytes != bodies).any():
            raise Corrupt("a frame of something else")
        coding = head ^ int.from_bytes(bytes([0, bool(book), 0, 0]) + book.to_bytes(4, "little"), "little", signed=True)
        near = coding == NEAR
        if (coding[~near] != FIXED).any() or (near.any() and self.codec.mode != "near"):
            raise Corrupt("a frame of another mode or code book")
        if (bodies < blocks_offset(numels, book)).any() or (bodies % 4).any():
            raise Truncated("a body ends inside its tables")
        return _Bodies(starts + wire.HEADER_BYTES, bodies, near)

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
        return Coder.recode(self, table, owner, frames, own, hop, by, after, out)


class _Bodies(NamedTuple):
    places: Column
    sizes: Column
    near: npt.NDArray[np.bool_]


_ANY = Hop(0, 1, True, False)


def _joined(each: Sequence[Pieces]) -> Pieces:
    """The rows of all; as bytes, since NumPy compares the fields of records before it puts these together."""
    return np.concatenate([rows.view(np.uint8) for rows in each] or [np.zeros(0, np.uint8)]).view(pieces.PIECE)


@lru_cache(maxsize=64)  # a book serves many steps, and to bring it there waits for the stream
def _lengths_on(device: torch.device, book: int, segments: int) -> torch.Tensor:
    """The code lengths of a shared book, for as many segments."""
    return books.lengths(book, segments * SEGMENT).to(device)


@cache
def _first_word(codec_id: int) -> int:
    """Of a header: all that comes before its numbers."""
    return int.from_bytes(wire.pack_header(codec_id, torch.float32, 0, 0, False)[:ENTRY], "little")


def body_bounds(numels: npt.NDArray[np.unsignedinteger]) -> Column:
    """Bytes that bodies can have at the most, in steps of 16."""
    found = body_bound(numels.astype(np.int64), torch.float32)
    return found + -found % 16
