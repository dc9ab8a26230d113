"""The gradients in DDP's buckets, by name.

DDP makes its buckets anew after the first step and leaves them where they are from then on, so views of the gradients
are made once. They are kept from the second step in the same place on: a bucket that DDP gives up would otherwise stay
in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..exchange.flattening import unflatten
from ..exchange.gradients import Bucket, Named


class _Seen(NamedTuple):
    """A bucket of the step before."""

    address: int
    dtype: torch.dtype
    parameters: list[torch.Tensor]
    named: Bucket | None


class Buckets:
    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._names = names
        self._seen: dict[int, _Seen] = {}

    def named(self, bucket: GradBucket, buffer: torch.Tensor) -> Bucket:
        """The gradients of a bucket."""
        number, parameters = bucket.index(), bucket.parameters()
        seen = self._seen.get(number)
        again = (
            seen is not None
            and seen.address == buffer.data_ptr()
            and seen.dtype == buffer.dtype
            and len(seen.parameters) == len(parameters)
            and all(map(operator.is_, seen.parameters, parameters))
        )
        if again and seen is not None and seen.named is not None:
            return seen.named
        named = Bucket(self._views(parameters, bucket.gradients()), again)
        self._seen[number] = _Seen(buffer.data_ptr(), buffer.dtype, parameters, named if again else None)
        return named

    def _views(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> Named:
        """A gradient lies in memory as its parameter does, but DDP hands it out as if that were row-major."""
        return [
            (self._names[p], g if p.is_contiguous() else unflatten(g.view(-1), p))
            for p, g in zip(parameters, gradients)
        ]
