"""Every example runs with two ranks, as its first lines say, and stays short."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from ranks import free_port

import gradzip
from gradzip import cli
from gradzip.planner import answer
from gradzip.report import read

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RUN_HERE = {"ddp.py", "resume.py", "planned.py", "lightning_callback.py", "accelerate_train.py", "trainer_callback.py"}


def run(folder: Path, *command: str) -> str:
    source = str(Path(gradzip.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(folder: Path, name: str, *arguments: str) -> str:
    return run(folder, *TORCHRUN, str(EXAMPLES / name), *arguments)


def ratio(said: str) -> float:
    found = re.search(r"([\d.]+)x fewer bytes", said)
    assert found, said
    return float(found[1])


def test_no_example_escapes() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUN_HERE


@pytest.mark.parametrize("name", sorted(RUN_HERE))
def test_examples_are_short_and_say_how_to_run_them(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 80
    assert f"torchrun --nproc-per-node 2 examples/{name}" in text


def in_turn(folder: Path, name: str, calls: list[list[str]]) -> list[str]:
    """Calls an example's main() several times in one pair of processes, each time with a new process group."""
    ports = [free_port() for _ in calls]
    mp.start_processes(_call, (str(folder), name, calls, ports), 2, start_method="forkserver")
    return [(folder / f"said{i}").read_text() for i in range(len(calls))]


def _call(rank: int, folder: str, name: str, calls: list[list[str]], ports: list[int]) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    for i, (arguments, port) in enumerate(zip(calls, ports)):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        said = io.StringIO()
        with redirect_stdout(said):
            runpy.run_path(str(EXAMPLES / name))["main"](*arguments)
        if rank == 0:
            Path(f"said{i}").write_text(said.getvalue())


def test_ddp(tmp_path: Path) -> None:
    assert ratio(example(tmp_path, "ddp.py")) > 1.2
    (recorded,) = read([tmp_path / "run.jsonl"])
    assert len(recorded.steps) == 20
    assert recorded.per_step("bytes_sent")


def test_resuming_changes_no_bit(tmp_path: Path) -> None:
    first, second, whole = in_turn(tmp_path, "resume.py", [["halves", "3"], ["halves", "3"], ["whole", "6"]])
    assert "steps 0 to 3" in first
    assert "steps 3 to 6" in second
    assert "steps 0 to 6" in whole
    assert second.split()[-1] == whole.split()[-1] != first.split()[-1]


def test_plan_then_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SURE", 0.0)  # on a busy machine the planner doubts what it measured, and is right
    monkeypatch.setattr(answer.Answer, "crowding", 0.0)
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    codecs = ["--codec", "gcomp:keep=7"]
    script = [*TORCHRUN, str(EXAMPLES / "planned.py")]
    run(tmp_path, sys.executable, "-m", "gradzip", "profile", "--steps", "12", *codecs, "--", *script)
    cluster = ["--hosts", "2", "--gpus-per-host", "1", "--inter", "10mbit", *codecs]
    assert cli.main(["plan", profile, *cluster, "--out", plan]) == 0
    (said,) = in_turn(tmp_path, "planned.py", [[plan]])
    assert "gcomp:keep=7" in said
    assert ratio(said) > 1.5


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("lightning_callback.py", "lightning"),
        ("accelerate_train.py", "accelerate"),
        ("trainer_callback.py", "transformers"),
    ],
)
def test_frameworks(name: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install 'gradzip[examples]')")
    assert ratio(example(tmp_path, name)) > 1.2
