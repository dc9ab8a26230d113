"""The section of docs/results.md on budgets of noise, and its picture: from noise/results.csv by noise/analysis.py."""

from __future__ import annotations

import statistics
import sys
from html import escape
from pathlib import Path

import paired
from pieces import NOT_RUN, Results, Row, of, table

HERE = Path(__file__).parent
sys.path.append(str(HERE / "noise"))
import analysis  # noqa: E402

TITLES = {
    "gpt": "GPT of 1.8 M parameters, enwik8, AdamW",
    "gpt-16": "the same, 16 workers",
    "gpt-beta2": "the same, beta2 0.999",
    "gpt-batch8": "the same, a batch eight times as large",
    "gpt-muon": "GPT of 1.8 M parameters, enwik8, Muon",
    "gpt-11m": "GPT of 10.7 M parameters, enwik8, AdamW",
    "sst2": "MiniLM (22.6 M parameters), SST-2, AdamW",
    "gpt2": "GPT-2 of 124 M parameters, words of enwik8, AdamW",
    "cifar20k": "ResNet-18, 20,000 pictures of CIFAR-10, SGD",
    "cifar50k": "ResNet-18, all 50,000 pictures of CIFAR-10, SGD",
    "gpt-short": "GPT of 10.8 M parameters, 800 steps, AdamW",
    "gpt-short-muon": "GPT of 10.8 M parameters, 800 steps, Muon",
}
GCOMP = ("near", "paper")  # rows of gcomp's modes
UNUSABLE = ("gpt-short", "gpt-short-muon")  # their ends say nothing about 1 %: notes/noise.md
PICTURED = ("gpt", "cifar20k", "gpt-muon")


def signed(found: analysis.Interval, digits: int = 2) -> str:
    if found.count < 2:
        return f"{found.mean:+.{digits}f} (one seed)"
    return f"{found.mean:+.{digits}f} ± {found.half:.{digits}f}"


def noise(read: Results) -> str:
    rows = read("noise/results.csv")
    if not rows:
        return f"## Noise: what a budget costs\n\n{NOT_RUN}"
    tasks = [task for task in TITLES if of(rows, task=task)]
    parts = [
        "## Noise: what a budget costs",
        "Paired runs of `noise` (experiments/noise/README.md): all runs of a seed begin with the same values and "
        "see the same batches, and only the averaging of gradients differs. The promise: zero-mean noise; its "
        "share (the sum of its squares over that of the averaged gradient, over all parameters of the step) is at"
        f" most the budget b on average over steps. {_shares(rows, tasks)} In the local quadratic model this "
        "costs at most a share b more steps; where sampling noise dominates, that equals a batch smaller by "
        "1/(1+b) at the same learning rate.",
        "*At 1 %*: held-out loss against plain's, in per cent of plain's, by a slope through the origin over the "
        "measured share of all budgets (1 to 30 %), one slope for each seed, times the share that a budget of 1 %"
        " was measured to have. Intervals are Student's, 95 %, over seeds. **Accepted is an upper bound below "
        f"{analysis.LIMIT} %.** *Second term*: what a fit with two terms adds for the square of the share; 0 "
        "should lie within it. *Largest budget*: the one whose upper bound is that limit, if costs are linear and a "
        "mean below 0 counts as 0 (30 % is the largest there is). *Without 30 %*: what the slope of budgets of 1 to "
        "10 % gives at 1 %, which does not rest on the largest; in brackets its seeds.",
        table(
            ["task", "seeds", "slope, % of loss for 1 % of share", "second term", "at 1 %", "upper bound", "accepted",
             "largest budget", "without 30 %"],
            [_bound(rows, task) for task in tasks if analysis.slope(rows, task) is not None],
        ),
        "![Loss against bits](noise.svg)",
        "Dots are seeds, the line joins their means, bars are 95 % intervals of these; the band is the slope's 95 % "
        "interval at the measured share; grey is the range of plain training whose first gradient was multiplied by "
        "1 + 1e-6. Circles are other codecs, most with one seed, which says nothing. Written by the same command, from "
        "the same rows.",
        "*Bits* here and below are the entropy of the integers, with a table for each 8,192 values that is not "
        f"counted, at six steps; those of other codecs are their fixed width{_bits_of_frames(rows)}. What `noise` "
        "sends is more: the promise's table has it, with tables, headers and padding.",
        _gcomp(rows),
        "**How strong the signal was.** SNR is the samples of a step over B_noise, the batch at which the gradient is "
        "half noise, of the plain runs' second half, from the mean squares of a worker's gradient and of the mean's "
        "(columns `own_square` and `signal`).",
        table(
            ["task", "samples of a step", "B_noise, samples", "SNR", "share at a budget of 1 %"],
            [_signal(rows, task) for task in tasks if task not in UNUSABLE],
        ),
    ]  # fmt: skip
    for task in tasks:
        own = of(rows, task=task)
        plain = statistics.fmean(float(r["loss"]) for r in own if r["row"] == "plain")
        device = ", ".join(sorted({r["device"] for r in own}))
        steps, workers = own[0]["steps"], own[0]["workers"]
        parts.append(f"### {TITLES[task]} (`{task}`)")
        parts.append(f"Ours: {steps} steps, {workers} workers, {device}; plain's held-out loss is {plain:.4f} nats.")
        head = ["", "bits", "bits of sums", "share, %", "worst step, %", "seeds", "held-out loss, % of plain's",
                "training loss, %"]  # fmt: skip
        parts.append(table(head, _lines(own, task)))
    return "\n\n".join([*parts, *_promise(read("noise/promise.csv"))])


def _bits_of_frames(rows: list[Row]) -> str:
    there = [f"*{name}*" for name in GCOMP if of(rows, row=name)]
    return f", those of {' and '.join(there)} of real frames of all that is compressed" if there else ""


def _gcomp(rows: list[Row]) -> str:
    """What the rows of near and paper mode are, and which are still to come."""
    left = dict[tuple[str, str], list[str]]()  # names of rows by task and seed
    for group in paired.rows_module().QUEUE:
        for seed, variant in group.runs:
            if variant.name in GCOMP and not of(rows, task=group.task, row=variant.name, seed=str(seed)):
                left.setdefault((group.task, str(seed)), []).append(variant.name)
    absent = [f"{' and '.join(names)} on `{task}` with seed {seed}" for (task, seed), names in left.items()]
    queued = f" {NOT_RUN.capitalize()}: {', '.join(absent)} ([queue](../experiments/queue.md))." if absent else ""
    if not any(of(rows, row=name) for name in GCOMP):
        return f"**Near and paper mode** have no pairs.{queued}"
    return (
        "**Near and paper mode.** Rows *near* and *paper* are `gcomp` and `gcomp:mode=paper` as `attach` takes them: "
        "vectors and tiny tensors are not compressed, and in near mode a rank's own gradients go lossless where that "
        "is smaller. In near mode no parameter moves by more than an ulp in a step. A difference from plain that is no "
        f"larger than that of *nudged* shows no cost.{queued}"
    )


def _percent(share: float) -> str:
    """Two digits behind the point, or the first that is not 0."""
    return "0" if not share else f"{share:.2f}" if share >= 0.005 else f"{share:.1g}"


def _samples(task: str) -> int:
    """Of a worker in a step."""
    if task in paired.paired.TEXTS:
        return paired.paired.TEXTS[task].texts
    return paired.SINGLE[task].batch


def _signal(rows: list[Row], task: str) -> list[str]:
    samples = _samples(task)
    found = analysis.noise_scale(rows, task, samples)
    assert found is not None
    world = int(of(rows, task=task)[0]["workers"])
    share = statistics.fmean(100 * float(row["share"]) for row in of(rows, task=task, row="noise 1 %"))
    return [f"`{task}`", f"{world} x {samples}", f"{found[0]:.0f}", f"{found[1]:.2f}", f"{share:.2f} %"]


def _shares(rows: list[Row], tasks: list[str]) -> str:
    """What the share was at a budget of 1 %, and in which tasks a step had more than twice that."""
    own = {task: of(rows, task=task, row="noise 1 %") for task in tasks}
    means = [100 * float(row["share"]) for found in own.values() for row in found]
    worst = {task: sorted(100 * float(row["worst_share"]) for row in found) for task, found in own.items() if found}
    above = {task: steps for task, steps in worst.items() if steps[-1] > 2}
    others = [step for task, steps in worst.items() if task not in above for step in steps]
    text = (
        f"At 1 % it was {min(means):.2f} to {max(means):.2f} % in these runs, and {min(others):.1f} to "
        f"{max(others):.1f} % in their worst steps"
    )
    for task, steps in above.items():
        text += f", but {', '.join(f'{step:.1f}' for step in steps[:-1])} and {steps[-1]:.1f} % in those of `{task}`"
    return (
        f"{text}. A step is above 2 b where few directions carry the gradient and the ranks' gradients cancel each "
        "other in them: then the averaged gradient is small while each rank's own, from which the level follows, is "
        "not. `stats()` warns when a step is."
    )


def _promise(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    names = ("AdamW", "AdamW beta2=0.95", "SGD", "Lion", "Muon", "Adafactor")
    absent = [name for name in names if not of(rows, optimizer=name)]
    lines = [
        [row["optimizer"], f"{int(row['parameters']) / 1e6:.1f} M", row["steps"], f"{row['texts']} x {row['length']}",
         f"{100 * float(row['share']):.2f} / {100 * float(row['worst']):.2f}",
         f"{100 * float(row['true_share']):.2f} / {100 * float(row['true_worst']):.2f}",
         f"{float(row['ratio']):.2f}", f"{float(row['bits']):.2f}", row["coarser"],
         "yes" if row["differing"] == "0" else "**no**", "yes" if row["resumed"] == "1" else "**no**",
         f"{float(row['bias']):.3f} ± {float(row['bias_error']):.3f}", f"{float(row['shrink']):.1f}",
         f"{row['runner']}, {row['device']}"]
        for row in rows
    ]  # fmt: skip
    return [
        "### Whether the promise is kept",
        "A GPT trained on bytes of enwik8 by four real ranks with a budget of 1 % (`noise/promise.py`; "
        "noise/promise.csv has all columns). *Share*: mean over steps and worst step, in per cent, as `stats()` has it "
        "and, in every tenth step, from the gradients of all ranks. *Ratio*: bytes of float32 over bytes sent, padding "
        "included. *Bias*: squares of the mean error of 200 draws over what unbiased ones have, 1 but for chance, ± "
        "a standard error; *shrink*: the mean error along the gradient over its standard error."
        + (f" Not run yet: {', '.join(absent)} ([queue](../experiments/queue.md))." if absent else ""),
        table(
            ["optimizer", "parameters", "steps", "bytes of a rank", "share", "true share", "ratio", "bits",
             "coarser frames", "replicas equal", "resume equal", "bias", "shrink", "runner"],
            lines,
        ),
    ]  # fmt: skip


def accepted(cost: analysis.Interval) -> str:
    """Whether the upper bound is below the limit; a single seed has none."""
    return "one seed" if cost.count < 2 else "yes" if cost.upper < analysis.LIMIT else "**no**"


def _bound(rows: list[Row], task: str) -> list[str]:
    found = analysis.slope(rows, task)
    assert found is not None
    largest = analysis.largest_budget(found.at_one)
    usable = task not in UNUSABLE
    without = analysis.slope(rows, task, most=0.1)
    verdict = accepted(found.at_one) if usable else "not counted"
    return [
        f"`{task}`", str(found.slope.count), signed(found.slope, 3),
        "" if found.curvature is None else signed(found.curvature, 4),
        signed(found.at_one, 3) + " %", f"{found.at_one.upper:+.3f} %" if found.at_one.count > 1 else "none",
        verdict, f"{largest:.2g} %" if usable and largest is not None else "",
        "" if without is None else _counted(without.at_one),
    ]  # fmt: skip


def _counted(found: analysis.Interval) -> str:
    half = f" ± {found.half:.3f}" if found.count > 1 else ""
    return f"{found.mean:+.3f}{half} % ({found.count})"


def _lines(own: list[Row], task: str) -> list[list[str]]:
    names = list(dict.fromkeys(r["row"] for r in own if r["row"] != "plain"))
    budgets = analysis.budgets(own, task)
    names.sort(key=lambda name: (name != "nudged", name not in budgets, budgets.index(name) if name in budgets else 0))
    lines = []
    for name in names:
        pairs = analysis.differences(own, task, name)
        if not pairs:
            continue
        here = [r for r in own if r["row"] == name and int(r["seed"]) in pairs]
        bits = [statistics.fmean(float(r[key]) for r in here) for key in ("own_bits", "sum_bits")]
        share = 100 * statistics.fmean(float(r["share"]) for r in here)
        worst = 100 * max(float(r["worst_share"]) for r in here)
        losses = (analysis.differences(own, task, name, figure) for figure in ("loss", "train_loss"))
        found = [signed(analysis.interval([y for _, y in pair.values()])) for pair in losses]
        lines.append([
            name, *(f"{b:.2f}" for b in bits), _percent(share), _percent(worst), str(len(pairs)), *found,
        ])  # fmt: skip
    return lines


# --- The picture -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, PLOT = 340, 330, 46, 62, 216  # of a panel; the plot's place and height
LEAST_BITS, MOST_BITS = 1.5, 9.5  # what has more is drawn at the end
OTHERS = {"int4, blocks of 32": "int4", "int8, blocks of 256": "int8", "fp8, rows": "fp8", "BF16": "BF16 (16)"}
INK, COLOUR, OTHER = "#1b1b1b", "#0072B2", "#D55E00"


def picture(read: Results) -> str:
    """Loss against bits per value (the mean of a worker's own frames and those of sums), a panel for each task."""
    rows = read("noise/results.csv")
    panels = [task for task in PICTURED if analysis.slope(rows, task) is not None]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * max(1, len(panels)) + 20} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<text x="12" y="22" font-size="15" font-weight="600">Held-out loss above plain training, % of plain\'s, '
        "against bits per value</text>",
    ]
    for number, task in enumerate(panels):
        body.append(f'<g transform="translate({number * WIDTH} 0)">{_panel(rows, task)}</g>')
    return "\n".join([*body, "</svg>", ""])


def _panel(rows: list[Row], task: str) -> str:
    own = of(rows, task=task)
    points = []  # bits, share, differences of seeds
    for name in analysis.budgets(rows, task):
        pairs = analysis.differences(rows, task, name)
        points.append((_bits(own, name), statistics.fmean(x for x, _ in pairs.values()), [y for _, y in pairs.values()],
                       name.removeprefix("noise ")))  # fmt: skip
    nudged = [y for _, y in analysis.differences(rows, task, "nudged").values()]
    slope = analysis.slope(rows, task)
    assert slope is not None
    values = [y for *_, ys, _ in points for y in ys] + nudged
    for *_, ys, _ in points:
        if len(ys) > 1:
            found = analysis.interval(ys)
            values += [found.upper, found.mean - found.half]
    low, high = min(*values, -0.5) * 1.1, max(*values, 0.5) * 1.1
    low -= 0.12 * (high - low)  # room for the budgets' names

    def x(bits: float) -> float:
        return LEFT + (min(bits, MOST_BITS) - LEAST_BITS) / (MOST_BITS - LEAST_BITS) * (WIDTH - LEFT - 24)

    def y(value: float) -> float:
        return TOP + PLOT * (high - min(max(value, low), high)) / (high - low)

    parts = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="600">{escape(TITLES[task])}</text>']
    for tick in _ticks(low, high):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - 24}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in range(2, 10):
        parts.append(f'<text x="{x(tick):.1f}" y="{TOP + PLOT + 16}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - 24) / 2
    parts.append(f'<text x="{middle:.1f}" y="{TOP + PLOT + 34}" text-anchor="middle">bits per value</text>')
    if nudged:
        top, bottom = y(max(*nudged, 0.0)), y(min(*nudged, 0.0))
        parts.append(f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - 24}" height="{bottom - top:.1f}" '
                     'fill="#999" opacity=".25"/>')  # fmt: skip
    points.sort()
    if slope.slope.count > 1:
        band = [(bits, share * slope.slope.upper) for bits, share, *_ in points]
        band += [(bits, share * (slope.slope.mean - slope.slope.half)) for bits, share, *_ in reversed(points)]
        corners = " ".join(f"{x(b):.1f},{y(v):.1f}" for b, v in band)
        parts.append(f'<polygon points="{corners}" fill="{COLOUR}" opacity=".13"/>')
    line = " ".join(f"{x(bits):.1f},{y(statistics.fmean(ys)):.1f}" for bits, _, ys, _ in points)
    parts.append(f'<path d="M{LEFT} {y(0):.1f}H{WIDTH - 24}" stroke="{INK}"/>')
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOUR}" stroke-width="2"/>')
    for bits, _, ys, label in points:
        parts += [f'<circle cx="{x(bits):.1f}" cy="{y(v):.1f}" r="3" fill="{COLOUR}"/>' for v in ys]
        if len(ys) > 1:
            found = analysis.interval(ys)
            upper, lower = y(found.upper), y(found.mean - found.half)
            parts.append(f'<path d="M{x(bits):.1f} {upper:.1f}V{lower:.1f}m-3 0h6M{x(bits) - 3:.1f} {upper:.1f}h6" '
                         f'stroke="{COLOUR}" fill="none"/>')  # fmt: skip
        parts.append(
            f'<text x="{x(bits):.1f}" y="{TOP + PLOT - 6}" text-anchor="middle" font-size="10" '
            f'fill="{COLOUR}">{label}</text>'
        )
    for other, label in OTHERS.items():
        ys = [v for _, v in analysis.differences(rows, task, other).values()]
        if not ys:
            continue
        at = x(_bits(own, other)) + {"int8": -5, "fp8": 5}.get(label, 0)  # these have the same bits
        parts += [f'<circle cx="{at:.1f}" cy="{y(v):.1f}" r="3.5" fill="none" stroke="{OTHER}" stroke-width="1.6"/>'
                  for v in ys]  # fmt: skip
        beside = y(min(ys)) + 16 if label in ("int8", "BF16 (16)") else y(max(ys)) - 8
        parts.append(f'<text x="{at:.1f}" y="{beside:.1f}" text-anchor="middle" fill="{OTHER}">{label}</text>')
    return "".join(parts)


def _bits(own: list[Row], name: str) -> float:
    return statistics.fmean((float(r["own_bits"]) + float(r["sum_bits"])) / 2 for r in own if r["row"] == name)


def _ticks(low: float, high: float) -> list[float]:
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10) if (high - low) / s <= 7)
    first = int(low // step)
    return [round(k * step, 6) for k in range(first, int(high // step) + 1) if low <= k * step <= high]
