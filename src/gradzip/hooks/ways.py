"""Finds the Way of each parameter under a policy: codec, route, and the grid that its gradient may be rounded to.

exchange/way.py defines Way.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import sensitivity
from ..codecs import Codec, lowrank, parse
from ..codecs.gcomp import GComp
from ..engines.layout import Floor
from ..errors import Unsupported, nearest
from ..exchange.flattening import flatten
from ..exchange.message_codecs import codes_messages, message_codec, route_of
from ..exchange.topology import Topology
from ..exchange.way import Way
from ..feedback import clean_name
from ..option import Option
from ..plan import Plan
from ..policy import PLAIN, Fixed, Policy, Rules, small
from ..routes import NAMED, Route
from ..sensitivity.survey import Read, fetch
from . import report

_Floors = Mapping[torch.Tensor, Floor | torch.Tensor | None]
_CONSTANT = (Fixed, Rules, Plan)  # policies that answer alike in every step; others are asked in each


class _Graded(NamedTuple):
    """A gradient whose floors follow the optimizer."""

    name: str
    way: Way  # still without a floor
    exact: Way  # taken where nothing is known about the parameter, so that nothing may be dropped


class _Chosen(NamedTuple):
    """What a policy's answers come to."""

    ways: dict[str, Way]
    graded: dict[GComp, dict[torch.Tensor, _Graded]]


def parameter_names(model: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """The parameters that DDP knows of, with their names as the user wrote them."""
    ignored = model.parameters_to_ignore
    names = {p: clean_name(n) for n, p in model.module.named_parameters() if n not in ignored}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise Unsupported(f"two parameters are called {twice[0]!r} once `module.` is taken out: rename a submodule")
    return names


def sparse_parameters(model: DistributedDataParallel) -> set[torch.Tensor]:
    """Those that get sparse gradients, by the layers that DDP knows of."""
    layers = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {layer.weight for layer in layers if layer.sparse}


class Ways:
    """Finds the ways of a model's gradients. What is the same as in the step before is the same object."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        topology: Topology,
        sparse: Set[torch.Tensor] = frozenset(),
    ) -> None:
        """`sparse`: parameters whose gradients torch averages itself."""
        self._sparse = sparse
        self._names, self._device, self._optimizers, self._topology = names, device, optimizers, topology
        self._grids = [sensitivity.Grids(optimizer) for optimizer in optimizers]
        self._policy: Policy | None = None  # that the last answers are of
        self._options: list[Option] = []
        self._trained: list[bool] = []
        self._chosen = _Chosen({}, {})
        self._last: dict[str, Way] = {}
        self._wanted: dict[GComp, Set[torch.Tensor]] = {}  # keys of what is graded
        self._found: dict[GComp, list[_Floors]] = {}  # that the last ways were made with

    def check(self, policy: Policy) -> dict[str, Way]:
        """Complains about a policy that cannot work with this model, rather than in backward; returns its ways."""
        for part in _parts(policy):
            for pattern in part.rules:
                if not any(fnmatchcase(name, pattern) for name in self._names.values()):
                    raise Unsupported(
                        f"the policy has a rule for {pattern!r}, and no parameter is called so: take the names of "
                        f"model.named_parameters(), without `module.`{nearest(pattern, self._names.values())}"
                    )
        return self.of(policy, 1.0)

    def of(self, policy: Policy, scale: float, read: Read = fetch, floors: bool = True) -> dict[str, Way]:
        """By parameter name. `scale` is the loss scale that gradients carry; `read` fetches numbers from the device.

        Without `floors` those of the last time are left where they are: where nothing is sent, nobody asks for them.
        """
        # DDP hands out a parameter that was frozen later as well, without a gradient.
        trained = [parameter.requires_grad for parameter in self._names]
        if self._sparse:
            trained = [is_trained and p not in self._sparse for is_trained, p in zip(trained, self._names)]
        if policy is not self._policy or type(policy) not in _CONSTANT or trained != self._trained:
            asked = zip(self._names.items(), trained)
            options = [policy.option(name, p.shape) if is_trained else PLAIN for (p, name), is_trained in asked]
            if options != self._options:
                self._chosen = self._choose(options)
                self._last, self._found = self._chosen.ways, {}
                self._wanted = {codec: graded.keys() for codec, graded in self._chosen.graded.items()}
            self._policy, self._options, self._trained = policy, options, trained
        changed = {}
        for codec, graded in self._chosen.graded.items() if floors else ():
            by_optimizer = self._floors(codec, scale, read)
            known = self._found.get(codec, ())
            if len(known) == len(by_optimizer) and all(map(operator.is_, known, by_optimizer)):
                continue
            self._found[codec], found = by_optimizer, _merged(by_optimizer)
            for parameter, (name, way, exact) in graded.items():
                floor = found.get(parameter)
                if floor is None:
                    if self._last[name] is not exact:
                        changed[name] = exact
                elif self._last[name].floor is not floor:
                    changed[name] = replace(way, floor=floor)
        if changed:
            self._last = self._last | changed
        return self._last

    def described(self, policy: Policy, world: int) -> str:
        """The line that is logged at attach."""
        ways = self.of(policy, 1.0)
        exchanged = {name: p for p, name in self._names.items() if p.requires_grad and p not in self._sparse}
        unheld = set(self.unheld())  # a line of their own names them
        exact = {
            name: sensitivity.why_lossless(self._optimizers, parameter)
            for graded in self._chosen.graded.values()
            for parameter, (name, _, exact_way) in graded.items()
            if name in exchanged.keys() - unheld and ways[name] is exact_way
        }
        left_out = {
            "frozen parameters have no gradients": sum(not p.requires_grad for p in self._names),
            "parameters with sparse gradients are left to torch": sum(
                p.requires_grad and p in self._sparse for p in self._names
            ),
        }
        shapes = {name: (p.shape, p.dtype) for name, p in exchanged.items()}
        return report.at_attach({name: ways[name] for name in exchanged}, shapes, world, left_out, exact)

    def _choose(self, options: list[Option]) -> _Chosen:
        chosen = _Chosen({}, {})
        for (parameter, name), option in zip(self._names.items(), options):
            if option.device == "gpu" and self._device.type == "cpu":
                raise Unsupported(f"{name!r} is on the CPU: {option} would have it coded on a GPU")
            codec = parse(option.codec)
            self._check_whole(codec, name, parameter)
            if codec.rounds > 1:
                lowrank.load(self._device)  # here, on the user's thread, which may want it as well
            way = chosen.ways[name] = self._way(codec, option, parameter)
            if isinstance(codec, GComp) and codec.mode in ("near", "paper"):
                exact = self._way(codec.exact, option, parameter)
                chosen.graded.setdefault(codec, {})[parameter] = _Graded(name, way, exact)
        return chosen

    def _check_whole(self, codec: Codec, name: str, parameter: torch.Tensor) -> None:
        """Complains about a gradient that cannot travel in whole messages, where its codec wants that."""
        whole = message_codec(codec)
        if whole is not None and parameter.dtype.itemsize > whole.widest and parameter.requires_grad:
            raise Unsupported(
                f"{codec} codes values of 16 and 32 bits, and {name!r} is {parameter.dtype}: use "
                f"Rules({{{name!r}: 'identity', '*': {str(codec)!r}}}, small=True)"
            )

    def _way(self, codec: Codec, option: Option, parameter: torch.Tensor) -> Way:
        route = self._route(codec, option)
        late = route == "factors" or (codec.name == "identity" and route == "allreduce" and small(parameter.shape))
        whole = codes_messages(codec, route, self._device.type != "cpu")
        return Way(codec, route, late, None, whole)

    def _route(self, codec: Codec, option: Option) -> str:
        route = route_of(codec, option.route, self._topology.default_route)
        if route == "factors":
            return route
        self._topology.check(Route.parse(route))
        if self._device.type == "cpu" or route not in NAMED or route == "allreduce":
            return route
        return str(NAMED[route].on(option.device or "gpu"))

    def _floors(self, codec: GComp, scale: float, read: Read) -> list[_Floors]:
        """Where each parameter's gradient may be cut, for the step about to be taken, by each of the optimizers."""
        if not self._optimizers:
            raise Unsupported(
                f"{codec} asks the optimizer which bits matter: attach(model, optimizer), or take gcomp:mode=lossless"
            )
        wanted = self._wanted[codec]
        found: list[_Floors] = (
            [grids.rules(codec.ulps, scale, wanted, read) for grids in self._grids]
            if codec.mode == "near"
            else [
                {p: flatten(r, p) for p, r in sensitivity.reaches(optimizer, scale).items() if p in wanted}
                for optimizer in self._optimizers
            ]
        )
        if not any(found) and not any(p in self._names for p in self._held()):
            kinds = " and ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise Unsupported(
                f"{codec} asks the optimizer which bits matter, and this {kinds} has none of the model's parameters: "
                "make it of this model's parameters()"
            )
        return found

    def _held(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def unheld(self) -> list[str]:
        """Parameters that no optimizer holds, so that a codec which asks the optimizer sends them lossless."""
        held = set(self._held())
        return [part.name for graded in self._chosen.graded.values() for p, part in graded.items() if p not in held]


def _merged(found: Sequence[_Floors]) -> _Floors:
    """Two optimizers that step one parameter move it further than either says: it stays lossless."""
    if len(found) == 1:
        return found[0]
    counts = Counter(p for floors in found for p in floors)
    return {p: floor if counts[p] == 1 else None for floors in found for p, floor in floors.items()}


def _parts(policy: Policy) -> list[Rules]:
    """The Rules that a policy is made of."""
    inner = [getattr(policy, name, None) for name in ("low", "high")]  # Accordion's
    return [part for part in (policy, *inner) if isinstance(part, Rules)]
