"""A whole message with the codec `noise` on a GPU: what one rank does in an exchange by owners of parts.

    encode   levels of all tensors, then a frame for each other owner         4 launches
    reduce   all ranks' frames of this rank's parts are added and coded again 5 launches
    decode   the frames of all sums become the means                          2 launches

Everything is enqueued on the current stream; nothing is allocated, and the host does not wait. Tables and buffers are
made once for a layout: the tensors' addresses and the parts. Slots of another size take a few small copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ...errors import Unsupported
from ...wire import HEADER_BYTES
from .. import noise_layout as layout
from . import noise
from .launch import Stage
from .noise import Arguments, Call, Decoder, Encoder, Geometry, Measurer

Column = npt.NDArray[np.int64]
SLOT_ALIGN = 128  # bytes
_NOTCH = 4  # bytes of a body before its notch
_GROWTH = 1.125  # how far slots can grow without new buffers


@dataclass
class Layout:
    """A message: flat tensors in device memory, and the parts that they are dealt out into, in the order of owners."""

    tensors: Sequence[torch.Tensor]
    tensor: Column  # of each part
    start: Column
    length: Column
    owner: Column
    world: int
    rank: int
    own_keys: Sequence[int]  # layout.name_key of each tensor, for own gradients...
    sum_keys: Sequence[int]  # ...and for sums
    shapes: Sequence[torch.Tensor | None] = field(default_factory=list)
    digest: int = 0

    def __post_init__(self) -> None:
        self.shapes = self.shapes or [None] * len(self.tensors)
        for tensor, shape in zip(self.tensors, self.shapes):
            if tensor.numel() >= layout.STRIDE:
                raise Unsupported(f"a tensor of {tensor.numel()} values: noise on a GPU takes less than 2^32")
            if not tensor.is_contiguous() or (shape is not None and not shape.is_contiguous()):
                raise Unsupported("noise on a GPU takes contiguous tensors and shapes")

    def of_owner(self, owner: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.owner == owner
        return found

    def counts(self, owner: int) -> list[int]:
        found: list[int] = self.length[self.owner == owner].tolist()
        return found

    def rows(self, which: npt.NDArray[np.bool_], keys: Sequence[int]) -> npt.NDArray[np.void]:
        """Part rows without places: values and shapes lie in the tensors."""
        rows = np.zeros(int(which.sum()), noise.PART)
        tensor, start = self.tensor[which], self.start[which].astype(np.uint64)
        itemsize = self.tensors[0].element_size() if self.tensors else 4
        addresses = np.array([t.data_ptr() for t in self.tensors], np.uint64)
        shapes = np.array([0 if shape is None else shape.data_ptr() for shape in self.shapes], np.uint64)
        rows["values"] = addresses[tensor] + start * np.uint64(itemsize)
        rows["shape"] = np.where(shapes[tensor] != 0, shapes[tensor] + start, 0)
        rows["key"] = np.array(keys, np.uint64)[tensor]
        rows["start"], rows["length"] = start, self.length[which]
        rows["level"] = tensor
        return rows


class NoiseKernels:
    """The launches and buffers of a message.

    `sent` holds a slot for each owner and goes out by an all-to-all; what comes lies in `received`. The sum's frame is
    this rank's slot of `gathered`, which an all-gather fills.
    """

    def __init__(self, message: Layout, share: float, own_slot: int, sum_slot: int) -> None:
        self._message = message
        self.world = message.world
        self.device = message.tensors[0].device
        self.dtype = message.tensors[0].dtype
        world = message.world
        self._own_most, self._sum_most = (aligned(int(_GROWTH * slot)) for slot in (own_slot, sum_slot))
        self._room = [
            torch.zeros(world * most, dtype=torch.uint8, device=self.device)
            for most in (self._own_most, self._own_most, self._sum_most)
        ]
        self._set_slots(own_slot, sum_slot)
        self.status = torch.zeros(2 * world, dtype=torch.int32, device=self.device)  # of incoming frames, then of sums
        self._levels = torch.zeros(len(message.tensors), 2, device=self.device)
        factor = share * (12.0 / 2 * world / (world + 1))
        # Of each tensor: squares, the sum of 4^(d + 12), and whether all is finite.
        self._told = torch.zeros(len(message.tensors), 3, dtype=torch.int64, device=self.device)
        self._measurer = Measurer(message.tensors, message.shapes, factor, self._levels, self._told)
        # The tables that depend on slots, and what makes their rows for the sizes that slots have now.
        self._placed: list[tuple[Callable[[], npt.NDArray[np.void]], torch.Tensor]] = []
        self._make_encoder()
        self._make_reducer()
        self._make_decoder()
        self.encode = Stage([self._measurer.call, *self._encoder.calls])
        self.reduce = Stage([self._open, *([self._add] if self._add is not None else []), *self._sum_encoder.calls])
        self.decode = Stage(self._decoder.calls)
        self.add = Stage([self._open, *([self._add] if self._add is not None else [])])  # `reduce` without a frame

    @property
    def own_results(self) -> torch.Tensor:
        """RESULT of the frame for each other owner, in their order."""
        return self._encoder.results

    @property
    def sum_result(self) -> torch.Tensor:
        return self._sum_encoder.results

    # -- slots ----------------------------------------------------------------------------------------------------

    def resize(self, own_slot: int, sum_slot: int) -> bool:
        """Goes over to slots of other sizes, on the current stream; False: there is no room for them."""
        if own_slot > self._own_most or sum_slot > self._sum_most:
            return False
        self._set_slots(own_slot, sum_slot)
        for place, table in self._placed:
            noise.write(table, place())
        return True

    def _set_slots(self, own_slot: int, sum_slot: int) -> None:
        world, rank = self._message.world, self._message.rank
        self.own_slot, self.sum_slot = own_slot, sum_slot
        sent, received, gathered = self._room
        self.sent, self.received = sent[: world * own_slot], received[: world * own_slot]
        self.gathered = gathered[: world * sum_slot]
        self.sum_frame = self.gathered[rank * sum_slot : (rank + 1) * sum_slot]

    # -- tables ---------------------------------------------------------------------------------------------------

    def _make_encoder(self) -> None:
        m = self._message
        others = [owner for owner in range(m.world) if owner != m.rank]
        geometry = Geometry([m.counts(owner) for owner in others])

        def placed() -> npt.NDArray[np.void]:
            geometry.frames["slot"] = [self.sent.data_ptr() + owner * self.own_slot for owner in others]
            geometry.frames["room"] = self.own_slot
            return geometry.frames

        placed()
        rows = m.rows(~m.of_owner(m.rank), m.own_keys)
        rows["place"] = geometry.places
        offset = layout.offset_of(m.rank, m.world)
        self._encoder = Encoder(self.device, self.dtype, geometry, rows, self._levels, HEADER_BYTES, m.digest, offset)
        self._placed.append((placed, self._encoder.frames))

    def _make_reducer(self) -> None:
        m = self._message
        geometry = Geometry([m.counts(m.rank)])
        frame, blocks = geometry.frames[0], len(geometry.blocks)
        self._sums = torch.zeros(max(int(frame["values"]), 1), dtype=torch.float32, device=self.device)
        counts, places = m.counts(m.rank), geometry.places
        self.sums = [self._sums[place : place + count] for place, count in zip(places, counts)]  # of this rank's parts
        sum_levels = torch.zeros(max(int(frame["parts"]), 1), 2, device=self.device)
        own = m.rows(m.of_owner(m.rank), m.own_keys)
        own["place"] = geometry.places
        sums = m.rows(m.of_owner(m.rank), m.sum_keys)
        sums["place"] = geometry.places
        sums["values"] = np.uint64(self._sums.data_ptr()) + np.uint64(4) * sums["place"]
        sums["level"] = np.arange(len(sums))

        incoming = np.repeat(geometry.frames, m.world)

        def placed() -> npt.NDArray[np.void]:
            incoming["slot"] = self.received.data_ptr() + np.arange(m.world) * self.own_slot
            incoming["room"] = self.own_slot
            return incoming

        incoming["first_block"] = np.arange(m.world) * blocks
        verdicts = torch.zeros(m.world, dtype=torch.int32, device=self.device)
        nothing = np.zeros(1, noise.PART)
        self._kept = [
            noise.to_device(np.append(own, nothing), self.device), noise.to_device(placed(), self.device),
            noise.to_device(geometry.blocks, self.device), self._levels, noise.tables(self.device),
            torch.empty(m.world * blocks, dtype=torch.int64, device=self.device), verdicts, self.status,
            noise.to_device(np.append(sums, nothing), self.device), sum_levels,
        ]  # fmt: skip
        names = ("parts", "frames", "blocks", "levels", "tables", "offsets", "verdicts", "status", "sums", "sum_levels")
        numbers = Arguments(digest=m.digest, prefix=HEADER_BYTES, rank=m.rank, world=m.world, all_blocks=blocks)
        arguments = noise.addressed(names, self._kept, numbers)
        self._open = Call(self.device, "noise_open", m.world, noise.OPENERS, arguments)
        self._add: Call | None = None
        if len(own):
            halves = next((few for few in noise.HALVES if few >= m.world), noise.HALVES[-1])
            kernel = f"noise_add<{noise.float_name(self.dtype)}, {halves}>"
            self._add = Call(self.device, kernel, blocks, 16 * halves, arguments, persistent=True)

        def sum_placed() -> npt.NDArray[np.void]:
            geometry.frames["slot"], geometry.frames["room"] = self.sum_frame.data_ptr(), self.sum_slot
            return geometry.frames

        sum_placed()
        self._sum_encoder = Encoder(
            self.device, torch.float32, geometry, sums, sum_levels, HEADER_BYTES, m.digest, 0, verdicts, m.rank
        )
        self._placed += [(placed, self._kept[1]), (sum_placed, self._sum_encoder.frames)]

    def _make_decoder(self) -> None:
        m = self._message
        geometry = Geometry([m.counts(owner) for owner in range(m.world)])

        def placed() -> npt.NDArray[np.void]:
            geometry.frames["slot"] = self.gathered.data_ptr() + np.arange(m.world) * self.sum_slot
            geometry.frames["room"] = self.sum_slot
            return geometry.frames

        placed()
        rows = m.rows(np.ones(len(m.owner), np.bool_), m.sum_keys)
        rows["place"] = geometry.places
        self._find_levels(geometry)
        self.squares = torch.zeros(len(geometry.blocks), dtype=torch.float64, device=self.device)  # of means, by block
        self._decoder = Decoder(
            self.device, self.dtype, geometry, rows, HEADER_BYTES, m.digest, m.world, self.status[m.world :],
            self.squares,
        )  # fmt: skip
        self._placed.append((placed, self._decoder.frames))

    def _find_levels(self, geometry: Geometry) -> None:
        """`level_table`: where the kernel of the row of checks finds the level of each tensor's sum."""
        m = self._message
        place = np.arange(len(m.owner)) - geometry.frames["first_part"][m.owner].astype(np.int64)  # in its frame
        tensors, first = np.unique(m.tensor, return_index=True)  # one part of each will do
        table = np.zeros(len(tensors), [(name, "<u8") for name in ("level", "notch", "weight")])
        table["weight"] = self._told.data_ptr() + 24 * tensors + 8

        def placed() -> npt.NDArray[np.void]:
            body = self.gathered.data_ptr() + m.owner * self.sum_slot + HEADER_BYTES
            table["level"] = (body + layout.HEAD_BYTES + 4 * place)[first]
            table["notch"] = (body + _NOTCH)[first]
            return table

        self.level_table = noise.to_device(placed(), self.device)
        self._placed.append((placed, self.level_table))


def slot_for(counts: Sequence[int], bits: float) -> int:
    """Bytes of a slot for a frame of these parts at so many bits a value."""
    values = sum(map(layout.padded, counts))
    bytes_of = HEADER_BYTES + layout.blocks_offset(counts) + int(values * bits / 8)
    return aligned(bytes_of)


def slot_bound(counts: Sequence[int]) -> int:
    """Bytes of a slot that every frame of these parts fits into."""
    return aligned(HEADER_BYTES + layout.body_bound(counts))


def aligned(size: int) -> int:
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN
