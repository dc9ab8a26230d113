"""What the benchmarks share: the gradient that they measure on, and the file that they write to."""

from __future__ import annotations

import argparse
import csv
import platform
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress as Bar

from .. import __version__, capture
from ..bench.sample import Sample
from .table import Row, console


def builtin(limit: int | None = None) -> Sample:
    """The captured gradient; training it the first time is shown on stderr."""
    with Bar(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("training a model for its gradients, once", total=1.0, visible=False)
        snapshot = capture.cached(on_step=lambda p: bar.update(task, completed=p.fraction, visible=True))
    sizes = tuple(p.numel() for p in capture.ByteModel(capture.BENCH).parameters())
    return Sample.of(snapshot, limit, sizes)


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Appends rows to a file, with this version and processor.

    A file of an earlier version may have fewer columns: its rows have nothing there.
    """
    if not rows:
        return
    complete = [row | {"version": __version__, "processor": processor()} for row in rows]
    columns, known, there = list(complete[0]), list[str](), list[list[str]]()
    if path.exists():
        with path.open(newline="") as file:
            known, *there = [*csv.reader(file)] or [[]]
        columns = [*known, *(name for name in columns if name not in known)]
    fits = columns == known
    with path.open("a" if fits else "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if not fits:
            writer.writeheader()
            csv.writer(file).writerows([*row, *[""] * (len(columns) - len(known))] for row in there)
        writer.writerows(complete)


def processor() -> str:
    """The processor's name as Linux gives it, or what Python knows elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
