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

import torch
from torch.optim import Optimizer

from ..engines.layout import EXACT, Floor
from ..errors import Unsupported
from .bounds import Bound, bound
from .survey import Case, survey, warn_lossless

_ULP = -150  # E(theta) - 150 is the exponent of theta's last place


def rules(optimizer: Optimizer, ulps: float = 1, scale: float = 1.0) -> dict[torch.Tensor, Floor | None]:
    """For each parameter its floors in lazy form, for the step about to be taken; None: this one stays lossless.

    A Floor refers to the parameter and its state, it copies nothing: use it before the step. Its values lie in the
    order of the parameter's memory, as those of a DDP bucket do: that is not row-major for channels_last parameters.
    With a learning rate of 0 everything is lossless: the gradient then matters for the state alone.
    """
    if not (ulps > 0 and math.isfinite(ulps)):
        raise Unsupported(f"ulps={ulps}: a parameter may move by a positive, finite number of ulps")
    if not (scale > 0 and math.isfinite(scale)):
        raise Unsupported(f"scale={scale}: pass the positive, finite factor that the loss was multiplied by")
    result: dict[torch.Tensor, Floor | None] = {}
    for parameter, case in survey(optimizer):
        found = None if case is None else bound(case)
        result[parameter] = None if case is None or found is None else _floor(case, found, ulps * scale)
    return result


def floors(optimizer: Optimizer, ulps: float = 1, scale: float = 1.0) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter an int8 tensor of its shape: gradient values may be rounded to multiples of 2^floor.

    The promise: from the same state, and with the optimizer evaluated in float64, a mean of gradients so rounded moves
    no parameter by more than `ulps` units in its last place. `scale` is the loss scale under AMP, for gradients that
    are still scaled. -128 (EXACT) marks values that may not be changed.
    """
    return {p: _shaped(p, rule) for p, rule in rules(optimizer, ulps, scale).items()}


def _floor(case: Case, bound: Bound, allowance: float) -> Floor | None:
    if not 0 < bound.gain < math.inf:
        return None
    order = memory_order(case.parameter)
    theta = _flat(case.parameter, order)
    room = math.log2(allowance) - math.log2(bound.gain)
    rest = math.log2(max(bound.rest, sys.float_info.min))
    if bound.second is None or bound.decay == 0:
        return Floor(theta, None, math.floor(room + rest) + _ULP)
    if bound.second.dtype != torch.float32:
        warn_lossless(f"{case.kind.__name__} with state of {bound.second.dtype}", "grids come from float32 state")
        return None
    c1 = math.floor(2 * room + math.log2(bound.decay) - 127)
    c2 = math.floor(2 * room + 2 * rest)
    if c2 < c1:
        # Exponent field 0 stands for a second moment of nothing: then eps alone has to hold, and c2 must win.
        name = f"{case.kind.__name__} with eps={case.number('eps'):g}"
        warn_lossless(name, "a second moment of 0 makes its step (nearly) unbounded")
        return None
    return Floor(theta, _flat(bound.second, order), _ULP, c1, c2)


def memory_order(p: torch.Tensor) -> list[int]:
    """The dimensions from the slowest to the fastest in memory; row-major where the tensor has gaps or overlaps."""
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
