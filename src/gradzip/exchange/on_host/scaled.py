"""The codecs `int8`, `int4` and `fp8` for whole messages: one frame holds the parts of many tensors.

Blocks are counted from the beginning of a part, and draws follow from step, name and place in the tensor, so that
results do not depend on buckets. docs/format.md has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ... import engines
from ...codecs.scaled import Scaled
from ...engines import noise_layout, scaled_layout
from ...engines.scaled_layout import Form, Parts
from ..coding import Coder, Frames, Message, MessageCodec, Values, in_float32
from ..parts import Table
from ..program import Hop


class ScaledOnHost(MessageCodec):
    codes_sums = True
    widest = 4

    def __init__(self, codec: Scaled) -> None:
        self.form, self.text = codec.form, str(codec)

    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        return scaled_layout.places([part.numel for part in table.of_owner(owner)], self.form).size

    def coder(self, message: Message) -> Coder:
        return _ScaledCoder(message, self.form)


class _ScaledCoder(Coder):
    def __init__(self, message: Message, form: Form) -> None:
        super().__init__(message)
        self._form = form
        self._engine = engines.scaled("cpu")
        self._own = Values([])  # the rank's own gradients, in float32
        self._keys = {hop: self._drawn(hop) for hop in ("own", "sum", "signs")}

    def _drawn(self, hop: str) -> npt.NDArray[np.uint64]:
        seed, step = self.message.seed, self.message.step
        return np.array([noise_layout.key_of(seed, step, name, hop, 0) for name in self.message.names], np.uint64)

    def measure(self, values: Values) -> None:
        super().measure(values)
        self._own = in_float32(values)

    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        assert hop.own
        sizes = []
        for owner, room in zip(owners, out):
            parts = self._parts(self._own, table, owner, "own")
            sizes.append(parts.places.size)
            self._engine.code(parts, [], out=room[: parts.places.size])
        return sizes

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        wide = in_float32(out, fill=False)
        parts = self._parts(wide, table, owner, "sum", None if own is None else self._own)
        self._engine.code(parts, self._cut(parts, frames), by)
        targets, sums = out.parts(table, owner), wide.parts(table, owner)
        most = torch.finfo(out.tensors[0].dtype).max  # a code may stand for more than a type of 16 bits holds
        if wide is not out or own is not None:
            for total in sums:
                total.clamp_(-most, most)
        if own is not None:
            for total, mine in zip(sums, self._own.parts(table, owner)):
                total.masked_fill_(~mine.isfinite(), torch.nan)
        if wide is not out and targets:
            torch._foreach_copy_(targets, sums)

    def recode(
        self,
        table: Table,
        owner: int,
        frames: Frames,
        own: Values | None,
        hop: Hop,
        by: int,
        after: Hop,
        out: torch.Tensor,
    ) -> int:
        parts = self._parts(self._own, table, owner, "sum")
        self._engine.code(parts, self._cut(parts, frames), by, out[: parts.places.size])
        return parts.places.size

    @staticmethod
    def _cut(parts: Parts, frames: Frames) -> list[torch.Tensor | None]:
        """Frames without what follows them; one that is too short is refused by the engine."""
        return [None if frame is None else frame[: parts.places.size] for frame in frames]

    def _parts(self, values: Values, table: Table, owner: int, hop: str, own: Values | None = None) -> Parts:
        """An owner's parts. There is an array for each use: threads work on several at once.

        `own`: where the rank's own values are, if not in `values`.
        """
        key = table.digest, owner, hop
        if key not in values.kept:
            columns, tensors = table.columns(owner), values.parts(table, owner)
            own_parts = tensors if own is None else own.parts(table, owner)
            values.kept[key] = columns.tensor, Parts(self._form, own_parts, tensors, columns.start)
        tensor, parts = values.kept[key]
        offset = noise_layout.offset_of(self.message.rank, self.message.world) if hop == "own" else 0
        filled: Parts = parts.fill(self._keys[hop][tensor], self._keys["signs"][tensor], offset)
        return filled
