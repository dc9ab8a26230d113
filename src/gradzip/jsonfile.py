"""Reads JSON that anybody may have written, cut off or damaged: what is wrong becomes an error that names the place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from .errors import GradzipError

LARGEST = 1e100  # of any number: sums and products of a few of them stay finite
MOST = 1 << 53  # of whole numbers: floats hold all of them exactly


def load(path: str | Path, what: str, error: Callable[[str], GradzipError]) -> Any:
    """What a file holds; `what` it should be, for messages."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"cannot read the {what} {path}: {getattr(cause, 'strerror', None) or cause}") from cause
    return parse(text, str(path), error)


def parse(text: str, where: str, error: Callable[[str], GradzipError]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{where} is not JSON: {cause}") from cause


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number of a size that can be calculated with; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST and not (isinstance(value, float) and math.isnan(value))


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether it is a whole number of that size at least."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def shown(value: object) -> str:
    """A value as messages show it: huge ones are cut."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nested too deep
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
