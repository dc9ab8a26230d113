"""The timeline of one step, as torch.profiler saw it: the ranges that gradzip leaves in its traces (spans.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .. import jsonfile
from ..errors import ReportError
from ..jsonfile import is_number, shown
from ..planner.perfetto import Span
from .predicted import Story

_OURS = re.compile(r"gradzip: (exchange|code|wire) .*\bat step (\d+)\b")
_BACKWARD = "autograd::engine::evaluate_function"
_MICROSECOND = 1e-6


class _Range(NamedTuple):
    kind: str
    what: str
    thread: int | str | None
    start: float
    end: float


def measured(path: Path) -> Story:
    """The last step in a trace that torch.profiler exported."""
    events = _events(path)
    steps: dict[int, list[_Range]] = {}
    for event in events:
        found = _OURS.match(event["name"])
        if found:
            steps.setdefault(int(found[2]), []).append(_range(found[1], event))
    if not steps:
        raise ReportError(
            f"{path} holds no range of gradzip: profile a step after attach, with profile_all_threads=True in "
            "torch.profiler's experimental_config (docs/training.md)"
        )
    last = max(steps)
    ours = sorted(steps[last], key=lambda one: one.start)
    before = max((one.end for one in steps.get(last - 1, [])), default=float("-inf"))
    end = max(one.end for one in ours)
    exchanges = [one for one in ours if one.kind == "exchange"]
    training = exchanges[0].thread if exchanges else -1
    backward = [
        _range("backward", event)
        for event in events
        if event["name"].startswith(_BACKWARD) and event.get("tid") == training
    ]
    backward = [one for one in backward if before < one.start < end]
    begin = min(one.start for one in [*ours, *backward])
    inner = [one for one in ours if one.kind != "exchange"]
    spans = [Span("backward", "backward", *_since(begin, one)) for one in _joined(backward)]
    spans += _by_thread(inner, begin) if inner else _in_lanes(exchanges, begin)
    about = f"Step {last}, from {path.name}: {(end - begin) * 1e3:.1f} ms from the start of backward to the last mean."
    if not inner:
        about += " gradzip's own threads were not profiled: profile_all_threads=True shows what they did."
    return Story("measured", about, spans)


def _events(path: Path) -> list[dict[str, Any]]:
    data = jsonfile.load(path, "trace", ReportError)
    found = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise ReportError(f"{path} holds no list traceEvents: export it with torch.profiler's export_chrome_trace")
    return [_checked(event, f"{path}: traceEvents[{i}]") for i, event in enumerate(found) if _is_range(event)]


def _is_range(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and "ts" in event and "dur" in event


def _checked(event: dict[str, Any], where: str) -> dict[str, Any]:
    wanted = {
        "name": (isinstance(event.get("name"), str), "a text"),
        "tid": (isinstance(event.get("tid"), int | str | None), "a number or a text"),
        "ts": (is_number(event["ts"]), "a number of microseconds"),
        "dur": (is_number(event["dur"]), "a number of microseconds"),
    }
    for key, (is_right, what) in wanted.items():
        if not is_right:
            raise ReportError(f"{where}.{key} is {shown(event.get(key))}: wanted {what}")
    return event


def _range(kind: str, event: dict[str, Any]) -> _Range:
    start = float(event["ts"]) * _MICROSECOND
    what = event["name"].removeprefix("gradzip: ")
    return _Range(kind, what, event.get("tid"), start, start + float(event["dur"]) * _MICROSECOND)


def _since(begin: float, one: _Range) -> tuple[float, float]:
    return one.start - begin, one.end - begin


def _joined(ranges: Iterable[_Range], gap: float = 20e-6) -> list[_Range]:
    """Neighbours become one: a backward is thousands of small ranges."""
    found: list[_Range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        if found and one.start <= found[-1].end + gap:
            found[-1] = found[-1]._replace(end=max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def _by_thread(ranges: list[_Range], begin: float) -> list[Span]:
    """Each thread of the runner is a stage: it waits for data, then codes."""
    threads = list(dict.fromkeys(one.thread for one in ranges))
    doing = {"wire": "waiting for data", "code": "coding"}
    return [
        Span(f"stage {number}, {words}", one.what, *_since(begin, one))
        for number, thread in enumerate(threads, 1)
        for kind, words in doing.items()
        for one in ranges
        if one.thread == thread and one.kind == kind
    ]


def _in_lanes(ranges: list[_Range], begin: float) -> list[Span]:
    """Exchanges overlap: each goes to the first lane that is free."""
    ends: list[float] = []
    spans = []
    for one in ranges:
        lane = next((i for i, end in enumerate(ends) if end <= one.start), len(ends))
        ends[lane:] = [one.end, *ends[lane + 1 :]]
        spans.append(Span(f"exchange {lane + 1}", one.what, *_since(begin, one)))
    return spans
