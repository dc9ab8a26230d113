"""Chunks of messages on a device, for the host runner: values stay there, frames travel from pinned memory.

Threads, chunks and connections are those of runner.py, and so are frames and sums. Each thread has a stream
on the device (streams.py). It waits for the device where sizes and frames are needed, before they are sent, and once at
the end of a chunk, when DDP may have its bucket already. What comes is brought to the device while other data is under
way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from ...errors import CodecError
from ..coding import Message, Values
from ..finiteness import finiteness
from ..flattening import unflatten
from ..outcome import Outcome
from ..peers.channel import Channel
from ..peers.gloo import Pending
from ..program import Communicate, Decode, Encode, Recode, Step
from . import runner as on_host
from . import streams


class DeviceRun(on_host.ChunkRun):
    """One chunk in one step, on this rank's device."""

    def __init__(
        self,
        channel: Channel,
        sent: on_host.SentMessage,
        chunk: on_host.Chunk,
        number: int,
        ready: streams.Mark = None,
        first_stage: int = 0,
        what: str = "",
    ) -> None:
        super().__init__(channel, sent, chunk, number, ready, first_stage, what)
        self._before = ready  # what has to be done before this chunk goes on
        self._decoded: Decode | None = None  # in this stage

    def stream(self) -> streams.Stream:
        return streams.own(self._channel.device)

    def go_on(self) -> bool:
        stream = streams.current()
        stream.after(self._before)
        over = super().go_on()
        stream.forget()  # what came and was only passed on: its address may be another frame's next time
        self._before = stream.mark()
        return over

    def _wait(self, pending: Pending) -> None:
        pending.wait(self._arrived)

    def _arrived(self, rank: int, data: torch.Tensor) -> None:
        """Brings frames to the device while others are under way. Nobody looks at them before all ranks agree."""
        buffer, bounds = self._expected[rank]
        for frame in self._unpacked(buffer, bounds, rank):
            streams.current().land(frame.data)

    def _communicate(self, step: Communicate) -> None:
        streams.current().wait()  # frames are in the host's memory then
        self._check_decoded()
        super()._communicate(step)

    def _do(self, step: Step) -> None:
        super()._do(step)
        if isinstance(step, Decode):
            self._decoded = step

    def _encode(self, step: Encode | Recode, values: Values) -> None:
        try:
            super()._encode(step, values)
        except CodecError as error:
            if self._decoded is None:
                raise
            self._blame(self._decoded, error)  # its frames: they are known to be bad when the device is waited for

    def _recode(self, step: Recode) -> None:
        try:
            super()._recode(step)
        except CodecError as error:  # found by the encode, which is the first to wait for what was decoded
            self._blame(step, error)

    def _end(self) -> None:
        """Waits for the device, as buffers are handed back next; DDP goes on behind the means meanwhile."""
        with self.sent.lock:
            is_last = self.sent.left == 1
        if is_last:
            self.sent.finite = finiteness(self.sent.values.tensors)  # before somebody writes to them
            self.sent.enqueued()
        streams.current().wait()
        self._check_decoded()

    def _check_decoded(self) -> None:
        """Raises what was wrong with frames that this stage has decoded, and nobody has encoded since."""
        step, self._decoded = self._decoded, None
        if step is None:
            return
        coder = self._coder(self._buffer(step.source))
        try:
            coder.check()
        except CodecError as error:
            self._blame(step, error)

    def _blame(self, step: Decode | Recode, error: CodecError) -> NoReturn:
        table = self._program.table(self._rank, self._buffer(step.source))
        raise self._blamed(step, table, self._owners(step), error) from error


class Offloaded:
    """A message on a device whose route codes on the CPU: it goes to pinned memory first, and back in the end."""

    def __init__(
        self,
        values: Values,
        message: Message,
        ready: streams.Mark,
        begin: Callable[[], None],
        done: Callable[[Outcome], None],
        enqueued: Callable[[], None],
    ) -> None:
        self._device_values, self._message, self._ready = values, message, ready
        self._begin, self._done, self._enqueued = begin, done, enqueued
        self._device = values.tensors[0].device
        if "on host" not in values.kept:
            pinned = self._device.type == "cuda"
            flat = [torch.empty(x.numel(), dtype=x.dtype, pin_memory=pinned) for x in values.tensors]
            shaped = [unflatten(x, like) for x, like in zip(flat, values.shaped)]
            values.kept["on host"] = Values(flat, shaped=shaped)
        self.values: Values = values.kept["on host"]

    def fetch(self) -> None:
        """Before the first encode, on the thread that does it."""
        self._begin()
        with streams.own(self._device) as stream:
            stream.after(self._ready)
            for source, target in zip(self._device_values.tensors, self.values.tensors):
                stream.send_back(source, target)
            stream.wait()
        floors = self._message.floors
        self._message.floors = [None if floor is None else floor.to(torch.device("cpu")) for floor in floors]

    def put_back(self, outcome: Outcome) -> None:
        if outcome.error is None:
            with streams.own(self._device) as stream:
                for source, target in zip(self.values.tensors, self._device_values.tensors):
                    target.copy_(source, non_blocking=True)
                self._enqueued()
                stream.wait()
                self._done(outcome)
                return
        self._done(outcome)
