"""A process's way to the others: connections, heartbeat, threads that use them. Handles of the same ranks share one.

Whatever fails, fails for good and on all ranks: DDP could not go on after a broken backward anyway. The rank that
fails leaves word in the store, closes its connections, and everybody else raises a PeerError that says who and why.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ... import wire
from ...errors import PeerError, Unsupported
from ..recording import Probe, Watch
from ..topology import Topology
from .buffers import Buffers
from .gloo import SENDERS, Broken, Gloo
from .heartbeat import Health
from .standing import Standing

HEARTBEAT = timedelta(seconds=30)
ROW_VERSION = 6  # of rows (rows.py) and of the tags of data: ranks that have others would wait for each other
TIMEOUT = timedelta(minutes=30)  # of one message; a dead peer is noticed by its heartbeat long before
_AT_EXIT = 6.0  # seconds that threads have to come back, at the end of the process
_GRACE = 0.6  # seconds of these that threads have to end by themselves
_LAST_WORDS = 2.0  # seconds that a rank has to say why it closed its connections
_TO_HEAR = 1.0  # seconds that others have to read that, where the store may end with this process

_lock = threading.Lock()
_channels: dict[tuple[object, ...], Channel] = {}
_serials: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # channels made so far, by group
_open: set[Channel] = set()  # with threads that may run
_inherited: list[Channel] = []  # the parent's, in a forked child: its threads are not here, its sockets are shared
_probe: Probe | None = None  # for tests: sees every stage of every chunk


class Worker(Protocol):
    """Threads that use a channel's connections, and end with it."""

    def drain(self) -> None:
        """Returns when all that was submitted so far is through."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends all that is under way with an error, also what a thread is stuck in."""
        ...

    def stop(self, patience: float) -> bool:
        """Ends the threads; False if one is still busy after that many seconds."""
        ...


class Channel:
    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        topology: Topology,
        timeout: timedelta,
        heartbeat: timedelta,
        sparse: bool = False,
    ) -> None:
        self.sparse = sparse
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.topology, self.groups, self.device = topology, topology.groups(), device
        self.users = 0
        self.workers: list[Worker] = []
        self.on_failure: list[Callable[[BaseException], None]] = []  # who else ends when the exchange fails
        self._heartbeat = heartbeat.total_seconds()
        self.error: BaseException | None = None
        self._timeout = timeout.total_seconds()
        self.standing = Standing(self.rank)
        self._failing = threading.Lock()
        self._told = threading.Event()  # the others have had time to hear of the error
        self._may_hold_store = dist.get_rank() == 0  # unless a launcher does
        name = f"gradzip/{group.group_name}/{next(_serials[group.group_name])}"
        store = self._store = PrefixStore(name, _get_default_store().clone())  # type: ignore[attr-defined]
        self._meet(store, "hello", timeout)
        try:
            senders = SENDERS if device.type == "cuda" else 0
            self.gloo = Gloo(store, self.rank, self.world, timeout, senders, sparse)
        except RuntimeError as cause:
            raise PeerError(f"rank {self.rank} could not connect to the others: {cause}") from cause
        if device.type == "cuda":
            self.gloo.shorten_queues()
        self._meet(store, "ready", timeout)  # a rank that fails now must not leave others half connected
        self.buffers = Buffers(pinned=device.type == "cuda")
        self.health = Health(store, self.rank, self.world, heartbeat.total_seconds(), self._lost, self.standing)
        self.watch = Watch(_probe)

    def start(self) -> None:
        """After all ranks have connected."""
        _open.add(self)
        self.health.start()

    def settings(self) -> dict[str, Any]:
        """What ranks must have alike to understand each other."""
        return {
            "frames": wire.VERSION,
            "hosts": self.topology.hosts,
            "device": self.device.type,  # messages are cut up otherwise on GPUs
            "rows": ROW_VERSION,
            "sparse gradients": self.sparse,
        }

    def _meet(self, store: Store, where: str, timeout: timedelta) -> None:
        """Waits until all ranks are there. They must speak the same format and see the same hosts."""
        own = json.dumps(self.settings())
        store.set(f"{where}/{self.rank}", own)
        for rank in range(self.world):
            began = time.monotonic()
            try:
                store.wait([f"{where}/{rank}"], timeout)
            except Exception as cause:
                late = time.monotonic() - began > 0.9 * timeout.total_seconds()
                why = f"within {timeout}" if late else "as the store that all ranks meet at is gone, or rank 0 with it"
                raise PeerError(f"rank {rank} did not attach {why}: {cause}") from cause
            theirs = store.get(f"{where}/{rank}").decode()
            if theirs != own:
                raise PeerError(
                    f"rank {self.rank} has {own} and rank {rank} has {theirs}: use the same gradzip, model, "
                    "launcher and kind of device"
                )

    # -- failures -----------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, about: int | None = None) -> BaseException:
        """Ends the channel on all ranks, telling them why; returns the first error."""
        with self._failing:
            first, self.error = self.error, self.error or error
        if first is not None:
            self.wait_told()
            return first
        _forget(self)
        text = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        # What several ranks know is nobody's fault in particular.
        shared = isinstance(error, PeerError)
        self.health.report(text, about=-1 if shared and about is None else about)
        self._end(error)
        return error

    def _lost(self, error: PeerError) -> None:
        """The heart's bad news: others know it as well."""
        with self._failing:
            if self.error is not None:
                return
            self.error = error
        _forget(self)
        self._end(error)

    def abort(self) -> None:
        """Ends all waits, here and soon on all ranks."""
        self.gloo.abort()

    def _end(self, error: BaseException) -> None:
        for end in self.on_failure:
            end(error)
        self.abort()
        if self._may_hold_store:
            self.health.all_know(_TO_HEAR)
        self._told.set()
        for worker in self.workers:
            worker.fail(error)
        self.gloo.close(sparse=False)  # maybe on their thread
        self.health.stop()

    def wait_told(self) -> None:
        """Before an error is raised: this process may end then, and with it the store that says why."""
        if self.error is not None:
            self._told.wait(_LAST_WORDS + 2 * _TO_HEAR)

    def explained(self, error: BaseException) -> BaseException:
        """What is to be raised for an error that a job met.

        A rank that fails closes its connections as soon as it has left word: others may see that first. NCCL says that
        a rank is gone, but not which one: our own connections tell.
        """
        if isinstance(error, dist.DistBackendError):
            error = Broken(None, error)
        if not isinstance(error, Broken):
            return self.fail(error)
        # A wait that times out ends all others of the same connection, which may be seen first.
        timed_out = "imed out" in str(error) or "timeout caused pair closure" in str(error)
        rank, known = error.rank, self.error
        for patience in (_LAST_WORDS, 0.0):  # who is seen to be gone only then may have left word meanwhile
            if known is None and rank is None and not timed_out:
                rank = self.gloo.first_lost()
            known = known or self.health.cause(patience)
        if self.error is not None:
            self.wait_told()
            return self.error
        if isinstance(known, PeerError):
            self._lost(known)
            return self.error or known
        who = f"rank {rank}" if rank is not None else "a peer"
        if timed_out:
            text = (
                f"{who} is alive but did not answer in time, see attach(timeout=), or init_process_group(timeout=) "
                f"where nothing is compressed: {_plain(error)}"
            )
        elif rank is not None and (still := self.health.stood_still()) is not None:
            rank = self.rank
            text = (
                f"rank {rank} stood still for {still:.0f} s, and the other ranks gave it up after a "
                f"heartbeat of {self._heartbeat:.0f} s: it was stopped, or its host was suspended. "
                "See attach(heartbeat=)"
            )
        elif rank is not None:
            text = (
                f"{who} closed its connections without a word: it was killed, crashed or ended early "
                f"({_plain(error)}). A rank ends early if it has fewer batches than others, or if it alone uses "
                "no_sync()"
            )
        else:
            text = f"an exchange failed, though no rank has closed its connections: {_plain(error)}"
        return self.fail(PeerError(text), about=rank)

    def drain(self) -> None:
        """Returns when all that was submitted so far is through."""
        for worker in self.workers:
            worker.drain()

    def compare(self, text: str, wait: bool, loaded: bool = False) -> None:
        """Tells the others what this rank is going to do; `wait`: raises on all ranks unless theirs is the same.

        To be called on all ranks at the same point, by some of them without waiting. `loaded`: it is about a state.
        """
        number, ranks = self.standing.begin_comparison(wait, loaded), list(range(self.world)) if wait else [self.rank]
        texts = self.health.exchange_texts(f"policy/{number}", text, ranks, self._timeout)
        self.standing.end_comparison()
        if wait and self.error is not None:
            raise self.error
        other = next((rank for rank, theirs in zip(ranks, texts) if theirs != text), None)
        if other is not None:
            error = PeerError(
                f"ranks disagree. Rank {self.rank}: {text}. Rank {other}: {texts[other]}. "
                f"{'Load the same checkpoint' if loaded else 'Use the same policy, model and gradzip'} on all ranks"
            )
            raise self.fail(error)

    # -- users --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """One user less; the last one closes the door."""
        if self in _inherited:
            return
        with _lock:
            self.users -= 1
            last = self.users == 0
        if last:
            self.close()

    def close(self, patience: float = 2.0) -> None:
        if self in _inherited:
            return
        _forget(self)
        ended = self.health.stop(patience)
        for worker in self.workers:
            ended &= worker.stop(patience)
        if ended:
            _open.discard(self)
            self.buffers.free()
        self.gloo.close()


def _plain(error: Broken) -> str:
    """Gloo's words, without the place in its source and the advice."""
    return re.sub(r"^\[.*?\] |\. This is typically.*", "", str(error), flags=re.DOTALL)


def open_channel(
    group: dist.ProcessGroup,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    heartbeat: timedelta | None = None,
    sparse: bool = False,
) -> Channel:
    """The channel of these ranks: one that is open already, or a new one. Call it on all of them at the same point.

    `sparse`: it also has to add up sparse gradients.
    """
    timeout, heartbeat = timeout or TIMEOUT, heartbeat or HEARTBEAT
    if heartbeat < timedelta(seconds=1):
        raise Unsupported(f"heartbeat={heartbeat}: hearts beat a few times a second; give them a second at least")
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    topology = Topology.of_mesh(rank, ranks, mesh) if mesh is not None else Topology.of_ranks(rank, ranks)
    key = (group.group_name, str(device), topology, timeout, heartbeat, sparse)
    with _lock:
        if key not in _channels or _channels[key].error is not None:
            made = Channel(group, device, topology, timeout, heartbeat, sparse)
            made.start()
            _channels[key] = made
        channel = _channels[key]
        channel.users += 1
        return channel


def _forget(channel: Channel) -> None:
    """So that whoever attaches next gets a new one. No lock: a failure must not wait for an attach."""
    for key in [key for key, known in list(_channels.items()) if known is channel]:
        _channels.pop(key, None)


@atexit.register
def _close_all() -> None:
    """Threads that are inside torch when Python shuts down take the process down: none may be left."""
    for channel in list(_open):
        channel.gloo.abort()
        channel.health.stop(_GRACE)
        channel.health.abort()
        channel.close(_AT_EXIT)


def _disown() -> None:
    """A forked child leaves the parent's channels alone: shutting down a socket would end the parent's connection."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for channel in _open:
        channel.gloo.disown()
    _inherited.extend(_open)
    _open.clear()
    _channels.clear()


os.register_at_fork(after_in_child=_disown)
