"""The report: three charts that answer at a glance, the rest folded below. One file, nothing is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..plan import Plan
from . import svg
from .gradients import LEVELS
from .predicted import Story
from .record import Run, last_common_step

_PARTS = {
    "compute": "computing",
    "coding": "coding (at most: it overlaps)",
    "wire": "waiting for the wire",
}
_MOST_LAYERS = 60
_SMOOTH = 0.1  # of a run

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c5c5c; --paper: #fff; --line: #d7d7d7; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #a9a9a9; --paper: #161616; --line: #3d3d3d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif;
       color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; margin: .5rem 0 0; } h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
p.lead, .soft, figcaption, .empty, ul.notes { color: var(--soft); margin: .2rem 0 .8rem; }
ul.notes { padding-left: 1.2rem; font-size: .9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; break-inside: avoid; } figcaption { font-size: .875rem; margin: .3rem 0 0; }
svg[role=img] { width: 100%; height: auto; max-width: 40rem; display: block; }
svg text { fill: var(--ink); font-family: system-ui, sans-serif; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); } .curve { fill: none; stroke-width: 2.2; }
.span { stroke: var(--paper); stroke-width: .4; }
ul.key { list-style: none; margin: .3rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem;
         font-size: .875rem; } ul.key svg { vertical-align: -2px; }
.wide { overflow-x: auto; margin: 0 0 1.4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child, th.text { text-align: left; } td.text { text-align: left; white-space: normal; }
details { border-top: 1px solid var(--line); padding: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 32rem) {
  table { font-size: .74rem; } th, td { padding-right: .35rem; } td:first-child { white-space: normal; }
}
@media print {
  body { max-width: none; font-size: 10pt; padding: 0; } table { font-size: 8pt; } summary { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } details > figure { max-width: 60%; } tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
# Printed, everything is unfolded; a browser cannot do that by style alone.
_SCRIPT = 'addEventListener("beforeprint",()=>document.querySelectorAll("details").forEach(d=>d.open=true))'


def page(
    runs: Sequence[Run],
    *,
    title: str = "gradzip report",
    lead: str = "",
    notes: Sequence[str] = (),
    plan: Plan | None = None,
    stories: Sequence[Story] = (),
) -> str:
    """The report as HTML. `stories` are timelines of one step.

    Speed-ups are over the first run, or over the `baseline` that a run's description names.
    """
    body = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>' if lead else "", svg.HATCHES]
    if notes:
        body.append('<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    charts = _breakdown(runs) + _bytes(runs) + _loss(runs, "seconds")
    body.append(f'<div class="charts"><div>{_table(summary(runs))}</div>{charts}</div>')
    body += [_folded(heading, text) for heading, text in _details(runs, plan, stories) if text]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    rest = "\n".join(filter(None, body))
    rest += f"\n<script>{_SCRIPT}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{rest}\n</body></html>\n'


def summary(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The table that opens the report; the demo prints the same one. Losses are those at the same step of all runs."""
    steps = {run.name: run.step_seconds() for run in runs}
    until = last_common_step(runs)
    loss_name = "loss" if until is None else f"loss at step {until:.0f}"
    rows = []
    for run in runs:
        step, sent = run.step_seconds(), run.bytes_per_step()
        loss = None if until is None else run.final_loss(until=until)
        first = steps.get(run.about.get("baseline", runs[0].name))
        same = run.about.get("identical")
        row = {
            "run": run.name,
            "in words": str(run.about.get("words", "–")),
            "step ms": _number(step, 1e3, 1),
            "speed": "–" if not step or not first else f"{first / step:.2f}x",
            "MB/step": _number(sent, 1e-6, 2),
            loss_name: _number(loss, 1, 3),
            "replicas": "–" if same is None else "identical" if same else "DIFFER",
        }
        rows.append(row)
    empty = [column for column in rows[0] if all(row[column] == "–" for row in rows)] if rows else []
    return [{k: v for k, v in row.items() if k not in empty} for row in rows]


def _number(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{value * factor:.{digits}f}"


# -- the three charts ------------------------------------------------------------------------------------------------


def _breakdown(runs: Sequence[Run]) -> str:
    rows: dict[str, dict[str, float]] = {}
    for run in runs:
        parts, step = run.breakdown(), run.step_seconds()
        if parts:
            rows[run.name] = {_PARTS[part]: seconds * 1e3 for part, seconds in parts.items()}
        elif step is not None:
            rows[run.name] = {"whole step": step * 1e3}
    totals = {name: f"{sum(row.values()):.1f} ms" for name, row in rows.items()}
    names = list(dict.fromkeys(part for row in rows.values() for part in row))
    about = "Milliseconds of one step, median. Computing is the step without any exchange; coding runs beside it and "
    about += "beside the wire, so the part shown is the most that it can have cost."
    chart = svg.stacked_bars("Time of a step", rows, "ms", totals) + svg.key(names) if rows else _EMPTY
    return _figure("Where a step's time goes", chart, about if any(run.breakdown() for run in runs) else "")


def _bytes(runs: Sequence[Run]) -> str:
    sent = {run.name: run.bytes_per_step() for run in runs}
    rows = {name: {"sent": value / 1e6} for name, value in sent.items() if value is not None}
    words = {name: f"{row['sent']:.2f} MB" for name, row in rows.items()}
    chart = svg.stacked_bars("Bytes of a step", rows, "MB", words) if rows else _EMPTY
    return _figure("What one rank sends in a step", chart, "Megabytes, all messages and headers included.")


def _loss(runs: Sequence[Run], x: str) -> str:
    found = [svg.Series(run.name, _smooth(run.series(x, "loss"))) for run in runs]
    found = [one for one in found if one.points]
    label = {"seconds": "seconds of training", "step": "step"}[x]
    about = f"Running mean over {100 * _SMOOTH:.0f} % of a run."
    chart = svg.lines(f"Loss against {label}", found, label, "loss") + svg.key([s.name for s in found], lines=True)
    heading = "Loss against time" if x == "seconds" else ""  # the other one is folded, under a heading of its own
    return _figure(heading, chart if found else _EMPTY, about if found else "")


_EMPTY = '<p class="empty">nothing was recorded for this chart</p>'


def _smooth(points: svg.Points) -> svg.Points:
    return svg.smoothed(points, max(1, round(_SMOOTH * len(points))))


def _figure(heading: str, chart: str, about: str = "") -> str:
    caption = f"<figcaption>{escape(about)}</figcaption>" if about else ""
    head = f"<h2>{escape(heading)}</h2>" if heading else ""
    return f"<figure>{head}{chart}{caption}</figure>"


# -- what is folded --------------------------------------------------------------------------------------------------


def _details(runs: Sequence[Run], plan: Plan | None, stories: Sequence[Story]) -> list[tuple[str, str]]:
    described = [run for run in runs if run.layers]
    parts = [("Loss against steps", _loss(runs, "step") if any(run.series("step", "loss") for run in runs) else "")]
    for run in described:
        parts += [
            (f"Ratio of each layer: {run.name}", _layer_ratios(run)),
            (f"Exponents of the gradients: {run.name}", _exponents(run)),
            (f"Zeros and levels over training: {run.name}", _levels(run)),
        ]
    for story in stories:
        spans = [(s.track, s.name, s.start_s * 1e3, s.end_s * 1e3) for s in story.spans]
        about = f"{story.about} Point at a bar to see what it is."
        parts.append((f"Timeline of a step: {story.name}", _figure("", svg.tracks(story.name, spans, "ms"), about)))
    parts.append(("The plan", _plan(plan) if plan else ""))
    parts.append(("How each run was made", _table([_about(run) for run in runs])))
    return parts


def _folded(heading: str, text: str) -> str:
    return f"<details><summary>{escape(heading)}</summary>{text}</details>"


def _layer_ratios(run: Run) -> str:
    step, layers = run.layers[-1]
    codecs = list(dict.fromkeys(codec for layer in layers for codec in layer.get("ratios", {})))
    largest = sorted(layers, key=lambda layer: -layer["numel"])[:_MOST_LAYERS]
    rows = []
    for layer in (layer for layer in layers if layer in largest):
        row = {"layer": layer["name"], "values": f"{layer['numel']:,}", "zeros": f"{100 * layer['zeros']:.1f} %"}
        row |= {
            codec: f"{layer['ratios'][codec]:.2f}x" if codec in layer.get("ratios", {}) else "–" for codec in codecs
        }
        rows.append(row)
    left = len(layers) - len(rows)
    note = f" The {left} smallest layers are left out." if left else ""
    return f'<p class="soft">Raw size over coded size at step {step}.{note}</p>' + _table(rows)


def _exponents(run: Run) -> str:
    """Early and late: few exponents hold nearly all values, which is what entropy coding lives from."""
    figures = []
    for step, layers in [run.layers[0], run.layers[-1]][: len(run.layers)]:
        total: Counter[int] = Counter()
        for layer in layers:
            total.update({int(e): n for e, n in layer.get("exponents", {}).items()})
        chart = svg.columns(f"Exponents at step {step}", dict(sorted(total.items())), "exponent: the value is near 2^x")
        figures.append(_figure(f"step {step}", chart))
    return f'<div class="charts">{"".join(figures)}</div>'


def _levels(run: Run) -> str:
    rows, words = {}, {}
    for step, layers in run.layers:
        values = sum(layer["numel"] for layer in layers) or 1
        zeros = sum(layer["zeros"] * layer["numel"] for layer in layers)
        levels = [sum((layer.get("levels") or [0] * 4)[i] for layer in layers) for i in range(len(LEVELS))]
        name = f"step {step}"
        rows[name] = {"zero": 100 * zeros / values}
        rows[name] |= {f"{bits} bits cut": 100 * n / values for bits, n in zip(LEVELS, levels)}
        words[name] = f"{100 * zeros / values:.1f} % zeros"
    names = ["zero", *(f"{bits} bits cut" for bits in LEVELS)]
    about = "Percent of all values: exact zeros, and how many mantissa bits the optimizer cannot feel (GComp, Table 2)."
    return _figure("", svg.stacked_bars("Levels", rows, "%", words) + svg.key(names), about)


def _plan(plan: Plan) -> str:
    same: dict[str, list[str]] = {}
    for name, option in plan.options.items():
        same.setdefault(str(option), []).append(name)
    rows = []
    for text, names in same.items():
        values = sum(_numel(plan.shapes[name]) for name in names)
        which = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        rows.append({"option": text, "tensors": str(len(names)), "MB": f"{4e-6 * values:.2f}", "which": which})
    expected = "; ".join(_EXPECTED.get(name, f"{name} {{}}").format(value) for name, value in plan.expected.items())
    return f'<p class="soft">Model {escape(plan.model or "unnamed")}. {escape(expected)}</p>' + _table(rows)


_EXPECTED = {
    "step_s": "a step is expected to take {:.3f} s",
    "plain_s": "{:.3f} s without compression",
    "uncertainty": "give or take {:.0%}",
    "exposed_s": "{:.3f} s of exchange that backward does not hide",
    "bits_per_s": "{:.3g} bit/s while gradients are under way",
}


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def _about(run: Run) -> dict[str, str]:
    words = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in run.about.items()}
    return {"run": run.name, "steps": str(len(run.steps)), "about": "; ".join(f"{k}: {v}" for k, v in words.items())}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th{_TEXT_CELL if k in _TEXTS else ''}>{_breakable(k)}</th>" for k in rows[0])
    lines = []
    for row in rows:
        cells = (f"<td{_TEXT_CELL if k in _TEXTS else ''}>{escape(str(v))}</td>" for k, v in row.items())
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


_TEXT_CELL = ' class="text"'
_TEXTS = ("about", "which", "in words")


def _breakable(text: str) -> str:
    """A codec's text form may be broken after its name: narrow screens and paper need that."""
    return escape(text).replace(":", ":<wbr>")
