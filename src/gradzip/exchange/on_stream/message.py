"""Messages in the memory of a GPU: the buffers of one message, and what is launched to code it.

A message is exchanged by owners of parts: `sent` goes out by an all-to-all and comes in as `received`; `sum_frame`,
this rank's share of `gathered`, goes to all by an all-gather. Everything is enqueued on the current stream; tables and
buffers are made once for a layout, and the host waits for nothing.

What a codec on streams has to implement is here (StreamCodec, DeviceMessage), and so are `identity` and `cast`, whose
frames are values one behind the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...engines.cuda.noise_message import NoiseKernels
from ...errors import Unsupported
from ...routes import NAMED
from ..coding import MessageCodec, Raw
from ..program import Program
from .residuals import Residuals
from .slots import Slots


class Checked(ABC):
    """What the row of checks knows of a message (checks.py)."""

    program: Program
    # They tell the row of wrong frames, sizes and noise. None: the frames hold values alone, and nothing can be wrong
    # with them.
    noise_kernels: NoiseKernels | None = None
    share = 0.0  # of the means' squares that noise may be

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """By this rank in a step."""

    @property
    @abstractmethod
    def moved(self) -> tuple[int, ...]:
        """Sizes of what collectives move: all ranks must have the same."""

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """A number in float64 that is finite if all means are. Not asked for where there are `noise_kernels`."""


class DeviceMessage(Checked):
    """One message on this rank. `tensors` are flat and lie in `buffer`, DDP's bucket; they become their means."""

    scatters = True  # else frames of all gradients go to all ranks at once: `sum_frame` is this rank's
    residuals: Residuals | None = None  # where it feeds back what it loses

    sent: torch.Tensor
    received: torch.Tensor
    gathered: torch.Tensor
    sum_frame: torch.Tensor

    def __init__(self, program: Program, rank: int, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self.program, self.world, self.rank = program, program.world, rank
        self.table = program.dealt
        owned = self.table.of_owner(rank) if self.scatters else ()
        self._own_parts = [tensors[part.tensor][part.start : part.stop] for part in owned]
        self._buffer, self._tensors = buffer, [tensor for tensor in tensors if tensor.numel()]
        self._is_all = sum(program.sizes) == buffer.numel()

    @abstractmethod
    def encode(self, step: int) -> None:
        """Fills `sent` with a frame for each other rank."""

    @abstractmethod
    def reduce(self, step: int) -> None:
        """Adds up what came, in float32 and in the order of ranks, and fills `sum_frame`."""

    @abstractmethod
    def decode(self, step: int) -> None:
        """Makes means of what was gathered."""

    def keep(self, step: int) -> None:
        """Instead of `reduce` in a reduce-scatter (calls.py): adds up what came, into the rank's own parts."""
        raise Unsupported(
            f"{self.program.codec} is not for a reduce-scatter by streams: no rank adds up the frames of its part. "
            "Use noise, int8, int4, fp8, cast or identity"
        )

    def lost(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """What was lost of the gradients and of sums, for `residuals`: new memory in each step. None: nothing is fed
        back."""
        return None

    def resize(self, sizes: Mapping[str, int]) -> bool:
        """Goes over to slots of other sizes, on the current stream; False: it takes a new message."""
        return False

    @property
    def bytes_sent(self) -> int:
        """With padding."""
        return (self.world - 1) * (self.sent.numel() + self.gathered.numel()) // self.world

    @property
    def moved(self) -> tuple[int, ...]:
        return self.sent.numel(), self.gathered.numel()

    def norm(self) -> torch.Tensor:
        """The norm of the means."""
        if self._is_all:
            found: torch.Tensor = torch.linalg.vector_norm(self._buffer, dtype=torch.float64)
        else:
            norms = torch.stack(list(torch._foreach_norm(self._tensors, dtype=torch.float64)))
            found = torch.linalg.vector_norm(norms)
        return found


class RawMessage(DeviceMessage):
    """Values as they are, or rounded to 16 bits. A frame is a row of `width` values, the last of them padding."""

    def __init__(
        self, program: Program, codec: Raw, rank: int, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(program, rank, buffer, tensors)
        world, device, dtype = self.world, buffer.device, program.dtype
        kind, wide = codec.kind(dtype), torch.promote_types(dtype, torch.float32)
        width = max(1, *map(self.table.numel, range(world)))
        places = [(tensor.data_ptr() - buffer.data_ptr()) // buffer.element_size() for tensor in tensors]
        source = np.zeros((world, width), np.int64)  # of each value in a frame: its place in the bucket
        target = np.zeros(sum(program.sizes), np.int64)  # of each value of the tensors: its place in the frames
        firsts = np.cumsum([0, *program.sizes])
        for owner in range(world):
            at = 0
            for part in self.table.of_owner(owner):
                source[owner, at : at + part.numel] = places[part.tensor] + np.arange(part.start, part.stop)
                first = firsts[part.tensor] + part.start
                target[first : first + part.numel] = owner * width + np.arange(at, at + part.numel)
                at += part.numel
        index = torch.int32 if max(buffer.numel(), source.size) < 1 << 31 else torch.int64
        self._source = torch.from_numpy(source.reshape(-1)).to(device, index)
        self._target = torch.from_numpy(target).to(device, index)
        self._values = torch.zeros(world, width, dtype=dtype, device=device)
        self._total = torch.zeros(width, dtype=wide, device=device)
        self._rounded = self._total if wide == dtype else torch.zeros(width, dtype=dtype, device=device)
        # On the device: CUDA divides by a number of the host by way of its reciprocal, which rounds differently.
        self._divisor = torch.tensor(float(world), dtype=wide, device=device)
        self._means = torch.zeros(len(target), dtype=dtype, device=device)
        self._mean_of = list(self._means.split_with_sizes([tensor.numel() for tensor in self._tensors]))
        self._out, self._in, self._all = (torch.zeros(world, width, dtype=kind, device=device) for _ in range(3))
        self.sent, self.received, self.gathered = (
            frames.view(-1).view(torch.uint8) for frames in (self._out, self._in, self._all)
        )
        self.sum_frame = self._all[rank].view(torch.uint8)

    def encode(self, step: int) -> None:
        torch.index_select(self._buffer, 0, self._source, out=self._values.view(-1))
        self._out.copy_(self._values)

    def _add_up(self) -> None:
        for rank in range(self.world):
            term = self._values[rank] if rank == self.rank else self._in[rank]  # its own values are not rounded
            self._total.add_(term) if rank else self._total.copy_(term)

    def keep(self, step: int) -> None:
        self._add_up()
        if self.program.divisor > 1:
            self._total.div_(self._divisor)
        sizes = [part.numel() for part in self._own_parts]
        for part, total in zip(self._own_parts, self._total[: sum(sizes)].split_with_sizes(sizes)):
            part.copy_(total)

    def reduce(self, step: int) -> None:
        self._add_up()
        self._total.div_(self._divisor)
        if self._rounded is not self._total:
            self._rounded.copy_(self._total)
        self._all[self.rank].copy_(self._rounded)

    def decode(self, step: int) -> None:
        self._values.copy_(self._all)
        torch.index_select(self._values.view(-1), 0, self._target, out=self._means)
        torch._foreach_copy_(self._tensors, self._mean_of)


class StreamCodec(ABC):
    """A codec whose frames have a size that is known beforehand, so that messages need not wait for the host."""

    codec: MessageCodec  # what codes the same values on the host; tests compare the two
    text: str
    codes_sums = False  # as in MessageCodec
    feeds_back = False
    widest = 8  # bytes of a value, at the most
    route = NAMED["alltoall"]  # of its programs

    def slots(self, program: Program) -> Slots | None:
        """The first slots of a message; None: the size of its frames follows from the program."""
        return None

    @abstractmethod
    def message(
        self,
        program: Program,
        rank: int,
        buffer: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        sizes: Mapping[str, int],
    ) -> DeviceMessage:
        """Tables and buffers; `sizes` are those of the slots."""


class RawOnStream(StreamCodec):
    """The values as they are (`identity`), or rounded to 16 bits (`cast`)."""

    codec: Raw

    def __init__(self, codec: Raw) -> None:
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
        return RawMessage(program, self.codec, rank, buffer, tensors)
