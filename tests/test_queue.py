"""experiments/run_queue.py: nothing that is missing is forgotten, rows travel, and a call runs what fits."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "experiments"
sys.path.append(str(FOLDER))


@pytest.fixture(scope="module")
def queue() -> ModuleType:
    return importlib.import_module("run_queue")


def test_the_page_follows_the_results(queue: ModuleType) -> None:
    assert queue.PAGE.read_text() == queue.page(), "run python experiments/run_queue.py --write"


def test_every_run_that_is_missing_belongs_to_an_item(queue: ModuleType) -> None:
    series, paired = queue.series, queue.paired
    wanted = {(run.task, run.row, run.seed) for run in series.missing([*series.EXPERIMENTS], FOLDER, None, "")}
    wanted |= {(g.task, v.name, seed) for g in paired.missing(FOLDER / "noise/results.csv", "") for seed, v in g.runs}
    found = set()
    for item in queue.QUEUE:
        if isinstance(item, queue.Series):
            found |= {(run.task, run.row, run.seed) for run in item.runs(FOLDER)}
        elif isinstance(item, queue.Paired):
            found |= {(group.task, v.name, seed) for group in item.missing(FOLDER) for seed, v in group.runs}
    assert wanted == found


def test_every_part_of_real_ranks_exists(queue: ModuleType) -> None:
    script = (FOLDER / "real_ranks.sh").read_text()
    for item in queue.QUEUE:
        if isinstance(item, queue.Ranks):
            assert f"    {item.part})" in script
            assert f"$out/{item.file}" in script
            assert item.file in queue.FILES


def test_new_rows_alone_come_back_and_are_taken_once(queue: ModuleType, tmp_path: Path) -> None:
    here, state, out = tmp_path / "here", tmp_path / "state", tmp_path / "out"
    rows = [{"task": "a", "limit": "", "value": str(i)} for i in range(3)]
    queue.series.append(here / "gpt/results.csv", rows[:1], tuple(rows[0]))
    assert queue.merge(here / "gpt/results.csv", state / "gpt/results.csv") == 1
    tiny = rows[0] | {"limit": "64"}
    queue.series.append(state / "gpt/results.csv", [*rows[1:], tiny], tuple(rows[0]))
    for _ in range(2):
        queue.give(state, out, here)
        assert queue.rows_of(out / "gpt/results.csv")[1] == rows[1:]
    assert [queue.merge(out / "gpt/results.csv", here / "gpt/results.csv") for _ in range(2)] == [2, 0]
    assert queue.rows_of(here / "gpt/results.csv")[1] == rows
    queue.series.append(out / "wall/results.csv", [{"other": "1"}], ("other",))
    with pytest.raises(SystemExit, match="other columns"):
        queue.merge(out / "wall/results.csv", here / "gpt/results.csv")


def test_a_call_runs_what_fits_and_leaves_the_rest(
    queue: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny run of a GPU's queue on a CPU; the second call finds nothing to do."""
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (8, 3073), dtype=np.uint8)
        data[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(data.tobytes())
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "cache"))
    one = queue.Series("one row", "gcomp", "gcomp-cifar-float32 paper", "to try it")
    other = queue.Series("ANYTHING ELSE", "powersgd", "", "is not asked for")
    monkeypatch.setattr(queue, "QUEUE", (other, one, queue.Ranks("routes", "wall/routes.csv", 8, 1e9, "too long")))
    options = argparse.Namespace(
        data=tmp_path, state=tmp_path / "state", out=tmp_path / "out", seconds=600.0, later=0.0, limit=32, only="o"
    )
    for _ in range(2):
        assert queue.run(options) == 0
    said = capsys.readouterr().out
    assert said.count("-- one row: 1 to do") == 1
    assert said.count("-- real ranks: routes: no time") == 2
    (row,) = [row for row in queue.paired.read(tmp_path / "state/gcomp/results.csv") if row["limit"]]
    assert row["row"] == "paper"
    assert not (tmp_path / "out").exists(), "rows of tiny forms stay where they are"


def test_seconds_of_single_runs_are_shared_with_those_beside(queue: ModuleType, tmp_path: Path) -> None:
    fields = ("task", "device", "limit", "seconds", "beside")
    rows = [
        {"task": "gpt2", "device": queue.paired.GPU, "limit": "", "seconds": s, "beside": b}
        for s, b in ((80, 4), (60, 2))
    ]
    queue.series.append(tmp_path / "results.csv", rows, fields)
    guess = queue.paired.Guess(tmp_path / "results.csv", queue.paired.GPU)
    assert queue._shared(tmp_path / "results.csv", guess, "gpt2", 3) == pytest.approx(3 * 25)
    assert (
        queue._shared(tmp_path / "results.csv", guess, "sst2", 8)
        == queue.paired.GUESS["sst2"] * 8 / queue.paired.TOGETHER
    )
