"""Parts: how the tensors of a message are dealt out to the ranks that add them up, and the table that engines take.

A part is the range of a tensor that one rank owns. Every tensor is dealt out by itself, from its name and size alone:
which rank adds up a value does not depend on the message that the tensor travels in, so results do not change when DDP
rebuilds its buckets. Parts begin at multiples of 128 elements; a tensor of less than 128 elements for each owner goes
whole to one of them. The tensor's name chooses who gets its first part, or all of it: first quarters of tensors are
often alike and differ from the others, and if one owner had them all, its frame would be larger than the rest.

An owner's frame holds its parts in the order of tensors. Each part begins at a multiple of 32 values of the frame, its
`place`, so that a lane of an engine never works on two parts.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GRAIN = 128  # elements: parts begin at multiples of it
LANES = 32  # values: places in a frame are multiples of it
CUT = 4096  # values: where chunks cut a part, counted from its beginning; a block of the engines

Column = npt.NDArray[np.int64]


class Part(NamedTuple):
    """The elements from `start` to `stop` of a tensor; `place` is where they begin in the owner's frame, in values."""

    tensor: int
    start: int
    stop: int
    owner: int
    place: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Columns(NamedTuple):
    """Parts as arrays, for engines: one entry for each part."""

    tensor: Column
    start: Column
    length: Column
    owner: Column
    place: Column


class _Range(NamedTuple):
    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Table:
    """The parts of a message, in the order of owners and then of tensors; none is empty."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements of each whole tensor
    owners: int
    parts: tuple[Part, ...]
    dealt: int  # among how many owners the message has been dealt out in all

    @classmethod
    def of(cls, names: Sequence[str], sizes: Sequence[int], counts: Sequence[int]) -> Table:
        """Deals whole tensors out to the owners of a group, or of a group of groups: counts (2, 3) make 6 owners.

        The parts of owner 3 * a + b are what `within(a, [3])` deals out of `of(names, sizes, [2])` to owner b.
        """
        ranges = [_Range(tensor, 0, size) for tensor, size in enumerate(sizes) if size]
        return _table(tuple(names), tuple(sizes), ranges, counts, 1)

    @classmethod
    def owned(cls, names: Sequence[str], sizes: Sequence[int], owners: Sequence[int], count: int) -> Table:
        """Whole tensors, each of which belongs to the owner that is said: what a reduce-scatter is asked for."""
        shares: list[list[_Range]] = [[] for _ in range(count)]
        for tensor, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
            if size:
                shares[owner].append(_Range(tensor, 0, size))
        return cls(tuple(names), tuple(sizes), count, tuple(_placed(shares)), count)

    def within(self, owner: int, counts: Sequence[int]) -> Table:
        """Deals the parts of one owner out again."""
        ranges = [_Range(part.tensor, part.start, part.stop) for part in self.of_owner(owner)]
        return _table(self.names, self.sizes, ranges, counts, self.dealt)

    def joined(self) -> Table:
        """The same parts with one owner."""
        ranges = [_Range(part.tensor, part.start, part.stop) for part in sorted(self.parts)]
        return Table(self.names, self.sizes, 1, tuple(_placed([ranges])), self.dealt // self.owners)

    def of_owner(self, owner: int) -> tuple[Part, ...]:
        first, last = self._firsts[owner : owner + 2]
        return self.parts[first:last]

    def length(self, owner: int) -> int:
        """Values in the owner's frame, those that only fill it up to a multiple of 32 included."""
        parts = self.of_owner(owner)
        return _aligned(parts[-1].place + parts[-1].numel) if parts else 0

    def numel(self, owner: int) -> int:
        """Elements that the owner adds up."""
        return sum(part.numel for part in self.of_owner(owner))

    def chunks(self, values: int, cuts: bool = True, two_from: int | None = None) -> list[Table]:
        """Cuts every owner's frame into equally many frames of about so many values; at least one.

        Each chunk is a table of its own. A part is cut at multiples of 4096 of its elements; without `cuts` it stays
        whole. One or two chunks of at least `two_from` values become two, of which the second is shorter: nothing hides
        what is done to it in the end.
        """
        longest = max(map(self.length, range(self.owners)), default=0)
        count = max(1, round(longest / max(values, 1)))
        ends = [(chunk + 1, count) for chunk in range(count)]  # shares of a frame, as fractions
        if two_from is not None and count <= 2 and cuts:
            ends = [(3, 5), (1, 1)] if longest >= two_from else [(1, 1)]
        if len(ends) == 1:
            return [self]
        pieces: list[list[list[_Range]]] = [[[] for _ in range(self.owners)] for _ in ends]
        for owner in range(self.owners):
            length = self.length(owner)
            places = [-(-length * share // whole) for share, whole in ends]
            for chunk, piece in _cut(self.of_owner(owner), places, cuts):
                pieces[chunk][owner].append(piece)
        tables = (
            Table(self.names, self.sizes, self.owners, tuple(_placed(ranges)), self.dealt)
            for ranges in pieces
            if any(ranges)
        )
        return list(tables)

    def columns(self, owner: int | None = None) -> Columns:
        """The parts of an owner, or of all, as arrays; not to be written to."""
        if owner is None:
            return self._columns
        first, last = self._firsts[owner : owner + 2]
        return Columns(*(column[first:last] for column in self._columns))

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that differ where tables do."""
        said = repr((self.names, self.sizes, self.owners, self.parts))
        return hashlib.blake2b(said.encode(), digest_size=4).hexdigest()

    @cached_property
    def _columns(self) -> Columns:
        rows = np.array(self.parts, dtype=np.int64).reshape(-1, len(Part._fields))
        tensor, start, stop, owner, place = (np.ascontiguousarray(column) for column in rows.T)
        return Columns(tensor, start, stop - start, owner, place)

    @cached_property
    def _firsts(self) -> list[int]:
        """Where each owner's parts begin, and where the last one's end."""
        counts = [0] * (self.owners + 1)
        for part in self.parts:
            counts[part.owner + 1] += 1
        return list(itertools.accumulate(counts))


def name_hash(name: str) -> int:
    """32 bits of a tensor's name: they choose the owner of a small tensor."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def _table(
    names: tuple[str, ...], sizes: tuple[int, ...], ranges: Sequence[_Range], counts: Sequence[int], dealt: int
) -> Table:
    held = [list(ranges)]
    for count in counts:
        held = [share for owner in held for share in _deal(owner, count, names, dealt)]
        dealt *= count
    return Table(names, sizes, len(held), tuple(_placed(held)), dealt)


def _deal(ranges: Sequence[_Range], count: int, names: Sequence[str], dealt: int) -> list[list[_Range]]:
    """What each of `count` owners gets of these ranges."""
    shares: list[list[_Range]] = [[] for _ in range(count)]
    for tensor, start, stop in ranges:
        size = stop - start
        # owners of the group before took the lower digits: the same ones again would leave some without any
        begin = name_hash(names[tensor]) // dealt % count
        each = size if size < GRAIN * count else math.ceil(size / count / GRAIN) * GRAIN
        for number, first in enumerate(range(start, stop, each)):
            shares[(begin + number) % count].append(_Range(tensor, first, min(first + each, stop)))
    return shares


def _placed(shares: Sequence[Sequence[_Range]]) -> Iterator[Part]:
    for owner, ranges in enumerate(shares):
        place = 0
        for tensor, start, stop in ranges:
            yield Part(tensor, start, stop, owner, place)
            place = _aligned(place + stop - start)


def _cut(parts: Sequence[Part], ends: Sequence[int], cuts: bool) -> Iterator[tuple[int, _Range]]:
    """The parts of a frame, cut near the ends of chunks; with the number of the chunk."""
    for part in parts:
        start = part.start
        while start < part.stop:
            at = part.place + start - part.start
            chunk = min(bisect_right(ends, at), len(ends) - 1)
            end = ends[chunk] - part.place  # of this chunk, in elements of the part
            stop = part.stop
            if cuts and chunk < len(ends) - 1:
                stop = min(stop, part.start + max(math.ceil(end / CUT), (start - part.start) // CUT + 1) * CUT)
            yield chunk, _Range(part.tensor, start, stop)
            start = stop


def _aligned(values: int) -> int:
    return -(-values // LANES) * LANES
