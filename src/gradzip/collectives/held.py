"""What a rank holds of a chunk in the middle of a route."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .blobs import Blob, pack, unpack_numbered
from .layout import Layout, Piece, joined, subviews, views
from .terms import Coder, How


@dataclass
class Coded:
    """Contributions that together are the sum over a layout; each is one blob per leaf."""

    leaves: list[Layout]
    contributions: list[list[Blob]]
    how: How


class Split(NamedTuple):
    """A first step whose second one is still to come."""

    group: str
    layout: Layout
    gathered: bool  # one rank holds it all, the others wait


@dataclass
class Held:
    layout: Layout
    values: torch.Tensor | list[torch.Tensor] | None = None  # plain ones, or those of each piece; None: coded, or waits
    coded: Coded | None = None
    summed: int = 1  # ranks in the sum
    mean: bool = False  # divided by the number of ranks already
    shift: int | None = None  # of the grid that values lie on; None: never coded
    own_memory: bool = False  # plain values may be written to
    stored: bool = False  # decoded straight to where the result belongs
    encodes: int = 0
    exchange: int = 0  # number of the next one
    splits: list[Split] = field(default_factory=list)

    @property
    def plain(self) -> torch.Tensor:
        """The plain values in one tensor."""
        assert self.values is not None
        if not isinstance(self.values, torch.Tensor):
            self.values = joined(self.values)
        return self.values

    def plain_parts(self, leaf: Layout) -> list[torch.Tensor]:
        """The plain values of each piece of a leaf; views."""
        assert self.values is not None
        if isinstance(self.values, torch.Tensor):
            return views(self.values, self.layout, leaf)
        return subviews(self.values, self.layout, leaf)

    @property
    def kind(self) -> torch.dtype:
        assert self.values is not None
        return self.values.dtype if isinstance(self.values, torch.Tensor) else self.values[0].dtype

    @property
    def waits(self) -> bool:
        return self.values is None and self.coded is None


# --- What a broadcast hands on ---------------------------------------------------------------------------------------

_PLAIN_KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def describe(held: Held) -> torch.Tensor:
    """What a broadcast hands on: plain values or coded ones, and what is known of them."""
    if held.values is not None:
        kind = _PLAIN_KINDS.index(held.kind)
        return pack([[Blob(as_bytes(held.plain))]], 0, held.mean, kind)
    coded = coded_of(held)
    layout = [x for leaf in coded.leaves for piece in leaf for x in piece]
    return pack(coded.contributions, 1, *coded.how[1:], *layout)


def understand(held: Held, message: torch.Tensor, source: int, coder: Coder) -> None:
    contributions, (is_coded, *rest) = unpack_numbered(message, source)
    if not is_coded:
        values, (mean, kind) = contributions[0][0].data, rest
        held.values, held.mean = values.clone().view(_PLAIN_KINDS[kind]).to(coder.home), bool(mean)
        return
    number, summed, shift, mean, *layout = rest
    pieces = [Piece(*layout[i : i + 3]) for i in range(0, len(layout), 3)]
    each = len(held.layout)
    leaves = [tuple(pieces[i : i + each]) for i in range(0, len(pieces), each)]
    held.coded = Coded(leaves, contributions, How("", number, summed, shift, bool(mean)))
    held.shift = shift


def present(part: torch.Tensor | None) -> torch.Tensor:
    assert part is not None
    return part


def coded_of(held: Held) -> Coded:
    assert held.coded is not None
    return held.coded


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
