"""Deep Gradient Compression: top-k with momentum inside.

Lin et al., "Deep Gradient Compression: Reducing the communication bandwidth for distributed training" (ICLR 2018).
A value that is sent rarely would meet the optimizer's momentum late and all at once, so the momentum is formed here,
before values are chosen, and the optimizer must have none:

    u = momentum * u + gradient      what plain momentum would apply
    v = v + u                        what is due
    send the largest of v; where a value is sent, u = v = 0

Where all values are sent, nothing is late: u stays, and this is plain momentum. Tensors too small for compression are
sent like that, because nobody else gives them theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import saved
from ..errors import Unsupported
from . import selection, sparse_batch
from .base import Context, Sparse, register, wide
from .sparse import SparseFrame, check_ratio, kept

_STAGES = 4  # of the warm-up: 25 %, 6.25 %, 1.6 % and 0.4 % of the values, as in the paper


@register
@dataclass(frozen=True)
class DGC(SparseFrame):
    """It keeps what it did not send by itself, so it wants no error feedback and counts as unbiased."""

    name: ClassVar[str] = "dgc"
    wire_id: ClassVar[int] = 11
    summary: ClassVar[str] = "the largest values of an accumulated momentum; for SGD without momentum of its own"
    error: ClassVar[str] = "the smaller values; kept inside, with their momentum"
    fixed_size: ClassVar[bool] = False
    transforms: ClassVar[bool] = True  # it gives a momentum
    state_fields: ClassVar[tuple[str, ...]] = ("own_u", "own_v")

    ratio: float = 0.001  # part of the values that is sent; higher = closer to the gradient
    momentum: float = 0.9  # instead of the optimizer's
    clip: float = 0.0  # the largest norm of a tensor's mean gradient; each rank cuts its own at clip / sqrt(ranks)
    warmup: int = 0  # steps in which more is sent

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)
        if not 0 <= self.momentum < 1:
            raise Unsupported(f"dgc:momentum={self.momentum}: from 0 to below 1")
        if not 0 <= self.clip < math.inf:
            raise Unsupported(f"dgc:clip={self.clip}: the largest norm, or 0 for no limit")
        if self.warmup < 0:
            raise Unsupported(f"dgc:warmup={self.warmup}: a number of steps")

    @property
    def small_form(self) -> str:
        return str(DGC(1.0, self.momentum, self.clip))

    def ratio_at(self, step: int) -> float:
        """The part of the values that is sent in a step."""
        if step >= self.warmup:
            return self.ratio
        return max(self.ratio, 0.25 ** (1 + _STAGES * step // self.warmup))

    def most(self, numel: int) -> int:
        return kept(self.ratio_at(0), numel)

    @classmethod
    def check_state(cls, field: str, where: str, value: Any, shape: Sequence[int]) -> None:
        if field not in cls.state_fields:
            raise Unsupported(f"the state's {where!r} is not a field of dgc, which keeps own_u and own_v: {saved.CURE}")
        saved.floats(where, value, numel=math.prod(shape))

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        gradient = wide(x) / ctx.scale
        if self.clip:
            limit = self.clip / math.sqrt(ctx.world)
            norm = torch.linalg.vector_norm(gradient)
            gradient = torch.where(norm > limit, gradient * (limit / norm), gradient)
        u, v = self._momentum(gradient, ctx)

        index = selection.largest(v, kept(self.ratio_at(ctx.step), x.numel()))
        values = self._due(v[index], x.dtype, ctx)
        ctx.state["own_u"] = u.index_fill(0, index, 0) if index.numel() < x.numel() else u
        ctx.state["own_v"] = v.index_copy(0, index, v[index] - wide(values) / ctx.scale)
        return self._write(Sparse(index, values), x.numel(), ctx, body)

    def pick(self, x: torch.Tensor, batch: sparse_batch.Batch, ctx: Context) -> sparse_batch.Picked:
        gradient = wide(x) / ctx.scale
        if self.clip:
            limit = self.clip / math.sqrt(ctx.world)
            norms = [torch.linalg.vector_norm(each) for each in gradient.split_with_sizes(batch.sizes.tolist())]
            norm = torch.stack(norms).repeat_interleave(torch.from_numpy(batch.sizes))
            gradient = torch.where(norm > limit, gradient * (limit / norm), gradient)
        u, v = self._momentum(gradient, ctx)

        ratio = self.ratio_at(ctx.step)
        counts = batch.by_size(lambda numel: kept(ratio, numel))
        index = sparse_batch.largest(v, batch, counts)
        values = self._due(v[index], x.dtype, ctx)
        is_late = torch.from_numpy((counts < batch.sizes).repeat(counts))
        ctx.state["own_u"] = u.index_fill(0, index[is_late], 0)
        ctx.state["own_v"] = v.index_copy(0, index, v[index] - wide(values) / ctx.scale)
        return sparse_batch.Picked(index, values, counts)

    def _momentum(self, gradient: torch.Tensor, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """u and v with a step's gradient."""
        u, v = ctx.state.get("own_u"), ctx.state.get("own_v")
        u = gradient if u is None else self.momentum * u.view(-1) + gradient
        return u, u if v is None else v.view(-1) + u

    def _due(self, v: torch.Tensor, dtype: torch.dtype, ctx: Context) -> torch.Tensor:
        """What is sent of it."""
        due = v * ctx.scale
        most = torch.finfo(dtype).max
        return torch.where(due.isfinite(), due.clamp(-most, most), due).to(dtype)
