"""The codecs `int8`, `int4` and `fp8` on the stream runner: frames whose size follows from the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..engines.cuda.scaled import Layout
from ..engines.cuda.scaled import ScaledMessage as Kernels
from .on_device import DeviceMessage, StreamCodec
from .program import Program
from .scaled import ScaledMessages


class ScaledMessage(DeviceMessage):
    """Frames hold scales and codes alone, and every bit pattern stands for numbers: nothing can be wrong with them."""

    def __init__(
        self,
        program: Program,
        codec: ScaledMessages,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(program, rank, buffer, tensors)
        columns = self.table.columns()
        layout = Layout(
            tensors, columns.tensor, columns.start, columns.length, columns.owner, program.names, self.world, rank
        )
        self._kernels = kernels = Kernels(layout, codec.form)
        self.sent, self.received = kernels.sent, kernels.received
        self.gathered, self.sum_frame = kernels.gathered, kernels.sum_frame

    def encode(self, step: int) -> None:
        self._kernels.encode(step)

    def reduce(self, step: int) -> None:
        self._kernels.reduce(step)

    def decode(self, step: int) -> None:
        self._kernels.decode(step)


class ScaledOnStream(StreamCodec):
    codes_sums = True

    def __init__(self, codec: ScaledMessages) -> None:
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
