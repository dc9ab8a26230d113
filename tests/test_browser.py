"""The report in a real browser: no word on the console, nothing beyond the edge of a phone, and not a blank page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from pictures import read_png
from recorded_run import record

from gradzip import Option, Plan
from gradzip.planner.perfetto import Span
from gradzip.report import page, read, svg
from gradzip.report.predicted import Story

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 360  # pixels; a window cannot be as narrow, a frame in it can

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium): the report is not looked at"),
    pytest.mark.timeout(400),
]

MEASURES = """<script>
const found = () => ({width: innerWidth, scroll: document.documentElement.scrollWidth,
                      words: document.body.innerText.length})
addEventListener("load", () => {
  const folded = found()
  document.querySelectorAll("details").forEach(d => d.open = true)
  parent.postMessage({folded, open: found()}, "*")
})
</script></body>"""
PHONE_PAGE = f"""<!doctype html><body style="margin:0">
<iframe src="measured.html" style="width:{PHONE}px;height:2400px;border:0"></iframe>
<script>addEventListener("message", e => document.body.dataset.found = JSON.stringify(e.data))</script></body>"""


def browse(folder: Path, name: str, *flags: str) -> str:
    """What the browser wrote to stdout; it must have said nothing on the console."""
    assert CHROMIUM is not None
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    usual += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--disable-background-networking"]
    url = (folder / name).as_uri()
    done = subprocess.run([CHROMIUM, *usual, *flags, url], capture_output=True, text=True, timeout=250)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report with all that it can hold, as it is, with a ruler, and in the frame of a phone."""
    folder = tmp_path_factory.mktemp("browser")
    names = [f"blocks.{i}.attention.projection.weight" for i in range(8)]
    plan = Plan(dict.fromkeys(names, Option("gcomp:keep=7")), dict.fromkeys(names, (64, 64)), "Net", 25.0, {})
    spans = [Span("backward", "backward", 0.0, 0.01), Span("sending to other hosts", "bucket 1", 0.005, 0.02)]
    text = page(
        read([record(folder / "run.jsonl")]),
        lead="A lead that is long enough to be broken on a phone, and says what the runs have in common.",
        notes=["a note", "and another one"],
        plan=plan,
        stories=[Story("measured", "Some words.", spans)],
    )
    (folder / "report.html").write_text(text)
    (folder / "measured.html").write_text(text.replace("</body>", MEASURES))
    (folder / "phone.html").write_text(PHONE_PAGE)
    return folder


def test_a_phone_shows_it_without_scrolling_sideways(folder: Path) -> None:
    dom = browse(folder, "phone.html", "--virtual-time-budget=10000", "--dump-dom")
    found = json.loads(html.unescape(re.findall(r'data-found="([^"]+)"', dom)[0]))
    for state in ("folded", "open"):
        assert found[state]["width"] == PHONE
        assert found[state]["scroll"] <= PHONE, state
    assert found["open"]["words"] > found["folded"]["words"] > 300


@pytest.mark.parametrize(("name", "size"), [("report.html", "1100,800"), ("phone.html", "500,800")])
def test_it_is_not_blank(folder: Path, name: str, size: str) -> None:
    """Most of it is paper; the bars are there in their colours; text makes many shades."""
    path = folder / f"{name}.png"
    browse(folder, name, f"--window-size={size}", f"--screenshot={path}")
    pixels = read_png(path).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    assert 0.5 < counts.max() / len(pixels) < 0.99
    assert len(colours) > 50
    blue = np.array([int(svg.COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)], np.uint8)
    assert (pixels == blue).all(axis=1).sum() > 1000


def test_it_can_be_printed(folder: Path) -> None:
    path = folder / "report.pdf"
    browse(folder, "report.html", "--no-pdf-header-footer", f"--print-to-pdf={path}")
    pages = len(re.findall(rb"/Type\s*/Page\b", path.read_bytes()))
    assert 1 <= pages <= 4
