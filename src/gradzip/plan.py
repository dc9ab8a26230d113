"""plan.json: the Option of every parameter, as the planner chose it. A Policy that reads JSON and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import jsonfile
from .codecs import parse
from .errors import PlanError, nearest
from .jsonfile import is_count, is_number, shown
from .option import Option

SCHEMA = "gradzip-plan"
VERSION = 1
_LONGEST_OPTION = 1000  # characters; a longer one is damaged, and would fill the screen with its error


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
        return cls.from_json(jsonfile.load(path, "plan", PlanError), str(path))

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
                if not isinstance(entry, dict):
                    raise ValueError(f"it is {shown(entry)}, not an object")
                shape = entry["shape"]
                if (
                    not isinstance(shape, list)
                    or not all(is_count(n, 1) for n in shape)
                    or not is_count(math.prod(shape))
                ):
                    raise ValueError(f"shape is {shown(shape)}: wanted a list of whole numbers from 1 on")
                if not isinstance(entry["option"], str) or len(entry["option"]) > _LONGEST_OPTION:
                    raise ValueError(f"option is {shown(entry['option'])}: wanted a text such as 'topk:ratio=0.01'")
                option = Option.parse(entry["option"])
                options[name] = Option(str(parse(option.codec)), option.device, option.route)
                shapes[name] = tuple(shape)
            except (KeyError, ValueError) as error:
                why = f"it has no {error}" if isinstance(error, KeyError) else error
                raise PlanError(f"{source}: cannot read the entry of {name!r} in tensors: {why}") from error
        model, bucket = data.get("model", ""), data.get("bucket_cap_mb")
        if not isinstance(model, str):
            raise PlanError(f"{source}: model is {shown(model)}: wanted a text")
        if bucket is not None and not (is_number(bucket) and bucket > 0):
            raise PlanError(f"{source}: bucket_cap_mb is {shown(bucket)}: wanted null or a number above 0")
        expected, timeline = data.get("expected") or {}, data.get("timeline") or []
        if not isinstance(expected, dict):
            raise PlanError(f"{source}: expected is {shown(expected)}: wanted an object")
        for key, value in expected.items():
            if not is_number(value):
                raise PlanError(f"{source}: expected.{key} is {shown(value)}: wanted a finite number")
        if not isinstance(timeline, list):
            raise PlanError(f"{source}: timeline is {shown(timeline)}: wanted a list")
        return cls(options, shapes, model, bucket, expected, tuple(_span(entry, source) for entry in timeline))


def _span(entry: object, source: str) -> tuple[str, str, float, float]:
    match entry:
        case [str(track), str(name), start, end] if is_number(start) and is_number(end) and 0 <= start <= end:
            return track, name, float(start), float(end)
    raise PlanError(f"{source}: timeline holds {shown(entry)}: wanted a resource, a name, and seconds of start and end")
