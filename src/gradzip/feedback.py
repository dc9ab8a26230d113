"""What a rank carries from one step to the next, by parameter name: residuals and codec state.

A residual is what a lossy encode lost; error feedback adds it to the next gradient. Changes of a step are held back
until `commit`: a step whose gradients were not finite is skipped by every optimizer that checks, and must leave no
trace here either (`drop`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from .codecs.base import wide
from .errors import Unsupported
from .sensitivity.near import memory_order

_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

Value = torch.Tensor | int | float

GRADIENT = "gradient"  # the stage of a rank's own gradient; those of sums on the way are called `sum1.0-1024`
_FOLDED = "folded-"  # before the stage of a sum: what it lost goes with the gradient next time


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers (DDP, torch.compile and the like) put into it."""
    return _WRAPPERS.sub("", name)


class Memory:
    """Residuals, kept unscaled and in float32, and the state that codecs keep in `Context.state`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._residuals: dict[str, torch.Tensor] = {}  # by "stage/name"
        self._states: dict[str, dict[str, Any]] = {}  # by "codec/name"
        self._next_residuals: dict[str, torch.Tensor | None] = {}
        self._next_states: dict[str, dict[str, Any]] = {}

    # -- residuals ----------------------------------------------------------------------------------------------

    def compensated(self, name: str, x: torch.Tensor, scale: float = 1.0, stage: str = GRADIENT) -> torch.Tensor:
        """x plus what was lost of it before, in the type of sums; x itself where nothing was.

        `stage` tells the encodes of one route apart; `scale` is the loss scale that x carries.
        """
        residual = self._residuals.get(f"{stage}/{name}")
        total = x if residual is None else wide(x) + residual * scale
        for key in self._folded(name) if stage == GRADIENT else ():
            start, _, stop = key.partition("/")[0].partition(".")[2].partition("-")
            total = wide(total).clone() if total is x else total
            flat = total.permute(memory_order(total)).view(-1)
            flat[int(start) : int(stop)] += self._residuals[key] * scale
        return total

    def lost(self, name: str, residual: torch.Tensor | None, scale: float = 1.0, stage: str = GRADIENT) -> None:
        """Notes what this step's encode lost; None: everything got through, also what was lost before."""
        self._next_residuals[f"{stage}/{name}"] = None if residual is None else wide(residual) / scale
        if stage == GRADIENT:
            self._next_residuals |= dict.fromkeys(self._folded(name))

    @property
    def residuals(self) -> bool:
        """Whether something is held back."""
        return bool(self._residuals)

    def fold(self) -> None:
        """Puts what was lost of sums back to this rank's gradients: the sum is the same, whatever route they take."""
        for key in [key for key in self._residuals if key.startswith("sum")]:
            self._residuals[f"{_FOLDED}{key}"] = self._residuals.pop(key)

    def _folded(self, name: str) -> list[str]:
        return [key for key in self._residuals if key.startswith(_FOLDED) and key.partition("/")[2] == name]

    # -- codec state --------------------------------------------------------------------------------------------

    def state(self, name: str, codec: str) -> dict[str, Any]:
        """The state of one parameter under one codec, for this step to change; by codec name, so that it survives
        a change of the codec's options."""
        key = f"{codec}/{name}"
        return self._next_states.setdefault(key, dict(self._states.get(key, {})))

    # -- steps --------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        for key, residual in self._next_residuals.items():
            if residual is None:
                self._residuals.pop(key, None)
            else:
                self._residuals[key] = residual
        self._states.update({key: state for key, state in self._next_states.items() if state})
        self.drop()

    def drop(self) -> None:
        self._next_residuals, self._next_states = {}, {}

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Value]:
        """Flat, tensors and numbers only. Residuals differ between ranks, so their keys carry the rank."""
        out: dict[str, Value] = {f"rank{self.rank}/residual/{key}": r.clone() for key, r in self._residuals.items()}
        for key, state in self._states.items():
            for field, value in state.items():
                if not isinstance(value, torch.Tensor | int | float):
                    raise Unsupported(f"cannot save {field!r} of {key}: codec state is tensors and numbers")
                out[f"codec/{key}/{field}"] = value.clone() if isinstance(value, torch.Tensor) else value
        return out

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        """Takes the codecs' state and this rank's residuals; those of other ranks are passed over."""
        self.drop()
        self._residuals, self._states = {}, {}
        for key, value in state.items():
            kept = value.clone() if isinstance(value, torch.Tensor) else value
            kind, _, rest = key.partition("/")
            if kind == "codec":
                owner, _, field = rest.rpartition("/")
                self._states.setdefault(owner, {})[field] = kept
            elif kind == f"rank{self.rank}" and rest.startswith("residual/") and isinstance(kept, torch.Tensor):
                self._residuals[rest.removeprefix("residual/")] = kept
