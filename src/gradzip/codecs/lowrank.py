"""PowerSGD: the mean gradient as a product of two thin matrices, found together by all ranks.

Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization" (NeurIPS 2019). A
tensor is a matrix M of shape [shape0, -1]. One step of subspace iteration, started from the last step's Q:

    P = mean(M_w Q)        averaged over the ranks w, then orthogonalised
    Q = mean(M_w^T P)      averaged
    mean(M_w) ~ P Q^T

Each rank's own part in that sum is P (M_w^T P)^T, so what it lost is M_w - P (M_w^T P)^T. This local residual does
not drift away from that of other ranks, as the difference to the mean would.

With `alternate` a step does one half of this, P from an orthogonalised Q or Q from an orthogonalised P in turn, as the
authors' later package does: half the values, and one collective instead of three.

Matrices of equal shape go through each operation together: a model has hundreds of matrices and a handful of shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar

import torch

from ..errors import Unsupported
from .base import Context, Lossy, Reduced, register, wide
from .random import key_of, uniform

Average = Callable[[torch.Tensor], None]


@register
@dataclass(frozen=True)
class PowerSGD(Lossy):
    """Low-rank factors with a warm start. Vectors, and matrices that factors would not make smaller, stay as they are.

    Three collectives in all, however many tensors there are: what stays as it is, all P, all Q. It has no frame.
    State: `q`, and with `alternate` also `p` and `half`, which is 1 if `p` is the newer one.
    """

    name: ClassVar[str] = "powersgd"
    wire_id: ClassVar[int] = 8
    summary: ClassVar[str] = "low-rank factors, averaged in two rounds"
    error: ClassVar[str] = "all but the largest singular directions; fed back"
    rounds: ClassVar[int] = 2

    rank: int = 1  # columns of the factors; higher = closer to the gradient
    alternate: bool = False  # one factor per step, by one collective

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

    def sent(self, shape: Sequence[int]) -> float:
        """Values that a rank contributes for a tensor of that shape in a step; with `alternate`, on average."""
        rows, columns = _matrix(shape)
        if not self.factored(shape):
            return rows * columns
        return (rows + columns) * self.rank * (0.5 if self.alternate else 1)

    def reduce(self, tensors: list[torch.Tensor], contexts: list[Context], average: Average) -> list[Reduced]:
        whole = [i for i, t in enumerate(tensors) if not self.factored(t.shape)]
        plain = [wide(tensors[i]) for i in whole]
        batches = self._batches(tensors, contexts)
        if self.alternate:
            means = self._half_step(batches, plain, average)
        else:
            means = _averaged(plain, average)
            self._step(batches, average)
        results = {i: Reduced(mean, None) for i, mean in zip(whole, means)}
        for batch in batches:
            lost = [None] * len(batch.places) if batch.residual is None else batch.residual.unbind()
            for i, mean, residual in zip(batch.places, batch.mean.unbind(), lost):
                shape = tensors[i].shape
                results[i] = Reduced(mean.view(shape), None if residual is None else residual.view(shape))
        return [results[i] for i in range(len(tensors))]

    def _batches(self, tensors: list[torch.Tensor], contexts: list[Context]) -> list[_Batch]:
        """The tensors to be factored, by shape and by the factor that is to be renewed."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, (tensor, ctx) in enumerate(zip(tensors, contexts)):
            if self.factored(tensor.shape):
                half = ctx.state.get("half", 0) if self.alternate else 0
                groups.setdefault((*_matrix(tensor.shape), wide(tensor).dtype, half), []).append(i)
        batches = []
        for (*_, half), places in groups.items():
            matrices = [wide(tensors[i]).reshape(_matrix(tensors[i].shape)) for i in places]
            own = len(matrices) > 1 or self.error_memory is not None  # what is left of them will be the residual
            together = torch.stack(matrices) if own else matrices[0].unsqueeze(0)
            batches.append(_Batch(places, together, bool(half), [contexts[i] for i in places]))
        return batches

    def _step(self, batches: list[_Batch], average: Average) -> None:
        start = self._starts(batches)
        left = _orthonormal(_averaged([b.matrices @ q for b, q in zip(batches, start)], average))
        own = [b.matrices.mT @ p for b, p in zip(batches, left)]
        for batch, p, q_own, q in zip(batches, left, own, _averaged(own, average)):
            batch.mean = p @ q.mT
            self._keep_residual(batch, p, q_own)
            for ctx, factor in zip(batch.contexts, q.unbind()):
                ctx.state.pop("p", None)
                ctx.state.pop("half", None)
                ctx.state["q"] = factor

    def _half_step(self, batches: list[_Batch], plain: list[torch.Tensor], average: Average) -> list[torch.Tensor]:
        basis = _orthonormal(self._starts(batches))
        turned = [b.matrices.mT if b.half else b.matrices for b in batches]
        own = [m @ q for m, q in zip(turned, basis)]
        averaged = _averaged([*plain, *own], average)
        for batch, q, p_own, p in zip(batches, basis, own, averaged[len(plain) :]):
            batch.mean = q @ p.mT if batch.half else p @ q.mT
            self._keep_residual(batch, *((q, p_own) if batch.half else (p_own, q)))
            new, old = ("q", "p") if batch.half else ("p", "q")
            for ctx, renewed, kept in zip(batch.contexts, p.unbind(), q.unbind()):
                ctx.state[new], ctx.state[old] = renewed, kept
                ctx.state["half"] = int(not batch.half)
        return averaged[: len(plain)]

    def _keep_residual(self, batch: _Batch, left: torch.Tensor, right: torch.Tensor) -> None:
        if self.error_memory is not None:
            batch.residual = batch.matrices.baddbmm_(left, right.mT, alpha=-1)

    def _starts(self, batches: list[_Batch]) -> list[torch.Tensor]:
        """The factors to start from, columns scaled to length 1: the last step's, random where there is none.

        Columns are added or dropped where the rank has changed. A column of zeros would stay zero for ever, so it
        is drawn anew. Factors of one size are looked at together, of whatever matrices they are.
        """
        alike: dict[tuple[int, torch.dtype], list[int]] = {}
        for number, batch in enumerate(batches):
            alike.setdefault((batch.matrices.shape[1 if batch.half else 2], batch.matrices.dtype), []).append(number)
        starts: dict[int, torch.Tensor] = {}
        for (size, dtype), numbers in alike.items():
            contexts = [(ctx, batches[i].half) for i in numbers for ctx in batches[i].contexts]
            fresh = _random(size, self.rank, contexts[0][0].seed, batches[numbers[0]].matrices.device).to(dtype)
            last = [ctx.state.get("p" if half else "q") for ctx, half in contexts]
            start = torch.stack([fresh if q is None else _columns(q, fresh) for q in last])
            length: torch.Tensor = torch.linalg.vector_norm(start, dim=1, keepdim=True)
            start = torch.where(length == 0, fresh, start / length)
            starts |= zip(numbers, start.split_with_sizes([len(batches[i].contexts) for i in numbers]))
        return [starts[i] for i in range(len(batches))]


class _Batch:
    """Matrices of one shape, and what becomes of them."""

    def __init__(self, places: list[int], matrices: torch.Tensor, half: bool, contexts: list[Context]) -> None:
        self.places = places  # in the caller's list
        self.matrices = matrices
        self.half = half  # alternate: p is the newer factor, so q is to be renewed
        self.contexts = contexts
        self.mean = matrices
        self.residual: torch.Tensor | None = None


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


@lru_cache(maxsize=64)
def _random(size: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """Where all ranks start from: the same for all matrices with as many columns, which do not meet anyway."""
    drawn = uniform(key_of(seed, 0, f"powersgd {size}"), (size, rank), torch.device("cpu"))
    length: torch.Tensor = torch.linalg.vector_norm(drawn, dim=0)
    return (drawn / length).to(device)


def _columns(last: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The last factor with as many columns as `fresh`, from which missing ones are taken."""
    had, wanted = last.shape[1], fresh.shape[1]
    if had == wanted:
        return last
    return last[:, :wanted] if had > wanted else torch.cat([last, fresh[:, had:]], 1)


def _averaged(tensors: list[torch.Tensor], average: Average) -> list[torch.Tensor]:
    """The mean of each tensor over all ranks, by one collective for all of them."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors])
    average(flat)
    parts = flat.split_with_sizes([t.numel() for t in tensors])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors)]


_SHIFT = 1e-12  # of a column's squared length: well below float32's noise, well above float64's
_LOST = 1e-3  # a column is dropped if so much or less is left of it where all of it would leave 1


def _orthonormal(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Orthonormal columns that span what each matrix's columns span, zeros for columns that depend on others.

    Cholesky QR: with P^T P = R^T R the columns of P R^-1 are orthonormal. In float64, R exists for every float32
    matrix once a tiny shift is added; the first pass leaves almost nothing of columns that depend on those before, and
    the second puts right what the shift changed. The small matrices of all shapes are factored together, which takes a
    GPU a few kernels and no word with the host; a Householder QR for each matrix is far slower there.
    """
    if not batches:
        return []
    load(batches[0].device)
    columns = [p.double() for p in batches]
    identity = torch.eye(columns[0].shape[2], dtype=torch.float64, device=batches[0].device)
    for least in (0.0, _LOST):
        gram = torch.cat([p.mT @ p for p in columns])
        square = gram.diagonal(dim1=1, dim2=2)
        scale = torch.where(square > least * least, square.rsqrt(), 0)  # columns of zeros stay what they are
        normal = torch.addcmul(_SHIFT * identity, gram, scale[:, :, None] * scale[:, None, :])
        lower = torch.linalg.cholesky_ex(normal)[0]
        inverse = torch.linalg.solve_triangular(lower.mT, identity.expand_as(lower), upper=True)
        change = scale[:, :, None] * inverse
        columns = [p @ r for p, r in zip(columns, change.split_with_sizes([len(p) for p in columns]))]
    return [p.to(b.dtype) for p, b in zip(columns, batches)]


_loading = threading.Lock()


def load(device: torch.device) -> None:
    """Has torch load its linear algebra for a GPU. Where two threads are the first to use it, it raises."""
    with _loading:
        _load(device)


@cache
def _load(device: torch.device) -> None:
    if device.type == "cuda":
        one = torch.ones(1, 1, dtype=torch.float64, device=device)
        torch.linalg.solve_triangular(torch.linalg.cholesky_ex(one)[0], one, upper=True)
