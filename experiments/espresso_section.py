"""The section of docs/results.md on Espresso: what is measured, what is modelled, and with which assumptions."""

from __future__ import annotations

import csv
from pathlib import Path

from pieces import NOT_RUN, Results, Row, of, table
from published import ESPRESSO_BOUND

ON_GPU = Path(__file__).parent.parent / "bench/results/plan_gpt2.csv"
MENUS = {"planned": ("plain", "lossless"), "planned-lossy": ("plain", "lossless", "keep7", "bf16")}


def espresso(read: Results) -> str:
    modelled, measured = read("espresso/results.csv"), read("prediction/results.csv")
    return "\n\n".join([
        "## Espresso: a plan for each tensor",
        "Wang et al., EuroSys 2023. The paper measures on 64 V100; here its workloads are **modelled**, and "
        "predictions and plans are **measured** on four emulated hosts and on four ranks that share a GPU.",
        "### Modelled: the paper's workloads",
        "`python experiments/espresso/run.py`. Nothing in this table was run. Assumed or fitted: the time to compute a "
        "step (from the published scaling factor, else from the published bound), the bandwidth between machines (so "
        "that FP32 takes its published time: *effective Gbit/s*), the rates of links inside a machine (400 and 48 "
        "Gbit/s), the time to code on a GPU (a latency and a rate for each codec) and on a CPU (20 Gbit/s, as in the "
        "paper's artifact). Each tensor is planned for itself with one codec, 174 routes on the GPU and 165 on the "
        "CPU. In brackets the paper's gains. *The paper's bound*: its gain over FP32 if compression cost nothing.",
        _modelled(modelled) if modelled else NOT_RUN,
        "### Measured: predictions and plans",
        "`python experiments/prediction/run.py`: three models on four emulated hosts that share two cores, profiled at "
        "1 Gbit/s and predicted at three rates; coding, wire and optimizer are real, forward and backward are sleeps. "
        "*Best fixed*: the fastest, as measured, of plain, lossless and, for lossy plans, `keep=7` and BF16 for all "
        "tensors alike (Top-k was on the lossy menu, too, and not run alone). A positive last column: the plan is "
        "slower.",
        _plans(measured) if measured else NOT_RUN,
        "`bench/plan_gpt2.sh`: GPT-2 124M, four ranks that share an H200, 10 Gbit/s each.",
        _on_gpu(),
    ])  # fmt: skip


def _modelled(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        bound = ESPRESSO_BOUND[row["workload"]]
        cells = [row["workload"], row["effective_gbit"]]
        for ours, theirs in (("gain_fp32", "published_fp32"), ("gain_byteps", "published_byteps"),
                             ("gain_hitopk", "published_hitopk"), ("gain_hipress", "published_hipress")):  # fmt: skip
            published = f"{100 * float(row[theirs]):.0f} %" if row[theirs] else "–"
            cells.append(f"{100 * float(row[ours]):.0f} % ({published})")
        above = " **exceeded**" if float(row["gain_fp32"]) > bound else ""
        lines.append([*cells, f"{100 * bound:.0f} %{above}"])
    head = ["workload", "effective Gbit/s", "over FP32", "over BytePS-Compress", "over HiTopKComm", "over HiPress",
            "the paper's bound"]  # fmt: skip
    return table(head, lines)


def compared(rows: list[Row]) -> list[tuple[Row, Row, float]]:
    """Each plan, the fastest fixed choice on its menu, and how much slower than that the plan is."""
    found = []
    for row in rows:
        if row["plan"] in MENUS:
            here = of(rows, model=row["model"], rate=row["rate"])
            best = min((r for r in here if r["plan"] in MENUS[row["plan"]]), key=lambda r: float(r["measured_s"]))
            found.append((row, best, float(row["measured_s"]) / float(best["measured_s"]) - 1))
    return found


def _plans(rows: list[Row]) -> str:
    lines = [
        [row["model"], row["rate"], row["plan"], f"{float(row['predicted_s']):.2f}", f"{float(row['measured_s']):.2f}",
         f"{100 * (float(row['predicted_s']) / float(row['measured_s']) - 1):+.0f} %",
         f"{best['plan']}, {float(best['measured_s']):.2f}", f"{100 * slower:+.1f} %"]
        for row, best, slower in compared(rows)
    ]  # fmt: skip
    errors = sorted(abs(float(r["predicted_s"]) / float(r["measured_s"]) - 1) for r in rows)
    counts = [sum(slower > 0 for row, _, slower in compared(rows) if row["plan"] == plan) for plan in MENUS]
    cases = sum(row["plan"] == "planned" for row in rows)
    worst = max(slower for *_, slower in compared(rows))
    head = ["model", "rate", "plan", "predicted s", "measured s", "off by", "best fixed, s", "plan against it"]
    return "\n\n".join([
        table(head, lines),
        f"Predictions of all {len(rows)} steps: median error {100 * errors[len(errors) // 2]:.1f} %, worst "
        f"{100 * errors[-1]:.1f} %. The lossless plan is slower than the best fixed entry on its menu in {counts[0]} "
        f"of {cases} cases, the lossy plan in {counts[1]}, by up to {100 * worst:.1f} %.",
    ])  # fmt: skip


def _on_gpu() -> str:
    with ON_GPU.open(newline="") as file:
        rows = list(csv.DictReader(file))
    squares = [float(r["off_percent"]) ** 2 for r in rows]
    mean = (sum(squares) / len(squares)) ** 0.5
    lines = [[r["what"], r["measured_ms"], r["predicted_ms"], f"{float(r['off_percent']):+.1f} %", r["times_fp32"]]
             for r in rows]  # fmt: skip
    head = ["", "measured ms", "predicted ms", "off by", "times FP32's speed"]
    return f"{table(head, lines)}\n\nRoot mean square of these {len(rows)} errors: {mean:.1f} %."
