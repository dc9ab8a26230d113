"""Policies: which Option a gradient gets.

All ranks must answer alike. The host runner compares the answers in each step, the stream runner when they change. If
they differ, every rank raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch

from .codecs import Codec, parse
from .codecs.base import REGISTRY, similar
from .errors import Unsupported
from .option import Option

PLAIN = Option("identity")
TINY = 1024  # values; below this, an exchange costs the same whatever it carries


@runtime_checkable
class Policy(Protocol):
    """Asked in each step for each parameter; `Fixed`, `Rules` and `Plan`, which always answer alike, once."""

    def option(self, name: str, shape: Sequence[int]) -> Option:
        """How the gradient of the parameter of that name and shape travels."""
        ...


@runtime_checkable
class Adaptive(Policy, Protocol):
    """A Policy that learns from the training. All ranks see the same, so they go on answering alike.

    After a backward whose gradients proved finite on all ranks, the handle calls `observe` for every parameter that
    got one and then `end_step`. Nothing of a step that failed is seen.
    """

    history: list[dict[str, Any]]  # what was decided and when, for `Handle.stats`

    def observe(self, name: str, mean: torch.Tensor, scale: float = 1.0) -> None:
        """Sees a gradient averaged over all ranks, before clipping; `scale` is the loss scale that it carries."""
        ...

    def end_step(self, rates: Sequence[float]) -> None:
        """Ends a step that was taken with these learning rates, one for each parameter group."""
        ...

    def end_epoch(self) -> None:
        """Ends an epoch: the user says so, by `Handle.end_epoch`."""
        ...

    def held(self) -> int:
        """Bytes that it holds from step to step."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor | int | float]:
        """All that a resume needs, flat; equal on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor | int | float]) -> None: ...


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

    Vectors and tiny tensors travel uncompressed (`Codec.small_form`), unless `small=True` puts them under the rules
    too. A parameter that no pattern matches is uncompressed.
    """

    rules: Mapping[str, Option] = field(default_factory=dict)
    small: bool = False
    _small_forms: Mapping[str, Option] = field(default_factory=dict, repr=False, compare=False)

    def __init__(self, rules: Mapping[str, str | Codec | Option], small: bool = False) -> None:
        object.__setattr__(self, "rules", {pattern: checked(option) for pattern, option in rules.items()})
        object.__setattr__(self, "small", small)
        forms = {pattern: Option(parse(option.codec).small_form) for pattern, option in self.rules.items()}
        object.__setattr__(self, "_small_forms", forms)

    def option(self, name: str, shape: Sequence[int]) -> Option:
        rules = self._small_forms if not self.small and small(shape) else self.rules
        return next((option for pattern, option in rules.items() if fnmatchcase(name, pattern)), PLAIN)


def as_policy(policy: str | Codec | Option | Policy) -> Policy:
    """A codec or option becomes the rule for everything but vectors and tiny tensors; a Policy stays what it is."""
    if isinstance(policy, str) and (name := re.split("[:@/]", policy.strip())[0]) not in REGISTRY:
        meant = similar(name)
        raise _not_a_policy(policy, f" Did you mean {meant!r}?" if meant else "")
    if isinstance(policy, str | Codec | Option):
        return Rules({"*": policy})
    if isinstance(policy, Policy):
        return policy
    raise _not_a_policy(policy)


def _not_a_policy(policy: object, hint: str = "") -> Unsupported:
    return Unsupported(
        f"{policy!r} is not a policy.{hint} A policy is a codec such as 'topk:ratio=0.01', a Plan, or an object with "
        "option(name, shape)"
    )
