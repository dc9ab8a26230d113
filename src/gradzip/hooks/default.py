"""What attach takes where no codec is named: noise where training runs have shown what it costs, else near-lossless.

docs/design.md ("The default") has the rule and its evidence. Optimizers count by exact type: a subclass may do anything
in its step.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..policy import Rules

NEAR, EXACT = "gcomp", "gcomp:mode=lossless"
_NOISE, _FINER = "noise", "noise:share=0.3%"
# The budgets that cost less than 0.1 % of the loss, at their upper bound: 1 % with AdamW and SGD (Adam differs from
# AdamW in weight decay alone), 0.3 % with Muon, by the slope of larger ones.
_PROVED: dict[type[Optimizer], str] = dict.fromkeys((Adam, AdamW, SGD), _NOISE)
if hasattr(torch.optim, "Muon"):  # torch 2.9
    _PROVED[torch.optim.Muon] = _FINER
_WHY = {
    _NOISE: "a budget of 1 % cost less than 0.1 % of the loss where measured",
    _FINER: "a larger budget costs more of the loss with Muon",
}
_CODED = (torch.float32, torch.bfloat16, torch.float16)
_UNCODED = (torch.float64, torch.complex128)  # by gcomp either


class Default(NamedTuple):
    """What was taken, and why."""

    policy: str | Rules
    words: str  # what and why, as a clause
    other: str  # how to have something else

    @property
    def sentence(self) -> str:
        """For the line that is logged at attach."""
        return f"By default it is {self.words}; {self.other}"


def choose(
    optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str], reason_against_streams: str | None
) -> Default:
    """`names`: of parameters that get gradients; `reason_against_streams`: why this GPU cannot send noise, if so."""
    if not optimizers:
        return Default(EXACT, f"{EXACT}, as no optimizer was given", "attach(model, optimizer) sends less")
    reason = _reason_against_noise(optimizers, names, reason_against_streams)
    if reason is None:
        kinds = {type(optimizer) for optimizer in optimizers}
        policy = _FINER if any(_PROVED[kind] == _FINER for kind in kinds) else _NOISE
        trained = " and ".join(sorted(kind.__name__ for kind in kinds))
        words = f"{policy} with {trained}, as {_WHY[policy]}"
        return Default(policy, words, f"attach(model, optimizer, {NEAR!r}) is near-lossless")
    other = "attach(model, optimizer, codec) takes another"
    uncoded = [name for p, name in names.items() if p.dtype in _UNCODED]
    if not uncoded:
        return Default(NEAR, f"{NEAR} and not noise, as {reason}", other)
    plain = {glob.escape(name): "identity" for name in uncoded}
    rest = f"{NEAR} for the others, " if len(uncoded) < len(names) else ""
    return Default(Rules(plain | {"*": NEAR}), f"identity for values of 64 bits, {rest}as {reason}", other)


def in_words(streams: bool = True) -> str:
    """The rule, for tables of what is there; `streams`: whether noise can be sent from this device."""
    if not streams:
        return f"{NEAR}; {EXACT} without an optimizer"
    parts = [
        f"{policy} with {' or '.join(kind.__name__ for kind, its in _PROVED.items() if its == policy)}"
        for policy in dict.fromkeys(_PROVED.values())
    ]
    return f"{', '.join(parts)}, {NEAR} with other optimizers, {EXACT} without one"


def _reason_against_noise(
    optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str], reason_against_streams: str | None
) -> str | None:
    unproved = next((type(o) for o in optimizers if type(o) not in _PROVED), None)
    if unproved is not None:
        return f"nobody has measured what noise costs with {unproved.__qualname__} of {unproved.__module__}"
    uncoded = next((p for p in names if p.dtype not in _CODED), None)
    if uncoded is not None:
        return f"noise is for float32, bfloat16 and float16, and {names[uncoded]!r} is {uncoded.dtype}"
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    unheld = next((name for p, name in names.items() if p not in held), None)
    if unheld is not None:
        return f"no optimizer that attach was given holds {unheld!r}"
    if reason_against_streams is not None:
        return f"noise cannot be sent from this GPU: {reason_against_streams}"
    return None
