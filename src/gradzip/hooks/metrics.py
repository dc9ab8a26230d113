"""What `Handle.log` writes: the means over the steps since it last wrote, as plain numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..errors import Unsupported

PREFIX = "gradzip/"


class SummaryWriter(Protocol):
    """TensorBoard's, or what looks like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


Numbers = Mapping[str, float]
Writer = SummaryWriter | Callable[[dict[str, float], int], Any]


class Metrics:
    """Called once a step; every so many steps it hands numbers to a writer."""

    def __init__(self, writer: Writer, every: int) -> None:
        if every < 1:
            raise Unsupported(f"log(every={every}): write every 1 or more steps")
        self._write = _writing(writer)
        self._every = every
        self._last: tuple[float, Mapping[str, Any]] | None = None
        self._steps = 0

    def step(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """At the beginning of a backward pass. `stats` is asked only where something is to be written."""
        self._steps += 1
        if self._last is not None and self._steps <= self._every:
            return
        now, seen = time.perf_counter(), stats()
        if self._last is not None:
            began, before = self._last
            self._write(_means(before, seen, now - began), seen["steps"])
        self._last, self._steps = (now, seen), 1


def _writing(writer: Writer) -> Callable[[dict[str, float], int], Any]:
    add_scalar = getattr(writer, "add_scalar", None)
    if add_scalar is None:
        if not callable(writer):
            raise Unsupported(
                f"log: {type(writer).__name__} has no add_scalar and cannot be called; "
                "give TensorBoard's SummaryWriter or a function of (numbers, step)"
            )
        return writer

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            add_scalar(name, value, step)

    return write


def _means(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Per step, on this rank. `share/...` says how large a part of all values goes by each option."""
    steps = now["steps_here"] - before["steps_here"]
    sent, raw, coding, waiting, exposed = (
        now[key] - before[key]
        for key in ("bytes_sent", "bytes_raw", "coding_seconds", "waiting_seconds", "exposed_seconds")
    )
    values: Counter[str] = Counter()
    for tensor in now["tensors"].values():
        values[tensor["option"]] += tensor["values"]
    numbers = {
        "step_seconds": seconds / steps,
        "bytes_sent": sent / steps,
        "bytes_raw": raw / steps,
        "ratio": raw / sent if sent else 1.0,
        "coding_seconds": coding / steps,
        "waiting_seconds": waiting / steps,
        "exposed_seconds": exposed / steps,
        "memory_bytes": float(now["memory"]),
    } | {f"share/{option}": count / values.total() for option, count in values.items()}
    return {PREFIX + name: value for name, value in numbers.items()}
