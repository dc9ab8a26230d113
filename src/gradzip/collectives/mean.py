"""The mean of one flat tensor over all ranks: what the executor makes of the route `ar.flat`, for who asks for several.

The same exchanges and the same bits, without all that other routes need.
"""

from __future__ import annotations

import torch

from .held import present
from .layout import parts
from .terms import Exchange, Members, Steps

WHERE = "flat"


def averaging(flat: torch.Tensor, group: Members, carried: bool = False) -> Steps:
    """Replaces a contiguous tensor in the type of sums; each rank adds up its part in the order of ranks.

    `carried`: it is large enough for a carrier, where there is one.
    """
    kind, home = flat.dtype, flat.device
    stretches = flat.split_with_sizes([stop - start for start, stop in parts(0, flat.numel(), group.size)])
    sizes = [stretch.numel() * kind.itemsize for stretch in stretches]
    own = [sizes[group.rank]] * group.size
    received = yield Exchange(WHERE, [stretch.view(torch.uint8) for stretch in stretches], own, 0, carried)
    total = present(received[0]).view(kind).to(home, copy=True)
    for part in received[1:]:
        total += present(part).view(kind).to(home)
    total.div_(group.size)
    received = yield Exchange(WHERE, [total.view(torch.uint8)] * group.size, sizes, 1, carried)
    for stretch, part in zip(stretches, received):
        stretch.copy_(present(part).view(kind))
