"""What each step of a program takes, for gradients of any size: its steps, with bytes for data.

Every amount is a sum over FEATURES of a unit. So the program of a route is read once for a cluster (`loads`) and then
priced for all codecs and all units. Steps are those of the first rank of each group, which has the most to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..exchange.compiler import compile_route
from ..exchange.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Buffer,
    Communicate,
    Decode,
    Encode,
    Gather,
    Groups,
    Pass,
    Program,
    Recode,
    Reduce,
    ReduceScatter,
)
from ..exchange.program import Step as ProgramStep
from ..exchange.topology import Topology as Ranks
from ..routes import NAMED, Route
from .network import Network, Topology
from .profile import CodecCost, Curve, Line
from .timeline import CPU, D2H, GPU, H2D

Amount = npt.NDArray[np.float64]  # a factor for each feature

# 1; tensors, each of which makes frames of its own; raw bytes; payload bytes of one rank's gradient, and of the
# sum over a host, over all hosts and over all ranks. Payloads of sums are larger for codecs that forward the union of
# what ranks chose, and where sums have more bits than gradients.
FEATURES = ("one", "tensors", "raw", "payload", "payload_intra", "payload_inter", "payload_flat")
HEADER_BYTES = 32.0  # of a frame
EXCHANGES = 2  # of the route on which the cost of a chunk was measured
DEALT = Route.parse("rs.flat > ag.flat")
KINDS: dict[type[ProgramStep], str] = {
    AllReduce: "ar",
    ReduceScatter: "rs",
    Reduce: "red",
    AllToAll: "a2a",
    AllGather: "ag",
    Gather: "gat",
    Broadcast: "bc",
    Pass: "pass",
}


@dataclass(frozen=True)
class Priced:
    """A task whose seconds are a sum over features."""

    label: str
    resources: int
    seconds: Amount
    source: str  # the measurement behind it


@dataclass(frozen=True)
class Pricing:
    """Prices steps on one network. `free` makes coding and copies cost nothing: the bound of all compression."""

    network: Network
    free: bool = False

    def plain(self, route: Route) -> list[Priced]:
        """Uncompressed. Beside compressed ones the runtime deals out and collects even what is an all-reduce."""
        runs = DEALT if route == NAMED["allreduce"] and self.network.profile.transport == "host" else route
        return self._price(loads(runs, self.network.topology), None)

    def ddp(self, size_bytes: float) -> tuple[float, float]:
        """DDP's own all-reduce of a bucket: seconds that it holds the links, and until it is there after that."""
        cost = self.network.cost("ddp", "flat")
        if self.network.profile.transport != "host" or self.network.by_nccl:
            return cost.latency_s + cost.s_per_byte * size_bytes, 0.0
        busy = cost.cpu_s_per_byte / self.network.share  # a single thread, for which no other one waits
        return max(cost.s_per_byte, busy) * size_bytes, max(cost.latency_s, cost.cpu_s / self.network.share)

    def coded(self, route: Route, codec: CodecCost) -> list[Priced]:
        return self._price(loads(route, self.network.topology), codec)

    def allreduce(self, codec: CodecCost, device: str) -> list[Priced]:
        """Summable payloads, averaged as they are."""
        encode, decode = Load("enc", device, _VALUES), Load("dec", device, _FRAMES, True)
        return self._price((encode, Load("ar", "flat", _FRAMES, True), decode), codec)

    def factors(self, codec: CodecCost, device: str) -> list[Priced]:
        """Low rank: two averages that depend on each other, a third of the work before, between and after them."""
        first = Load("enc", device, _VALUES, work=1 / 3)
        average, later = Load("ar", "flat", _FRAMES / 2, True), Load("enc", device, _FRAMES, True, work=1 / 3)
        return self._price((first, average, later, average, later), codec)

    def _price(self, steps: Sequence[Load], codec: CodecCost | None) -> list[Priced]:
        return _Prices(self, codec).of(steps)


class Load(NamedTuple):
    """What one step works on."""

    kind: str  # enc, dec, or one of KINDS
    where: str  # the device, or the group
    held: Amount  # bytes that the step reads
    coded: bool = False  # these are frames
    share: float = 1.0  # of the message: the part that is coded, once for each term
    frames: float = 1.0  # of each tensor, for each term
    terms: float = 1.0  # that a decode adds up
    alone: bool = False  # one of a host's ranks takes part, and not all of them
    work: float = 1.0  # the part of a codec's seconds that is spent here


def loads(route: Route, topology: Topology) -> tuple[Load, ...]:
    """The steps of a route's program on a cluster of that shape."""
    return _loads(route, topology.hosts, topology.ranks_per_host)


@lru_cache(maxsize=1 << 13)
def _loads(route: Route, hosts: int, ranks: int) -> tuple[Load, ...]:
    cluster = Ranks(0, tuple(tuple(range(host * ranks, (host + 1) * ranks)) for host in range(hosts)))
    # Which steps there are depends neither on the message nor on the codec.
    program = compile_route("", route, ("message",), (1,), torch.float32, cluster)
    reading = _Reading(program, {name: members.size for name, members in cluster.groups().items()})
    return tuple(load for step in program.steps for load in reading.loads(step))


class _Reading:
    """Tells what the buffers of a program hold, in amounts."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self._program, self._sizes = program, sizes

    def loads(self, step: ProgramStep) -> list[Load]:
        source, target = self._program.buffer(step.source), self._program.buffer(step.target)
        if isinstance(step, Communicate):
            alone = "intra" in step.only
            return [Load(KINDS[type(step)], step.group, self._bytes(source), source.coded, alone=alone)]
        found = []
        if isinstance(step, Decode | Recode):
            terms = self._count(source.terms)
            found.append(
                Load("dec", step.device, self._bytes(source), True, self._share(source), self._frames(source), terms)
            )
        if isinstance(step, Encode | Recode):
            held = amount(raw=1 / self._count(source.within))
            found.append(Load("enc", step.device, held, False, self._share(target), self._frames(target)))
        return found

    def _count(self, groups: Groups) -> float:
        return float(math.prod(self._sizes[group] for group in groups))

    def _share(self, frames: Buffer) -> float:
        """The part of the message that frames are of: in a ring, that of one member."""
        return 1 / self._count((*frames.within, *frames.over[-1:]) if frames.leaf else frames.within)

    def _frames(self, frames: Buffer) -> float:
        return 1.0 if frames.leaf else self._count(frames.over)

    def _bytes(self, buffer: Buffer) -> Amount:
        share = self._share(buffer)
        if not buffer.coded:
            return amount(raw=share)
        terms = self._count(buffer.terms)
        headers = amount(tensors=HEADER_BYTES * self._frames(buffer) * terms)
        return headers + amount(**{self._payload(self._program.hop(buffer.name).summed): share * terms})

    def _payload(self, summed: int) -> str:
        """The feature that says how large frames are of the sum of so many ranks; in a ring, as of the whole sum."""
        if summed == self._sizes["flat"]:
            return "payload_flat"
        names = {self._sizes["inter"]: "payload_inter", self._sizes["intra"]: "payload_intra", 1: "payload"}
        return names.get(summed, "payload_flat")


class _Prices:
    """Prices steps one after the other, with the copies that bring data to where a step wants it."""

    def __init__(self, pricing: Pricing, codec: CodecCost | None) -> None:
        self._pricing, self._codec = pricing, codec
        self._profile = pricing.network.profile
        # Gradients lie on the GPU if there is one to code on, or to copy from.
        self._home = "gpu" if "gpu" in self._profile.devices or self._profile.copies else "cpu"
        self._place = self._home
        self._tasks: list[Priced] = []

    def of(self, steps: Sequence[Load]) -> list[Priced]:
        for step in steps:
            if self._codec is not None and self._codec.by_message:
                step = step._replace(held=step.held @ _ONE_HEADER)
            if step.kind in ("enc", "dec"):
                self._code(step)
            else:
                self._communicate(step)
        self._move(self._home, _VALUES)
        return self._tasks

    def _add(self, label: str, resources: int, seconds: Amount, source: str) -> None:
        self._tasks.append(Priced(label, resources, seconds, source))

    def _move(self, place: str, held: Amount) -> None:
        if place == self._place:
            return
        if not self._pricing.free:
            name = "device_to_host" if place == "cpu" else "host_to_device"
            line = _line(self._profile.copies.get(name))
            seconds = line.s_per_byte * held + amount(one=line.latency_s)
            self._add(name, D2H if place == "cpu" else H2D, seconds, name)
        self._place = place

    def _code(self, step: Load) -> None:
        assert self._codec is not None
        device = step.where
        self._move(device, step.held)
        if self._pricing.free:
            return
        curve = (self._codec.encode if step.kind == "enc" else self._codec.decode)[device]
        line, each = curve.line, curve.frame_s * step.frames * step.terms
        values = line.s_per_byte * step.share * step.terms
        seconds = step.work * amount(one=line.latency_s, tensors=each, raw=values)
        if device == "cpu":
            seconds /= self._pricing.network.cores
        source = f"{step.kind} {self._codec.name}@{device}"
        self._add(f"{step.kind}.{device}", GPU if device == "gpu" else CPU, seconds, source)

    def _communicate(self, step: Load) -> None:
        """The collective. Plain values go as DDP sends them, from where they lie; frames by the profile's transport."""
        by_host = self._profile.transport == "host"
        if step.coded or self._place != self._home:
            self._move("cpu" if by_host else self._home, step.held)
        network = self._pricing.network
        active = network.topology.ranks_per_host if step.where == "inter" and not step.alone else 1
        cost, label = network.cost(step.kind, step.where, active), f"{step.kind}.{step.where}"
        if not by_host:
            self._add(label, cost.resources, amount(one=cost.latency_s) + cost.s_per_byte * step.held, cost.source)
            return
        # While messages are under way others use the link, and what they take of the processor coding cannot have.
        once = max(cost.cpu_s, self._profile.chunk_s / EXCHANGES)
        if once or cost.cpu_s_per_byte:
            seconds = (amount(one=once) + cost.cpu_s_per_byte * step.held) / network.cores
            self._add("sockets", CPU, seconds, f"cpu {cost.source}")
        self._add(label, cost.resources, cost.s_per_byte * step.held, cost.source)
        self._add("latency", 0, amount(one=max(0.0, cost.latency_s - cost.cpu_s / network.cores)), cost.source)


def amount(
    one: float = 0.0,
    tensors: float = 0.0,
    raw: float = 0.0,
    payload: float = 0.0,
    payload_intra: float = 0.0,
    payload_inter: float = 0.0,
    payload_flat: float = 0.0,
) -> Amount:
    """A factor for each of FEATURES."""
    return np.array((one, tensors, raw, payload, payload_intra, payload_inter, payload_flat))


_VALUES = amount(raw=1.0)
_FRAMES = amount(tensors=HEADER_BYTES, payload=1.0)  # one of each tensor, whole
# Where frames hold parts of all tensors, a message has as many headers as otherwise each tensor.
_ONE_HEADER = np.eye(len(FEATURES))
_ONE_HEADER[FEATURES.index("tensors")] = amount(one=1.0)


def _line(curve: Curve | None) -> Line:
    return Line(0.0, 0.0) if curve is None else curve.line


def features(
    raw: float,
    payload: float,
    codec: CodecCost | None,
    network: Network,
    tensors: float = 1.0,
    payload_of_sum: float | None = None,
) -> Amount:
    """The features of so many tensors with so many bytes that become so many when coded; sums of ranks may differ."""
    summed = payload if payload_of_sum is None else payload_of_sum
    topology = network.topology
    grows = codec is not None and codec.grows
    sizes = [payload] + [
        min(raw, payload * topology.size(group)) if grows else summed for group in ("intra", "inter", "flat")
    ]
    return np.array([1.0, tensors, raw, *sizes])
