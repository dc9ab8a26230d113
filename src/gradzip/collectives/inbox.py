"""Buffers for what other ranks send, some of them before it is their turn.

Gloo sends nothing before the receiver has said that it waits, and the receiver says so behind the data that it sends in
the other direction on the same connection. Were it said when an exchange begins, the wire would idle before each one.
So where it is known what will come, buffers wait for it from early on. Whatever comes fits: nobody sends before all
ranks agree on what is done.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .buffers import Buffers
from .gloo import Gloo, Pending
from .terms import Exchange, Members, Parts


class Arriving(NamedTuple):
    """What comes from the members of a group in an exchange: `parts` are complete after `pending`."""

    most: Sequence[int | None]
    pending: Pending
    parts: Parts


class Inbox:
    """That of one job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arriving: dict[int, Arriving] = {}  # by number of the exchange, for those that have not begun
        self.begun: set[int] = set()
        self.ahead = 0  # bytes of buffers that waited early
        self.closed = False


class Inboxes:
    def __init__(self, gloo: Gloo, groups: Mapping[str, Members], buffers: Buffers, ahead: int) -> None:
        """`ahead`: bytes of buffers that may wait early, at the most."""
        self._gloo, self._groups, self._buffers = gloo, groups, buffers
        self.ahead, self._left = ahead, ahead
        self._lock = threading.Lock()

    def open(
        self, inbox: Inbox, wanted: Exchange, most: Sequence[int | None], tag: int, taken: list[torch.Tensor]
    ) -> Arriving:
        """What arrives in an exchange that begins now. `taken` gets the buffers, to hand them back some day."""
        with inbox.lock:
            inbox.begun.add(wanted.number)
            arriving = inbox.arriving.pop(wanted.number, None)
            if arriving is None:
                return self._wait_for(wanted, most, tag, taken)
        assert list(arriving.most) == list(most), "buffers wait for something else than what comes"
        return arriving

    def open_early(self, inbox: Inbox, wanted: Exchange, tag: int, taken: list[torch.Tensor]) -> None:
        """The same for an exchange that is sure to come, if there is room for it and it has not begun."""
        assert wanted.most is not None
        size = sum(size for size in wanted.most if size is not None)
        with inbox.lock:
            if not inbox.closed and wanted.number not in inbox.begun and self._reserve(size):
                inbox.ahead += size
                inbox.arriving[wanted.number] = self._wait_for(wanted, wanted.most, tag, taken)

    def close(self, inbox: Inbox) -> None:
        with inbox.lock:
            inbox.closed = True
            self._reserve(-inbox.ahead)
            inbox.ahead = 0

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def _wait_for(self, wanted: Exchange, most: Sequence[int | None], tag: int, taken: list[torch.Tensor]) -> Arriving:
        group = self._groups[wanted.where]
        parts: Parts = [None] * group.size
        into = []
        for step in range(1, group.size):  # every member starts with another one
            i = (group.rank - step) % group.size
            size = most[i]
            if size is not None:
                buffer = self._buffers.take(size)
                taken.append(buffer)
                parts[i] = buffer[:size]
                if size:
                    into.append((group.ranks[i], buffer[:size]))
        return Arriving(most, self._gloo.send((), into, tag), parts)
