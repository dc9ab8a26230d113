"""What `noise` takes and makes in an exchange: shapes of gradients, and frames of one hop or the other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from ...codecs import Codec
from ...codecs.noise import LEAST, MOST, Noise
from ...sensitivity.shape import SecondMoments

ROUNDS = 3


class Shapes(SecondMoments):
    """The shapes of gradients as they will be when second moments have seen enough steps, and what they cost."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__([optimizer], names)
        times = []
        for _ in range(1 + ROUNDS):
            begun = time.thread_time()
            self.renew()
            times.append(time.thread_time() - begun)
        self.seconds_per_value = statistics.median(times[1:]) / max(1, sum(p.numel() for p in names))

    def _has_settled(self, parameter: torch.Tensor, name: str, second: torch.Tensor, state: Mapping[str, Any]) -> bool:
        return True


def as_sent(codec: Codec, own: torch.Tensor, mean: torch.Tensor, world: int) -> tuple[Codec, Codec]:
    """Codecs that make of a gradient, and of the mean of all ranks, frames as large as the exchange's.

    The exchange splits the noise between both, and the level of sums follows from those of all ranks: their noise is a
    share of the mean square of the ranks' gradients, not of their mean's.
    """
    if not isinstance(codec, Noise):
        return codec, codec
    share = float(codec.share)
    squares, of_mean = (float(x.double().square().sum()) for x in (own, mean))
    more = (world + 1) / (2 * world * world) * squares / of_mean if 0 < of_mean < math.inf else 1.0
    return (Noise(max(LEAST, share / 2)), Noise(min(MOST, max(LEAST, share / 2 * more))))
