"""The mean of one flat tensor over all ranks: what the executor makes of the route `ar.flat`, for who asks for several.

The same exchanges and the same bits, without all that other routes need.
"""

from __future__ import annotations

import torch

from ..exchange.topology import Members
from .held import present
from .layout import parts
from .terms import Exchange, Steps

WHERE = "flat"


def averaging(flat: torch.Tensor, group: Members, carried: bool = False) -> Steps:
    """Replaces a contiguous tensor in the type of sums; each rank adds up its part in the order of ranks.

    `carried`: it is large enough for a carrier, where there is one.
    """
    kind, item = flat.dtype, flat.dtype.itemsize
    sizes = [(stop - start) * item for start, stop in parts(0, flat.numel(), group.size)]
    stretches = flat.view(torch.uint8).split_with_sizes(sizes)
    mine = stretches[group.rank]
    received = yield Exchange(WHERE, stretches, [len(mine)] * group.size, 0, carried)
    own = mine.view(kind)
    _add_up(own, [present(part).view(kind) for part in received], group.rank)
    own.div_(group.size)
    received = yield Exchange(WHERE, [mine] * group.size, sizes, 1, carried)
    for number, part in enumerate(received):
        if number != group.rank:
            stretches[number].copy_(present(part))


def _add_up(own: torch.Tensor, values: list[torch.Tensor], rank: int) -> None:
    """The sum of all values in the order of ranks, in the place of this one's: a + b is b + a to the bit."""
    if rank > 1:
        total = values[0].to(own.device, copy=True)
        for x in values[1:rank]:
            total += x.to(own.device)
        own += total
    for number, x in enumerate(values):
        if number > rank or (number == 0 and rank == 1):
            own += x.to(own.device)
