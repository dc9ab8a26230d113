"""The papers' experiments: the page follows its CSV files, the rows exist, and a tiny run of each kind works."""

from __future__ import annotations

import csv
import importlib
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from gradzip import emulate

FOLDER = Path(__file__).parent.parent / "experiments"
sys.path.append(str(FOLDER))
from workers import pictures as pictures_module  # noqa: E402
from workers import running, tasks  # noqa: E402
from workers.pictures import ResNet18  # noqa: E402
from workers.running import FIELDS, Run  # noqa: E402

from gradzip.errors import Unsupported  # noqa: E402
from gradzip.hooks import default  # noqa: E402


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return importlib.import_module("make_results")


@pytest.fixture(scope="module")
def series() -> ModuleType:
    return importlib.import_module("series")


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random pictures in the form of CIFAR-10's official binary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        rows = rng.integers(0, 256, (16, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    return tmp_path


def test_the_page_follows_the_results(results: ModuleType) -> None:
    assert results.PAGE.read_text() == results.page(results.Results(FOLDER)), "run python experiments/make_results.py"
    for name, draw in results.PICTURES.items():
        assert (results.DOCS / name).read_text() == draw(results.Results(FOLDER)), "the same command writes it"
    design = results.default_section.PAGE.read_text()
    assert results.default_section.filled(design, results.Results(FOLDER)) == design, "the same command writes it"


def test_the_default_is_what_the_runs_allow(results: ModuleType) -> None:
    """Each budget that attach takes costs less than the limit in every task of its optimizer, and is the largest."""
    section, rows = results.default_section, results.Results(FOLDER)("noise/results.csv")
    taken = {kind.__name__: policy for kind, policy in default._PROVED.items()}
    for task in section.tasks(rows):
        optimizer = section.OPTIMIZERS.get(task, "AdamW")
        if optimizer not in taken:  # an older torch
            continue
        budget = "0.3 %" if taken[optimizer] == "noise:share=0.3%" else "1 %"
        found = section.cost(rows, task, budget)
        if found.count == 1:
            assert task == "gpt2", "the only task of which one seed is all that there is"
            continue
        assert found.upper < section.analysis.LIMIT
        if budget == "0.3 %":
            assert section.cost(rows, task, "1 %").upper >= section.analysis.LIMIT


def test_worst_steps_are_those_of_the_runs(results: ModuleType) -> None:
    """The text of the codec's card, which no command writes."""
    section = results.default_section.noise_section
    said = section._shares(results.Results(FOLDER)("noise/results.csv"), list(section.TITLES))
    card = (results.DOCS / "codecs.md").read_text()
    steps = re.search("it was (.*) to (.*) % in these runs, and (.*) to (.*) % in their", said)
    assert steps is not None
    assert "{} to {} % at b = 1 %. In the worst steps it was {} to {} %, but".format(*steps.groups()) in card
    above = re.search("but (.*) and (.*) % in those of `sst2`", said)
    assert above is not None
    assert "but {} and {} % where MiniLM is fine-tuned on SST-2".format(*above.groups()) in card


def test_the_page_says_which_pairs_of_near_mode_there_are(results: ModuleType) -> None:
    """Rows come into the tables as they are run, with the first digit of a share that is tiny."""
    section, read = results.default_section.noise_section, results.Results(FOLDER)
    rows = [row for row in read("noise/results.csv") if row["row"] not in section.GCOMP]

    def page(*more: dict[str, str]) -> str:
        text: str = section.noise(lambda path: [*rows, *more] if path == "noise/results.csv" else [])
        return text

    assert "**Near and paper mode** have no pairs. Not run yet: near and paper on `gpt` with seed 0," in page()
    (plain,) = (row for row in rows if (row["task"], row["row"], row["seed"]) == ("gpt", "plain", "0"))
    near = plain | {"row": "near", "share": "3.4e-12", "worst_share": "0", "own_bits": "11", "sum_bits": "19.5"}
    said = page(near)
    assert "| near | 11.00 | 19.50 | 3e-10 | 0 | 1 | +0.00 (one seed) |" in said
    assert "Rows *near* and *paper* are" in said
    assert "Not run yet: paper on `gpt` with seed 0, near and paper on `gpt` with seed 1," in said
    assert "width, those of *near* of real frames" in said
    planned = [(group.task, seed, v.name) for group in section.paired.rows_module().QUEUE for seed, v in group.runs]
    every = [near | {"task": t, "row": row, "seed": str(s)} for t, s, row in planned if row in section.GCOMP]
    assert "Not run yet" not in page(*every)


def test_every_row_of_the_tables_is_run_and_has_a_place_on_the_page(series: ModuleType, results: ModuleType) -> None:
    rows = {(run.task, run.row) for name in (*series.EXPERIMENTS, *series.ON_DEMAND) for run in series.runs_of(name)}
    paper = {("powersgd-cifar", row) for row in results.published.POWERSGD_CIFAR}
    paper |= {("powersgd-cifar-300", row) for row in results.published.POWERSGD_CIFAR}
    paper |= {("powersgd-cifar-32", row) for row in ("plain", "rank 2")}
    paper |= {(f"powersgd-wikitext{x}", row) for x in ("", "-90") for row in results.published.POWERSGD_LSTM}
    paper |= {(f"gcomp-{x}-float32", row) for x in ("cifar", "sst2") for row in results.gcomp_rows.PRECISE}
    of_accordion = (results.published.ACCORDION, results.published.ACCORDION_LONG, results.published.ACCORDION_TOP_K)
    paper |= {(task, row) for tables in of_accordion for task, table in tables.items() for row in table}
    assert paper <= rows
    assert {task for task, _ in rows} == {task for task, _ in paper} | set(results.TASKS)
    assert {task for task, _ in rows} <= set(tasks.TASKS)


def test_results_that_are_there_are_not_run_again(series: ModuleType, tmp_path: Path) -> None:
    before = series.missing(["powersgd"], tmp_path, None, "")
    run = before[0]
    row = dict.fromkeys(FIELDS, "") | {"task": run.task, "row": run.row, "seed": run.seed}
    series.append(tmp_path / "powersgd" / series.RESULTS, [row], FIELDS)
    assert series.missing(["powersgd"], tmp_path, None, "") == before[1:]
    seeds = [run.seed for run in before]
    assert seeds == sorted(seeds), "one seed of everything before the second"


@pytest.mark.parametrize(
    ("task", "policy", "probe"),
    [
        ("accordion-resnet18", "accordion ~ powersgd:rank=2 ~ powersgd:rank=1 ~ epochs=1,lr_drop=1", ""),
        ("gcomp-cifar", "gcomp:ulps=256", ""),
        ("gcomp-cifar", "plain", "rates"),
    ],
)
def test_a_tiny_run(task: str, policy: str, probe: str, pictures: Path) -> None:
    run = Run("test", task, "a row", policy, probe=probe)
    row, found = running.train(run, pictures, torch.device("cpu"), limit=32, epochs=2)
    assert set(row) == set(FIELDS)
    assert math.isfinite(row["loss"])
    assert len(row["losses"].split()) == row["steps"] == 4
    assert 0 < row["mib_per_epoch"] < 7
    if policy.startswith("gcomp"):
        assert 1 < float(row["own_bits"]) < 32
    if probe:
        (_, fields, rates), (_, _, stale) = found
        assert all(set(rate) == set(fields) for rate in rates)
        assert len(rates) == 4
        assert stale
    else:
        assert not found


@pytest.fixture
def words(pictures: Path) -> Path:
    """Random words in the form of WikiText-2, beside the pictures."""
    rng = np.random.default_rng(1)
    (pictures / "wikitext2").mkdir()
    for split, lines in (("train", 700), ("valid", 20), ("test", 20)):
        text = "\n".join(" ".join(f"w{word}" for word in rng.integers(0, 50, 9)) for _ in range(lines))
        (pictures / f"wikitext2/wiki.{split}.tokens").write_text(text + "\n")
    return pictures


class Ticks:
    """A clock that goes on by a second each time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


BROKEN_OFF = {
    "rank 2": ("powersgd-cifar-300", "powersgd:rank=2", ""),
    "accordion": ("accordion-senet-300", "accordion ~ topk:ratio=0.9 ~ topk:ratio=0.1 ~ epochs=1,lr_drop=1", ""),
    "paper": ("gcomp-cifar-float32", "gcomp:mode=paper", "rates"),
    "near": ("gcomp-cifar", "gcomp:ulps=256", ""),
    "words": ("powersgd-wikitext-90", "powersgd:rank=2", ""),
}


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_a_run_that_is_broken_off_goes_on_where_it_was(name: str, words: Path) -> None:
    """Broken off after every second step, it ends with the row and the findings of one go, but for the time."""
    task, policy, probe = BROKEN_OFF[name]
    run, cpu = Run("test", task, "a row", policy, probe=probe), torch.device("cpu")
    limit = {"rank 2": 64, "words": 7}.get(name, 40)  # 16 workers take 64 pictures in a step
    whole, found = running.train(run, words, cpu, limit, 3)
    kept, ends = words / "kept", list[str]()
    while True:
        try:
            row, again = running.train(run, words, cpu, limit, 3, limits=running.Limits(3.5, kept, clock=Ticks()))
            break
        except running.BrokenOff as reason:
            ends.append(str(reason))
    assert len(ends) == (whole["steps"] - 1) // 2 >= 1, "two steps in each go"
    timed = ("seconds", "ms_gradients", "ms_exchange")
    assert {k: v for k, v in row.items() if k not in timed} == {k: v for k, v in whole.items() if k not in timed}
    assert again == found
    assert not list(kept.glob("*.pt")), "nothing stays of a run that is done"


def test_what_was_broken_off_is_not_taken_for_another_run(pictures: Path) -> None:
    run, cpu = Run("test", "gcomp-cifar", "a row", "cast"), torch.device("cpu")
    with pytest.raises(running.BrokenOff, match="of 4 steps"):
        running.train(run, pictures, cpu, 32, 2, limits=running.Limits(3.5, pictures, clock=Ticks()))
    with pytest.raises(Unsupported, match="delete it"):
        running.train(replace(run, policy="plain"), pictures, cpu, 32, 2, limits=running.Limits(3.5, pictures))


def test_a_run_that_diverges_ends_with_its_epoch(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.GcompCifar, "rate", lambda self, epoch: 1e30)
    row, _ = running.train(Run("test", "gcomp-cifar", "a row", "plain"), pictures, torch.device("cpu"), 32, 3)
    assert row["steps"] == 2
    assert not math.isfinite(row["loss"])


def test_a_tiny_run_of_gcomp_as_published(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels and zeros are all values; levels save what they save, and training by them stays close to plain."""
    monkeypatch.syspath_prepend(str(FOLDER / "gcomp"))
    published = importlib.import_module("float32")
    plain, (look,) = published.run("cifar", "plain", pictures, 2)
    assert sum(look[f"level{i}"] for i in range(4)) + look["zeros"] == pytest.approx(1, abs=1e-4)
    cut = sum(6 * i * look[f"level{i}"] for i in range(4))
    assert look["four levels"] == pytest.approx(100 * (26 - cut - 18 * look["zeros"]) / 24, abs=0.1)
    assert look["pruned, four levels"] <= look["four levels"]
    assert look["bits gcomp:mode=paper"] < look["bits gcomp:mode=lossless"]
    coded, none = published.run("cifar", "paper", pictures, 2)
    assert not none
    assert float(coded["own_bits"]) < 32
    assert float(coded["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-4)


def test_policies_in_the_results_are_those_of_the_dial(results: ModuleType) -> None:
    for row in results.Results(FOLDER)("gcomp/results.csv"):
        if row["row"] in results.gcomp_rows.DIAL:
            assert row["policy"] == results.gcomp_rows.DIAL[row["row"]][0]


def second_weights(net: pictures_module.SeNet18) -> list[torch.Tensor]:
    return [weight for name, weight in net.blocks.named_parameters() if name.endswith("conv2.weight")]


def test_senet_is_the_published_net_but_for_short_schedules() -> None:
    """Counted as in the net's public form for CIFAR; the other one has a batch norm of 512 channels more."""
    published, normed = pictures_module.SeNet18(), pictures_module.SeNet18Normed()
    assert sum(p.numel() for p in published.parameters()) == 11_260_354
    assert sum(p.numel() for p in normed.parameters()) == 11_260_354 + 2 * 512
    assert all(bool(weight.any()) for weight in second_weights(published))
    assert not any(bool(weight.any()) for weight in second_weights(normed))


def test_plans_are_compared_with_the_best_entry_of_their_menu() -> None:
    rows = [
        {"model": "m", "rate": "r", "plan": plan, "predicted_s": "1", "measured_s": str(seconds)}
        for plan, seconds in (("plain", 3), ("lossless", 2), ("keep7", 1), ("planned", 2.2), ("planned-lossy", 0.9))
    ]
    compared = importlib.import_module("espresso_section").compared(rows)
    assert [best["plan"] for _, best, _ in compared] == ["lossless", "keep7"]
    assert [round(slower, 3) for *_, slower in compared] == [0.1, -0.1]


def test_sizes_are_the_papers() -> None:
    model = ResNet18()
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    for rank, mebibytes in ((1, 4.21), (2, 7.53), (4, 14.18), (7, 24.16)):
        codec = running.policy_of(f"powersgd:rank={rank}").rules["*"].codec  # type: ignore[attr-defined]
        sent = sum(_floats(codec, p.shape) for p in model.parameters())
        assert abs(4 * 24 * sent / 2**20 - mebibytes) < 0.01


def _floats(codec: str, shape: torch.Size) -> float:
    from gradzip.codecs import parse
    from gradzip.codecs.lowrank import PowerSGD
    from gradzip.policy import small

    chosen = parse(codec)
    assert isinstance(chosen, PowerSGD)
    return shape.numel() if small(shape) else chosen.sent(shape)


def test_clusters_side_by_side(pictures: Path, results: ModuleType) -> None:
    """Four ranks are two clusters, which take two policies each; the page makes tables of their rows."""
    script = [sys.executable, str(FOLDER / "real_ranks.py"), "--data", str(pictures), "--network", "1 Gbit/s"]
    script += ["--task", "gcomp-cifar", "--limit", "32", "--epochs", "1", "--clusters", "2"]
    script += ["--policies", "plain;gcomp;torch bf16", "--csv", str(pictures / "gcomp/times.csv")]
    env = {"TMPDIR": str(pictures / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    said: list[str] = []
    ended = emulate.run(script, hosts=4, rate=None, measure=False, env=env, on_line=lambda line: said.append(str(line)))
    assert ended.exit_code == 0, "\n".join(said)
    rows = results.Results(pictures, tiny=True)("gcomp/times.csv")
    assert {row["policy"] for row in rows} == {"plain", "gcomp", "torch bf16"}
    assert {(row["ranks"], row["beside"], row["replicas_differing"]) for row in rows} == {("2", "1", "0")}
    assert {row["steps"] for row in rows} == {"4"}
    page = results.page(results.Results(pictures, tiny=True))
    for row in rows:
        assert f"| `{row['policy']}` |" in page


def test_losses_over_wall_time(results: ModuleType, tmp_path: Path) -> None:
    """Policies in one order, moments that all of them reached, a dash where no step had ended."""
    common = {"network": "1 Gbit/s", "device": "a GPU", "beside": "3", "replicas_differing": "0", "value": "5"}
    slow = {"policy": "plain", "steps": "2", "median_ms": "3000", "ratio": "", "seconds": "8", "losses": "4:9.5 8:9"}
    fast = {"policy": "gcomp:keep=7", "steps": "3", "median_ms": "500", "ratio": "2.9", "seconds": "9"}
    rows = [common | fast | {"losses": "1:9.5 3:8 9:7"}, common | slow]
    (tmp_path / "gpt").mkdir()
    with (tmp_path / "gpt/results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = results.gpt(results.Results(tmp_path))
    assert "loss after 2 s | loss after 4 s | loss after 8 s" in text
    assert "4 clusters ran side by side" in text
    plain, keep = (line for line in text.splitlines() if line.startswith("| `"))
    assert plain == "| `plain` | 2 | 3000 | 1 | – | 9.50 | 9.00 | 5.000 | 0 |"
    assert keep == "| `gcomp:keep=7` | 3 | 500 | 2.90 | 9.50 | 8.00 | 8.00 | 5.000 | 0 |"


def test_the_picture_of_losses_over_time_has_a_panel_for_each_network(results: ModuleType, tmp_path: Path) -> None:
    """Of policies that were run; a network with one policy alone compares nothing."""
    wall = importlib.import_module("wall_picture")
    common = {"task": "resnet50-cifar", "losses": "1:2.5 2:2.25 4:1.5"}
    rows = [common | {"network": "1 Gbit/s", "policy": policy} for policy in ("plain", "noise", "gcomp")]
    rows.append(common | {"network": "10 Gbit/s", "policy": "plain"})
    (tmp_path / "wall").mkdir()
    with (tmp_path / "wall/results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert [title for title, _ in wall.panels(results.Results(tmp_path))] == ["ResNet-50, CIFAR-10, 1 Gbit/s"]
    text = wall.wall(results.Results(tmp_path))
    assert text.count("<polyline") == 2
    assert ">noise<" in text
    assert ">gcomp<" not in text
