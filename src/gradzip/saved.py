"""Checks of what a checkpoint holds, field by field: an error names the field, what was found, and what to do.

A damaged field must not be loaded: one NaN in a rank's residuals makes all parameters of all ranks NaN, for good.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import Unsupported

CURE = "load an intact checkpoint of this model, or train on without loading gradzip's state"
_KEPT = (torch.float32, torch.float64, torch.bfloat16)  # what residuals and codec state are kept in
_MISSING = object()


def refuse(field: str, found: object, wanted: str) -> Unsupported:
    """The error for a field that does not hold what it should."""
    return Unsupported(f"the state's {field!r} is {_in_words(found)}, not {wanted}: {CURE}")


def counter(state: Mapping[str, Any], field: str, least: int = 0, most: int | None = None) -> int:
    """A whole number of the state."""
    value = state.get(field, _MISSING)
    wanted = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"
    try:
        number = operator.index(value)  # also one that a checkpoint keeps as a tensor
    except (TypeError, ValueError, RuntimeError):
        raise refuse(field, value, wanted) from None
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        raise refuse(field, value, wanted)
    return number


def number(state: Mapping[str, Any], field: str) -> float:
    """A number of 0 or more, or infinity."""
    value = state.get(field, _MISSING)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise refuse(field, value, "a number of 0 or more")
    return float(value)


def floats(field: str, value: object, shape: Sequence[int] | None = None, numel: int | None = None) -> torch.Tensor:
    """A tensor of finite floats; of that shape or that many values where one is given."""
    size = (
        f"of shape {tuple(shape)}" if shape is not None else "of any shape" if numel is None else f"of {numel} values"
    )
    wanted = f"a tensor of finite float32, float64 or bfloat16 values {size}"
    if not isinstance(value, torch.Tensor) or value.dtype not in _KEPT:
        raise refuse(field, value, wanted)
    if (shape is not None and tuple(value.shape) != tuple(shape)) or (numel is not None and value.numel() != numel):
        raise refuse(field, value, wanted)
    if not bool(value.isfinite().all()):
        raise Unsupported(
            f"the state's {field!r} holds {int((~value.isfinite()).sum())} NaNs or infinities, which would make all "
            f"parameters NaN: {CURE}"
        )
    return value


def text(field: str, value: object) -> str:
    """What was saved as a tensor of bytes."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        raise refuse(field, value, "a 1-D uint8 tensor")
    try:
        return bytes(value.tolist()).decode()
    except UnicodeDecodeError:
        raise refuse(field, value, "text") from None


def _in_words(found: object) -> str:
    if found is _MISSING:
        return "missing"
    if isinstance(found, torch.Tensor) and found.dim():
        return f"a tensor of shape {tuple(found.shape)} and type {found.dtype}"
    words = repr(found)
    return f"{words if len(words) < 60 else words[:57] + '...'} ({type(found).__name__})"
