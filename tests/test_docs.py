"""What the documentation shows is what the code does: examples and tables that are made by scripts are up to date."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
from gradzip import engines
from gradzip.codecs import prior
from gradzip.codecs.prior import PRIOR_LENGTHS
from gradzip.engines import huffman

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the scripts of bench/ importable."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return ROOT / "bench"


def test_worked_example_shows_what_the_codec_writes(bench: Path) -> None:
    import hexdump

    assert hexdump.example() in (ROOT / "docs/format.md").read_text(), "run python bench/hexdump.py"


def test_worked_example_decodes(bench: Path) -> None:
    import hexdump

    payload = torch.frombuffer(bytearray(hexdump.frame()), dtype=torch.uint8)
    floors = torch.full((hexdump.VALUES,), hexdump.FLOOR, dtype=torch.int8)
    with engines.use("reference"):
        decoded = gradzip.decode(payload, floor=floors)
    assert torch.equal(decoded, (hexdump.gradient() * 64).round() / 64)


def test_prior_book_is_as_its_script_writes_it(bench: Path) -> None:
    import make_prior

    lengths = np.array(PRIOR_LENGTHS, np.uint8)
    assert make_prior.text(lengths) == Path(prior.__file__).read_text()  # the installed one: tests also run on a wheel
    assert huffman.escape_length(lengths) == huffman.MAX_LENGTH


def test_tables_of_the_exponent_experiment_are_those_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "experiments/exponents"
    monkeypatch.syspath_prepend(str(folder))
    import tables

    assert Path(tables.__file__).parent == folder
    readme = (folder / "README.md").read_text()
    assert tables.filled(readme) == readme, "run python experiments/exponents/tables.py"


def test_benchmark_page_follows_its_csv(bench: Path) -> None:
    import make_tables

    assert make_tables.PAGE.read_text() == make_tables.page(), "run python bench/make_tables.py"


def test_the_readme_leads_with_figures_of_the_benchmarks() -> None:
    """Bits per value, and that keep=7 has no more error than a cast to bf16."""
    readme = (ROOT / "README.md").read_text()
    with (ROOT / "bench/results/cpu_codec.csv").open() as file:
        rows = {row["codec"]: row for row in reversed(list(csv.DictReader(file)))}
    for codec in ("gcomp:keep=7", "gcomp", "gcomp:mode=lossless"):
        (line,) = [line for line in readme.splitlines() if f"| `{codec}` | " in line and line.startswith("| ")][:1]
        assert f"{float(rows[codec]['bits']):.1f}" in line.rpartition(f"`{codec}`")[2], line
    for error in ("max_error", "l2_error"):
        assert float(rows["gcomp:keep=7"][error]) <= float(rows["cast"][error])


def test_the_picture_of_the_readme_is_that_of_a_run(bench: Path) -> None:
    import demo_picture

    result = json.loads(demo_picture.RESULT.read_text())
    assert demo_picture.PICTURE.read_text() == demo_picture.picture(result), "run python bench/demo_picture.py"
    assert {row["replicas"] for row in result["rows"]} == {"identical"}
