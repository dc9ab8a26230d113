"""experiments/noise/promise.py: what it measures on four ranks keeps the promise; rows that are there are left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from scripts import run_scripts

SCRIPT = Path(__file__).parent.parent / "experiments/noise/promise.py"
TINY = ("--width", "16", "--blocks", "1", "--heads", "2", "--length", "16", "--texts", "4")
KINDS = ["AdamW", "SGD", "Lion", "Muon", "Adafactor"]


@pytest.mark.slow
def test_share_bias_replicas_and_resume_of_a_tiny_model(tmp_path: Path) -> None:
    path = tmp_path / "promise.csv"
    for kinds in (KINDS, KINDS[:2]):
        arguments = (*TINY, "--steps", "12", "--draws", "16", "--csv", str(path), "--optimizers", ",".join(kinds))
        for rank in run_scripts(4, SCRIPT, *arguments):
            assert rank.code == 0, rank.err
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer"] for row in rows] == KINDS, "the second run had nothing to do"
    for row in rows:
        for share, worst in (("share", "worst"), ("true_share", "true_worst")):
            assert 0 < float(row[share]) <= 0.01, row
            assert float(row[worst]) <= 0.02, row
        assert row["differing"] == "0"
        assert row["resumed"] == "1"
        assert abs(float(row["bias"]) - 1) < 5 * float(row["bias_error"]), "errors of one sign would make it 16"
        assert float(row["bias_error"]) < 1
        assert float(row["shrink"]) < 4
    assert [int(row["shaped"]) > 0 for row in rows] == [kind != "SGD" for kind in KINDS]
