"""run.jsonl: what happened in training runs, one JSON object per line.

    {"schema": "gradzip-run", "version": 1, "run": "gcomp", "about": {"hosts": 4, "compute_seconds": 0.08}}
    {"run": "gcomp", "step": 1, "seconds": 0.21, "loss": 5.54, "bytes_sent": 1000, "bytes_raw": 4000, ...}
    {"run": "gcomp", "step": 50, "layers": [{"name": "head.weight", "numel": 65536, "zeros": 0.1, ...}]}

The first line of a run describes it, and further such lines add to that; what is known of each step follows. Times and
the counts of `handle.stats()` are totals since the start, so steps may be left out: whoever reads forms differences.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .. import jsonfile
from ..errors import ReportError
from ..jsonfile import is_count, is_number, shown
from .gradients import check_layers, describe

SCHEMA = "gradzip-run"
VERSION = 1
WARM = 2  # steps of a run that do not count: buffers are made, DDP forms its buckets anew


class _HasStats(Protocol):
    def stats(self) -> dict[str, Any]: ...


class Recorder:
    """Writes a run. Call it once per step with what is known of the step; on ranks other than 0 it does nothing.

    recorder = Recorder("run.jsonl", "gcomp", handle)
    for ...:
        optimizer.step()
        recorder(loss=loss.item())
    """

    def __init__(self, path: str | Path, run: str = "run", handle: _HasStats | None = None, **about: Any) -> None:
        self._path, self._run, self._handle = Path(path), run, handle
        self._quiet = dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
        self._step, self._start = 0, time.perf_counter()
        self._write({"schema": SCHEMA, "version": VERSION, "run": run, "about": about})

    def __call__(self, record: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Numbers of a step, as a mapping or by name. Those of the handle's stats() are added."""
        self._step += 1
        if self._quiet:
            return
        known: dict[str, Any] = {} if self._handle is None else self._handle.stats()
        numbers = {k: v for k, v in known.items() if is_number(v) and k != "steps"}  # stats() also has tables
        now = {"step": self._step, "seconds": time.perf_counter() - self._start}
        self._write({"run": self._run, **now, **numbers, **(record or {}), **more})

    def gradients(self, model: nn.Module, optimizer: Optimizer, codecs: Iterable[str] = ()) -> None:
        """What the gradients look like, layer by layer; between backward and step. Not for every step: it encodes."""
        if not self._quiet:
            began = time.perf_counter()
            layers = describe(model, optimizer, codecs)
            self._write({"run": self._run, "step": self._step + 1, "layers": layers})
            self._start += time.perf_counter() - began  # it is no part of training

    def later(self, step: int, **numbers: float) -> None:
        """What is known of an earlier step only now, such as a loss averaged over ranks."""
        self._write({"run": self._run, "step": step, **numbers})

    def note(self, **about: Any) -> None:
        """Adds to the description of the run what is known only now."""
        self._write({"schema": SCHEMA, "version": VERSION, "run": self._run, "about": about})

    def _write(self, record: Mapping[str, Any]) -> None:
        if not self._quiet:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


@dataclass
class Run:
    """A run as it was read."""

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    layers: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)  # by step
    _by_step: dict[float, dict[str, Any]] = field(default_factory=dict, repr=False)

    def add(self, record: dict[str, Any]) -> None:
        """Joins what several lines say of one step."""
        known = self._by_step.get(record["step"])
        if known is None:
            self._by_step[record["step"]] = record
            self.steps.append(record)
        else:
            known.update(record)

    def series(self, x: str, y: str) -> list[tuple[float, float]]:
        """Pairs of two columns, where both are finite numbers."""
        pairs = ((s.get(x), s.get(y)) for s in self.steps)
        return [(float(a), float(b)) for a, b in pairs if is_number(a) and is_number(b)]

    def step_times(self) -> list[float]:
        """Seconds of each step that counts."""
        times = self.series("step", "seconds")
        gaps = [(s1, (t1 - t0) / (s1 - s0)) for (s0, t0), (s1, t1) in pairwise(times) if s1 > s0]
        counted = [seconds for step, seconds in gaps if step > WARM]
        return counted or [seconds for _, seconds in gaps]

    def step_seconds(self) -> float | None:
        """The median; of a run that was only predicted, what the description says."""
        times = self.step_times()
        return statistics.median(times) if times else self._described("step_seconds")

    def per_step(self, total: str) -> float | None:
        """By how much a total grows with each step that counts."""
        points = self.series("step", total)
        counted = [p for p in points if p[0] >= WARM] if len(points) > WARM + 1 else points
        if len(counted) < 2:
            return counted[0][1] / counted[0][0] if counted and counted[0][0] else None
        (s0, v0), (s1, v1) = counted[0], counted[-1]
        return (v1 - v0) / (s1 - s0) if s1 > s0 else None

    def bytes_per_step(self) -> float | None:
        """Sent by one rank."""
        sent = self.per_step("bytes_sent")
        return self._described("bytes_per_step") if sent is None else sent

    def _described(self, name: str) -> float | None:
        value = self.about.get(name)
        return float(value) if is_number(value) else None

    def last(self, column: str) -> float | None:
        values = [s[column] for s in self.steps if is_number(s.get(column))]
        return float(values[-1]) if values else None

    def final_loss(self, share: float = 0.1, until: float = math.inf) -> float | None:
        """The mean over the last steps up to `until`: one batch alone says little. None where training diverged."""
        losses = [loss for step, loss in self.losses() if step <= until]
        count = max(1, round(share * len(losses)))
        mean = statistics.fmean(losses[-count:]) if losses else math.nan
        return mean if math.isfinite(mean) else None

    def losses(self) -> list[tuple[float, float]]:
        """By step; unlike a series these may be infinite or NaN."""
        return [(float(s["step"]), float(s["loss"])) for s in self.steps if isinstance(s.get("loss"), int | float)]

    def breakdown(self) -> dict[str, float] | None:
        """Seconds of a step: computing, coding that did not fit behind it (at most), and waiting for the wire.

        Computing is what a step takes without an exchange (`compute_seconds` in the description). Coding overlaps with
        both of the others, so its part of the rest is an upper bound. None where computing was not measured.
        """
        step, compute = self.step_seconds(), self._described("compute_seconds")
        if step is None or compute is None:
            return None
        compute = min(compute, step)
        coding = self.per_step("coding_seconds") or self._described("coding_seconds") or 0.0
        coding = min(coding, step - compute)
        return {"compute": compute, "coding": coding, "wire": step - compute - coding}


def last_common_step(runs: Iterable[Run]) -> float | None:
    """The last step that every run with losses has reached: where their losses can be compared."""
    return min((losses[-1][0] for run in runs if (losses := run.losses())), default=None)


def read(paths: Iterable[str | Path]) -> list[Run]:
    """The runs of these files, in their order."""
    runs: dict[str, Run] = {}
    for path in paths:
        for run in _read_one(Path(path)):
            name, count = run.name, 2
            while run.name in runs:
                run.name, count = f"{name} ({count})", count + 1
            runs[run.name] = run
    return list(runs.values())


def _read_one(path: Path) -> list[Run]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read the run {path}: {getattr(error, 'strerror', None) or error}") from error
    found: dict[str, Run] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        record = jsonfile.parse(line, where, ReportError)
        if not isinstance(record, dict):
            raise ReportError(f"{where} is not a JSON object")
        if record.get("schema", SCHEMA) != SCHEMA or record.get("version", VERSION) != VERSION:
            raise ReportError(f"{where} is of another schema or version: this gradzip reads {SCHEMA} {VERSION}")
        name = record.get("run", path.stem)
        if not isinstance(name, str):
            raise ReportError(f"{where}: run is {shown(name)}: wanted a text")
        run = found.setdefault(name, Run(name))
        if "schema" in record:
            run.about |= _about(record.get("about", {}), where)
            continue
        step = record.get("step")
        if not is_number(step) or step != int(step) or not is_count(int(step)):
            raise ReportError(f"{where}: step is {shown(step)}: each record needs a whole number `step` of 0 or more")
        if "layers" in record:
            run.layers.append((int(step), check_layers(record["layers"], where)))
        else:
            _check_size(record, where)
            run.add(record)
    if not found:
        raise ReportError(f"{path} holds no run: write one with gradzip.report.Recorder")
    return list(found.values())


def _about(about: Any, where: str) -> dict[str, Any]:
    if not isinstance(about, dict):
        raise ReportError(f"{where}: about is {shown(about)}: wanted an object")
    if not isinstance(about.get("baseline", ""), str):
        raise ReportError(f"{where}: about.baseline is {shown(about['baseline'])}: wanted the name of a run")
    _check_size(about, f"{where}: about")
    return about


def _check_size(record: dict[str, Any], where: str) -> None:
    """Numbers that no chart could show. NaN and infinity may stand there, as losses do diverge: they are left out."""
    for key, value in record.items():
        huge = isinstance(value, int | float) and jsonfile.LARGEST < abs(value) < math.inf
        if huge:
            raise ReportError(f"{where}: {key} is {shown(value)}: numbers of up to {jsonfile.LARGEST:g} can be shown")
