"""The codecs `int8`, `int4` and `fp8` on the stream runner: frames whose size follows from the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...engines.cuda.scaled import Layout, ScaledKernels
from ..on_host.scaled import ScaledOnHost
from ..program import REDUCE_SCATTER, Program
from .message import DeviceMessage, StreamCodec


class ScaledMessage(DeviceMessage):
    """Frames hold scales and codes alone, and every bit pattern stands for numbers: nothing can be wrong with them."""

    def __init__(
        self,
        program: Program,
        codec: ScaledOnHost,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(program, rank, buffer, tensors)
        columns = self.table.columns()
        layout = Layout(
            tensors, columns.tensor, columns.start, columns.length, columns.owner, program.names, self.world, rank
        )
        kept = program.divisor if program.route == REDUCE_SCATTER else None
        self._kernels = kernels = ScaledKernels(layout, codec.form, kept)
        self.sent, self.received = kernels.sent, kernels.received
        self.gathered, self.sum_frame = kernels.gathered, kernels.sum_frame

    def encode(self, step: int) -> None:
        self._kernels.encode(step)

    def reduce(self, step: int) -> None:
        self._kernels.reduce(step)

    def decode(self, step: int) -> None:
        self._kernels.decode(step)

    def keep(self, step: int) -> None:
        assert self._kernels.keep is not None
        bad = [~part.isfinite() for part in self._own_parts]
        self._kernels.keep(step)
        for part, wrong in zip(self._own_parts, bad):
            part.masked_fill_(wrong, torch.nan)  # sums are bounded, so that an infinity would not be seen


class ScaledOnStream(StreamCodec):
    codec: ScaledOnHost
    codes_sums = True

    def __init__(self, codec: ScaledOnHost) -> None:
        self.codec, self.text = codec, codec.text

    def message(
        self,
        program: Program,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int],
    ) -> DeviceMessage:
        return ScaledMessage(program, self.codec, rank, buffer, tensors)
