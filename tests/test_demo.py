"""The demo, made small: all policies in one launch of two ranks, measured on emulated hosts or predicted."""

from __future__ import annotations

import functools
import html
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradzip import cli, demo, emulate
from gradzip.cli.demo import CODECS, ENOUGH, _words
from gradzip.demo import launch, verdict
from gradzip.demo.settings import PLAIN, POLICIES, WORDS
from gradzip.errors import EmulationError
from gradzip.report import Run

TINY = functools.partial(demo.Settings, width=32, blocks=1)
SHORT = ["demo", "--hosts", "2", "--steps", "4"]
PLANNED = ["demo", "--hosts", "2", "--steps", str(ENOUGH)]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "Settings", TINY)
    monkeypatch.setenv("GRADZIP_ENGINE", "native")


def test_without_a_limit_times_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo.html"
    assert cli.main([*PLANNED, "--no-limit", "--json", "--out", str(out)]) == 0
    said = capsys.readouterr()
    shown: dict[str, Any] = json.loads(said.out)
    rows = {row["run"]: row for row in shown["rows"]}
    assert list(rows) == list(POLICIES)
    assert {row["replicas"] for row in rows.values()} == {"identical"}
    assert len({rows[name][f"loss at step {ENOUGH}"] for name in (PLAIN, "gcomp")}) == 1
    sent = {name: float(row["MB/step"]) for name, row in rows.items()}
    assert sent["topk:ratio=0.01"] < sent["noise"] < sent["gcomp:keep=7"] < sent["cast:to=bf16"] < sent[PLAIN]
    assert {name: row["in words"] for name, row in rows.items() if name != "auto"} == {
        name: WORDS[name] for name in POLICIES if name != "auto"
    }
    words = rows["auto"]["in words"]
    assert words.startswith(("chose, from step ", "races plain, ")), "it says what it chose, or tries"
    assert [text[:46] for text in shown["verdict"]] == [
        "PREDICTED: At 1 Gbit/s, training this model wo",
        "PREDICTED: At 10 Gbit/s, training this model w",
    ]
    for number, name in enumerate(POLICIES, 1):
        assert f"gradzip demo: run {number} of {len(POLICIES)}: {name}, {ENOUGH} steps\n" in said.err
    predicted = [row["run"] for row in shown["predicted"]]
    assert len(predicted) == 2 * (len(POLICIES) - 1)
    assert all("predicted at 1 Gbit/s" in name or "predicted at 10 Gbit/s" in name for name in predicted)
    assert any("to measure instead of predicting: gradzip demo --rate 1gbit" in note for note in shown["notes"])
    exact = {row["codec"] for row in shown["codecs"] if row["max_error"] == 0}
    assert {"gcomp:mode=lossless"} <= exact <= {"gcomp:mode=lossless", "zstd", "lz4"}
    assert [row["words"] for row in shown["codecs"]] == [WORDS[name] for name in CODECS][: len(shown["codecs"])]
    page = html.unescape(out.read_text())
    assert all(text in page for text in (*shown["verdict"], rows["auto"]["in words"], WORDS["gcomp:keep=7"]))
    assert all(name.replace("&", "&amp;") in page for name in [*rows, *predicted])
    assert "Exponents of the gradients" in page
    for heading in (
        "Timeline of a step: predicted, plain all-reduce",
        "Timeline of a step: predicted, gcomp",
        "Timeline of a step: measured, gcomp",
    ):
        assert heading in page
    assert (">The plan<" in page) == words.startswith("chose, "), "a race may take longer than these steps"


def test_on_emulated_hosts_times_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle = emulate.obstacle()
    if obstacle:
        pytest.skip(obstacle)
    names = (PLAIN, "gcomp:keep=7")
    monkeypatch.setattr(demo, "Settings", functools.partial(TINY, policies=names))
    for module in ("zstandard", "lz4", "lz4.block"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main([*SHORT, "--rate", "100mbit", "--out", str(tmp_path / "demo.html")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("At 100 Mbit/s, training this model takes "), "what matters comes first"
    assert "2 hosts at 100 Mbit/s" in out
    assert "BF16's error, two thirds of its bytes" in out
    assert all(name in out for name in names)
    assert "PREDICTED" not in out
    assert "note: zstd left out" in out


def test_where_hosts_cannot_be_emulated_and_time_runs_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo says why it predicts, and which runs it has cut short: without patience, all but the plain one."""
    names = (PLAIN, "gcomp:keep=7")
    monkeypatch.setattr(demo, "Settings", functools.partial(TINY, policies=names, patience=0.0))
    monkeypatch.setattr(emulate, "obstacle", lambda: "no namespaces: ask for them")
    out = tmp_path / "demo.html"
    assert cli.main(["demo", "--hosts", "2", "--seconds", "4", "--json", "--out", str(out)]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["notes"][0] == "no namespaces: ask for them"
    assert len(shown["predicted"]) == 4
    (note,) = [note for note in shown["notes"] if "ended early" in note]
    assert "these runs ended early: gcomp:keep=7 after 10 steps. Losses of all runs are compared at step 10" in note
    assert all("loss at step 10" in row for row in shown["rows"])
    assert "stopped: 10" in out.read_text()


def _run(name: str, ms: float, losses: list[float]) -> Run:
    run = Run(name, {"policy": name, "words": WORDS[name]})
    for step, loss in enumerate(losses, 1):
        run.add({"step": step, "seconds": step * ms / 1e3, "loss": loss})
    return run


def test_the_verdict_names_the_fastest_codec_that_trains_alike_at_the_same_step() -> None:
    plain = _run(PLAIN, 200, [5.0, 4.0, 3.0, 2.0])
    keep = _run("gcomp:keep=7", 100, [5.0, 4.0, 3.0])  # cut short: at step 3 it is as good as plain
    bf16, worse = _run("cast:to=bf16", 10, [5.0, 4.0, 3.0]), _run("topk:ratio=0.01", 20, [5.0, 4.5, 4.0])
    assert verdict.measured([plain, bf16, keep, worse], "1gbit") == (
        "At 1 Gbit/s, training this model takes 200 ms a step, 100 ms with gradzip: 2.00 times as fast, by "
        "gcomp:keep=7 (BF16's error, two thirds of its bytes), loss 3.000 instead of 3.000 at step 3."
    )
    slower = _run("gcomp", 198, [5.0, 4.0, 3.0])
    assert verdict.measured([plain, slower], "100mbit") == (
        "At 100 Mbit/s, training this model takes 200 ms a step. gradzip does not help here: its fastest codec, "
        "gcomp (near-lossless: parameters within 1 ulp), takes 198 ms."
    )
    assert verdict.measured([keep], "1gbit") == "", "there is nothing to compare with"
    diverged = _run("powersgd:rank=4", 5, [5.0, float("nan"), float("nan")])
    assert "by gcomp:keep=7 (" in verdict.measured([plain, keep, diverged], "1gbit"), "speed alone is no merit"
    for runs in ([plain, worse], [plain, diverged]):
        assert verdict.measured(runs, "1gbit").endswith(", whose loss is not that of plain training.")


def test_auto_says_when_it_had_too_few_steps() -> None:
    assert launch._chosen(["auto: left out"], 4) == "chose nothing yet: 4 steps are too few for that"
    said = ["auto: races plain, noise from step 9 on", "auto: left out"]
    assert launch._chosen(said, 20) == "races plain, noise from step 9 on"
    said.append("auto: from step 33 on: noise, 150 ms a step: 1.50x plain (225)")
    assert launch._chosen(said, 40) == "chose, from step 33 on: noise, 150 ms a step: 1.50x plain (225)"


def test_noise_is_called_noise() -> None:
    """Where auto stayed with plain averaging its speed says nothing about compression."""
    runs = [_run(PLAIN, 200, [3.0] * 9), _run("auto", 220, [3.0] * 9)]
    for run in runs:
        run.about["processor_seconds"] = 0.0
    for said, noted in (("plain averaging: no gain", True), ("plain averaging, 220 ms a step", False)):
        runs[1].about["words"] = launch._chosen([f"auto: from step 15 on: {said}"], 40)
        _, notes = _words(demo.Settings(), demo.Result(runs, [], None), None)
        assert any("auto sent what plain DDP sends: that its steps took 10 % more" in note for note in notes) == noted


def test_every_codec_of_the_demo_has_words() -> None:
    assert set(POLICIES) <= set(WORDS)
    assert set(CODECS) <= set(WORDS)


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = demo.Settings(hosts=2)
    run = Run("a", {"policy": "gcomp", "processor_seconds": 0.0, "step_seconds": 1.0})
    for share, said in ((0.1, False), (0.5, True)):
        _, notes = _words(settings, demo.Result([run], [], None, elsewhere=share), None)
        assert any("other programs took 50 % of this machine's" in note for note in notes) == said
    clock = launch._Clock()
    spin = time.process_time() + 0.3
    while time.process_time() < spin:
        pass
    assert 0 <= clock.elsewhere() < 1.05, "this process is not one of the others"


def test_a_rank_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TINY(hosts=2, steps=3, limit=False, policies=("no such policy",))
    with pytest.raises(EmulationError, match="no such policy"):
        demo.run(tmp_path, settings)


@pytest.mark.parametrize("argv", [["--seconds", "0"], ["--steps", "2"]])
def test_a_demo_needs_time(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *argv]) == 1
    assert "give the demo some time" in capsys.readouterr().err
