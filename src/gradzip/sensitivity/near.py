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
import sys
from collections.abc import Set
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..engines.layout import EXACT, Floor
from ..errors import Unsupported
from .bounds import Bound, bound
from .survey import Case, Read, fetch, survey, warn_lossless

_ULP = -150  # E(theta) - 150 is the exponent of theta's last place


def rules(optimizer: Optimizer, ulps: float = 1, scale: float = 1.0) -> dict[torch.Tensor, Floor | None]:
    """For each parameter its floors in lazy form, for the step about to be taken; None: this one stays lossless.

    A Floor refers to the parameter and its state, it copies nothing: use it before the step. Its values lie in the
    order of the parameter's memory, as those of a DDP bucket do: that is not row-major for channels_last parameters.
    With a learning rate of 0 everything is lossless: the gradient then matters for the state alone.
    """
    return Grids(optimizer).rules(ulps, scale)


class Grids:
    """`rules` for one step after the other. What is the same as in the last one is the same object."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[torch.Tensor, tuple[object, Floor]] = {}

    def rules(
        self,
        ulps: float = 1,
        scale: float = 1.0,
        wanted: Set[torch.Tensor] | None = None,
        read: Read = fetch,
    ) -> dict[torch.Tensor, Floor | None]:
        """For all parameters, or for those wanted; `read` fetches the step counts."""
        if not (ulps > 0 and math.isfinite(ulps)):
            raise Unsupported(f"ulps={ulps}: a parameter may move by a positive, finite number of ulps")
        if not (scale > 0 and math.isfinite(scale)):
            raise Unsupported(f"scale={scale}: pass the positive, finite factor that the loss was multiplied by")
        result: dict[torch.Tensor, Floor | None] = {}
        shared: dict[tuple[object, ...], _Constants | None] = {}  # a handful for hundreds of parameters
        for parameter, case in survey(self._optimizer, wanted, read):
            if case is None:
                result[parameter] = None
                continue
            alike = case.likeness
            if alike not in shared:
                found = bound(case)
                shared[alike] = None if found is None else _constants(found, ulps * scale)
            constants = shared[alike]
            result[parameter] = None if constants is None else self._floor(case, constants)
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
