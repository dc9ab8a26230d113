"""What collectives cost on the real ranks, alone: DDP's all-reduce on the model's own process group, and bytes from
rank to rank as the runtime sends them. Every size is timed several times from a common start until the slowest rank is
through, in turn with all others, so that a hiccup spoils one time of each and not all of one. Sizes grow until latency
hardly matters, so that all of it takes a few seconds on slow networks too.

The seconds that the ranks' processors worked are counted, too, but not of NCCL: those who wait for it spin.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...exchange.topology import Topology
from ..network import BITS, wire_factor
from ..profile import Collective, Curve, Link

# Bytes that each rank puts in. The last one tells the rate of a link that lets the first megabytes pass at once.
SIZES = (4 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
ROOM = 512 << 20  # bytes that may arrive at once
ROUNDS, ROUNDS_OF_LONG = 5, 3
SHORT_S = 0.05  # a call of that length is repeated more often
LONG_S = 0.5  # one of that length not at all
ENOUGH_S = 0.03  # a call of that length tells the rate; larger sizes are left out then
AT_WORK_S = 0.3
A_WHOLE_CORE = 0.95  # a thread that gets that much of one has it for itself
KINDS = ("ar", "rs", "ag", "a2a", "red", "gat", "bc")
ITEM = 4  # bytes of a value


def measure_network(
    group: dist.ProcessGroup, device: torch.device, nominal_bits_per_s: float | None = None
) -> dict[str, Any]:
    """`collectives`, `links` and `cores_per_rank` of a profile. Call it on all ranks of the group at the same point."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    topology = Topology.of_ranks(rank, ranks)
    by_nccl = device.type == "cuda" and "nccl" in dist.get_backend(group)
    return _measure(_Bench(rank, own_group(group), topology, group, device, by_nccl), nominal_bits_per_s)


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
    device: torch.device  # of the gradients
    by_nccl: bool  # what DDP averages

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
    wanted = ["inter"] * (hosts > 1) + ["intra"] * (ranks > 1) + ["flat"] * (not topology.single)
    groups = {name: "flat" if topology.single else name for name in wanted}
    series = [_Series(bench, kind, name, where) for name, where in groups.items() for kind in KINDS]
    if bench.by_nccl:
        series += [_Series(bench, "ddp", name, where) for name, where in groups.items() if where == "flat"]
    collectives = _timed_in_turn(series)
    links = {}
    for name in groups:
        if name != "flat":
            share = ranks if name == "inter" else 1
            rates = [_rate(c, share) for c in collectives if c.group == name]
            nominal = nominal_bits_per_s if name == "inter" else None
            links[name] = Link(min(max(rates), nominal or max(rates)), nominal)
    return {"collectives": tuple(collectives), "links": links, "cores_per_rank": _cores_per_rank(bench)}


def _rate(measured: Collective, share: int) -> float:
    """Bits per second that a host's link carried with the largest messages; latency is little then."""
    size, seconds = measured.curve.points[-1]
    kind = "ar" if measured.kind == "ddp" else measured.kind
    return share * BITS * wire_factor(kind, measured.peers, "host") * size / seconds


# -- cores -------------------------------------------------------------------------------------------------------------


def _cores_per_rank(bench: _Bench) -> float:
    """What a rank has while all are at work: emulated hosts share a machine.

    Less than one core is measured; where a thread gets a whole one, the cores of a machine are divided by its ranks.
    """
    dist.barrier(bench.wire)
    begin, worked = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - begin) < AT_WORK_S:
        pass
    share = bench.mean((time.thread_time() - worked) / passed)
    machines: list[Any] = [None] * bench.topology.world
    dist.all_gather_object(machines, (_machine(), _cores()), group=bench.wire)
    if share < A_WHOLE_CORE:
        return share
    names = [name for name, _ in machines]
    return max(1.0, min(float(cores) / names.count(name) for name, cores in machines))


def _machine() -> str:
    """The same for all processes of a machine, whatever hosts they take themselves for."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return os.uname().nodename


def _cores() -> float:
    """That this process may use, also where it is allowed so much of their time."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, float(quota) / float(period))
    except (OSError, ValueError):
        return cores


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass
class _Series:
    """The times of one collective, by size."""

    bench: _Bench
    kind: str
    name: str
    where: str
    times: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Sets up connections and memory, and finds out which sizes it takes."""
        self._time(SIZES[0])
        for size in SIZES:
            if self.times and self.room(size) > ROOM:
                break
            self.times[size] = [self._time(size)]
            if self.times[size][0][0] > ENOUGH_S:
                break

    def room(self, size: int) -> int:
        """Bytes that arrive at the one who gets most."""
        members = self.bench.topology.groups()[self.where].size
        return size if self.kind in ("ar", "ddp", "rs", "a2a") else members * size

    def repeat(self, number: int) -> None:
        for size, times in self.times.items():
            first = times[0][0]
            if number < (0 if first > LONG_S else ROUNDS if first < SHORT_S else ROUNDS_OF_LONG):
                times.append(self._time(size))

    def collective(self) -> Collective:
        wall, cpu = list[tuple[float, float]](), list[tuple[float, float]]()
        for size, times in self.times.items():
            seconds, worked = (statistics.median(column) for column in zip(*(times[1:] or times)))
            wall.append((float(size), seconds))
            cpu.append((float(size), worked))
        members = self.bench.topology.groups()[self.where].size
        return Collective(
            self.kind, self.name, members, Curve(tuple(wall)), None if self.kind == "ddp" else Curve(tuple(cpu))
        )

    def _time(self, size: int) -> tuple[float, float]:
        """Seconds until the slowest rank is through, and those that a rank's processor worked, on average."""
        bench, members = self.bench, self.bench.topology.groups()[self.where].size
        whole = _memory("whole", size, bench.device if self.kind == "ddp" else _HOST)
        room = _memory("room", self.room(size))
        dist.barrier(bench.wire)
        begin, worked = time.perf_counter(), time.process_time()
        if self.kind == "ddp":
            dist.all_reduce(whole, group=bench.plain)
            torch.cuda.synchronize(bench.device)
        elif self.kind == "ar" and self.where == "flat":
            dist.all_reduce(whole, group=bench.wire if bench.by_nccl else bench.plain)
        elif self.kind == "ar":
            _exchange(bench, "rs", self.where, whole, room)
            _exchange(bench, "ag", self.where, whole[: whole.numel() // members], room)
        else:
            _exchange(bench, self.kind, self.where, whole, room)
        seconds, worked = time.perf_counter() - begin, time.process_time() - worked
        return bench.slowest(seconds), bench.mean(worked)


def _timed_in_turn(series: Sequence[_Series]) -> list[Collective]:
    try:
        for one in series:
            one.prepare()
        for number in range(ROUNDS):
            for one in series:
                one.repeat(number)
        return [one.collective() for one in series]
    finally:
        _kept.clear()


_HOST = torch.device("cpu")
_kept: dict[tuple[str, torch.device], torch.Tensor] = {}


def _memory(what: str, size: int, device: torch.device = _HOST) -> torch.Tensor:
    """The same memory for all: what was never touched costs page faults."""
    values = max(1, size // ITEM)
    if (what, device) not in _kept or _kept[what, device].numel() < values:
        _kept[what, device] = torch.zeros(values, device=device)
    return _kept[what, device][:values]


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
    size = max(1, whole.numel() // members.size) if kind in ("rs", "a2a") else whole.numel()
    received = [room[i * size : (i + 1) * size] for i in range(len(of))]
    # Every receive is there before the first send; all works are kept until they are waited for.
    works = [dist.irecv(into, group=bench.wire, group_src=rank) for rank, into in zip(of, received)]
    works += [dist.isend(whole[:size], group=bench.wire, group_dst=rank) for rank in to]
    for work in works:
        if work is not None:
            work.wait()
    if kind in ("rs", "red"):
        total = whole[:size].clone()
        for part in received:
            total += part
