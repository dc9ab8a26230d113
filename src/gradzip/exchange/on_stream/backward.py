"""One backward pass on the stream runner: its buckets are enqueued, and everything else is learnt two steps later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ...spans import span
from ..gradients import Bucket, Future, Late, Named
from ..outcome import Outcome
from ..peers.channel import Channel
from ..way import Way
from .factors import FactorMessage
from .runner import StreamRunner


class StreamBackward:
    """`take` is called on the thread of backward; DDP gets its futures at once, and its stream waits for them."""

    plain = False
    over = None  # nothing is left to wait for when the last bucket has been taken

    def __init__(
        self,
        ways: Mapping[str, Way],
        channel: Channel,
        runner: StreamRunner,
        on_end: Callable[[StreamBackward], None],
        late: Late | None = None,
        observe: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        """`late`: where gradients wait for the last bucket, the messages of those. `observe` wants to see the means."""
        self._ways, self._channel, self._runner, self._on_end = ways, channel, runner, on_end
        self._neighbours = len(channel.groups["intra"].ranks) - 1 if "intra" in channel.groups else 0
        self._late, self._waiting = late, list[Bucket]()
        self._observe, self.results = observe, Named()
        self.parts: dict[str, Outcome] = {}  # by codec and route
        self.raw_bytes = 0

    def take_sparse(self, gradient: torch.Tensor, group: dist.ProcessGroup, last: bool) -> Future:
        """A bucket of one sparse gradient: torch averages it, as DDP does by itself."""
        work = dist.all_reduce(gradient.div_(self._channel.world), group=group, async_op=True)
        if last:
            drafts = self._drafts()
            self._runner.end([message for _, message in drafts])
            self._count_factors(drafts)
            self._on_end(self)
        averaged: Future = work.get_future().then(lambda future: future.value()[0])
        return averaged

    def take_buffer(self, buffer: torch.Tensor, last: bool) -> Future | None:
        return None  # single gradients have to be known

    def take(self, buffer: torch.Tensor, named: Named, last: bool) -> Future:
        """Enqueues a bucket; the future is its averaged buffer."""
        named = named if isinstance(named, Bucket) else Bucket(named)
        streamed, waits = named.streamed(self._ways, self._late is not None)
        if waits:
            self._waiting.append(named)
        if self._observe is not None:
            self.results += named
        drafts = self._drafts() if last else []
        began = time.perf_counter()
        with span("enqueue", f"a bucket from {named[0][0]!r} on" if named else "an empty bucket"):
            future = self._runner.take(buffer, streamed, last, waits, [message for _, message in drafts])
        coding = (time.perf_counter() - began) / max(len(streamed), 1)
        for each in streamed:
            sent, found = each.bytes_sent, self.parts.setdefault(each.kind, Outcome())
            found.bytes_sent += sent
            found.bytes_out += self._out(sent)
            found.collectives += 1
            found.coding += coding
        self.raw_bytes += buffer.nbytes
        if last:
            self._count_factors(drafts)
            self._on_end(self)
        return future

    def show(self, norms: torch.Tensor) -> None:
        """Shows all means, or zeros where one of them is not finite: when all of the pass is enqueued."""
        assert self._observe is not None
        finite = (norms < torch.inf).all()
        for name, mean in self.results:
            self._observe(name, torch.where(finite, mean, 0))

    def _drafts(self) -> list[tuple[str, FactorMessage]]:
        """What goes behind the last bucket, by codec and route."""
        if self._late is None or not self._waiting:
            return []
        channel = self._channel
        drafts = self._late.drafts(self._waiting, self._ways, channel.rank, channel.world)
        return [(draft.kind, draft.on_stream(channel.topology)) for draft in drafts]

    def _count_factors(self, messages: list[tuple[str, FactorMessage]]) -> None:
        for kind, message in messages:
            found = self.parts.setdefault(kind, Outcome())
            found.bytes_sent += message.bytes_sent
            found.bytes_out += self._out(message.bytes_sent)
            found.collectives += message.collectives

    def _out(self, sent: int) -> int:
        """Bytes of these that leave the host."""
        peers = self._channel.world - 1
        return sent * (peers - self._neighbours) // peers if peers else 0
