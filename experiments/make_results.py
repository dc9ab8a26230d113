"""Writes docs/results.md from the experiments' CSV files: python experiments/make_results.py

What a table shows, and why it differs from the paper's where it does, is written by hand into notes/SECTION.md (names:
powersgd, accordion, dial, rates, stale, real_ranks, allreduce, gpt, noise, ...) and stands below the section's tables;
notes/summary.md stands above all of them. The table on the default in docs/design.md is written as well.

To see what tiny forms of the runs look like on the page:
python experiments/make_results.py --results FOLDER --tiny --out page.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import default_section
import gpu_minutes
import published
from espresso_section import espresso
from float32_section import float32
from noise_section import noise, picture
from pieces import NOT_RUN, TASKS, Results, Row, figure, floats, mean_of, of, seen, table
from published import Published
from rank_sections import allreduce, gpt, real_ranks
from series import runs_of
from wall_picture import wall

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "gcomp"))
import rows as gcomp_rows  # noqa: E402

PAGE, DOCS = HERE.parent / "docs/results.md", HERE.parent / "docs"
PICTURES = {"noise.svg": picture, "wall.svg": wall}
NO_DATA = "not run: the data is not at hand"

DIAL = list(gcomp_rows.DIAL)
CLEAR = 0.5  # points between two rows of a published table that count as a difference

NETS = {
    "accordion-resnet18": "ResNet-18, CIFAR-10",
    "accordion-vgg19bn": "VGG-19bn, CIFAR-10",
    "accordion-senet": "SENet, CIFAR-10",
    "accordion-resnet18-100": "ResNet-18, CIFAR-100",
    "accordion-senet-100": "SENet, CIFAR-100",
}


def ordering(rows: list[Row], paper: Mapping[str, Published], higher_is_better: bool = True) -> str:
    """Which clear differences of a published table ours show as well."""
    ours = {name: statistics.fmean(values) for name in paper if (values := floats(of(rows, row=name), "value"))}
    sign, kept, failed = 1 if higher_is_better else -1, 0, list[str]()
    for better in ours:
        for worse in ours:
            if sign * (paper[better].value - paper[worse].value) >= CLEAR:
                if sign * (ours[better] - ours[worse]) > 0:
                    kept += 1
                else:
                    failed.append(f"{better} over {worse}")
    if not kept and not failed:
        return ""
    clear = f"Of {kept + len(failed)} pairs that differ by {CLEAR} or more in the paper"
    text = f"{clear}, {kept} {'is' if kept == 1 else 'are'} in the same order here"
    return text + (f"; not: {', '.join(failed)}." if failed else ".")


# --- Sections --------------------------------------------------------------------------------------------------------


def powersgd(read: Results) -> str:
    rows, times = read("powersgd/results.csv"), read("powersgd/times.csv")

    def compared(task: str, paper: Mapping[str, Published], metric: str) -> str:
        found, timed = [], bool(of(times, task=task))
        for name, theirs in paper.items():
            own = of(rows, task=task, row=name)
            policy = own[0]["policy"] if own else ""
            line = [name, figure(floats(own, "value")), f"{theirs.value:g}"]
            line += [mean_of(floats(own, "mib_per_epoch")), f"{theirs.sent:g}"]
            if timed:
                line.append(mean_of(floats(of(times, task=task, policy=policy), "median_ms"), 0) or NOT_RUN)
            found.append([*line, f"{theirs.milliseconds:g}"])
        head = ["", metric, "the paper's", "MiB per epoch", "the paper's"]
        head += ["ms per batch, 4 ranks at 10 Gbit/s"] if timed else []
        return table([*head, "the paper's ms per batch, 16 GPUs"], found)

    def at_length(task: str, paper: Mapping[str, Published], metric: str, what: str) -> list[str]:
        own = of(rows, task=task)
        if not own:
            return [f"{what}, with the paper's rate, batch and net: {NOT_RUN}. `{task}` is in the "
                    "[queue](../experiments/queue.md)."]  # fmt: skip
        there = {name: theirs for name, theirs in paper.items() if of(own, row=name)}
        order = ordering(own, paper, higher_is_better=metric != "perplexity")
        return [f"### {what}", seen(own), compared(task, there, metric), order]

    cifar, lstm = of(rows, task="powersgd-cifar"), of(rows, task="powersgd-wikitext")
    more = of(rows, task="powersgd-cifar-32")
    planned = {run.row for run in runs_of("powersgd") if run.task == "powersgd-cifar-32"}
    some = {name: theirs for name, theirs in published.POWERSGD_CIFAR.items() if name in planned}
    untimed = "" if times else f"Our time per batch was {NOT_RUN}."
    return "\n\n".join(
        part
        for part in (
            "## PowerSGD: Tables 3 and 4",
            "Vogels et al., NeurIPS 2019. ResNet-18 (11,173,962 parameters) on CIFAR-10, test accuracy in per cent; 16 "
            "workers with error feedback and momentum (`gradzip.optim.EFMomentum`). MiB are what one worker "
            "contributes, as in the paper (which calls them MB). The schedule is the paper's, shortened "
            f"(experiments/powersgd/README.md). {untimed}".strip(),
            seen(cifar),
            compared("powersgd-cifar", published.POWERSGD_CIFAR, "accuracy, %"),
            ordering(cifar, published.POWERSGD_CIFAR),
            "The same with four times the steps: batches of 32 instead of 128 pictures for each worker, and so four "
            f"times the MiB of an epoch.{'' if more else f' It was {NOT_RUN}.'}",
            seen(more),
            compared("powersgd-cifar-32", some, "accuracy, %") if more else "",
            ordering(more, some),
            "LSTM of 3 x 650 units on WikiText-2, perplexity on the test part (lower is better); our vocabulary has "
            "33,278 words, the paper's 28,869. One worker stands for 16 here (experiments/powersgd/README.md).",
            seen(lstm),
            compared("powersgd-wikitext", published.POWERSGD_LSTM, "perplexity"),
            ordering(lstm, published.POWERSGD_LSTM, higher_is_better=False),
            *at_length("powersgd-cifar-300", published.POWERSGD_CIFAR, "accuracy, %", "Table 4 at 300 epochs"),
            *at_length("powersgd-wikitext-90", published.POWERSGD_LSTM, "perplexity", "The LSTM at 90 epochs"),
        )
        if part
    )


def accordion(read: Results) -> str:
    rows, lines, orders = read("accordion/results.csv"), list[list[str]](), list[str]()
    tables = [(task, net, published.ACCORDION[task]) for task, net in NETS.items()]
    for task, in_paper in (*published.ACCORDION_LONG.items(), *published.ACCORDION_TOP_K.items()):
        known = {name: figures for name, figures in in_paper.items() if of(rows, task=task, row=name)}
        if known and list(known) == list(in_paper):
            tables.append((task, f"{NETS[task.removesuffix('-300')]}, 300 epochs", in_paper))
    for task, net, in_paper in tables:
        paper: dict[str, Published | None] = dict(in_paper)
        if task.startswith("accordion-vgg19bn"):
            paper |= {"rank 2": None, "accordion 4/2": None}
        for name, theirs in paper.items():
            own = of(rows, task=task, row=name)
            sent = [float(r["mib_per_epoch"]) * float(r["epochs"]) * 2**20 / 4e6 for r in own]
            most = statistics.fmean(sent) if sent else 0.0
            first = of(rows, task=task, row=next(iter(paper)))
            base = [float(r["mib_per_epoch"]) * float(r["epochs"]) * 2**20 / 4e6 for r in first]
            least = next(iter(in_paper.values())).sent
            lines.append([
                net, name, figure(floats(own, "value")) if own or not task.endswith("-100") else NO_DATA,
                f"{theirs.value:g}" if theirs else "", mean_of(sent, 1),
                f"{most / statistics.fmean(base):.2f}" if sent and base else "",
                f"{theirs.sent / least:.2f}" if theirs else "",
            ])  # fmt: skip
        order = ordering(of(rows, task=task), in_paper)
        if order:
            orders.append(f"{net}: {order}")
    head = ["net", "", "accuracy, %", "the paper's", "million floats", "part of the net's first row", "the paper's"]
    return "\n\n".join(
        part
        for part in (
            "## Accordion: Tables 1 and 2",
            "Agarwal et al., MLSys 2021. 4 workers, PowerSGD at a low and a high rank and Accordion between the two, "
            "with the paper's rule for falls of the learning rate. The numbers of floats are those that one worker "
            "contributes; as the schedule is shorter than the paper's, compare the parts, not the numbers. CIFAR-100 "
            "needs its data (`--data`); where it is absent the rows are marked so.",
            seen(rows),
            table(head, lines),
            " ".join(orders),
            ""
            if any(row["task"].endswith("-300") for row in rows)
            else f"At the paper's 300 epochs, and over top k: "
            f"{NOT_RUN}. `accordion-vgg19bn-300`, `accordion-resnet18-300` and `accordion-senet-300`, the nets as "
            "published, are in the [queue](../experiments/queue.md).",
        )
        if part
    )


def deviation(row: Row, plain: list[Row]) -> float | None:
    """The mean distance of two loss curves of one seed."""
    same = [p for p in plain if p["seed"] == row["seed"]]
    if not same or same[0] is row:
        return None
    pairs = list(zip(map(float, row["losses"].split()), map(float, same[0]["losses"].split())))
    return statistics.fmean(abs(a - b) for a, b in pairs)


def dial(read: Results) -> str:
    rows, parts = read("gcomp/results.csv"), list[str]()
    for task, title in TASKS.items():
        own = of(rows, task=task)
        plain = of(own, row="plain")
        values = floats(plain, "value")
        spread = max(values) - min(values) if len(values) > 1 else None
        lines = []
        digits = 3 if own and own[0]["metric"] == "bits per byte" else 2
        for name in sorted({row["row"] for row in own}, key=DIAL.index):
            here = of(own, row=name)
            off = [d for row in here if (d := deviation(row, plain)) is not None]
            paired = [
                float(row["value"]) - float(p["value"]) for row in here for p in plain if p["seed"] == row["seed"]
            ]
            difference = statistics.fmean(paired) if paired and name != "plain" else None
            within = "" if difference is None else "one seed" if spread is None else ""
            if not within and difference is not None and spread is not None:
                within = "yes" if abs(difference) <= spread else "**no**"
            bits = floats(here, "own_bits")
            lines.append([
                name, f"`{gcomp_rows.DIAL[name][0]}`",
                mean_of(bits, 2) or ("16" if name == "bf16" else "32"),
                mean_of(floats(here, "sum_bits"), 2) or ("16" if name == "bf16" else "32"),
                figure(floats(here, "value"), digits),
                "" if difference is None else f"{difference:+.{digits}f}", within,
                f"{statistics.fmean(off):.2e}" if off else "",
            ])  # fmt: skip
        metric = own[0]["metric"].replace("accuracy", "accuracy, %") if own else ""
        head = ["", "policy", "bits", "bits of sums", metric, "to plain", "within its seeds", "mean change of the loss"]
        parts.append(f"### {title}\n\n{seen(own)}\n\n{table(head, lines)}" if lines else f"### {title}\n\n{NOT_RUN}")
    intro = (
        "## GComp: the dial\n\nFrom near-lossless (`gcomp`, at most 1 ulp of each parameter) to extreme, with error "
        "feedback where the codec is biased unless the row says otherwise. *Bits* per value are those of a worker's "
        "own frames and of the frames of sums, matrices only: both travel. *To plain*: the difference from the "
        "plain run of the same seed; *within its seeds*: no more than plain training's own range over its seeds. "
        "*Mean change of the loss*: of 100 points of the training loss, beside the plain run of the same seed "
        "(GComp's Figure 18 in another form); `plain, again` is what the GPU's own order of summation does. 18-bit "
        "truncation is GComp's baseline."
    )
    return "\n\n".join([intro, *parts])


def rates(read: Results) -> str:
    rows, parts = read("gcomp/rates.csv"), list[str]()
    for task, title in TASKS.items():
        own = of(rows, task=task, seed="0")
        codecs = [key for key in (own[0] if own else {}) if key.startswith("bits ")]
        lines = [
            [row["step"], f"{100 * float(row['zeros']):.1f}", f"{100 * float(row['top15']):.1f}",
             f"{float(row['magnitude']):.1e}",
             " / ".join(f"{100 * float(row[f'level{i}']):.0f}" for i in range(4)),
             *(f"{float(row[codec]):.2f}" for codec in codecs)]
            for row in own
        ]  # fmt: skip
        head = ["step", "zeros, %", "top 15 exponents, %", "gradient / parameter, median", "levels 0 / 6 / 12 / 18, %"]
        head += [f"bits, `{codec.removeprefix('bits ')}`" for codec in codecs]
        parts.append(f"### {title}\n\n{table(head, lines)}" if lines else f"### {title}\n\n{NOT_RUN}")
    intro = (
        "## GComp: gradients over training\n\nFigures 2, 3 and 9: exact zeros, how many values the 15 "
        "most frequent exponents cover, the levels that GComp's rule would choose (how many bits of the mantissa it "
        "drops; zeros have none), and bits per value by mode, of worker 0's matrices (of 32). "
        f"The paper reports {published.GCOMP_RATE['ResNet-50']} % (ResNet-50, ImageNet) and "
        f"{published.GCOMP_RATE['BERT-base']} % (BERT-base, SST) of float32's size, which is 10.5 and 11.7 bits, with "
        f"{published.GCOMP_ZEROS['ResNet-50']} % and {published.GCOMP_ZEROS['BERT-base']} % zeros. Its rate rests on "
        "those zeros. The columns *levels* and `mode=paper` here are older than the exact rule |delta| > 2^n and of "
        "BF16 autocast: they took |A / B| as the power of two below it, which cuts about half a bit less. The "
        "next section has the rule as published, in float32, and Figure 14."
    )
    return "\n\n".join([intro, *parts])


def stale(read: Results) -> str:
    rows, lines = read("gcomp/stale.csv"), list[list[str]]()
    for task, title in TASKS.items():
        for symbols in ("raw", "relative"):
            for source in ("S1", "S2", "S3", "S4"):
                own = of(rows, task=task, symbols=symbols, source=source, seed="0")
                if own:
                    cells = [" / ".join(f"{float(r[c]):.1f}" for c in ("native", "cut", "limited")) for r in own]
                    lines.append([title, symbols, source, *cells])
    head = ["run", "symbols", "book of", "on S1", "on S2", "on S3", "on S4"]
    theirs = [["GComp, Fig. 12", "raw", source, *cells.values()] for source, cells in published.GCOMP_STALE.items()]
    intro = (
        "## GComp: code books that are out of date\n\nFigure 12: bits per exponent as per cent of 8, native / cut at 8 "
        "bits with an escape (GComp's) / limited (gradzip's). S1 to S4 are gradients at 5, 35, 65 and 95 % of "
        "training. *Relative* symbols are those of gradzip's format; their percentages are of values in blocks that "
        "are not all zeros (such blocks cost no code), those of raw symbols of all values, so the two do not "
        "compare where there are zeros. The paper's rows have native / cut."
    )
    return "\n\n".join([intro, table(head, [*theirs, *lines]), "" if lines else NOT_RUN]).rstrip()


INTRO = """# Results

The experiments of the papers that gradzip is made of, run again with gradzip's code on real data. This page is written
by `python experiments/make_results.py` from the CSV files in `experiments/`; every row there has the command's settings
with it, and each folder's README says what the paper did, what is done here and what differs.

**How.** Where communication time is not the question, W workers are simulated on one device: each computes its gradient
in turn, then the library's codecs, error memory and sums do what they do on a cluster. A test proves that this equals
real processes under DDP bit for bit (tests/test_workers.py). Where time is the question, real ranks share the GPU over
an emulated network. One schedule for all rows of a table; a figure with a range is that of several seeds."""

SECTIONS = (noise, powersgd, accordion, dial, rates, float32, stale, real_ranks, allreduce, espresso, gpt)


def page(read: Results) -> str:
    parts = [INTRO, _notes("summary").read_text().strip(), gpu_minutes.section(read)]
    for section in SECTIONS:
        parts.append(section(read))
        notes = _notes(section.__name__)
        if notes.exists():
            parts.append(notes.read_text().strip())
    return "\n\n".join(parts) + "\n"


def _notes(section: str) -> Path:
    return HERE / "notes" / f"{section}.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE, help="the folder that has a folder for each experiment")
    parser.add_argument("--tiny", action="store_true", help="also rows of tiny forms of the tasks")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.out == PAGE and (options.tiny or options.results != HERE):
        parser.error("--results and --tiny need --out: they do not belong onto the page")
    text = page(Results(options.results, options.tiny))
    options.out.write_text(text)
    if options.out == PAGE:
        for name, draw in PICTURES.items():
            (DOCS / name).write_text(draw(Results(options.results)))
        design = default_section.PAGE
        design.write_text(default_section.filled(design.read_text(), Results(options.results)))
    print(f"{options.out}: {text.count(NOT_RUN)} places are not run yet")
    silent = [section.__name__ for section in SECTIONS if not _notes(section.__name__).exists()]
    if silent:
        print(f"no notes say what these show: {', '.join(silent)} (experiments/notes/NAME.md)")


if __name__ == "__main__":
    main()
