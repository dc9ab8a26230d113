"""The codec `noise` for whole messages: levels of whole tensors, draws by step and name, and what the noise comes to.

Own gradients are rounded with the level of their whole tensor, whatever part of it a frame holds. Sums are rounded with
a level that follows from those of all ranks, which the frames bring along. docs/format.md has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .. import engines
from ..codecs.noise import Noise
from ..engines import noise_layout
from ..engines.noise_layout import HEAD_BYTES, Part
from .coding import Coder, Frames, Message, MessageCodec, Noisy, Values
from .parts import Table
from .program import Hop


class NoiseMessages(MessageCodec):
    known_size = False
    codes_sums = True

    def __init__(self, codec: Noise) -> None:
        self.codec, self.text = codec, str(codec)
        self._bounds: dict[tuple[str, int], int] = {}

    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        key = table.digest, owner
        if key not in self._bounds:
            counts = [part.numel for part in table.of_owner(owner)]
            self._bounds[key] = noise_layout.body_bound(counts)
        return self._bounds[key]

    def coder(self, message: Message) -> Coder:
        return _NoiseCoder(message, float(self.codec.share))


class _NoiseCoder(Coder):
    def __init__(self, message: Message, share: float) -> None:
        super().__init__(message)
        self._share = share
        self._engine = engines.noise("cpu")
        self._own = Values([])  # the rank's own gradients, in float32
        self._levels: list[float] = []  # of its tensors
        self._weights = np.zeros(len(message.names))  # sum of 4^d of each tensor
        self._level_of_sum = np.zeros(len(message.names))
        self._coarser = 0
        self._offset = noise_layout.offset_of(message.rank, message.world)
        self._keys = {
            hop: [noise_layout.key_of(message.seed, message.step, name, hop, 0) for name in message.names]
            for hop in ("own", "sum")
        }

    def measure(self, values: Values) -> None:
        self._own = Values([tensor.float() for tensor in values.tensors])
        for number, tensor in enumerate(self._own.tensors):
            found = self._engine.statistics(tensor, self._shape(number))
            self._weights[number] = found.weights / 4.0**12
            self._levels.append(noise_layout.level(found, self._share, self.message.world))

    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        assert hop.own
        sizes = []
        for owner, room in zip(owners, out):
            size, notch = self._engine.encode(self._own_parts(table, owner), room, self.message.step)
            self._coarser += notch > 0
            sizes.append(size)
        return sizes

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        (frame,) = frames
        assert frame is not None
        targets = out.parts(table, owner)
        wide = all(target.dtype == torch.float32 for target in targets)
        places = targets if wide else [torch.empty(target.numel()) for target in targets]
        self._engine.decode(frame, self._parts(table, owner, places), divisor=by)
        if not wide:
            torch._foreach_copy_(targets, places)
        self._note_levels(table, owner, frame)

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
        assert hop.own
        assert by == 1
        terms = [self._own_parts(table, owner) if frame is None else frame for frame in frames]
        sums = self._parts(table, owner, self._own.parts(table, owner), "sum")
        size, notch = self._engine.reduce(terms, sums, out, self.message.step)
        self._coarser += notch > 0
        return int(size)

    def noisy(self, values: Values) -> Noisy:
        """The variance of a sum is a third of its level squared: half of that from own gradients, half from the sum."""
        noise = float((self._level_of_sum**2 * self._weights).sum()) / (3 * self.message.world**2)
        filled = [tensor for tensor in values.tensors if tensor.numel()]
        norms = torch.stack(list(torch._foreach_norm(filled, dtype=torch.float64))) if filled else torch.zeros(1)
        return Noisy(noise, float(norms.square().sum()), self._share, self._coarser)

    def _note_levels(self, table: Table, owner: int, frame: torch.Tensor) -> None:
        tensors = table.columns(owner).tensor
        if frame.numel() < HEAD_BYTES + 4 * tensors.size:
            return  # a poisoned frame has none
        data = frame.numpy()
        notch = int(data[4:6].view("<u2")[0])
        levels = data[HEAD_BYTES : HEAD_BYTES + 4 * tensors.size].view("<f4")
        self._level_of_sum[tensors] = levels * 2.0 ** (notch / 4)

    def _own_parts(self, table: Table, owner: int) -> list[Part]:
        """This rank's own values, with the levels of their tensors."""
        return self._parts(table, owner, self._own.parts(table, owner), "own", self._offset, self._levels)

    def _parts(
        self,
        table: Table,
        owner: int,
        values: Sequence[torch.Tensor],
        hop: str = "sum",
        offset: int = 0,
        levels: Sequence[float] | None = None,
    ) -> list[Part]:
        parts, keys = [], self._keys[hop]
        for part, x in zip(table.of_owner(owner), values):
            shape = self._shape(part.tensor)
            here = None if shape is None else shape[part.start : part.stop]
            level = 0.0 if levels is None else levels[part.tensor]
            parts.append(Part(x, level, here, part.start, keys[part.tensor], offset))
        return parts

    def _shape(self, tensor: int) -> torch.Tensor | None:
        return self.message.shapes[tensor] if self.message.shapes else None
