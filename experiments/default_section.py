"""The evidence for what attach takes by default, as a table of docs/design.md: from noise/results.csv."""

from __future__ import annotations

import statistics
from pathlib import Path

import noise_section
from noise_section import analysis
from pieces import Results, Row, of, table

PAGE = Path(__file__).parent.parent / "docs/design.md"
BEGIN, END = "<!-- table: python experiments/make_results.py -->\n", "<!-- end of table -->\n"
OPTIMIZERS = {"cifar20k": "SGD", "cifar50k": "SGD", "gpt-muon": "Muon"}  # by task; of the others it is AdamW
BUDGETS = {"AdamW": ("1 %",), "SGD": ("1 %",), "Muon": ("1 %", "0.3 %")}


def tasks(rows: list[Row]) -> list[str]:
    """Those that count, and have pairs of two seeds or more: one pair bounds nothing."""
    counted = [task for task in noise_section.TITLES if task not in noise_section.UNUSABLE]
    slopes = {task: analysis.slope(rows, task) for task in counted}
    return [task for task, slope in slopes.items() if slope is not None and slope.slope.count > 1]


def cost(rows: list[Row], task: str, budget: str) -> analysis.Interval:
    """Per cent of plain's loss, by the slope of all budgets and the share that this one was measured to have."""
    found = analysis.slope(rows, task)
    assert found is not None
    share = statistics.fmean(share for share, _ in analysis.differences(rows, task, f"noise {budget}").values())
    return analysis.Interval(found.slope.mean * share, found.slope.half * share, found.slope.count)


def evidence(read: Results) -> str:
    rows, lines = read("noise/results.csv"), list[list[str]]()
    for task in tasks(rows):
        optimizer = OPTIMIZERS.get(task, "AdamW")
        for budget in BUDGETS[optimizer]:
            found = cost(rows, task, budget)
            own = of(rows, task=task, row=f"noise {budget}")
            shares = [f"{100 * statistics.fmean(float(r['share']) for r in own):.2f}"]
            shares.append(", ".join(f"{worst:.1f}" for worst in sorted(100 * float(r["worst_share"]) for r in own)))
            lines.append([
                noise_section.TITLES[task].replace("the same", noise_section.TITLES["gpt"]), budget, str(found.count),
                noise_section.signed(found, 3), f"{found.upper:+.3f}" if found.count > 1 else "none",
                noise_section.accepted(found), *shares,
            ])  # fmt: skip
    head = ["task", "budget", "seeds", "cost, % of the loss", "upper bound", f"below {analysis.LIMIT} %",
            "mean share, %", "worst step of each run, %"]  # fmt: skip
    return table(head, lines)


def filled(design: str, read: Results) -> str:
    """The page with the table as it is now."""
    before, rest = design.split(BEGIN)
    return f"{before}{BEGIN}{evidence(read)}\n{END}{rest.split(END)[1]}"
