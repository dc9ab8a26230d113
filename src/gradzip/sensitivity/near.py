"""Floors: the grid that near mode rounds each gradient value to.

Each of N ranks rounds its undivided gradient to multiples of 2^f, off by at most half a step; the sum of N such values
is rounded to multiples of 2^(f + floor(log2 N)), off by at most N/2 steps of 2^f; the mean of both is off by at most
2^f. So f is the largest integer with

    2^f * bound <= ulps * ulp(theta) * scale,    ulp(theta) = 2^(E(theta) - 150)

with E an exponent field and `scale` what the loss was multiplied by during backward. The bound divides by
max(sqrt(decay * second), rest), and second >= 2^(E(second) - 127), so with room = ulps * scale / gain

    f = E(theta) - 150 + floor(1/2 max(E(second) - 127 + log2(decay room^2), log2(rest^2 room^2)))

which is engines.layout.Floor with c0 = -150 and the two logarithms, rounded down, as c1 and c2. Nothing but these
three integers is computed in floating point, in float64 on the host.

Gradient values and sums below 2^-126 (subnormal in float32) count as zero: the wire format flushes them.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..engines.layout import EXACT, Floor
from ..errors import Unsupported
from .bounds import Bound, bound
from .survey import Case, Read, States, fetch, has_sparse_gradient, numbers_of, survey, unwrap, warn_lossless

_ULP = -150  # E(theta) - 150 is the exponent of theta's last place


def rules(optimizer: Optimizer, ulps: float = 1, scale: float = 1.0) -> dict[torch.Tensor, Floor | None]:
    """For each parameter its floors in lazy form, for the step about to be taken; None: this one stays lossless.

    A Floor refers to the parameter and its state, it copies nothing: use it before the step. Its values lie in the
    order of the parameter's memory, as those of a DDP bucket do: that is not row-major for channels_last parameters.
    With a learning rate of 0 everything is lossless: the gradient then matters for the state alone.
    """
    return Grids(optimizer).rules(ulps, scale)


_POLICIES = 8  # whose parameters are known at a time: a policy that changes asks for others


class _Graded(NamedTuple):
    """A parameter with a floor, and what the floor was made of."""

    parameter: torch.Tensor
    address: int
    stride: tuple[int, ...]
    state: Mapping[str, Any]
    step: Any
    has_momentum: bool
    key: str  # of the second moment; empty: there is none
    second: torch.Tensor | None
    second_address: int
    floor: Floor

    @classmethod
    def of(cls, case: Case, key: str, floor: Floor) -> _Graded:
        theta, second, state = case.parameter, case.tensor(key), case.state
        step, has_momentum = state.get("step"), state.get("momentum_buffer") is not None
        address = 0 if second is None else second.data_ptr()
        return cls(
            theta, theta.data_ptr(), theta.stride(), state, step, has_momentum, key, second, address, floor
        )  # fmt: skip

    def has_moved(self) -> bool:
        theta, state, second = self.parameter, self.state, self.second
        return (
            theta.data_ptr() != self.address
            or theta.stride() != self.stride
            or state.get("step") is not self.step
            or state.get(self.key) is not second
            or (second is not None and second.data_ptr() != self.second_address)
            or (state.get("momentum_buffer") is not None) is not self.has_momentum
            or has_sparse_gradient(theta)
        )


_Kind = tuple[int, bool, str, bool]  # group, has momentum, key of the second moment, and whether that is there


class _Survey:
    """Floors of all parameters, and all that they depend on but numbers."""

    def __init__(
        self,
        optimizer: Optimizer,
        wanted: Set[torch.Tensor] | None,
        graded: list[_Graded],
        result: dict[torch.Tensor, Floor | None],
    ) -> None:
        self.wanted, self.graded, self.result = wanted, graded, result
        self._optimizer, self._states = optimizer, States.of(optimizer)
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        number_of = {p: number for number, (_, parameters) in enumerate(self._groups) for p in parameters}
        # Parameters of one kind that have made equally many steps have the same constants.
        self.kinds = [(number_of[g.parameter], g.has_momentum, g.key, g.second is not None) for g in graded]
        self._one_of = dict(zip(self.kinds, graded))
        self._stepped = [g.step for g in graded if isinstance(g.step, torch.Tensor)]
        self._each = len(self._stepped) == len(graded)

    def holds_for(self, optimizer: Optimizer, wanted: Set[torch.Tensor] | None) -> bool:
        """Whether nothing has moved; nor has any parameter come or gone."""
        groups = optimizer.param_groups
        return (
            optimizer is self._optimizer
            and wanted is self.wanted
            and len(groups) == len(self._groups)
            and all(now is group for now, (group, _) in zip(groups, self._groups))
            and all(_are_same(group["params"], parameters) for group, parameters in self._groups)
            and not self._states.have_changed()
            and not any(graded.has_moved() for graded in self.graded)
        )

    def steps(self, read: Read) -> list[float]:
        """How many each parameter has made."""
        known = read(self._stepped)
        if self._each:
            return known
        values = iter(known)
        return [next(values) if isinstance(g.step, torch.Tensor) else float(g.step or 0.0) for g in self.graded]

    def cases(self, steps: Sequence[float]) -> dict[tuple[_Kind, float], Case]:
        """One for all parameters of a kind that have made so many steps."""
        kind, defaults = type(self._optimizer), numbers_of(self._optimizer.defaults)
        settings = [numbers_of(group) for group, _ in self._groups]
        cases = dict[tuple[_Kind, float], Case]()
        for each, made in set(zip(self.kinds, steps)):
            graded, (group, *_) = self._one_of[each], each
            cases[each, made] = Case(graded.parameter, kind, settings[group], defaults, graded.state, made)
        return cases


def _are_same(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


class Grids:
    """`rules` for one step after the other. What is the same as in the last one is the same object.

    What finds parameters and their second moments takes microseconds a tensor: it is done again only when they have
    moved.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[torch.Tensor, tuple[object, Floor]] = {}
        self._last: dict[int, _Survey] = {}  # by id of those wanted

    def rules(
        self,
        ulps: float = 1,
        scale: float = 1.0,
        wanted: Set[torch.Tensor] | None = None,
        read: Read = fetch,
    ) -> dict[torch.Tensor, Floor | None]:
        """For all parameters, or for those wanted; `read` fetches the step counts.

        The result is not to be changed, nor is `wanted` between two calls: the same object is the same parameters.
        """
        if not (ulps > 0 and math.isfinite(ulps)):
            raise Unsupported(f"ulps={ulps}: a parameter may move by a positive, finite number of ulps")
        if not (scale > 0 and math.isfinite(scale)):
            raise Unsupported(f"scale={scale}: pass the positive, finite factor that the loss was multiplied by")
        last = self._last.get(id(wanted))
        if last is not None and last.holds_for(unwrap(self._optimizer), wanted):
            result = self._renewed(last, ulps * scale, read)
            if result is not None:
                return result
        return self._found(ulps * scale, wanted, read)

    def _renewed(self, last: _Survey, allowance: float, read: Read) -> dict[torch.Tensor, Floor | None] | None:
        """Floors by the numbers as they are now; None: not all parameters have one of the same kind."""
        steps = last.steps(read)
        numbers = dict[tuple[_Kind, float], tuple[int, int, int]]()
        for pair, case in last.cases(steps).items():
            (_, _, key, has_second), _ = pair
            found = bound(case)
            constants = None if found is None else _constants(found, allowance)
            now = None if constants is None else constants.given if has_second else constants.without
            if constants is None or now is None or (constants.second or "") != key:
                return None
            numbers[pair] = now
        changed = False
        for place, (graded, pair) in enumerate(zip(last.graded, zip(last.kinds, steps))):
            floor, now = graded.floor, numbers[pair]
            if (floor.c0, floor.c1, floor.c2) != now:
                last.graded[place] = graded._replace(floor=Floor(floor.theta, floor.second, *now))
                changed = True
        if changed:
            last.result = {graded.parameter: graded.floor for graded in last.graded}
        return last.result

    def _found(
        self, allowance: float, wanted: Set[torch.Tensor] | None, read: Read
    ) -> dict[torch.Tensor, Floor | None]:
        result: dict[torch.Tensor, Floor | None] = {}
        shared: dict[tuple[object, ...], _Constants | None] = {}  # a handful for hundreds of parameters
        graded = list[_Graded]()
        for parameter, case in survey(self._optimizer, wanted, read):
            if case is None:
                result[parameter] = None
                continue
            alike = case.likeness
            if alike not in shared:
                found = bound(case)
                shared[alike] = None if found is None else _constants(found, allowance)
            constants = shared[alike]
            floor = result[parameter] = None if constants is None else self._floor(case, constants)
            if constants is not None and floor is not None and parameter in self._known:
                graded.append(_Graded.of(case, constants.second or "", floor))
        self._last.pop(id(wanted), None)
        if len(self._last) == _POLICIES:
            self._last.clear()
        if len(graded) == len(result):  # else some stay lossless, or floors are made of copies
            self._last[id(wanted)] = _Survey(unwrap(self._optimizer), wanted, graded, result)
        return result

    def _floor(self, case: Case, constants: _Constants) -> Floor | None:
        theta = case.parameter
        second = None if constants.second is None else case.tensor(constants.second)
        if second is None:
            numbers = constants.without
        elif second.dtype != torch.float32:
            warn_lossless(f"{case.kind.__name__} with state of {second.dtype}", "grids come from float32 state")
            return None
        elif constants.given is None:
            name = f"{case.kind.__name__} with eps={case.number('eps'):g}"
            warn_lossless(name, "a second moment of 0 makes its step (nearly) unbounded")
            return None
        else:
            numbers = constants.given
        # A view keeps its memory from being used for anything else: the same address is the same memory.
        key = (numbers, theta.data_ptr(), theta.stride(), None if second is None else second.data_ptr())
        known = self._known.get(theta)
        if known is not None and known[0] == key:
            return known[1]
        order = memory_order(theta)
        floor = Floor(_flat(theta, order), None if second is None else _flat(second, order), *numbers)
        if all(
            a is None or b is None or a.data_ptr() == b.data_ptr()
            for a, b in ((theta, floor.theta), (second, floor.second))
        ):
            self._known[theta] = key, floor
        else:
            self._known.pop(theta, None)
        return floor


class _Constants(NamedTuple):
    """c0, c1 and c2 of a Floor."""

    without: tuple[int, int, int]  # where there is no second moment, or none yet
    given: tuple[int, int, int] | None  # None: then the gradient stays lossless
    second: str | None


def floors(optimizer: Optimizer, ulps: float = 1, scale: float = 1.0) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter an int8 tensor of its shape: gradient values may be rounded to multiples of 2^floor.

    The promise: from the same state, and with the optimizer evaluated in float64, a mean of gradients so rounded moves
    no parameter by more than `ulps` units in its last place. `scale` is the loss scale under AMP, for gradients that
    are still scaled. -128 (EXACT) marks values that may not be changed.
    """
    return {p: _shaped(p, rule) for p, rule in rules(optimizer, ulps, scale).items()}


def _constants(bound: Bound, allowance: float) -> _Constants | None:
    if not 0 < bound.gain < math.inf:
        return None
    room = math.log2(allowance) - math.log2(bound.gain)
    rest = math.log2(max(bound.rest, sys.float_info.min))
    without = math.floor(room + rest) + _ULP, 0, 0
    if bound.second is None or bound.decay == 0:
        return _Constants(without, None, None)
    c1 = math.floor(2 * room + math.log2(bound.decay) - 127)
    c2 = math.floor(2 * room + 2 * rest)
    # Exponent field 0 stands for a second moment of nothing: then eps alone has to hold, and c2 must win.
    return _Constants(without, (_ULP, c1, c2) if c2 >= c1 else None, bound.second)


def memory_order(p: torch.Tensor) -> list[int]:
    """The dimensions from the slowest to the fastest in memory; row-major where the tensor has gaps or overlaps."""
    if p.is_contiguous():
        return list(range(p.dim()))
    order = sorted(range(p.dim()), key=p.stride, reverse=True)
    return order if p.permute(order).is_contiguous() else list(range(p.dim()))


def _flat(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x.detach().permute(order).reshape(-1)


def _shaped(p: torch.Tensor, rule: Floor | None) -> torch.Tensor:
    if rule is None:
        return torch.full(p.shape, EXACT, dtype=torch.int8, device=p.device)
    order = memory_order(p)
    back = sorted(range(p.dim()), key=order.__getitem__)
    return rule.tensor().view([p.shape[d] for d in order]).permute(back)
