"""What a plan promised beside what happens, and a word when the network is no longer the one that it was made for."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 30  # steps whose medians count
SETTLING = 3  # steps before anything does
CHANGED = 1.7  # times faster or slower than it was in the first window: another network, not noise
WRONG = 2.5  # times faster or slower than the plan said. What ranks wait for each other is in it, so this is wider


class Progress:
    """Steps under one plan, on one rank. The rate is what was sent to other hosts while anything was under way."""

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._expected = expected
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._count = 0
        self._last: tuple[float, float] | None = None  # the clock and the seconds on the wire at the last step's end
        self._first_rate: float | None = None
        self._twice = False
        self._said = False

    def step(self, now: float, wire_s: float, bytes_out: int, exposed_s: float) -> str | None:
        """Takes note of a step that ended; `wire_s` counts from the beginning. Returns what is to be said, once."""
        last, self._last = self._last, (now, wire_s)
        self._count += 1
        if last is None or self._count <= SETTLING:
            return None
        under_way = wire_s - last[1]
        rate = 8 * bytes_out / under_way if under_way > 0 else 0.0
        self._steps.append({"step_s": now - last[0], "exposed_s": exposed_s, "bits_per_s": rate})
        if len(self._steps) < WINDOW or (self._count - SETTLING) % WINDOW or self._said:
            return None
        return self._judged(self._median("bits_per_s"))

    def _judged(self, rate: float) -> str | None:
        """Two windows in a row must say the same."""
        if self._first_rate is None:
            self._first_rate = rate
        planned = self._expected.get("bits_per_s", 0.0)
        off = [(self._first_rate, CHANGED, "was at first"), (planned, WRONG, "was planned for")]
        found = next((o for o in off if o[0] and rate and not 1 / o[1] < rate / o[0] < o[1]), None)
        twice, self._twice = self._twice, found is not None
        if found is None or not twice:
            return None
        self._said = True
        return (
            f"the network carries {rate / 1e6:.0f} Mbit/s while gradients are under way, and {found[0] / 1e6:.0f} "
            f"{found[2]}: plan again with `gradzip profile` and `gradzip plan`, or attach with 'auto'"
        )

    def compared(self) -> dict[str, Any]:
        """By name: what the plan said and the median of the last steps, of what both know."""
        if not self._steps:
            return {}
        return {
            name: {"predicted": self._expected[name], "measured": self._median(name)}
            for name in self._steps[0]
            if name in self._expected
        }

    def _median(self, name: str) -> float:
        return statistics.median(step[name] for step in self._steps)
