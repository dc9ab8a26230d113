"""docs/wall.svg: training loss against wall time of plain training, torch's hooks and gradzip, on real ranks.

A panel for each model and network that has rows in gpt/results.csv and wall/results.csv (real_ranks.sh, parts gpt10,
gpt1, resnet10 and resnet1). Every policy trains for the same time.
"""

from __future__ import annotations

import math
from html import escape

from pieces import Results, Row, of

POLICIES = {  # colour, whether it is dashed (torch's), and its name in the picture
    "plain": ("#777777", False, "plain"),
    "torch bf16": ("#E69F00", True, "torch BF16"),
    "torch powersgd 4": ("#D55E00", True, "torch PowerSGD"),
    "noise": ("#0072B2", False, "noise"),
    "gcomp:keep=7": ("#009E73", False, "gcomp:keep=7"),
    "powersgd:rank=4": ("#CC79A7", False, "powersgd:rank=4"),
}
PANELS = (
    ("gpt/results.csv", "gpt2-enwik8", "GPT-2, 124 M parameters"),
    ("wall/results.csv", "resnet50-cifar", "ResNet-50, CIFAR-10"),
)
NETWORKS = ("10 Gbit/s", "1 Gbit/s")
WIDTH, HEIGHT, LEFT, TOP, PLOT = 430, 318, 46, 62, 204  # of a panel; the plot's place and height
INK = "#1b1b1b"


def curve(row: Row) -> list[tuple[float, float]]:
    pairs = (item.split(":") for item in row["losses"].split())
    return [(float(at), float(loss)) for at, loss in pairs]


def panels(read: Results) -> list[tuple[str, list[Row]]]:
    """Titles, and the rows of the policies that are drawn, where there are at least two."""
    found = []
    for path, task, title in PANELS:
        for network in NETWORKS:
            rows = [row for row in of(read(path), task=task, network=network) if row["policy"] in POLICIES]
            rows.sort(key=lambda row: list(POLICIES).index(row["policy"]))
            if len(rows) > 1:
                found.append((f"{title}, {network}", rows))
    return found


def wall(read: Results) -> str:
    drawn = panels(read)
    columns = min(2, max(1, len(drawn)))
    lines = -(-len(drawn) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * columns + 10} {HEIGHT * lines + 36}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<text x="12" y="22" font-size="15" font-weight="600">Training loss against wall time, four ranks</text>',
    ]
    for number, (title, rows) in enumerate(drawn):
        place = f"{number % columns * WIDTH} {number // columns * HEIGHT + 16}"
        parts.append(f'<g transform="translate({place})">{_panel(title, rows)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, rows: list[Row]) -> str:
    curves = {row["policy"]: curve(row) for row in rows}
    last = min(points[-1][0] for points in curves.values())  # all of them trained for as long
    losses = [loss for points in curves.values() for at, loss in points if at <= last and math.isfinite(loss)]
    low, high = min(losses), max(losses)
    right = WIDTH - 136  # names stand beside the plot

    def x(at: float) -> float:
        return LEFT + min(at, last) / last * (right - LEFT)

    def y(loss: float) -> float:
        return TOP + PLOT * (high - min(max(loss, low), high)) / (high - low)

    parts = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="600">{escape(title)}</text>']
    for tick in range(math.ceil(low), math.floor(high) + 1):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if last / s <= 7)
    for number in range(int(last // step) + 1):
        parts.append(f'<text x="{x(number * step):.1f}" y="{TOP + PLOT + 16}" text-anchor="middle">{number * step}'
                     "</text>")  # fmt: skip
    parts.append(f'<text x="{(LEFT + right) / 2:.1f}" y="{TOP + PLOT + 34}" text-anchor="middle">seconds</text>')
    ends = []
    for policy, points in curves.items():
        colour, dashed, name = POLICIES[policy]
        line = " ".join(f"{x(at):.1f},{y(loss):.1f}" for at, loss in points if at <= last and math.isfinite(loss))
        dashes = ' stroke-dasharray="5 3"' if dashed else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        ends.append((float(line.rsplit(",", 1)[1]), colour, name))
    above = -math.inf
    for end, colour, name in sorted(ends):
        above = max(end, above + 14)  # names do not cover each other
        parts.append(f'<text x="{right + 6}" y="{above + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join(parts)
