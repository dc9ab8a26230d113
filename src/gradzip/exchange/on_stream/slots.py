"""Slots: how many bytes a message keeps for each frame of a codec whose frames have no fixed size.

A slot is the same on all ranks, so that a collective moves it without telling sizes. An encoder makes its levels
coarser where a frame does not fit. The first size follows from the share of noise; later ones from the largest frames
of the last steps, which all ranks learn together, two steps late. Slots grow as soon as a frame was coarser, and follow
the largest frames both ways every few steps. What is not yet applied is part of the state, so that a resumed run
changes its slots at the same steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FIRST_ROOM = 1.25  # of what Gaussian values take
REMEMBERED = 16  # steps
CHANGED = 8  # steps between two changes
ALIGN = 128  # bytes
LATE = 2  # steps until all ranks know a step's largest frames
OWN, SUM = "own", "sum"  # the hops that frames are made for
NOTCH_BITS = 0.25  # of a value: a notch makes levels 2^(1/4) coarser


class Largest(NamedTuple):
    """Of all ranks' frames in one step."""

    size: int  # bytes
    notch: int = 0


def is_due(step: int) -> bool:
    """Whether slots follow the largest frames before this step of the exchange, counted from 0."""
    return step > 0 and step % CHANGED == 0


def room(values: int) -> float:
    """Bytes of a slot over those of the largest frame so far: the fewer values, the more do frames differ."""
    return 1.01 + 3 / math.sqrt(max(values, 1))


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
    values: int  # of the largest frame
    sizes: dict[str, int]
    # Bytes that the largest frames of the last steps had, or would have had if they were no coarser than asked for.
    seen: dict[str, deque[int]] = field(default_factory=lambda: {hop: deque(maxlen=REMEMBERED) for hop in (OWN, SUM)})
    coarser: set[str] = field(default_factory=set)  # hops whose slots were too small
    steps: int = 0  # so far

    @classmethod
    def first(cls, share: float, world: int, least: int, values: int, bound: int) -> Slots:
        """Before any frame was seen; `values` are those of the largest frame."""
        sizes = {
            hop: min(aligned(bound), aligned(least + FIRST_ROOM * values * gaussian_bits(share, world, hop) / 8))
            for hop in (OWN, SUM)
        }
        return cls({OWN: least, SUM: least}, {OWN: bound, SUM: bound}, values, sizes)

    def note(self, largest: Mapping[str, Largest]) -> None:
        """The largest frames of all ranks in one step."""
        for hop, (size, notch) in largest.items():
            self.seen[hop].append(size + math.ceil(notch * NOTCH_BITS * self.values / 8))
            if notch:
                self.coarser.add(hop)

    def begin(self) -> bool:
        """Before each step; whether the sizes have changed."""
        step, changed = self.steps, False
        self.steps += 1
        due = is_due(step)
        if not due and not self.coarser:
            return False
        for hop, seen in self.seen.items():
            if not seen or not (due or hop in self.coarser):
                continue
            size = min(aligned(max(self.least[hop], room(self.values) * max(seen))), aligned(self.bound[hop]))
            if hop in self.coarser:
                size = max(size, self.sizes[hop])
            changed |= size != self.sizes[hop]
            self.sizes[hop] = size
        self.coarser.clear()
        return changed

    def state_dict(self) -> dict[str, Any]:
        return {
            "least": dict(self.least),
            "bound": dict(self.bound),
            "values": self.values,
            "sizes": dict(self.sizes),
            "seen": {hop: list(seen) for hop, seen in self.seen.items()},
            "coarser": sorted(self.coarser),
            "steps": self.steps,
        }

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Slots:
        """Slots that go on from a state."""
        least, bound = ({hop: int(state[key][hop]) for hop in (OWN, SUM)} for key in ("least", "bound"))
        slots = cls(least, bound, int(state["values"]), {})
        slots.load_state_dict(state)
        return slots

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sizes = {hop: int(state["sizes"][hop]) for hop in (OWN, SUM)}
        seen = {hop: [int(size) for size in state["seen"][hop]] for hop in (OWN, SUM)}
        for hop, size in sizes.items():  # a slot of any other size would be memory that is too small, or all there is
            fits = self.least[hop] <= size <= aligned(self.bound[hop]) and size == aligned(size)
            if not fits or min(seen[hop], default=0) < 0:
                raise ValueError(f"slots of {size} bytes for frames of {self.least[hop]} to {self.bound[hop]}")
        self.sizes, self.steps, self.coarser = sizes, int(state["steps"]), {OWN, SUM}.intersection(state["coarser"])
        for hop, past in seen.items():
            self.seen[hop] = deque(past, maxlen=REMEMBERED)
