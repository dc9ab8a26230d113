"""The answer to "will it help me, how much, with what, and what bandwidth do I need?"."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..errors import PlanError
from ..option import Option
from ..plan import Plan
from . import perfetto
from .baselines import Baseline, baselines
from .choices import Limits
from .network import BITS, Network, Topology, wire_factor
from .problem import Problem
from .profile import Profile
from .search import Found, search
from .timeline import CPU, GPU, LINKS, Timeline
from .units import DDP_BUCKET, Unit, buckets, tensors

LEAST_GAIN = 0.01  # below this a plan is not worth having, whatever the uncertainty
SURE = 2.0  # standard deviations of the prediction that a plan must gain
# The least uncertainty where gradients are coded on a GPU and sent from the host's memory. A constant, from an earlier
# run of GPT-2 on four ranks that share an H200; the five rows of bench/results/plan_gpt2.csv are off by 1 to 17 %.
OFF_ON_GPU = 0.16
BUCKETS_MB = (5, 10, 25, 50, 100)
SLOWEST, FASTEST = 10e6, 3.2e12  # bit/s; where the break-even bandwidth is looked for


@dataclass(frozen=True)
class Request:
    """What is planned: a profile on a cluster, under limits. bucket_bytes None: every tensor for itself."""

    profile: Profile
    topology: Topology
    limits: Limits = field(default_factory=Limits)
    bucket_bytes: int | None = DDP_BUCKET

    def units(self) -> list[Unit]:
        return tensors(self.profile) if self.bucket_bytes is None else buckets(self.profile, self.bucket_bytes)

    def problem(self) -> Problem:
        return Problem(Network(self.profile, self.topology), self.units(), self.limits)


@dataclass(frozen=True)
class UnitAnswer:
    unit: Unit
    option: Option
    sent_s: float  # on links
    coded_s: float
    alone_s: float  # the step if this unit alone went plain
    why: str


@dataclass(frozen=True)
class Answer:
    request: Request
    problem: Problem
    found: Found
    timeline: Timeline
    step_s: float
    uncertainty: float  # relative
    doubt: str  # where that comes from
    baselines: tuple[Baseline, ...]
    assumptions: tuple[str, ...]

    @property
    def plain_s(self) -> float:
        """FP32's step."""
        step_s = self.baselines[0].step_s
        assert step_s is not None
        return step_s

    @property
    def gain(self) -> float:
        """Of speed over FP32: 0.5 is half as fast again."""
        return self.plain_s / self.step_s - 1

    @property
    def pays(self) -> bool:
        """Compression gains more than the prediction may be off."""
        return self.gain > max(LEAST_GAIN, self.needed)

    @property
    def needed(self) -> float:
        """The gain from which on a plan is sure to have one."""
        return max(SURE * self.uncertainty, self.crowding)

    @property
    def crowding(self) -> float:
        """Where ranks share cores: the part of a step by which the work of the exchange may take longer than it should.

        How long threads wait for a core is the least certain thing here: a plan has to pay even at the worst that was
        seen (experiments/prediction).
        """
        return self.timeline.busy_s(CPU) * self.problem.network.doubt / self.step_s

    def speedup_over(self, name: str) -> float | None:
        times = [b.step_s for b in self.baselines if b.name.startswith(name)]
        return times[0] / self.step_s if times and times[0] is not None else None

    def options(self) -> dict[str, Option]:
        """The option of every parameter; plain all-reduce for all if compression does not pay."""
        chosen = self.found.plan if self.pays else self.problem.uniform(0)
        return {
            name: self.problem.choices[number].option
            for unit, number in zip(self.problem.units, chosen)
            for name in unit.names
        }

    def to_plan(self, **measured: float) -> Plan:
        """For `attach`. `measured` stands for what the model expects, where that is known better."""
        request = self.request
        expected = {"step_s": self.step_s if self.pays else self.plain_s, "plain_s": self.plain_s}
        expected |= {"uncertainty": self.uncertainty} | self._on_the_wire() | measured
        kept = tuple((s.track, s.name, s.start_s, s.end_s) for s in self.spans()) if self.pays else ()
        bucket = None if request.bucket_bytes is None else request.bucket_bytes / (1 << 20)
        shapes = {t.name: t.shape for t in request.profile.tensors}
        return Plan(self.options(), shapes, request.profile.model, bucket, expected, kept)

    def spans(self) -> list[perfetto.Span]:
        """The timeline, to look at."""
        names = [str(self.problem.units[i]) for i in self.problem.tables.decisions]
        return perfetto.predicted(self.timeline, names)

    def _on_the_wire(self) -> dict[str, float]:
        """What is exposed, and the rate at which a rank sends while anything is under way."""
        network, world = self.problem.network, self.request.topology.world
        if not self.pays:
            priced = [self.problem.pricing.ddp(unit.raw_bytes) for unit in self.problem.units]
            sent = sum(unit.raw_bytes for unit in self.problem.units) * wire_factor("ar", world, "host")
            exposed_s = self.plain_s - self.problem.outside_s - self.request.profile.backward_s
            return {"exposed_s": exposed_s, "bits_per_s": BITS * sent / sum(map(sum, priced))}
        sent, under_way, reached = 0.0, 0.0, 0.0
        for event in self.timeline.events:
            kind, _, group = event.label.partition(".")
            if event.resources & LINKS:
                s_per_byte = network.cost(kind, group).s_per_byte
                factor = wire_factor(kind, self.request.topology.size(group), self.request.profile.transport)
                sent += factor * (event.end_s - event.start_s) / s_per_byte
            elif event.label != "latency":
                continue
            under_way += max(0.0, event.end_s - max(reached, event.start_s))
            reached = max(reached, event.end_s)
        rate = {"bits_per_s": BITS * sent / under_way} if under_way else {}
        return {"exposed_s": self.timeline.exposed_s, **rate}

    def explain(self) -> list[UnitAnswer]:
        """What each unit does and why."""
        problem, plan = self.problem, self.found.plan
        decisions = problem.tables.decisions
        rows = []
        for i, unit in enumerate(problem.units):
            choice = problem.choices[plan[i]]
            own = [e for e in self.timeline.events if decisions[e.unit] == i and e.step >= 0]
            sent = sum(e.end_s - e.start_s for e in own if e.resources & LINKS)
            coded = sum(e.end_s - e.start_s for e in own if e.resources & (GPU | CPU))
            changed = plan.copy()
            changed[i] = 0
            alone_s = problem.step_s(changed)
            saved = alone_s - self.step_s
            if not choice.compresses:
                hidden = all(e.end_s <= self.timeline.compute_s for e in own)
                why = "hidden behind backward" if hidden else "compression would not shorten the step"
            else:
                why = f"plain it would cost {saved * 1e3:.1f} ms more" if saved > 0 else "as fast as plain, and smaller"
            rows.append(UnitAnswer(unit, choice.option, sent, coded, alone_s, why))
        return rows


def answer(request: Request, *, hipress_least: int | None = None) -> Answer:
    problem = request.problem()
    found = search(problem)
    step_s = problem.outside_s + found.time_s
    more = {} if hipress_least is None else {"hipress_least": hipress_least}
    compared = baselines(problem.network, problem.units, request.limits, **more)
    uncertainty, doubt = _uncertainty(request, problem, found)
    return Answer(
        request,
        problem,
        found,
        problem.timeline(found.plan),
        step_s,
        uncertainty,
        doubt,
        tuple(compared),
        tuple(problem.network.assumptions),
    )


def _uncertainty(request: Request, problem: Problem, found: Found) -> tuple[float, str]:
    """The largest of what is known to be uncertain, and what that is."""
    profile = request.profile
    coded_on_gpu = profile.transport == "host" and "gpu" in profile.devices
    known = [
        (problem.uncertainty(found.plan), "the measurements in the profile scatter"),
        (missed(request), "the model misses by that the plain steps that were profiled"),
        (OFF_ON_GPU if coded_on_gpu else 0.0, "steps that coded on a GPU have been off by that"),
    ]
    return max(known, key=lambda item: item[0])


def missed(request: Request) -> float:
    """By how much the model misses the one thing that the profile knows: the step without compression as it was run.

    Relative to the step; 0 where the profile does not say.
    """
    profile = request.profile
    if profile.exposed_s is None:
        return 0.0
    there = replace(request, topology=Topology.of(profile), bucket_bytes=profile.bucket_bytes or request.bucket_bytes)
    plain = replace(there, limits=Limits(codecs=())).problem()
    exposed_s = plain.plain_s - plain.outside_s - profile.backward_s
    return abs(exposed_s - profile.exposed_s) / (plain.outside_s + profile.backward_s + profile.exposed_s)


def best_bucket(request: Request) -> tuple[int, float]:
    """The bucket_cap_mb with the shortest step, and that step."""
    found = []
    for size in BUCKETS_MB:
        problem = replace(request, bucket_bytes=size << 20).problem()
        found.append((problem.outside_s + search(problem).time_s, size))
    step_s, size = min(found)
    return size, step_s


def break_even(request: Request) -> float | None:
    """The rate between hosts (inside one, if there is one alone) above which compression gains less than 1 %.

    It is compared with the best plan that compresses nothing, which may be faster than DDP's all-reduce. None: it never
    pays; infinity: it still pays at the fastest link that is tried.
    """
    if request.limits.codecs == ():
        raise PlanError("there is no break-even without a codec")
    low, high = math.log(SLOWEST), math.log(FASTEST)
    if not _pays_at(request, math.exp(low)):
        return None
    if _pays_at(request, math.exp(high)):
        return math.inf
    while high - low > 0.05:
        middle = (low + high) / 2
        if _pays_at(request, math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp(low)


def _pays_at(request: Request, rate: float) -> bool:
    here = replace(request, topology=_at(request.topology, rate))
    steps: list[float] = []
    for limits in (replace(request.limits, codecs=()), request.limits):
        problem = replace(here, limits=limits).problem()
        step_s = problem.outside_s + search(problem).time_s
        steps.append(step_s if steps else min(step_s, problem.plain_s))
    return steps[0] / steps[1] - 1 > LEAST_GAIN


def _at(topology: Topology, rate: float) -> Topology:
    return replace(topology, intra_bits_per_s=rate) if topology.hosts == 1 else topology.at(rate)


@dataclass(frozen=True)
class Point:
    """One setting of a sweep."""

    hosts: int
    inter_bits_per_s: float
    plain_s: float
    bf16_s: float | None
    plan_s: float
    free_s: float
    compute_s: float
    compressed_share: float  # of all bytes

    @property
    def efficiency(self) -> float:
        """Of the speed that all ranks would have without any exchange."""
        return self.compute_s / self.plan_s

    @property
    def plain_efficiency(self) -> float:
        return self.compute_s / self.plain_s


def sweep(request: Request, topologies: list[Topology]) -> list[Point]:
    """The best plan on each of these clusters."""
    points = []
    for topology in topologies:
        here = replace(request, topology=topology)
        problem = here.problem()
        found = search(problem)
        compared = {b.name: b.step_s for b in baselines(problem.network, problem.units, here.limits)}
        coded = sum(u.raw_bytes for u, n in zip(problem.units, found.plan) if problem.choices[n].compresses)
        link = here.profile.links.get("inter")
        rate = topology.inter_bits_per_s or (link.bits_per_s if link else 0.0)
        plain_s, free_s = compared["FP32 all-reduce"], compared["free compression (bound)"]
        assert plain_s is not None and free_s is not None
        points.append(
            Point(
                topology.hosts,
                rate,
                plain_s,
                compared["BF16 all-reduce"],
                problem.outside_s + found.time_s,
                free_s,
                problem.outside_s + problem.network.profile.backward_s,
                coded / here.profile.size_bytes,
            )
        )
    return points
