"""Stands in for a GPU beside Gloo: emulated kernels, and streams on which all is as late as it may be.

What goes to the host's memory arrives when a stream is waited for, what leaves it must not change until then, and
buffers that were handed back hold something else at once.
"""

from __future__ import annotations

from typing import Any

import emulated
import torch

from gradzip import engines
from gradzip.engines.cuda import launch, pieces
from gradzip.exchange.on_host import streams
from gradzip.exchange.peers.buffers import Buffers

_SPOILT = 0xA5
_copy = pieces.copy
overwritten: list[str] = []  # what was read too late on a real device
made: list[LateStream] = []


class LateStream(streams.DeviceStream):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._late: list[Any] = []
        self._reads: list[tuple[torch.Tensor, torch.Tensor]] = []
        made.append(self)

    def holds(self) -> int:
        """How many tensors of chunks."""
        return len(self._landed) + len(self._kept)

    def send_back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.fill_(_SPOILT)
        self._late.append(lambda: target.copy_(source))

    def copy(self, *arguments: Any) -> None:
        self._late.append(lambda: _copy(*arguments))

    def _brought(self, frame: torch.Tensor) -> torch.Tensor:
        self._reads.append((frame, frame.clone()))
        return super()._brought(frame)

    def wait(self) -> None:
        for copy in self._late:
            copy()
        for frame, before in self._reads:
            if not torch.equal(frame, before):
                overwritten.append(f"{frame.numel()} bytes")
        self._late, self._reads = [], []
        super().wait()


def _copied(*arguments: Any) -> None:
    stream = streams.current()
    assert isinstance(stream, LateStream)
    stream.copy(*arguments)


def install() -> None:
    """From now on, the host runner takes values on the CPU for those on a GPU."""
    emulated.install()
    launch.load_once.cache_clear()
    engines._override = "cuda"
    streams.are_needed = lambda device: True
    streams.make = LateStream
    pieces.copy = _copied
    give = Buffers.give

    def spoil(self: Buffers, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            buffer.fill_(_SPOILT)
        give(self, buffers)

    Buffers.give = spoil  # type: ignore[method-assign]
