"""What ranks compare besides their messages: a number for each grid and for each result, and what is said of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import engines
from ..engines.layout import Floor
from ..errors import PeerError
from .parts import Column

_SAMPLED = 1024  # values of each tensor that are looked at in a step, others in the next
LOSSLESS = "gradients are sent lossless"  # what is done instead where grids differ, and where shapes do
UNSHAPED = "the codec noise rounds all values of a tensor to the same grid"


def differences(rows: Sequence[torch.Tensor], rank: int, names: Sequence[str]) -> list[tuple[int, str]]:
    """The ranks and names whose numbers differ from this rank's; each rank has a row of them."""
    own = rows[rank]
    found = [(other, (row != own).nonzero().view(-1).tolist()) for other, row in enumerate(rows)]
    return [(other, names[place]) for other, places in found for place in places]


def about_joined(rank: int, instead: str) -> str:
    """Under uneven inputs: a rank that has joined takes no steps, so that its parameters fall behind."""
    return f"rank {rank} has no more inputs: while others go on, {instead}"


def about_grids(rank: int, name: str, own: int, instead: str) -> str:
    return (
        f"rank {rank} would round {name!r} to another grid than rank {own}: its parameters, optimizer "
        f"state or settings differ. Until they agree, {instead}"
    )


def check_results(found: Sequence[tuple[int, str]], step: int, rank: int, count: int) -> None:
    """PeerError where ranks got other results: these differences, of so many parameters."""
    differing: dict[str, list[int]] = {}
    for other, name in found:
        differing.setdefault(name, []).append(other)
    if differing:
        name, ranks = next(iter(differing.items()))
        raise PeerError(
            f"after step {step} rank {rank} has other bits in the gradient of {name!r} than rank "
            f"{', '.join(map(str, ranks))}; so it is for {len(differing)} of {count} parameters. "
            "Replicas no longer agree: this is a bug or a hardware fault"
        )


def bit_sum(x: torch.Tensor) -> int:
    """A sum over the bits of a tensor that tells apart tensors with a value changed or two exchanged."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = x.detach().reshape(-1).view(kinds[x.itemsize])
    if not words.numel():
        return 0
    total = int(words.sum(dtype=torch.int64))
    rows = words[: words.numel() // 64 * 64].view(64, -1).sum(1, dtype=torch.int64).tolist()
    for place, row in enumerate(rows, start=3):
        total += place * row
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def floor_sums(floors: Sequence[Floor | torch.Tensor], step: int) -> torch.Tensor:
    """A number for each, from a sample of its values: a few operations for all of them, and one transfer."""
    totals = [0] * len(floors)
    alike: dict[tuple[torch.dtype, int], list[tuple[int, int, torch.Tensor]]] = {}
    for place, floor in enumerate(floors):
        tensors: Sequence[torch.Tensor | None]
        if isinstance(floor, Floor):
            totals[place] = (floor.c0 * 31 + floor.c1) * 31 + floor.c2
            tensors = floor.theta, floor.second
        else:
            tensors = (floor.view(-1),)
        for weight, x in enumerate(tensors, start=1):
            if x is not None:
                values = sample(x, step)
                alike.setdefault((x.dtype, values.numel()), []).append((place, weight, values))
    sums = []
    for (dtype, _), samples in alike.items():
        rows = torch.stack([values for _, _, values in samples])
        sums.append((rows if dtype == torch.int8 else rows.view(torch.int32)).sum(1, dtype=torch.int64))
    found = torch.cat(sums).tolist() if sums else []
    for (place, weight, _), number in zip((entry for samples in alike.values() for entry in samples), found):
        totals[place] += weight * number
    return torch.tensor(totals, dtype=torch.int64)


class FloorSamples:
    """`floor_sums` for one step after the other: where floors are the same, so is where they lie."""

    def __init__(self) -> None:
        self._floors: list[Floor | torch.Tensor] = []
        self._rows: _Rows | None = None  # None: they are not read in one call

    def sums(self, floors: Sequence[Floor | torch.Tensor], step: int) -> torch.Tensor:
        if len(floors) != len(self._floors) or not all(map(operator.is_, floors, self._floors)):
            self._floors, self._rows = list(floors), _Rows.of(floors)
        return floor_sums(floors, step) if self._rows is None else self._rows.sums(step)


class _Rows(NamedTuple):
    """Tensors of floors on the host: first all thetas, then those second moments that there are."""

    constants: Column  # of each floor
    place: Column  # of each tensor's floor
    weight: Column
    address: Column
    numel: Column

    @classmethod
    def of(cls, floors: Sequence[Floor | torch.Tensor]) -> _Rows | None:
        if not floors or not hasattr(engines.pick("cpu"), "strided_sums"):
            return None
        rules = [floor for floor in floors if isinstance(floor, Floor)]
        thetas = [rule.theta for rule in rules]
        seconds = [(place, rule.second) for place, rule in enumerate(rules) if rule.second is not None]
        tensors = thetas + [second for _, second in seconds]
        if len(rules) < len(floors) or any(
            x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous() for x in tensors
        ):
            return None
        return cls(
            np.array([(rule.c0 * 31 + rule.c1) * 31 + rule.c2 for rule in rules], np.int64),
            np.array([*range(len(rules)), *(place for place, _ in seconds)], np.int64),
            np.array([1] * len(rules) + [2] * len(seconds), np.int64),
            np.array([x.data_ptr() for x in tensors], np.int64),
            np.array([x.numel() for x in tensors], np.int64),
        )

    def sums(self, step: int) -> torch.Tensor:
        count = np.minimum(self.numel, _SAMPLED)
        stride = self.numel // np.maximum(count, 1)
        room = np.where(count > 0, self.numel - (count - 1) * stride, 1)
        first = self.address + 4 * (step % room)
        totals = self.constants.copy()
        np.add.at(totals, self.place, self.weight * engines.pick("cpu").strided_sums(first, count, stride))
        return torch.from_numpy(totals)


def sample(flat: torch.Tensor, step: int) -> torch.Tensor:
    """Every n-th value; it starts elsewhere in each step, so that all of them are seen in the end. A view."""
    count = min(flat.numel(), _SAMPLED)
    stride = flat.numel() // max(count, 1)
    room = flat.numel() - (count - 1) * stride if count else 1
    return flat.as_strided((count,), (stride,), flat.storage_offset() + step % room)
