"""PowerSGD: the mean gradient as a product of two thin matrices, found together by all ranks.

Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization" (NeurIPS 2019). A
tensor is a matrix M of shape [shape0, -1]. One step of subspace iteration, started from the last step's Q:

    P = mean(M_w Q)        averaged over the ranks w, then orthogonalised
    Q = mean(M_w^T P)      averaged
    mean(M_w) ~ P Q^T

Each rank's own part in that sum is P (M_w^T P)^T, so what it lost is M_w - P (M_w^T P)^T. This local residual does
not drift away from that of other ranks, as the difference to the mean would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import Unsupported
from .base import Context, Lossy, Reduced, register, wide
from .random import key_of, uniform


@register
@dataclass(frozen=True)
class PowerSGD(Lossy):
    """Low-rank factors with a warm start. Vectors, and matrices that factors would not make smaller, stay as they are.

    Three collectives in all, however many tensors there are: what stays as it is, all P, all Q. It has no frame.
    """

    name: ClassVar[str] = "powersgd"
    wire_id: ClassVar[int] = 8
    summary: ClassVar[str] = "low-rank factors, averaged in two rounds"
    rounds: ClassVar[int] = 2

    rank: int = 1  # columns of the factors; higher = closer to the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise Unsupported(f"powersgd:rank={self.rank}: at least 1")

    @property
    def biased(self) -> bool:
        return True

    def factored(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape is sent as factors."""
        rows, columns = _matrix(shape)
        return len(shape) > 1 and (rows + columns) * self.rank < rows * columns

    def reduce(
        self, tensors: list[torch.Tensor], contexts: list[Context], average: Callable[[torch.Tensor], None]
    ) -> list[Reduced]:
        whole = [i for i, t in enumerate(tensors) if not self.factored(t.shape)]
        factored = [i for i, t in enumerate(tensors) if self.factored(t.shape)]
        means = _averaged([wide(tensors[i]) for i in whole], average)
        results = {i: Reduced(mean, None) for i, mean in zip(whole, means)}

        matrices = [wide(tensors[i]).reshape(_matrix(tensors[i].shape)) for i in factored]
        start = [self._start(m, contexts[i]) for i, m in zip(factored, matrices)]
        left = [_orthonormal(p) for p in _averaged([m @ q for m, q in zip(matrices, start)], average)]
        own = [m.t() @ p for m, p in zip(matrices, left)]
        right = _averaged(own, average)
        for i, m, p, q_own, q in zip(factored, matrices, left, own, right):
            contexts[i].state["q"] = q
            shape = tensors[i].shape
            results[i] = Reduced((p @ q.t()).view(shape), (m - p @ q_own.t()).view(shape))
        return [results[i] for i in range(len(tensors))]

    def _start(self, matrix: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Q to start from, columns scaled to length 1: the last step's, random where there is none.

        Columns are added or dropped where the rank has changed. A column of zeros would stay zero for ever, so it
        is drawn anew.
        """
        key = key_of(ctx.seed, ctx.step, ctx.name)
        fresh = uniform(key, (matrix.shape[1], self.rank), matrix.device).to(matrix.dtype)
        last = ctx.state.get("q")
        if last is not None:
            kept = last[:, : self.rank]
            fresh[:, : kept.shape[1]] = torch.where((kept == 0).all(0), fresh[:, : kept.shape[1]], kept)
        length = torch.linalg.vector_norm(fresh, dim=0).clamp(min=torch.finfo(fresh.dtype).tiny)
        return fresh.div_(length)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def _averaged(tensors: list[torch.Tensor], average: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
    """The mean of each tensor over all ranks, by one collective for all of them."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors])
    average(flat)
    return [part.view(t.shape) for part, t in zip(flat.split_with_sizes([t.numel() for t in tensors]), tensors)]


def _orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span at least what p's columns span.

    Householder's QR needs no epsilon: columns that are zero or depend on others give further orthonormal ones.
    """
    q: torch.Tensor = torch.linalg.qr(p).Q
    return q
