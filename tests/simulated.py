"""Several ranks in one process: what a codec, with error feedback, makes of their gradients.

It follows the routes of the exchange (decode, add in the order of ranks, divide), without any communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from gradzip import Codec, Context, parse
from gradzip.codecs.base import Reduced, wide
from gradzip.engines.layout import Floor

T = TypeVar("T")
Average = Callable[[torch.Tensor], None]


def together(
    world: int, work: Callable[[int, Average], T], on_average: Callable[[int], None] = lambda _: None
) -> list[T]:
    """The results of work(rank, average) on all ranks, each in a thread of its own; they meet at every average."""
    slots: list[torch.Tensor] = [torch.empty(0)] * world
    results: list[Any] = [None] * world
    failures: list[BaseException] = []
    meeting = threading.Barrier(world, timeout=100)

    def average_for(rank: int) -> Average:
        def average(x: torch.Tensor) -> None:
            slots[rank] = x.clone()
            meeting.wait()
            mean = torch.stack(slots).mean(0)
            if rank == 0:
                on_average(x.numel())
            meeting.wait()
            x.copy_(mean)

        return average

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, average_for(rank))
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return results


class Workers:
    """The error memory and codec state of all ranks, by parameter name."""

    def __init__(self, world: int) -> None:
        self.world, self.step, self.bits = world, 0, 0.0  # bits that one rank has contributed so far
        self._residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
        self._states: list[dict[str, dict[str, Any]]] = [{} for _ in range(world)]

    def mean(
        self,
        gradients: dict[str, list[torch.Tensor]],
        codecs: Mapping[str, str | Codec],
        floors: dict[str, Floor | None],
    ) -> dict[str, torch.Tensor]:
        """What all ranks get for gradients[name][rank], each parameter by its own codec. Ends the step."""
        means, late = {}, dict[Codec, list[str]]()
        for name, tensors in gradients.items():
            codec = parse(codecs[name])
            if codec.rounds > 1:
                late.setdefault(codec, []).append(name)
            else:
                means[name] = self._coded(name, tensors, codec, floors.get(name))
        for codec, names in late.items():
            means |= self._reduced({name: gradients[name] for name in names}, codec)
        self.step += 1
        return means

    def _context(self, name: str, rank: int, codec: Codec, floor: Floor | None = None) -> Context:
        state = self._states[rank].setdefault(f"{codec.name}/{name}", {})
        return Context(name, self.step, rank=rank, world=self.world, floor=floor, state=state)

    def _compensated(self, name: str, rank: int, x: torch.Tensor) -> torch.Tensor:
        return wide(x) + self._residuals[rank][name] if name in self._residuals[rank] else x

    def _keep(self, name: str, rank: int, codec: Codec, residual: torch.Tensor | None) -> None:
        if residual is None or codec.error_memory is None:
            self._residuals[rank].pop(name, None)
        else:
            self._residuals[rank][name] = residual

    def _coded(self, name: str, tensors: list[torch.Tensor], codec: Codec, floor: Floor | None) -> torch.Tensor:
        total = torch.zeros(tensors[0].shape)
        for rank, tensor in enumerate(tensors):
            ctx = self._context(name, rank, codec, floor)
            x = self._compensated(name, rank, tensor)
            frame = codec.encode(x.to(tensor.dtype), ctx)
            decoded = codec.decode(frame, ctx).view(x.shape)
            self._keep(name, rank, codec, wide(x) - wide(decoded))
            self.bits += 8 * frame.numel() / self.world
            total += wide(decoded)
        return total / self.world

    def _reduced(self, gradients: dict[str, list[torch.Tensor]], codec: Codec) -> dict[str, torch.Tensor]:
        names = list(gradients)

        def work(rank: int, average: Average) -> list[Reduced]:
            inputs = [self._compensated(name, rank, gradients[name][rank]) for name in names]
            return codec.reduce(inputs, [self._context(name, rank, codec) for name in names], average)

        def count(numel: int) -> None:
            self.bits += 32 * numel

        results = together(self.world, work, count)
        for rank, reduced in enumerate(results):
            for name, result, first in zip(names, reduced, results[0]):
                assert torch.equal(result.mean, first.mean), "replicas differ"
                self._keep(name, rank, codec, result.residual)
        return {name: result.mean for name, result in zip(names, results[0])}
