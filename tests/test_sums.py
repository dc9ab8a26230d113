"""Sums whose order does not follow from the device, the shape, or what lies beside them."""

from __future__ import annotations

import pytest
import torch
from conftest import gradient, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from gradzip.codecs import sums
from gradzip.codecs.sums import ordered_sum


def slowly(x: torch.Tensor) -> torch.Tensor:
    """The order as sums.py says it, one number after the other."""
    rows = [[float(v) for v in row] for row in pad(x.double(), (0, -len(x) % 32)).view(-1, 32)]
    while len(rows) > 1:
        rows += [[0.0] * 32 for _ in range(-len(rows) % 32)]
        rows = [halved(rows[first : first + 32]) for first in range(0, len(rows), 32)]
    lanes = [[value] for value in (rows[0] if rows else [])]
    return torch.tensor(halved(lanes) if lanes else [0.0], dtype=torch.float64)


def halved(rows: list[list[float]]) -> list[float]:
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [[a + b for a, b in zip(*pair)] for pair in zip(rows[:half], rows[half:])]
    return rows[0]


@settings(deadline=None, max_examples=60)
@given(numel=st.integers(0, 3000), seed=st.integers(0, 100))
def test_the_order_is_what_is_written(numel: int, seed: int) -> None:
    x = gradient(numel, seed).abs()
    assert same_bits(ordered_sum(x[None]), slowly(x))


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1024, 1025, 40_000, 65_536, 65_537, 200_001])
def test_devices_agree_and_rows_do_not_touch_each_other(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack([gradient(numel, seed) for seed in range(3)])
    found = ordered_sum(x)
    assert same_bits(torch.cat([ordered_sum(row[None]) for row in x]), found)
    assert torch.allclose(found, x.double().sum(1))
    assert same_bits(ordered_sum(pad(x, (0, 7777))), found), "zeros at the end change nothing"
    assert same_bits(sums.on_device(x), found)
    if torch.cuda.is_available():
        assert same_bits(ordered_sum(x.cuda()).cpu(), found)


def test_numbers_that_are_not_finite_go_through() -> None:
    x = torch.ones(4, 100)
    x[1, 5], x[2, 6], x[3, 7], x[3, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    assert torch.isnan(ordered_sum(x)).tolist() == [False, True, False, True]
    assert float(ordered_sum(x)[2]) == torch.inf
