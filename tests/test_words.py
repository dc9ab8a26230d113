"""What users read while a command runs or a run begins: progress, warnings, the order of `gradzip doctor`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from scripts import run_scripts

from gradzip import cli, engines
from gradzip.cli import progress
from gradzip.errors import EngineError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT", 0.05)


def until(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_is_shown_after_a_while(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress() as say:
        say("first")
        until(stream, "first")
        say("second")
    if kind is Terminal:
        assert stream.getvalue() == "\r\x1b[Kgradzip: first\r\x1b[Kgradzip: second\r\x1b[K"
    else:
        assert stream.getvalue() == "gradzip: first\ngradzip: second\n"


def test_progress_of_short_commands_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress() as say:
        say("first")
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("at_once")
def test_bench_codec_says_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "bench",
        "codec",
        "--values",
        "300000",
        "--rounds",
        "3",
        "--codecs",
        "gcomp:keep=7;gcomp:mode=lossless;zlib",
    ]
    assert cli.main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "gradzip: measuring zlib (3 of 3)\n" in err
    assert json.loads(out)["rows"], "progress must not get into the output"


def test_doctor_has_what_is_broken_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = engines.load

    def load(name: str) -> object:
        if name == "reference":
            raise EngineError("no reference")
        return real(name)

    monkeypatch.setattr(engines, "load", load)
    cli.main(["doctor", "--json"])
    statuses = [row["status"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert statuses[0] == "broken"
    assert statuses == sorted(statuses, key=("broken", "ok", "absent").index)


def test_doctor_explains_no_nccl_where_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "over Gloo, from the memory of the CPU" in " ".join(out.split())
    assert "nccl" not in out.lower()


def rank_main() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradzip

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(40, 40))
    gradzip.attach(model, torch.optim.NAdam(model.parameters()))
    for _ in range(2):
        model(torch.ones(2, 40)).sum().backward()
    dist.destroy_process_group()


def test_unknown_optimizer_is_warned_of_once_on_rank_0_without_source() -> None:
    ranks = run_scripts(2, Path(__file__))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert [rank.err.count("torch.optim.nadam.NAdam") for rank in ranks] == [1, 0]
    (line,) = [line for line in ranks[0].err.splitlines() if "nadam.NAdam" in line]
    assert line.startswith("gradzip:0: GradzipWarning: gradzip cannot tell which bits")
    assert "warn(" not in ranks[0].err, "a line of source"


def test_plan_in_a_pipe_keeps_progress_out_of_the_output() -> None:
    command = [sys.executable, "-m", "gradzip", "plan", "resnet50", "--json", "--out", "/dev/null"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    json.loads(found.stdout)


if __name__ == "__main__":
    rank_main()
