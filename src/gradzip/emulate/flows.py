"""The rate that TCP really reaches between hosts: one flow, and a ring of flows at once as in an all-reduce."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .network import Host
from .report import Rates

_WARM_UP = 0.3  # seconds until TCP has found its rate: at 100 Mbit/s a ring starts unevenly
_WINDOW = 0.15
_PATIENCE = 5.0  # seconds for a connection, or for the next byte
_CHUNK = 1 << 18
_CLOSE_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: what is still queued is thrown away


def measure(hosts: Sequence[Host]) -> Rates | None:
    """The rates between these hosts, within a second; None if there is but one."""
    if len(hosts) < 2:
        return None
    ring = list(zip(hosts, [*hosts[1:], hosts[0]]))
    (one,) = _rates(ring[:1])
    return Rates(one, tuple(_rates(ring)))


def _rates(pairs: Sequence[tuple[Host, Host]]) -> list[float]:
    connections = [_connect(*pair) for pair in pairs]
    start = time.monotonic() + _WARM_UP
    with ThreadPoolExecutor(2 * len(pairs)) as threads:
        received = [threads.submit(_receive, receiver, start) for _, receiver in connections]
        for sender, _ in connections:
            threads.submit(_send, sender, start + _PATIENCE)
    return [rate.result() for rate in received]


def _connect(source: Host, target: Host) -> tuple[socket.socket, socket.socket]:
    """A socket belongs to the namespace that it is made in, wherever its owner goes afterwards."""
    with target.entered():
        listener = socket.create_server((target.address, 0))
    with listener, source.entered():
        sender = socket.create_connection(listener.getsockname(), timeout=_PATIENCE)
        receiver, _ = listener.accept()
    receiver.settimeout(_PATIENCE)
    return sender, receiver


def _send(sender: socket.socket, end: float) -> None:
    data = bytes(_CHUNK)
    with sender:
        try:
            while time.monotonic() < end:
                sender.send(data)
        except OSError:  # the receiver has seen enough
            pass


def _receive(receiver: socket.socket, start: float) -> float:
    """Bits per second of what arrives in a window that begins then, or when this thread gets to run after it."""
    chunk = bytearray(_CHUNK)
    began, size, now = None, 0, start
    with receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_AT_ONCE)
        while began is None or now < began + _WINDOW:
            try:
                arrived = receiver.recv_into(chunk)
            except OSError:  # nothing for so long: the rate is what came before
                arrived = 0
            now = time.monotonic()
            if arrived == 0:
                break
            if began is not None:
                size += arrived
            elif now >= start:
                began = now
    return 0.0 if began is None or now <= began else 8 * size / (now - began)
