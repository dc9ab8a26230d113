"""What each gradient goes through under a policy: codec, route, and the grid that it may be rounded to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import sensitivity
from ..backward import Way
from ..codecs import Codec, parse
from ..codecs.gcomp import GComp
from ..collectives import Topology, flatten, route_of
from ..engines.layout import Floor
from ..errors import Unsupported, nearest
from ..feedback import clean_name
from ..option import Option
from ..policy import PLAIN, Policy, Rules, small
from ..routes import NAMED, Route

_Floors = Mapping[torch.Tensor, Floor | torch.Tensor | None]


def parameter_names(model: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """The parameters that DDP knows of, with their names as the user wrote them."""
    ignored = model.parameters_to_ignore
    names = {p: clean_name(n) for n, p in model.module.named_parameters() if n not in ignored}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise Unsupported(f"two parameters are called {twice[0]!r} once `module.` is taken out: rename a submodule")
    return names


class Ways:
    """Finds the ways of a model's gradients, anew for each step: floors follow the optimizer."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        device: torch.device,
        optimizer: torch.optim.Optimizer | None,
        topology: Topology,
    ) -> None:
        self._names, self._device, self._optimizer, self._topology = names, device, optimizer, topology

    def check(self, policy: Policy) -> None:
        """Complains about a policy that cannot work with this model, rather than in backward."""
        for part in _parts(policy):
            for pattern in part.rules:
                if not any(fnmatchcase(name, pattern) for name in self._names.values()):
                    raise Unsupported(
                        f"the policy has a rule for {pattern!r}, and no parameter is called so: take the names of "
                        f"model.named_parameters(), without `module.`{nearest(pattern, self._names.values())}"
                    )
        self.of(policy, 1.0)

    def of(self, policy: Policy, scale: float) -> dict[str, Way]:
        """By parameter name. `scale` is the loss scale that gradients carry."""
        ways, cache = {}, dict[tuple[str, float], _Floors]()
        for parameter, name in self._names.items():
            # DDP hands out a parameter that was frozen later as well, without a gradient.
            option = policy.option(name, parameter.shape) if parameter.requires_grad else PLAIN
            if option.device == "gpu" and self._device.type == "cpu":
                raise Unsupported(f"{name!r} is on the CPU: {option} would have it coded on a GPU")
            codec, floor = parse(option.codec), None
            if isinstance(codec, GComp) and codec.mode in ("near", "paper"):
                key = codec.mode, codec.ulps
                if key not in cache:
                    cache[key] = self._floors(codec, scale)
                floor = cache[key].get(parameter)
                if floor is None:  # nothing is known about this parameter, so nothing may be dropped
                    codec = GComp(mode="lossless", limit=codec.limit, book=codec.book)
            route = self._route(codec, option)
            late = route == "factors" or (codec.name == "identity" and route == "allreduce" and small(parameter.shape))
            ways[name] = Way(codec, route, late, floor)
        return ways

    def _route(self, codec: Codec, option: Option) -> str:
        route = route_of(codec, option.route, self._topology.default_route)
        if route == "factors":
            return route
        self._topology.check(Route.parse(route))
        device = option.device or ("cpu" if self._device.type == "cpu" else "gpu")
        return str(NAMED[route].on(device)) if device == "gpu" and route in NAMED and route != "allreduce" else route

    def _floors(self, codec: GComp, scale: float) -> _Floors:
        """Where each parameter's gradient may be cut, for the step about to be taken."""
        if self._optimizer is None:
            raise Unsupported(
                f"{codec} asks the optimizer which bits matter: attach(model, optimizer), or take gcomp:mode=lossless"
            )
        floors: _Floors = (
            sensitivity.rules(self._optimizer, codec.ulps, scale)
            if codec.mode == "near"
            else {p: flatten(r, p) for p, r in sensitivity.reaches(self._optimizer, scale).items()}
        )
        if not any(parameter in floors for parameter in self._names):
            raise Unsupported(
                f"{codec} asks the optimizer which bits matter, and this {type(self._optimizer).__name__} has none of "
                "the model's parameters: make it of this model's parameters()"
            )
        return floors


def _parts(policy: Policy) -> list[Rules]:
    """The Rules that a policy is made of."""
    inner = [getattr(policy, name, None) for name in ("low", "high")]  # Accordion's
    return [part for part in (policy, *inner) if isinstance(part, Rules)]
