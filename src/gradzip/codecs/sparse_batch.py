"""Sparse frames of many small tensors in a few operations: the same bytes and values as one by one (sparse.py).

The tensors lie one behind the other in a flat one. Their frames may differ in size, so what belongs to each value (its
frame, its number there, how many bits of its position are stored as they are) is spread out beside it in arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from .. import wire
from . import selection

Column = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

ALIGN = 8  # bytes: frames begin at multiples of it
_COUNT_BYTES = 8
_BODY = wire.HEADER_BYTES + _COUNT_BYTES  # where the values begin
_WORDS = {2: "<i2", 4: "<i4", 8: "<i8"}


class Batch:
    """Tensors that lie one behind the other, none of them empty."""

    def __init__(self, sizes: Column) -> None:
        self.sizes = sizes
        self.ends: Column = np.cumsum(sizes)
        self.starts: Column = self.ends - sizes

    @cached_property
    def _distinct(self) -> tuple[Column, Column]:
        sizes, which = np.unique(self.sizes, return_inverse=True)
        return sizes, which.reshape(-1)

    def by_size(self, number: Callable[[int], int]) -> Column:
        """A number that follows from the size of each tensor."""
        sizes, which = self._distinct
        found: Column = np.array([number(int(size)) for size in sizes], np.int64)[which]
        return found

    def counts(self, index: torch.Tensor) -> Column:
        """How many of these ascending indices each tensor has."""
        found: Column = np.diff(np.searchsorted(index.numpy(), self.ends), prepend=0)
        return found


@dataclass(frozen=True, eq=False)
class Picked:
    """What of each tensor is sent."""

    index: torch.Tensor  # ascending, into the flat tensor
    values: torch.Tensor
    counts: Column  # of each tensor; at least one


def ranges(starts: Column, counts: Column) -> Column:
    """start, start + 1, ... for so many of each."""
    firsts = np.cumsum(counts) - counts
    found: Column = np.arange(int(counts.sum()))
    found += np.repeat(starts - firsts, counts)
    return found


# -- which values ----------------------------------------------------------------------------------------------------


def largest(x: torch.Tensor, batch: Batch, counts: Column) -> torch.Tensor:
    """selection.largest of each tensor: so many values of it."""
    kinds, found = np.stack([batch.sizes, counts], 1), list[torch.Tensor]()
    if (kinds == kinds[0]).all():
        size, count = map(int, kinds[0])
        places = selection.largest(x.view(-1, size), count)
        return (places + torch.from_numpy(batch.starts)[:, None]).view(-1)
    for (size, count), members in _alike(kinds):
        rows = x[torch.from_numpy(ranges(batch.starts[members], batch.sizes[members]))].view(-1, size)
        places = selection.largest(rows, count) + torch.from_numpy(batch.starts[members])[:, None]
        found.append(places.view(-1))
    return torch.cat(found).sort().values


def _alike(kinds: Column) -> list[tuple[tuple[int, int], Column]]:
    """Which rows are equal."""
    distinct, which = np.unique(kinds, axis=0, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(which.reshape(-1), minlength=len(distinct)))
    return [((int(a), int(b)), each) for (a, b), each in zip(distinct, np.split(order, ends[:-1]))]


def at_least(x: torch.Tensor, batch: Batch, wanted: torch.Tensor, fewest: Column) -> tuple[torch.Tensor, Column]:
    """The indices where `wanted` is set; of a tensor that has fewer of them than that, its `fewest` largest."""
    index = wanted.nonzero().view(-1)
    counts = batch.counts(index)
    few = np.flatnonzero(counts < fewest)
    if few.size:
        enough = torch.from_numpy(np.repeat(counts >= fewest, counts))
        rest = torch.from_numpy(ranges(batch.starts[few], batch.sizes[few]))
        instead = largest(x[rest], Batch(batch.sizes[few]), fewest[few])
        index = torch.cat([index[enough], rest[instead]]).sort().values
        counts = np.where(counts < fewest, fewest, counts)
    return index, counts


# -- frames ----------------------------------------------------------------------------------------------------------


@dataclass
class _Layout:
    """Where frames keep their positions: see packing.py."""

    sizes: Column  # of the tensors
    counts: Column  # of values sent

    @cached_property
    def width(self) -> Column:
        """Bits of each index that are stored as they are; 0: a plain bit vector."""
        width: Column = np.frexp(self.sizes // self.counts)[1].astype(np.int64) - 1
        upper = ((self.sizes - 1 >> width) + self.counts + 7) // 8
        shorter = _low_bytes(self.counts, width) + upper < (self.sizes + 7) // 8
        return np.where(shorter, width, 0)

    @cached_property
    def low(self) -> Column:
        """Bytes of these bits."""
        return _low_bytes(self.counts, self.width)

    @cached_property
    def marks(self) -> Column:
        """Bits of the vector behind them."""
        return np.where(self.width > 0, (self.sizes - 1 >> self.width) + self.counts, self.sizes)

    @cached_property
    def bytes(self) -> Column:
        return self.low + (self.marks + 7) // 8

    def frames(self, item: int) -> Column:
        """Bytes of the frames."""
        return _BODY + self.counts * item + self.bytes

    @cached_property
    def number(self) -> Column:
        """Of each value in its frame."""
        return ranges(np.zeros_like(self.counts), self.counts)


def _low_bytes(counts: Column, width: Column) -> Column:
    return width // 8 * counts + (counts * (width % 8) + 7) // 8


def bytes_of(batch: Batch, picked: Picked) -> Column:
    """Of the frame of each tensor."""
    return _Layout(batch.sizes, picked.counts).frames(picked.values.itemsize)


def write(out: torch.Tensor, codec_id: int, batch: Batch, picked: Picked) -> Column:
    """Writes frames one behind the other, each padded with zeros to 8 bytes; returns their bytes without that."""
    item, counts, layout = picked.values.itemsize, picked.counts, _Layout(batch.sizes, picked.counts)
    sizes = layout.frames(item)
    padded = sizes + -sizes % ALIGN
    ends: Column = np.cumsum(padded)
    starts, room = ends - padded, out.numpy()[: int(ends[-1])]
    room[:] = 0
    words, at = room.view("<i8"), starts // 8
    words[at] = _first_word(codec_id, picked.values.dtype)
    words[at + 1], words[at + 2], words[at + 3] = batch.sizes, sizes - wire.HEADER_BYTES, counts
    kind = _WORDS[item]
    room.view(kind)[ranges((starts + _BODY) // item, counts)] = picked.values.view(torch.uint8).numpy().view(kind)
    positions = _packed(picked.index.numpy() - np.repeat(batch.starts, counts), layout)
    room[ranges(starts + _BODY + counts * item, layout.bytes)] = positions
    return sizes


def _first_word(codec_id: int, dtype: torch.dtype) -> np.int64:
    found: np.int64 = np.frombuffer(wire.pack_header(codec_id, dtype, 0, 0, False), "<i8")[0]
    return found


def _packed(index: Column, layout: _Layout) -> Bytes:
    """The positions of all frames, one behind the other."""
    counts, width, number = layout.counts, layout.width, layout.number
    firsts: Column = np.cumsum(layout.bytes) - layout.bytes
    bits = np.zeros(8 * int(layout.bytes.sum()), np.uint8)
    of_value = np.repeat(width, counts)
    upper = (index >> of_value) + np.where(of_value > 0, number, 0)
    bits[upper + np.repeat(8 * (firsts + layout.low), counts)] = 1
    for bit in range(int(width.max())):
        places = _place_of_bit(bit, layout, firsts)
        has = of_value > bit
        bits[places if has.all() else places[has]] = (index if has.all() else index[has]) >> bit & 1
    return np.packbits(bits, bitorder="little")


def _place_of_bit(bit: int, layout: _Layout, firsts: Column) -> Column:
    """Where that bit of each index is, in bits: whole bytes of all indices come first, then what is left of each."""
    counts, width = layout.counts, layout.width
    whole = bit < width // 8 * 8  # of frames
    first = 8 * (firsts + np.where(whole, bit // 8 * counts, width // 8 * counts))
    first += np.where(whole, bit % 8, bit - width // 8 * 8)
    stride = np.where(whole, 8, width % 8)
    found: Column = np.repeat(first, counts) + layout.number * np.repeat(stride, counts)
    return found


def read(
    data: torch.Tensor,
    starts: Column,
    sizes: Column,
    codec_ids: Sequence[int],
    batch: Batch,
    fewest: Column,
    dtype: torch.dtype,
) -> Picked | None:
    """What the frames at these places of `data` hold, each of which has so many bytes and `fewest` values at least.

    None where decoding one by one may say what is wrong, or knows other frames than those that `write` makes.
    """
    room, item = data.numpy(), dtype.itemsize
    if (sizes < _BODY).any() or (starts % ALIGN).any():
        return None
    words, at = room[: room.size // 8 * 8].view("<i8"), starts // 8
    counts: Column = words[at + 3].astype(np.int64)
    known = np.isin(words[at], [_first_word(codec_id, dtype) for codec_id in codec_ids])
    known &= (words[at + 1] == batch.sizes) & (words[at + 2] == sizes - wire.HEADER_BYTES)
    if not (known & (counts >= fewest) & (counts <= batch.sizes)).all():
        return None
    layout = _Layout(batch.sizes, counts)
    if (layout.frames(item) != sizes).any():
        return None
    firsts = starts + _BODY + counts * item  # of positions
    index = _unpacked(room, firsts, layout)
    if index is None:
        return None
    kind = _WORDS[item]
    values = room[: room.size // item * item].view(kind)[ranges((starts + _BODY) // item, counts)]
    index += np.repeat(batch.starts, counts)
    return Picked(torch.from_numpy(index), torch.from_numpy(values).view(torch.uint8).view(dtype), counts)


def _unpacked(room: Bytes, firsts: Column, layout: _Layout) -> Column | None:
    """The indices of all frames; None if they do not ascend, or bits are set that no frame has."""
    counts, width, number = layout.counts, layout.width, layout.number
    vectors = layout.bytes - layout.low  # bytes of the bit vectors
    marks = np.unpackbits(room[ranges(firsts + layout.low, vectors)], bitorder="little")
    index: Column = np.flatnonzero(marks.view(np.bool_))
    if index.size != number.size:
        return None
    index -= np.repeat(8 * (np.cumsum(vectors) - vectors), counts)
    if (index < 0).any() or (index >= np.repeat(layout.marks, counts)).any():
        return None
    odd = width % 8
    last = odd * counts % 8  # bits in the last byte of what is left of each index
    if (np.where(last > 0, room[firsts + layout.low - 1] >> last, 0) != 0).any():
        return None
    if int(width.max()):
        of_value = np.repeat(width, counts)
        index -= np.where(of_value > 0, number, 0)
        index <<= of_value
        for plane in range(int(width.max()) // 8):
            has = of_value // 8 > plane
            index[has] |= room[(np.repeat(firsts + plane * counts, counts) + number)[has]].astype(np.int64) << 8 * plane
        bits = number * np.repeat(odd, counts)
        at = np.repeat(firsts + width // 8 * counts, counts) + bits // 8
        pairs = room[at].astype(np.int64) | room[np.minimum(at + 1, room.size - 1)].astype(np.int64) << 8
        low = pairs >> bits % 8 & (np.left_shift(1, np.repeat(odd, counts)) - 1)
        index |= low << of_value // 8 * 8
    ascends = np.diff(index, prepend=-1) > 0
    ascends[np.cumsum(counts) - counts] = True
    return index if ascends.all() and (index < np.repeat(layout.sizes, counts)).all() else None
