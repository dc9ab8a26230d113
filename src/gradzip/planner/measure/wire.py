"""What collectives cost on the real ranks, alone: torch's all-reduce, and bytes from rank to rank as the runtime sends
them. Every size is timed several times from a common start until the slowest rank is through, and the seconds that the
ranks' processors worked for it are counted. Sizes grow until latency hardly matters, so that all of it takes a few
seconds on slow networks too.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...collectives import Topology
from ..network import BITS, wire_factor
from ..profile import Collective, Curve, Link

SIZES = (4 << 10, 512 << 10, 2 << 20, 8 << 20)  # bytes that each rank puts in
ROUNDS = 3
LONG_S = 0.5  # a call of that length is not repeated
ENOUGH_S = 0.05  # a call of that length tells the rate; larger sizes are left out then
AT_WORK_S = 0.3
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
    """The part of a core that a thread of a rank gets while all ranks are at work: emulated hosts share a machine."""
    dist.barrier(bench.wire)
    begin, worked = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - begin) < AT_WORK_S:
        pass
    return min(1.0, bench.mean((time.thread_time() - worked) / passed))


def _rate(measured: Collective, share: int) -> float:
    """Bits per second that a host's link carried with the largest messages; latency is little then."""
    size, seconds = measured.curve.points[-1]
    return share * BITS * wire_factor(measured.kind, measured.peers, "host") * size / seconds


def _collective(bench: _Bench, kind: str, name: str, where: str) -> Collective:
    wall, cpu = list[tuple[float, float]](), list[tuple[float, float]]()
    device = "cuda" if dist.get_backend(bench.plain) == "nccl" and kind == "ar" and where == "flat" else "cpu"
    members = bench.topology.groups()[where].size
    for size in SIZES:
        whole, room = torch.zeros(size // ITEM, device=device), torch.zeros(members * size // ITEM)
        times = [_timed(bench, kind, where, whole, room)]
        while len(times) <= ROUNDS and times[-1][0] < LONG_S:  # the first one warms up, if there is time for more
            times.append(_timed(bench, kind, where, whole, room))
        seconds, worked = (statistics.median(column) for column in zip(*(times[1:] or times)))
        wall.append((float(size), seconds))
        cpu.append((float(size), worked))
        if seconds > ENOUGH_S:
            break
    return Collective(kind, name, members, Curve(tuple(wall)), Curve(tuple(cpu)))


def _timed(bench: _Bench, kind: str, where: str, whole: torch.Tensor, room: torch.Tensor) -> tuple[float, float]:
    """Seconds until the slowest rank is through, and those that a rank's processor worked, on average."""
    dist.barrier(bench.wire)
    begin, worked = time.perf_counter(), time.process_time()
    if kind == "ar" and where == "flat":
        dist.all_reduce(whole, group=bench.plain)
        if whole.is_cuda:
            torch.cuda.synchronize()
    elif kind == "ar":
        _exchange(bench, "rs", where, whole, room)
        _exchange(bench, "ag", where, whole[: whole.numel() // bench.topology.groups()[where].size], room)
    else:
        _exchange(bench, kind, where, whole, room)
    seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    return bench.slowest(seconds), bench.mean(worked)


def _exchange(bench: _Bench, kind: str, where: str, whole: torch.Tensor, room: torch.Tensor) -> None:
    """Data from rank to rank as a step of that kind sends it; sums are formed where a step forms them."""
    members = bench.topology.groups()[where]
    others = [rank for rank in members.ranks if rank != bench.rank]
    first = members.ranks[0]
    to = of = others
    if kind in ("red", "gat"):
        to, of = ([first], []) if bench.rank != first else ([], others)
    elif kind == "bc":
        to, of = (others, []) if bench.rank == first else ([], [first])
    dealt = kind in ("rs", "a2a")
    size = max(1, whole.numel() // members.size) if dealt else whole.numel()
    received = [room[i * size : (i + 1) * size] for i in range(len(of))]
    # Every receive is there before the first send; all works are kept until they are waited for.
    works = [dist.irecv(into, group=bench.wire, group_src=rank) for rank, into in zip(of, received)]
    for number, rank in enumerate(to):
        data = whole[number * size : (number + 1) * size] if dealt and whole.numel() >= members.size else whole[:size]
        works.append(dist.isend(data, group=bench.wire, group_dst=rank))
    for work in works:
        if work is not None:
            work.wait()
    if kind in ("rs", "red"):
        total = whole[:size].clone()
        for part in received:
            total += part
