"""Codecs that exchange in several rounds, such as PowerSGD, and those whose frames are averaged without decoding them.

Either is a generator: it yields one flat tensor after the other, each of which is to be replaced by its mean over all
ranks, and in the end it has put the means where the gradients were. Where kernels replace gradients in place, they call
for averages instead. What averages a tensor is a program of its own, made here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache

import torch

from ..codecs import Codec, Context
from ..codecs.base import InPlace, wide
from ..feedback import Memory
from ..routes import NAMED
from .compiler import compile_route
from .finiteness import all_finite
from .flattening import flatten, unflatten
from .program import Program
from .topology import Topology

Rounds = Generator[torch.Tensor, None, bool]  # in the end, whether the means are finite
Average = Callable[[torch.Tensor], None]  # replaces a tensor by its mean over all ranks


@lru_cache(maxsize=256)  # the averages of a step are the same in the next
def averaging(number: int, values: int, dtype: torch.dtype, topology: Topology) -> Program:
    """The program of a round, which averages a flat tensor: summed in float32, in the order of ranks."""
    return compile_route("identity", NAMED["allreduce"], (f"round {number}",), (values,), dtype, topology)


def of(
    codec: Codec, tensors: list[torch.Tensor], contexts: list[Context], memory: Memory, scale: float = 1.0
) -> Rounds:
    """Those of one step, for these gradients."""
    return (_of_codec if codec.rounds > 1 else _of_frames)(codec, tensors, contexts, memory, scale)


def run(start: Callable[[], Rounds], average: Average) -> bool:
    """All rounds, where each average is waited for; whether the means are finite."""
    rounds = start()
    while True:
        try:
            flat = next(rounds)
        except StopIteration as end:
            return bool(end.value)
        average(flat)


def in_place(
    by: InPlace,
    codec: str,
    names: Sequence[str],
    tensors: list[torch.Tensor],
    memory: Memory,
    scale: float,
    enqueued: Callable[[], None],
    average: Average,
) -> bool:
    """The same by what replaces these tensors in place, of the codec of that name; whether the means are finite.

    `enqueued` is called when the means are on the current stream, maybe still to be done.
    """
    left = by.reduce(memory.of_all(by, names, codec, tensors, scale), scale, average, enqueued)
    memory.keep_all(by, names, codec, left.kept)
    return left.finite


def _of_codec(
    codec: Codec, tensors: list[torch.Tensor], contexts: list[Context], memory: Memory, scale: float
) -> Rounds:
    """Those of a codec of several rounds, with error feedback."""
    names, sums = [ctx.name for ctx in contexts], list[torch.Tensor]()
    inputs = memory.compensated_all(names, tensors, scale)
    rounds = codec.in_rounds(inputs, contexts)
    while True:
        try:
            flat = next(rounds)
        except StopIteration as end:
            results = end.value
            break
        yield flat
        sums.append(torch.linalg.vector_norm(flat, 1, dtype=torch.float64))
    memory.lost_all(names, [result.residual for result in results], scale)
    torch._foreach_copy_(tensors, [result.mean for result in results])
    # No mean is larger than the sum of the magnitudes in all averages (Codec.in_rounds): few numbers are looked at.
    limit = torch.finfo(tensors[0].dtype).max / 2
    return bool((torch.stack(sums) < limit).all()) or all_finite(tensors)


def _of_frames(
    codec: Codec, tensors: list[torch.Tensor], contexts: list[Context], memory: Memory, scale: float
) -> Rounds:
    """The only one of a codec whose frames can be added up: the numbers inside them are averaged, then decoded once."""
    frames = encoded(codec, tensors, contexts, memory, scale)
    flat = torch.cat([codec.addends(frame) for frame in frames])
    yield flat
    decode_mean(codec, tensors, contexts, frames, flat)
    return all_finite(tensors)


def encoded(
    codec: Codec, tensors: Sequence[torch.Tensor], contexts: Sequence[Context], memory: Memory, scale: float
) -> list[torch.Tensor]:
    """A frame for each tensor, what was lost before included; what is lost now goes to memory."""
    frames = []
    for tensor, ctx in zip(tensors, contexts):
        x = memory.compensated(ctx.name, tensor, scale)
        frame = codec.encode(flatten(x, tensor).to(tensor.dtype), ctx)
        residual = None
        if codec.error_memory is not None:
            residual = wide(x) - unflatten(codec.decode(frame, ctx), tensor)
        memory.lost(ctx.name, residual, scale)
        frames.append(frame)
    return frames


def decode_mean(
    codec: Codec,
    tensors: Sequence[torch.Tensor],
    contexts: Sequence[Context],
    frames: Sequence[torch.Tensor],
    flat: torch.Tensor,
) -> None:
    """Puts the mean of the numbers into the frames, and decodes them."""
    own = [codec.addends(frame) for frame in frames]
    for numbers, mean in zip(own, flat.split_with_sizes([a.numel() for a in own])):
        numbers.copy_(mean)
    for tensor, ctx, frame in zip(tensors, contexts, frames):
        tensor.copy_(unflatten(codec.decode(frame, ctx), tensor))
