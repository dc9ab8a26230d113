"""Compressed collectives between real processes: all routes, replicas and packings."""

from __future__ import annotations

import pytest
from exchanges import covering, random_messages, run_routes
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
    assert results[0]["finite"] == [True, False, False, True]
    assert all(result == results[0] for result in results)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_reductions(world: int) -> None:
    results = run_ranks(world, random_messages, world, 340, 3, deadline=1000)
    assert results[0]["differing"] == []
    assert all(result == results[0] for result in results)
