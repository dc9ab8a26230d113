"""Byte buffers that are used again: fresh memory costs more in page faults than a fast codec costs."""

from __future__ import annotations

import threading

import torch

_SMALLEST = 1 << 12
_KEPT = 128  # buffers; more than chunks in flight have


class Buffers:
    """Buffers of whole powers of two (and three quarters of them); pinned where a GPU copies to and from them."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[tuple[int, torch.Tensor]] = []  # with their sizes; the one used last is the last

    def take(self, size: int) -> torch.Tensor:
        """At least `size` bytes; `give` takes it back."""
        size = max(size, _SMALLEST)
        power = 1 << (size - 1).bit_length()
        rounded = power if size > power // 4 * 3 else power // 4 * 3
        with self._lock:
            for i in range(len(self._free) - 1, -1, -1):
                if self._free[i][0] == rounded:
                    return self._free.pop(i)[1]
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, buffers: list[torch.Tensor]) -> None:
        """Hands buffers back; nobody may look at them any more."""
        with self._lock:
            self._free += [(buffer.numel(), buffer) for buffer in buffers]
            del self._free[: max(0, len(self._free) - _KEPT)]
        buffers.clear()

    def free(self) -> None:
        """Lets go of what waits for its next use."""
        with self._lock:
            self._free.clear()

    @property
    def held(self) -> int:
        """Bytes that wait here for their next use."""
        with self._lock:
            return sum(size for size, _ in self._free)
