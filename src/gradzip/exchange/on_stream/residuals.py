"""Residuals of a message on the stream runner, which stay on the GPU as one tensor for all gradients.

Memory is told of them as a bundle: nothing is done for each parameter in a step. The step that finds them under other
names (the first one, after another codec, after a state was loaded) takes them one by one, and the host decides
whether what it leaves is kept. From then on the device takes back what a step with a mean that is not finite has noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...codecs.base import Kept, wide
from ...engines.cuda.restore import Change
from ...feedback import Memory
from ..flattening import flatten, unflatten


class Piece(NamedTuple):
    """Where a range of a tensor's values lies among the residuals of a message."""

    tensor: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, eq=False)
class Order:
    """How the residuals of a message lie. It holds none of the gradients, so that steps may keep it."""

    names: tuple[str, ...]
    like: list[torch.Tensor]  # of each gradient: its shape and strides, without memory
    own: list[Piece]  # what was lost of the gradients, ascending for each tensor
    sums: list[tuple[str, Piece]]  # what was lost of sums, with what Memory calls it


class Lost(Kept):
    """What a step leaves: residuals without the loss scale."""

    def __init__(self, order: Order, own: torch.Tensor, sums: torch.Tensor | None) -> None:
        self.order, self.own, self._sums = order, own.view(-1), None if sums is None else sums.view(-1)

    def changes(self, before: Lost) -> list[Change]:
        found = [Change(self.own, before.own)]
        if self._sums is not None and before._sums is not None:
            found.append(Change(self._sums, before._sums))
        return found

    @property
    def of_sums(self) -> torch.Tensor | None:
        return self._sums

    @property
    def residuals(self) -> list[torch.Tensor | None]:
        parts: list[list[torch.Tensor]] = [[] for _ in self.order.like]
        for piece in self.order.own:
            parts[piece.tensor].append(self.own[piece.at : piece.at + piece.stop - piece.start])
        return [unflatten(torch.cat(each), like) for each, like in zip(parts, self.order.like)]

    @property
    def states(self) -> list[dict[str, Any]]:
        return [{} for _ in self.order.like]

    @property
    def sums(self) -> list[Mapping[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.order.like]
        if self._sums is not None:
            for stage, piece in self.order.sums:
                found[piece.tensor][stage] = self._sums[piece.at : piece.at + piece.stop - piece.start]
        return list(found)


class Residuals:
    """What a message adds to its gradients and its sums in a step, and what it leaves."""

    def __init__(
        self, codec: str, names: Sequence[str], own: Sequence[Piece], sums: Sequence[tuple[str, Piece]] = ()
    ) -> None:
        """`codec`: its name."""
        self._order, self._codec = Order(tuple(names), [], sorted(own), list(sums)), codec
        self._before: Lost | None = None
        self.totals: list[torch.Tensor] | None = None  # gradients with what was lost, where that was found by name
        self._memory: Memory | None = None
        self.scale = 1.0

    def begin(self, memory: Memory, shaped: Sequence[torch.Tensor], scale: float) -> None:
        """Before a step; `shaped` are the gradients as users have them, `scale` is the loss scale."""
        names = self._order.names
        self._order.like[:] = self._order.like or map(_meta, shaped)
        found = memory.kept_by(self, names)
        self._before, self.totals = found if isinstance(found, Lost) else None, None
        self._memory, self.scale = memory, scale
        if self._before is None:
            totals = (memory.compensated(name, x, scale) for name, x in zip(names, shaped))
            self.totals = [flatten(wide(total), x) for total, x in zip(totals, shaped)]

    def before(self) -> torch.Tensor | None:
        """What was lost of the gradients, unless it is in `totals` already."""
        return None if self._before is None else self._before.own

    def before_of_sums(self, like: torch.Tensor) -> torch.Tensor | None:
        """What was lost of sums; None: nothing."""
        if self._before is not None:
            return self._before.of_sums
        assert self._memory is not None
        held = [self._memory.residual(self._order.names[piece.tensor], stage) for stage, piece in self._order.sums]
        if all(residual is None for residual in held):
            return None
        flat = torch.full_like(like, -0.0).view(-1)  # which changes nothing that it is added to
        for residual, (_, piece) in zip(held, self._order.sums):
            if residual is not None:
                flat[piece.at : piece.at + piece.stop - piece.start].copy_(residual)
        return flat

    def end(self, own: torch.Tensor, sums: torch.Tensor | None) -> tuple[list[Change] | None, object]:
        """Tells Memory what this step has lost. What the device takes back if need be, or None: the host has to;
        and what is to be kept until the step is through."""
        assert self._memory is not None
        kept, before, totals = Lost(self._order, own, sums), self._before, self.totals
        self._memory.forms.update(dict.fromkeys(self._order.names, "fp32"))
        self._memory.keep_all(self, self._order.names, self._codec, kept)
        self._before = self.totals = self._memory = None
        return None if before is None else kept.changes(before), (before, totals)


def _meta(x: torch.Tensor) -> torch.Tensor:
    """The shape and strides of a tensor."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
