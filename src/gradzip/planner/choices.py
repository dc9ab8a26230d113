"""What a unit may do: every route of Espresso's tree with every codec on offer, and two extensions that are counted
apart: `allreduce` of summable payloads, and `factors` for low rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ..codecs import Codec, parse
from ..codecs.gcomp import GComp
from ..errors import CodecError, PlanError, nearest
from ..option import Option
from ..routes import NAMED, Route, tree
from .cost import Priced, Pricing
from .network import Topology
from .profile import CodecCost, Profile

PLAIN_CODEC = "identity"


@dataclass(frozen=True)
class Choice:
    """One way for a unit, priced."""

    option: Option
    codec: CodecCost | None  # None: uncompressed
    encodes: int
    tasks: tuple[Priced, ...]

    @property
    def compresses(self) -> bool:
        return self.codec is not None


@dataclass(frozen=True)
class Limits:
    """What users allow: these codecs only, at most so many encodings on the way, nothing lost, or their own word.

    Without `codecs` and without `lossy` only harmless ones are offered.
    """

    codecs: tuple[str, ...] | None = None
    lossy: bool = False
    max_encodes: int | None = None
    lossless: bool = False
    allow: Callable[[Option], bool] | None = None

    def offered(self, profile: Profile) -> list[CodecCost]:
        """The codecs of the profile that may be used, in its order."""
        costs = list(profile.codecs.values())
        if self.codecs is not None:
            known = {str(cost.codec): cost for cost in costs}
            costs = []
            for text in self.codecs:
                name = _canonical(text)
                if name not in known:
                    raise PlanError(
                        f"codec {text!r} was not measured in this profile{nearest(name, known)}; it has "
                        f"{', '.join(known) or 'none'}. Measure it with `gradzip profile --codec {text} …`"
                    )
                costs.append(known[name])
        elif not self.lossy:
            costs = [cost for cost in costs if harmless(cost.codec)]
        return [cost for cost in costs if not (self.lossless and not cost.codec.lossless)]

    def allows(self, choice: Choice) -> bool:
        if not choice.compresses:
            return True
        if self.max_encodes is not None and choice.encodes > self.max_encodes:
            return False
        return self.allow is None or self.allow(choice.option)


def harmless(codec: Codec) -> bool:
    """Nothing is lost, or nothing that the optimizer could feel: near mode within one unit in the last place."""
    near = isinstance(codec, GComp) and codec.mode == "near" and codec.keep is None and codec.ulps <= 1
    return codec.lossless or near


def _canonical(text: str) -> str:
    try:
        return str(parse(text))
    except CodecError as error:
        raise PlanError(str(error)) from error


@cache
def _tree(device: str) -> tuple[Route, ...]:
    return tuple(tree((device,)))


def routes(topology: Topology, device: str) -> list[Route]:
    """The tree's routes with all coding on one device; where a group has one rank alone, only the flat ones differ."""
    both = topology.hosts > 1 and topology.ranks_per_host > 1
    return [route for route in _tree(device) if both or not route.hierarchical]


def choices(pricing: Pricing, limits: Limits, device: str) -> list[Choice]:
    """All choices with coding on that device. The first one is what DDP does: all-reduce of plain values."""
    ways = routes(pricing.network.topology, device)
    found = [Choice(_plain(route), None, 0, tuple(pricing.plain(route))) for route in ways if not route.compresses]
    for cost in limits.offered(pricing.network.profile):
        if device in cost.encode:
            found += [c for c in _of_codec(pricing, cost, device, ways) if limits.allows(c)]
    return found


def _plain(route: Route) -> Option:
    """DDP's own all-reduce goes by its name: the runtime leaves it to torch."""
    return Option(PLAIN_CODEC, None, "allreduce" if route == NAMED["allreduce"] else str(route))


def _of_codec(pricing: Pricing, cost: CodecCost, device: str, ways: Sequence[Route]) -> list[Choice]:
    codec, name = cost.codec, cost.name
    if codec.rounds > 1:
        return [Choice(Option(name, device, "factors"), cost, 1, tuple(pricing.factors(cost, device)))]
    if codec.routes:  # the only ones that it can take; the runtime knows them by their names
        named = {name_of: Route.parse(name_of).on(device) for name_of in codec.routes}
        return [
            Choice(Option(name, device, name_of), cost, route.encodes, tuple(pricing.coded(route, cost)))
            for name_of, route in named.items()
        ]
    found = []
    if codec.summable:
        found.append(Choice(Option(name, device, "allreduce"), cost, 1, tuple(pricing.allreduce(cost, device))))
    for route in ways:
        if route.compresses:
            tasks = tuple(pricing.coded(route, cost))
            found.append(Choice(Option(name, None, str(route)), cost, route.encodes, tasks))
    return found


def twin(option: Option, device: str) -> Option:
    """The same way with all coding on another device."""
    if option.device is not None:
        return Option(option.codec, device, option.route)
    assert option.route is not None
    return Option(option.codec, None, _moved(option.route, device))


@cache
def _moved(route: str, device: str) -> str:
    return str(Route.parse(route).on(device))
