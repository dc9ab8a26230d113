"""A training that is watched: numbers for TensorBoard and others, ranges in traces of torch.profiler."""

from __future__ import annotations

import csv
import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from training import start

from gradzip import Accordion, cli
from gradzip.errors import ReportError, Unsupported
from gradzip.exchange import plain
from gradzip.hooks.metrics import Metrics
from gradzip.report.measured import measured
from gradzip.spans import span

NUMBERS = {
    *("step_seconds", "bytes_sent", "bytes_raw", "ratio"),
    *("coding_seconds", "waiting_seconds", "exposed_seconds", "memory_bytes"),
}


class Tags:
    """Has what is used of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


def logged(folder: str) -> dict[str, Any]:
    """Three writers at once; one of them fails, and the training goes on."""
    policy = Accordion("topk:ratio=0.5", "topk:ratio=0.1", window=2, threshold=1e9)
    run = start(policy)
    assert run.handle is not None
    tags, rows = Tags(), []

    def fails(numbers: dict[str, float], step: int) -> None:
        raise OSError("no space left")

    run.handle.log(tags, every=2)
    run.handle.log(lambda numbers, step: rows.append((step, dict(numbers))), every=3)
    run.handle.log(fails, every=1)
    if importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        run.handle.log(SummaryWriter(folder), every=2)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(0, 8)
    stats = run.handle.stats()
    run.handle.detach()
    return {"tags": tags.written, "rows": rows, "warned": [str(w.message) for w in caught], "stats": stats}


def traced(rank: int, folder: str) -> None:
    """Two steps before any profiler, so that all threads are there already; then one under each kind of it."""
    run = start("gcomp:keep=7")
    assert run.handle is not None
    run.train(0, 2)
    for name, config in (("usual", None), ("all", _ExperimentalConfig(profile_all_threads=True))):
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            run.train(2, 3)
        if rank == 0:
            profiler.export_chrome_trace(f"{folder}/{name}.json")
    run.train(3, 4)  # as if there had been none
    run.handle.detach()


def watch(rank: int, folder: str) -> dict[str, Any]:
    traced(rank, folder)
    return logged(f"{folder}/{rank}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, watch, str(folder))


def test_rank_0_hands_numbers_to_every_writer(seen: list[dict[str, Any]]) -> None:
    first, second = seen
    assert second["tags"] == second["rows"] == second["warned"] == []
    assert [step for step, _ in first["rows"]] == [3, 6]
    assert sorted({step for _, _, step in first["tags"]}) == [2, 4, 6]
    for _, numbers in first["rows"]:
        names = {name.removeprefix("gradzip/") for name in numbers}
        assert names >= NUMBERS
        assert all(name.startswith("share/") for name in names - NUMBERS)
        assert sum(value for name, value in numbers.items() if "/share/" in name) == pytest.approx(1)
        assert numbers["gradzip/step_seconds"] > numbers["gradzip/exposed_seconds"] > 0
        assert numbers["gradzip/waiting_seconds"] > 0
        assert numbers["gradzip/coding_seconds"] > 0
        assert numbers["gradzip/memory_bytes"] > 0
        assert numbers["gradzip/ratio"] == pytest.approx(numbers["gradzip/bytes_raw"] / numbers["gradzip/bytes_sent"])


def test_numbers_are_means_over_the_steps_since_the_last(seen: list[dict[str, Any]]) -> None:
    """The level rises in between: what was sent then must not be averaged with what was sent before."""
    (_, early), (_, late) = seen[0]["rows"]
    assert "gradzip/share/topk:ratio=0.5" in early
    assert "gradzip/share/topk:ratio=0.1" in late
    assert late["gradzip/bytes_sent"] < 0.6 * early["gradzip/bytes_sent"]
    assert late["gradzip/bytes_raw"] == early["gradzip/bytes_raw"]


def test_a_writer_that_fails_is_named_once_and_training_goes_on(seen: list[dict[str, Any]]) -> None:
    ours = [text for text in seen[0]["warned"] if text.startswith("log: ")]
    assert ours == ["log: the writer failed and will not be called again: OSError: no space left"]
    assert seen[0]["stats"]["steps"] == 8


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard is not installed")
def test_tensorboard_has_read_it(seen: list[dict[str, Any]], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "0"))
    events.Reload()
    assert [event.step for event in events.Scalars("gradzip/ratio")] == [2, 4, 6]


def test_the_csv_writer_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    (code,) = [part for part in text.split("```python\n") if "csv" in part.split("```")[0]]
    monkeypatch.chdir(tmp_path)
    given: list[Any] = []

    class Handle:
        def log(self, writer: Any, every: int) -> None:
            given.append(writer)

    exec(code.split("```")[0], {"handle": Handle()})
    for step in (100, 200):
        given[0]({"gradzip/ratio": 2.0, "gradzip/bytes_sent": step}, step)
    with open("gradzip.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"step": str(s), "gradzip/ratio": "2.0", "gradzip/bytes_sent": str(s)} for s in (100, 200)]


def test_what_cannot_write_is_refused() -> None:
    with pytest.raises(Unsupported, match="int has no add_scalar and cannot be called"):
        Metrics(3, 1)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="write every 1 or more steps"):
        Metrics(print, 0)


def test_traces_show_exchanges_and_on_all_threads_codec_and_wire(seen: list[dict[str, Any]], folder: Path) -> None:
    found = {}
    for kind in ("usual", "all"):
        events = json.loads((folder / f"{kind}.json").read_text())["traceEvents"]
        ours = [event for event in events if event["name"].startswith("gradzip: ")]
        found[kind] = {event["name"].split()[1] for event in ours}
        exchanges = [event for event in ours if event["name"].startswith("gradzip: exchange at step ")]
        assert len(exchanges) > 1, "one for each bucket"
        assert len({event["tid"] for event in exchanges}) == 1
        assert all(event["dur"] > 0 for event in exchanges)
        if kind == "all":
            threads = {event["tid"] for event in ours} - {exchanges[0]["tid"]}
            assert len(threads) > 1, "stages have threads of their own"
            coded = [event["name"] for event in ours if event["name"].startswith("gradzip: code ")]
            assert any("gcomp:keep=7" in name and "by alltoall at step 3 for '" in name for name in coded), coded
    assert found["usual"] == {"exchange"}
    assert found["all"] == {"exchange", "code", "wire", "encode", "recode", "decode"}


def test_the_report_shows_a_traced_step(seen: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    """Stages where their threads were profiled, whole exchanges where not; times within the step that is named."""
    for kind, tracks in (("all", {"stage 1, coding", "stage 2, coding"}), ("usual", {"exchange 1"})):
        story = measured(folder / f"{kind}.json")
        found = {span.track for span in story.spans}
        assert found >= tracks | {"backward"}
        assert all(0 <= span.start_s <= span.end_s < 60 for span in story.spans)
        assert ("profile_all_threads" in story.about) == (kind == "usual")
        step = 3 if kind == "all" else 2
        assert story.about.startswith(f"Step {step}, from {kind}.json: ")
        assert all(f"at step {step} " in span.name for span in story.spans if span.track != "backward")
        run = tmp_path / "run.jsonl"
        run.write_text('{"schema": "gradzip-run", "version": 1, "run": "a"}\n')
        out = tmp_path / f"{kind}.html"
        assert cli.main(["report", str(run), "--trace", str(folder / f"{kind}.json"), "--out", str(out)]) == 0
        assert "Timeline of a step: measured" in out.read_text()


def test_a_trace_without_gradzip_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ReportError, match="holds no range of gradzip: profile a step after attach"):
        measured(path)
    path.write_text("{}")
    with pytest.raises(ReportError, match="holds no list traceEvents"):
        measured(path)


def test_without_a_profiler_a_span_is_nothing() -> None:
    assert span("encode") is span("wire", "of all")


def test_a_sum_that_does_not_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such group")

    ended: list[str] = []
    channel: Any = SimpleNamespace(
        world=2,
        groups={},
        watch=SimpleNamespace(began_elsewhere=lambda what: lambda: ended.append(what)),
    )
    group: Any = None
    monkeypatch.setattr(plain.dist, "all_reduce", refuse)
    before = plain._under_way
    with pytest.raises(RuntimeError, match="no such group"):
        plain.average(torch.ones(4), group, channel, print)
    assert plain._under_way == before
    assert ended == ["plain averaging of 16 bytes"]
