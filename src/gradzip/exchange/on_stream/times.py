"""When the work of a step ran on its streams, by the GPU's own clock.

Events lie around the stages of each message, and are read when the step is long over, so that the host waits for
nothing. Where nobody asks for times none are recorded.

    encode      on the first stream
    all-to-all  from the end of `encode`, or of the collective before, until its data is there; of all messages that
                are exchanged together
    add         on the second stream
    all-gather  of all messages again
    decode
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..program import Program
from ..recording import Moment

ENCODE, ADD, DECODE, FACTORS = "encode", "add", "decode", "factors"  # tracks
ALL_TO_ALL, ALL_GATHER, ALL_REDUCE = "all-to-all", "all-gather", "all-reduce"
_ON_THE_WIRE = (ALL_TO_ALL, ALL_GATHER, ALL_REDUCE)


class Waits(Protocol):
    """Collectives that are under way: the current stream waits for them."""

    def wait(self) -> object: ...


class StepTimes(NamedTuple):
    """Of one step, in seconds."""

    step: int
    exposed: float  # for which the stream of backward waits for the means of the last bucket
    ended: float  # since the first step that was timed ended
    wire: float  # in which at least one collective was under way, in all steps whose stages were timed
    # Since forward ended: forward, backward, what is exposed, and all stages; empty where nobody traces the step.
    moments: list[Moment]


class Stages:
    """Those of one message. Each ends where the next one begins, on whichever stream is the current one."""

    def __init__(self, mark: Callable[[], Any], landed: Callable[[Waits], Any], spans: list[_Span], name: str) -> None:
        self._mark, self._landed, self._spans, self._name = mark, landed, spans, name
        self._from: Any = None

    def start(self) -> None:
        self._from = self._mark()

    def stop(self, track: str) -> None:
        """What ran on the current stream since the last call."""
        now = self._mark()
        self._spans.append(_Span(track, self._name, self._from, now))
        self._from = now

    def carried(self, track: str, work: Waits) -> None:
        """A collective that was enqueued behind the last stage."""
        self._spans.append(_Span(track, self._name, self._from, self._landed(work)))


class _Unseen(Stages):
    """Those of a message that nobody wants to know of."""

    def __init__(self) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self, track: str) -> None:
        pass

    def carried(self, track: str, work: Waits) -> None:
        pass


_UNSEEN = _Unseen()


class _Span(NamedTuple):
    track: str
    name: str
    begin: Any  # events
    end: Any


class _Step:
    def __init__(self, number: int, forward: tuple[Any, Any] | None, has_stages: bool) -> None:
        self.number, self.forward, self.has_stages = number, forward, has_stages
        self.arrived: Any = None
        self.done: Any = None
        self.spans: list[_Span] = []
        self.events: list[Any] = []


class Times:
    """Of one runner."""

    def __init__(self, device: torch.device, enter: Callable[[Any], None], stream: Any) -> None:
        """`enter` makes a stream the current one; on `stream` nothing else runs."""
        self._device, self._module, self._enter, self._stream = device, torch.get_device_module(device), enter, stream
        # What is asked for from the next step on: exposed time, and that of stages.
        self.wants_exposed = self.wants_stages = False
        self._to_trace = 0  # steps
        self._forward: tuple[Any, Any] | None = None
        self._forward_begun: Any = None
        self._now: _Step | None = None
        self._over: deque[_Step] = deque()
        self._free: list[Any] = []
        self._reading = threading.Lock()  # stats() may be asked for on any thread
        self._last_done: Any = None
        self._ended = self._wire = 0.0

    # -- what is asked for ----------------------------------------------------------------------------------------

    def trace(self, steps: int) -> None:
        """Whoever asks calls `forward_begins` and `forward_ends`."""
        self._to_trace, self._forward, self._forward_begun = steps, None, None

    def forward_begins(self) -> None:
        if self._to_trace:
            self._forward_begun = self._mark()

    def forward_ends(self) -> None:
        if self._forward_begun is not None:
            self._forward = self._forward_begun, self._mark()

    # -- a step, on the thread of backward ------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        forward, self._forward, self._forward_begun = self._forward, None, None
        if forward is not None:
            self._to_trace -= 1
        has_stages = self.wants_stages or forward is not None
        self._now = _Step(number, forward, has_stages) if self.wants_exposed or has_stages else None

    def arrived(self) -> None:
        """The gradients of the last bucket are there, on the current stream."""
        if self._now is not None:
            self._now.arrived = self._mark()

    def of(self, *programs: Program) -> Stages:
        """Of a message, or of several that go together."""
        if self._now is None or not self._now.has_stages or not programs:
            return _UNSEEN
        codecs, names = {each.codec: None for each in programs}, [name for each in programs for name in each.names]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return Stages(self._mark, self._landed, self._now.spans, f"{', '.join(codecs)} of {names[0]!r}{more}")

    def done(self) -> None:
        """All means are there, on the current stream."""
        if self._now is not None and self._now.arrived is not None:
            self._now.done = self._mark()
            self._over.append(self._now)
        self._now = None

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else _event(self._device)
        event.record(self._module.current_stream(self._device))
        if self._now is not None:
            self._now.events.append(event)
        return event

    def _landed(self, work: Waits) -> Any:
        before = self._module.current_stream(self._device)
        self._enter(self._stream)
        try:
            work.wait()
            return self._mark()
        finally:
            self._enter(before)

    def free(self) -> None:
        """Lets go of all events, when all has been read."""
        self._free, self._now, self._last_done = [], None, None
        self._to_trace, self._forward, self._forward_begun = 0, None, None

    # -- afterwards -----------------------------------------------------------------------------------------------

    def read(self, last: int | None = None) -> list[StepTimes]:
        """Of the steps up to this one, as far as they are through. None: of all, for which this waits."""
        found = []
        with self._reading:
            while self._over and (last is None or self._over[0].number <= last):
                events = self._over[0].events
                if last is None:
                    for event in events:
                        event.synchronize()
                elif not all(event.query() for event in events):
                    break
                found.append(self._told(self._over.popleft()))
        return found

    def _told(self, step: _Step) -> StepTimes:
        exposed = max(0.0, _seconds(step.arrived, step.done))
        if self._last_done is not None:
            self._ended += _seconds(self._last_done, step.done)
            self._free.append(self._last_done)
        self._last_done = step.done
        zero = step.arrived if step.forward is None else step.forward[1]
        moments = [
            Moment(track, name, _seconds(zero, begin), _seconds(zero, end)) for track, name, begin, end in step.spans
        ]
        moments = _one_after_the_other(moments)
        self._wire += sum(moment.end - moment.begin for moment in moments if moment.track in _ON_THE_WIRE)
        if step.forward is not None:
            arrived, done = _seconds(zero, step.arrived), _seconds(zero, step.done)
            moments = [
                Moment("compute", "forward", -_seconds(*step.forward), 0.0),
                Moment("compute", "backward", 0.0, arrived),
                Moment("exposed", "exchange that backward does not hide", arrived, max(arrived, done)),
                *moments,
            ]
        else:
            moments = []
        self._free += [event for event in step.events if event is not step.done]
        self._free += step.forward or ()
        return StepTimes(step.number, exposed, self._ended, self._wire, moments)


def _one_after_the_other(moments: list[Moment]) -> list[Moment]:
    """A group carries one collective at a time, in the order in which they were enqueued: later ones wait."""
    found, free = list[Moment](), -float("inf")
    for moment in sorted(moments, key=lambda moment: moment.end):
        if moment.track in _ON_THE_WIRE:
            moment = moment._replace(begin=min(max(moment.begin, free), moment.end))
            free = moment.end
        found.append(moment)
    return found


class _OnHost:
    """In the place of torch.cuda.Event: the CPU is done with what it was given."""

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _OnHost) -> float:
        return 1e3 * (end._at - self._at)


def _event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _OnHost()  # type: ignore[no-untyped-call]


def _seconds(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3
