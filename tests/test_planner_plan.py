"""plan.json, the Plan policy, the command line, and Perfetto files."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import profile

from gradzip import cli
from gradzip.cli.plan import settings
from gradzip.errors import PlanError
from gradzip.option import Option
from gradzip.plan import Plan
from gradzip.planner import baselines, perfetto
from gradzip.planner.answer import Request, answer
from gradzip.planner.choices import Limits
from gradzip.planner.network import Topology
from gradzip.planner.timeline import INTER_IN, INTER_OUT, Task, simulate
from gradzip.planner.units import DDP_BUCKET
from gradzip.policy import Policy


def plan() -> Plan:
    options = {"a": Option("cast", "cpu", "allreduce"), "b": Option("identity", None, "ar.flat")}
    return Plan(options, {"a": (3, 4), "b": (5,)}, "m", 25.0, {"step_s": 0.5})


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile().save(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.main(["plan", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_plan_is_a_policy_and_survives_the_file(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan()
    assert isinstance(again, Policy)
    assert str(again.option("a", (3, 4))) == "cast@cpu/allreduce"


def test_a_plan_for_another_model() -> None:
    with pytest.raises(PlanError, match=r"another model \(m\).*no 'c'"):
        plan().option("c", (1,))
    with pytest.raises(PlanError, match=r"shape \(3, 4\) there and \(4, 3\) here"):
        plan().option("a", (4, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="x"), "no plan that this version reads"),
        (lambda d: d.update(version=2), "no plan that this version reads"),
        (lambda d: d.update(tensors={}), "names no tensors"),
        (lambda d: d["tensors"]["a"].pop("shape"), "entry of 'a'"),
        (lambda d: d["tensors"]["a"].update(option="csat"), "unknown codec 'csat'"),
        (lambda d: d["tensors"]["a"].update(shape=[-1]), "entry of 'a'"),
        (lambda d: d.update(expected={"step_s": "soon"}), "expected.step_s is .soon.: wanted a finite number"),
    ],
)
def test_a_bad_plan_says_what_is_wrong(change: Any, message: str) -> None:
    data = json.loads(json.dumps(plan().to_json()))
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(data)


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path / "nowhere")
    (tmp_path / "x").write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.load(tmp_path / "x")


# -- the command -----------------------------------------------------------------------------------------------------


def test_plan_prints_what_and_why_and_writes_the_plan(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    text = run(capsys, measured, "--inter", "100mbit", "--lossy", "--out", out, "--perfetto", trace)
    for expected in (
        "small, 12 MB, on 4 x 1",
        "FP32 all-reduce",
        "HiTopKComm",
        "this plan",
        "x FP32's speed",
        "below about",
    ):
        assert expected in text
    written = Plan.load(out)
    assert set(written.options) == {t.name for t in profile().tensors}
    assert written.bucket_cap_mb == 25
    assert any(option.codec != "identity" for option in written.options.values())
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"inter.out", "cpu", "compute"} <= {e["args"].get("name") for e in events if e["ph"] == "M"}


def test_plan_says_when_the_best_plan_is_none(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    answer = json.loads(run(capsys, measured, "--inter", "400gbit", "--out", out, "--json"))
    assert answer["pays"] is False
    assert any("do not compress" in note for note in answer["verdict"])
    assert {str(o) for o in Plan.load(out).options.values()} == {"identity/allreduce"}
    assert answer["rows"][0]["why"]


def test_a_gain_that_may_be_an_error_is_not_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model misses the plain step by more than the plan would gain: why, what to do, and a plan that is plain."""
    measured, out = tmp_path / "profile.json", tmp_path / "plan.json"
    replace(profile(), exposed_s=1.0).save(measured)
    answer = json.loads(run(capsys, measured, "--codec", "cast", "--out", out, "--json"))
    assert answer["pays"] is False
    assert answer["speedup_fp32"] > 1.3
    (why,) = (note for note in answer["verdict"] if "do not compress yet" in note)
    assert "the model misses by that the plain steps that were profiled" in why
    assert "Profile again with more steps, on a quiet machine and network" in why
    assert answer["notes"][-1].endswith(f"plain all-reduce for all gradients is in {out}")
    assert answer["baselines"][-1]["name"] == "best plan (not written)"
    assert {str(o) for o in Plan.load(out).options.values()} == {"identity/allreduce"}


def test_plan_takes_shipped_models_and_bucket_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    answer = json.loads(run(capsys, "vgg16", "--inter", "10gbit", "--out", out, "--json", "--bucket-mb", "auto"))
    assert answer["pays"]
    assert answer["speedup_fp32"] > 1
    assert answer["speedup_bf16"] is not None
    assert "uncertainty unknown" in answer["verdict"][0] or "computed, not measured" in answer["verdict"][0]
    assert len(Plan.load(out).options) == 32


def test_sweeps(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "sweep.csv"
    run(capsys, measured, "--lossy", "--what-if", "inter=100mbit..10gbit", "--csv", table)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert float(rows[0]["speedup"]) > float(rows[-1]["speedup"])
    rows = json.loads(run(capsys, measured, "--what-if", "hosts=2..16", "--json"))["rows"]
    assert [row["hosts"] for row in rows] == [2, 4, 8, 16]


def test_hosts_of_one_rank_start_at_two() -> None:
    assert [t.hosts for t in settings("hosts=1..5", Topology(4, 1))] == [2, 4, 5]
    assert [t.hosts for t in settings("hosts=1..2", Topology(4, 8))] == [1, 2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing.json"], "cannot read the profile"),
        (["{}", "--hosts", "1"], "nothing to exchange"),
        (["{}", "--gpus-per-host", "8"], "--intra"),
        (["{}", "--inter", "fast"], "cannot read the rate 'fast'"),
        (["{}", "--codec", "zstd"], "was not measured"),
        (["{}", "--bucket-mb", "-1"], "number of megabytes"),
        (["{}", "--cores-per-rank", "0"], "give a number above 0"),
        (["{}", "--what-if", "moon=1..2"], "cannot read --what-if"),
        (["{}", "--what-if", "inter=2gbit..1gbit"], "above the first"),
        (["{}", "--what-if", "hosts=4..x"], "two numbers of hosts"),
    ],
)
def test_wrong_requests_say_why(
    argv: list[str], message: str, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *(str(measured) if word == "{}" else word for word in argv)]) == 1
    assert message in capsys.readouterr().err


# -- Perfetto --------------------------------------------------------------------------------------------------------


def test_spans_have_the_names_of_program_steps() -> None:
    tasks = [
        Task("enc.cpu", 2, 1.0),
        Task("a2a.flat", INTER_OUT, 1.0),
        Task("sockets", 2, 1.0),
        Task("dec.cpu", 2, 1.0),
    ]
    names = [span.name for span in perfetto.predicted(simulate([1.0], [tasks]), ["a"])]
    assert names == ["backward a", "Encode.cpu a", "AllToAll.flat a", "sockets a", "Decode.cpu a"]


def test_a_trace_has_every_event_once_per_resource() -> None:
    timeline = simulate([1.0, 1.0], [[Task("send", INTER_OUT | INTER_IN, 0.5)]] * 2)
    measured = [perfetto.Span("wire", "bucket 0", 1.0, 1.6)]
    trace = perfetto.trace({"predicted": perfetto.predicted(timeline, ["a", "b"]), "measured": measured})
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 2 + 2 * 2 + 1
    assert {e["pid"] for e in spans} == {1, 2}
    sends = [e for e in spans if e["name"] == "send a"]
    assert [(e["ts"], e["dur"]) for e in sends] == [(1e6, 0.5e6)] * 2
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names >= {"predicted", "measured", "compute", "inter.in", "wire"}


# -- experiments -----------------------------------------------------------------------------------------------------


def test_tables_of_the_espresso_experiment_are_those_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent.parent / "experiments/espresso"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run as espresso

    readme = (folder / "README.md").read_text()
    assert espresso.filled(readme, espresso.read()) == readme, "run python experiments/espresso/run.py"
    assert all(float(row["off_bound"]) < 0.1 for row in espresso.read())
    monkeypatch.delitem(sys.modules, "run")


def test_the_espresso_experiment_gives_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent.parent / "experiments/espresso"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run as espresso

    lstm = next(w for w in espresso.WORKLOADS if w.model == "lstm")
    (kept,) = (row for row in espresso.read() if row["workload"] == lstm.name)
    assert espresso.row(lstm)["gain_fp32"] == pytest.approx(float(kept["gain_fp32"]), abs=0.05)
    monkeypatch.delitem(sys.modules, "run")


def test_plan_has_the_verdict_first_and_no_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "profile.json"
    profile().save(measured)
    assert cli.main(["plan", str(measured), "--out", str(tmp_path / "plan.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small, ")
    assert "compress" in lines[1]
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("rate", ["1gbit", "400gbit"])
def test_no_uncertainty_is_printed_where_it_is_unknown(
    rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "resnet50", "--inter", rate, "--out", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "±" not in out
    assert "computed, not measured" in out.splitlines()[1]


@pytest.mark.parametrize("argv", [["--inter", "25gbit"], ["--what-if", "inter=1gbit..9gbit"]])
def test_a_rate_between_hosts_is_refused_for_one_host(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "resnet50", "--hosts", "1", "--out", str(tmp_path / "plan.json"), *argv]
    assert cli.main(command) == 1
    assert f"{' '.join(argv)}: this is a cluster of one host" in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11, 3.2e12])
@pytest.mark.parametrize("hosts", [2, 8])
def test_the_bound_is_not_slower_than_plain_averaging(hosts: int, rate: float) -> None:
    found = profile(hosts=hosts, rate=rate)
    request = Request(found, Topology.of(found), Limits(), DDP_BUCKET)
    plain, *_, bound = answer(request).baselines
    assert plain.step_s is not None
    assert bound.step_s is not None
    assert bound.name.endswith("(bound)")
    assert bound.step_s <= plain.step_s


def test_free_compression_that_does_not_pay_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search may end above plain averaging, where every compressed route costs more than all-reduce."""
    found = profile()
    real = baselines.search

    def slower(problem: Any) -> Any:
        return replace(real(problem), time_s=1e3)

    monkeypatch.setattr(baselines, "search", slower)
    last = answer(Request(found, Topology.of(found), Limits(), DDP_BUCKET)).baselines[-1]
    assert last.note == "even free, it would not beat FP32"
