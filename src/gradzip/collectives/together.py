"""GComp frames of all pieces of a chunk in few calls of an engine, during which other threads run.

The same bytes and the same sums that codec.encode and codec.decode give piece by piece. What a rank would decode of its
own is not decoded from frames: on the CPU it is rounded to what decoding would give, on a GPU it stays there.
"""

from __future__ import annotations

import dataclasses
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import ModuleType
from typing import NamedTuple

import torch

from .. import engines, wire
from ..codecs import Context, books
from ..codecs.gcomp import GComp, checked_floor, is_reach
from ..engines.layout import FIXED, SEGMENT, Floor, Job, body_bound, segments_of
from ..errors import CodecError, Corrupt
from .layout import Piece

ENTRY = 8  # bytes per size in the table before the frames, and what frames are padded to
FEW_PIECES = 3  # of a leaf: more of them are put together on the GPU, and copied to the host as one
_LONGEST_HEADER = wire.body_offset(True)


@dataclass
class Leaf:
    """What is coded of a leaf: pieces that have values, and where frames and losses go."""

    pieces: Sequence[Piece]
    xs: Sequence[torch.Tensor]
    out: torch.Tensor | None  # bytes, in the host's memory or where the values are; None: nobody else will decode it
    lost: Sequence[torch.Tensor] | None = None  # where what is lost goes, divided by `unit`
    size: int = 0  # bytes written
    comes_back: bool = True  # this rank will add it up as well
    known: Sequence[torch.Tensor] | Bodies | None = None  # to be handed to `add_up` in the place of the frames


@dataclass(frozen=True)
class Bodies:
    """A leaf on a GPU, coded: those that add it up decode it together with the others'."""

    data: Sequence[torch.Tensor]
    book: int
    plain: Sequence[bool]  # of each body: whether it is of the coding that needs no floors
    decoded: Callable[[], list[torch.Tensor]] | None = None  # if it is this rank's own


class Frames(NamedTuple):
    """Frames on a GPU, and their first bytes as the host has seen them."""

    data: torch.Tensor
    head: memoryview


Part = torch.Tensor | Frames | Bodies | Sequence[torch.Tensor]


class Sum(NamedTuple):
    """A leaf that is added up from contributions; each of these is frames, or the `known` of a leaf."""

    pieces: Sequence[Piece]
    parts: Sequence[Part]
    outs: Sequence[torch.Tensor]


class Damage(NamedTuple):
    leaf: int  # its number among the sums
    part: int


class Together(ABC):
    """The gradients of one message, all of them float32."""

    def __init__(
        self,
        codec: GComp,
        contexts: Sequence[Context],
        engine: ModuleType,
        flat: Sequence[torch.Tensor],
        exact: Sequence[bool],
    ) -> None:
        """`exact` are those gradients that go lossless as long as they are this rank's own."""
        self._codec, self._engine, job = codec, engine, codec._job(contexts[0])
        self._own_exact = exact
        self._jobs = {0: job}  # by shift
        self._floors: list[torch.Tensor | Floor | None] = [None] * len(flat)
        if codec.mode in ("near", "paper"):
            who = f"gcomp in {codec.mode} mode"
            self._floors = [checked_floor(c, x.numel(), x.device, who) for c, x in zip(contexts, flat)]

    @abstractmethod
    def encode(self, leaves: Sequence[Leaf], shift: int, unit: float, own: bool) -> None:
        """Fills in what the leaves leave open; `own`: they are this rank's own gradients."""

    @abstractmethod
    def add_up(self, sums: Sequence[Sum], shift: int, add: bool, own: bool) -> Damage | None:
        """Forms sums, of the same number of parts each, of what was encoded like that; says what is damaged."""

    def _job_at(self, shift: int) -> Job:
        if shift not in self._jobs:
            self._jobs[shift] = dataclasses.replace(self._jobs[0], shift=shift)
        return self._jobs[shift]

    def _floors_of(
        self, pieces: Iterable[Piece], without: Iterable[bool] = repeat(False)
    ) -> list[torch.Tensor | Floor | None]:
        found = []
        for piece, leave_out in zip(pieces, without):
            floor = None if leave_out else self._floors[piece.tensor]
            found.append(None if floor is None else floor[piece.start : piece.stop])
        return found

    def _exact(self, pieces: Iterable[Piece], own: bool) -> list[bool]:
        """Which pieces are coded lossless, whatever the codec's mode."""
        return [own and self._own_exact[piece.tensor] for piece in pieces]


def coding_together(
    codec: object, flat: Sequence[torch.Tensor], contexts: Sequence[Context], exact: Sequence[bool]
) -> Together | None:
    """How these tensors are coded together; None where pieces have to be coded one by one."""
    if not isinstance(codec, GComp) or any(x.dtype != torch.float32 for x in flat):
        return None
    if any(context.lengths is not None for context in contexts):
        return None  # they are for whole tensors
    if any(is_reach(context.floor) for context in contexts):
        return None  # compared with the very values that are encoded, which are not known before a sum is formed
    if codec.book == "shared" and len({books.current(context).id for context in contexts}) > 1:
        return None
    engine = engines.pick(flat[0].device)
    for kind, needed in ((Native, "sum_frames"), (OnGpu, "encode_many")):
        if hasattr(engine, needed):
            return kind(codec, contexts, engine, flat, exact)
    return None


class Native(Together):
    def encode(self, leaves: Sequence[Leaf], shift: int, unit: float, own: bool) -> None:
        job = self._job_at(shift)
        for leaf in leaves:
            floors, exact, leaf.known = self._floors_of(leaf.pieces), self._exact(leaf.pieces, own), leaf.xs
            if leaf.out is not None:
                book = self._book(leaf.pieces, job)
                args = (leaf.xs, job, self._codec.wire_id, leaf.out, floors, book, leaf.lost, unit, exact)
                leaf.size = self._engine.encode_frames(*args)
            elif leaf.lost is not None:
                self._engine.note_lost(leaf.xs, job, floors, leaf.lost, unit, exact)

    def add_up(self, sums: Sequence[Sum], shift: int, add: bool, own: bool) -> Damage | None:
        job = self._job_at(shift)
        for number, (pieces, parts, outs) in enumerate(sums):
            floors, book, exact = self._floors_of(pieces), self._book(pieces, job), self._exact(pieces, own)
            try:
                self._engine.sum_frames(parts, job, self._codec.wire_id, outs, floors, add, book, exact)
            except self._engine.DamagedFrames as damage:
                return Damage(number, int(damage.part))
        return None

    def _book(self, pieces: Sequence[Piece], job: Job) -> torch.Tensor | None:
        if not job.book:
            return None
        return books.lengths(job.book, SEGMENT * sum(segments_of(piece.numel) for piece in pieces))


class OnGpu(Together):
    """Bodies are made on the GPU and copied to where they are sent from, sizes and headers are the host's."""

    def encode(self, leaves: Sequence[Leaf], shift: int, unit: float, own: bool) -> None:
        job = self._job_at(shift)
        for leaf in leaves:
            leaf.known = leaf.xs if self._codec.lossless or all(self._exact(leaf.pieces, own)) else None
            if leaf.known is not None and leaf.lost is not None:
                torch._foreach_zero_(list(leaf.lost))
        to_code = [leaf for leaf in leaves if leaf.out is not None or leaf.known is None]
        to_code.sort(key=self._is_decoded)
        pieces = [piece for leaf in to_code for piece in leaf.pieces]
        xs = [x for leaf in to_code for x in leaf.xs]
        if not pieces:
            return
        outs = [out for leaf in to_code for out in _rooms(leaf)]
        exact = self._exact(pieces, own)
        floors, given = self._floors_of(pieces, exact), self._books(pieces, job.book, xs[0].device)
        bodies = self._encoded(xs, exact, job, outs, floors, given)
        start, there = 0, list[tuple[Leaf, list[torch.Tensor]]]()
        for leaf in to_code:
            part = slice(start, start + len(leaf.pieces))
            start = part.stop
            if leaf.comes_back and leaf.known is None and leaf.lost is None:
                leaf.known = self._own(leaf, bodies[part], exact[part], job)
            if leaf.out is not None and leaf.out.device.type == "cpu" and len(leaf.pieces) <= FEW_PIECES:
                leaf.size = self._deliver(bodies[part], leaf.xs, leaf.out)
            elif leaf.out is not None:
                there.append((leaf, bodies[part]))
        self._deliver_there(there)
        decoded = [leaf for leaf in to_code if self._is_decoded(leaf)]  # the last of them
        if decoded:
            last = slice(len(xs) - sum(len(leaf.xs) for leaf in decoded), None)
            counts = [x.numel() for x in xs[last]]
            values = list(torch.empty(sum(counts), device=xs[0].device).split_with_sizes(counts))
            lengths = None if given is None else given[last]
            self._engine.decode_many(bodies[last], values, floors[last], shift, False, lengths)
            self._note(decoded, values, unit)

    def _encoded(
        self,
        xs: Sequence[torch.Tensor],
        exact: Sequence[bool],
        job: Job,
        outs: Sequence[torch.Tensor],
        floors: Sequence[torch.Tensor | Floor | None],
        given: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Bodies of all values, those that are exact by themselves: other kernels make them."""
        bodies = list(outs)
        for lossless in sorted(set(exact)):
            these = [i for i, is_exact in enumerate(exact) if is_exact == lossless]
            used = dataclasses.replace(job, mode="lossless") if lossless else job
            lengths = given and [given[i] for i in these]
            sizes = self._engine.encode_many(
                [xs[i] for i in these], used, [outs[i] for i in these], [floors[i] for i in these], lengths
            )
            for i, size in zip(these, sizes):
                bodies[i] = outs[i][:size]
        return bodies

    def _is_decoded(self, leaf: Leaf) -> bool:
        """Whether this rank has to know what others will decode before they do."""
        return leaf.known is None and leaf.lost is not None

    def _own(self, leaf: Leaf, bodies: Sequence[torch.Tensor], exact: Sequence[bool], job: Job) -> Bodies:
        def decoded() -> list[torch.Tensor]:
            values = [torch.empty_like(x) for x in leaf.xs]
            given = self._books(leaf.pieces, job.book, values[0].device)
            self._engine.decode_many(bodies, values, self._floors_of(leaf.pieces, exact), job.shift, False, given)
            return values

        return Bodies(bodies, job.book, exact, decoded)

    def _deliver(self, bodies: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], out: torch.Tensor) -> int:
        """Frames around bodies, in the host's memory. The copies end with the stream."""
        host, at, sizes = out.numpy().data, ENTRY * len(bodies), []
        for body, x in zip(bodies, xs):
            count = body.numel()
            header = wire.pack_header(self._codec.wire_id, x.dtype, x.numel(), count, False)
            start, size = at + len(header), len(header) + count
            padding = -size % ENTRY
            host[at:start] = header
            out[start : start + count].copy_(body, non_blocking=True)
            host[start + count : start + count + padding] = bytes(padding)
            at += size + padding
            sizes.append(size)
        struct.pack_into(f"<{len(sizes)}Q", host, 0, *sizes)
        return at

    def _deliver_there(self, leaves: Sequence[tuple[Leaf, Sequence[torch.Tensor]]]) -> None:
        """The same frames on the GPU: what the host adds to the bodies of all leaves goes there in one copy.

        From there, those that are wanted in the host's memory go back as they are, in one copy for each leaf.
        """
        added, gaps, places, bodies = bytearray(), list[int](), list[torch.Tensor](), list[torch.Tensor]()
        into, back = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        for leaf, found in leaves:
            assert leaf.out is not None
            headers = [
                wire.pack_header(self._codec.wire_id, x.dtype, x.numel(), body.numel(), False)
                for body, x in zip(found, leaf.xs)
            ]
            sizes = [len(header) + body.numel() for header, body in zip(headers, found)]
            leaf.size = ENTRY * len(sizes) + sum(size + -size % ENTRY for size in sizes)
            out = leaf.out[: leaf.size]
            if leaf.out.device.type == "cpu":
                out = torch.empty(leaf.size, dtype=torch.uint8, device=found[0].device)
                back.append((leaf.out[: leaf.size], out))
            gap, at = struct.pack(f"<{len(sizes)}Q", *sizes), 0
            for header, body, size in zip(headers, found, sizes):
                gap += header
                places.append(out[at : at + len(gap)])
                into.append(out[at + len(gap) : at + len(gap) + body.numel()])
                at += len(gap) + body.numel()
                added += gap
                gaps.append(len(gap))
                gap = bytes(-size % ENTRY)
            if gap:
                places.append(out[at : at + len(gap)])
                added += gap
                gaps.append(len(gap))
            bodies += found
        if places:
            sent = torch.frombuffer(added, dtype=torch.uint8).to(places[0].device)
            torch._foreach_copy_(places + into, [*sent.split_with_sizes(gaps), *bodies])
        for host, out in back:
            host.copy_(out, non_blocking=True)

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

    def add_up(self, sums: Sequence[Sum], shift: int, add: bool, own: bool) -> Damage | None:
        if not add and self._at_once(sums, shift):
            return None
        for number, (pieces, parts, outs) in enumerate(sums):
            for place, part in enumerate(parts):
                adds = add or place > 0
                if not isinstance(part, torch.Tensor | Frames | Bodies):
                    for out, x in zip(outs, part):
                        out.add_(x) if adds else out.copy_(x)
                    continue
                try:
                    found = self._bodies(part, outs)
                    floors = self._floors_of(pieces, found.plain)
                    given = self._books(pieces, found.book, outs[0].device)
                    self._engine.decode_many(found.data, outs, floors, shift, adds, given)
                except CodecError:
                    return Damage(number, place)
        return None

    def _at_once(self, sums: Sequence[Sum], shift: int) -> bool:
        """All sums with one wait for the GPU; False if something is wrong with them."""
        terms: list[list[torch.Tensor | None]] = [[] for _ in sums[0].parts]  # bodies of all pieces of all leaves
        plain: list[list[torch.Tensor | None]] = [[] for _ in sums[0].parts]
        floors: list[list[torch.Tensor | Floor | None]] = [[] for _ in sums[0].parts]
        used = set[int]()
        try:
            for pieces, parts, outs in sums:
                for bodies_of_all, plain_of_all, floors_of_all, part in zip(terms, plain, floors, parts):
                    if isinstance(part, torch.Tensor | Frames | Bodies):
                        found = self._bodies(part, outs)
                        used.add(found.book)
                        bodies_of_all += found.data
                        plain_of_all += [None] * len(outs)
                        floors_of_all += self._floors_of(pieces, found.plain)
                    else:
                        bodies_of_all += [None] * len(outs)
                        plain_of_all += part
                        floors_of_all += [None] * len(outs)
            pieces = [piece for leaf in sums for piece in leaf.pieces]
            outs = [out for leaf in sums for out in leaf.outs]
            if len(used) > 1:
                return False
            given = self._books(pieces, used.pop(), outs[0].device) if used else None
            return bool(self._engine.sum_many(terms, plain, outs, floors, shift, given))
        except CodecError:
            return False

    def _bodies(self, blob: torch.Tensor | Frames | Bodies, outs: Sequence[torch.Tensor]) -> Bodies:
        """Finds the bodies by what the host has of the frames, then brings them all to the GPU."""
        if isinstance(blob, Bodies):
            return blob
        data, host = blob if isinstance(blob, Frames) else (blob, blob.numpy().data)
        at, end, found, used = ENTRY * len(outs), data.numel(), list[tuple[int, int]](), set[bytes]()
        plain = list[bool]()
        if end < at:
            raise Corrupt("no table")
        if at > len(host):
            host = data[:at].cpu().numpy().data
        sizes = struct.unpack_from(f"<{len(outs)}Q", host)
        for size, out, head in zip(sizes, outs, _heads(data, host, at, sizes)):
            header = wire.parse_header(head[:_LONGEST_HEADER], size)
            if (header.codec_id, header.dtype, header.numel) != (self._codec.wire_id, out.dtype, out.numel()):
                raise Corrupt("a frame of something else")
            start = header.body_offset
            used.add(bytes(head[start + 4 : start + 8]))
            plain.append(bytes(head[start : start + 1]) == bytes([FIXED]))
            found.append((at + start, at + size))
            at += size + -size % ENTRY
        if at != end or len(used) > 1:
            raise Corrupt("frames of different books, or bytes behind the last")
        there = data
        if not isinstance(blob, Frames):
            there = torch.empty(end, dtype=torch.uint8, device=outs[0].device).copy_(data, non_blocking=True)
        return Bodies([there[start:stop] for start, stop in found], int.from_bytes(used.pop(), "little"), plain)

    def _books(self, pieces: Sequence[Piece], book: int, device: torch.device) -> list[torch.Tensor] | None:
        return [books.lengths(book, piece.numel).to(device) for piece in pieces] if book else None


def _rooms(leaf: Leaf) -> tuple[torch.Tensor, ...]:
    """Memory for the bodies of a leaf; that of each leaf by itself, as those of this rank's own live longer."""
    sizes = [-(-body_bound(x.numel(), x.dtype) // ENTRY) * ENTRY for x in leaf.xs]
    return torch.empty(sum(sizes), dtype=torch.uint8, device=leaf.xs[0].device).split_with_sizes(sizes)


def _heads(data: torch.Tensor, host: memoryview, at: int, sizes: Sequence[int]) -> list[memoryview]:
    """The first bytes of each frame; `at` is where the first one lies. What the host has not seen comes in one copy."""
    starts, length = list[int](), _LONGEST_HEADER + ENTRY
    for size in sizes:
        if at + size > data.numel():
            raise Corrupt("a frame that is not there")
        starts.append(at)
        at += size + -size % ENTRY
    if not starts or min(starts[-1] + length, data.numel()) <= len(host):
        return [host[start : start + length] for start in starts]
    cut = [data[start : start + length] for start in starts]
    fetched = torch.cat(cut).cpu().split_with_sizes([part.numel() for part in cut])
    return [part.numpy().data for part in fetched]
