"""Slots: how many bytes a message keeps for each frame of a codec whose frames have no fixed size.

A slot is the same on all ranks, so that a collective moves it without telling sizes. An encoder makes its levels
coarser where a frame does not fit. The first size follows from the share of noise; later ones from the largest frames
of the last steps, which all ranks learn together, two steps late. What is not yet applied is part of the state, so
that a resumed run changes its slots at the same steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_ROOM = 1.25  # of what Gaussian values take
ROOM = 1.02  # of the largest frame
REMEMBERED = 50  # steps
ALIGN = 128  # bytes
LATE = 2  # steps until all ranks know a step's largest frames
OWN, SUM = "own", "sum"  # the hops that frames are made for


def is_due(step: int) -> bool:
    """Whether slots change before this step of the exchange, counted from 0."""
    return step in (8, 32, 128) or (step > 0 and step % 256 == 0)


def gaussian_bits(share: float, world: int, hop: str) -> float:
    """Bits a value that Gaussian gradients take.

    Sums are counted as if all ranks had the same gradients: their level follows from single ranks, and that is the
    finest that it can be in comparison with the values.
    """
    level = math.sqrt(share * 6 * world / (world + 1)) if hop == OWN else math.sqrt(3 * share / world)
    deviation = 1 / level
    return 0.5 * math.log2(2 * math.pi * math.e * (deviation**2 + 1 / 12))


def aligned(size: float) -> int:
    return math.ceil(size / ALIGN) * ALIGN


@dataclass
class Slots:
    """The two slots of a message: for frames of own gradients, and of sums."""

    least: Mapping[str, int]  # bytes of a frame before its blocks, the largest of all owners
    bound: Mapping[str, int]  # bytes that no frame has more of
    sizes: dict[str, int]
    seen: dict[str, deque[int]] = field(default_factory=lambda: {hop: deque(maxlen=REMEMBERED) for hop in (OWN, SUM)})
    steps: int = 0  # so far

    @classmethod
    def first(cls, share: float, world: int, least: int, values: int, bound: int) -> Slots:
        """Before any frame was seen; `values` are those of the largest frame."""
        sizes = {
            hop: min(aligned(bound), aligned(least + FIRST_ROOM * values * gaussian_bits(share, world, hop) / 8))
            for hop in (OWN, SUM)
        }
        return cls({OWN: least, SUM: least}, {OWN: bound, SUM: bound}, sizes)

    def note(self, largest: Mapping[str, int]) -> None:
        """The largest frames of all ranks in one step."""
        for hop, size in largest.items():
            self.seen[hop].append(size)

    def begin(self) -> bool:
        """Before each step; whether the sizes have changed."""
        step, before = self.steps, dict(self.sizes)
        self.steps += 1
        if is_due(step):
            for hop, seen in self.seen.items():
                if seen:
                    size = max(self.least[hop], ROOM * max(seen))
                    self.sizes[hop] = min(aligned(size), aligned(self.bound[hop]))
        return self.sizes != before

    def state_dict(self) -> dict[str, Any]:
        return {
            "least": dict(self.least),
            "bound": dict(self.bound),
            "sizes": dict(self.sizes),
            "seen": {hop: list(seen) for hop, seen in self.seen.items()},
            "steps": self.steps,
        }

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Slots:
        """Slots that go on from a state."""
        least, bound = ({hop: int(state[key][hop]) for hop in (OWN, SUM)} for key in ("least", "bound"))
        slots = cls(least, bound, {})
        slots.load_state_dict(state)
        return slots

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sizes, self.steps = dict(state["sizes"]), int(state["steps"])
        for hop, seen in state["seen"].items():
            self.seen[hop] = deque(seen, maxlen=REMEMBERED)
