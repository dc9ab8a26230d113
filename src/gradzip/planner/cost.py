"""What each step of a route takes, for gradients of any size: the executor's walk over a route, with bytes for data.

Every amount is a sum over FEATURES of a unit: so a route is walked once and then priced for all units together. The
walk follows the first rank of each group, which has the most to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..routes import NAMED, Route, Step
from .network import Network
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
        return _Walk(self, None).take(runs)

    def ddp(self, size_bytes: float) -> tuple[float, float]:
        """DDP's own all-reduce of a bucket: seconds that it holds the links, and until it is there after that."""
        cost = self.network.cost("ddp", "flat")
        if self.network.profile.transport != "host" or self.network.by_nccl:
            return cost.latency_s + cost.s_per_byte * size_bytes, 0.0
        busy = cost.cpu_s_per_byte / self.network.share  # a single thread, for which no other one waits
        return max(cost.s_per_byte, busy) * size_bytes, max(cost.latency_s, cost.cpu_s / self.network.share)

    def coded(self, route: Route, codec: CodecCost) -> list[Priced]:
        return _Walk(self, codec).take(route)

    def allreduce(self, codec: CodecCost, device: str) -> list[Priced]:
        """Summable payloads, averaged as they are."""
        walk = _Walk(self, codec)
        walk.code("enc", device, 1.0)
        walk.communicate("ar", "flat", walk.held())
        walk.code("dec", device, 1.0)
        return walk.finish()

    def factors(self, codec: CodecCost, device: str) -> list[Priced]:
        """Low rank: two averages that depend on each other, a third of the work before, between and after them."""
        walk = _Walk(self, codec)
        for _ in range(2):
            walk.code("enc", device, 1.0, 1 / 3)
            walk.communicate("ar", "flat", walk.held() / 2)
        walk.code("enc", device, 1.0, 1 / 3)
        walk.coded = False
        return walk.finish()


class _Walk:
    def __init__(self, pricing: Pricing, codec: CodecCost | None) -> None:
        self.pricing, self.codec = pricing, codec
        self.profile = pricing.network.profile
        self.topology = pricing.network.topology
        # Gradients lie on the GPU if there is one to code on, or to copy from.
        self.home = "gpu" if "gpu" in self.profile.devices or self.profile.copies else "cpu"
        self.place = self.home
        self.share = 1.0  # of the tensor, that a rank holds
        self.coded = False
        self.contributions = 1.0
        self.frames = 1.0
        self.payload = "payload"
        self.summed: set[str] = set()  # the groups whose sum was formed before encoding
        self.pending: set[str] = set()
        self.active = self.topology.ranks_per_host
        self.tasks: list[Priced] = []

    def take(self, route: Route) -> list[Priced]:
        for number, (step, joins) in enumerate(zip(route.steps, route.joins)):
            if step.kind == "enc":
                self.frames = self.dealt(route.steps[number + 1 :])
                self.code("enc", step.where, self.share)
            elif step.kind == "dec":
                self.code("dec", step.where, self.share)
            else:
                self.collective(step, joins)
        return self.finish()

    def finish(self) -> list[Priced]:
        self.move(self.home)
        return self.tasks

    def dealt(self, steps: Sequence[Step]) -> float:
        """Frames that an encode makes: one for each part that is dealt out before it is decoded."""
        frames = 1.0
        for step in steps:
            if step.kind == "dec":
                break
            if step.kind == "a2a":
                frames *= self.topology.size(step.where)
        return frames

    def held(self) -> Amount:
        """The bytes that a rank holds."""
        if not self.coded:
            return amount(raw=self.share)
        bytes_held = amount(tensors=HEADER_BYTES * self.frames * self.contributions)
        return bytes_held + amount(**{self.payload: self.share * self.contributions})

    def add(self, label: str, resources: int, seconds: Amount, source: str) -> None:
        self.tasks.append(Priced(label, resources, seconds, source))

    def move(self, place: str) -> None:
        if place == self.place:
            return
        if not self.pricing.free:
            name = "device_to_host" if place == "cpu" else "host_to_device"
            line = _line(self.profile.copies.get(name))
            seconds = line.s_per_byte * self.held() + amount(one=line.latency_s)
            self.add(name, D2H if place == "cpu" else H2D, seconds, name)
        self.place = place

    def code(self, kind: str, device: str, share: float, part: float = 1.0) -> None:
        """Codes that share of the tensors; `part` of the work."""
        assert self.codec is not None
        self.move(device)
        curve = (self.codec.encode if kind == "enc" else self.codec.decode)[device]
        times = self.contributions if kind == "dec" else 1.0
        if not self.pricing.free:
            line, each = curve.line, curve.frame_s * self.frames * times
            seconds = part * amount(one=line.latency_s, tensors=each, raw=line.s_per_byte * share * times)
            if device == "cpu":
                seconds /= self.pricing.network.cores
            source = f"{kind} {self.codec.name}@{device}"
            self.add(f"{kind}.{device}", GPU if device == "gpu" else CPU, seconds, source)
        if kind == "enc":
            self.coded = True
            self.contributions = 1.0
            self.payload = self.payload_name()
        else:
            self.coded = False
            self.contributions = self.frames = 1.0
            self.summed |= self.pending
            self.pending = set()

    def payload_name(self) -> str:
        if self.summed >= {"intra", "inter"} or "flat" in self.summed:
            return "payload_flat"
        return next((f"payload_{group}" for group in ("intra", "inter") if group in self.summed), "payload")

    def collective(self, step: Step, joins: bool) -> None:
        peers = self.topology.size(step.where)
        self.communicate(step.kind, step.where, self.held())
        dealt = step.kind in ("rs", "a2a") or (step.kind == "ag" and joins)
        if dealt and joins:
            self.share *= peers
            self.frames *= peers if self.coded else 1
        elif dealt:
            self.share /= peers
            self.frames /= peers if self.coded else 1
        if self.coded and not joins:
            self.contributions *= peers
        if not joins:
            (self.pending if self.coded else self.summed).add(step.where)
            if step.where == "intra" and not dealt:
                self.active = 1  # the first rank of each host goes on alone

    def communicate(self, kind: str, group: str, held: Amount) -> None:
        """The collective, with the copies that bring data to where it is taken from.

        Plain values go as DDP sends them, from where they lie; coded ones by the transport of the profile.
        """
        if self.coded or self.place != self.home:
            self.move("cpu" if self.profile.transport == "host" else self.home)
        network = self.pricing.network
        cost = network.cost(kind, group, self.active if group == "inter" else 1)
        if self.profile.transport != "host":
            seconds = amount(one=cost.latency_s) + cost.s_per_byte * held
            self.add(f"{kind}.{group}", cost.resources, seconds, cost.source)
            return
        # While messages are under way others use the link, and what they take of the processor coding cannot have.
        once = max(cost.cpu_s, self.profile.chunk_s / EXCHANGES)
        if once or cost.cpu_s_per_byte:
            seconds = (amount(one=once) + cost.cpu_s_per_byte * held) / network.cores
            self.add("sockets", CPU, seconds, f"cpu {cost.source}")
        self.add(f"{kind}.{group}", cost.resources, cost.s_per_byte * held, cost.source)
        self.add("latency", 0, amount(one=max(0.0, cost.latency_s - cost.cpu_s / network.cores)), cost.source)


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
