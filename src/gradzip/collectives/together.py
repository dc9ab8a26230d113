"""GComp frames of all pieces of a chunk in few calls of an engine, during which other threads run.

The same bytes and the same sums that codec.encode and codec.decode give piece by piece. What a rank would decode of its
own is not decoded from frames: on the CPU it is rounded to what decoding would give, on a GPU it stays there.
"""

from __future__ import annotations

import dataclasses
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from .. import engines, wire
from ..codecs import Context, books
from ..codecs.gcomp import GComp, checked_floor
from ..engines.layout import SEGMENT, Floor, Job, body_bound, segments_of
from ..errors import CodecError, Corrupt
from .layout import Piece

ENTRY = 8  # bytes per size in the table before the frames, and what frames are padded to
_SIZE = struct.Struct("<Q")


@dataclass
class Leaf:
    """What is coded of a leaf: pieces that have values, and where frames and losses go."""

    pieces: Sequence[Piece]
    xs: Sequence[torch.Tensor]
    out: torch.Tensor | None  # bytes in the host's memory; None: nobody else will decode it
    lost: Sequence[torch.Tensor] | None = None  # where what is lost goes, divided by `unit`
    size: int = 0  # bytes written
    known: Sequence[torch.Tensor] | None = None  # to be handed to `add_up` in the place of the frames


class Together(ABC):
    """The gradients of one message, all of them float32."""

    def __init__(
        self, codec: GComp, contexts: Sequence[Context], engine: ModuleType, flat: Sequence[torch.Tensor]
    ) -> None:
        self._codec, self._engine, job = codec, engine, codec._job(contexts[0])
        self._jobs = {0: job}  # by shift
        self._floors: list[torch.Tensor | Floor | None] = [None] * len(flat)
        if codec.mode in ("near", "paper"):
            who = f"gcomp in {codec.mode} mode"
            self._floors = [checked_floor(c, x.numel(), x.device, who) for c, x in zip(contexts, flat)]

    @abstractmethod
    def encode(self, leaves: Sequence[Leaf], shift: int, unit: float) -> None:
        """Fills in what the leaves leave open."""

    @abstractmethod
    def add_up(
        self,
        pieces: Sequence[Piece],
        parts: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        shift: int,
        outs: Sequence[torch.Tensor],
        add: bool,
    ) -> int | None:
        """The sum of parts, which are frames or the `known` of a leaf; the number of a part that is damaged."""

    def _job_at(self, shift: int) -> Job:
        if shift not in self._jobs:
            self._jobs[shift] = dataclasses.replace(self._jobs[0], shift=shift)
        return self._jobs[shift]

    def _floors_of(self, pieces: Iterable[Piece]) -> list[torch.Tensor | Floor | None]:
        found = []
        for piece in pieces:
            floor = self._floors[piece.tensor]
            found.append(None if floor is None else floor[piece.start : piece.stop])
        return found


def coding_together(codec: object, flat: Sequence[torch.Tensor], contexts: Sequence[Context]) -> Together | None:
    """How these tensors are coded together; None where pieces have to be coded one by one."""
    if not isinstance(codec, GComp) or any(x.dtype != torch.float32 for x in flat):
        return None
    if any(context.lengths is not None for context in contexts):
        return None  # they are for whole tensors
    if codec.book == "shared" and len({books.current(context).id for context in contexts}) > 1:
        return None
    engine = engines.pick(flat[0].device)
    for kind, needed in ((Native, "sum_frames"), (OnGpu, "encode_many")):
        if hasattr(engine, needed):
            return kind(codec, contexts, engine, flat)
    return None


class Native(Together):
    def encode(self, leaves: Sequence[Leaf], shift: int, unit: float) -> None:
        job = self._job_at(shift)
        for leaf in leaves:
            floors, leaf.known = self._floors_of(leaf.pieces), leaf.xs
            if leaf.out is not None:
                book = self._book(leaf.pieces, job)
                args = (leaf.xs, job, self._codec.wire_id, leaf.out, floors, book, leaf.lost, unit)
                leaf.size = self._engine.encode_frames(*args)
            elif leaf.lost is not None:
                self._engine.note_lost(leaf.xs, job, floors, leaf.lost, unit)

    def add_up(
        self,
        pieces: Sequence[Piece],
        parts: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        shift: int,
        outs: Sequence[torch.Tensor],
        add: bool,
    ) -> int | None:
        job, floors = self._job_at(shift), self._floors_of(pieces)
        try:
            self._engine.sum_frames(parts, job, self._codec.wire_id, outs, floors, add, self._book(pieces, job))
        except self._engine.DamagedFrames as damage:
            return int(damage.part)
        return None

    def _book(self, pieces: Sequence[Piece], job: Job) -> torch.Tensor | None:
        if not job.book:
            return None
        return books.lengths(job.book, SEGMENT * sum(segments_of(piece.numel) for piece in pieces))


class OnGpu(Together):
    """Bodies are made on the GPU and copied to where the host sends them from, sizes and headers are the host's."""

    def encode(self, leaves: Sequence[Leaf], shift: int, unit: float) -> None:
        job = self._job_at(shift)
        for leaf in leaves:
            leaf.known = leaf.xs if self._codec.lossless else None
        to_code = [leaf for leaf in leaves if leaf.out is not None or leaf.known is None]
        pieces = [piece for leaf in to_code for piece in leaf.pieces]
        xs = [x for leaf in to_code for x in leaf.xs]
        if not pieces:
            return
        rooms = [-(-body_bound(x.numel(), x.dtype) // ENTRY) * ENTRY for x in xs]
        memory = torch.empty(sum(rooms), dtype=torch.uint8, device=xs[0].device)
        floors, given = self._floors_of(pieces), self._books(pieces, job.book, memory.device)
        outs = list(memory.split_with_sizes(rooms))
        sizes = self._engine.encode_many(xs, job, outs, floors, given)
        bodies = [out[:size] for out, size in zip(outs, sizes)]
        start = 0
        for leaf in to_code:
            own = slice(start, start + len(leaf.pieces))
            start = own.stop
            if leaf.out is not None:
                leaf.size = self._deliver(bodies[own], leaf.xs, leaf.out)
        if not self._codec.lossless:
            known = torch.empty(sum(x.numel() for x in xs), device=memory.device)
            decoded = list(known.split_with_sizes([x.numel() for x in xs]))
            self._engine.decode_many(bodies, decoded, floors, shift, False, given)
            self._note(to_code, decoded, unit)

    def _deliver(self, bodies: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], out: torch.Tensor) -> int:
        """Frames around bodies, in the host's memory. The copies end with the stream."""
        host, at = out.numpy().data, ENTRY * len(bodies)
        for number, (body, x) in enumerate(zip(bodies, xs)):
            header = wire.pack_header(self._codec.wire_id, x.dtype, x.numel(), body.numel(), False)
            size = len(header) + body.numel()
            _SIZE.pack_into(host, ENTRY * number, size)
            host[at : at + len(header)] = header
            out[at + len(header) : at + size].copy_(body, non_blocking=True)
            host[at + size : at + size + -size % ENTRY] = bytes(-size % ENTRY)
            at += size + -size % ENTRY
        return at

    def _note(self, leaves: Sequence[Leaf], decoded: Sequence[torch.Tensor], unit: float) -> None:
        """What others decode, and what they do not get to see."""
        start = 0
        for leaf in leaves:
            leaf.known = decoded[start : start + len(leaf.xs)]
            start += len(leaf.xs)
            for x, own, lost in zip(leaf.xs, leaf.known, leaf.lost or ()):
                torch.sub(x, own, out=lost)
                if unit != 1:
                    lost.div_(unit)

    def add_up(
        self,
        pieces: Sequence[Piece],
        parts: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        shift: int,
        outs: Sequence[torch.Tensor],
        add: bool,
    ) -> int | None:
        floors = self._floors_of(pieces)
        for number, part in enumerate(parts):
            adds = add or number > 0
            if not isinstance(part, torch.Tensor):
                for out, x in zip(outs, part):
                    out.add_(x) if adds else out.copy_(x)
                continue
            try:
                bodies, book = self._bodies(part, outs)
                given = self._books(pieces, book, outs[0].device)
                self._engine.decode_many(bodies, outs, floors, shift, adds, given)
            except CodecError:
                return number
        return None

    def _bodies(self, blob: torch.Tensor, outs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Finds the bodies while they are in the host's memory, then brings them all to the GPU; and their book."""
        at, found, used = ENTRY * len(outs), list[slice](), set[int]()
        if blob.numel() < at:
            raise Corrupt("no table")
        sizes = blob[:at].view(torch.int64).tolist()
        for size, out in zip(sizes, outs):
            if size < 0 or at + size > blob.numel():
                raise Corrupt("a frame that is not there")
            header = wire.read_header(blob[at : at + size])
            if (header.codec_id, header.dtype, header.numel) != (self._codec.wire_id, out.dtype, out.numel()):
                raise Corrupt("a frame of something else")
            body = slice(at + header.body_offset, at + size)
            used.add(int.from_bytes(bytes(blob[body][4:8].tolist()), "little"))
            found.append(body)
            at += size + -size % ENTRY
        if at != blob.numel() or len(used) > 1:
            raise Corrupt("frames of different books, or bytes behind the last")
        there = torch.empty(blob.numel(), dtype=torch.uint8, device=outs[0].device).copy_(blob, non_blocking=True)
        return [there[body] for body in found], used.pop()

    def _books(self, pieces: Sequence[Piece], book: int, device: torch.device) -> list[torch.Tensor] | None:
        return [books.lengths(book, piece.numel).to(device) for piece in pieces] if book else None
