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
On a GPU, kernels take all matrices of a model at once (engines/cuda/factors.py); torch's operations are what they are
tested against, and do the rest: other types, half steps, and ranks above 32.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from .. import saved
from ..engines.cuda import factors, pack_select
from ..engines.cuda.restore import Change
from ..errors import Unsupported
from .base import Context, InPlace, Kept, Left, Lossy, Reduced, register, wide
from .random import key_of, uniform

Average = Callable[[torch.Tensor], None]
_Means = Generator[torch.Tensor, None, list[torch.Tensor]]
_MOST_KNOWN = 16  # sets of addresses: memory comes back at the same few


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

    def in_rounds(
        self, tensors: list[torch.Tensor], contexts: list[Context]
    ) -> Generator[torch.Tensor, None, list[Reduced]]:
        halves = tuple(ctx.state.get("half", 0) for ctx in contexts) if self.alternate else None
        wanted = tuple(ctx.whole for ctx in contexts)
        whole, groups = self._arranged(tuple(t.shape for t in tensors), wanted, halves)
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        plain = [wide(tensors[i]) for i in whole]
        batches = [self._batch(group, tensors, contexts, dtype) for group in groups]
        if self.alternate:
            means = yield from self._half_step(batches, plain)
        else:
            means = yield from _averaged(plain)
            yield from self._step(batches)
        results = {i: Reduced(mean, None) for i, mean in zip(whole, means)}
        for batch in batches:
            places = batch.group.places
            lost = [None] * len(places) if batch.residual is None else batch.residual.unbind()
            for i, mean, residual in zip(places, batch.mean.unbind(), lost):
                results[i] = _shaped(mean, residual, tensors[i])
        return [results[i] for i in range(len(tensors))]

    @classmethod
    def check_state(cls, field: str, where: str, value: Any, shape: Sequence[int]) -> None:
        rows, columns = _matrix(shape)
        if field == "half":
            saved.counter({where: value}, where, most=1)
        elif field in ("p", "q"):
            size = rows if field == "p" else columns
            rank = value.shape[1] if isinstance(value, torch.Tensor) and value.dim() == 2 else 1
            saved.floats(where, value, (size, max(rank, 1)))
        else:
            raise Unsupported(
                f"the state's {where!r} is not a field of powersgd, which keeps p, q and half: {saved.CURE}"
            )

    def in_place(self, tensors: list[torch.Tensor], contexts: list[Context]) -> InPlace | None:
        if self.alternate or self.rank > factors.MOST_RANK or tensors[0].dtype != torch.float32:
            return None
        whole, groups = self._arranged(tuple(t.shape for t in tensors), tuple(ctx.whole for ctx in contexts), None)
        if not groups or not all(pack_select.serves(tensors[i]) for group in groups for i in group.places):
            return None
        return Fused(self, tensors, whole, groups, contexts[0].seed)

    @lru_cache(maxsize=64)  # noqa: B019  # codecs are configurations, alike by their values
    def _arranged(
        self, shapes: tuple[torch.Size, ...], wanted_whole: tuple[bool, ...], halves: tuple[int, ...] | None
    ) -> tuple[list[int], list[_Group]]:
        """Which tensors stay whole, and those to be factored, by shape and by the factor that is to be renewed.

        Groups whose factors to start from are of one size follow each other.
        """
        whole, groups = list[int](), dict[tuple[int, int, bool], list[int]]()
        for i, shape in enumerate(shapes):
            if self.factored(shape) and not wanted_whole[i]:
                groups.setdefault((*_matrix(shape), halves is not None and bool(halves[i])), []).append(i)
            else:
                whole.append(i)
        ordered = [_Group(*key, places) for key, places in groups.items()]
        return whole, sorted(ordered, key=lambda group: group.start)

    def _batch(self, group: _Group, tensors: list[torch.Tensor], contexts: list[Context], dtype: torch.dtype) -> _Batch:
        matrices = [tensors[i] if tensors[i].dim() == 2 else tensors[i].reshape(group.shape) for i in group.places]
        own = len(matrices) > 1 or self.error_memory is not None  # what is left of them will be the residual
        together = torch.cat(matrices) if own else matrices[0]
        return _Batch(
            group,
            together.view(len(matrices), *group.shape).to(dtype),
            [contexts[i] for i in group.places],
        )

    def _step(self, batches: list[_Batch]) -> Generator[torch.Tensor, None, None]:
        if not batches:
            return
        left, lefts = self._room(batches, [b.group.rows for b in batches])
        for batch, q, p in zip(batches, self._starts(batches), lefts):
            torch.bmm(batch.matrices, q, out=p)
        yield left
        lefts = _orthonormal(lefts)
        right, rights = self._room(batches, [b.group.columns for b in batches])
        for batch, p, q in zip(batches, lefts, rights):
            torch.bmm(batch.matrices.mT, p, out=q)
        if self.error_memory is not None:
            for batch, p, q in zip(batches, lefts, rights):
                batch.residual = batch.matrices.baddbmm_(p, q.mT, alpha=-1)
        yield right
        for batch, p, q in zip(batches, lefts, rights):
            batch.mean = torch.bmm(p, q.mT)
            for ctx, factor in zip(batch.contexts, q.unbind()):
                ctx.state.pop("p", None)
                ctx.state.pop("half", None)
                ctx.state["q"] = factor

    def _half_step(self, batches: list[_Batch], plain: list[torch.Tensor]) -> _Means:
        basis = _orthonormal(self._starts(batches))
        turned = [b.matrices.mT if b.group.half else b.matrices for b in batches]
        own = [torch.bmm(m, q) for m, q in zip(turned, basis)]
        averaged = yield from _averaged([*plain, *own])
        for batch, q, p_own, p in zip(batches, basis, own, averaged[len(plain) :]):
            half = batch.group.half
            batch.mean = torch.bmm(q, p.mT) if half else torch.bmm(p, q.mT)
            if self.error_memory is not None:
                left, right = (q, p_own) if half else (p_own, q)
                batch.residual = batch.matrices.baddbmm_(left, right.mT, alpha=-1)
            new, old = ("q", "p") if half else ("p", "q")
            for ctx, renewed, kept in zip(batch.contexts, p.unbind(), q.unbind()):
                ctx.state[new], ctx.state[old] = renewed, kept
                ctx.state["half"] = int(not half)
        return averaged[: len(plain)]

    def _room(self, batches: list[_Batch], sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory for a factor of each matrix, so many values long: all of it, to be averaged, and by batches."""
        like = batches[0].matrices
        numels = [len(b.contexts) * size * self.rank for b, size in zip(batches, sizes)]
        flat = like.new_empty(sum(numels))
        parts = flat.split_with_sizes(numels)
        return flat, [part.view(-1, size, self.rank) for part, size in zip(parts, sizes)]

    def _starts(self, batches: list[_Batch]) -> list[torch.Tensor]:
        """The factors to start from, columns scaled to length 1: the last step's, random where there is none.

        Columns are added or dropped where the rank has changed. A column of zeros would stay zero for ever, so it
        is drawn anew. Factors of one size are looked at together, of whatever matrices they are.
        """
        starts = list[torch.Tensor]()
        for size, alike in itertools.groupby(batches, lambda batch: batch.group.start):
            together = list(alike)
            like, first = together[0].matrices, together[0].contexts[0]
            fresh = _random(size, self.rank, first.seed, like.device, like.dtype)
            last = [ctx.state.get("p" if b.group.half else "q") for b in together for ctx in b.contexts]
            start = torch.cat([fresh if q is None else _columns(q, fresh) for q in last]).view(-1, size, self.rank)
            length: torch.Tensor = torch.linalg.vector_norm(start, dim=1, keepdim=True)
            start = torch.where(length == 0, fresh, start / length)
            starts += start.split_with_sizes([len(b.contexts) for b in together])
        return starts


class _Group(NamedTuple):
    """Matrices of one shape, and their places in the caller's list."""

    rows: int
    columns: int
    half: bool  # alternate: p is the newer factor, so q is to be renewed
    places: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def start(self) -> int:
        """The length of the factors that a step starts from."""
        return self.rows if self.half else self.columns


class _Batch:
    """The matrices of a group, and what becomes of them."""

    def __init__(self, group: _Group, matrices: torch.Tensor, contexts: list[Context]) -> None:
        self.group = group
        self.matrices = matrices
        self.contexts = contexts
        self.mean = matrices
        self.residual: torch.Tensor | None = None


class Enqueued(NamedTuple):
    """A step that the GPU may still have to do."""

    kept: Kept
    changes: list[Change] | None  # in what is kept; None: it was kept in another way before
    flawed: torch.Tensor  # one int32: not 0 where the mean of a matrix is not finite
    largest: list[torch.Tensor]  # the largest magnitude of all that went as it is
    alive: object  # to be kept until the GPU is through


class Fused(InPlace):
    """A step by the kernels for matrices, and torch's operations for the rest."""

    def __init__(
        self, codec: PowerSGD, tensors: list[torch.Tensor], whole: list[int], groups: list[_Group], seed: int
    ) -> None:
        self._keeps = codec.error_memory is not None
        places = [i for group in groups for i in group.places]  # factors lie as torch's operations have them
        self._matrices = [tensors[i] for i in places]
        self._whole_places, self._whole = whole, [tensors[i] for i in whole]
        shapes = tuple(factors.Shape(group.rows, group.columns) for group in groups for _ in group.places)
        like = self._matrices[0]
        self._plan = factors.plan(shapes, codec.rank, like.device)
        fresh = [_random(shape.columns, codec.rank, seed, like.device, like.dtype) for shape in shapes]
        self._order = _Order(len(tensors), places, [matrix.shape for matrix in self._matrices], fresh)
        self._addresses, self._fresh_addresses = _addresses(self._matrices), _addresses(fresh)
        self._known: dict[tuple[int, int], factors.Operands] = {}  # by where residuals and factors are
        self._flat: torch.Tensor | None = None  # for all that goes as it is
        self._parts: list[torch.Tensor] = []

    def reduce(self, before: Kept, scale: float, average: Average, enqueued: Callable[[], None]) -> Left:
        found = self.enqueue(before, scale, average)
        enqueued()
        finite = not int(found.flawed) and all(math.isfinite(x) for x in found.largest)  # waits, and leaves Python free
        return Left(found.kept, finite)

    def enqueue(self, before: Kept, scale: float, average: Average) -> Enqueued:
        """The same without a wait for the GPU, if `average` does not wait either."""
        own = before if isinstance(before, Factored) and before.order is self._order else None
        operands, alive = self._apart(before, scale) if own is None else (self._together(own), None)
        largest = list[torch.Tensor]()
        meanwhile = functools.partial(self._average_whole, average, largest)
        found = self._plan.run(operands, self._matrices[0], average, self._keeps, scale, meanwhile)
        kept = Factored(self._order, found.right, found.after)
        return Enqueued(kept, kept.changes(own), found.flawed, largest, alive)

    def _together(self, own: Factored) -> factors.Operands:
        """Of what the last step left, which lies as kernels put it."""
        lost = 0 if own.after is None else own.after.data_ptr()
        place = lost, own.right.data_ptr()
        if place not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            befores = _addresses(own.lost()) if lost else (0,) * len(self._matrices)
            self._known[place] = factors.Operands(
                self._addresses, befores, _addresses(own.factors()), self._fresh_addresses
            )
        return self._known[place]

    def _apart(self, before: Kept, scale: float) -> tuple[factors.Operands, object]:
        """Of anything; the second is to be kept until kernels are through."""
        residuals, states = before.residuals, before.states
        for i, tensor in zip(self._whole_places, self._whole):
            _add(tensor, residuals[i], scale)
        lost = [residuals[i] for i in self._order.places]
        if not self._keeps:
            for matrix, missing in zip(self._matrices, lost):
                _add(matrix, missing, scale)
            lost = [None] * len(lost)
        last = [states[i].get("q") for i in self._order.places]
        starts = [
            fresh if q is None else _columns(q, fresh).to(fresh.dtype).contiguous()
            for q, fresh in zip(last, self._order.fresh)
        ]
        befores = tuple(0 if x is None else x.data_ptr() for x in lost)
        return factors.Operands(self._addresses, befores, _addresses(starts), self._fresh_addresses), (lost, starts)

    def _average_whole(self, average: Average, largest: list[torch.Tensor]) -> None:
        if not self._whole:
            return
        if self._flat is None:
            sizes = [t.numel() for t in self._whole]
            self._flat = self._whole[0].new_empty(sum(sizes))
            self._parts = [part.view(t.shape) for part, t in zip(self._flat.split_with_sizes(sizes), self._whole)]
        torch._foreach_copy_(self._parts, self._whole)
        average(self._flat)
        torch._foreach_copy_(self._whole, self._parts)
        largest.append(torch.linalg.vector_norm(self._flat, math.inf))


@dataclass(frozen=True, eq=False)
class _Order:
    """How what matrices keep lies in one tensor. It holds none of the gradients, so that steps may keep it."""

    count: int  # tensors, matrices and others
    places: list[int]  # of the matrices among them
    shapes: list[torch.Size]  # of each matrix
    fresh: list[torch.Tensor]  # for columns of zeros; as large as the right factor of each


class Factored(Kept):
    """What kernels leave: the right factors of all matrices, and what was lost of all of them."""

    def __init__(self, order: _Order, right: torch.Tensor, after: torch.Tensor | None) -> None:
        self.order, self.right, self.after = order, right, after

    def changes(self, before: Factored | None) -> list[Change] | None:
        """What differs from what was kept before, if that was kept in the same way."""
        if before is None or (before.after is None) != (self.after is None):
            return None
        residuals = [] if self.after is None or before.after is None else [Change(self.after, before.after)]
        return [Change(self.right, before.right), *residuals]

    def factors(self) -> list[torch.Tensor]:
        return _parted(self.right, [fresh.shape for fresh in self.order.fresh])

    def lost(self) -> list[torch.Tensor]:
        return [] if self.after is None else _parted(self.after, self.order.shapes)

    @property
    def residuals(self) -> list[torch.Tensor | None]:
        residuals: list[torch.Tensor | None] = [None] * self.order.count
        for i, part in zip(self.order.places, self.lost()):
            residuals[i] = part
        return residuals

    @property
    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = [{} for _ in range(self.order.count)]
        for i, factor in zip(self.order.places, self.factors()):
            states[i]["q"] = factor
        return states


def _parted(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    parts = flat.split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _add(x: torch.Tensor, lost: torch.Tensor | None, scale: float) -> None:
    if lost is not None:
        x.add_(lost, alpha=scale)


def _shaped(mean: torch.Tensor, residual: torch.Tensor | None, like: torch.Tensor) -> Reduced:
    """As the caller's tensor is, in the type of sums."""
    if like.dim() != 2:
        mean, residual = mean.view(like.shape), None if residual is None else residual.view(like.shape)
    if mean.dtype == torch.float64 != like.dtype:  # beside tensors of float64
        mean, residual = mean.float(), None if residual is None else residual.float()
    return Reduced(mean, residual)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


@lru_cache(maxsize=64)
def _random(size: int, rank: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Where all ranks start from: the same for all matrices with as many columns, which do not meet anyway."""
    drawn = uniform(key_of(seed, 0, f"powersgd {size}"), (size, rank), torch.device("cpu"))
    length: torch.Tensor = torch.linalg.vector_norm(drawn, dim=0)
    return (drawn / length).to(device, dtype)


def _columns(last: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The last factor with as many columns as `fresh`, from which missing ones are taken."""
    had, wanted = last.shape[1], fresh.shape[1]
    if had == wanted:
        return last
    return last[:, :wanted] if had > wanted else torch.cat([last, fresh[:, had:]], 1)


def _averaged(tensors: list[torch.Tensor]) -> _Means:
    """The mean of each tensor over all ranks, by one collective for all of them."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors])
    yield flat
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
    device = batches[0].device
    load(device)
    columns = [p.double() for p in batches]
    counts = [len(p) for p in columns]
    identity, shift = _identity(columns[0].shape[2], device)
    for least in (0.0, _LOST):
        gram = torch.cat([torch.bmm(p.mT, p) for p in columns])
        square = gram.diagonal(dim1=1, dim2=2)
        scale = torch.where(square > least * least, square.rsqrt(), 0).unsqueeze(2)  # columns of zeros stay so
        normal = torch.addcmul(shift, gram, scale * scale.mT)
        lower = torch.linalg.cholesky_ex(normal)[0]
        inverse = torch.linalg.solve_triangular(lower.mT, identity.expand_as(lower), upper=True)
        change = scale * inverse
        columns = [torch.bmm(p, r) for p, r in zip(columns, change.split_with_sizes(counts))]
    return [p.to(b.dtype) for p, b in zip(columns, batches)]


@lru_cache(maxsize=64)
def _identity(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The identity, and the shift that lets a matrix be factored."""
    identity = torch.eye(size, dtype=torch.float64)  # copied, which waits: it will be used on several streams
    return identity.to(device), (_SHIFT * identity).to(device)


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
