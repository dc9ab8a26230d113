"""Data that is handed to sockets by threads of its own arrives as it would otherwise, and errors are still errors."""

from __future__ import annotations

import itertools
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from gradzip.exchange.peers import sockets
from gradzip.exchange.peers.gloo import Broken, Gloo, Pending
from gradzip.exchange.peers.senders import Senders


def connected(rank: int, world: int, name: str = "senders") -> Gloo:
    return Gloo(PrefixStore(name, _get_default_store()), rank, world, timedelta(seconds=30), senders=3)


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradzip-send")]


def swap(rank: int, world: int) -> list[tuple[int, bool, list[str]]]:
    """With queues as they are, and with short ones."""
    found = [swap_by(connected(rank, world), rank, world)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "shorten_queues", lambda *args: True)  # on one host none is shortened
        gloo = connected(rank, world, "short")
        gloo.shorten_queues()
    return [*found, swap_by(gloo, rank, world)]


def swap_by(gloo: Gloo, rank: int, world: int) -> tuple[int, bool, list[str]]:
    """Many messages of different sizes, all under way at once: wrong ones, whether threads sent, threads left."""
    others = [r for r in range(world) if r != rank]
    sizes = torch.randint(1, 1 << 18, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    under_way: list[tuple[int, Pending, dict[int, torch.Tensor]]] = []
    for tag, size in enumerate(sizes):
        into = {other: torch.empty(size, dtype=torch.uint8) for other in others}
        data = torch.full((size,), (7 * tag + rank) % 251, dtype=torch.uint8)
        under_way.append((tag, gloo.send([(other, data) for other in others], list(into.items()), tag), into))
    sent_by_threads = bool(alive())
    wrong = 0
    for tag, pending, into in under_way:
        came = dict[int, torch.Tensor]()
        pending.wait(came.__setitem__)
        wrong += came.keys() != into.keys()
        wrong += sum(not bool((part == (7 * tag + other) % 251).all()) for other, part in came.items())
    gloo.close()
    return wrong, sent_by_threads, alive()


def break_off(rank: int, world: int) -> tuple[list[int | None], list[str]]:
    """Rank 0 breaks its connections while others send to it; whom these name, and threads left."""
    gloo, named = connected(rank, world), list[int | None]()
    dist.barrier()  # all are connected
    if rank == 0:
        gloo.abort()
    else:
        for tag in itertools.count():  # what was sent before rank 0 came to it waits in queues
            try:
                gloo.send([(0, torch.ones(1 << 20, dtype=torch.uint8))], [], tag).wait()
            except Broken as broken:
                named.append(broken.rank)
                break
    gloo.abort()
    gloo.close()
    return named, alive()


def test_messages_arrive() -> None:
    for usual, short in run_ranks(3, swap, 3):
        assert usual == (0, True, [])
        assert short == (0, False, [])


def test_broken_connections_are_named() -> None:
    for named, left in run_ranks(3, break_off, 3)[1:]:
        assert (named, left) == ([0], [])


def test_queues_are_short_where_the_network_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does it, which doubles what it is asked for."""
    before = sockets.found()
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_server(("127.0.0.1", 0)) as own:
        elsewhere = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0))
        here = socket.create_connection(own.getsockname())
        made = sockets.found() - before
        with elsewhere, here:
            usual = [queue_of(elsewhere), queue_of(here)]
            monkeypatch.setattr(sockets, "_FAST", 1e15)  # no network answers soon enough for that
            assert not sockets.shorten_queues(made, 1 << 15, count=2)
            monkeypatch.setattr(sockets, "_FAST", 0.0)
            assert not sockets.shorten_queues(made, 1 << 15, count=1)
            assert [queue_of(elsewhere), queue_of(here)] == usual
            assert not sockets.shorten_queues(made, 1 << 15, count=2), "that of this host takes as much as ever"
            assert [queue_of(elsewhere), queue_of(here)] == [1 << 16, usual[1]]
            assert sockets.shorten_queues(made - numbered(here, made), 1 << 15, count=1)
            sockets.shut_down(made)
            assert elsewhere.recv(1) == here.recv(1) == b""


def numbered(connection: socket.socket, among: set[sockets.Socket]) -> set[sockets.Socket]:
    return {found for found in among if found.number == connection.fileno()}


def queue_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_an_error_waits_for_whoever_waits() -> None:
    senders = Senders(1)

    def start() -> torch.distributed.Work:
        raise RuntimeError("no such peer")

    later = senders.send(start)
    senders.stop()
    with pytest.raises(RuntimeError, match="no such peer"):
        later.wait()
