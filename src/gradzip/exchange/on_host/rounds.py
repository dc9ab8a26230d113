"""Runs codecs of several rounds on the host: what a codec yields is averaged by the runner of on_host.py."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...spans import span
from ..coding import RAW, Message, Values
from ..outcome import Outcome
from ..peers.channel import Channel
from ..rounds import Rounds, averaging
from ..topology import Topology
from . import streams
from .runner import FIRST_NUMBER, HostProgram, HostRunner, Run, Sent, SentMessage


def submit_rounds(
    runner: HostRunner,
    what: str,
    start: Callable[[], Rounds],
    message: Message,
    done: Callable[[Outcome], None],
    agreed: Callable[[], None] = lambda: None,
) -> None:
    """Exchanges in several rounds, among the runner's messages; `done` and `agreed` are as for these.

    `start` is called on one of the runner's threads; `message` says which step it is.
    """
    sent = _SentRounds(message, agreed, what, start)
    runner.take(sent, done, [functools.partial(_RoundsRun, runner.channel, sent)])


@dataclass(eq=False)
class _SentRounds(Sent):
    what: str  # in words
    start: Callable[[], Rounds]


class _RoundsRun:
    """Several rounds in one step, on this rank: each is a run of the program that averages."""

    def __init__(self, channel: Channel, sent: _SentRounds, number: int) -> None:
        self.sent, self._channel, self._number = sent, channel, number
        self._rounds: Rounds | None = None
        self._average: Run | None = None
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
        sent, watch, number = self.sent, self._channel.watch, FIRST_NUMBER + self._number
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
        self._average = self._averaging(flat.view(-1), sent.outcome.collectives)
        return True

    def _averaging(self, flat: torch.Tensor, number: int) -> Run:
        program = _prepared(number, flat.numel(), flat.dtype, self._channel.topology)
        whole, what = self.sent.message, self.sent.what
        message = Message(program.program.names, flat.dtype, whole.rank, whole.world, whole.step)
        sent = SentMessage(message, self.sent.agreed, program, Values([flat]), outcome=self.sent.outcome)
        return Run(self._channel, sent, program.chunks[0], self._number, first_stage=self._stage, what=what)


@functools.lru_cache(maxsize=256)
def _prepared(number: int, values: int, dtype: torch.dtype, topology: Topology) -> HostProgram:
    return HostProgram(averaging(number, values, dtype, topology), RAW, max(values, 1))
