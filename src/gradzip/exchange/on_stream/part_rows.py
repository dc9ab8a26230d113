"""Parts in rows of 32 values, so that a few operations make the statistics and codes of all parts of a message.

A frame's parts begin at rows, and a stretch of values that share statistics takes whole rows; lanes and rows that are
left over are zeros. Every frame of a message has as many rows and stretches as the largest, so that frames are equally
long and the last row of each is always zeros. Tables of rows are made once for a layout; reductions go up a ladder of
groups of rows, in the order of codecs/sums.py, so that they have the bits of a part that is coded by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ...codecs.random import draw
from ...codecs.sums import LANES, folded, group_of
from ..parts import Column, Part, Table

_MULTIPLE = 5  # rows of a frame: five ternary digits make a byte


class RowLayout:
    """What all frames of a message have in common."""

    def __init__(self, table: Table, stretch: int | None) -> None:
        """`stretch`: values that share statistics, a multiple of 32; None: those of a part."""
        assert stretch is None or stretch % LANES == 0
        self.table, self.stretch = table, stretch
        owners = [[part.numel for part in table.of_owner(owner)] for owner in range(table.owners)]
        most = max(sum(_rows(numel) for numel in each) for each in owners)
        self.rows = -(-(most + 1) // _MULTIPLE) * _MULTIPLE
        self.stretches = max(1, *(len(self.lengths(each)) for each in owners))

    def lengths(self, parts: Sequence[int]) -> list[int]:
        """Values of each stretch, for parts of so many values."""
        if self.stretch is None:
            return list(parts)
        return [min(self.stretch, numel - at) for numel in parts for at in range(0, numel, self.stretch)]


class PartRows:
    """The rows of some frames: those of these owners, one after the other."""

    def __init__(self, layout: RowLayout, owners: Sequence[int], device: torch.device) -> None:
        self._layout, self._device, self.owners, self.frames = layout, device, owners, len(owners)
        self.parts: list[Part] = []
        self.firsts: list[int] = []  # value of each part among all of them
        numbers = {part: number for number, part in enumerate(layout.table.parts)}
        count = self.frames * layout.rows
        stretch, part, index = (np.zeros(count, np.int64) for _ in range(3))  # of each row
        self._lengths: Column = np.zeros((self.frames, layout.stretches), np.int64)
        for frame, owner in enumerate(owners):
            parts, at = layout.table.of_owner(owner), frame * layout.rows
            lengths = np.array(layout.lengths([each.numel for each in parts]), np.int64)
            self._lengths[frame, : len(lengths)] = lengths
            rows = -(-lengths // LANES)
            stretch[at : (frame + 1) * layout.rows] = frame * layout.stretches
            stretch[at : at + rows.sum()] += np.repeat(np.arange(len(lengths)), rows)
            for each in parts:
                stop = at + _rows(each.numel)
                part[at:stop], index[at:stop] = numbers[each], LANES * np.arange(stop - at)
                self.firsts.append(LANES * at)
                at = stop
            self.parts += parts
        self._stretch = torch.from_numpy(stretch).to(device, torch.int32)
        self._part = torch.from_numpy(part).to(device, torch.int32)
        self._index = torch.from_numpy(index.astype(np.uint32).view(np.int32)).to(device)[:, None]
        self._lanes = torch.arange(LANES, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return self.frames * self._layout.rows

    def new(self) -> torch.Tensor:
        """Values, all zeros."""
        return torch.zeros(len(self), LANES, device=self._device)

    def addresses(self, x: torch.Tensor) -> npt.NDArray[np.uint64]:
        """Where each part of values begins in memory."""
        return (x.data_ptr() + x.itemsize * np.array(self.firsts, np.int64)).astype(np.uint64)

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Each part of values."""
        flat = x.view(-1)
        return [flat[first : first + part.numel] for first, part in zip(self.firsts, self.parts)]

    def draws(self, keys: torch.Tensor, bits: int) -> torch.Tensor:
        """Random bits for each value; `keys` has the lower and upper halves of the keys of all parts of the table."""
        low, high = (half.index_select(0, self._part)[:, None] for half in keys)
        drawn = self._index + self._lanes
        draw(drawn, low, high, bits)
        return drawn

    # -- statistics, as codecs.quantized.Stretches has them --------------------------------------------------------

    @cached_property
    def sizes(self) -> torch.Tensor:
        return torch.from_numpy(self._lengths.reshape(-1)).to(self._device)

    def spread(self, statistic: torch.Tensor) -> torch.Tensor:
        return statistic.index_select(0, self._stretch)[:, None]

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        found = x.amax(1)
        for index, group in self._ladder:
            found = found.index_select(0, index).view(-1, group).amax(1)
        return found[:-1]

    def count(self, mask: torch.Tensor) -> torch.Tensor:
        found = mask.sum(1)
        for index, group in self._ladder:
            found = found.index_select(0, index).view(-1, group).sum(1)
        return found[:-1]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        for index, group in self._ladder:
            x = folded(x.index_select(0, index).double().view(-1, group, LANES), 1)
        return folded(x, 1)[:-1]

    def real(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self._filled_up, 0)

    @cached_property
    def _filled_up(self) -> torch.Tensor:
        """Which values are none."""
        real = self.new()
        for view in self.views(real):
            view.fill_(1)
        return real == 0

    @cached_property
    def _ladder(self) -> list[tuple[torch.Tensor, int]]:
        """For each rung the rows that are put together, and how many in each group; a last group is all zeros."""
        rows = -(-self._lengths // LANES)
        begin = self._layout.rows * np.arange(self.frames)[:, None]
        firsts, counts = (begin + np.cumsum(rows, 1) - rows).reshape(-1), rows.reshape(-1)
        zeros = self._layout.rows - 1
        ladder = []
        while True:
            group = group_of(int(counts.max()))
            groups = np.maximum(-(-counts // group), 1)
            owner = np.repeat(np.arange(len(counts)), groups)
            number = np.arange(len(owner)) - np.repeat(np.cumsum(groups) - groups, groups)
            place = number[:, None] * group + np.arange(group)
            index = np.where(place < counts[owner, None], firsts[owner, None] + place, zeros).reshape(-1)
            index = np.concatenate([index, np.full(group, zeros)])
            ladder.append((torch.from_numpy(index).to(self._device, torch.int32), group))
            if int(groups.max()) == 1:
                return ladder
            counts, firsts, zeros = groups, np.cumsum(groups) - groups, len(owner)


def _rows(numel: int) -> int:
    return -(-numel // LANES)
