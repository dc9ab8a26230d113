"""What collectives cost on a cluster of any shape and rate, from what they cost where they were measured.

A measured line (latency + seconds per byte) is taken apart: its latency by the number of rounds of the collective, its
slope into the time on the wire, which follows from the link's rate, and the rest. Put together again for other groups
and rates it predicts what was not measured. The rest is use of the link that is no better at another rate. Where it is
not known what a collective takes of the processors, it may as well be work of theirs, which stays on a faster link; the
larger of both is taken then. Where it was measured, it is the same at every rate, goes on beside the wire's, and limits
fast links whose ranks share cores.

Wire bytes are those of the busiest direction of a link, for each byte that a rank puts in. A network card serves all
ranks of its host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import PlanError
from .profile import Collective, Line, Link, Profile
from .timeline import INTER_IN, INTER_OUT, INTRA_IN, INTRA_OUT

BITS = 8
# How much longer work takes where a rank has no core at all than its share of one would tell. With half a core it took
# 1.5 to 1.6 times as long at the rate that was profiled, at most twice as long at another (experiments/prediction).
WAITING, MOST_WAITING = 1.0, 2.0
SOCKETS_APART = 2.0  # cores of a rank from which on sockets and coding do not share one


@dataclass(frozen=True)
class Topology:
    """A cluster: hosts, ranks on each, and the rates that its links are called by; None: as in the profile."""

    hosts: int
    ranks_per_host: int = 1
    inter_bits_per_s: float | None = None
    intra_bits_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise PlanError(
                f"{self.hosts} hosts with {self.ranks_per_host} ranks each: there must be at least 1 of both"
            )
        if self.world < 2:
            raise PlanError("a single rank has nothing to exchange: plan for at least 2")
        for name, rate in (("inter", self.inter_bits_per_s), ("intra", self.intra_bits_per_s)):
            if rate is not None and not 0 < rate < math.inf:
                raise PlanError(f"a rate of {rate} bit/s for {name}: it must be above 0")

    @classmethod
    def of(cls, profile: Profile) -> Topology:
        """The cluster that the profile was measured on."""
        return cls(profile.hosts, profile.ranks_per_host)

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    def size(self, group: str) -> int:
        return {"flat": self.world, "intra": self.ranks_per_host, "inter": self.hosts}[group]

    def at(self, inter_bits_per_s: float) -> Topology:
        return replace(self, inter_bits_per_s=inter_bits_per_s)


@dataclass(frozen=True)
class Cost:
    """One collective: seconds = latency_s + s_per_byte * bytes that each rank puts in."""

    resources: int
    latency_s: float
    s_per_byte: float
    source: str  # what was measured for it
    cpu_s: float = 0.0  # of a core, and for each byte
    cpu_s_per_byte: float = 0.0


@dataclass
class Network:
    profile: Profile
    topology: Topology
    assumptions: list[str] = field(default_factory=list)  # what had to be taken for granted

    def __post_init__(self) -> None:
        profile, topology = self.profile, self.topology
        self._measured = {(c.kind, c.group): c for c in profile.collectives}
        self._there = _rates(profile.links, Topology.of(profile))
        self._here = _rates(profile.links, topology)
        for link, needed in (("inter", topology.hosts > 1), ("intra", topology.ranks_per_host > 1)):
            if needed and link not in self._here:
                where = "between hosts" if link == "inter" else "inside a host"
                raise PlanError(f"the profile knows no link {where}: give its rate with --{link}, for example 100gbit")
        if self.share < 1:
            self._assume(f"a rank has {self.share:.2g} of a processor core, as where it was measured")
        self._cache: dict[tuple[str, str, int], Cost] = {}

    def cost(self, kind: str, group: str, active: int = 1) -> Cost:
        """A collective of that kind; `active` ranks of each host take part in groups of their own at the same time."""
        key = (kind, group, active)
        if key not in self._cache:
            self._cache[key] = self._make(kind, group, active)
        return self._cache[key]

    def _make(self, kind: str, group: str, active: int) -> Cost:
        transport, topology = self.profile.transport, self.topology
        measured = self._find(kind, group)
        if kind == "ddp":
            kind, transport = "ar", "nccl" if self.by_nccl else transport
        line = measured.curve.line
        there, known = Topology.of(self.profile), "a2a" if kind == "pass" else kind
        bytes_there = wire_factor(known, measured.peers, transport)
        wire_there = _wire_s(known, measured.group, there, self._there, transport, there.ranks_per_host)
        rest = max(0.0, line.s_per_byte - wire_there) / bytes_there if measured.cpu is None else 0.0
        slower = max(1.0, line.s_per_byte / wire_there)
        wire_here = _wire_s(kind, group, topology, self._here, transport, active)
        peers = topology.size(group)
        more_rounds = _rounds(kind, peers, transport) / _rounds(known, measured.peers, transport)
        more_bytes = wire_factor(kind, peers, transport) / bytes_there
        cpu = Line(0.0, 0.0) if measured.cpu is None else measured.cpu.line
        s_per_byte = max(wire_here * slower, wire_here + rest * wire_factor(kind, peers, transport))
        cpu_s, cpu_s_per_byte = cpu.latency_s * more_rounds, cpu.s_per_byte * more_bytes
        if self.sockets_apart:  # nothing else waits for their core, but no byte can pass sooner than they work
            s_per_byte, cpu_s, cpu_s_per_byte = max(s_per_byte, cpu_s_per_byte), 0.0, 0.0
        source = f"{measured.kind}.{measured.group}"
        resources = _resources(kind, group, topology, transport)
        return Cost(resources, line.latency_s * more_rounds, s_per_byte, source, cpu_s, cpu_s_per_byte)

    @property
    def by_nccl(self) -> bool:
        """Whether plain gradients go by NCCL, and coded ones from the host's memory."""
        return any(kind == "ddp" for kind, _ in self._measured)

    @property
    def sockets_apart(self) -> bool:
        """Whether a rank has a core for sockets beside the one that codes."""
        return (self.profile.cores_per_rank or 1.0) >= SOCKETS_APART

    @property
    def cores(self) -> float:
        """What a rank's work gets of a core when all ranks of its machine are at work: less than its share of it.

        Threads that wait for a core hold up others, on all ranks, that wait for them.
        """
        return self.share / (1 + WAITING * (1 - self.share))

    @property
    def doubt(self) -> float:
        """By how much longer a rank's work may take than that, relative: nothing where it has a core for itself."""
        return (1 + MOST_WAITING * (1 - self.share)) / (1 + WAITING * (1 - self.share)) - 1

    @property
    def share(self) -> float:
        """The part of a core that a thread gets when all ranks of its machine are at work."""
        return min(1.0, self.profile.cores_per_rank or 1.0)

    def _find(self, kind: str, group: str) -> Collective:
        """The measurement that stands for a collective; what is not the same is noted."""
        if kind == "ddp" and not self.by_nccl:
            kind = "ar"
        if kind == "pass":  # to one peer what an all-to-all sends to each
            kind = "a2a"
        nearest = {"flat": ("flat", "inter", "intra"), "inter": ("inter", "flat", "intra")}
        for candidate in nearest.get(group, ("intra", "flat", "inter")):
            if (kind, candidate) in self._measured:
                found = self._measured[kind, candidate]
                alone = self.profile.ranks_per_host == 1 or self.profile.hosts == 1
                if candidate != group and not (alone and "flat" in (candidate, group)):
                    self._assume(f"collectives of the {group} group have the latency of those in the {candidate} group")
                return found
        raise PlanError(f"the profile has no measurement of {kind!r}: make one again with `gradzip profile`")

    def _assume(self, text: str) -> None:
        if text not in self.assumptions:
            self.assumptions.append(text)


def _rates(links: Mapping[str, Link], topology: Topology) -> dict[str, float]:
    """Bits per second that get through, for each link that there is a rate for."""
    found = {}
    for name, wanted in (("inter", topology.inter_bits_per_s), ("intra", topology.intra_bits_per_s)):
        if wanted is not None:
            found[name] = wanted * (links[name].efficiency if name in links else 1.0)
        elif name in links:
            found[name] = links[name].bits_per_s
    return found


def _rounds(kind: str, peers: int, transport: str) -> int:
    """Messages that follow each other. NCCL reduces and broadcasts along trees; pairs and rings take one round each."""
    if transport == "nccl" and kind in ("ar", "red", "bc"):
        return max(1, math.ceil(math.log2(peers))) * (2 if kind == "ar" else 1)
    return 1 if kind == "pass" else (peers - 1) * (2 if kind == "ar" else 1)


def wire_factor(kind: str, peers: int, transport: str) -> float:
    """Bytes that pass the busiest rank in one direction, for each byte that a rank puts in."""
    if kind == "ar":
        return 2 * (peers - 1) / peers
    if kind in ("rs", "a2a"):
        return (peers - 1) / peers
    if kind == "pass" or (kind in ("red", "bc") and transport == "nccl"):
        return 1.0  # passed on; along a tree, in a pipeline
    return peers - 1.0


def _wire_s(kind: str, group: str, topology: Topology, rates: dict[str, float], transport: str, active: int) -> float:
    """Seconds on the slowest link for each byte that a rank puts in."""
    hosts, local = topology.hosts, topology.ranks_per_host
    factor = wire_factor(kind, topology.size(group), transport)
    if group == "flat" and hosts > 1 and local > 1:
        if kind == "ar" or (transport == "nccl" and kind != "a2a" and kind != "gat"):
            inter = intra = factor  # a ring crosses each card once
        else:
            away = (topology.world - local) / (topology.world - 1)
            rooted = kind in ("red", "gat", "bc")
            inter, intra = factor * away * (1 if rooted else local), factor * (1 - away)
        return max(inter * BITS / rates["inter"], intra * BITS / rates["intra"])
    link = "intra" if group == "intra" or hosts == 1 else "inter"
    return factor * (active if group == "inter" else 1) * BITS / rates[link]


def _resources(kind: str, group: str, topology: Topology, transport: str) -> int:
    """Links of the busiest rank: the first one of a gathering, any other one where data is passed on."""
    inside = group == "intra" or (group == "flat" and topology.ranks_per_host > 1)
    between = group == "inter" or (group == "flat" and topology.hosts > 1)
    directions = {"red": (0, 1), "gat": (0, 1), "bc": (1, 0)}.get(kind, (1, 1))  # out, in
    if transport == "nccl" and kind in ("red", "bc"):
        directions = (1, 1)
    return sum(
        bit * used
        for there, bits in ((inside, (INTRA_OUT, INTRA_IN)), (between, (INTER_OUT, INTER_IN)))
        for bit, used in zip(bits, directions)
        if there
    )
