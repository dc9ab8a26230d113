"""Pictures as SVG text: nothing is loaded, and they scale from a phone to paper.

Colours are those of Okabe and Ito, which people with any common colour blindness tell apart; what colours say is also
said by hatching, dashes or words, so that it survives a black-and-white printer. Their black is the colour of the
text, which is white on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "currentColor", "#5C5C5C")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 2 2 2 2")
WIDTH = 480  # units of the drawing; text of 15 units is readable on a phone, where this is some 360 pixels wide
_TEXT = 15
_BAR, _ROW = 18, 46

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    name: str
    points: Points


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def stacked_bars(title: str, rows: Mapping[str, Mapping[str, float]], unit: str, note: Mapping[str, str]) -> str:
    """A horizontal bar per row, cut into the same parts in each; the label stands above its bar, `note` after it."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    most = max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0
    body = []
    for i, (name, row) in enumerate(rows.items()):
        y, x = 16 + i * _ROW, 0.0
        body.append(_text(0, y, name, weight="600"))
        body.append(_text(WIDTH, y, note.get(name, ""), anchor="end"))
        for part, value in row.items():
            width = value / most * WIDTH
            index = parts.index(part)
            shown = f"{name}: {part} {_short(value)} {unit}"
            shape = f'x="{x:.1f}" y="{y + 6}" width="{max(width, 0.0):.1f}" height="{_BAR}"'
            body.append(f'<rect {shape} fill="{colour(index)}"><title>{escape(shown)}</title></rect>')
            if index:
                body.append(f'<rect {shape} fill="url(#hatch{index % 4})" pointer-events="none"/>')
            x += width
    return _svg(title, "".join(body), len(rows) * _ROW + 4)


def key(names: Sequence[str], lines: bool = False) -> str:
    """What colours and dashes mean, as HTML: it wraps on small screens."""
    items = []
    for i, name in enumerate(names):
        if lines:
            dash = DASHES[i % len(DASHES)]
            mark = f'<path d="M0 7H30" stroke="{colour(i)}" stroke-width="3" stroke-dasharray="{dash}"/>'
        else:
            mark = f'<rect width="30" height="14" fill="{colour(i)}"/>'
            mark += f'<rect width="30" height="14" fill="url(#hatch{i % 4})"/>' if i else ""
        items.append(f'<li><svg width="30" height="14" aria-hidden="true">{mark}</svg> {escape(name)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def lines(title: str, series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Curves in one frame, with the values of the axes at round numbers."""
    height, left, bottom, top = 300, 46, 36, 22
    points = [p for s in series for p in s.points]
    if not points:
        return '<p class="empty">nothing was recorded for this chart</p>'
    (x0, x1), (y0, y1) = _span([x for x, _ in points]), _span([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x0) / (x1 - x0) * (WIDTH - left - 8),
            height - bottom - (y - y0) / (y1 - y0) * (height - bottom - top),
        )

    body = []
    for value in ticks(y0, y1):
        _, y = place(x0, value)
        body.append(
            f'<path d="M{left} {y:.1f}H{WIDTH}" class="grid"/>{_text(left - 5, y + 4, _short(value), anchor="end")}'
        )
    for value in ticks(x0, x1):
        x, _ = place(value, y0)
        body.append(f'<path d="M{x:.1f} {height - bottom}v5" class="axis"/>')
        body.append(_text(x, height - bottom + 18, _short(value), anchor="middle"))
    body.append(f'<path d="M{left} {top}V{height - bottom}H{WIDTH}" class="axis" fill="none"/>')
    body.append(_text(0, 12, y_label) + _text(WIDTH, height - 2, x_label, anchor="end"))
    for i, one in enumerate(series):
        placed = " ".join("{:.1f},{:.1f}".format(*place(*p)) for p in _thin(one.points))
        style = f'stroke="{colour(i)}" stroke-dasharray="{DASHES[i % len(DASHES)]}"'
        body.append(f'<polyline points="{placed}" class="curve" {style}><title>{escape(one.name)}</title></polyline>')
    return _svg(title, "".join(body), height)


def columns(title: str, counts: Mapping[int, float], x_label: str) -> str:
    """A histogram: shares of the whole, by whole numbers."""
    if not counts:
        return '<p class="empty">nothing was recorded for this chart</p>'
    total = sum(counts.values()) or 1
    low, high = min(counts), max(counts)
    most = max(counts.values()) / total or 1.0
    height, bottom, top = 170, 36, 18
    width = WIDTH / (high - low + 1)
    body = []
    for value, count in counts.items():
        share = count / total
        tall = share / most * (height - bottom - top)
        x = (value - low) * width
        shape = f'x="{x:.1f}" y="{height - bottom - tall:.1f}" width="{max(width - 1, 0.5):.1f}" height="{tall:.1f}"'
        body.append(f'<rect {shape} fill="{colour(0)}"><title>{value}: {100 * share:.1f} %</title></rect>')
    for tick in ticks(low, high):
        if tick == round(tick):
            body.append(_text((tick - low + 0.5) * width, height - bottom + 16, f"{tick:.0f}", anchor="middle"))
    body.append(_text(0, 12, f"largest: {100 * most:.0f} %") + _text(WIDTH, height - 2, x_label, anchor="end"))
    return _svg(title, "".join(body), height)


def tracks(title: str, spans: Sequence[tuple[str, str, float, float]], unit: str) -> str:
    """Who is busy when: (track, what, start, end), one line per track."""
    names = list(dict.fromkeys(track for track, *_ in spans))
    begin, end = min(s for _, _, s, _ in spans), max(e for *_, e in spans)
    scale = WIDTH / ((end - begin) or 1.0)
    row = 40
    body = [_text(0, 13 + i * row, name) for i, name in enumerate(names)]
    for track, what, start, stop in spans:
        i = names.index(track)
        shape = f'x="{(start - begin) * scale:.2f}" y="{18 + i * row}" width="{max((stop - start) * scale, 0.4):.2f}"'
        label = escape(f"{what}: {_short(start)} to {_short(stop)} {unit}")
        body.append(f'<rect {shape} height="16" class="span" fill="{colour(i)}"><title>{label}</title></rect>')
    height = len(names) * row + 22
    body.append(_text(0, height - 4, _short(begin)) + _text(WIDTH, height - 4, f"{_short(end)} {unit}", anchor="end"))
    return _svg(title, "".join(body), height)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values."""
    raw = (high - low) / about
    if raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def smoothed(points: Points, window: int) -> list[tuple[float, float]]:
    """A running mean over the last `window` values."""
    found, total = [], 0.0
    for i, (x, y) in enumerate(points):
        total += y - (points[i - window][1] if i >= window else 0.0)
        found.append((x, total / min(i + 1, window)))
    return found


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-290):
        return low, high
    around = max(0.5, 1e-6 * abs(low))  # an axis needs some length
    return low - around, high + around


def _thin(points: Points, most: int = 400) -> Points:
    """No more points than a screen can show."""
    stride = max(1, math.ceil(len(points) / most))
    return [*points[::stride], points[-1]] if stride > 1 else points


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "400") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def _svg(title: str, body: str, height: float) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" font-size="{_TEXT}">'
    return f"{head}<title>{escape(title)}</title>{body}</svg>"


def _hatch(i: int, path: str) -> str:
    line = f'<path d="{path}" stroke="#fff" stroke-width="1.6" fill="none"/>'
    return f'<pattern id="hatch{i}" width="8" height="8" patternUnits="userSpaceOnUse">{line}</pattern>'


# Once per page: all charts refer to these patterns. Not display:none, which would switch them off.
HATCHES = "<defs>" + _hatch(0, "M0 4H8") + _hatch(1, "M0 8L8 0") + _hatch(2, "M0 0L8 8M0 8L8 0") + _hatch(3, "M4 0V8")
HATCHES = f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{HATCHES}</defs></svg>'
