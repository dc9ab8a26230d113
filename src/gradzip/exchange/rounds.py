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
from ..codecs.base import InPlace
from ..feedback import Memory
from ..routes import NAMED
from .averaged_frames import AveragedFrames
from .compiler import compile_route
from .finiteness import all_finite
from .program import Program
from .topology import Topology

Rounds = Generator[torch.Tensor, None, bool]  # in the end, whether the means are finite
Average = Callable[[torch.Tensor], None]  # replaces a tensor by its mean over all ranks


@lru_cache(maxsize=256)  # the averages of a step are the same in the next
def averaging(number: int, values: int, dtype: torch.dtype, topology: Topology) -> Program:
    """The program of a round, which averages a flat tensor: summed in float32, in the order of ranks."""
    return compile_route("identity", NAMED["allreduce"], (f"round {number}",), (values,), dtype, topology)


def of(
    codec: Codec,
    tensors: list[torch.Tensor],
    contexts: list[Context],
    memory: Memory,
    scale: float = 1.0,
    averaged: AveragedFrames | None = None,
) -> Rounds:
    """Those of one step, for these gradients; `averaged` is what is known of them if their frames are averaged."""
    if codec.rounds > 1:
        return _of_codec(codec, tensors, contexts, memory, scale)
    known = averaged or AveragedFrames(codec, [ctx.name for ctx in contexts], tensors)
    return known.rounds(contexts, memory, scale)


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
