"""The section of docs/results.md on GComp as published, in float32: levels, rates, Figure 14 and the loss."""

from __future__ import annotations

import statistics

from pieces import NOT_RUN, Results, Row, of, table
from published import GCOMP_ABLATION

TITLES = {
    "cifar": "ResNet-18 of a quarter of its width, CIFAR-10, SGD with momentum",
    "enwik8": "GPT of 0.8 M parameters, enwik8, AdamW",
    "sst2": "pretrained MiniLM, SST-2, AdamW",
}
LONG = {"gcomp-cifar-float32": "ResNet-18, CIFAR-10, SGD", "gcomp-sst2-float32": "MiniLM, SST-2, AdamW"}
ABLATION = ("one level", "four levels", "pruned", "pruned, four levels")


def float32(read: Results) -> str:
    levels, runs, dial = read("gcomp/levels.csv"), read("gcomp/float32.csv"), read("gcomp/results.csv")
    if not levels or not runs:
        return f"## GComp as published, in float32\n\n{NOT_RUN}"
    codecs = [key for key in levels[0] if key.startswith("bits ")]
    head = ["task", "step", "zeros, %", "levels 0 / 6 / 12 / 18, %", "bits cut of a value"]
    head += [f"bits, `{codec.removeprefix('bits ')}`" for codec in codecs]
    looks = [
        [row["task"], row["step"], f"{100 * float(row['zeros']):.1f}",
         " / ".join(f"{100 * float(row[f'level{i}']):.0f}" for i in range(4)), f"{float(row['cut']):.1f}",
         *(f"{float(row[codec]):.2f}" for codec in codecs)]
        for row in levels
    ]  # fmt: skip
    theirs = [["GComp, Figure 14", sample, *(f"{value:g}" for value in values)]
              for sample, values in GCOMP_ABLATION.items()]  # fmt: skip
    ours = [[row["task"], row["step"], *(f"{float(row[key]):.1f}" for key in ABLATION)] for row in levels]
    lengths = "; ".join(_length(of(runs, task=task), title) for task, title in TITLES.items() if of(runs, task=task))
    return "\n\n".join([
        "## GComp as published, in float32",
        "`mode=paper` by the published rule (a value loses n of 6, 12 or 18 bits where |delta| > 2^n), float32 forward "
        "and backward, gradients of real data, on a CPU: `python experiments/gcomp/float32.py --data DATA`. **The runs "
        f"are short, of one seed, and of small nets**: {lengths}. Four workers; their own frames and those of their "
        "sum are real. Looked at are worker 0's matrices in the plain run; `noise` has its default of 1 % for a "
        "single hop, without a shape. Full-length training in float32 is "
        + ("below." if any(of(dial, task=task) for task in LONG) else "not run: it is in the "
           "[queue](../experiments/queue.md)."),
        table(head, looks),
        "**Figure 14**: sign and mantissa as per cent of their 24 bits. *One level*: 12 bits are cut where |delta| > "
        "2^12 (1 bit says so); *four levels*: 0, 6, 12 or 18 (2 bits); *pruned*: zeros carry nothing. Where they are "
        "not pruned, zeros are cut as far as the levels go. The paper does not say how its single level is chosen, "
        "and its samples S1 to S4 are of other nets.",
        table(["", "step or sample", *ABLATION], [*theirs, *ours]),
        "**Loss** (Figure 18 in another form): the mean distance of the training loss from the plain run's, over all "
        "steps, and the end. *Nudged* is plain training whose first gradient was multiplied by 1 + 1e-6.",
        table(
            ["task", "", "bits", "bits of sums", "mean of the last 10 losses", "mean change of the loss"],
            [_run(row, runs) for row in runs],
        ),
        *_to_the_end(dial),
        *_scaling(read("gcomp/scaling.csv")),
    ])  # fmt: skip


def _to_the_end(rows: list[Row]) -> list[str]:
    """Float32 training by the dial's schedules, on a GPU."""
    lines = [
        [title, row["row"], row["own_bits"] or "32", row["sum_bits"] or "32", row["value"], row["loss"]]
        for task, title in LONG.items()
        for row in of(rows, task=task)
    ]
    head = ["task", "", "bits", "bits of sums", "accuracy, %", "loss in the end"]
    return [table(head, lines)] if lines else []


def _scaling(rows: list[Row]) -> list[str]:
    """Milliseconds of an all-reduce, and per cent of the native one, by ranks."""
    if not rows:
        return [f"Figures 16 and 17 (scaling): {NOT_RUN}."]
    parts = [
        "**Figures 16 and 17 in another form: an all-reduce of 40 MB by 2, 4 and 8 ranks**, ms and per cent of the "
        "native one in float32, coding included (`real_ranks.sh DATA scaling`; gcomp/scaling.csv; a gradient of a "
        "small language model, repeated to 10 million values). The paper has the throughput of training with up to 4 "
        "workers, and simulates 4 to 128.",
    ]  # fmt: skip
    for device in dict.fromkeys(row["device"] for row in rows):
        own = of(rows, device=device)
        worlds = list(dict.fromkeys(row["ranks"] for row in own))
        native = {row["ranks"]: float(row["milliseconds"]) for row in own if row["codec"] == "native fp32"}
        where = "a GPU" if device == "cuda" else "CPUs; all emulated hosts share two cores, at 1 Gbit/s each"
        lines = []
        for codec in dict.fromkeys(row["codec"] for row in own):
            times = {row["ranks"]: float(row["milliseconds"]) for row in of(own, codec=codec)}
            cells = [f"{times[w]:.0f} ({100 * times[w] / native[w]:.0f} %)" if w in times else "" for w in worlds]
            lines.append([f"`{codec}`" if not codec.startswith("native") else codec, *cells])
        parts += [f"On {where}:", table(["", *(f"{world} ranks" for world in worlds)], lines)]
    return parts


def _length(runs: list[Row], title: str) -> str:
    return f"{title}, {runs[0]['steps']} steps, {int(runs[0]['parameters']):,} parameters"


def _run(row: Row, runs: list[Row]) -> list[str]:
    plain = of(runs, task=row["task"], row="plain")[0]
    pairs = zip(map(float, row["losses"].split()), map(float, plain["losses"].split()))
    off = statistics.fmean(abs(a - b) for a, b in pairs)
    bits = [row[key] if row["policy"] else "32" for key in ("own_bits", "sum_bits")]
    change = "" if row is plain else f"{off:.2e}"
    return [row["task"], row["row"], *(f"{float(b):.2f}" for b in bits), f"{float(row['loss']):.4f}", change]
