"""The tables of README.md, from results.csv and drift.csv; run it alone to renew them without measuring."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
NAMES = {"gcomp": "near", "gcomp:ulps=256": "near, 256 ulps", "gcomp:mode=paper": "paper"}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def promise(rows: list[dict[str, str]]) -> str:
    """One line per optimizer and codec, the three world sizes side by side; the worst of all measured steps."""
    worlds = sorted({int(row["world"]) for row in rows})
    head = ["optimizer", "codec", *(f"largest distance, {w} rank{'s' * (w > 1)}" for w in worlds)]
    head += [f"with float32 sums, {worlds[-1]} ranks", "those sums without codec"]
    lines = []
    for optimizer, codec in unique(rows, "optimizer", "codec"):
        cells = [optimizer, NAMES[codec]]
        here = [r for r in rows if r["optimizer"] == optimizer and r["codec"] == codec]
        by_world = [[r for r in here if int(r["world"]) == w] for w in worlds]
        cells += [f"{largest(part, 'largest'):.3g}" for part in by_world]
        cells += [f"{largest(by_world[-1], c):.3g}" for c in ("largest_fp32_sum", "largest_raw_fp32_sum")]
        lines.append(cells)
    return table(head, lines)


def in_float32(rows: list[dict[str, str]]) -> str:
    """Means over the measured steps: where float32 parameters end, beside what another order of sums does to them."""
    shown = ("gcomp", "gcomp:mode=paper")
    head = ["optimizer", "ranks", *(NAMES[codec] for codec in shown), "uncompressed, reverse order"]
    lines = []
    for optimizer, world in unique(rows, "optimizer", "world"):
        here = [r for r in rows if (r["optimizer"], r["world"]) == (optimizer, world)]
        cells = [
            shares([r for r in here if r["codec"] == codec], "same", "ulp_1", "ulp_2", "ulp_more") for codec in shown
        ]
        cells.append(shares(here, "reverse_same", "reverse_1", "reverse_2", "reverse_more"))
        lines.append([optimizer, world, *cells])
    return table(head, lines)


def shares(rows: list[dict[str, str]], *columns: str) -> str:
    return " / ".join(f"{100 * mean(rows, column):.2f}" for column in columns)


def sizes(rows: list[dict[str, str]]) -> str:
    """Bits per value of a rank's gradient, and of the sum of most ranks, step by step."""
    steps = sorted({int(r["step"]) for r in rows})
    world = max((r["world"] for r in rows), key=int)
    head = ["optimizer", "codec", *(f"step {s}" for s in steps), f"sum of {world}, step {steps[-1]}"]
    lines = []
    for optimizer, codec in unique(rows, "optimizer", "codec"):
        here = {
            int(r["step"]): r for r in rows if (r["optimizer"], r["codec"], r["world"]) == (optimizer, codec, world)
        }
        cells = [f"{float(here[s]['bits']):.1f}" for s in steps]
        lines.append([optimizer, NAMES[codec], *cells, f"{float(here[steps[-1]]['bits_sum']):.1f}"])
    return table(head, lines)


def drift(rows: list[dict[str, str]]) -> str:
    steps = sorted({int(r["step"]) for r in rows})
    head = ["optimizer", "run", *(f"step {s}" for s in steps), f"loss at {steps[-1]}"]
    lines = []
    for optimizer, run in unique(rows, "optimizer", "run"):
        here = {int(r["step"]): r for r in rows if (r["optimizer"], r["run"]) == (optimizer, run)}
        cells = ["" if run == "raw" else f"{float(here[s]['distance']):.1e}" for s in steps]
        lines.append([optimizer, NAMES.get(run, run), *cells, f"{float(here[steps[-1]]['loss']):.5f}"])
    return table(head, lines)


def unique(rows: list[dict[str, str]], *columns: str) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(row[c] for c in columns) for row in rows))


def largest(rows: list[dict[str, str]], column: str) -> float:
    return max(float(row[column]) for row in rows)


def mean(rows: list[dict[str, str]], column: str) -> float:
    return sum(float(row[column]) for row in rows) / len(rows)


def update(folder: Path = HERE) -> str:
    """Puts the tables between their markers in README.md; returns the first one."""
    rows, drifts = read(folder / "results.csv"), read(folder / "drift.csv")
    made = {"promise": promise(rows), "float32": in_float32(rows), "sizes": sizes(rows), "drift": drift(drifts)}
    readme = folder / "README.md"
    if readme.exists():
        text = readme.read_text()
        for name, content in made.items():
            start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
            text, found = re.subn(f"{start}.*?{end}", f"{start}\n{content}\n{end}", text, flags=re.DOTALL)
            assert found == 1, f"README.md has no place for the table {name!r}: write {start} and {end} there"
        readme.write_text(text)
    return made["promise"]


if __name__ == "__main__":
    print(update())
