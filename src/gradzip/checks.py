"""What ranks compare with each other besides their messages: the grids that they round to, and what came out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence

import torch

from .collectives import AllReduce, Exchange, Job, Parts, PipelineChannel, Steps, single
from .engines.layout import Floor
from .errors import PeerError
from .exchange.outcome import Outcome
from .sensitivity.shape import SecondMoments

_SAMPLED = 1024  # values of each tensor that are looked at in a step, others in the next


class Comparison:
    """At the beginning of a step: whether all ranks take part, and would round to the same grid.

    A rank that has joined early under uneven inputs takes no steps, so its parameters fall behind. Grids also differ
    where a rank has other optimizer settings than the rest. Either way this step's gradients go lossless on all of
    them. What is compared of grids is a sample that changes from step to step.
    """

    _instead = "gradients are sent lossless"

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
        names = ["", *self._names()]
        differing = yield from _differences(sums, names, channel)
        gone = channel.rank if self._own else next((rank for rank, name in differing if not name), None)
        if gone is not None:
            self._joined = True
            if self._has_grids():
                self._warn(f"rank {gone} has no more inputs: while others go on, {self._instead}")
        elif differing:
            self._differ = True
            rank, name = differing[0]
            self._warn(
                f"rank {rank} would round {name!r} to another grid than rank {channel.rank}: its parameters, optimizer "
                f"state or settings differ. Until they agree, {self._instead}"
            )

    def _sums(self, step: int) -> torch.Tensor:
        return _floor_sums(list(self._floors.values()), step)

    def _names(self) -> list[str]:
        return list(self._floors)

    def _has_grids(self) -> bool:
        return bool(self._floors)

    def _end(self, outcome: Outcome) -> None:
        self._known.set()


class ShapeComparison(Comparison):
    """The same for shapes of the codec noise: where they differ, all values of a tensor get the same grid."""

    _instead = "the codec noise rounds all values of a tensor to the same grid"

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
        differing: dict[str, list[int]] = {}
        for rank, name in (yield from _differences(sums, [name for name, _ in results], channel)):
            differing.setdefault(name, []).append(rank)
        if differing:
            name, ranks = next(iter(differing.items()))
            raise PeerError(
                f"after step {step} rank {channel.rank} has other bits in the gradient of {name!r} than rank "
                f"{', '.join(map(str, ranks))}; so it is for {len(differing)} of {len(results)} parameters. "
                "Replicas no longer agree: this is a bug or a hardware fault"
            )

    single(f"a comparison of {len(results)} results at step {step}", run, channel, done)


def _differences(sums: torch.Tensor, names: Sequence[str], channel: PipelineChannel) -> _Found:
    """The ranks and names whose numbers differ from this rank's."""
    group = channel.groups["flat"]
    data = sums.view(torch.uint8)
    received = yield Exchange("flat", [data] * group.size, [data.numel()] * group.size)
    found = []
    for rank, part in zip(group.ranks, received):
        assert part is not None
        for index in (part.view(torch.int64) != sums).nonzero().view(-1).tolist():
            found.append((rank, names[index]))
    return found


_Found = Generator[Exchange | AllReduce, Parts, list[tuple[int, str]]]


def bit_sum(x: torch.Tensor) -> int:
    """A sum over the bits of a tensor that tells apart tensors with a value changed or two exchanged."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = x.detach().reshape(-1).view(kinds[x.itemsize])
    if not words.numel():
        return 0
    total = int(words.sum(dtype=torch.int64))
    rows = words[: words.numel() // 64 * 64].view(64, -1).sum(1, dtype=torch.int64).tolist()
    for place, row in enumerate(rows, start=3):
        total += place * row
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _floor_sums(floors: Sequence[Floor | torch.Tensor], step: int) -> torch.Tensor:
    """A number for each, from a sample of its values: a few operations for all of them, and one transfer."""
    totals = [0] * len(floors)
    alike: dict[tuple[torch.dtype, int], list[tuple[int, int, torch.Tensor]]] = {}
    for place, floor in enumerate(floors):
        tensors: Sequence[torch.Tensor | None]
        if isinstance(floor, Floor):
            totals[place] = (floor.c0 * 31 + floor.c1) * 31 + floor.c2
            tensors = floor.theta, floor.second
        else:
            tensors = (floor.view(-1),)
        for weight, x in enumerate(tensors, start=1):
            if x is not None:
                sample = _sample(x, step)
                alike.setdefault((x.dtype, sample.numel()), []).append((place, weight, sample))
    sums = []
    for (dtype, _), samples in alike.items():
        rows = torch.stack([sample for _, _, sample in samples])
        sums.append((rows if dtype == torch.int8 else rows.view(torch.int32)).sum(1, dtype=torch.int64))
    found = torch.cat(sums).tolist() if sums else []
    for (place, weight, _), number in zip((entry for samples in alike.values() for entry in samples), found):
        totals[place] += weight * number
    return torch.tensor(totals, dtype=torch.int64)


def _sample(flat: torch.Tensor, step: int) -> torch.Tensor:
    """Every n-th value; it starts elsewhere in each step, so that all of them are seen in the end. A view."""
    count = min(flat.numel(), _SAMPLED)
    stride = flat.numel() // max(count, 1)
    room = flat.numel() - (count - 1) * stride if count else 1
    return flat.as_strided((count,), (stride,), flat.storage_offset() + step % room)
