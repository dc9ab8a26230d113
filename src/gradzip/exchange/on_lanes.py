"""Chunks of messages on a device, for the host runner: values stay there, frames travel from pinned memory.

Threads, chunks and connections are those of on_host.py, and so are frames and sums. Each thread has a lane on the
device (lanes.py). It waits for the device where sizes and frames are needed, before they are sent, and once at the end
of a chunk, when DDP may have its bucket already. What comes is brought to the device while other data is under way.
"""

from __future__ import annotations

import torch

from ..errors import CodecError
from . import lanes, on_host
from .channel import Channel
from .gloo import Pending
from .program import Communicate, Decode, Recode, Step


class DeviceRun(on_host.Run):
    """One chunk in one step, on this rank's device."""

    def __init__(
        self,
        channel: Channel,
        sent: on_host.Sent,
        chunk: on_host.Chunk,
        number: int,
        ready: lanes.Mark = None,
    ) -> None:
        super().__init__(channel, sent, chunk, number)
        self._before = ready  # what has to be done before this chunk goes on
        self._last: Decode | None = None

    def lane(self) -> lanes.Lane:
        return lanes.own(self._channel.device)

    def go_on(self) -> bool:
        lane = lanes.current()
        lane.after(self._before)
        over = super().go_on()
        self._before = lane.mark()
        return over

    def _wait(self, pending: Pending) -> None:
        pending.wait(self._arrived)

    def _arrived(self, rank: int, data: torch.Tensor) -> None:
        """Brings frames to the device while others are under way. Nobody looks at them before all ranks agree."""
        buffer, bounds = self._expected[rank]
        for frame in self._unpacked(buffer, bounds, rank):
            lanes.current().land(frame.data)

    def _communicate(self, step: Communicate) -> None:
        lanes.current().wait()  # frames are in the host's memory then
        super()._communicate(step)

    def _do(self, step: Step) -> None:
        super()._do(step)
        if isinstance(step, Decode):
            self._last = step

    def _recode(self, step: Recode) -> None:
        try:
            super()._recode(step)
        except CodecError as error:  # found by the encode, which is the first to wait for what was decoded
            table = self._program.table(self._rank, self._buffer(step.source))
            raise self._blamed(step, table, self._owners(step), error) from error

    def _end(self) -> None:
        """Waits for the device, as buffers are handed back next; DDP goes on behind the means meanwhile."""
        with self.sent.lock:
            is_last = self.sent.left == 1
        if is_last:
            self.sent.enqueued()
        lanes.current().wait()
        try:
            if self.sent.coder is not None:
                self.sent.coder.check()
        except CodecError as error:
            if self._last is None:
                raise
            table = self._program.table(self._rank, self._buffer(self._last.source))
            raise self._blamed(self._last, table, self._owners(self._last), error) from error
