"""What ranks compare with each other besides their messages: the grids that they round to, and what came out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence

import torch

from ..engines.layout import Floor
from ..exchange.comparisons import (
    LOSSLESS,
    UNSHAPED,
    about_grids,
    about_joined,
    bit_sum,
    check_results,
    differences,
    floor_sums,
)
from ..exchange.outcome import Outcome
from ..sensitivity.shape import SecondMoments
from .channel import PipelineChannel
from .message import single
from .pipeline import Job
from .terms import AllReduce, Exchange, Parts, Steps


class Comparison:
    """At the beginning of a step: whether all ranks take part, and would round to the same grid.

    A rank that has joined early under uneven inputs takes no steps, so its parameters fall behind. Grids also differ
    where a rank has other optimizer settings than the rest. Either way this step's gradients go lossless on all of
    them. What is compared of grids is a sample that changes from step to step.
    """

    _instead = LOSSLESS

    def __init__(
        self,
        floors: Mapping[str, Floor | torch.Tensor],
        joined: bool,
        step: int,
        channel: PipelineChannel,
        warn: Callable[[str], None],
    ) -> None:
        self._known = threading.Event()
        self._differ = self._joined = False
        self._floors, self._own, self._warn = dict(floors), joined, warn
        cuda = channel.device.type == "cuda"
        ready = torch.cuda.current_stream(channel.device).record_event() if cuda else None
        what = f"a comparison of {len(self._names())} grids at step {step}"
        single(what, lambda job, outcome: self._compare(step, ready, channel), channel, self._end)

    def grids_agree(self) -> bool:
        """Waits for the others. If they have failed, so will whatever comes next."""
        self._known.wait()
        return not (self._differ or self._joined)

    def one_has_joined(self) -> bool:
        self._known.wait()
        return self._joined

    def _compare(self, step: int, ready: torch.cuda.Event | None, channel: PipelineChannel) -> Steps:
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        sums = torch.cat([torch.tensor([int(self._own)]), self._sums(step)])
        differing = yield from _differences(sums, ["", *self._names()], channel)
        gone = channel.rank if self._own else next((rank for rank, name in differing if not name), None)
        if gone is not None:
            self._joined = True
            if self._has_grids():
                self._warn(about_joined(gone, self._instead))
        elif differing:
            self._differ = True
            self._warn(about_grids(*differing[0], channel.rank, self._instead))

    def _sums(self, step: int) -> torch.Tensor:
        return floor_sums(list(self._floors.values()), step)

    def _names(self) -> list[str]:
        return list(self._floors)

    def _has_grids(self) -> bool:
        return bool(self._floors)

    def _end(self, outcome: Outcome) -> None:
        self._known.set()


class ShapeComparison(Comparison):
    """The same for shapes of the codec noise: where they differ, all values of a tensor get the same grid."""

    _instead = UNSHAPED

    def __init__(
        self, shapes: SecondMoments, joined: bool, step: int, channel: PipelineChannel, warn: Callable[[str], None]
    ) -> None:
        self._shapes = shapes
        super().__init__({}, joined, step, channel, warn)

    def _sums(self, step: int) -> torch.Tensor:
        return self._shapes.sums(step)

    def _names(self) -> list[str]:
        return self._shapes.all_names

    def _has_grids(self) -> bool:
        return bool(self._shapes.names)


def compare_results(
    results: Sequence[tuple[str, torch.Tensor]],
    step: int,
    ready: threading.Event,
    channel: PipelineChannel,
    done: Callable[[Outcome], None],
) -> None:
    """Compares averaged gradients over all ranks, once they are `ready`: all must have the same bits."""

    def run(job: Job, outcome: Outcome) -> Steps:
        ready.wait()
        if channel.error is not None:
            raise channel.error
        sums = torch.tensor([bit_sum(tensor) for _, tensor in results])
        found = yield from _differences(sums, [name for name, _ in results], channel)
        check_results(found, step, channel.rank, len(results))

    single(f"a comparison of {len(results)} results at step {step}", run, channel, done)


def _differences(sums: torch.Tensor, names: Sequence[str], channel: PipelineChannel) -> _Found:
    """The ranks and names whose numbers differ from this rank's."""
    group = channel.groups["flat"]
    data = sums.view(torch.uint8)
    received = yield Exchange("flat", [data] * group.size, [data.numel()] * group.size)
    rows = [part.view(torch.int64) for part in received if part is not None]
    return differences(rows, channel.rank, names)


_Found = Generator[Exchange | AllReduce, Parts, list[tuple[int, str]]]
