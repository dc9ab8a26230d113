"""Messages on the stream runner that work on a copy of their gradients in float32, with what was lost before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...codecs import Codec
from ..program import Program
from .message import DeviceMessage
from .residuals import Piece, Residuals


def upload(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Numbers of the host, brought to a device on its current stream. From pinned memory, so that nobody waits."""
    found = torch.from_numpy(column)
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


class CompensatedMessage(DeviceMessage):
    def __init__(
        self,
        program: Program,
        codec: Codec,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        x: torch.Tensor,
        pieces: Sequence[Piece],
        sums: Sequence[tuple[str, Piece]] = (),
    ) -> None:
        """`x` is for the copy, in which the pieces of tensors lie where they say; `sums` is as in Residuals."""
        super().__init__(program, rank, buffer, tensors)
        self._narrow = program.dtype != torch.float32
        self._x, self._pieces = x, pieces
        self._parts = [tensors[piece.tensor][piece.start : piece.stop] for piece in pieces]
        self._in_x = self._views(x)
        # On the device: CUDA divides by a number of the host by way of its reciprocal, which rounds differently.
        self._divisor = torch.full((), float(program.divisor), device=x.device)
        self._units: dict[float, torch.Tensor] = {}
        self._own_lost = self._divisor
        self._sum_lost: torch.Tensor | None = None
        if codec.error_memory is not None:
            self.residuals = Residuals(codec.name, program.names, pieces, sums)

    def _views(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = x.view(-1)
        return [flat[piece.at : piece.at + piece.stop - piece.start] for piece in self._pieces]

    def lost(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._own_lost, self._sum_lost

    def _take(self) -> torch.Tensor | None:
        """Copies the gradients and adds what was lost before, then rounds to their type; the sums before that.

        None: these are in `_x`, as nothing was rounded.
        """
        parts, before = self._parts, None
        if self.residuals is not None:
            totals, before = self.residuals.totals, self.residuals.before()
            if totals is not None:
                parts = [totals[piece.tensor][piece.start : piece.stop] for piece in self._pieces]
        torch._foreach_copy_(self._in_x, parts)
        if self.residuals is None:
            return None
        if before is not None:
            self._x.add_(before.view(self._x.shape) * self.residuals.scale)
        if not self._narrow:
            return None
        total = self._x.clone()
        self._as_type(self._x)
        return total

    def _as_type(self, x: torch.Tensor) -> torch.Tensor:
        """Rounds float32 values to the gradients' type, in place."""
        return x.copy_(x.to(self.program.dtype)) if self._narrow else x

    def _without(self, unit: float, lost: torch.Tensor) -> torch.Tensor:
        """Residuals without the loss scale."""
        if unit == 1:
            return lost
        if unit not in self._units:
            self._units[unit] = torch.full_like(self._divisor, unit)
        return lost.div_(self._units[unit])
