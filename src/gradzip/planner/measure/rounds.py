"""What codecs of several rounds cost and average, without the averages: equal factors are their own mean."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from ...codecs import Codec, Context
from ...exchange import rounds
from ...feedback import Memory
from .mirror import ROUNDS, ROUNDS_ON_GPU, clock


def seconds(codec: Codec, tensors: Sequence[torch.Tensor], contexts: Sequence[Context]) -> float:
    """Of all rounds together: the median of some messages, the second of which has residuals to add."""
    device, memory, measured = tensors[0].device, Memory(0), []
    for _ in range(1 + (ROUNDS_ON_GPU if device.type == "cuda" else ROUNDS)):
        values = [tensor.clone() for tensor in tensors]
        begun = clock(device)
        for _ in rounds.of(codec, values, list(contexts), memory):
            pass
        measured.append(clock(device) - begun)
        memory.commit()
    return statistics.median(measured[1:])


def averaged_bytes(codec: Codec, tensor: torch.Tensor, context: Context) -> int:
    """Of what is averaged in place of a tensor."""
    return sum(flat.nbytes for flat in rounds.of(codec, [tensor.clone()], [context], Memory(0)))
