"""Streams that belong to one thread each: the order in which a device works, and when memory may be used again.

Three rules keep memory safe, since torch gives memory back to the stream that allocated it, whoever still reads there:

    what is allocated on a stream is used on that stream alone, or lives until its chunk has been waited for
    what the host reads or sends, it reads after `wait`
    buffers of the host go back to their pool after `wait`

`HOST` stands for the CPU: all is done at once, and nothing is copied.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

Mark = torch.cuda.Event | None


class Stream:
    """The CPU's, where values and frames lie in the same memory."""

    on_device = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Stream:
        """From now on, what this thread does is done on this stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def after(self, mark: Mark) -> None:
        """What follows on this stream waits for a mark of another one."""

    def mark(self) -> Mark:
        """What was enqueued so far."""
        return None

    def sleep(self) -> None:
        """Returns when all that was enqueued is done. Waiting for a CUDA stream itself would keep a core busy."""

    def wait(self) -> None:
        """The same, and the tensors that were kept for it are let go."""

    def keep(self, *tensors: torch.Tensor) -> None:
        """Lets tensors live until `wait`."""

    def room(self, frame: torch.Tensor) -> torch.Tensor:
        """Where to write what `send_back` brings to that memory of the host."""
        return frame

    def send_back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begins to bring what was written to a room to the host's memory."""

    def land(self, frame: torch.Tensor) -> None:
        """Begins to bring what has come to the device, where `there` finds it."""

    def there(self, frame: torch.Tensor) -> torch.Tensor:
        """What lies in that memory of the host, on the device."""
        return frame

    def forget(self) -> None:
        """Lets go of what has landed and nobody has asked for."""

    def divisor(self, by: int) -> torch.Tensor | int:
        """What to divide by: the quotients are those of the CPU."""
        return by


class DeviceStream(Stream):
    """One on a GPU, or on what stands in for it."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._landed: dict[int, torch.Tensor] = {}  # by the address of what came
        self._divisors: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        on_gpu = self._stream is not None
        self._reached = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._entered: list[tuple[Stream, AbstractContextManager[object]]] = []

    def __enter__(self) -> Stream:
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        self._entered.append((_of_thread.current, stream))
        _of_thread.current = self
        stream.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before, stream = self._entered.pop()
        stream.__exit__(kind, error, at)
        _of_thread.current = before

    def after(self, mark: Mark) -> None:
        if mark is not None and self._stream is not None:
            self._stream.wait_event(mark)

    def mark(self) -> Mark:
        return None if self._stream is None else self._stream.record_event()

    def sleep(self) -> None:
        if self._reached is not None:
            self._reached.record(self._stream)
            self._reached.synchronize()

    def wait(self) -> None:
        self.sleep()
        self._kept.clear()

    def keep(self, *tensors: torch.Tensor) -> None:
        self._kept += tensors

    def room(self, frame: torch.Tensor) -> torch.Tensor:
        return torch.empty(frame.numel(), dtype=torch.uint8, device=self.device)

    def send_back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def land(self, frame: torch.Tensor) -> None:
        self._landed[frame.data_ptr()] = self._brought(frame)

    def there(self, frame: torch.Tensor) -> torch.Tensor:
        landed = self._landed.pop(frame.data_ptr(), None)
        return landed if landed is not None and landed.numel() == frame.numel() else self._brought(frame)

    def forget(self) -> None:
        self._landed.clear()

    def _brought(self, frame: torch.Tensor) -> torch.Tensor:
        there = torch.empty(frame.numel(), dtype=torch.uint8, device=self.device)
        return there.copy_(frame, non_blocking=True)

    def divisor(self, by: int) -> torch.Tensor | int:
        if by not in self._divisors:  # CUDA divides by a number of the host by way of its reciprocal
            self._divisors[by] = torch.tensor(float(by), device=self.device)
        return self._divisors[by]


HOST = Stream(torch.device("cpu"))


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.current: Stream = HOST
        self.own: dict[torch.device, Stream] = {}


_of_thread = _OfThread()


def current() -> Stream:
    """The stream that this thread works on."""
    return _of_thread.current


def are_needed(device: torch.device) -> bool:
    """Whether values there are coded on streams of the device."""
    return device.type == "cuda"


def make(device: torch.device) -> Stream:
    return DeviceStream(device)


def own(device: torch.device) -> Stream:
    """This thread's stream on a device."""
    if device not in _of_thread.own:
        _of_thread.own[device] = make(device)
    return _of_thread.own[device]
