"""Byte buffers that are used again: fresh memory costs more in page faults than a fast codec costs."""

from __future__ import annotations

import threading

import torch

_SMALLEST = 1 << 12
_KEPT = 128  # buffers; more than a pipeline has in flight


class Buffers:
    """Buffers of whole powers of two (and three quarters of them); pinned where a GPU copies to and from them.

    Those on a GPU belong to no stream: what is given back must be done with.
    """

    def __init__(self, pinned: bool = False, device: torch.device | None = None) -> None:
        self._pinned, self._device = pinned, device
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
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
        with torch.cuda.stream(self._stream):
            fresh = torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned, device=self._device)
        if self._stream is not None:
            # Torch hands out what kernels of the same stream still use. Others will use this one: so it comes from a
            # stream on which there are none, and of which the rest, should it be shared with somebody, is through.
            self._stream.synchronize()
        return fresh

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
