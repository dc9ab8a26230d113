"""What a rank holds of a message: stretches of its tensors, and how they are dealt out and cut up.

Every tensor is dealt out by itself: rank i of n gets the i-th of n nearly equal parts of each. So which rank adds up a
value, and in which order, follows from the tensor alone and not from the message that it travels in.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """The values from `start` to `stop` of one of the message's tensors."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Layout = tuple[Piece, ...]

# Values that each rank of a group gets of one chunk. Large enough that code tables and latency do not show, small
# enough that coding one chunk overlaps with sending another.
PART = 1 << 19
# A chunk costs the host of a GPU about a millisecond, whatever its size, and coding it hardly anything: there whole
# buckets overlap with each other, and a tensor is cut only where it would be a message by itself.
PART_ON_GPU = 1 << 21
_CHUNKS = 2  # of such a tensor, if it is not a very large one: enough for overlap


def numel(layout: Layout) -> int:
    return sum(piece.numel for piece in layout)


def parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """A stretch in `count` nearly equal parts, some of them empty where there are fewer values than parts."""
    size = stop - start
    return list(itertools.pairwise(start + size * i // count for i in range(count + 1)))


def deal(layout: Layout, count: int) -> list[Layout]:
    """What each of `count` ranks gets: its part of every piece."""
    cut = [[Piece(piece.tensor, a, b) for a, b in parts(piece.start, piece.stop, count)] for piece in layout]
    return [tuple(piece[i] for piece in cut) for i in range(count)]


def chunks(sizes: Sequence[int], ranks: int, cuttable: bool, part: int = PART) -> list[Layout]:
    """Tensors of these sizes as chunks that go through the pipeline one after the other.

    A function of its arguments alone. Small tensors share a chunk; large ones are cut where the codec treats every
    value by itself (`cuttable`), so that the cut changes nothing. Where a tensor is cut follows from its size alone:
    sums on the way have residuals, and these must fit in whatever message it travels.
    """
    largest, smallest = part * max(ranks, 1), min(part, PART) * max(ranks, 1)
    uncut = smallest if part <= PART else 2 * smallest
    result: list[Layout] = []
    open_chunk: list[Piece] = []
    filled = 0
    for number, size in enumerate(sizes):
        if cuttable and size > uncut:
            count = max(round(size / largest), min(_CHUNKS, round(size / smallest)))
            on_gpu = part > PART  # there one chunk less is worth more than short ends (docs/log.md)
            cut = _in_two(size) if on_gpu and count == _CHUNKS else _with_short_ends(size, count)
            result += [(Piece(number, a, b),) for a, b in cut]
            continue
        open_chunk.append(Piece(number, 0, size))
        filled += size
        if filled >= largest:
            result.append(tuple(open_chunk))
            open_chunk, filled = [], 0
    if open_chunk:
        result.append(tuple(open_chunk))
    return result


def _in_two(size: int) -> list[tuple[int, int]]:
    """The second part is shorter: what is done to it in the end, nothing hides."""
    middle = size * 3 // 5
    return [(0, middle), (middle, size)]


def _with_short_ends(size: int, count: int) -> list[tuple[int, int]]:
    """About that many parts. The first and the last are half as long: while they are coded, the wire is idle."""
    halves = parts(0, size, 2 * count)
    return list(itertools.pairwise([0, *(a for a, _ in halves[1::2]), size]))


def views(flat: torch.Tensor, layout: Layout, leaf: Layout) -> list[torch.Tensor]:
    """Where the pieces of `leaf` lie in the flat values of `layout`."""
    found, offset = [], 0
    for whole, part in zip(layout, leaf):
        start = offset + part.start - whole.start
        found.append(flat[start : start + part.numel])
        offset += whole.numel
    return found


def subviews(targets: Sequence[torch.Tensor], layout: Layout, leaf: Layout) -> list[torch.Tensor]:
    return [t[p.start - w.start : p.stop - w.start] for t, w, p in zip(targets, layout, leaf)]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat tensors in one, which is a copy unless there is but one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
