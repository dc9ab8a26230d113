"""Reaches: how large a gradient value may be against the rest of the update (GComp, SoCC'24, Table 2 and Appendix A).

The update is written theta' = A - B g with g the fresh gradient. If |A / (B g)| > 2^n, at least n low bits of g's
mantissa fall below the last place of theta', so paper mode cuts 6, 12 or 18 of them. The reach of a value is |A / B|:
the encoder compares it with 2^n |g| (codecs/gcomp.py).

Where the paper's metric contains what is not known yet (a denominator D with the fresh gradient in it), the value is
taken with the smallest D there can be; |A / B| grows with D as long as the parameter's term outweighs the momentum's,
and where it does not, nothing is cut. The paper bounds the effect of one cut on one rank; it is near mode (near.py)
that keeps a promise for the mean of many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.optim import SGD, Adagrad, Optimizer, RMSprop

from ..errors import Unsupported
from .bounds import adagrad_lr, fresh_gradient
from .survey import Case, survey, warn_lossless

SLICE = 1 << 15  # values


def reaches(optimizer: Optimizer, scale: float = 1.0) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter a float32 tensor of its shape: the reach of each gradient value; 0 means "cut nothing"."""
    if not (scale > 0 and math.isfinite(scale)):
        raise Unsupported(f"scale={scale}: pass the positive, finite factor that the loss was multiplied by")
    result = {}
    for parameter, case in survey(optimizer):
        if case is None or case.group["lr"] == 0:
            result[parameter] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        elif parameter.device.type == "cpu" and parameter.numel() > SLICE:
            result[parameter] = torch.cat([_reach(part, scale) for part in _slices(case)]).view(parameter.shape)
        else:
            result[parameter] = _reach(case, scale)
    return result


def _slices(case: Case) -> Iterator[Case]:
    """Parts of a parameter: on a CPU, temporaries that fit into its cache take a fraction of the time."""
    state = {k: v.reshape(-1) for k, v in case.state.items() if isinstance(v, torch.Tensor) and v.dim()}
    parts = {name: torch.split(value, SLICE) for name, value in state.items()}
    for number, parameter in enumerate(torch.split(case.parameter.detach().reshape(-1), SLICE)):
        yield case._replace(parameter=parameter, state={name: part[number] for name, part in parts.items()})


def _reach(case: Case, scale: float) -> torch.Tensor:
    ratio = _ratio(case)
    if ratio is None:
        return torch.zeros_like(case.parameter, dtype=torch.float32)
    return _rounded_down(torch.where(torch.isfinite(ratio), ratio * scale, 0.0))


def _rounded_down(x: torch.Tensor) -> torch.Tensor:
    """The largest float32 that is not above x >= 0, so that rounding never cuts more than the rule."""
    nearest = x.clamp(max=torch.finfo(torch.float32).max).float()
    return torch.where(nearest.double() > x, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


def _ratio(case: Case) -> torch.Tensor | None:
    """A lower bound of |A / B| in float64; 0 or None where there is none."""
    if case.kind is SGD:
        return _sgd(case)
    if case.kind is Adagrad:
        return _adagrad(case)
    return _rmsprop(case) if case.kind is RMSprop else _adam(case)


def _double(case: Case, name: str) -> torch.Tensor:
    value = case.tensor(name)
    return torch.zeros_like(case.parameter, dtype=torch.float64) if value is None else value.detach().double()


def _sgd(case: Case) -> torch.Tensor | None:
    lr, momentum, theta = case.number("lr"), case.number("momentum"), case.parameter.detach().double()
    fresh = fresh_gradient(case)
    if fresh == 0:
        return None
    carried = (momentum**2 if case.group["nesterov"] else momentum) * _double(case, "momentum_buffer")
    rest = theta - lr * (fresh * case.number("weight_decay") * theta + carried)
    return (rest / (lr * fresh)).abs()


def _adagrad(case: Case) -> torch.Tensor:
    denominator = _double(case, "sum").sqrt() + case.number("eps")
    decayed = denominator / adagrad_lr(case) - case.number("weight_decay")
    return case.parameter.detach().double().abs() * decayed.clamp(min=0)


def _rmsprop(case: Case) -> torch.Tensor | None:
    if case.group["centered"]:
        warn_lossless("RMSprop(centered=True)", "its denominator may vanish")
        return None
    lr, theta = case.number("lr"), case.parameter.detach().double()
    denominator = (case.number("alpha") * _double(case, "square_avg")).sqrt() + case.number("eps")
    rest = theta - lr * case.number("momentum") * _double(case, "momentum_buffer")
    return (rest.abs() * denominator / lr - case.number("weight_decay") * theta.abs()).clamp(min=0)


def _adam(case: Case) -> torch.Tensor:
    (b1, b2), lr, decay = case.betas, case.number("lr"), case.number("weight_decay")
    theta, step = case.parameter.detach().double(), case.steps + 1
    second = _double(case, "max_exp_avg_sq") if case.group["amsgrad"] else b2 * _double(case, "exp_avg_sq")
    weight = ((second / (1 - b2**step)).sqrt() + case.number("eps")) * (1 - b1**step)
    if case.group["decoupled_weight_decay"]:
        rest = theta * (1 - lr * decay) * weight
    else:
        rest = theta * (weight - lr * (1 - b1) * decay).clamp(min=0)
    momentum = lr * b1 * _double(case, "exp_avg")
    # With a larger denominator the difference might vanish if momentum outweighed the rest.
    return torch.where(rest.abs() >= momentum.abs(), (rest - momentum).abs(), 0.0) / (lr * (1 - b1))
