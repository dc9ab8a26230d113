"""What a message has lost of its gradients, as one tensor: nothing is done for each of them in a step.

Memory keeps it as a bundle, and takes it apart where somebody asks for the residual of a single parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from ...codecs.base import Kept
from ..parts import Column, Part


class Split(Sequence[torch.Tensor]):
    """Tensors that lie one behind the other in a flat one; views of them are made when they are asked for."""

    def __init__(self, flat: torch.Tensor, ends: Column, shapes: Sequence[torch.Size] = ()) -> None:
        """`shapes`: of the views; (): they are flat."""
        self.flat, self._ends, self._shapes = flat, ends, shapes

    @classmethod
    def zeros(cls, sizes: Sequence[int]) -> Split:
        return cls(torch.zeros(sum(sizes)), np.cumsum(sizes))

    @property
    def addresses(self) -> Column:
        """Where each of them begins in memory."""
        starts: Column = self.flat.data_ptr() + self.flat.itemsize * (self._ends - np.diff(self._ends, prepend=0))
        return starts

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, number: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, number: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        view = self.flat[int(self._ends[number - 1]) if number else 0 : int(self._ends[number])]
        return view.view(self._shapes[number]) if self._shapes else view

    def shaped(self, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Split:
        """Tensors of the same sizes in another flat one."""
        return Split(flat, self._ends, shapes)


class LostTogether(Kept):
    """What a step leaves: residuals without the loss scale."""

    def __init__(self, lost: Split) -> None:
        self.lost = lost

    @property
    def residuals(self) -> Sequence[torch.Tensor]:
        return self.lost

    @property
    def states(self) -> list[dict[str, Any]]:
        return [{}] * len(self.lost)


class LostOfSums(NamedTuple):
    """What was lost of an owner's sums, without the loss scale, each at its part's place."""

    parts: Sequence[Part]
    stages: Sequence[str]  # of each part, as Memory calls them
    flat: torch.Tensor


class LostWithSums(LostTogether):
    """What a step leaves of gradients and of sums."""

    def __init__(self, lost: Split, of_sums: Mapping[object, LostOfSums], before: LostWithSums | None) -> None:
        """`before`: what the step before has left; its memory is used again by the next one."""
        super().__init__(lost)
        self.of_sums = of_sums
        self.spare = None if before is None else before.lost.flat
        self.spares_of_sums = {} if before is None else {key: lost.flat for key, lost in before.of_sums.items()}

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(len(self.lost))]
        for lost in self.of_sums.values():
            for part, stage in zip(lost.parts, lost.stages):
                found[part.tensor][stage] = lost.flat[part.place : part.place + part.numel]
        return found
