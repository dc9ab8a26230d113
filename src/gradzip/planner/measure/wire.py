"""What collectives cost on the real ranks, alone: torch's all-reduce, and bytes from rank to rank as the runtime sends
them. Every size is timed several times from a common start until the slowest rank is through, and the seconds that the
ranks' processors worked for it are counted. Sizes grow until latency hardly matters, so that all of it takes a few
seconds on slow networks too.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...collectives import Topology
from ..network import BITS, wire_factor
from ..profile import Collective, Curve, Link

SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20)  # bytes that each rank puts in
ROUNDS = 3
ENOUGH_S = 0.05  # a call of that length tells the rate; larger sizes are left out then
KINDS = ("ar", "rs", "ag", "a2a", "red", "gat", "bc")
ITEM = 4  # bytes of a value


def measure_network(group: dist.ProcessGroup, nominal_bits_per_s: float | None = None) -> dict[str, Any]:
    """`collectives`, `links` and `cores_per_rank` of a profile. Call it on all ranks of the group at the same point."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    topology = Topology.of_ranks(rank, ranks)
    return _measure(_Bench(rank, own_group(group), topology, group), nominal_bits_per_s)


_own: dict[tuple[str, int], Any] = {}


def own_group(group: dist.ProcessGroup) -> Any:
    """A Gloo group of the same ranks, one for all measurements: torch hangs when it makes a destroyed one again."""
    key = (group.group_name, id(group))
    if key not in _own:
        ranks = dist.get_process_group_ranks(group)
        _own[key] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _own[key]


@dataclass(frozen=True)
class _Bench:
    rank: int
    wire: Any  # a Gloo group of its own; ranks are numbers in it
    topology: Topology
    plain: dist.ProcessGroup  # that of DDP

    def slowest(self, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.wire)
        return float(slowest)

    def mean(self, seconds: float) -> float:
        total = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self.wire)
        return float(total) / self.topology.world


def _measure(bench: _Bench, nominal_bits_per_s: float | None) -> dict[str, Any]:
    topology = bench.topology
    hosts, ranks = len(topology.hosts), len(topology.hosts[0])
    wanted = ["inter"] * (hosts > 1) + ["intra"] * (ranks > 1)
    groups = {name: "flat" if topology.single else name for name in wanted}
    collectives = [_collective(bench, kind, name, where) for name, where in groups.items() for kind in KINDS]
    links = {}
    for name in groups:
        share = ranks if name == "inter" else 1
        rates = [_rate(c, share) for c in collectives if c.group == name]
        nominal = nominal_bits_per_s if name == "inter" else None
        links[name] = Link(min(max(rates), nominal or max(rates)), nominal)
    if not topology.single:
        collectives += [_collective(bench, kind, "flat", "flat") for kind in KINDS]
    return {"collectives": tuple(collectives), "links": links, "cores_per_rank": _cores_per_rank(bench)}


def _cores_per_rank(bench: _Bench) -> float:
    """What the busiest machine has for each of its ranks; emulated hosts share one machine."""
    machine = Path("/proc/sys/kernel/random/boot_id")
    own = machine.read_text().strip() if machine.exists() else socket.gethostname()
    everybody: list[Any] = [None] * bench.topology.world
    dist.all_gather_object(everybody, (own, len(os.sched_getaffinity(0))), group=bench.wire)
    names = [name for name, _ in everybody]
    return float(min(cores / names.count(name) for name, cores in everybody))


def _rate(measured: Collective, share: int) -> float:
    """Bits per second that a host's link carried with the largest messages; latency is little then."""
    size, seconds = measured.curve.points[-1]
    return share * BITS * wire_factor(measured.kind, measured.peers, "host") * size / seconds


def _collective(bench: _Bench, kind: str, name: str, where: str) -> Collective:
    wall, cpu = list[tuple[float, float]](), list[tuple[float, float]]()
    for size in SIZES:
        times = [_timed(bench, kind, where, size) for _ in range(ROUNDS)]
        seconds, worked = (statistics.median(column) for column in zip(*times))
        wall.append((float(size), seconds))
        cpu.append((float(size), worked))
        if seconds > ENOUGH_S:
            break
    return Collective(kind, name, bench.topology.groups()[where].size, Curve(tuple(wall)), Curve(tuple(cpu)))


def _timed(bench: _Bench, kind: str, where: str, size: int) -> tuple[float, float]:
    """Seconds until the slowest rank is through, and those that a rank's processor worked, on average."""
    whole = torch.zeros(size // ITEM)
    device = "cuda" if dist.get_backend(bench.plain) == "nccl" else "cpu"
    own = whole.to(device) if kind == "ar" and where == "flat" else whole
    dist.barrier(bench.wire)
    begin, worked = time.perf_counter(), time.process_time()
    if kind == "ar" and where == "flat":
        dist.all_reduce(own, group=bench.plain)
        if device == "cuda":
            torch.cuda.synchronize()
    elif kind == "ar":
        _exchange(bench, "rs", where, whole)
        _exchange(bench, "ag", where, whole[: whole.numel() // bench.topology.groups()[where].size])
    else:
        _exchange(bench, kind, where, whole)
    return bench.slowest(time.perf_counter() - begin), bench.mean(time.process_time() - worked)


def _exchange(bench: _Bench, kind: str, where: str, whole: torch.Tensor) -> None:
    """Data from rank to rank as a step of that kind sends it; sums are formed where a step forms them."""
    members = bench.topology.groups()[where]
    others = [rank for rank in members.ranks if rank != bench.rank]
    first = members.ranks[0]
    data = whole[: max(1, whole.numel() // members.size)] if kind in ("rs", "a2a") else whole
    to = of = others
    if kind in ("red", "gat"):
        to, of = ([first], []) if bench.rank != first else ([], others)
    elif kind == "bc":
        to, of = (others, []) if bench.rank == first else ([], [first])
    received = [torch.empty_like(data) for _ in of]
    # Every receive is there before the first send; all works are kept until they are waited for.
    works = [dist.irecv(into, group=bench.wire, group_src=rank) for rank, into in zip(of, received)]
    works += [dist.isend(data, group=bench.wire, group_dst=rank) for rank in to]
    for work in works:
        if work is not None:
            work.wait()
    if kind in ("rs", "red"):
        total = data.clone()
        for part in received:
            total += part
