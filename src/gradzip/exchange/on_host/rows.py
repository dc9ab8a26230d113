"""Rows of numbers that all ranks exchange beside their gradients: what they are about to do, and what came of it.

A thread of its own takes rows in the order of submission, which is the same on all ranks. Every row comes with a text
that all ranks must have alike; where they differ, all of them raise an error with the texts. Numbers travel only where
ranks differ in them: first each rank sends a digest of text and numbers, whose length all ranks know.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from ...errors import PeerError
from ..peers.channel import ROW_VERSION, Channel

_TAGS = 1 << 18  # after so many rows their tags are used again


def _nothing(rows: Sequence[torch.Tensor]) -> None:
    """That all ranks have the same text is all that was to be known."""


@dataclass(eq=False)
class Row:
    """What this rank says at one point of a step."""

    what: str  # the same on all ranks
    failed: Callable[[BaseException], None]
    numbers: Callable[[], torch.Tensor] | None = None  # may wait; as many as on the other ranks
    heard: Callable[[Sequence[torch.Tensor]], None] = _nothing  # is told every rank's numbers, and may raise
    number: int = field(default=-1, init=False)
    over: threading.Event = field(default_factory=threading.Event, init=False)  # all have been heard, or it has failed
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _waiting: list[Callable[[], None]] = field(default_factory=list, init=False)

    def then(self, tell: Callable[[], None]) -> None:
        """Calls when all have been heard, maybe at once; one after the other."""
        with self._lock:
            tell() if self.over.is_set() else self._waiting.append(tell)

    def end(self, well: bool) -> None:
        """All have been heard, or it has failed."""
        with self._lock:
            self.over.set()
            for tell in self._waiting if well else ():
                tell()
            self._waiting.clear()


class RowExchange:
    """The worker of a channel that exchanges rows."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._others = [rank for rank in range(channel.world) if rank != channel.rank]
        self._changed = threading.Condition()
        self._live: dict[Row, None] = {}
        self._queue: SimpleQueue[Row | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._count = 0
        self._error: BaseException | None = None

    def submit(self, row: Row) -> Row:
        """Takes a row; all ranks submit the same ones in the same order."""
        with self._changed:
            error = self._error
            if error is None:
                row.number, self._count = self._count, self._count + 1
                self._live[row] = None
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="gradzip-rows", daemon=True)
                    self._thread.start()
                self._queue.put(row)
        if error is not None:
            row.end(False)
            row.failed(error)
        return row

    def drain(self) -> None:
        with self._changed:
            waiting = list(self._live)
            self._changed.wait_for(lambda: not any(row in self._live for row in waiting))

    def fail(self, error: BaseException) -> None:
        with self._changed:
            first = self._error = self._error or error
            rows = list(self._live)
            self._live.clear()
            self._changed.notify_all()
        for row in rows:
            row.end(False)
            row.failed(first)

    def stop(self, patience: float) -> bool:
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience)
        return thread is None or not thread.is_alive()

    def _work(self) -> None:
        with torch.no_grad():
            while (row := self._queue.get()) is not None:
                try:
                    row.heard(self._exchanged(row))
                except BaseException as error:
                    self.fail(self._channel.explained(error))  # when others have heard of it
                    continue
                row.end(True)
                with self._changed:
                    self._live.pop(row, None)
                    self._changed.notify_all()

    def _exchanged(self, row: Row) -> list[torch.Tensor]:
        """The numbers of all ranks, once all have said the same text."""
        if self._error is not None:
            raise self._error
        numbers = torch.empty(0, dtype=torch.int64) if row.numbers is None else row.numbers()
        self._channel.watch.saw("agree", 0, row.number)
        digests = [_digest(row.what.encode()), _digest(numbers.numpy().tobytes())]
        own = torch.tensor([ROW_VERSION, *digests])
        heads = self._sent(own, 2 * (row.number % _TAGS))
        if any(not torch.equal(head[:2], own[:2]) for head in heads):
            raise self._disagreement(row)
        if all(torch.equal(head, own) for head in heads):
            return [numbers] * len(heads)
        return self._sent(numbers, 2 * (row.number % _TAGS) + 1)

    def _sent(self, own: torch.Tensor, tag: int) -> list[torch.Tensor]:
        """Every rank's, in the order of ranks."""
        rows = self._channel.gloo.send_row(own, self._others, self._others, tag)
        rows.wait()
        return [rows.received.get(rank, own) for rank in range(self._channel.world)]

    def _disagreement(self, row: Row) -> PeerError:
        ranks = list(range(self._channel.world))
        texts = self._channel.health.exchange_texts(f"text/{row.number}", row.what, ranks)
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), ranks[-1])
        return PeerError(
            f"ranks disagree. Rank 0: {texts[0]}. Rank {other}: {texts[other]}. "
            "Use the same policy, model, optimizer settings and gradzip on all ranks"
        )


def rows_of(channel: Channel) -> RowExchange:
    """The rows' worker of a channel, which ends with it."""
    for worker in channel.workers:
        if isinstance(worker, RowExchange):
            return worker
    made = RowExchange(channel)
    channel.workers.append(made)
    return made


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
