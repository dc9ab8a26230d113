"""The command line, in process: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gradient

import gradzip
from gradzip import capture, cli, engines
from gradzip.cli import doctor, table
from gradzip.cli.samples import append_csv
from gradzip.codecs import REGISTRY, parse
from gradzip.errors import EngineError
from gradzip.hooks import default


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All commands that there are, with the commands inside them."""
    found = [path] if path else []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found += _commands(inner, (*path, name))
    return found


COMMANDS = _commands(cli.parser())
TINY = capture.ModelSize(width=32, blocks=1, batch=1)


@pytest.fixture
def gradient_file(tmp_path: Path) -> Path:
    path = tmp_path / "gradient.f32"
    gradient(5000).numpy().tofile(path)
    return path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("command", [(), *COMMANDS], ids=" ".join)
def test_every_help_ends_with_an_example_that_parses(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--help"])
    assert end.value.code == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("example: ")
    argv = shlex.split(last.removeprefix("example: "))
    called = [argv[i + 1 :] for i, word in enumerate(argv) if word == "gradzip"]  # there may be a launcher before it
    (own,) = [words for words in called if tuple(words[: len(command)]) == command]
    cli.parser().parse_args(own)


def test_there_are_commands() -> None:
    assert {"doctor", "codecs", "bench", "emulate", "profile", "plan", "report", "demo"} == {c[0] for c in COMMANDS}
    assert ("bench", "net") in COMMANDS


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "gradzip", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"gradzip {gradzip.__version__}"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["bench"], ["bench", "codec", "--rounds", "0"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


# -- codecs ----------------------------------------------------------------------------------------------------------


def test_codecs_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "codecs")["rows"]
    assert [row["name"] for row in rows] == sorted(REGISTRY)
    for row in rows:
        assert row["summary"], f"{row['name']} does not say what it does"
        assert (row["error"] == "none") == parse(row["name"]).lossless
        assert ("fed back" in row["error"]) == (row["feedback"] != "none") == row["biased"]
        assert (row["lossless"] == "yes") == parse(row["name"]).lossless
    (gcomp,) = (row for row in rows if row["name"] == "gcomp")
    assert gcomp["options"]["ulps"] == 1
    assert gcomp["lossless"] == "mode=lossless"
    bits = {row["name"]: row["bits"]["value"] for row in rows}
    assert bits["identity"] == pytest.approx(32, abs=0.01)
    assert bits["sign"] == pytest.approx(1, abs=0.01)
    assert bits["powersgd"] is None


def test_codecs_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["codecs"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in REGISTRY)
    assert f"attach(model, optimizer) takes {default.in_words()}" in " ".join(out.split())


# -- doctor ----------------------------------------------------------------------------------------------------------


def _statuses(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_doctor_finds_a_working_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADZIP_ENGINE", raising=False)
    assert cli.main(["doctor", "--json"]) == 0
    rows = _statuses(capsys)
    assert rows["gradzip"]["found"] == gradzip.__version__
    assert rows["engine reference"]["status"] == "ok"
    assert rows["engine native"]["status"] == "ok"
    assert engines.load("native").isa() in rows["engine native"]["found"]


def test_doctor_names_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = engines.load

    def load(name: str) -> object:
        if name == "native":
            raise EngineError("the native engine cannot run here: no library")
        return real(name)

    monkeypatch.setattr(engines, "load", load)
    for module in ("zstandard", "lz4"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["doctor", "--json"]) == 1
    rows = _statuses(capsys)
    assert rows["engine native"] == {
        "what": "engine native",
        "status": "broken",
        "found": "the native engine cannot run here: no library",
    }
    assert rows["zstandard"]["status"] == rows["lz4"]["status"] == "absent"
    assert "gradzip[baselines]" in rows["lz4"]["found"]


def test_doctor_catches_an_engine_that_codes_differently(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = engines.load("native")
    real = native.encode

    def flipped(x: Any, job: Any, out: Any, *rest: Any) -> int:
        size: int = real(x, job, out, *rest)
        out[size - 1] ^= 1
        return size

    monkeypatch.setattr(native, "encode", flipped)
    assert cli.main(["doctor", "--json"]) == 1
    assert _statuses(capsys)["engine native"]["status"] == "broken"


def test_doctor_names_the_default_codec(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rule = default.in_words()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cli.main(["doctor", "--json"])
    assert _statuses(capsys)["default codec"]["found"] == rule
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    assert doctor._default()["found"] == (
        "on GPUs gcomp; gcomp:mode=lossless without an optimizer, as noise cannot be sent: this is torch 2.7.1: "
        "install torch 2.8 or newer"
    )


def test_doctor_reads_the_override(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADZIP_ENGINE", "reference")
    cli.main(["doctor", "--json"])
    assert "reference" in _statuses(capsys)["GRADZIP_ENGINE"]["found"]
    monkeypatch.setenv("GRADZIP_ENGINE", "nativ")
    assert cli.main(["doctor", "--json"]) == 1
    assert _statuses(capsys)["GRADZIP_ENGINE"]["status"] == "broken"


@pytest.mark.parametrize(
    ("gpu", "nccl", "version", "found"),
    [
        (False, True, "2.9.0", "absent not used: it carries gradients of models on GPUs"),
        (True, False, "2.9.0", "absent not used: this torch is built without NCCL, which carries it"),
        (True, True, "2.7.1+cu126", r"absent not used: this is torch 2.7.1\+cu126: install torch 2.8 or newer"),
        (True, True, "2.10.0", "ok carries cast, fp8, .* from GPU to GPU, by the process group's NCCL 2.27.3"),
    ],
)
def test_doctor_says_whether_streams_carry_gradients(
    gpu: bool, nccl: bool, version: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    row = doctor._stream_runner()
    assert re.fullmatch(found, f"{row['status']} {row['found']}")
    if row["status"] == "ok":
        carried = set(re.findall(r"\w+", row["found"]))
        assert {"noise", "int8", "sign", "powersgd"} <= carried
        assert not {"gcomp", "zlib"} & carried, "their frames have no known size"
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert doctor._host_runner()["status"] == "broken"


# -- bench -----------------------------------------------------------------------------------------------------------


def test_bench_codec_from_a_file(gradient_file: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    specs = ["gcomp:mode=lossless", "gcomp:keep=7,round=truncate", "zlib"]
    argv = ["bench", "codec", "--input", str(gradient_file), "--rounds", "1", "--codecs", ";".join(specs)]
    rows = run_json(capsys, *argv, "--engine", engine)["rows"]
    assert [row["codec"] for row in rows] == specs
    assert [row["engine"].split("/")[0] for row in rows] == [engine, engine, "zlib"]
    for row in rows:
        assert row["values"] == 5000
        assert row["encode_memcpy"] == row["encode_gbps"] / row["memcpy_gbps"]
    assert rows[0]["max_error"] == 0
    assert rows[0]["bits"] > rows[0]["bound"] > 20


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_bench_codec_forces_the_instruction_set(
    isa: str, gradient_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native = engines.load("native")
    if isa not in native.available_isas():
        pytest.skip(f"this processor has no {isa}")
    before = native.isa()
    argv = ["bench", "codec", "--input", str(gradient_file), "--rounds", "1", "--codecs", "gcomp:mode=lossless"]
    (row,) = run_json(capsys, *argv, "--engine", "native", "--isa", isa)["rows"]
    assert row["engine"] == f"native/{isa}"
    assert native.isa() == before


def test_bench_codec_refuses_an_unknown_instruction_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "codec", "--isa", "sse9"]) == 1
    assert "sse9" in capsys.readouterr().err


def test_bench_codec_leaves_out_what_the_file_cannot_tell(
    gradient_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "codec", "--input", str(gradient_file), "--values", "3000"]
    argv += ["--rounds", "1", "--engine", "reference"]
    shown = run_json(capsys, *argv)
    assert "gcomp:mode=lossless" in [row["codec"] for row in shown["rows"]]
    assert "gcomp" not in [row["codec"] for row in shown["rows"]]
    assert any(note.startswith("gcomp left out") and "optimizer state" in note for note in shown["notes"])
    assert cli.main([*argv, "--codecs", "gcomp"]) == 1, "asked for by name"
    assert "optimizer state" in capsys.readouterr().err


def test_bench_codec_on_the_builtin_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(capture.cached, "__defaults__", (TINY, 3, None))
    argv = ["bench", "codec", "--values", "5000", "--codecs", "gcomp;gcomp:ulps=256"]
    argv += ["--rounds", "1", "--engine", "reference"]
    fine, coarse = run_json(capsys, *argv)["rows"]
    assert coarse["bits"] < fine["bits"] < 32
    assert fine["sample"] == "step 3"


def test_bench_codec_appends_to_csv(gradient_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speeds.csv"
    argv = ["bench", "codec", "--input", str(gradient_file), "--codecs", "identity", "--csv", str(path)]
    argv += ["--rounds", "1", "--engine", "reference"]
    assert cli.main(argv) == cli.main(argv) == 0
    capsys.readouterr()
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["codec"] for row in rows] == ["identity", "identity"]
    assert rows[0]["version"] == gradzip.__version__
    assert rows[0]["processor"]


def test_a_csv_of_an_earlier_version_gets_the_new_columns(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text("codec,version,processor\nold,0,x\n")
    for codec in ("new", "newer"):
        append_csv(path, [{"codec": codec, "transport": "nccl"}])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["codec"], row["transport"]) for row in rows] == [("old", ""), ("new", "nccl"), ("newer", "nccl")]
    assert [row["version"] for row in rows] == ["0", gradzip.__version__, gradzip.__version__]


def test_errors_go_to_stderr_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "codec", "--input", "/nowhere/x.f32"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradzip: cannot read /nowhere/x.f32")


# -- tables ----------------------------------------------------------------------------------------------------------


def test_a_narrow_terminal_cuts_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "NO_SCREEN", 30)
    columns = [table.Column(f"n{i}", f"n{i}", table.number(3), right=True) for i in range(9)]
    row = {f"n{i}": 1234.567 + i for i in range(9)}
    table.show("a title", [*columns, table.Column("text", "text", wrap=True)], [row | {"text": "word " * 30}])
    out = capsys.readouterr().out
    assert all(f"{value:.3f}" in out for value in row.values())
    assert out.count("word") == 30


def test_missing_numbers_and_markup_are_printed_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [table.Column("a", "a", table.number(2)), table.Column("b", "b")]
    table.show("[red]t", columns, [{"a": None, "b": "pip install 'gradzip[gpu]'"}], notes=["see [docs]"])
    out = capsys.readouterr().out
    assert "–" in out
    assert "[red]t" in out
    assert "'gradzip[gpu]'" in out
    assert "see [docs]" in out
