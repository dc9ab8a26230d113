"""What all sections of docs/results.md are made with: rows of CSV files, figures, tables."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = "not run yet"

Row = dict[str, str]

TASKS = {
    "gcomp-cifar": "ResNet-18 on CIFAR-10, SGD with momentum",
    "gcomp-sst2-adamw": "MiniLM on SST-2, AdamW",
    "gcomp-sst2-sgd": "MiniLM on SST-2, SGD with momentum",
    "gcomp-enwik8": "GPT of 10.8 M parameters on enwik8, AdamW",
}


@dataclass(frozen=True)
class Results:
    """The CSV files below a folder; rows of tiny forms of the tasks count only where they are asked for."""

    folder: Path
    tiny: bool = False

    def __call__(self, path: str) -> list[Row]:
        full = self.folder / path
        if not full.exists():
            return []
        with full.open(newline="") as file:
            return [row for row in csv.DictReader(file) if self.tiny or not row.get("limit")]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of(rows: list[Row], **wanted: str) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def floats(rows: list[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row[key]]


def figure(values: Sequence[float], digits: int = 2) -> str:
    """A mean, and how far the seeds lie apart."""
    if not values:
        return NOT_RUN
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f}, {len(values)} seeds)"


def mean_of(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else ""


def seen(rows: list[Row]) -> str:
    """What the rows of a table have in common."""
    if not rows:
        return ""
    parts = []
    for key, word in (("epochs", "epoch"), ("steps", "step"), ("workers", "worker"), ("device", "")):
        values = sorted({row[key] for row in rows})
        parts.append(f"{' and '.join(values)} {word}{'s' if word and values != ['1'] else ''}".strip())
    return f"Ours: {', '.join(parts)}."
