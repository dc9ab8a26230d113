"""The sections of docs/results.md that need real ranks on a network: real_ranks.sh wrote their rows."""

from __future__ import annotations

from pieces import NOT_RUN, TASKS, Results, Row, of, table

GOALS = {"gcomp-cifar": 65.0, "gcomp-sst2-adamw": 86.0}  # per cent of the test pictures, of the dev sentences
NO_HANDLE = {"plain": "1", "torch bf16": "2"}  # ratios of what is not gradzip's
ORDER = ("plain", "torch", "gcomp", "gcomp:own=near", "gcomp:keep=7", "powersgd", "plan")  # beginnings of policies
PARTS = (0.25, 0.5, 1.0)  # of the time that a language model has
RANKS = "GPU, real ranks"  # in gpt/drift.csv
DRIFT = (4, 8, 12, 16, 20, 22, 24, 28, 30, 32)  # steps that the page shows of it
SMALL = (20, 28, 34, 36, 37, 38, 39)  # the same of the small GPT

# Bytes of float32 gradients, and what TCP left of a link: `gradzip emulate` measured it in a ring of hosts, before.
GRADIENT = {"gpt2-enwik8": 495_399_936, "gcomp-cifar": 44_695_848, "gcomp-sst2-adamw": 90_263_048}
LINKS = {"10 Gbit/s": 9.55e9, "1 Gbit/s": 0.945e9}

# GComp's Figure 10, per cent of the time without compression: by its text, and by its bars where the text has none.
PAPER = {
    "ResNet-50": {"GComp": "61.6 (bars: 72)", "zstd": "121", "zlib": "234"},
    "BERT-base": {"GComp": "47.0 (bars: 54)", "zstd": "94", "zlib": "264"},
}
GRADIENTS = {
    "resnet18-cifar10.pt": "ResNet-18, CIFAR-10",
    "minilm-sst2.pt": "MiniLM, SST-2",
    "snap.pt": "small language model",
}


def reached(row: Row) -> float | None:
    """Seconds until the row's evaluations reach the goal of its task."""
    pairs = (item.split(":") for item in row["evaluations"].split())
    return next((float(at) for at, value in pairs if float(value) >= GOALS[row["task"]]), None)


def _place(policy: str) -> int:
    """Where a policy stands in a table: at the longest beginning that it has."""
    return max(range(len(ORDER)), key=lambda i: (len(ORDER[i]) if policy.startswith(ORDER[i]) else 0, -i))


def _ratio(row: Row) -> str:
    return NO_HANDLE.get(row["policy"]) or (f"{float(row['ratio']):.2f}" if row["ratio"] else "unknown")


def _sent(row: Row) -> tuple[float, float] | None:
    """Megabytes that a rank sends in a step, and the milliseconds that the link needs for them."""
    whole, bits_per_s = GRADIENT.get(row.get("task", "")), LINKS.get(row["network"])
    if whole is None or bits_per_s is None or row.get("limit") or _ratio(row) == "unknown":
        return None
    ranks = int(row["ranks"])
    sent = 2 * (ranks - 1) / ranks * whole / float(NO_HANDLE.get(row["policy"]) or row["ratio"])
    return sent / 1e6, 8e3 * sent / bits_per_s


def _link_cells(row: Row) -> list[str]:
    found = _sent(row)
    return ["", ""] if found is None else [f"{found[0]:.{1 if found[0] < 100 else 0}f}", f"{found[1]:.0f}"]


def real_ranks(read: Results) -> str:
    parts = [
        "## GComp: time to accuracy",
        "Figures 15 and 20: four ranks that share a GPU, each with an emulated network card (`gradzip emulate "
        "--gpu-share`); plain training and torch's BF16 hook by NCCL, gradzip's payloads by Gloo. Evaluation stops the "
        f"clock. The goal is {GOALS['gcomp-cifar']:.0f} % of the test pictures on CIFAR-10 and "
        f"{GOALS['gcomp-sst2-adamw']:.0f} % of the dev sentences on SST-2, looked at every 32 and 15 steps. *Ratio*: "
        "bytes without compression over bytes sent; *MB sent* by a rank in a step, and the ms that the link needs for "
        f"them ({LINKS['10 Gbit/s'] / 1e9:g} Gbit/s, as measured before). One seed.",
    ]
    rows = read("gcomp/times.csv")
    head = ["policy", "ms per step", "ratio", "MB sent", "ms for them", "seconds to the goal", "times as fast as plain"]
    head += ["accuracy in the end", "seconds in all", "replicas that differ"]
    for task in GOALS:
        own = of(rows, task=task)
        if not own:
            parts.append(f"### {TASKS[task]}\n\n{NOT_RUN}")
            continue
        base = next((at for row in of(own, policy="plain") if (at := reached(row)) is not None), None)
        lines = []
        for row in own:
            at = reached(row)
            lines.append([
                f"`{row['policy']}`", f"{float(row['median_ms']):.1f}", _ratio(row), *_link_cells(row),
                "never" if at is None else f"{at:.1f}", "" if at is None or base is None else f"{base / at:.2f}",
                f"{float(row['value']):.2f}", f"{float(row['seconds']):.1f}", row["replicas_differing"],
            ])  # fmt: skip
        said = f"{own[0]['network']}, {own[0]['ranks']} ranks, {own[0]['steps']} steps, {own[0]['device']}."
        parts.append(f"### {TASKS[task]}\n\n{said}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def allreduce(read: Results) -> str:
    rows = read("gcomp/allreduce.csv")
    theirs = [
        ["the paper: 4 A100, 10 Gbit/s, Gloo", net, name, "", "", "", figure, ""]
        for net, bars in PAPER.items()
        for name, figure in bars.items()
    ]
    lines = [
        [f"{row['network']}, {'GPU' if row['device'] == 'cuda' else 'CPU'}",
         GRADIENTS.get(row["sample"], row["sample"]), f"`{row['codec']}`", f"{float(row['bytes']) / 1e6:.0f}",
         f"{float(row['milliseconds']):.0f}", f"{float(row['milliseconds']) * float(row['speedup']):.0f}",
         f"{100 / float(row['speedup']):.0f}", f"{float(row['ratio']):.2f}"]
        for row in rows
        if row["codec"] != "native fp32"
    ]  # fmt: skip
    head = ["where", "gradient", "codec", "MB", "ms", "native FP32, ms", "per cent of it", "ratio"]
    intro = (
        "## GComp: all-reduce against general compressors\n\nFigure 10: one exchange of a whole gradient, coding "
        "included, as per cent of what the same ranks' native all-reduce in float32 takes (`gradzip bench net`, "
        "medians; every result is checked first). `zstd` and `zlib` are at level 1, their fastest. *Ratio*: bytes of "
        "the native all-reduce over bytes sent."
    )
    return "\n\n".join([intro, table(head, [*theirs, *lines]), *([] if lines else [f"Ours: {NOT_RUN}"])])


def gpt(read: Results) -> str:
    parts = [
        "## A modern workload",
        "GPT-2 small (124 M parameters, BF16 autocast, AdamW) on the words of enwik8, four ranks that share a GPU, 8 "
        "texts of 256 words for each and step. Every policy trains for the same wall time; *loss* is that of training "
        "(nats per word), around the moment, and *held out* that of text that was kept aside, in the end. The plan is "
        "`gradzip plan`'s from a profile of plain training at 10 Gbit/s, whose time is not counted.",
        "![Training loss against wall time](wall.svg)",
        f"The picture is of the tables' rows{_absent(read)}. At 1 Gbit/s four clusters shared the GPU.",
    ]
    rows = read("gpt/results.csv")
    for network in dict.fromkeys(row["network"] for row in rows):
        own = sorted(of(rows, network=network), key=lambda row: _place(row["policy"]))
        seconds = min(float(row["seconds"]) for row in own)
        moments = [seconds * part for part in PARTS]
        lines = [
            [f"`{row['policy']}`", row["steps"], f"{float(row['median_ms']):.0f}", _ratio(row),
             *(_loss_at(row, moment) for moment in moments), f"{float(row['value']):.3f}", row["replicas_differing"]]
            for row in own
        ]  # fmt: skip
        head = ["policy", "steps", "ms per step", "ratio", *(f"loss after {moment:.0f} s" for moment in moments)]
        head += ["held out", "replicas that differ"]
        beside = max(int(row["beside"]) for row in own)
        said = f" {beside + 1} clusters ran side by side." if beside else ""
        parts.append(f"### {network}\n\n{own[0]['device']}.{said}\n\n{table(head, lines)}")
        parts += _beside_the_link(network, own)
    parts += _drift(read("gpt/drift.csv"), of(rows, network="10 Gbit/s"))
    return "\n\n".join(parts if rows else [*parts, NOT_RUN])


def _absent(read: Results) -> str:
    """What the picture of losses over time is still to show."""
    gpt2 = {row["policy"] for row in read("gpt/results.csv")}
    missing = [f"`{policy}`" for policy in ("noise", "torch powersgd 4") if policy not in gpt2]
    missing += [] if read("wall/results.csv") else ["ResNet-50"]
    return f"; not run yet: {', '.join(missing)} ([queue](../experiments/queue.md))" if missing else ""


def _beside_the_link(network: str, rows: list[Row]) -> list[str]:
    """What steps take beside what their bytes need."""
    lines = [
        [f"`{row['policy']}`", *_link_cells(row), f"{float(row['median_ms']):.0f}",
         f"{float(row['median_ms']) - found[1]:.0f}"]
        for row in rows
        if (found := _sent(row)) is not None
    ]  # fmt: skip
    if not lines:
        return []
    said = f"Megabytes that a rank sends in a step, and what the link ({LINKS[network] / 1e9:g} Gbit/s, as measured"
    head = ["policy", "MB sent", "ms for them", "ms per step", "more, ms"]
    return [f"{said} before) needs for them:", table(head, lines)]


def _drift(rows: list[Row], timed: list[Row]) -> list[str]:
    """Losses less those of plain training, step for step, and what was counted on the way."""
    own = of(rows, where=RANKS)
    if not own:
        return []
    plain = _by_step(next(iter(of(timed, policy="plain")), None))
    plain |= {int(row["step"]): float(row["loss"]) for row in of(own, policy="plain") if row["loss"]}
    found = dict[str, dict[int, float]]()
    for row in timed:
        curve = _by_step(row)
        found[row["policy"]] = {step: curve[step] - plain[step] for step in curve if step in plain}
    found = {policy: curve for policy, curve in found.items() if curve} | _to_plain(own)
    order = sorted((policy for policy in found if policy != "plain"), key=_place)
    lines = [[str(step), *(_difference(found[policy], step, 4) for policy in order)] for step in DRIFT]
    parts = [
        "### Step for step",
        "Training loss less plain training's at the same step, the first being 0; real ranks, "
        f"{own[0]['device']}. From `gpt/drift.csv`, and from the runs at 10 Gbit/s where plain's loss is known, to "
        "0.0001. `plain, again` is the same run once more; `nudged` starts with each parameter one float32 number "
        "higher or lower, by chance.",
        table(["step", *(f"`{policy}`" for policy in order)], lines),
        _counted(rows),
    ]
    curves = {where: _to_plain(of(rows, where=where)) for where in ("CPU, float32", "CPU, autocast")}
    order = sorted(dict.fromkeys(what for here in curves.values() for what in here if what != "plain"), key=_place)
    if order:
        parts += [
            "The same of a GPT of 2 blocks and 16,384 words, four simulated workers on a CPU.",
            table(
                ["", "step", *(f"`{policy}`" for policy in order)],
                [
                    [where, str(step), *(_difference(here.get(policy, {}), step, 5) for policy in order)]
                    for where, here in curves.items()
                    for step in SMALL
                ],
            ),
        ]
    return parts


def _to_plain(rows: list[Row]) -> dict[str, dict[int, float]]:
    found = dict[str, dict[int, float]]()
    for row in rows:
        found.setdefault(row["policy"], {})[int(row["step"])] = float(row["to_plain"])
    return found


def _difference(curve: dict[int, float], step: int, digits: int) -> str:
    return f"{round(curve[step], digits) + 0.0:+.{digits}f}" if step in curve else "–"  # + 0.0: no -0.0


def _by_step(row: Row | None) -> dict[int, float]:
    """The losses of a run whose curve has a point for each step."""
    points = row["losses"].split() if row is not None else []
    return {i: float(point.split(":")[1]) for i, point in enumerate(points) if row and len(points) == int(row["steps"])}


def _counted(rows: list[Row]) -> str:
    """How often near mode's promise was broken."""
    lines = []
    for where in dict.fromkeys(row["where"] for row in rows if row["checked"]):
        own = [row for row in of(rows, where=where) if row["checked"]]
        checked, off, zeroed = (sum(int(row[key]) for row in own) for key in ("checked", "further_off", "zeroed"))
        lines.append([where, str(len(own)), f"{checked:,}", str(off), f"{zeroed:,}"])
    said = "Near mode's means beside exact ones (its promise: within 2^floor of the grid, and float32's own rounding):"
    return f"{said}\n\n{table(['', 'steps', 'values', 'further off than promised', 'became zero'], lines)}"


def _loss_at(row: Row, moment: float) -> str:
    """The last point of the curve up to a moment; a dash where no step had ended."""
    points = (tuple(map(float, item.split(":"))) for item in row["losses"].split())
    before = [loss for at, loss in points if at <= moment + 0.01]
    return f"{before[-1]:.2f}" if before else "–"
