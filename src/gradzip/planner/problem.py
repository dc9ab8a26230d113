"""A planning problem: units, what each may do, and the times of all of it in tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..option import Option
from .choices import Choice, Limits, choices, twin
from .cost import FEATURES, Pricing, features
from .fast import Evaluator, Plan, Tables
from .network import Network
from .timeline import Task, Timeline, simulate
from .units import Unit


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
        sizes = [(u.raw_bytes, *(u.payload_bytes(c) if c else 0.0 for c in codecs)) for u in self.units]
        kinds = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
        seconds = np.zeros((len(kinds), len(self.choices), stride))
        for column, codec in enumerate(codecs, 1):
            own = [i for i, c in enumerate(self.choices) if c.codec is codec]
            amounts = np.array([features(size[0], size[column], codec, self.network) for size in kinds])
            seconds[:, own] = np.einsum("kf,otf->kot", amounts, factors[own])
        ready = np.array([u.ready_s for u in self.units])
        if np.any(np.diff(ready) < 0):
            raise PlanError("units must come in the order in which they are ready")
        # What backward does after the last gradient is computed with the last unit.
        ready[-1] = max(ready[-1], self.network.profile.backward_s)
        classes = np.array([kinds[size] for size in sizes], np.int32)
        return Tables(np.diff(ready, prepend=0.0), classes, counts, resources, np.ascontiguousarray(seconds))

    @property
    def outside_s(self) -> float:
        """What a step does beside backward and exchange."""
        return self.network.profile.forward_s + self.network.profile.optimizer_s

    def uniform(self, option: Option | int) -> Plan:
        number = option if isinstance(option, int) else self.number[option]
        return np.full(len(self.units), number, np.int32)

    def step_s(self, plan: Plan) -> float:
        return self.outside_s + self.evaluator.time(plan)

    def timeline(self, plan: Plan, scale: npt.NDArray[np.float64] | None = None) -> Timeline:
        """The whole story of a plan, by the reference."""
        tasks = []
        for unit, number in enumerate(plan):
            kind = self.tables.classes[unit]
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
            changed = Tables(tables.backward, tables.classes, tables.counts, tables.resources, scaled)
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
