"""experiments/noise/analysis.py: slopes and intervals of made-up rows whose answer is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "experiments/noise"))
import analysis


def rows(loss: dict[str, list[float]]) -> list[dict[str, str]]:
    """A row for each seed; a budget's share is 90 % of it."""
    found = []
    for row, values in loss.items():
        budget = float(row.split()[1]) / 100 if row.startswith("noise") else 0.0
        for seed, value in enumerate(values):
            found.append(
                {"task": "t", "row": row, "seed": str(seed), "budget": str(budget), "share": str(0.9 * budget)}
                | {"loss": str(value)}
            )
    return found


def test_slope_of_linear_costs_is_found_and_accepted() -> None:
    made = rows({
        "plain": [2.0, 4.0, 3.0],
        **{f"noise {b} %": [p * (1 + 0.02e-2 * 0.9 * b) for p in (2.0, 4.0, 3.0)] for b in (1, 3, 10)},
    })  # fmt: skip
    found = analysis.slope(made, "t")
    assert found is not None
    assert found.slope.mean == pytest.approx(0.02)
    assert found.slope.half == pytest.approx(0, abs=1e-9)
    assert found.curvature is not None
    assert found.curvature.mean == pytest.approx(0, abs=1e-9)
    assert found.at_one.mean == pytest.approx(0.018)
    assert found.accepted


def test_one_seed_is_never_accepted_and_a_steep_slope_is_not() -> None:
    single = analysis.slope(rows({"plain": [2.0], "noise 1 %": [2.0]}), "t")
    assert single is not None
    assert not single.accepted
    steep = analysis.slope(rows({"plain": [2.0, 2.0], "noise 1 %": [2.01, 2.01], "noise 10 %": [2.1, 2.1]}), "t")
    assert steep is not None
    assert not steep.accepted


def test_seed_without_the_largest_budget_has_no_slope() -> None:
    whole = {"plain": [2.0, 2.0], "noise 1 %": [2.0, 2.0], "noise 30 %": [2.01, 2.01]}
    begun = whole | {"plain": [2.0] * 3, "noise 1 %": [2.0, 2.0, 2.2]}
    found, expected = (analysis.slope(rows(made), "t") for made in (begun, whole))
    assert found is not None
    assert expected is not None
    assert found.slope == expected.slope


def test_curvature_of_quadratic_costs() -> None:
    shares = {b: 0.9 * b for b in (1, 3, 10, 30)}
    made = rows({"plain": [1.0] * 2, **{f"noise {b} %": [1 + 0.003e-2 * s * s] * 2 for b, s in shares.items()}})
    found = analysis.slope(made, "t")
    assert found is not None
    assert found.curvature is not None
    assert found.curvature.mean == pytest.approx(0.003)


def test_interval_is_students() -> None:
    found = analysis.interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.303 / 3**0.5)


def test_seeds_needed_are_the_fewest_whose_bound_is_below_the_limit() -> None:
    spread = [0.02, 0.05, 0.08]  # standard deviation 0.03
    found = analysis.interval(spread)
    assert analysis.deviation(found) == pytest.approx(0.03)
    count = analysis.seeds_needed(found)
    assert count == 4
    assert 0.05 + 3.182 * 0.03 / 4**0.5 < analysis.LIMIT < 0.05 + 4.303 * 0.03 / 3**0.5
    assert analysis.seeds_needed(analysis.interval([0.2, 0.3])) is None
    assert analysis.seeds_needed(analysis.interval([0.01])) is None


def test_noise_scale_is_that_of_the_model() -> None:
    g, s, batch, world = 2.0, 96.0, 16, 4
    row = {"task": "t", "row": "plain", "workers": str(world)}
    row |= {"own_square": str(g + s / batch), "signal": str(g + s / (world * batch))}
    found = analysis.noise_scale([row], "t", batch)
    assert found is not None
    assert found == pytest.approx((s / g, world * batch / (s / g)))


def test_largest_budget_has_the_limit_as_its_upper_bound() -> None:
    assert analysis.largest_budget(analysis.Interval(0.15, 0.05, 8)) == pytest.approx(0.5)
    assert analysis.largest_budget(analysis.Interval(-0.2, 0.1, 8)) == pytest.approx(1.0), "noise is no help"
    assert analysis.largest_budget(analysis.Interval(0.001, 0.001, 8)) == 30.0
    assert analysis.largest_budget(analysis.Interval(0.1, float("inf"), 1)) is None
