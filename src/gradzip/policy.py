"""Policies: which Option a gradient gets.

All ranks must answer alike; a difference is noticed at the first exchange of a step and raised on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from .codecs import Codec, parse
from .errors import Unsupported
from .option import Option

PLAIN = Option("identity")
TINY = 1024  # values; below this, an exchange costs the same whatever it carries


@runtime_checkable
class Policy(Protocol):
    """Asked once per step and parameter."""

    def option(self, name: str, shape: Sequence[int]) -> Option:
        """How the gradient of the parameter of that name and shape travels."""
        ...


def checked(option: str | Codec | Option) -> Option:
    """An Option whose codec exists and is written in its shortest form."""
    if isinstance(option, Codec):
        return Option(str(option))
    option = Option.parse(option)
    return Option(str(parse(option.codec)), option.device, option.route)


def small(shape: Sequence[int]) -> bool:
    """Vectors and tiny tensors: not worth compressing."""
    numel = 1
    for size in shape:
        numel *= size
    return len(shape) <= 1 or numel < TINY


@dataclass(frozen=True)
class Fixed:
    """The same option for every gradient, whatever its size."""

    chosen: Option

    def __init__(self, option: str | Codec | Option) -> None:
        object.__setattr__(self, "chosen", checked(option))

    def option(self, name: str, shape: Sequence[int]) -> Option:
        return self.chosen


@dataclass(frozen=True)
class Rules:
    """Options by parameter name: the first pattern that matches decides (`*`, `?` and `[abc]` as in file names).

    Vectors and tiny tensors travel uncompressed, unless `small=True` puts them under the rules too. A parameter
    that no pattern matches is uncompressed.
    """

    rules: Mapping[str, Option] = field(default_factory=dict)
    small: bool = False

    def __init__(self, rules: Mapping[str, str | Codec | Option], small: bool = False) -> None:
        object.__setattr__(self, "rules", {pattern: checked(option) for pattern, option in rules.items()})
        object.__setattr__(self, "small", small)

    def option(self, name: str, shape: Sequence[int]) -> Option:
        if not self.small and small(shape):
            return PLAIN
        return next((option for pattern, option in self.rules.items() if fnmatchcase(name, pattern)), PLAIN)


def as_policy(policy: str | Codec | Option | Policy) -> Policy:
    """A codec or option becomes the rule for everything but vectors and tiny tensors; a Policy stays what it is."""
    if isinstance(policy, str | Codec | Option):
        return Rules({"*": policy})
    if isinstance(policy, Policy):
        return policy
    raise Unsupported(
        f"{policy!r} is no policy: give a codec's text form such as 'topk:ratio=0.01', a Codec, an Option or an "
        "object with option(name, shape)"
    )
