"""The codec `noise` on the stream runner: frames lie in slots, whose size all ranks know (slots.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ... import wire
from ...engines import noise_layout
from ...engines.cuda.noise_message import Layout, NoiseKernels
from ..on_host.noise import NoiseOnHost
from ..program import Program
from .message import DeviceMessage, StreamCodec
from .slots import OWN, SUM, Slots


class NoiseMessage(DeviceMessage):
    """The codec noise, by its kernels; frames lie in slots of a known size."""

    def __init__(
        self,
        program: Program,
        codec: NoiseOnHost,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(program, rank, buffer, tensors)
        columns = self.table.columns()
        keys = {hop: [noise_layout.name_key(0, name, hop, 0) for name in program.names] for hop in (OWN, SUM)}
        layout = Layout(
            tensors, columns.tensor, columns.start, columns.length, columns.owner, self.world, rank,
            keys[OWN], keys[SUM], list(shapes), int(program.digest, 16) & 0xFFFFFFFF,
        )  # fmt: skip
        self.share = _share(codec, program)
        self._divisor = torch.tensor(float(program.divisor), device=buffer.device)  # as in RawMessage
        self.noise_kernels = self._kernels = NoiseKernels(layout, self.share, sizes[OWN], sizes[SUM])
        self._take_buffers()

    def _take_buffers(self) -> None:
        kernels = self._kernels
        self.sent, self.received = kernels.sent, kernels.received
        self.gathered, self.sum_frame = kernels.gathered, kernels.sum_frame

    def resize(self, sizes: Mapping[str, int]) -> bool:
        done = self._kernels.resize(sizes[OWN], sizes[SUM])
        self._take_buffers()
        return done

    def encode(self, step: int) -> None:
        self._kernels.encode(step)

    def reduce(self, step: int) -> None:
        self._kernels.reduce(step)

    def decode(self, step: int) -> None:
        self._kernels.decode(step)

    def keep(self, step: int) -> None:
        self._kernels.add(step)
        for part, total in zip(self._own_parts, self._kernels.sums):
            part.copy_(total / self._divisor)


def _share(codec: NoiseOnHost, program: Program) -> float:
    """Levels are those of half the budget: where a value is encoded once, it may have all of it."""
    return float(codec.codec.share) * 2 / program.hops


class NoiseOnStream(StreamCodec):
    codec: NoiseOnHost
    codes_sums = True

    def __init__(self, codec: NoiseOnHost) -> None:
        self.codec, self.text = codec, codec.text

    def slots(self, program: Program) -> Slots:
        table = program.dealt
        counts = [[part.numel for part in table.of_owner(owner)] for owner in range(program.world)]
        least = wire.HEADER_BYTES + max(map(noise_layout.blocks_offset, counts))
        values = max(sum(map(noise_layout.padded, each)) for each in counts)
        bound = wire.HEADER_BYTES + max(map(noise_layout.body_bound, counts))
        return Slots.first(_share(self.codec, program), program.world, least, values, bound)

    def message(
        self,
        program: Program,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int],
    ) -> DeviceMessage:
        return NoiseMessage(program, self.codec, rank, buffer, tensors, shapes, sizes)
