"""Draws docs/demo.svg, the picture in the README, from what a run of the demo printed:

gradzip demo --json > bench/results/demo.json
python bench/demo_picture.py
"""

from __future__ import annotations

import json
import textwrap
from html import escape
from pathlib import Path
from typing import Any

from gradzip.report import svg

HERE = Path(__file__).parent
RESULT, PICTURE = HERE / "results" / "demo.json", HERE.parent / "docs" / "demo.svg"
GAP, TOP = 40, 76


def picture(result: dict[str, Any]) -> str:
    rows = result["rows"]
    times = {row["run"]: {"step": float(row["step ms"])} for row in rows}
    words = {row["run"]: textwrap.shorten(row["in words"], 44, placeholder=" …") for row in rows}
    sent = {words[row["run"]]: {"sent": float(row["MB/step"])} for row in rows}
    charts = [
        ("Milliseconds of a step", times, "ms", {row["run"]: f"{row['step ms']} ms, {row['speed']}" for row in rows}),
        ("Megabytes that a rank sends in it", sent, "MB", {words[r["run"]]: f"{r['MB/step']} MB" for r in rows}),
    ]
    drawn = []
    for i, (title, bars, unit, totals) in enumerate(charts):
        x = GAP + i * (svg.WIDTH + GAP)
        chart = svg.stacked_bars(title, bars, unit, totals)
        height = float(chart.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        placed = f'<svg x="{x}" y="{TOP}" width="{svg.WIDTH}" height="{height:.0f}" '
        drawn.append(f'<text x="{x}" y="{TOP - 14}" font-size="17">{escape(title)}</text>')
        drawn.append(chart.replace("<svg ", placed, 1))
    width, whole = 2 * svg.WIDTH + 3 * GAP, TOP + height + GAP / 2
    heading = f'<text x="{GAP}" y="26" font-size="19" font-weight="600">gradzip demo: {escape(result["title"])}</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {whole:.0f}" font-family="sans-serif">'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}{paper}{heading}{''.join(drawn)}</svg>\n"


def main() -> None:
    PICTURE.write_text(picture(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
