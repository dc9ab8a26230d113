"""GPU minutes of what is on the page, as a table: by task where rows have their seconds, else as they were planned."""

from __future__ import annotations

from collections.abc import Iterator

import paired
from noise_section import TITLES
from pieces import Results, of, table

# By experiments/README.md: rows x seeds x epochs x seconds per epoch, or the seconds of each part.
PLANNED = {
    "PowerSGD": (13, "rows, epochs and seconds per epoch in experiments/README.md"),
    "Accordion": (9, "the same"),
    "GComp, the dial": (15, "the same"),
    "real ranks: GPT-2, time to accuracy, batches, all-reduce": (12, "the parts' seconds in experiments/README.md"),
    "GComp in float32, Espresso, prediction": (0, "no GPU: CPUs"),
}


def minutes(read: Results) -> Iterator[tuple[str, float]]:
    """Of each task of noise. A group of texts has divided its seconds among its runs; others ran side by side."""
    rows = of(read("noise/results.csv"), device=paired.GPU)
    for task in dict.fromkeys(row["task"] for row in rows):
        each = (float(r["seconds"]) / (int(r["beside"]) if task in paired.SINGLE else 1) for r in of(rows, task=task))
        yield task, sum(each) / 60


def promise(read: Results) -> float:
    """Minutes in which real ranks trained to see what noise promises: the median step times steps."""
    rows = of(read("noise/promise.csv"), device=paired.GPU)
    return sum(int(row["steps"]) * float(row["ms"]) for row in rows) / 60_000


def section(read: Results) -> str:
    measured = dict(minutes(read))
    lines = [
        [f"noise: `{task}`", f"{measured[task]:.1f}", "noise/results.csv, column seconds"]
        for task in TITLES
        if task in measured
    ]
    lines.append(["noise, all of it", f"{sum(measured.values()):.1f}", ""])
    drawn = promise(read)
    lines.append(["noise: the promise", f"{drawn:.1f}",
                  "noise/promise.csv, steps x ms; without draws and resumes, beside tests"])  # fmt: skip
    lines += [[item, str(planned), source] for item, (planned, source) in PLANNED.items()]
    total = sum(measured.values()) + drawn + sum(planned for planned, _ in PLANNED.values())
    lines.append(["**in all, without benchmarks**", f"**{total:.0f}**", ""])
    return "### GPU minutes\n\n" + table(["item", "minutes of an H200", "from"], lines)
