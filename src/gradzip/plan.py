"""plan.json: the Option of every parameter, as the planner chose it. A Policy that reads JSON and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .codecs import parse
from .errors import PlanError, nearest
from .option import Option

SCHEMA = "gradzip-plan"
VERSION = 1


@dataclass(frozen=True)
class Plan:
    """The options of a model's parameters, with their shapes, and what the planner expects of them."""

    options: Mapping[str, Option]
    shapes: Mapping[str, tuple[int, ...]]
    model: str = ""
    bucket_cap_mb: float | None = None  # what DDP should be given
    expected: Mapping[str, float] = field(default_factory=dict)  # step_s, plain_s, uncertainty, exposed_s, bits_per_s
    timeline: Sequence[tuple[str, str, float, float]] = ()  # predicted: resource, what, and seconds of start and end

    def option(self, name: str, shape: Sequence[int]) -> Option:
        if name not in self.options:
            raise PlanError(
                f"the plan is for another model{f' ({self.model})' if self.model else ''}: it has no {name!r}"
                f"{nearest(name, self.options)}. Plan again from a profile of this model"
            )
        if tuple(shape) != tuple(self.shapes[name]):
            raise PlanError(
                f"the plan is for another model: {name!r} has shape {tuple(self.shapes[name])} there and "
                f"{tuple(shape)} here. Plan again from a profile of this model"
            )
        return self.options[name]

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            return cls.from_json(json.loads(Path(path).read_text()), str(path))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise PlanError(f"{path} is no JSON: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "model": self.model,
            "bucket_cap_mb": self.bucket_cap_mb,
            "expected": dict(self.expected),
            "timeline": [list(span) for span in self.timeline],
            "tensors": {
                name: {"shape": list(self.shapes[name]), "option": str(option)} for name, option in self.options.items()
            },
        }

    @classmethod
    def from_json(cls, data: object, source: str = "the plan") -> Plan:
        if not isinstance(data, dict) or (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
            raise PlanError(f"{source} is no plan that this version reads: make one with `gradzip plan`")
        entries = data.get("tensors")
        if not isinstance(entries, dict) or not entries:
            raise PlanError(f"{source} names no tensors: make it again with `gradzip plan`")
        options, shapes = {}, {}
        for name, entry in entries.items():
            try:
                shape = tuple(entry["shape"])
                if not all(isinstance(n, int) and n > 0 for n in shape):
                    raise ValueError(f"shape {entry['shape']!r}")
                option = Option.parse(entry["option"])
                options[name] = Option(str(parse(option.codec)), option.device, option.route)
                shapes[name] = shape
            except (KeyError, TypeError, ValueError) as error:
                raise PlanError(f"{source}: cannot read the entry of {name!r}: {error}") from error
        expected = data.get("expected") or {}
        bad = {k: v for k, v in expected.items() if not isinstance(v, int | float) or not math.isfinite(v)}
        if bad:
            raise PlanError(f"{source}: expected holds what is no number: {bad}")
        timeline = tuple(_span(entry, source) for entry in data.get("timeline") or [])
        return cls(options, shapes, str(data.get("model", "")), data.get("bucket_cap_mb"), expected, timeline)


def _span(entry: object, source: str) -> tuple[str, str, float, float]:
    match entry:
        case [str(track), str(name), int() | float() as start, int() | float() as end] if 0 <= start <= end < math.inf:
            return track, name, float(start), float(end)
    raise PlanError(f"{source}: timeline holds {entry!r}: wanted a resource, a name, and seconds of start and end")
