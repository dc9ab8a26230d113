"""Timelines as Chrome trace JSON, for ui.perfetto.dev: one process per story (predicted, measured), one track per
resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..exchange.program import Decode, Encode
from ..plan import Plan
from .cost import KINDS
from .timeline import RESOURCES, Timeline

_MICROSECONDS = 1e6
_STEPS = {kind: step.__name__ for step, kind in {**KINDS, Encode: "enc", Decode: "dec"}.items()}


@dataclass(frozen=True)
class Span:
    """Something that took time, on a track."""

    track: str
    name: str
    start_s: float
    end_s: float
    note: str = ""


def spans(plan: Plan) -> list[Span]:
    """What a plan carries of the timeline that it was chosen by."""
    return [Span(*span) for span in plan.timeline]


def predicted(timeline: Timeline, names: Sequence[str]) -> list[Span]:
    """The spans of a timeline; names are those of its units."""
    spans = []
    for event in timeline.events:
        what = names[event.unit]
        tracks = ["compute"] if event.step < 0 else [r for i, r in enumerate(RESOURCES) if event.resources >> i & 1]
        for track in tracks:
            spans.append(Span(track, f"{_named(event.label)} {what}", event.start_s, event.end_s, what))
    return spans


def _named(label: str) -> str:
    """By the name that the step has in a program: AllToAll.flat; copies, sockets and backward as they are."""
    kind, dot, where = label.partition(".")
    return f"{_STEPS.get(kind, kind)}{dot}{where}"


def trace(stories: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """The stories side by side."""
    events: list[dict[str, Any]] = []
    for pid, (story, spans) in enumerate(stories.items(), 1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": story}})
        tracks: dict[str, int] = {}
        for span in spans:
            if span.track not in tracks:
                tracks[span.track] = len(tracks) + 1
                named = {"ph": "M", "pid": pid, "tid": tracks[span.track], "name": "thread_name"}
                events.append({**named, "args": {"name": span.track}})
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tracks[span.track],
                    "name": span.name,
                    "ts": span.start_s * _MICROSECONDS,
                    "dur": (span.end_s - span.start_s) * _MICROSECONDS,
                    "args": {"what": span.note},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save(path: str | Path, stories: Mapping[str, Iterable[Span]]) -> None:
    Path(path).write_text(json.dumps(trace(stories)))
