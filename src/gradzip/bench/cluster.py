"""A look at all ranks of a real cluster: whether they are alike, and whether they reach each other.

Facts travel over the launcher's store, before and beside Gloo: so rank 0 can tell what is wrong also where ranks cannot
connect. Every problem is said with its cure.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

MUST_AGREE = {
    "gradzip": "install the same gradzip on all hosts",
    "torch": "install the same torch on all hosts",
    "engine": "install gradzip alike on all hosts (`gradzip doctor` on each says what is missing)",
    "environment": "set GRADZIP* alike for all ranks",
    "local_world_size": "start equally many ranks on every host",
}
PROBE_BYTES = 4 << 20
MOST_RANKS = 64  # pairs beyond are too many to measure one by one
PATIENCE = timedelta(seconds=45)
_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface
_KEY = "gradzip/doctor"
_OWN = ("GRADZIP_LIBRARY", "GRADZIP_NETWORK")  # may differ between hosts
_IFNAME = "GLOO_SOCKET_IFNAME"

Facts = dict[str, Any]


@dataclass
class Findings:
    """What rank 0 knows in the end."""

    ranks: list[Facts]
    problems: list[str] = field(default_factory=list)


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environment) and int(environment["WORLD_SIZE"]) > 1


def own_facts(versions: Mapping[str, str], engine: str, broken: Sequence[str]) -> Facts:
    """What this rank is; `broken` is what its own check-up found."""
    interface = os.environ.get(_IFNAME)
    set_here = {k: v for k, v in sorted(os.environ.items()) if k.startswith("GRADZIP") and k not in _OWN}
    return {
        "rank": int(os.environ["RANK"]),
        "host": socket.gethostname(),
        "host_number": int(os.environ.get("GROUP_RANK", 0)),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "interface": interface or "by host name",
        "interfaces": ", ".join(name for _, name in socket.if_nameindex()),
        "address": _address(interface),
        "engine": engine,
        "environment": " ".join(f"{k}={v}" for k, v in set_here.items()) or "none",
        "broken": list(broken),
        **versions,
    }


def examine(facts: Facts, patience: timedelta = PATIENCE) -> Findings:
    """Call it on all ranks; all get the same findings."""
    store, rank, world = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    store.set_timeout(3 * patience)  # some ranks wait for a connection that fails, others for their verdict
    ranks = _exchanged(store, "facts", rank, world, facts)
    unreachable = list(bad_addresses(ranks))
    found = Findings(ranks, [*disagreements(ranks), *unreachable])
    if not unreachable:
        found.problems += _try_network(store, rank, world, patience, ranks)
    store.set(f"{_KEY}/end/{rank}", "")
    if rank == 0:  # the store may live in this process: the last to leave
        store.wait([f"{_KEY}/end/{other}" for other in range(world)])
    return found


def _try_network(store: Store, rank: int, world: int, patience: timedelta, ranks: list[Facts]) -> list[str]:
    """Connects all ranks and measures each pair; adds the rates to the facts, returns what went wrong."""
    errors = _exchanged(store, "reached", rank, world, _connect(store, rank, world, patience))
    if any(errors):
        return [f"rank {r}: {said}. {_cure(ranks)}" for r, said in enumerate(errors) if said]
    if world <= MOST_RANKS:
        slowest = _exchanged(store, "rates", rank, world, _slowest_link(rank, world))
        for own, (rate, peer) in zip(ranks, slowest):
            own |= {"slowest_bps": rate, "slowest_peer": peer}
    dist.barrier()
    dist.destroy_process_group()
    return []


def disagreements(ranks: Sequence[Facts]) -> Iterator[str]:
    """What differs between ranks, or is wrong with one of them."""
    for own in ranks:
        yield from (f"rank {own['rank']} on {own['host']}: {what}" for what in own["broken"])
    for what, cure in MUST_AGREE.items():
        by_value: dict[str, list[int]] = {}
        for own in ranks:
            by_value.setdefault(str(own[what]), []).append(own["rank"])
        if len(by_value) > 1:
            parts = (f"{value} on rank {_some(numbers)}" for value, numbers in by_value.items())
            yield f"{what.replace('_', ' ')} differs: {'; '.join(parts)}: {cure}"


def bad_addresses(ranks: Sequence[Facts]) -> Iterator[str]:
    """Ranks that cannot be reached from other hosts, whatever is tried."""
    if len({own["host_number"] for own in ranks}) > 1:
        for own in ranks:
            who = f"rank {own['rank']} on {own['host']}"
            if own["address"].startswith("127."):
                yield (
                    f"{who} would listen on {own['address']}, where no other host reaches it: "
                    f"set {_IFNAME} to the interface of the network, or mend the name in /etc/hosts"
                )
            elif not own["address"]:
                yield f"{who} has no address on {own['interface']}: set {_IFNAME} to one of {own['interfaces']}"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


def _address(interface: str | None) -> str:
    """Where Gloo will listen: the address of the interface, or what the host's name resolves to; '' for nowhere."""
    try:
        if interface is None:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", interface.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    except OSError:
        return ""


def _exchanged(store: Store, what: str, rank: int, world: int, value: Any) -> list[Any]:
    store.set(f"{_KEY}/{what}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{_KEY}/{what}/{other}")) for other in range(world)]


def _connect(store: Store, rank: int, world: int, patience: timedelta) -> str:
    """Connects all ranks over Gloo; what went wrong, or nothing."""
    try:
        inner = PrefixStore(f"{_KEY}/gloo", store)
        dist.init_process_group("gloo", store=inner, rank=rank, world_size=world, timeout=patience)
        dist.barrier()
    except RuntimeError as error:
        return f"Gloo cannot connect the ranks ({str(error).splitlines()[0]})"
    return ""


def _cure(ranks: Sequence[Facts]) -> str:
    used = ", ".join(sorted({f"{own['host']} {own['address'] or '?'}" for own in ranks}))
    return f"Addresses are {used}: set {_IFNAME} to the interface that the hosts share, and open its ports"


def _slowest_link(rank: int, world: int) -> tuple[float, int]:
    """Bits per second of this rank's slowest pair, both directions at once, and its peer."""
    out, into = torch.zeros(PROBE_BYTES, dtype=torch.uint8), torch.empty(PROBE_BYTES, dtype=torch.uint8)
    found = []
    for number in range(world if world % 2 else world - 1):
        peer = partner(rank, number, world)
        dist.barrier()
        if peer is None:
            continue
        for timed in (False, True):  # the first opens windows and buffers
            size = PROBE_BYTES if timed else PROBE_BYTES // 16
            began = time.perf_counter()
            receiving = dist.irecv(into[:size], peer)
            dist.send(out[:size], peer)
            assert receiving is not None
            receiving.wait()
            seconds = time.perf_counter() - began
        found.append((8 * PROBE_BYTES / seconds, peer))
    return min(found)


def partner(rank: int, number: int, world: int) -> int | None:
    """Who this rank meets in a round: everybody meets everybody once, as in a tournament; None: a pause."""
    places = world + world % 2
    last = places - 1
    if rank == last:
        peer = next(r for r in range(last) if 2 * r % last == number % last)
    else:
        peer = (number - rank) % last
        if peer == rank:
            peer = last
    return peer if peer < world else None
