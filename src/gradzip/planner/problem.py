"""A planning problem: units, what each may do, and the times of all of it in tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collectives.coder import cuttable
from ..collectives.layout import PART
from ..errors import PlanError
from ..option import Option
from .choices import Choice, Limits, choices, twin
from .cost import FEATURES, Amount, Pricing, features
from .fast import Evaluator, Plan, Tables
from .network import Network
from .profile import CodecCost
from .timeline import Task, Timeline, simulate
from .units import Unit


@dataclass(frozen=True)
class _Part:
    """A chunk of a unit: raw bytes, coded ones and tensors; then the same of what it carries if nothing is cut."""

    unit: int
    backward_s: float
    size: tuple[float, ...]


def _cut(choice: Choice) -> bool:
    """Whether the runtime sends it in chunks: what each value goes through alone, except sums that torch makes."""
    if choice.option.route in ("allreduce", "factors"):
        return False
    return choice.codec is None or cuttable(choice.codec.codec)


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
        pricing = Pricing(network, free)
        self.choices = choices(pricing, self.limits, self.device)
        self.primary = len(self.choices)  # choices before this one code on `device`
        if len(devices) > 1 and not free:
            self.choices += [c for c in choices(pricing, self.limits, "cpu") if c.compresses]
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
        parts = self._parts(codecs)
        kinds: dict[tuple[float, ...], int] = {}
        for part in parts:
            kinds.setdefault(part.size, len(kinds))
        whole = np.array([not _cut(c) for c in self.choices])
        seconds = np.zeros((len(kinds), len(self.choices), stride))
        for column, codec in enumerate(codecs, 1):
            for cut in (False, True):
                own = np.flatnonzero([c.codec is codec for c in self.choices] & (whole != cut))
                amounts = np.array([self._amounts(size, column, codec, cut) for size in kinds])
                seconds[:, own] = np.einsum("kf,otf->kot", amounts, factors[own])
        return Tables(
            np.array([part.backward_s for part in parts]),
            np.array([part.unit for part in parts], np.int32),
            np.array([kinds[part.size] for part in parts], np.int32),
            counts,
            resources,
            np.ascontiguousarray(seconds),
        )

    def _parts(self, codecs: Sequence[CodecCost | None]) -> list[_Part]:
        """Units as the chunks that the runtime makes of them, which go through a route one after the other."""
        profile, parts, clock = self.network.profile, list[_Part](), 0.0
        chunk_bytes = PART * self.network.topology.world * 4 if profile.transport == "host" else math.inf
        for number, unit in enumerate(self.units):
            count = max(1, round(unit.raw_bytes / chunk_bytes))
            whole = (float(unit.raw_bytes), *(unit.payload_bytes(c) if c else 0.0 for c in codecs), len(unit.tensors))
            chunk = (*(size / count for size in whole[:-1]), max(1.0, len(unit.tensors) / count))
            # What backward does after the last gradient is computed with the last unit.
            ready = max(unit.ready_s, profile.backward_s) if number + 1 == len(self.units) else unit.ready_s
            if ready < clock:
                raise PlanError("units must come in the order in which they are ready")
            parts.append(_Part(number, ready - clock, (*chunk, *whole)))
            parts += [_Part(number, 0.0, (*chunk, *[0.0] * len(whole)))] * (count - 1)
            clock = ready
        return parts

    def _amounts(self, size: tuple[float, ...], column: int, codec: CodecCost | None, cut: bool) -> Amount:
        """Features of a chunk for choices that go by chunks; of the whole unit, once, for those that do not."""
        half = len(size) // 2
        raw, *payloads, tensors = size[:half] if cut else size[half:]
        if not raw:
            return np.zeros(len(FEATURES))
        return features(raw, payloads[column - 1], codec, self.network, tensors)

    @property
    def outside_s(self) -> float:
        """What a step does beside backward and exchange."""
        return self.network.profile.forward_s + self.network.profile.optimizer_s

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
        found |= {name: curve.line.residual for name, curve in profile.copies.items()}
        for cost in profile.codecs.values():
            for kind, curves in (("enc", cost.encode), ("dec", cost.decode)):
                found |= {f"{kind} {cost.codec}@{device}": c.line.residual for device, c in curves.items()}
        return {"device_to_host": 0.0, "host_to_device": 0.0, **found}
