"""Compressed collectives between real processes: all routes, replicas, packings, delays, and how they end."""

from __future__ import annotations

import pytest
from exchanges import covering, delayed, random_messages, run_routes
from ranks import run_ranks

from gradzip.routes import NAMED, tree


def test_routes_that_cover_the_tree_give_the_mean() -> None:
    """Four ranks on two hosts, over Gloo; the slow test runs all 4341."""
    chosen = [str(route) for route in covering(tree())]
    assert 20 < len(chosen) < 200
    for wrong in run_ranks(4, run_routes, [*chosen, *NAMED], 41):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("numel", [1, 41])
def test_every_route_of_the_tree_gives_the_mean(numel: int) -> None:
    for wrong in run_ranks(4, run_routes, [str(route) for route in tree()], numel, deadline=1000):
        assert wrong == []


@pytest.mark.parametrize("world", [3])
def test_replicas_are_identical_however_tensors_are_packed(world: int) -> None:
    results = run_ranks(world, random_messages, 5, 40, 2)
    assert results[0]["differing"] == []
    assert all(result == results[0] for result in results)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_reductions(world: int) -> None:
    results = run_ranks(world, random_messages, world, 340, 3, deadline=1000)
    assert results[0]["differing"] == []
    assert all(result == results[0] for result in results)


def check_delays(steps: int, longest: float, deadline: float) -> None:
    results = run_ranks(4, delayed, steps, longest, deadline=deadline)
    for result in results:
        assert result["correct"]
        assert result["seen"] == results[0]["seen"], "the order of issue depends on timing"
    assert len(results[0]["seen"]["code-0"]) == 8 * steps


def test_delays_change_nothing() -> None:
    check_delays(steps=4, longest=0.01, deadline=100)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_long_delays_change_nothing() -> None:
    check_delays(steps=500, longest=0.05, deadline=2300)
