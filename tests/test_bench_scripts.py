"""Benchmarks that need no GPU run to their end; what they measure here says nothing."""

from __future__ import annotations

from pathlib import Path

from scripts import run_scripts

BENCH = Path(__file__).parent.parent / "bench"


def rows(ranks: int, command: str) -> list[dict[str, str]]:
    """What the script printed, row by row."""
    script, *options = command.split()
    ended = run_scripts(ranks, BENCH / script, *options)
    assert [rank.code for rank in ended] == [0] * ranks, "\n".join(rank.err for rank in ended)
    lines = "".join(rank.out for rank in ended).splitlines()
    return [dict(column.split("=", 1) for column in line.split("  ")) for line in lines]


def test_exchange_cpu_measures_the_captured_gradient(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    found = rows(1, f"exchange_cpu.py --ranks 2 --rounds 2 --codecs noise --csv {table}")  # starts its ranks by itself
    assert [(row["codec"], row["route"]) for row in found] == [("native fp32", "native"), ("noise", "alltoall")]
    assert len(table.read_text().splitlines()) == 1 + len(found)


def test_exchange_cpu_measures_models_of_many_tensors() -> None:
    found = rows(1, "exchange_cpu.py --ranks 2 --rounds 2 --codecs noise --model 8x32x32")
    assert [(row["codec"], row["route"]) for row in found] == [("native fp32", "8x32x32"), ("noise", "8x32x32")]
    assert {row["bytes"] for row in found} == {str(8 * 32 * 32 * 4)}


def test_steps_trains_plain_and_by_codecs() -> None:
    found = rows(2, "steps.py --model small --steps 2 --warm 1 --policies noise --torch=")
    assert [row["what"] for row in found] == ["plain", "noise"]
    assert all(row["replicas_differing"] == "0" and row["outcome"] == "trained" for row in found)


def test_hook_cost_times_the_hook_of_a_single_rank() -> None:
    plain, coded = rows(1, "hook_cost.py --policies powersgd:rank=4 --steps 1 --warm 1 --rounds 1 --length 16 --alone")
    assert (plain["policy"], coded["policy"]) == ("plain", "powersgd:rank=4")
    assert coded["verified"] == "finite"
    assert float(coded["hook_ms"]) > float(plain["hook_ms"]) == 0


def test_own_trains_by_each_policy() -> None:
    found = rows(1, "own.py --gradients bf16 --ranks 2 --steps 2 --width 32 --blocks 1")
    looked = {row["codec"]: float(row["look_ms"]) > 0 for row in found}
    assert looked == {
        "gcomp:mode=lossless": False,
        "gcomp:own=near": False,
        "gcomp:own=lossless": False,
        "gcomp": True,
        "gcomp:ulps=256": True,
    }
