"""What each mode maps a value to, against independent arithmetic in float64.

The formulas here know floats as numbers; map_values knows them as bits.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_bits, same_bits, special
from hypothesis import given
from hypothesis import strategies as st

import gradzip
from gradzip import Context, parse
from gradzip.engines.layout import COARSEST, EXACT, Job
from gradzip.engines.reference_values import floor_values, map_values
from gradzip.errors import Unsupported

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 2.0**-126, -(2.0**-126), 2.0**-149, 1.5, 2.5, -3.5, 3.4028234663852886e38, -3.4028234663852886e38]
)
floors = st.integers(-128, 127)
LARGEST = float(np.finfo(np.float32).max)


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def mapped(x: np.ndarray, mode: str, floor: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """What map_values makes of float32 values, as float64."""
    job = Job(mode, **options)
    given_floor = None if floor is None else torch.from_numpy(np.asarray(floor, np.int8))
    result = map_values(bits_of(x), job, floor_values(given_floor, job))
    return result.view(np.float32).astype(np.float64)


def to_grid(x: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    """The nearest multiple of step, ties to even ones; cut where that would not be finite. float64 is exact here."""
    multiple = x / step
    nearest = np.rint(multiple) * step
    return np.where(np.abs(nearest) > LARGEST, np.trunc(multiple) * step, nearest)


def normal(x: np.ndarray) -> np.ndarray:
    return np.abs(x) >= 2.0**-126


def last_place(x: np.ndarray, keep: int) -> np.ndarray:
    """The distance of neighbours around x among floats of `keep` mantissa bits."""
    return 2.0 ** (np.frexp(np.where(x == 0, 1, x))[1] - 1 - keep)


@given(st.lists(st.tuples(floats32, floors), min_size=1, max_size=60))
def test_near_is_the_nearest_multiple(pairs: list[tuple[float, int]]) -> None:
    x, floor = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    exact = np.where(normal(x), x, 0.0)
    expected = np.where(normal(x) & (floor != EXACT), to_grid(x, 2.0 ** np.minimum(floor, COARSEST)), exact)
    assert np.array_equal(mapped(x, "near", floor), expected)


@given(
    st.lists(st.integers(-20, 20) | st.integers(-(1 << 24), 1 << 24), min_size=1, max_size=60),
    st.integers(-100, 90),
    st.integers(1, 4) | st.integers(1, 22),
)
def test_near_ties_go_to_even_multiples(numbers: list[int], exponent: int, above: int) -> None:
    """Small integers times a power of two lie right between the grid's points again and again."""
    x = np.array(numbers) * 2.0**exponent
    floor = np.full(x.shape, exponent + above)
    above = min(exponent + above, COARSEST) - exponent  # no grid is coarser
    grid = 2.0 ** (exponent + above)
    halves = np.array(numbers) % (1 << above) == 1 << (above - 1)
    result = mapped(x, "near", floor)
    assert np.array_equal(result, to_grid(x, grid))
    assert np.all((result / grid)[halves] % 2 == 0)
    assert np.all(np.abs(result - x) <= grid / 2)


@given(st.lists(floats32, min_size=1, max_size=60), st.integers(0, 23))
def test_keep_rounds_to_nearest_even(values: list[float], keep: int) -> None:
    x = np.array(values)
    expected = np.where(normal(x), to_grid(x, last_place(x, keep)), 0.0)
    assert np.array_equal(mapped(x, "keep", keep=keep), expected)


@pytest.mark.parametrize("keep", range(23))
def test_keep_ties_go_to_even_multiples(keep: int) -> None:
    """With no bit kept that is the larger magnitude: 1.5 lies between one and two steps of 1."""
    steps = np.array([1, 1 + 2.0**-keep, 1.5, 2 - 2.0**-keep])
    steps = steps[(steps < 2) & (steps * 2.0**keep % 1 == 0)]
    ties = np.outer(2.0 ** np.arange(-126, 127), steps + 2.0 ** -(keep + 1)).ravel()
    result = mapped(ties, "keep", keep=keep)
    assert np.array_equal(result, to_grid(ties, last_place(ties, keep)))
    assert np.all(result / last_place(ties, keep) % 2 == 0)
    assert np.array_equal(mapped(-ties, "keep", keep=keep), -result)


@given(st.lists(floats32, min_size=1, max_size=60), st.integers(0, 23))
def test_keep_can_cut(values: list[float], keep: int) -> None:
    x = np.array(values)
    step = last_place(x, keep)
    expected = np.where(normal(x), np.trunc(x / step) * step, 0.0)
    assert np.array_equal(mapped(x, "keep", keep=keep, truncate=True), expected)


@given(st.lists(st.tuples(floats32, floors), min_size=1, max_size=60))
def test_paper_cuts_by_its_level(pairs: list[tuple[float, int]]) -> None:
    """GComp's levels: 0, 6, 12 or 18 bits go, by how far the value's exponent is below its reach."""
    x, reach = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    exponent = np.frexp(np.where(x == 0, 1, x))[1] - 1
    distance = np.where(reach == EXACT, -1000, np.minimum(reach, COARSEST) - exponent - 1)
    dropped = np.select([distance >= 18, distance >= 12, distance >= 6], [18, 12, 6], 0)
    step = 2.0 ** (exponent - 23 + dropped)
    expected = np.where(normal(x), np.trunc(x / step) * step, 0.0)
    assert np.array_equal(mapped(x, "paper", reach), expected)


MODES = [
    ("near", {}),
    ("paper", {}),
    *(("keep", {"keep": k, "truncate": t}) for k in (0, 1, 7, 22, 23) for t in (0, 1)),
]


@pytest.mark.parametrize(("mode", "options"), MODES)
@pytest.mark.parametrize("floor", [-128, -127, -20, 0, 100, 103])
def test_values_that_are_no_ordinary_numbers(mode: str, options: dict[str, Any], floor: int) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-149, -(2.0**-127)], np.float32)
    negative_nan = np.array([0xFF812345], np.uint32).view(np.float32)
    job = Job(mode, **options)
    both = np.concatenate([x, negative_nan])
    reach = np.full(both.shape, floor, np.int64)
    result = map_values(bits_of(both), job, reach if mode != "keep" else None)
    expected = [0x7FC00000, 0x7F800000, 0xFF800000, 0, 0, 0, 0]
    assert list(result[:7]) == expected, "quiet NaN, infinities as they are, +0 for the rest"
    assert result[7] == 0xFFC00000, "a NaN keeps its sign and nothing else"


@pytest.mark.parametrize(("mode", "options"), MODES)
def test_no_finite_value_becomes_infinite(mode: str, options: dict[str, Any]) -> None:
    x = bits_of(np.array([LARGEST, -LARGEST, 2.0**127, -1.9 * 2.0**127]))
    for floor in range(90, COARSEST + 1):
        reach = np.full(x.shape, floor, np.int64)
        result = map_values(x, Job(mode, **options), reach if mode != "keep" else None).view(np.float32)
        assert np.isfinite(result).all()
        assert np.array_equal(np.sign(result), np.sign(x.view(np.float32)))


@pytest.mark.parametrize(("mode", "options"), [("lossless", {}), *MODES])
def test_mapping_twice_is_mapping_once(mode: str, options: dict[str, Any]) -> None:
    x = torch.cat([random_bits(20_000), special(500), torch.randn(5000)]).view(torch.int32).numpy().view(np.uint32)
    for seed in range(3):
        job = Job(mode, **options)
        floor = np.random.default_rng(seed).integers(-128, COARSEST + 1, x.shape) if mode in ("near", "paper") else None
        once = map_values(x, job, floor)
        assert np.array_equal(map_values(once, job, floor), once)


def test_keep_23_changes_only_what_lossy_modes_change() -> None:
    x = torch.cat([random_bits(20_000), special(500)])
    y = gradzip.decode(gradzip.encode(x, "gcomp:keep=23"))
    ordinary = x.isfinite() & (x.abs() >= 2.0**-126)
    assert same_bits(y[ordinary], x[ordinary])


def test_keep_7_is_a_cast_to_bfloat16_and_back() -> None:
    x = torch.randn(50_000) * torch.exp2(torch.randint(-60, 60, (50_000,)))
    assert torch.equal(gradzip.decode(gradzip.encode(x, "gcomp:keep=7")), x.bfloat16().float())


@given(st.integers(0, 1 << 20), st.integers(0, 8))
def test_sums_of_grid_values_stay_on_the_grid(seed: int, shift: int) -> None:
    """What near mode's exchange rests on: N coded gradients add up, and the sum is coded without further loss."""
    rng = np.random.default_rng(seed)
    floor = torch.from_numpy(rng.integers(-30, -20, 200).astype(np.int8))
    codec = parse("gcomp")
    total = torch.zeros(200)
    for _ in range(4):
        x = torch.from_numpy(rng.normal(size=200).astype(np.float32)) * 1e-3
        codec.decode(codec.encode(x, Context(floor=floor)), Context(floor=floor), out=total, add=True)
    again = codec.decode(codec.encode(total, Context(floor=floor)), Context(floor=floor))
    assert torch.equal(again, total)
    coarse = Context(floor=floor, shift=shift)
    steps = codec.decode(codec.encode(total, coarse), coarse).double() / torch.exp2(floor.double() + shift)
    assert torch.equal(steps, steps.round())


@pytest.mark.parametrize("shift", [-1, 128, 1 << 40, 1.5, "2"])
def test_absurd_shifts_are_refused(shift: Any) -> None:
    with pytest.raises(Unsupported, match=rf"shift={re.escape(repr(shift))}.*0 to 127"):
        Context(shift=shift)
    later = Context()
    later.shift = shift
    for spec in ("gcomp:mode=lossless", "gcomp:keep=7"):
        frame = gradzip.encode(torch.ones(5), spec)
        with pytest.raises(Unsupported, match="0 to 127"):
            gradzip.parse(spec).encode(torch.ones(5), later)
        with pytest.raises(Unsupported, match="0 to 127"):
            gradzip.parse(spec).decode(frame, later)
