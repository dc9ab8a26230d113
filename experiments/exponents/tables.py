"""The tables of README.md, from the CSV files; run it alone to renew them without measuring."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
CODES = ("native", "cut", "limited")
BOOKS = ("frame", "shared", "prior")

Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def crossed(rows: list[Row], symbols: str) -> str:
    """Sources down, targets across."""
    here = [row for row in rows if row["symbols"] == symbols and "scaled" not in row["target"]]
    targets = unique(here, "target")
    lines = []
    for run, source in unique(here, "run", "source"):
        cells = [row for row in here if (row["run"], row["source"]) == (run, source)]
        lines.append([run, source, *(" / ".join(f"{float(row[c]):.1f}" for c in CODES) for row in cells)])
    return table(["run", "book of", *(f"on {target}" for (target,) in targets)], lines)


def summary(rows: list[Row]) -> str:
    """Own books, books of other samples of the run, the worst of these, and the book of S4 on S4 scaled."""
    lines = []
    for run, symbols in unique(rows, "run", "symbols"):
        here = [row for row in rows if (row["run"], row["symbols"]) == (run, symbols)]
        own = [row for row in here if row["source"] == row["target"]]
        other = [row for row in here if row["source"] != row["target"] and "scaled" not in row["target"]]
        scaled = [row for row in here if row["target"] == f"{row['source']} scaled"]
        worst = [max(float(row[c]) for row in other) for c in CODES]
        cells = [" / ".join(f"{mean(part, c):.1f}" for c in CODES) for part in (own, other, scaled)]
        entropy = f"{mean(own, 'entropy'):.1f}"
        cells.insert(2, " / ".join(f"{value:.1f}" for value in worst))
        lines.append([run, symbols, entropy, *cells])
    head = ["run", "symbols", "entropy", "own book", "another's book, mean", "worst", "S4's on S4 · 65536"]
    return table(head, lines)


def bases(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        entropy = float(row["entropy"])
        lines.append([row["run"], f"{entropy:.2f}", *(f"{float(row[c]) - entropy:+.2f}" for c in ("raw", "relative"))])
    return table(["run", "entropy per 16K values, bits", "raw, over that", "relative, over that"], lines)


def whole_frames(rows: list[Row]) -> str:
    lines = []
    for run, mode in unique(rows, "run", "mode"):
        here = [row for row in rows if (row["run"], row["mode"]) == (run, mode)]
        cells = [f"{mean(here, book):.3f}" for book in BOOKS]
        above = [max(float(row[book]) / float(row["frame"]) - 1 for row in here) for book in BOOKS[1:]]
        lines.append([run, mode, *cells, *(f"{100 * value:+.2f} %" for value in above)])
    head = ["run", "mode", "lengths in the frame", "shared, renewed", "prior", "shared at worst", "prior at worst"]
    return table(head, lines)


def exponent_parts(rows: list[Row]) -> str:
    """Per cent of the 32 bits of a value, mean over the run; ours with all headers."""
    lines = []
    for (run,) in unique(rows, "run"):
        here = [row for row in rows if (row["run"], row["mode"]) == (run, "lossless")]
        raw = [f"{100 / 32 * mean(here, way):.2f}" for way in ("raw_static", "raw_refreshed", "raw_own")]
        fields = 24 * (1 - mean(here, "zeros"))  # sign and mantissa of what is not zero
        ours = [f"{100 / 32 * (mean(here, book) - fields):.2f}" for book in ("prior", "shared", "frame")]
        lines.append([run, *raw, *ours])
    head = [
        "run",
        "raw: first book for ever",
        "raw: renewed",
        "raw: own",
        "ours: prior",
        "ours: renewed",
        "ours: in the frame",
    ]
    return table(head, lines)


def speeds(rows: list[Row]) -> str:
    names = {
        "entropy": "entropy, bits",
        "code_bits": "mean code, bits",
        "gradzip": "gradzip, exponents alone",
        "gradzip_mantissas": "gradzip, whole values",
        "look_up": "table look-up, one stream",
        "walk": "tree walk, one stream",
    }
    lines = [[f"{float(row[c]):.2f}" for c in names] for row in rows]
    return table(list(names.values()), lines)


def unique(rows: list[Row], *columns: str) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(row[c] for c in columns) for row in rows))


def mean(rows: list[Row], column: str) -> float:
    return sum(float(row[column]) for row in rows) / len(rows)


def filled(readme: str) -> str:
    """README.md with the tables between their markers."""
    pairs, sizes = read("stale.csv"), read("refresh.csv")
    made = {
        "summary": summary(pairs),
        "raw": crossed(pairs, "raw"),
        "relative": crossed(pairs, "relative"),
        "base": bases(read("base.csv")),
        "frames": whole_frames(sizes),
        "parts": exponent_parts(sizes),
        "speed": speeds(read("speed.csv")),
    }
    for name, content in made.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        readme, found = re.subn(f"{start}.*?{end}", f"{start}\n{content}\n{end}", readme, flags=re.DOTALL)
        assert found == 1, f"README.md has no place for the table {name!r}: write {start} and {end} there"
    return readme


def update() -> None:
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text()))


if __name__ == "__main__":
    update()
