"""What a rank knows of the sparse frames that it made itself: their places and values, so that it decodes none of them.

On a GPU decoding a frame makes the host wait for it several times. The results are those of decoding, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..codecs.base import Sparse, wide
from ..codecs.sparse import scatter


class Sent(NamedTuple):
    """The frames of a leaf, one for each piece that has values."""

    frames: Sequence[Sparse]

    def put(self, outs: Sequence[torch.Tensor], add: bool) -> bool:
        """Decodes to `outs`; False, and nothing is done, where other ranks would convert what they decode."""
        filled = [out for out in outs if out.numel()]
        for out, (index, values) in zip(filled, self.frames):
            if (out.dtype, out.device) != (values.dtype, index.device) or not out.is_contiguous():
                return False
        for out, (index, values) in zip(filled, self.frames):
            scatter(index, values, out, add)
        return True


def take_out(lost: torch.Tensor, sent: Sparse) -> None:
    """Subtracts what was sent of values from them."""
    index = sent.places.to(lost.device)
    lost[index] = lost[index] - wide(sent.values).to(lost.device)
