"""What the codec noise adds to gradients: bits a value and the share of the noise, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..exchange.outcome import Outcome


class NoiseShare:
    """Keeps count of the steps of one model. The share is the noise that is to be expected, over the mean's squares."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned = False
        self._steps, self._total, self._worst = 0, 0.0, 0.0
        self._bytes = self._values = self._coarser = 0

    def step(self, totals: Outcome, sent: int) -> None:
        """Takes note of a step in which whole messages had `sent` bytes."""
        if not totals.values:
            return
        self._bytes, self._values = self._bytes + sent, self._values + totals.values
        self._coarser += totals.coarser
        if not (totals.squares > 0 and math.isfinite(totals.squares) and math.isfinite(totals.noise)):
            return
        share, budget = totals.noise / totals.squares, totals.allowed / totals.squares
        self._steps += 1
        self._total += share
        self._worst = max(self._worst, share)
        if share > 2 * budget and not self._warned:
            self._warned = True
            self._warn(
                f"noise is {share:.1%} of the averaged gradient in a step, more than twice its budget of {budget:.1%}: "
                "ranks' gradients cancel each other. If many steps are like that, take a smaller share"
            )

    def stats(self, world: int) -> dict[str, Any]:
        """`bits` a value, of all that was sent; `share` of the noise on average, and in the `worst` step."""
        if not self._values:
            return {}
        sends = 2 * (world - 1) / world  # a value leaves each rank so often: once as its own, once in a sum
        return {
            "bits": 8 * self._bytes / (self._values * sends) if sends else 0.0,
            "share": self._total / self._steps if self._steps else 0.0,
            "worst": self._worst,
            "coarser": self._coarser,
        }
