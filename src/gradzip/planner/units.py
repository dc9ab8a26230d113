"""What is planned as one: single tensors, as in Espresso, or the buckets that DDP will hand over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from .profile import CodecCost, Profile, Tensor

DDP_FIRST_BUCKET = 1 << 20
DDP_BUCKET = 25 << 20


@dataclass(frozen=True)
class Unit:
    tensors: tuple[Tensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    @property
    def raw_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors)

    @property
    def ready_s(self) -> float:
        return max(t.ready_s for t in self.tensors)

    def payload_bytes(self, cost: CodecCost) -> float:
        return sum(t.size_bytes / cost.ratio_of(t.name) for t in self.tensors)

    def __str__(self) -> str:
        first = self.tensors[0].name
        return first if len(self.tensors) == 1 else f"{first} … {self.tensors[-1].name}"


def tensors(profile: Profile) -> list[Unit]:
    return [Unit((tensor,)) for tensor in profile.tensors]


def buckets(profile: Profile, cap_bytes: int = DDP_BUCKET) -> list[Unit]:
    """As DDP forms them after its first step: in the order of readiness, closed when full, the first one small."""
    if cap_bytes < 1:
        raise PlanError(f"a bucket of {cap_bytes} bytes holds nothing")
    found: list[Unit] = []
    collected: list[Tensor] = []
    for tensor in profile.tensors:
        collected.append(tensor)
        limit = min(DDP_FIRST_BUCKET, cap_bytes) if not found else cap_bytes
        if _bytes(collected) >= limit:
            found.append(Unit(tuple(collected)))
            collected = []
    return [*found, Unit(tuple(collected))] if collected else found


def _bytes(collected: Sequence[Tensor]) -> int:
    return sum(t.size_bytes for t in collected)
