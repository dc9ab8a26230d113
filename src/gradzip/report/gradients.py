"""What gradients look like, layer by layer: how many zeros, which exponents, how much each codec saves.

The exponents, the zeros and the levels are what GComp's saving rests on (SoCC '24): few exponents are frequent, and
many values are so small against their parameter that 6, 12 or 18 bits of their mantissa cannot move it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from .. import sensitivity
from ..codecs import Codec, Context, parse
from ..codecs.gcomp import GComp, paper_levels
from ..errors import ReportError
from ..feedback import clean_name
from ..jsonfile import is_count, is_number, shown

LEVELS = (0, 6, 12, 18)  # bits of the mantissa that paper mode cuts


def describe(model: nn.Module, optimizer: Optimizer, codecs: Iterable[str] = ()) -> list[dict[str, Any]]:
    """One entry per parameter that has a gradient; `ratios` by codec, `exponents` and `levels` as counts."""
    reaches = sensitivity.reaches(optimizer)
    offered = [parse(text) for text in codecs]
    rules = {codec: sensitivity.rules(optimizer, codec.ulps) for codec in offered if _near(codec)}
    found = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach().cpu().float().contiguous()
        exponents = _exponents(gradient)
        values, counts = np.unique(exponents[exponents >= 0].numpy(), return_counts=True)
        entry: dict[str, Any] = {
            "name": clean_name(name),
            "numel": gradient.numel(),
            "zeros": float((gradient == 0).float().mean()) if gradient.numel() else 0.0,
            "exponents": {str(int(e) - 127): int(n) for e, n in zip(values, counts)},
            "ratios": {},
        }
        if parameter in reaches:
            entry["levels"] = _levels(gradient.reshape(-1), reaches[parameter].cpu().reshape(-1))
        for codec in offered:
            floor = rules[codec].get(parameter) if _near(codec) else None
            exact = _near(codec) and floor is None  # nothing is known of this parameter: attach sends it lossless, too
            flat, context = gradient.reshape(-1), Context(floor=floor)
            used = parse("gcomp:mode=lossless") if exact else codec.for_own(flat, context) if _near(codec) else codec
            payload = used.encode(flat, context)
            entry["ratios"][str(codec)] = gradient.numel() * gradient.element_size() / max(1, payload.numel())
        found.append(entry)
    return found


def check_layers(layers: Any, where: str) -> list[dict[str, Any]]:
    """What `describe` returned, as read from a file; ReportError if it is something else."""
    if not isinstance(layers, list):
        raise ReportError(f"{where}: layers is {shown(layers)}: wanted a list")
    for i, layer in enumerate(layers):
        if not isinstance(layer, dict):
            raise ReportError(f"{where}: layers[{i}] is {shown(layer)}: wanted an object")
        exponents, ratios, levels = (layer.get(key, {}) for key in ("exponents", "ratios", "levels"))
        checks = {
            "name": (isinstance(layer.get("name"), str), "a text"),
            "numel": (is_count(layer.get("numel")), "a whole number of 0 or more"),
            "zeros": (is_number(zeros := layer.get("zeros")) and 0 <= zeros <= 1, "a share from 0 to 1"),
            "exponents": (_are_exponents(exponents), "counts by exponents from -200 to 200"),
            "ratios": (isinstance(ratios, dict) and all(map(is_number, ratios.values())), "ratios by codec"),
            "levels": (not levels or _are_levels(levels), f"{len(LEVELS)} counts"),
        }
        for key, (is_right, what) in checks.items():
            if not is_right:
                raise ReportError(f"{where}: layers[{i}].{key} is {shown(layer.get(key))}: wanted {what}")
    return layers


def _are_exponents(found: Any) -> bool:
    if not isinstance(found, dict) or not all(map(is_count, found.values())):
        return False
    return all(re.fullmatch(r"-?\d{1,3}", e) and abs(int(e)) <= 200 for e in found)


def _are_levels(found: Any) -> bool:
    return isinstance(found, list) and len(found) == len(LEVELS) and all(map(is_count, found))


def _near(codec: Codec) -> TypeGuard[GComp]:
    return isinstance(codec, GComp) and codec.mode == "near"


def _exponents(gradient: torch.Tensor) -> torch.Tensor:
    """The exponent field of each value; -1 for zeros, which have a code of their own."""
    field = (gradient.reshape(-1).view(torch.int32) >> 23) & 0xFF
    return torch.where(gradient.reshape(-1) == 0, -1, field)


def _levels(gradient: torch.Tensor, reach: torch.Tensor) -> list[int]:
    """How many values lose 0, 6, 12 and 18 bits in paper mode; zeros are not counted."""
    there = gradient != 0
    return torch.bincount(paper_levels(gradient[there], reach[there]), minlength=len(LEVELS)).tolist()
