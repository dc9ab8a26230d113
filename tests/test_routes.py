"""Routes as data: text form, validity, and Espresso's tree; test_programs.py carries out every route of it."""

from __future__ import annotations

import pytest

from gradzip.errors import Unsupported
from gradzip.routes import NAMED, Route, Step, tree


def test_tree_has_the_published_size() -> None:
    both, gpu = tree(), tree(("gpu",))
    assert len(set(both)) == len(both) == 4341
    assert len(set(gpu)) == len(gpu) == 174
    assert sum(not route.compresses for route in gpu) == 9


def test_every_route_of_the_tree_parses_back() -> None:
    for route in tree():
        assert Route.parse(str(route)) == route


@pytest.mark.parametrize("name", sorted(NAMED))
def test_names_parse_to_their_routes(name: str) -> None:
    assert Route.parse(name) == NAMED[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alltoal", "did you mean 'alltoall'"),
        ("enc.cpu > a2a.flat", "ends before every rank"),
        ("enc.cpu > enc.gpu", "the data is coded"),
        ("dec.cpu > ar.flat", "the data is plain"),
        ("enc.cpu > ar.flat > dec.cpu", "coded data cannot go by ar"),
        ("a2a.flat > ag.flat", "plain data cannot go by a2a"),
        ("ag.flat", "nothing to join"),
        ("ar.intra", "must sum over the flat group"),
        ("ar.flat > ar.flat", "has its sum already"),
        ("enc.cpu > a2a.flat > ring.flat", "follows enc directly"),
        ("ar.nowhere", "is done in one of flat"),
        ("enc.tpu > ag.flat > dec.gpu", "is done in one of cpu, gpu"),
    ],
)
def test_bad_routes_say_why(text: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Route.parse(text)


def test_route_properties() -> None:
    route = Route.parse("hierarchical")
    assert route.hierarchical
    assert route.compresses
    assert route.encodes == 2
    assert {step.where for step in route.on("gpu").steps if step.kind in ("enc", "dec")} == {"gpu"}
    assert not Route((Step("ar", "flat"),)).compresses
