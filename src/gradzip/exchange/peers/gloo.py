"""Bytes between ranks over Gloo, from rank to rank.

Messages are matched by tags, so it does not matter in which order threads issue them. Sizes are known before: a message
that is longer than the buffer it is received into ends the process. Rows of numbers and data have connections of their
own, so that a row never waits behind megabytes.

A wait for a peer cannot be interrupted, except by closing the connection: `abort` does so, and every wait of this
process, and soon those of its peers, end with an error.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from . import sockets
from .senders import Later, Senders

SENDERS = 3  # threads that send data, where there are cores for them and connections take much at once
QUEUE = 64 << 10  # bytes that wait in a connection to another host, if queues are to be short
_AT_ONCE = 1 << 16  # bytes that are handed to a socket in less time than to a thread
_PROBE = (1 << 31) - 1  # a tag that nothing else has


class Broken(Exception):
    """A connection to a peer broke or timed out."""

    def __init__(self, rank: int | None, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.rank = rank


class Pending:
    """Messages under way. Their tensors are kept until they have arrived: a dropped one would be lost."""

    def __init__(self) -> None:
        self._works: list[tuple[int | None, dist.Work | Later, torch.Tensor]] = []
        self._incoming = 0  # of these, the first ones

    def add(self, rank: int | None, work: dist.Work | Later, tensor: torch.Tensor, incoming: bool = False) -> None:
        self._works.append((rank, work, tensor))
        self._incoming += incoming

    def wait(self, arrived: Callable[[int, torch.Tensor], None] | None = None) -> None:
        """Returns when all are through; `arrived` is told of each that has come, while others are still under way."""
        for number, (rank, work, tensor) in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as cause:
                raise Broken(rank, cause) from cause
            if arrived is not None and number < self._incoming:
                assert rank is not None
                arrived(rank, tensor)


class Gloo:
    """Connections between the ranks of a group: some for rows, others for data."""

    def __init__(
        self, store: Store, rank: int, world: int, timeout: timedelta, senders: int = 0, sparse: bool = False
    ) -> None:
        """`senders`: so many threads send larger data; 0: those that call `send`. `sparse`: sums of sparse tensors."""
        self.rank, self.world = rank, world
        self._sockets: dict[str, set[sockets.Socket]] = {}
        self._senders = Senders(min(world - 1, senders))
        self._groups: dict[str, Any] = {}  # ProcessGroupGloo; torch gives no types for its methods
        for name in ("rows", "data") if world > 1 else ():
            self._connect(name, partial(dist.ProcessGroupGloo, PrefixStore(name, store), rank, world, timeout))
        if sparse and world > 1:
            self._connect("sparse", partial(with_one_thread, PrefixStore("sparse", store), rank, world, timeout))

    def _connect(self, name: str, make: Callable[[], Any]) -> None:
        before = sockets.found()
        self._groups[name] = make()
        self._sockets[name] = sockets.found() - before

    def shorten_queues(self) -> None:
        """Lets little data wait in connections. Where all take but little, no other thread need hand data to them."""
        if sockets.shorten_queues(self._sockets.get("data", ()), QUEUE, self.world - 1):
            self._senders = Senders(0)

    def send_row(self, row: torch.Tensor, to: Sequence[int], of: Sequence[int], tag: int) -> Rows:
        """Starts to send a row of numbers to some ranks and to receive one of the same length from others."""
        rows = Rows()
        for rank in of:
            rows.received[rank] = torch.empty_like(row)
        self._issue(rows, "rows", [(rank, row) for rank in to], list(rows.received.items()), tag)
        return rows

    def send(
        self, parts: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]], tag: int
    ) -> Pending:
        """Starts to send bytes to ranks, and to receive from others into buffers of exactly the right size."""
        pending = Pending()
        self._issue(pending, "data", parts, into, tag)
        return pending

    def _issue(
        self,
        pending: Pending,
        name: str,
        parts: Sequence[tuple[int, torch.Tensor]],
        into: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> None:
        if not parts and not into:
            return
        group, rank = self._group(name), None
        try:
            for rank, buffer in into:
                pending.add(rank, group.recv([buffer], rank, tag), buffer, incoming=True)
            for rank, data in parts:
                send = partial(group.send, [data], rank, tag)
                at_once = data.numel() < _AT_ONCE or not self._senders.count
                pending.add(rank, send() if at_once else self._senders.send(send), data)
        except RuntimeError as cause:
            raise Broken(rank, cause) from cause

    def add_sparse(self, gradient: torch.Tensor) -> dist.Work:
        """Starts to replace a sparse tensor by its sum over all ranks."""
        try:
            work: dist.Work = self._group("sparse").allreduce([gradient])
        except RuntimeError as cause:
            raise Broken(None, cause) from cause
        return work

    def first_lost(self) -> int | None:
        """A rank that cannot be sent to any more, for the error that says so; None if none is known."""
        for rank in range(self.world):
            if rank != self.rank:
                try:
                    self._group("rows").send([torch.zeros(1)], rank, _PROBE)  # nobody receives it
                except (RuntimeError, Broken):
                    return rank
        return None

    def abort(self) -> None:
        """Breaks all connections, so that nobody waits on them any more."""
        for connections in list(self._sockets.values()):
            sockets.shut_down(connections)

    def close(self, sparse: bool = True) -> None:
        """Drops the connections; nothing may be under way. `sparse`: those of sparse sums as well.

        These have a thread that calls back: if that dropped them, it would wait for itself, and the process would end.
        """
        self._senders.stop()
        for name in [name for name in self._groups if sparse or name != "sparse"]:
            self._groups.pop(name)
            self._sockets.pop(name, None)

    def disown(self) -> None:
        """For a forked child: these connections are its parent's. They are neither closed here nor destroyed, as Gloo
        would wait for threads that only the parent has."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._groups))
        self._groups, self._sockets = {}, {}

    def _group(self, name: str) -> Any:
        try:
            return self._groups[name]
        except KeyError:
            raise Broken(None, RuntimeError("the connections are closed")) from None


def with_one_thread(store: Store, rank: int, world: int, timeout: timedelta) -> Any:
    """A group that ends its collectives one after the other.

    torch's usual two threads write the name of the one that has just ended into the same string, without a lock. That
    of a sparse sum is long enough to be on the heap: two that end together break it ("malloc_consolidate(): unaligned
    fastbin chunk detected", seen with torch 2.13).
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    make = dist.ProcessGroupGloo.create_device
    options._devices = (
        [make(interface=name) for name in interfaces.split(",")]
        if interfaces
        else [dist.ProcessGroupGloo.create_default_device()]
    )
    options._timeout, options._threads = timeout, 1
    return dist.ProcessGroupGloo(store, rank, world, options)


class Rows(Pending):
    def __init__(self) -> None:
        super().__init__()
        self.received: dict[int, torch.Tensor] = {}
