"""Parts of one size as rows: what a model has many of is coded by a few calls, not by some for each part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ... import wire
from ..parts import Column, Part

LONGEST = 1 << 16  # values: calls for longer parts cost little beside their values
ENTRY = 8  # bytes: frames are padded to it


@dataclass(frozen=True)
class PartRun:
    """Parts that follow each other in an owner's frame."""

    first: int  # its number among the owner's parts
    count: int
    group: int = -1  # whose rows they are; -1: they are coded one by one
    row: int = 0  # of the first one


class EqualParts:
    """An owner's parts, grouped by size."""

    def __init__(self, parts: Sequence[Part], longest: int = LONGEST, sizes: Sequence[int] = ()) -> None:
        """`longest`: values of a part in a group, at the most; `sizes`: of all tensors of the message, if known."""
        by_size: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            by_size.setdefault(part.numel if part.numel <= longest else -1, []).append(number)
        self.parts = parts
        self._names: list[list[str]] | None = None
        self.groups = [numbers for size, numbers in by_size.items() if size > 0 and len(numbers) > 1]
        ends = np.cumsum(sizes)
        self._places = [self._place(group, ends) if len(sizes) else None for group in self.groups]

    def _place(self, group: Sequence[int], ends: Column) -> int | None:
        """Where a group begins in the message, if nothing lies between its parts."""
        found = [self.parts[number] for number in group]
        starts = np.array([(ends[part.tensor - 1] if part.tensor else 0) + part.start for part in found], np.int64)
        return int(starts[0]) if (np.diff(starts) == found[0].numel).all() else None

    def rows_in(self, group: int, flat: torch.Tensor | None) -> torch.Tensor | None:
        """A group's parts as rows of the message's values, where these lie as one; else None."""
        at, count, numel = self._places[group], len(self.groups[group]), self.parts[self.groups[group][0]].numel
        return None if at is None or flat is None else flat[at : at + count * numel].view(count, numel)

    def of_group(self, group: int, of_parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of an owner's tensors that are of a group."""
        return [of_parts[number] for number in self.groups[group]]

    def names(self, name: Callable[[Part], str]) -> list[list[str]]:
        """What the parts of each group are called; asked once."""
        if self._names is None:
            self._names = [[name(self.parts[number]) for number in group] for group in self.groups]
        return self._names

    @cached_property
    def runs(self) -> list[PartRun]:
        """All parts, in their order."""
        found = {number: (group, row) for group, of in enumerate(self.groups) for row, number in enumerate(of)}
        places = [found.get(number, (-1, 0)) for number in range(len(self.parts))]
        runs, first = list[PartRun](), 0
        for group, of_run in itertools.groupby(group for group, _ in places):
            count = len(list(of_run))
            runs.append(PartRun(first, count, group, places[first][1]))
            first += count
        return runs

    @cached_property
    def runs_of(self) -> list[list[PartRun]]:
        """Those of each group."""
        return [[run for run in self.runs if run.group == group] for group in range(len(self.groups))]


def frames_of_group(data: torch.Tensor, starts: Column, sizes: Column, runs: Sequence[PartRun]) -> torch.Tensor | None:
    """The frames of a group as rows; None if they are not equally long, or differ in their headers."""
    size = int(sizes[runs[0].first])
    if size < wire.HEADER_BYTES:
        return None
    padded, rows = size + -size % ENTRY, list[torch.Tensor]()
    for run in runs:
        if (sizes[run.first : run.first + run.count] != size).any():
            return None
        at = int(starts[run.first])
        rows.append(data[at : at + run.count * padded].view(run.count, padded))
    found = rows[0] if len(rows) == 1 else torch.cat(rows)
    heads = found.numpy()[:, : wire.HEADER_BYTES]
    return found[:, :size] if np.array_equal(heads, np.broadcast_to(heads[0], heads.shape)) else None
