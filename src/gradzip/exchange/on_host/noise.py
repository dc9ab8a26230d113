"""The codec `noise` for whole messages: levels of whole tensors, draws by step and name, and what the noise comes to.

Own gradients are rounded with the level of their whole tensor, whatever part of it a frame holds. Sums are rounded with
a level that follows from those of all ranks, which the frames bring along. docs/format.md has the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ... import engines, wire
from ...codecs.noise import Noise
from ...engines import noise_layout
from ...engines.noise_layout import HEAD_BYTES, PackedParts, Slot
from ..coding import AddedNoise, Coder, Frames, Message, MessageCodec, Values, in_float32
from ..parts import Table
from ..program import Hop


class NoiseOnHost(MessageCodec):
    codes_sums = True
    widest = 4
    chunk = 1 << 20

    def __init__(self, codec: Noise) -> None:
        self.codec, self.text = codec, str(codec)
        self._bounds: dict[tuple[str, int], int] = {}
        self._name_keys: dict[tuple[int, str, Sequence[str]], npt.NDArray[np.uint64]] = {}

    def bound(self, table: Table, owner: int, kind: torch.dtype) -> int:
        key = table.digest, owner
        if key not in self._bounds:
            counts = [part.numel for part in table.of_owner(owner)]
            self._bounds[key] = wire.HEADER_BYTES + noise_layout.body_bound(counts)
        return self._bounds[key]

    def coder(self, message: Message) -> Coder:
        keys = {hop: noise_layout.keys_in_step(self._drawn(message, hop), message.step) for hop in ("own", "sum")}
        share = float(self.codec.share) * 2 / message.hops  # levels are those of half the budget
        return _NoiseCoder(message, share, keys)

    def _drawn(self, message: Message, hop: str) -> npt.NDArray[np.uint64]:
        """What the keys of a message's tensors have in common in all steps: hashes of names, made once."""
        key = message.seed, hop, tuple(message.names)
        if key not in self._name_keys:
            found = [noise_layout.name_key(message.seed, name, hop, 0) for name in message.names]
            self._name_keys[key] = np.array(found, np.uint64)
        return self._name_keys[key]


class _NoiseCoder(Coder):
    def __init__(self, message: Message, share: float, keys: dict[str, npt.NDArray[np.uint64]]) -> None:
        """`keys`: of each tensor, for own gradients and for sums."""
        super().__init__(message)
        self._share, self._step, self._keys = share, message.step, keys
        self._engine = engines.noise("cpu")
        self._own = Values([])  # the rank's own gradients, in float32
        self._levels = np.zeros(len(message.names), np.float32)  # of its tensors
        self._weights = np.zeros(len(message.names))  # sum of 4^d of each tensor
        self._level_of_sum = np.zeros(len(message.names))
        self._whole = Table.of([], [], [1])  # whole tensors, for one owner
        self._coarser = 0
        self._squares = dict[
            tuple[str, int], tuple[int, float]
        ]()  # of the means in each frame: how many, and their sum
        self._offset = noise_layout.offset_of(message.rank, message.world)

    def measure(self, values: Values) -> None:
        super().measure(values)
        self._own = in_float32(values)
        if "whole" not in values.kept:
            values.kept["whole"] = Table.of(self.message.names, [tensor.numel() for tensor in values.tensors], [1])
        self._whole = values.kept["whole"]
        found = self._engine.measure(self._parts(self._own, self._whole, 0, "whole"))
        filled = self._whole.columns().tensor  # empty tensors are in no table
        self._weights[filled] = found.weights / 4.0**12
        self._levels[filled] = noise_layout.levels(found, self._share, self.message.world)

    def encode(
        self, table: Table, owners: Sequence[int], values: Values, hop: Hop, out: Sequence[torch.Tensor]
    ) -> list[int]:
        assert hop.own
        slots = [Slot(self._own_parts(table, owner), room) for owner, room in zip(owners, out)]
        written = self._engine.encode_frames(slots, self._step, 0)
        self._coarser += sum(frame.notch > 0 for frame in written)
        return [frame.size for frame in written]

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        targets, wide = out.parts(table, owner), in_float32(out, fill=False)
        parts = self._parts(wide, table, owner, "mean")
        if own is not None:
            self._add_up(table, owner, frames, wide, parts, by)
        else:
            (frame,) = frames
            assert frame is not None
            squares = self._engine.decode_means(frame, parts, self._step, 0, by)
            self._squares[table.digest, owner] = int(table.columns(owner).length.sum()), squares
            self._note_levels(table, owner, frame)
        if wide is not out and targets:
            torch._foreach_copy_(targets, wide.parts(table, owner))

    def _add_up(self, table: Table, owner: int, frames: Frames, out: Values, parts: PackedParts, by: int) -> None:
        """What a reduce-scatter ends with: the sum is not coded again."""
        sums, own = out.parts(table, owner), self._own.parts(table, owner)
        for number, frame in enumerate(frames if sums else ()):
            if frame is not None:
                self._engine.decode_frame(frame, parts, self._step, 0, add=number > 0)
            elif number:
                torch._foreach_add_(sums, own)
            else:
                torch._foreach_copy_(sums, own)
        for total in sums:
            total.div_(by)

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
        slot = Slot(self._parts(self._own, table, owner, "sum"), out)
        written = self._engine.reduce(terms, slot, self._step, 0)
        self._coarser += written.notch > 0
        return int(written.size)

    def added_noise(self, values: Values) -> AddedNoise | None:
        """The variance of a sum is a third of its level squared: half of that from own gradients, half from the sum."""
        if self.message.hops < 2:
            return None  # no sum was coded
        noise = float((self._level_of_sum**2 * self._weights).sum()) / (3 * self.message.world**2)
        return AddedNoise(noise, self._squares_of(values), self._share, self._coarser)

    def _squares_of(self, means: Values) -> float:
        """The sum of their squares, from the frames that they were decoded from."""
        counts, squares = zip(*self._squares.values()) if self._squares else ((), ())
        exact = in_float32(means, fill=False) is means
        if exact and sum(counts) == self._whole.columns().length.sum():
            return math.fsum(squares)  # in whatever order frames came
        # Values of 16 bits may have become infinite in their own type.
        found = self._engine.measure(self._parts(in_float32(means), self._whole, 0, "whole"))
        return float(found.squares.sum()) if found.finite.all() else math.nan

    def _note_levels(self, table: Table, owner: int, frame: torch.Tensor) -> None:
        tensors, data = table.columns(owner).tensor, frame.numpy()[wire.HEADER_BYTES :]
        if data.size < HEAD_BYTES + 4 * tensors.size:
            return  # a poisoned frame has none
        notch = int(data[4:6].view("<u2")[0])
        levels = data[HEAD_BYTES : HEAD_BYTES + 4 * tensors.size].view("<f4")
        self._level_of_sum[tensors] = levels * 2.0 ** (notch / 4)

    def _own_parts(self, table: Table, owner: int) -> PackedParts:
        """This rank's own values, with the levels of their tensors."""
        return self._parts(self._own, table, owner, "own", self._offset, self._levels)

    def _parts(
        self,
        values: Values,
        table: Table,
        owner: int,
        what: str,
        offset: int = 0,
        levels: npt.NDArray[np.float32] | None = None,
    ) -> PackedParts:
        """An owner's parts. There is an array for each use: threads work on several at once."""
        key = table.digest, owner, what
        if key not in values.kept:
            columns = table.columns(owner)
            values.kept[key] = PackedParts(values.parts(table, owner), columns.tensor, columns.start)
        packed: PackedParts = values.kept[key]
        return packed.fill(self._keys["sum" if what == "sum" else "own"], offset, levels, self.message.shapes)
