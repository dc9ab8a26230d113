"""This process's connections, found among its open files: Gloo does not hand them out."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")
_TCP_INFO_BYTES, _MIN_RTT_AT = 152, 148  # of Linux's struct tcp_info: microseconds, 4 bytes
_FAST = 2 * 1.25e9  # bytes/s that one connection must be able to carry, by the time that an idle network answers in
_LONGEST = 192 << 10  # bytes; a longer queue is not asked for, as the system may allow less than it would take itself


class Socket(NamedTuple):
    number: int
    identity: str  # numbers are used again


def found() -> set[Socket]:
    """The sockets of this process; none where the system is not Linux."""
    sockets = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = os.readlink(_DESCRIPTORS / entry)
                if target.startswith("socket:"):
                    sockets.add(Socket(int(entry), target))
    return sockets


def shut_down(sockets: Iterable[Socket]) -> None:
    """Ends these connections, and so whatever waits on them; files stay open."""
    for connection in _connections(sockets):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def shorten_queues(sockets: Iterable[Socket], queue: int, count: int) -> bool:
    """Lets about `queue` bytes wait in each connection to another host for being sent, not megabytes as usual.

    What waits in many sockets of a host is sent unevenly, and whoever waits for all waits for the last. It also leaves
    the processor's caches. Where the network answers so slowly that one such connection could not fill it, more may
    wait, or as much as the system finds right. Nothing is done if there are not `count` connections: some are not ours.
    Returns whether little waits in all of them now.
    """
    if sum(1 for _ in _connections(sockets)) != count:
        return False
    shortened = 0
    for connection in _connections(sockets):
        with contextlib.suppress(OSError, AttributeError):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            seconds = int.from_bytes(info[_MIN_RTT_AT:], "little") * 1e-6
            needed = max(queue, round(_FAST * seconds))
            elsewhere = connection.getpeername()[0] != connection.getsockname()[0]
            if elsewhere and len(info) == _TCP_INFO_BYTES and needed <= _LONGEST:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, needed)
                shortened += 1
    return shortened == count


def _connections(sockets: Iterable[Socket]) -> Iterator[socket.socket]:
    for number, identity in list(sockets):
        with contextlib.suppress(OSError):
            if os.readlink(_DESCRIPTORS / str(number)) != identity:
                continue  # closed, and its number is in use for something else
            with socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # not for the one that listens, which Gloo would not survive
                yield connection
