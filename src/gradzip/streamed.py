"""One backward pass on the stream runner: its buckets are enqueued, and everything else is learnt two steps later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from .collectives import PipelineChannel
from .exchange.on_stream import StreamRunner
from .exchange.outcome import Outcome
from .gradients import Bucket, Future, Named, Way


class StreamedBackward:
    """`take` is called on the thread of backward; DDP gets its futures at once, and its stream waits for them."""

    plain = False
    over = None  # nothing is left to wait for when the last bucket has been taken

    def __init__(
        self,
        ways: Mapping[str, Way],
        channel: PipelineChannel,
        runner: StreamRunner,
        on_end: Callable[[StreamedBackward], None],
    ) -> None:
        self._ways, self._channel, self._runner, self._on_end = ways, channel, runner, on_end
        self._neighbours = len(channel.groups["intra"].ranks) - 1 if "intra" in channel.groups else 0
        self.parts: dict[str, Outcome] = {}  # by codec and route
        self.raw_bytes = 0

    def take_sparse(self, gradient: torch.Tensor, group: dist.ProcessGroup, last: bool) -> Future:
        """A bucket of one sparse gradient: torch averages it, as DDP does by itself."""
        work = dist.all_reduce(gradient.div_(self._channel.world), group=group, async_op=True)
        if last:
            self._runner.end()
            self._on_end(self)
        averaged: Future = work.get_future().then(lambda future: future.value()[0])
        return averaged

    def take_whole(self, buffer: torch.Tensor, last: bool) -> Future | None:
        return None  # single gradients have to be known

    def take(self, buffer: torch.Tensor, named: Named, last: bool) -> Future:
        """Enqueues a bucket; the future is its averaged buffer."""
        named = named if isinstance(named, Bucket) else Bucket(named)
        streamed = named.streamed(self._ways)
        began = time.perf_counter()
        future = self._runner.take(buffer, streamed, last)
        coding = (time.perf_counter() - began) / max(len(streamed), 1)
        peers = self._channel.world - 1
        for each in streamed:
            sent, found = each.bytes_sent, self.parts.setdefault(each.kind, Outcome())
            found.bytes_sent += sent
            found.bytes_out += sent * (peers - self._neighbours) // peers if peers else 0
            found.collectives += 1
            found.coding += coding
        self.raw_bytes += buffer.nbytes
        if last:
            self._on_end(self)
        return future
