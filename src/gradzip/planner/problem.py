"""A planning problem: units, what each may do, and the times of all of it in tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import PlanError
from ..option import Option
from .choices import Choice, Limits, choices, twin
from .chunks import Cut, Piece, chunks, cut_of
from .cost import FEATURES, Amount, Pricing, features
from .fast import Evaluator, Plan, Tables
from .network import Network
from .profile import CodecCost
from .timeline import Task, Timeline, simulate
from .units import Unit


@dataclass(frozen=True)
class _Part:
    """A chunk of a unit. For each way to cut: raw bytes, coded ones by codec, of a rank's gradient and of sums, and
    tensors; zeros where there are fewer chunks.
    """

    unit: int
    backward_s: float
    sizes: tuple[tuple[float, ...], ...]


class Problem:
    """All choices of all units. Choices with the coding on `device` come first, then the same ones on the CPU."""

    def __init__(
        self, network: Network, units: Sequence[Unit], limits: Limits | None = None, *, free: bool = False
    ) -> None:
        if not units:
            raise PlanError("there is nothing to plan: no tensors")
        self.network, self.units = network, list(units)
        self.limits = limits or Limits()
        devices = network.profile.devices
        self.device = devices[-1] if devices else "cpu"
        self.pricing = pricing = Pricing(network, free)
        self.choices = choices(pricing, self.limits, self.device)
        self.primary = len(self.choices)  # choices before this one code on `device`
        if len(devices) > 1 and not free:
            self.choices += [c for c in choices(pricing, self.limits, "cpu") if c.compresses]
        self.compresses = np.array([choice.compresses for choice in self.choices])
        self.number = {choice.option: i for i, choice in enumerate(self.choices)}
        self.offloaded = [self._offloaded(choice) for choice in self.choices[: self.primary]]
        self.tables = self._tables()
        self.evaluator = Evaluator(self.tables)

    def _offloaded(self, choice: Choice) -> int | None:
        return self.number.get(twin(choice.option, "cpu")) if choice.compresses and self.device == "gpu" else None

    def _tables(self) -> Tables:
        stride = max(1, max(len(c.tasks) for c in self.choices))
        counts = np.array([len(c.tasks) for c in self.choices], np.uint8)
        resources = np.zeros((len(self.choices), stride), np.uint8)
        factors = np.zeros((len(self.choices), stride, len(FEATURES)))
        for i, choice in enumerate(self.choices):
            for j, task in enumerate(choice.tasks):
                resources[i, j] = task.resources
                factors[i, j] = task.seconds
        codecs = list({id(c.codec): c.codec for c in self.choices}.values())
        cuts = [self._cut(choice) for choice in self.choices]
        cuttings = list(dict.fromkeys(cuts))
        parts = self._parts(codecs, cuttings)
        kinds: dict[tuple[tuple[float, ...], ...], int] = {}
        for part in parts:
            kinds.setdefault(part.sizes, len(kinds))
        numbers = np.array([cuttings.index(cut) for cut in cuts])
        seconds = np.zeros((len(kinds), len(self.choices), stride))
        for column, codec in enumerate(codecs, 1):
            for cutting in range(len(cuttings)):
                own = np.flatnonzero([c.codec is codec for c in self.choices] & (numbers == cutting))
                if len(own):
                    amounts = np.array([self._amounts(sizes[cutting], column, codec) for sizes in kinds])
                    seconds[:, own] = np.einsum("kf,otf->kot", amounts, factors[own])
        return Tables(
            np.array([part.backward_s for part in parts]),
            np.array([part.unit for part in parts], np.int32),
            np.array([kinds[part.sizes] for part in parts], np.int32),
            counts,
            resources,
            np.ascontiguousarray(seconds),
        )

    def _cut(self, choice: Choice) -> Cut | None:
        """How messages are cut that go that way. Where NCCL carries gradients nothing is cut."""
        if self.network.profile.transport != "host":
            return None
        return cut_of(choice, self.device == "gpu")

    def _parts(self, codecs: Sequence[CodecCost | None], cuts: Sequence[Cut | None]) -> list[_Part]:
        """Units as the chunks that the runtime makes of them, which go through a route one after the other."""
        profile, parts, clock = self.network.profile, list[_Part](), 0.0
        world = self.network.topology.world
        for number, unit in enumerate(self.units):
            numels = [tensor.numel for tensor in unit.tensors]
            cuttings = [[self._size(unit, chunk, codecs) for chunk in chunks(numels, world, cut)] for cut in cuts]
            # What backward does after the last gradient is computed with the last unit.
            ready = max(unit.ready_s, profile.backward_s) if number + 1 == len(self.units) else unit.ready_s
            if ready < clock:
                raise PlanError("units must come in the order in which they are ready")
            nothing = (0.0,) * len(cuttings[0][0])
            for sizes in itertools.zip_longest(*cuttings, fillvalue=nothing):
                parts.append(_Part(number, ready - clock, sizes))
                clock = ready
        return parts

    def _size(self, unit: Unit, chunk: Sequence[Piece], codecs: Sequence[CodecCost | None]) -> tuple[float, ...]:
        tensors = [unit.tensors[piece.tensor] for piece in chunk]
        raw = [piece.numel * t.item_bytes for piece, t in zip(chunk, tensors)]
        payloads = [sum(r / c.ratio_of(t.name) for r, t in zip(raw, tensors)) if c else 0.0 for c in codecs]
        sums = [sum(r / c.sum_ratio_of(t.name) for r, t in zip(raw, tensors)) if c else 0.0 for c in codecs]
        return (float(sum(raw)), *payloads, *sums, float(len(chunk)))

    def _amounts(self, size: tuple[float, ...], column: int, codec: CodecCost | None) -> Amount:
        """Features of a chunk, none where there is no chunk."""
        raw, *payloads, tensors = size
        if not raw:
            return np.zeros(len(FEATURES))
        codecs = len(payloads) // 2
        return features(raw, payloads[column - 1], codec, self.network, tensors, payloads[codecs + column - 1])

    @property
    def outside_s(self) -> float:
        """What a step does beside backward and exchange."""
        return self.network.profile.forward_s + self.network.profile.optimizer_s

    @cached_property
    def plain_s(self) -> float:
        """A step in which nothing is compressed."""
        return self.ddp_s()

    def ddp_s(self, part: float = 1.0) -> float:
        """A step with DDP's own all-reduces, one after the other, of that part of the bytes."""
        clock, latency_s = 0.0, 0.0
        for unit in self.units:
            busy_s, latency_s = self.pricing.ddp(part * unit.raw_bytes)
            clock = max(clock, unit.ready_s) + busy_s
        return self.outside_s + max(clock + latency_s, self.network.profile.backward_s)

    def uniform(self, option: Option | int) -> Plan:
        number = option if isinstance(option, int) else self.number[option]
        return np.full(len(self.units), number, np.int32)

    def step_s(self, plan: Plan) -> float:
        return self.outside_s + self.evaluator.time(plan)

    def timeline(self, plan: Plan) -> Timeline:
        """The whole story of a plan, by the reference; its units are chunks: see tables.decisions."""
        tasks = []
        for decision, kind in zip(self.tables.decisions, self.tables.classes):
            number = plan[decision]
            seconds = self.tables.seconds[kind, number]
            tasks.append([Task(t.label, t.resources, float(s)) for t, s in zip(self.choices[number].tasks, seconds)])
        return simulate(self.tables.backward.tolist(), tasks)

    def uncertainty(self, plan: Plan, samples: int = 64, seed: int = 0) -> float:
        """The standard deviation of the step time, relative, if every measurement is off by its residual."""
        rng = np.random.default_rng(seed)
        residuals = self._residuals()
        sources = sorted(residuals)
        tables, times = self.tables, []
        index = np.full(tables.resources.shape, len(sources))
        for i, choice in enumerate(self.choices):
            index[i, : len(choice.tasks)] = [sources.index(t.source) for t in choice.tasks]
        for _ in range(samples):
            factors = [max(0.1, 1 + residuals[s] * rng.standard_normal()) for s in sources]
            scaled = tables.seconds * np.array([*factors, 1.0])[index]
            changed = Tables(tables.backward, tables.decisions, tables.classes, tables.counts, tables.resources, scaled)
            times.append(self.outside_s + Evaluator(changed).time(plan))
        return float(np.std(times) / np.mean(times))

    def _residuals(self) -> dict[str, float]:
        profile = self.network.profile
        found = {f"{c.kind}.{c.group}": c.curve.line.residual for c in profile.collectives}
        found |= {f"cpu {c.kind}.{c.group}": c.cpu.line.residual if c.cpu else 0.0 for c in profile.collectives}
        found |= {name: curve.line.residual for name, curve in profile.copies.items()}
        for cost in profile.codecs.values():
            for kind, curves in (("enc", cost.encode), ("dec", cost.decode)):
                found |= {f"{kind} {cost.codec}@{device}": c.line.residual for device, c in curves.items()}
        return {"device_to_host": 0.0, "host_to_device": 0.0, **found}
