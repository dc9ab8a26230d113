"""What executor, coders and pipeline say to each other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .blobs import Blob
from .layout import Layout

Landing = Callable[[int, torch.Tensor], None]


@dataclass
class Exchange:
    """send[i] goes to member i of the group; None: nothing goes there. A rank's own part, if any, comes back as it is.

    `most[i]` is how many bytes member i will send here at the most, None if it sends nothing. What is shorter comes
    with bytes of no meaning behind it. Where `most` itself is None, sizes have to be asked for first.
    """

    where: str
    send: Sequence[torch.Tensor | None]  # bytes
    most: Sequence[int | None] | None
    number: int = 0  # of this exchange in the route, the same on all ranks: some take no part in all of them
    carried: bool = False  # all ranks take part, data is on the device and large: a carrier takes it where there is one
    landing: Landing | None = None  # may be told of each part, with its rank, as soon as it is there and all agree


@dataclass
class AllReduce:
    """torch's own sum of a tensor over all ranks: in place, or in the host's memory if it lies elsewhere."""

    tensor: torch.Tensor
    number: int = 0


Parts = list[torch.Tensor | None]
Steps = Generator[Exchange | AllReduce, Parts, None]


class Coder(Protocol):
    """What the executor needs to know of a message."""

    exact_grid: bool  # sums are coded on a grid (near mode), so they are not divided before
    dtype: torch.dtype  # of all tensors
    home: torch.device

    def load(self, layout: Layout) -> list[torch.Tensor]:
        """This rank's own values, flat, piece by piece; not to be written to."""
        ...

    def store(self, layout: Layout, mean: torch.Tensor) -> None: ...

    def targets(self, layout: Layout) -> list[torch.Tensor] | None:
        """Where the mean of each piece may be decoded to without a detour; None: nowhere."""
        ...

    def goes_plainly(self, leaf: Layout) -> None:
        """Takes note that this rank's own values of a leaf go out as they are: nothing of them is lost."""
        ...

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for that many values, until the chunk is through."""
        ...

    def bound(self, leaf: Layout) -> int:
        """How many bytes a blob of it has at the most, whatever is in the sum."""
        ...

    def encode(
        self, leaves: Sequence[Layout], values: Sequence[Sequence[torch.Tensor]], how: How, stays: int | None = None
    ) -> list[Blob]:
        """Codes the values of each piece of each leaf. Only this rank will decode leaf number `stays`."""
        ...

    def decode(
        self,
        leaves: Sequence[Layout],
        contributions: Sequence[Sequence[Blob]],
        how: How,
        outs: Sequence[Sequence[torch.Tensor]],
        add: bool,
    ) -> None:
        """The sum of contributions, in their order; added to what is there if `add`. Each has a blob for every leaf."""
        ...

    def lands(self, how: How) -> bool:
        """Whether blobs that will be decoded like that are best brought to the device as they come."""
        ...

    def hop(self, leaf: Layout, blob: Blob, values: Sequence[torch.Tensor], how: How) -> Blob:
        """Codes values + what is in the blob."""
        ...


class How(NamedTuple):
    """How a stretch is coded."""

    device: str
    number: int  # of this encode in the route: each has its own error memory
    summed: int  # ranks in the sum
    shift: int  # of the grid, for sums
    mean: bool = False  # the values are means already

    @property
    def own(self) -> bool:
        """Whether it is this rank's own gradient. Coded before, in a group of one, it is a sum like any."""
        return self.summed == 1 and self.number == 0
