"""Routes as data: the steps by which gradients become their mean, and the tree of all routes that make sense.

A route is a list of steps; its text form is `rs.intra > enc.gpu > a2a.inter > dec.gpu > ag.inter > ag.intra`.
A step codes on a device or communicates in a group of ranks:

    enc, dec    encode; decode and add up              .cpu  .gpu
    ar          all-reduce, of plain values only       .flat .intra .inter
    rs, ag      reduce-scatter, then all-gather
    red, bc     reduce to the first rank, then broadcast
    a2a, ag     all-to-all, the reduce-scatter of coded data
    gat, bc     gather, the reduce of coded data
    ring, ag    after enc: partial sums go from rank to rank, decoded, added to and encoded anew at each

`ag` either joins parts that `rs` or `a2a` dealt out in the same group, or, where nothing was dealt out, hands every
rank's coded data to all. Programs are compiled from these lists (exchange/compiler.py), and the planner times them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from .errors import Unsupported, nearest

DEVICES = ("cpu", "gpu")
GROUPS = ("flat", "intra", "inter")
CODING = ("enc", "dec")
FACTORS = "factors"  # where the codec asks for one average after the other, instead of a route
PLAIN = ("ar", "rs", "ag", "red", "bc")
CODED = ("a2a", "ag", "gat", "bc", "ring")
_SECOND = {"rs": "ag", "a2a": "ag", "ring": "ag", "red": "bc", "gat": "bc"}


@dataclass(frozen=True)
class Step:
    """One step of a route: what, and on which device or in which group."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.where}"

    @classmethod
    def parse(cls, text: str) -> Step:
        kind, _, where = text.strip().partition(".")
        places = DEVICES if kind in CODING else GROUPS
        if kind not in (*CODING, *PLAIN, *CODED):
            raise Unsupported(f"unknown step {text!r}{nearest(kind, (*CODING, *PLAIN, *CODED))}")
        if where not in places:
            raise Unsupported(f"step {text!r}: {kind} is done in one of {', '.join(places)}{nearest(where, places)}")
        return cls(kind, where)


@dataclass(frozen=True)
class Route:
    """A list of steps that ends with the mean on every rank; `Route.parse(str(route)) == route`."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        _check(self.steps)

    def __str__(self) -> str:
        return " > ".join(map(str, self.steps))

    @classmethod
    def parse(cls, text: str) -> Route:
        """The route of a text form, or of a name: `Route.parse("alltoall")`."""
        if text in NAMED:
            return NAMED[text]
        if ">" not in text and "." not in text:
            raise Unsupported(f"unknown route {text!r}{nearest(text, NAMED)}; there are {', '.join(NAMED)}, or steps")
        return _named(text)

    @property
    def compresses(self) -> bool:
        return any(step.kind == "enc" for step in self.steps)

    @property
    def encodes(self) -> int:
        """How often a value is encoded on its way: each one may lose something."""
        return sum(step.kind == "enc" for step in self.steps)

    @property
    def hierarchical(self) -> bool:
        return any(step.where in ("intra", "inter") for step in self.steps)

    @property
    def joins(self) -> tuple[bool, ...]:
        """For each step, whether it is the second one of its group."""
        return _check(self.steps)

    def on(self, device: str) -> Route:
        """The same route with all coding on one device."""
        return Route(tuple(Step(s.kind, device) if s.kind in CODING else s for s in self.steps))


@functools.lru_cache(maxsize=1 << 13)  # every message asks, and the tree has 4341
@cache
def _check(steps: tuple[Step, ...]) -> tuple[bool, ...]:
    """Every list that passes leaves all ranks with the sum over all of them. Tells which steps are second ones."""
    coded = False
    second = [False] * len(steps)
    open_splits: list[tuple[str, str]] = []  # (first step's kind, group), innermost last
    reduced: set[str] = set()
    for number, step in enumerate(steps):
        here = f"step {number + 1} ({step}) of {' > '.join(map(str, steps))!r}"
        if step.kind in CODING:
            if coded == (step.kind == "enc"):
                raise Unsupported(f"{here}: the data is {'coded' if coded else 'plain'} there")
            coded = not coded
            continue
        if step.kind not in (CODED if coded else PLAIN):
            raise Unsupported(f"{here}: {'coded' if coded else 'plain'} data cannot go by {step.kind}")
        if step.kind == "ring" and steps[number - 1].kind != "enc":
            raise Unsupported(f"{here}: a ring encodes as it goes, so it follows enc directly")
        joins = bool(open_splits) and open_splits[-1][1] == step.where and step.kind == _SECOND[open_splits[-1][0]]
        if joins:
            open_splits.pop()
            second[number] = True
        elif step.where in reduced:
            raise Unsupported(f"{here}: the {step.where} group has its sum already")
        elif step.kind in _SECOND:
            open_splits.append((step.kind, step.where))
            reduced.add(step.where)
        elif step.kind == "ar" or (coded and step.kind == "ag"):
            reduced.add(step.where)
        else:
            raise Unsupported(f"{here}: there is nothing to join")
    if coded or open_splits:
        raise Unsupported(f"{' > '.join(map(str, steps))!r} ends before every rank has the whole sum in plain form")
    if reduced not in ({"flat"}, {"intra", "inter"}):
        raise Unsupported(f"{' > '.join(map(str, steps))!r} must sum over the flat group, or over intra and inter")
    return tuple(second)


# --- Espresso's tree (EuroSys'23, Tables 2 and 3) ------------------------------------------------------------------
# Each function yields the ways to finish a route from one point on; `first` is the kind of the first step in the
# group whose second step is still to come, which fixes that second step.

_Tail = tuple[Step, ...]


def _coding(kind: str, devices: tuple[str, ...]) -> list[_Tail]:
    return [(Step(kind, device),) for device in devices]


class _Tree:
    def __init__(self, devices: tuple[str, ...]) -> None:
        self.enc = _coding("enc", devices)
        self.dec = _coding("dec", devices)

    def start(self) -> Iterator[_Tail]:
        yield (Step("ar", "flat"),)
        for first in ("rs", "red"):
            yield from _join([(Step(first, "flat"),)], self.second(first, "flat"))
        yield from _join(self.enc, [(Step("ag", "flat"),)], self.dec)
        for first in ("a2a", "gat"):
            yield from _join(self.enc, [(Step(first, "flat"),)], self.second_coded(first, "flat"))
        for first in ("rs", "red"):
            yield from _join([(Step(first, "intra"),)], self.inter(first))
            yield from _join([(Step(first, "intra"),)], self.enc, self.inter_coded(first))
        for first in ("a2a", "gat"):
            head = list(_join(self.enc, [(Step(first, "intra"),)]))
            yield from _join(head, self.dec, self.inter(first))
            yield from _join(head, self.dec, self.enc, self.inter_coded(first))
            yield from _join(head, self.inter_coded(first))

    def second(self, first: str, group: str) -> list[_Tail]:
        """Plain data before the last step of `group`."""
        join = [(Step(_SECOND[first], group),)]
        return [*join, *_join(self.enc, join, self.dec)]

    def second_coded(self, first: str, group: str) -> list[_Tail]:
        join = [(Step(_SECOND[first], group),)]
        return [*_join(join, self.dec), *_join(self.dec, self.second(first, group))]

    def inter(self, intra: str) -> list[_Tail]:
        """Plain data between the two intra steps."""
        ways = list(_join([(Step("ar", "inter"),)], self.second(intra, "intra")))
        for first in ("rs", "red"):
            ways += _join([(Step(first, "inter"),)], self.inter_second(first, intra))
        return ways

    def inter_coded(self, intra: str) -> list[_Tail]:
        ways = list(_join([(Step("ag", "inter"),)], self.second_coded(intra, "intra")))
        for first in ("a2a", "gat"):
            head, join = [(Step(first, "inter"),)], [(Step(_SECOND[first], "inter"),)]
            ways += _join(head, join, self.second_coded(intra, "intra"))
            ways += _join(head, self.dec, self.inter_second(first, intra))
        return ways

    def inter_second(self, first: str, intra: str) -> list[_Tail]:
        join = [(Step(_SECOND[first], "inter"),)]
        return [
            *_join(join, self.second(intra, "intra")),
            *_join(self.enc, join, self.second_coded(intra, "intra")),
        ]


def _join(*parts: Iterable[_Tail]) -> Iterator[_Tail]:
    for choice in itertools.product(*parts):
        yield tuple(itertools.chain.from_iterable(choice))


def tree(devices: tuple[str, ...] = DEVICES) -> list[Route]:
    """Every route of Espresso's decision tree: 4341 with both devices, 174 with one."""
    return [Route(steps) for steps in _Tree(devices).start()]


@functools.lru_cache(maxsize=1 << 13)
def _named(text: str) -> Route:
    return Route(tuple(Step.parse(part) for part in text.split(">")))


NAMED = {
    "allreduce": _named("ar.flat"),
    "ring": _named("enc.cpu > ring.flat > ag.flat > dec.cpu"),
    "alltoall": _named("enc.cpu > a2a.flat > dec.cpu > enc.cpu > ag.flat > dec.cpu"),
    "allgather": _named("enc.cpu > ag.flat > dec.cpu"),
    "gather": _named("enc.cpu > gat.flat > dec.cpu > enc.cpu > bc.flat > dec.cpu"),
    "hierarchical": _named("rs.intra > enc.cpu > a2a.inter > dec.cpu > enc.cpu > ag.inter > dec.cpu > ag.intra"),
    "hierarchical_ring": _named("rs.intra > enc.cpu > ring.inter > ag.inter > dec.cpu > ag.intra"),
    "hierarchical_allgather": _named("rs.intra > enc.cpu > ag.inter > dec.cpu > ag.intra"),
}
