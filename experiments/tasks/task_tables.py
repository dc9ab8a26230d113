"""The tables of README.md, from results.csv; run it alone to renew them without training."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

HERE = Path(__file__).parent
PLAIN = "identity"
MARGIN = 3  # spreads

Row = dict[str, str]


def read() -> list[Row]:
    with (HERE / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(rows: list[Row], task: str, codec: str) -> list[float]:
    return [float(row["loss"]) for row in rows if (row["task"], row["codec"]) == (task, codec)]


def distance(rows: list[Row], task: str, codec: str) -> float:
    """How far a codec ends above plain training with the same seeds, on average, in spreads of plain training.

    The spread is the standard deviation of plain training's loss over its seeds.
    """
    plain = losses(rows, task, PLAIN)
    coded = losses(rows, task, codec)
    spread = statistics.stdev(plain)
    return (statistics.mean(coded) - statistics.mean(plain[: len(coded)])) / spread


def table(rows: list[Row], task: str) -> str:
    plain = losses(rows, task, PLAIN)
    if len(plain) < 2:
        return "Not run yet."
    lines = [
        "| codec | bits per value | loss, mean over seeds | above plain, in spreads | within 3 |",
        "|---|---|---|---|---|",
        f"| plain | 32 | {statistics.mean(plain):.4f} ± {statistics.stdev(plain):.4f} ({len(plain)} seeds) | | |",
    ]
    for codec in dict.fromkeys(row["codec"] for row in rows if row["task"] == task and row["codec"] != PLAIN):
        here = [row for row in rows if (row["task"], row["codec"]) == (task, codec)]
        bits = statistics.mean(float(row["bits"]) for row in here)
        loss, far = statistics.mean(losses(rows, task, codec)), distance(rows, task, codec)
        inside = "yes" if far <= MARGIN else "**no**"
        lines.append(f"| `{codec}` | {bits:.2f} | {loss:.4f} | {far:+.1f} | {inside} |")
    return "\n".join(lines)


def filled(readme: str) -> str:
    """README.md with its tables as the results have them."""
    rows = read()
    return re.sub(
        r"(<!-- table (\S+) -->\n).*?(\n<!-- end -->)",
        lambda found: found[1] + table(rows, found[2]) + found[3],
        readme,
        flags=re.DOTALL,
    )


def renew() -> None:
    path = HERE / "README.md"
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    renew()
