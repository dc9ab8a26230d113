"""Hosts on a switch: a network namespace each, a link to a bridge, and a rate limit at both ends of the link.

The limit at the host's end is what its network card can send, that at the bridge's end what it can receive: without the
second one three hosts could send to a fourth at three times its rate.

No names in /run/netns: a namespace is an open file of the supervisor, so that it goes when the supervisor goes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import EmulationError

INTERFACE = "emu0"  # not eth0: /sys shows the machine's own cards, and NCCL would look this one up there
LOOPBACK = "lo"
_MTU = 1500
_QUEUE = "50ms"  # what may wait at a limit before packets are dropped
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)


def burst_bytes(rate: int) -> int:
    """What may pass a limit at once after a pause: 1 ms of the rate.

    A message of this size passes free, so it is small; much smaller, and timer delays would eat into the rate.
    """
    return max(rate // 8 // 1000, 8000)


def largest_packet_bytes(rate: int) -> int:
    """TCP hands over up to 64 KB at once; tbf cuts up what exceeds its burst, and flows then stall: stay well below."""
    return min(65536, burst_bytes(rate) // 2)


@dataclass(frozen=True)
class Host:
    address: str
    interface: str
    namespace: int | None = None  # an open file; None: the namespace that everything is in
    home: int | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets made and processes started inside the block belong to this host, for this thread alone."""
        if self.namespace is None or self.home is None:
            yield
            return
        _enter(self.namespace)
        try:
            yield
        finally:
            _enter(self.home)


def loopback(hosts: int) -> list[Host]:
    return [Host("127.0.0.1", LOOPBACK) for _ in range(hosts)]


def build(hosts: int, rate: int, tools: Mapping[str, str]) -> list[Host]:
    """Hosts on a bridge in the present network namespace, which must be a fresh one."""
    ip, tc = [tools["ip"]], [tools["tc"]]
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    _do([*ip, "link", "set", "lo", "up"])
    _do([*ip, "link", "add", "switch", "type", "bridge"])
    _do([*ip, "link", "set", "switch", "addrgenmode", "none", "up"])
    built = []
    for i in range(hosts):
        host = Host(f"10.0.0.{i + 1}", INTERFACE, _new_namespace(home), home)
        far_end = ["peer", "name", INTERFACE, "mtu", str(_MTU), "netns", f"/proc/self/fd/{host.namespace}"]
        _do([*ip, "link", "add", f"port{i}", "mtu", str(_MTU), "type", "veth", *far_end], keep=host.namespace)
        _do([*ip, "link", "set", f"port{i}", "master", "switch", "addrgenmode", "none", "up"])
        _limit(tc, f"port{i}", rate)
        with host.entered():
            _do([*ip, "link", "set", "lo", "up"])
            # addrgenmode none: no IPv6 address, which Gloo might choose
            size = ["gso_max_size", str(largest_packet_bytes(rate))]
            _do([*ip, "link", "set", INTERFACE, *size, "addrgenmode", "none", "up"])
            _do([*ip, "address", "add", f"{host.address}/24", "dev", INTERFACE])
            _limit(tc, INTERFACE, rate)
        built.append(host)
    return built


def _limit(tc: Sequence[str], interface: str, rate: int) -> None:
    bucket = ["rate", f"{rate}bit", "burst", str(burst_bytes(rate)), "latency", _QUEUE]
    _do([*tc, "qdisc", "add", "dev", interface, "root", "tbf", *bucket])


def _new_namespace(home: int) -> int:
    _check(_libc.unshare(_NEW_NETWORK), "make a network namespace")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    _enter(home)
    return namespace


def _enter(namespace: int) -> None:
    _check(_libc.setns(namespace, _NEW_NETWORK), "enter a network namespace")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise EmulationError(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def _do(command: Sequence[str], keep: int | None = None) -> None:
    files = () if keep is None else (keep,)
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=files, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        kinds = "bridge, veth and sch_tbf"
        raise EmulationError(
            f"cannot set up the emulated network: `{' '.join(command)}` said: {said}. The kernel needs {kinds} "
            f"(sudo modprobe -a {kinds.replace(',', '').replace(' and', '')}); --no-limit runs without it"
        )
