"""The report: what is recorded is what is shown, in one file that loads nothing and that a browser likes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_run import record

from gradzip import Option, Plan, cli
from gradzip.errors import ReportError
from gradzip.planner import models
from gradzip.report import Run, page, read, svg
from gradzip.report.gradients import describe
from gradzip.report.page import summary

VOID = {"meta", "br", "path", "rect", "wbr"}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path / "run.jsonl")


class Checker(HTMLParser):
    """Every element is closed, in order; keeps the text and the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID or tag in self.open[-1:]:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_what_is_recorded_is_read(recorded: Path) -> None:
    plain, coded = read([recorded])
    assert (plain.name, coded.name) == ("plain", "<gcomp> & co")
    assert [s["step"] for s in coded.steps] == list(range(1, 9))
    assert coded.bytes_per_step() == 1_000_000
    assert "tensors" not in coded.steps[0], "only numbers"
    assert coded.per_step("coding_seconds") == pytest.approx(0.002)
    assert [step for step, _ in coded.layers] == [1, 8]
    assert plain.layers == []
    parts = coded.breakdown()
    assert parts is not None
    assert sum(parts.values()) == pytest.approx(coded.step_seconds())
    weight = coded.layers[-1][1][0]
    assert (weight["name"], weight["numel"]) == ("0.weight", 1200)
    assert sum(weight["exponents"].values()) == sum(weight["levels"]) == round(1200 * (1 - weight["zeros"]))
    assert weight["ratios"]["topk"] > weight["ratios"]["gcomp"] > weight["ratios"]["gcomp:mode=lossless"]


def test_the_page_parses_holds_the_numbers_and_loads_nothing(recorded: Path) -> None:
    runs = read([recorded])
    plan = Plan({"head.weight": Option("gcomp:keep=7")}, {"head.weight": (10, 10)}, "Net", 25.0, {"step_s": 0.0123})
    text = page(runs, title="A <title>", lead="said first", plan=plan)
    found = checked(text)
    words = " ".join(found.words)
    for expected in ("1.00 MB", "A <title>", "said first", "<gcomp> & co", "identical", "DIFFER", "gcomp:keep=7"):
        assert expected in words, expected
    for run in runs:
        loss, step = run.final_loss(), run.step_seconds()
        assert loss is not None
        assert step is not None
        assert f"{loss:.3f}" in words
        assert f"{step * 1e3:.1f}" in words
    headings = ["Where a step's time goes", "What one rank sends in a step", "Loss against time"]
    assert [w for w in found.words if w in headings] == headings, "these come first, in this order"
    assert words.index("Loss against time") < words.index("Ratio of each layer")
    assert "0.weight" in words
    assert_loads_nothing(text, found)


def assert_loads_nothing(text: str, found: Checker) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    for tag, attributes in found.seen:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "href", "xlink:href"} & set(attributes), tag


def test_a_run_without_measurements_says_so() -> None:
    text = page([Run("empty")])
    checked(text)
    assert text.count("nothing was recorded for this chart") == 3


def test_ratios_are_those_of_what_a_rank_sends_of_its_own() -> None:
    model = torch.nn.Linear(80, 60)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for p in model.parameters():
            p.grad = (torch.randn_like(p) * 1e-3).bfloat16().float()
        optimizer.step()
    ratios = describe(model, optimizer, ["gcomp", "gcomp:own=lossless", "gcomp:mode=lossless", "gcomp:own=near"])[0][
        "ratios"
    ]
    assert ratios["gcomp"] == ratios["gcomp:own=lossless"] == ratios["gcomp:mode=lossless"] > ratios["gcomp:own=near"]


def test_a_prediction_is_shown_without_steps() -> None:
    about = {"step_seconds": 0.2, "compute_seconds": 0.05, "coding_seconds": 0.01, "bytes_per_step": 2e6}
    run = Run("keep=7, predicted", about)
    assert run.breakdown() == pytest.approx({"compute": 0.05, "coding": 0.01, "wire": 0.14})
    assert "200.0 ms" in page([run])
    faster = Run("other, predicted", {"step_seconds": 0.1, "baseline": run.name})
    rows = summary([Run("measured", {"step_seconds": 1.0}), run, faster])
    assert [row["speed"] for row in rows] == ["1.00x", "5.00x", "2.00x"], "a prediction is compared with a prediction"


def test_losses_are_compared_at_the_same_step() -> None:
    long, short = Run("long", {"words": "every bit"}), Run("short")
    for step in range(1, 41):
        long.add({"step": step, "seconds": step, "loss": 100.0 - step})
        if step <= 20:
            short.add({"step": step, "seconds": step, "loss": 200.0 - step})
    rows = summary([long, short, Run("predicted")])
    assert [row["loss at step 20"] for row in rows] == ["80.500", "180.500", "–"], "the mean of steps 19 and 20"
    assert [row["in words"] for row in rows] == ["every bit", "–", "–"]
    short.add({"step": 21, "seconds": 21, "loss": float("nan")})
    assert [row["loss at step 21"] for row in summary([long, short])] == ["79.500", "–"], "divergence is not hidden"
    assert summary([long])[0]["loss at step 40"] == "61.500", "alone, its own last steps count"
    assert "in words" not in summary([short])[0]


def test_names_that_repeat_are_told_apart(recorded: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_text('{"step": 1, "seconds": 1}\n\n{"step": 3, "seconds": 2, "loss": NaN}\n')
    runs = read([recorded, recorded, again])
    assert [run.name for run in runs][1:] == ["<gcomp> & co", "plain (2)", "<gcomp> & co (2)", "again"]
    assert runs[-1].step_seconds() == 0.5, "a step that was left out"
    assert runs[-1].series("step", "loss") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no run"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ('{"schema": "gradzip-run", "version": 2}', "another schema or version"),
        ('{"loss": 1}', "step is None"),
    ],
)
def test_files_that_cannot_be_shown(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ReportError, match=message):
        read([path])
    with pytest.raises(ReportError, match="cannot read the run"):
        read([tmp_path / "absent"])


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=30), st.text(max_size=9))
def test_any_numbers_and_names_can_be_drawn(points: list[tuple[float, float]], name: str) -> None:
    printable = "".join(c for c in name if c.isprintable())
    drawn = svg.lines("t", [svg.Series(printable, points)], "x", "y") + svg.key([printable], lines=True)
    drawn += svg.stacked_bars("t", {printable: {"a": abs(points[0][0]), "b": abs(points[0][1])}}, "ms", {})
    checked(drawn)
    assert "nan" not in drawn.replace(printable, "")


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_axes_have_a_few_round_numbers(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * abs(low) or high <= low:
        return
    found = svg.ticks(low, high)
    assert 1 <= len(found) <= 12
    assert all(low - width * 1e-6 <= t <= high + width * 1e-6 for t in found)


def test_the_command_writes_the_file(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert cli.main(["report", str(recorded), "--out", str(out), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in shown["rows"]] == ["plain", "<gcomp> & co"]
    checked(out.read_text())
    assert cli.main(["report", str(recorded), "--out", str(tmp_path)]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_the_predicted_timeline_is_that_of_the_plan(recorded: Path, tmp_path: Path) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    models.load("resnet50").save(profile)
    assert cli.main(["plan", str(profile), "--inter", "1gbit", "--out", str(plan)]) == 0
    out = tmp_path / "report.html"
    assert cli.main(["report", str(recorded), "--profile", str(profile), "--plan", str(plan), "--out", str(out)]) == 0
    found = checked(out.read_text())
    words = " ".join(found.words)
    assert "Timeline of a step: predicted, plain all-reduce" in words
    assert "Timeline of a step: predicted, with the plan" in words
    assert_loads_nothing(out.read_text(), found)


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009):
# what people without one kind of cones see, in linear RGB.
WITHOUT_CONES = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("missing", WITHOUT_CONES)
def test_colours_differ_for_the_colour_blind(missing: str) -> None:
    """Any two of them, and the parts of a bar by far more."""
    hexes = [c if c.startswith("#") else "#000000" for c in svg.COLOURS]
    rgb = torch.tensor([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in hexes], dtype=torch.float64)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = (linear @ torch.tensor(WITHOUT_CONES[missing], dtype=torch.float64).T).clamp(0, 1)
    shown = torch.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)
    distance = torch.cdist(shown, shown) + torch.eye(len(shown)) * 9
    assert distance.min() > 0.11
    assert distance.diagonal(1)[:3].min() > 0.2, "parts of a bar lie side by side"
