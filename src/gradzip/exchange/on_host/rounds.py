"""Runs codecs of several rounds on the host: what a codec wants averaged goes by the runner of runner.py.

Of values of the CPU each of the runner's threads takes a stretch, up to the next exchange. Of values of a device, and
where kernels replace gradients in place, the first thread does all of it: what a codec allocates on that thread's
stream is used there alone then, however long it keeps it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...spans import span
from .. import rounds
from ..coding import RAW, Message, Values
from ..outcome import Outcome
from ..peers.channel import Channel
from ..rounds import Average, Rounds, averaging
from ..topology import Topology
from . import streams
from .runner import ChunkRun, HostProgram, HostRunner, Sent, SentMessage, WhenAgreed, at_once


def submit_rounds(
    runner: HostRunner,
    what: str,
    start: Callable[[], Rounds],
    message: Message,
    done: Callable[[Outcome], None],
    agreed: Callable[[], None] = lambda: None,
    ready: streams.Mark = None,
    when_agreed: WhenAgreed = at_once,
) -> None:
    """Exchanges in several rounds, among the runner's messages; `done` and the last three are as for these.

    `start` is called on one of the runner's threads; `message` says which step it is.
    """
    if streams.are_needed(runner.channel.device):
        work = functools.partial(rounds.run, start)
        submit_at_once(runner, what, work, message, done, agreed, ready, when_agreed)
        return
    sent = _SentRounds(message, agreed, what, start, when_agreed=when_agreed)
    runner.take(sent, done, [functools.partial(_RoundsRun, runner.channel, sent)])


def submit_at_once(
    runner: HostRunner,
    what: str,
    work: Callable[[Average], bool],
    message: Message,
    done: Callable[[Outcome], None],
    agreed: Callable[[], None] = lambda: None,
    ready: streams.Mark = None,
    when_agreed: WhenAgreed = at_once,
) -> None:
    """The same by a call: `work` is handed what averages a tensor, and returns whether the means are finite."""
    sent = _SentWork(message, agreed, what, work, ready, when_agreed=when_agreed)
    runner.take(sent, done, [functools.partial(_WorkRun, runner.channel, sent)])


@dataclass(eq=False)
class _SentRounds(Sent):
    what: str  # in words
    start: Callable[[], Rounds]


@dataclass(eq=False)
class _SentWork(Sent):
    what: str
    work: Callable[[Average], bool]
    ready: streams.Mark  # when the gradients are there


class _RoundsRun:
    """Several rounds in one step, on this rank: each is a run of the program that averages."""

    def __init__(self, channel: Channel, sent: _SentRounds, number: int) -> None:
        self.sent, self._channel, self._number = sent, channel, number
        self._rounds: Rounds | None = None
        self._average: ChunkRun | None = None
        self._stage = 0

    def stream(self) -> streams.Stream:
        return streams.HOST

    def go_on(self) -> bool:
        if self._channel.error is not None:
            raise self._channel.error
        while self._average is not None or self._call():
            assert self._average is not None
            if not self._average.go_on():
                return False
            self._average.close()
            self._stage += self._average.stages
            self._average = None
        return True

    def close(self) -> None:
        """Each average has handed back its own buffers."""

    def _call(self) -> bool:
        """Lets the codec work until it wants another average; False if it is through."""
        sent, watch, number = self.sent, self._channel.watch, self._number
        began = time.perf_counter()
        watch.saw("code", self._stage, number, sent.what)
        try:
            with span("call", sent.what):
                if self._rounds is None:
                    self._rounds = sent.start()
                flat = next(self._rounds)
        except StopIteration as end:
            sent.outcome.finite = end.value
            return False
        finally:
            watch.saw("coded", self._stage, number, sent.what)
            sent.outcome.coding += time.perf_counter() - began
        sent.outcome.collectives += 1
        self._average = _averaging(ChunkRun, self._channel, sent, sent.what, flat.view(-1), self._number, self._stage)
        return True


class _WorkRun:
    """The same by one call, from which the averages are made and waited for."""

    def __init__(self, channel: Channel, sent: _SentWork, number: int) -> None:
        self.sent, self._channel, self._number = sent, channel, number
        self._stage, self._averaged = 0, 0.0  # seconds that averages took

    def stream(self) -> streams.Stream:
        device = self._channel.device
        return streams.own(device) if streams.are_needed(device) else streams.HOST

    def go_on(self) -> bool:
        if self._channel.error is not None:
            raise self._channel.error
        sent, stream, began = self.sent, streams.current(), time.perf_counter()
        stream.after(sent.ready)
        self._saw("code")
        with span("call", sent.what):
            sent.outcome.finite = sent.work(self._average)
        stream.wait()
        self._saw("coded")
        sent.outcome.coding += time.perf_counter() - began - self._averaged
        return True

    def close(self) -> None:
        """Each average has handed back its own buffers."""

    def _average(self, flat: torch.Tensor) -> None:
        began = time.perf_counter()
        self._saw("coded")
        self.sent.outcome.collectives += 1
        run = _averaging(
            _kind(self._channel), self._channel, self.sent, self.sent.what, flat.view(-1), self._number, self._stage
        )
        while not run.go_on():
            pass
        run.close()
        self._stage += run.stages
        self._saw("code")
        self._averaged += time.perf_counter() - began

    def _saw(self, kind: str) -> None:
        self._channel.watch.saw(kind, self._stage, self._number, self.sent.what)


def _kind(channel: Channel) -> type[ChunkRun]:
    if not streams.are_needed(channel.device):
        return ChunkRun
    from .from_device import DeviceRun

    return DeviceRun


def _averaging(
    kind: type[ChunkRun], channel: Channel, whole: Sent, what: str, flat: torch.Tensor, number: int, stage: int
) -> ChunkRun:
    """The run of one round, which begins at a stage of the whole."""
    program = _prepared(whole.outcome.collectives, flat.numel(), flat.dtype, channel.topology)
    message = Message(program.program.names, flat.dtype, whole.message.rank, whole.message.world, whole.message.step)
    values, tell = Values([flat]), whole.when_agreed
    sent = SentMessage(message, whole.agreed, program, values, outcome=whole.outcome, when_agreed=tell)
    return kind(channel, sent, program.chunks[0], number, first_stage=stage, what=what)


@functools.lru_cache(maxsize=256)
def _prepared(number: int, values: int, dtype: torch.dtype, topology: Topology) -> HostProgram:
    return HostProgram(averaging(number, values, dtype, topology), RAW, max(values, 1))
