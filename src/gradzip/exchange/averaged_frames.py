"""Exchanges by codecs whose frames are averaged without decoding them, such as `randomk` and `randomblock`.

Each rank encodes, the numbers inside all frames are averaged by one collective, and each rank decodes. Where the codec
picks places that all ranks know, tensors of one size on the CPU are rows of a matrix: a few calls serve all of them, no
frames are made of what is averaged anyway, and their residuals stay together (Kept). Long tensors are matrices of one
row. All else goes tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ..codecs import Codec, Context
from ..codecs.base import Kept, Sparse, wide
from ..codecs.random import keys_of
from ..codecs.sparse import SharedPlaces, scatter
from ..feedback import Memory, is_exact
from .finiteness import all_finite
from .flattening import flatten, unflatten

LONGEST = 1 << 16  # values of a tensor that shares a matrix: calls for longer ones cost little beside their values


class AveragedFrames:
    """What is found out once about tensors that are averaged so, and stay where they are."""

    def __init__(self, codec: Codec, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._codec, by_size = codec, dict[object, list[int]]()
        for number, tensor in enumerate(tensors):
            if isinstance(codec, SharedPlaces) and _is_a_row(tensor):
                size = tensor.numel()
                by_size.setdefault((size, tensor.dtype, size > LONGEST and number), []).append(number)
        groups = list(by_size.values())
        self._rows = [_Rows([names[i] for i in group], [tensors[i] for i in group]) for group in groups]
        grouped = {number for group in groups for number in group}
        self._single = [(number, tensors[number]) for number in range(len(tensors)) if number not in grouped]

    def rounds(self, contexts: Sequence[Context], memory: Memory, scale: float) -> Generator[torch.Tensor, None, bool]:
        """One step: yields what is to be averaged over all ranks; in the end, whether the means are finite."""
        codec = self._codec
        single, about = [tensor for _, tensor in self._single], [contexts[number] for number, _ in self._single]
        frames = _encoded(codec, single, about, memory, scale)
        numbers = [codec.addends(frame) for frame in frames]
        picked = list[Sparse]()
        for rows in self._rows:
            assert isinstance(codec, SharedPlaces)
            picked.append(rows.encode(codec, contexts[0], memory, scale))
        flat = torch.cat([*(sent.values.view(-1) for sent in picked), *numbers])
        yield flat
        means = flat.split_with_sizes([*(sent.values.numel() for sent in picked), *(each.numel() for each in numbers)])
        for rows, (places, values), mean in zip(self._rows, picked, means):
            assert isinstance(codec, SharedPlaces)
            rows.decode(places, codec.as_decoded(mean.view(values.shape)))
        for number, mean in zip(numbers, means[len(picked) :]):
            number.copy_(mean)
        for tensor, ctx, frame in zip(single, about, frames):
            tensor.copy_(unflatten(codec.decode(frame, ctx), tensor))
        return all_finite([flat])  # of what frames do not hold, the mean is zero


def _encoded(
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


def _is_a_row(tensor: torch.Tensor) -> bool:
    """Whether its values lie densely in memory, on the CPU."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return False
    return tensor.is_contiguous() or flatten(tensor, tensor).data_ptr() == tensor.data_ptr()


class _Rows:
    """Tensors of one size."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._names, self._tensors = names, list(tensors)
        self._likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._flat = [flatten(tensor, tensor) for tensor in tensors]
        self._view = _as_matrix(self._flat)  # of the tensors' own memory, where they lie at equal distances

    def encode(self, codec: SharedPlaces, about: Context, memory: Memory, scale: float) -> Sparse:
        """What is picked of each tensor, what was lost before included; what is lost now goes to memory."""
        kept, names = memory.kept_by(self, self._names), self._names
        if isinstance(kept, KeptRows):
            total, is_own = self._with(kept, scale), True
        else:
            total, is_own = self._compensated(memory, scale, codec.error_memory is not None)
        x = total.to(self._tensors[0].dtype)
        sent = codec.picked(x, keys_of(about.seed, about.step, names))
        if codec.error_memory is not None:
            lost = wide(total if is_own else total.clone())
            left = lost.gather(1, sent.places).sub_(codec.as_decoded(sent.values))
            lost.scatter_(1, sent.places, left)
            memory.keep_all(self, names, codec.name, KeptRows(lost if scale == 1 else lost.div_(scale), self._likes))
        elif memory.residuals:
            memory.lost_all(names, [None] * len(names))
        return sent

    def decode(self, places: torch.Tensor, means: torch.Tensor) -> None:
        """Puts means to their places; all other values become zero."""
        if self._view is not None:
            scatter(places, means, self._view, add=False)
            return
        out = torch.empty(len(self._flat), self._flat[0].numel(), dtype=means.dtype)
        scatter(places, means, out, add=False)
        torch._foreach_copy_(self._flat, list(out.unbind()))

    def _with(self, kept: KeptRows, scale: float) -> torch.Tensor:
        """Gradients plus what was lost of them, all of which the last step left as rows."""
        x = wide(self._matrix())
        return torch.add(x, kept.rows, alpha=scale) if is_exact(scale) else x + kept.rows * scale

    def _compensated(self, memory: Memory, scale: float, feeds_back: bool) -> tuple[torch.Tensor, bool]:
        """The same tensor by tensor, as rows; and whether these have memory of their own."""
        if not (feeds_back or memory.residuals):
            return self._matrix(), False
        totals = memory.compensated_all(self._names, self._tensors, scale)
        if all(total is tensor for total, tensor in zip(totals, self._tensors)):
            return self._matrix(), self._view is None
        dtype = torch.promote_types(self._tensors[0].dtype, torch.float32)
        rows = [flatten(total, tensor).to(dtype) for total, tensor in zip(totals, self._tensors)]
        return torch.stack(rows), True

    def _matrix(self) -> torch.Tensor:
        """The gradients, as rows."""
        return torch.stack(self._flat) if self._view is None else self._view


class KeptRows(Kept):
    """What was lost of tensors of one size, as rows."""

    def __init__(self, rows: torch.Tensor, likes: Sequence[torch.Tensor]) -> None:
        """`likes`: on the device "meta", how each of them lies in memory."""
        self.rows, self._likes = rows, likes

    @property
    def residuals(self) -> list[torch.Tensor | None]:
        return [unflatten(row, like) for row, like in zip(self.rows.unbind(), self._likes)]

    @property
    def states(self) -> list[dict[str, Any]]:
        return [{} for _ in self._likes]


def _as_matrix(rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Rows that lie at equal distances in one memory, as a matrix; None if they do not."""
    first, size = rows[0], rows[0].numel()
    distance = rows[1].storage_offset() - first.storage_offset() if len(rows) > 1 else size
    memory = first.untyped_storage().data_ptr()
    for number, row in enumerate(rows):
        if row.storage_offset() != first.storage_offset() + number * distance:
            return None
        if row.untyped_storage().data_ptr() != memory:
            return None
    return first.as_strided((len(rows), size), (distance, 1)) if distance >= size else None
