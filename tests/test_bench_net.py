"""bench net: what it counts as wrong, what it counts as sent, and what ranks should have in common."""

from __future__ import annotations

from typing import Any

import torch
from conftest import gradient
from ranks import run_ranks

from gradzip.bench import net
from gradzip.bench.sample import Sample
from gradzip.option import Option


def measured(rank: int) -> dict[str, Any]:
    bench = net.Bench(Sample("made up", gradient(40_000)), torch.device("cpu"))
    rows = bench.measure(["gcomp:mode=lossless", "gcomp:keep=7", "cast/allreduce", "topk", "noise"], rounds=1)
    bench.average(Option.parse("gcomp:mode=lossless/ring"))
    off = float((bench.result.double() - bench._mean).abs().max() / bench._magnitude.max())
    bench._mean[:10] += 1  # now ten values of every exact exchange are wrong
    again = bench.measure(["gcomp:mode=lossless"], rounds=1)
    return {"rows": rows, "again": again, "pairs": net.pair_bandwidths(), "off": off}


def test_exchanges_are_verified_and_counted() -> None:
    first, second = run_ranks(2, measured)
    assert first["rows"] == second["rows"], "all ranks report the same"
    rows = {(row.codec, row.route): row for row in first["rows"]}
    assert [row.wrong for row in first["rows"]] == [0, 0, 0, 0, 0, None, None]
    assert [row.wrong for row in first["again"]] == [10, 10, 10]
    native, lossless = rows["native fp32", "native"], rows["gcomp:mode=lossless", "alltoall"]
    assert native.sent == 160_000  # with two ranks a ring sends the gradient once
    assert native.ratio == native.speedup == native.of_ideal == 1
    assert 100_000 < lossless.sent < 155_000
    assert lossless.ratio == native.sent / lossless.host_sent
    assert rows["topk", "allgather"].sent < 5_000
    assert 15_000 < rows["noise", "alltoall"].sent < 35_000
    assert first["off"] < 1e-6
    for i, line in enumerate(first["pairs"]):
        assert [rate > 0 for rate in line] == [i != j for j in range(2)]


def test_a_sample_is_repeated_where_it_is_too_short() -> None:
    sample = net.sized(Sample("made up", torch.arange(4.0)), 10)
    assert sample.values.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert net.sized(sample, 3).values.tolist() == [0, 1, 2]


def test_differences_between_ranks_are_named() -> None:
    cards = [net.identity_card("1.0"), net.identity_card("1.0"), net.identity_card("1.1")]
    assert net.differences(cards[:2]) == []
    assert net.differences(cards) == ["ranks differ in gradzip: 1.0 on rank 0, 1; 1.1 on rank 2"]
