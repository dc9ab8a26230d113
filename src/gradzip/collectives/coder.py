"""Codes stretches of a message's tensors: floors, error feedback and frames.

A blob holds one frame for every piece that has values: a table of their sizes, then the frames, each padded to 8 bytes.
What an encode loses is kept by the rank that performs it: that of its own gradient under the parameter's name, that of
sums on the way under the number of the encode and the place of the piece.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from .. import engines, wire
from ..codecs import Codec, Context, books
from ..codecs.base import Sparse, wide
from ..codecs.gcomp import GComp, is_reach
from ..errors import CodecError, Corrupt, PeerError
from ..exchange.finiteness import all_finite
from ..exchange.flattening import flatten, unflatten
from ..exchange.peers.buffers import Buffers
from ..feedback import Memory
from .blobs import HEAD_ROOM, Blob, Writer, content_of, places, values_of
from .layout import Layout, Piece
from .sent import Sent, take_out
from .terms import How
from .together import ENTRY, Damage, Leaf, OnGpu, Sum, Together, coding_together


def cuttable(codec: Codec) -> bool:
    """Whether each value is coded by itself, so that it does not matter where a tensor is cut."""
    return codec.cuttable


@dataclass
class TensorCoder:
    """The tensors of one message, all of one type; each is replaced by its mean. One thread at a time per piece."""

    codec: Codec
    tensors: list[torch.Tensor]
    contexts: list[Context]  # one for each tensor
    memory: Memory
    buffers: Buffers
    scale: float = 1.0  # the loss scale that the gradients carry
    world: int = 1
    taken: list[torch.Tensor] = field(default_factory=list)  # buffers to hand back when all is done
    carried: bool = False  # frames made on a GPU are sent from there

    def __post_init__(self) -> None:
        self.exact_grid = any(ctx.floor is not None for ctx in self.contexts) and _near(self.codec)
        self.dtype = self.tensors[0].dtype
        self.home = self.tensors[0].device
        self._feeds_back = self.codec.error_memory is not None
        self._flat = [flatten(t, t) for t in self.tensors]
        self._inputs = list(self._flat)
        self._lost: list[torch.Tensor] = []  # of each tensor; where pieces are coded together it is without scale
        self._exact = [False] * len(self.tensors)  # gradients that go lossless as long as they are this rank's own
        self._together: Together | None = None
        self._bounds: dict[int, int] = {}  # by the number of values

    def for_chunk(self, taken: list[torch.Tensor], carried: bool = False) -> TensorCoder:
        """The same, with the buffers that it takes put on a list of their own."""
        other = copy.copy(self)
        other.taken, other.carried = taken, carried
        return other

    @property
    def needs_floors(self) -> bool:
        return any(ctx.floor is not None for ctx in self.contexts)

    def prepare(self, lossless: bool = False, counts: torch.Tensor | None = None) -> None:
        """Adds to the gradients what was lost of them before. Before any piece is coded, on the coding thread.

        A sample of their symbols is added to (256,) counts.
        """
        if lossless and isinstance(self.codec, GComp):
            self.codec = self.codec.exact
            self.contexts = [dataclasses.replace(ctx, floor=None) for ctx in self.contexts]
            self.exact_grid = self._feeds_back = False
        elif isinstance(self.codec, GComp):  # before anything is added: that has bits of its own
            states = [self.memory.state(ctx.name, self.codec.name) for ctx in self.contexts]
            self._exact = self.codec.own_exact(self._flat, self.contexts, states)
        if counts is not None:
            self._count_exponents(counts)
        self._together = coding_together(self.codec, self._flat, self.contexts, self._exact)
        for number, (ctx, tensor) in enumerate(zip(self.contexts, self.tensors)):
            if self._together is not None:
                self.memory.compensate(ctx.name, tensor, self.scale)
                self._inputs[number] = self._flat[number] = flatten(tensor, tensor)
                if self._feeds_back:
                    self._lost.append(self.memory.room(ctx.name, tensor))
                continue
            x = flatten(self.memory.compensated(ctx.name, tensor, self.scale), tensor)
            self._inputs[number] = x.to(tensor.dtype)
            if self._feeds_back:
                self._lost.append(wide(x).clone())

    def _count_exponents(self, counts: torch.Tensor) -> None:
        assert isinstance(self.codec, GComp)
        for x, ctx, exact in zip(self._flat, self.contexts, self._exact):
            engine = engines.pick(x.device)
            floor = ctx.floor if _near(self.codec) and x.dtype == torch.float32 and not exact else None
            mode = self.codec if floor is not None or not _near(self.codec) else self.codec.exact
            counts += engine.histogram(x.contiguous(), mode._job(ctx), floor).sum(0).cpu()

    def finish(self) -> None:
        """Notes what the gradients' own encodes lost. After all pieces."""
        for number, (ctx, tensor) in enumerate(zip(self.contexts, self.tensors)):
            lost = unflatten(self._lost[number], tensor) if self._feeds_back else None
            if self._together is not None:
                self.memory.keep(ctx.name, lost)
            else:
                self.memory.lost(ctx.name, lost, self.scale)

    def finite(self, layout: Layout) -> bool:
        """Whether the means are; they are the same bits on all ranks, and not finite if one rank's values were not."""
        return all_finite([self._flat[p.tensor][p.start : p.stop] for p in layout])

    # -- for the executor ---------------------------------------------------------------------------------------

    def load(self, layout: Layout) -> list[torch.Tensor]:
        return [self._inputs[p.tensor][p.start : p.stop] for p in layout]

    def store(self, layout: Layout, mean: torch.Tensor) -> None:
        flats = [self._flat[p.tensor][p.start : p.stop] for p in layout]
        torch._foreach_copy_(flats, list(mean.split_with_sizes([p.numel for p in layout])))
        for piece in layout:
            flat, tensor = self._flat[piece.tensor], self.tensors[piece.tensor]
            if flat.data_ptr() != tensor.data_ptr() and piece.stop == flat.numel():
                tensor.copy_(unflatten(flat, tensor))  # pieces of a tensor are stored in order

    def targets(self, layout: Layout) -> list[torch.Tensor] | None:
        flats = [self._flat[p.tensor] for p in layout]
        if any(f.data_ptr() != self.tensors[p.tensor].data_ptr() for f, p in zip(flats, layout)):
            return None  # `flatten` made a copy
        return [flat[p.start : p.stop] for flat, p in zip(flats, layout)]

    def bound(self, leaf: Layout) -> int:
        return sum(self._bound_of(piece.numel) for piece in _filled(leaf))

    def _bound_of(self, numel: int) -> int:
        known = self._bounds.get(numel)
        if known is None:
            dtype = torch.promote_types(self.dtype, torch.float32)
            known = self._bounds[numel] = self.codec.densest.bound(numel, dtype) + 2 * ENTRY
        return known

    def encode(
        self, leaves: Sequence[Layout], values: Sequence[Sequence[torch.Tensor]], how: How, stays: int | None = None
    ) -> list[Blob]:
        if self._together is not None and self._device(how) == self.home:
            return self._encode_together(self._together, leaves, values, how, stays)
        return [self._encode_pieces(leaf, values[i], how, i == stays) for i, leaf in enumerate(leaves)]

    def _encode_pieces(self, leaf: Layout, values: Sequence[torch.Tensor], how: How, stays: bool) -> Blob:
        known: Sequence[torch.Tensor] | Sent | None = (
            values if all(self._codec_of(piece, how).lossless for piece in leaf) else None
        )
        if stays and known is not None:
            if how.own:
                self.goes_plainly(leaf)
            return Blob(torch.empty(0, dtype=torch.uint8), values=known)
        device = self._device(how)
        writer = self._writer(leaf, device)
        sent = [self._encode_piece(piece, x.to(device), how, writer) for piece, x in zip(leaf, values) if piece.numel]
        if sent and all(sent):
            known = Sent([frame for frame in sent if frame is not None])
        return writer.blob()._replace(values=known)

    def decode(
        self,
        leaves: Sequence[Layout],
        contributions: Sequence[Sequence[Blob]],
        how: How,
        outs: Sequence[Sequence[torch.Tensor]],
        add: bool,
    ) -> None:
        if self._together is not None and self._device(how) == self.home:
            self._decode_together(self._together, leaves, contributions, how, outs, add)
            return
        for number, contribution in enumerate(contributions):
            adds = add or number > 0
            for leaf, blob, into in zip(leaves, contribution, outs):
                if blob.values is None or (isinstance(blob.values, Sent) and not blob.values.put(into, adds)):
                    self._decode_pieces(leaf, blob, how, into, adds)
                for out, x in zip(into, values_of(blob)):
                    out.add_(x.to(out.device)) if adds else out.copy_(x)

    def _decode_pieces(self, leaf: Layout, blob: Blob, how: How, outs: Sequence[torch.Tensor], add: bool) -> None:
        place = self._device(how)
        data = blob.data if blob.data.device == place else blob.data.to(place)
        name = self.contexts[leaf[0].tensor].name
        try:
            for piece, at, out in zip(_filled(leaf), places(blob.data, len(_filled(leaf))), _filled_values(outs)):
                name = self.contexts[piece.tensor].name
                self._decode_piece(piece, data[at], blob.data[at], how, out, add)
        except CodecError as error:
            if blob.source is None or blob.source == self.contexts[0].rank:
                raise type(error)(f"{name!r}: {error}") from error
            raise PeerError(f"rank {blob.source} sent {name!r} damaged: {type(error).__name__}: {error}") from error

    def lands(self, how: How) -> bool:
        return isinstance(self._together, OnGpu) and self._device(how) == self.home

    def hop(self, leaf: Layout, blob: Blob, values: Sequence[torch.Tensor], how: How) -> Blob:
        try:
            fused = self._hop_at_once(leaf, blob, values, how)
        except CodecError:
            self._decode_pieces(leaf, blob, how, [torch.empty_like(x) for x in values], False)  # says who sent it
            raise
        if fused is not None:
            return fused
        total = [wide(x).clone() for x in values]
        self.decode([leaf], [[blob]], how, [total], add=True)
        return self.encode([leaf], [total], how)[0]

    def _hop_at_once(self, leaf: Layout, blob: Blob, values: Sequence[torch.Tensor], how: How) -> Blob | None:
        """None where that cannot be, or where frames came that are lossless, as a rank's own may be."""
        if not isinstance(self.codec, GComp) or not self._fuses(values[0], how):
            return None
        frames = [blob.data[at] for at in places(blob.data, len(_filled(leaf)))]
        kind, coding = wire.body_offset(False), self.codec._job(self.contexts[0]).coding
        if any(frame[kind : kind + 1].tolist() != [coding] for frame in frames):
            return None
        writer = self._writer(leaf, values[0].device)
        for piece, frame, local in zip(_filled(leaf), frames, _filled_values(values)):
            writer.write(partial(_fused, self.codec, frame, local, self._context(piece, how, local.device)))
        return writer.blob()

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for that many values, until the chunk is through."""
        if self.home.type != "cpu":
            return torch.empty(count, dtype=dtype, device=self.home)
        buffer = self.buffers.take(count * dtype.itemsize)
        self.taken.append(buffer)
        return buffer[: count * dtype.itemsize].view(dtype)

    def goes_plainly(self, leaf: Layout) -> None:
        if self._together is not None:
            self._nothing_lost(leaf if self._feeds_back else ())
            return
        for piece in leaf if self._feeds_back else ():  # what was lost by rounding to 16 bits remains
            lost = self._lost[piece.tensor][piece.start : piece.stop]
            lost.sub_(wide(self._inputs[piece.tensor][piece.start : piece.stop]))

    def note_sent(self, layout: Layout, sent: torch.Tensor, factor: float) -> None:
        """Takes note that `sent` times `factor` is what goes out of this rank's values."""
        offset = 0
        for piece in layout if self._feeds_back else ():
            part = wide(sent[offset : offset + piece.numel])
            self._lost[piece.tensor][piece.start : piece.stop].sub_(part, alpha=factor)
            offset += piece.numel

    # -- all pieces in one call -----------------------------------------------------------------------------------

    def _encode_together(
        self,
        together: Together,
        leaves: Sequence[Layout],
        values: Sequence[Sequence[torch.Tensor]],
        how: How,
        stays: int | None,
    ) -> list[Blob]:
        own = how.own
        unit = self.scale if own or not how.mean else self.scale / self.world
        place = self.home if self.carried else torch.device("cpu")
        coded, rooms = [], []
        for number, (layout, parts) in enumerate(zip(leaves, values)):
            xs = [x.contiguous() for x in _filled_values(parts)]
            room = self._room(layout, place) if number != stays else torch.empty(0, dtype=torch.uint8)
            leaf = Leaf(_filled(layout), xs, room[HEAD_ROOM:] if number != stays and xs else None)
            leaf.comes_back = stays is None or number == stays
            if self._feeds_back:
                leaf.lost = self._room_for_lost(leaf, how, unit)
            coded.append(leaf)
            rooms.append(room)
        together.encode([leaf for leaf in coded if leaf.pieces], how.shift, unit, own)
        for leaf in coded if self._feeds_back and not own else ():
            for piece, residual in zip(leaf.pieces, leaf.lost or ()):
                self.memory.keep(self.contexts[piece.tensor].name, residual, _stage_of(how, piece))
        return [
            Blob(room[HEAD_ROOM : HEAD_ROOM + leaf.size], None, room[: HEAD_ROOM + leaf.size], leaf.known)
            for leaf, room in zip(coded, rooms)
        ]

    def _decode_together(
        self,
        together: Together,
        leaves: Sequence[Layout],
        contributions: Sequence[Sequence[Blob]],
        how: How,
        outs: Sequence[Sequence[torch.Tensor]],
        add: bool,
    ) -> None:
        sums, scattered = [], []
        for leaf, into, *blobs in zip(leaves, outs, *contributions):
            if pieces := _filled(leaf):
                filled = _filled_values(into)
                dense = [out.contiguous() for out in filled]
                scattered += [(out, x) for out, x in zip(filled, dense) if x is not out]
                sums.append(Sum(pieces, [content_of(blob) for blob in blobs], dense))
        damage = together.add_up(sums, how.shift, add, how.own) if sums else None
        if damage is not None:
            self._explain(damage, leaves, contributions, how, sums, add)
        for out, x in scattered:
            out.copy_(x)

    def _explain(
        self,
        damage: Damage,
        leaves: Sequence[Layout],
        contributions: Sequence[Sequence[Blob]],
        how: How,
        sums: Sequence[Sum],
        add: bool,
    ) -> None:
        """Raises what is wrong with a frame, by decoding it once more as others would."""
        number, leaf = [(i, leaf) for i, leaf in enumerate(leaves) if _filled(leaf)][damage.leaf]
        self._decode_pieces(leaf, contributions[damage.part][number], how, sums[damage.leaf].outs, add)
        raise Corrupt(f"{self.contexts[leaf[0].tensor].name!r}: a frame that exchanges do not make")

    def _nothing_lost(self, pieces: Sequence[Piece]) -> None:
        """Of this rank's own values in these pieces."""
        for piece in pieces:
            self._lost[piece.tensor][piece.start : piece.stop].zero_()

    def _room_for_lost(self, leaf: Leaf, how: How, unit: float) -> list[torch.Tensor]:
        """Where what is lost of a leaf goes. Sums get what was lost of them before, in place."""
        if how.own:
            return [self._lost[piece.tensor][piece.start : piece.stop] for piece in leaf.pieces]
        rooms = []
        for piece, x in zip(leaf.pieces, leaf.xs):
            name, stage = self.contexts[piece.tensor].name, _stage_of(how, piece)
            self.memory.compensate(name, x, unit, stage)
            rooms.append(self.memory.room(name, x, stage))
        return rooms

    # -- pieces -------------------------------------------------------------------------------------------------

    def _fuses(self, values: torch.Tensor, how: How) -> bool:
        """Whether decoding, adding and encoding go in one pass: nothing has to be known of what is lost in between."""
        here = values.device == self._device(how) and hasattr(engines.pick(values.device), "decode_add_encode")
        fits = values.dtype == torch.float32 and not any(is_reach(ctx.floor) for ctx in self.contexts)
        return here and fits and not self._feeds_back

    def _codec_of(self, piece: Piece, how: How) -> Codec:
        """What codes a piece: of this rank's own gradient or, with others added to it, of a sum."""
        exact = how.own and self._exact[piece.tensor]
        return self.codec.exact if exact and isinstance(self.codec, GComp) else self.codec

    def _device(self, how: How) -> torch.device:
        return torch.device("cpu") if how.device == "cpu" else self.home

    def _context(self, piece: Piece, how: How, device: torch.device) -> Context:
        whole = self.contexts[piece.tensor]
        is_whole = piece.numel == self._flat[piece.tensor].numel()
        name = whole.name if is_whole else f"{whole.name}[{piece.start}:{piece.stop}]"
        floor = whole.floor
        if floor is not None:
            floor = floor[piece.start : piece.stop].to(device)
        if isinstance(self.codec, GComp) or (is_whole and how.own):
            state = whole.state
        elif how.own and not cuttable(self.codec):
            state = self.memory.state(name, self.codec.name)
        else:
            state = {}  # of sums nothing is carried from step to step
        return dataclasses.replace(whole, name=name, floor=floor, shift=how.shift, state=state)

    def _encode_piece(self, piece: Piece, x: torch.Tensor, how: How, writer: Writer) -> Sparse | None:
        """Returns what a sparse frame holds."""
        codec, own = self._codec_of(piece, how), how.own
        stage = _stage_of(how, piece)
        name, unit = self.contexts[piece.tensor].name, self.scale / (self.world if how.mean else 1)
        target = x
        if self._feeds_back and not own:
            target = self.memory.compensated(name, x, unit, stage)
            x = target.to(x.dtype)
        if not own:
            codec = codec.for_sum(x)
        ctx = self._context(piece, how, x.device)
        frame = writer.write(partial(codec.encode, x, ctx))
        if not self._feeds_back:
            return ctx.sent
        lost = self._lost[piece.tensor][piece.start : piece.stop] if own else wide(target).clone()
        if ctx.sent is not None:
            take_out(lost, ctx.sent)
        elif own and self._together is not None:  # only this step of the route is on another device
            lost.copy_((x - codec.decode(frame, ctx)) / self.scale)
        else:
            lost.sub_(wide(codec.decode(frame, ctx)).to(lost.device))
        if not own:
            self.memory.lost(name, lost, unit, stage)
        return ctx.sent

    def _decode_piece(
        self, piece: Piece, frame: torch.Tensor, near: torch.Tensor, how: How, out: torch.Tensor, add: bool
    ) -> None:
        """`near` is the frame as it came, most often to the host's memory."""
        codec, header = self.codec, wire.read_header(near)
        codec = codec.decoder(header.codec_id)
        if header.numel != piece.numel:
            raise Corrupt(f"the frame holds {header.numel} values instead of {piece.numel}")
        ctx = self._context(piece, how, frame.device)
        ctx.near = near if near.device.type == "cpu" else None
        if header.dtype == out.dtype and out.device == frame.device and out.is_contiguous():
            codec.decode(frame, ctx, out, add)
        else:
            decoded = codec.decode(frame, ctx)
            out.add_(decoded.to(out.device)) if add else out.copy_(decoded)

    # -- blobs --------------------------------------------------------------------------------------------------

    def _writer(self, leaf: Layout, device: torch.device) -> Writer:
        return Writer(self._room(leaf, device), len(_filled(leaf)))

    def _room(self, leaf: Layout, device: torch.device) -> torch.Tensor:
        size = HEAD_ROOM + self.bound(leaf)
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        buffer = self.buffers.take(size)
        self.taken.append(buffer)
        return buffer


def _near(codec: Codec) -> bool:
    return isinstance(codec, GComp) and codec.mode == "near"


def _fused(codec: GComp, frame: torch.Tensor, local: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
    """The frame of local + what is in `frame`, in one pass."""
    header = wire.read_header(frame)
    if header.numel != local.numel():
        raise Corrupt(f"the frame holds {header.numel} values instead of {local.numel()}")
    start = wire.body_offset(False)
    job = codec._job(ctx)
    book = books.lengths(job.book, local.numel()) if job.book else None
    size = engines.pick(local.device).decode_add_encode(
        frame[header.body_offset :], local.contiguous(), job, out[start:], ctx.floor, ctx.shift, book, book
    )
    wire.write_header(out, codec.wire_id, local.dtype, local.numel(), size, False)
    return out[: start + size]


def _filled(leaf: Layout) -> list[Piece]:
    return [piece for piece in leaf if piece.numel]


def _filled_values(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in values if x.numel()]


def _stage_of(how: How, piece: Piece) -> str:
    """What the residual of a sum is called."""
    return f"sum{how.number}.{piece.start}-{piece.stop}"
