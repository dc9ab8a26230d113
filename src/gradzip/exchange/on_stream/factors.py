"""PowerSGD on the stream runner: a model's matrices as averaged factors, and what is too small for them as it is.

It waits for the last bucket, so that the collectives of a step are three, whatever the number of matrices. Their sums
are NCCL's: all ranks get the same bits, but not those of sums in the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...codecs import Codec, Context
from ...codecs.lowrank import Enqueued, Fused, PowerSGD
from ...engines.cuda import factors
from ...engines.cuda.restore import Change
from ...feedback import Memory
from ...routes import NAMED
from ..program import VALUES, AllReduce, Buffer, Program
from ..topology import Topology
from .message import Checked

Average = Callable[[torch.Tensor], None]


def serves(codec: Codec) -> bool:
    """Whether a codec can go by streams as factors: by kernels, with what it loses kept where it is."""
    return (
        isinstance(codec, PowerSGD)
        and not codec.alternate
        and codec.rank <= factors.MOST_RANK
        and codec.error_memory in (None, "fp32")
    )


class Noted(NamedTuple):
    """What a step noted in Memory."""

    changes: list[Change] | None  # that the device takes back where means are not finite; None: the host has to
    alive: object  # to be kept until the step is through


class FactorMessage(Checked):
    """Gradients in float32 that are averaged together; they become their means."""

    def __init__(
        self,
        codec: PowerSGD,
        contexts: Sequence[Context],
        tensors: Sequence[torch.Tensor],
        forms: Mapping[str, str | None],
        fused: Fused | None,
        topology: Topology,
    ) -> None:
        """`forms`: how residuals are kept, by name. `fused`: the step by kernels; None: these tensors have none."""
        self._codec, self._contexts, self._tensors, self._fused = codec, list(contexts), list(tensors), fused
        self._names, self._forms = [context.name for context in contexts], forms
        self._world = topology.world
        values = Buffer(VALUES, False, ())
        steps = tuple(AllReduce(VALUES, VALUES, (), "flat", True) for _ in range(3))
        sizes = tuple(tensor.numel() for tensor in tensors)
        self.program = Program(
            str(codec), NAMED["allreduce"], tuple(self._names), sizes, torch.float32, topology.hosts, steps, (values,)
        )
        self.origin: object = None  # that of what Memory held for it in its last step
        self._volume = 0  # values in the collectives of a step,
        self.collectives = 0  # and how many there were
        self._norm = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        self._infinite = torch.full_like(self._norm, math.inf)

    @property
    def bytes_sent(self) -> int:
        """By a ring, which is the least that a sum takes."""
        return 2 * (self._world - 1) * 4 * self._volume // self._world

    @property
    def moved(self) -> tuple[int, ...]:
        return (self._volume,)

    def norm(self) -> torch.Tensor:
        return self._norm

    def run(self, memory: Memory, step: int, scale: float, average: Average) -> Noted:
        """Enqueues everything on the current stream, and tells Memory what is kept; the host waits for nothing.

        `average` enqueues the mean of a tensor over all ranks, in its place.
        """
        self._volume = self.collectives = 0

        def averaged(flat: torch.Tensor) -> None:
            self._volume += flat.numel()
            self.collectives += 1
            average(flat)

        if self._fused is None:
            return self._by_torch(memory, step, scale, averaged)
        name = self._codec.name
        before = memory.of_all(self._fused, self._names, name, self._tensors, scale)
        found = self._fused.enqueue(before, scale, averaged)
        if found.changes is None:
            memory.forms.update(self._forms)
        memory.keep_all(self._fused, self._names, name, found.kept)
        self._norm = self._finite_or_not(found)
        return Noted(found.changes, found.alive)

    def _finite_or_not(self, found: Enqueued) -> torch.Tensor:
        largest = found.largest[0].double() if found.largest else torch.zeros_like(self._infinite)
        return torch.where(found.flawed[0] == 0, largest, self._infinite)

    def _by_torch(self, memory: Memory, step: int, scale: float, average: Average) -> Noted:
        """Where the kernels do not serve: gradients that are not row-major, or none that factors would make smaller."""
        memory.forms.update(self._forms)
        for context in self._contexts:
            context.step, context.scale = step, scale
            context.state = memory.state(context.name, self._codec.name)
        before = [(memory.residual(context.name), dict(context.state)) for context in self._contexts]
        inputs = memory.compensated_all(self._names, self._tensors, scale)
        results = self._codec.reduce(inputs, self._contexts, average)
        memory.lost_all(self._names, [result.residual for result in results], scale)
        torch._foreach_copy_(self._tensors, [result.mean for result in results])
        self._norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._tensors, dtype=torch.float64)))
        after = [(result.residual, context.state) for result, context in zip(results, self._contexts)]
        return Noted(_changes(before, after) if memory.changes else [], (inputs, results))


_Kept = Sequence[tuple[torch.Tensor | None, Mapping[str, Any]]]  # the residual and the state of each tensor


def _changes(before: _Kept, after: _Kept) -> list[Change] | None:
    """What differs, if the same was kept before and where it lies can be copied as it is."""
    found: list[Change] = []
    for (old_residual, old_state), (residual, state) in zip(before, after):
        if state.keys() != old_state.keys():
            return None
        for now, then in [(residual, old_residual), *((state[key], old_state[key]) for key in state)]:
            if now is None and then is None:
                continue
            if now is None or then is None or now.shape != then.shape:
                return None
            if not all(x.dtype == torch.float32 and x.is_contiguous() for x in (now, then)):
                return None
            found.append(Change(now, then))
    return found
