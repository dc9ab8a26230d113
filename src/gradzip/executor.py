"""Runs any Route over groups of ranks. One primitive, `Group.exchange`, carries everything.

What a rank holds at any moment is a stretch of the flat tensor, either as plain values (the sum over the ranks that
have been added so far) or as coded contributions that are still to be added. Sums are formed in float32 and in the
order of ranks within each group, so every rank that forms a sum forms the same one, and replicas stay bit-identical.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .routes import Route, Step


class Group(Protocol):
    """Some ranks that can send to each other."""

    rank: int
    size: int

    def exchange(self, send: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """send[j] goes to member j as it is; returns what each member sent here. A rank's own part comes back."""
        ...


class Coder(Protocol):
    """How stretches of the tensor are coded. `shift` is log2 of the number of ranks in the sum, rounded down."""

    def encode(self, values: torch.Tensor, start: int, shift: int, device: str) -> torch.Tensor: ...

    def decode(self, frame: torch.Tensor, start: int, numel: int, shift: int, device: str) -> torch.Tensor: ...


@dataclass
class _Coded:
    """Contributions that together are the sum over a stretch; each is one frame per leaf of the stretch."""

    leaves: list[tuple[int, int]]  # (start, stop), in order
    contributions: list[list[torch.Tensor]]
    shift: int


@dataclass
class _Split:
    """A first step whose second one is still to come."""

    group: str
    start: int
    stop: int
    gathered: bool  # one rank holds it all, the others wait


@dataclass
class _Holding:
    start: int
    stop: int
    plain: torch.Tensor | None  # None: coded, or this rank waits
    coded: _Coded | None = None
    summed: int = 1  # ranks in the sum
    splits: list[_Split] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return self.plain is None and self.coded is None


def run(route: Route, values: torch.Tensor, groups: dict[str, Group], coder: Coder) -> torch.Tensor:
    """The mean of flat float32 `values` over all ranks of the groups that the route uses."""
    held = _Holding(0, values.numel(), values.clone())
    for number, (step, joins) in enumerate(zip(route.steps, route.joins)):
        if step.kind == "enc":
            _encode(held, _dealt_sizes(route.steps[number + 1 :], groups), coder, step.where)
        elif step.kind == "dec":
            _decode(held, coder, step.where)
        else:
            _communicate(held, step, joins, groups[step.where])
    assert held.plain is not None and not held.splits
    return held.plain / held.summed


def parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """A stretch in `count` nearly equal parts, some of them empty where there are fewer values than ranks."""
    size = stop - start
    bounds = [start + size * i // count for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _dealt_sizes(steps: Sequence[Step], groups: dict[str, Group]) -> list[int]:
    """The sizes of the groups among which coded data will be dealt out before it is decoded: frames cannot be cut."""
    sizes = []
    for step in steps:
        if step.kind == "dec":
            break
        if step.kind == "a2a":
            sizes.append(groups[step.where].size)
    return sizes


def _encode(held: _Holding, dealt: list[int], coder: Coder, device: str) -> None:
    if held.plain is None:
        return
    leaves = [(held.start, held.stop)]
    for size in dealt:
        leaves = [part for leaf in leaves for part in parts(*leaf, size)]
    shift = held.summed.bit_length() - 1
    frames = [coder.encode(held.plain[a - held.start : b - held.start], a, shift, device) for a, b in leaves]
    held.plain, held.coded = None, _Coded(leaves, [frames], shift)


def _decode(held: _Holding, coder: Coder, device: str) -> None:
    if held.coded is None:
        return
    total = torch.zeros(held.stop - held.start)
    for number, frames in enumerate(held.coded.contributions):
        for (a, b), frame in zip(held.coded.leaves, frames):
            piece = total[a - held.start : b - held.start]
            decoded = coder.decode(frame, a, b - a, held.coded.shift, device)
            piece.copy_(decoded) if number == 0 else piece.add_(decoded)
    held.plain, held.coded = total, None


def _communicate(held: _Holding, step: Step, joins: bool, group: Group) -> None:
    mine = bool(held.splits) and held.splits[-1].group == step.where  # the split that this step closes
    if held.waits and not (joins and mine):
        pass  # the members of this group all wait for a broadcast in another one
    elif joins:
        _join(held, held.splits.pop(), group)
    elif step.kind == "ar":
        _deal(held, Step("rs", step.where), group)
        _join(held, held.splits.pop(), group)
    elif step.kind == "ag":
        _share(held, group)
    elif step.kind in ("rs", "a2a"):
        _deal(held, step, group)
    else:
        _collect(held, step, group)
    if not joins:
        held.summed *= group.size


def _deal(held: _Holding, step: Step, group: Group) -> None:
    """rs and a2a: each member gets its part of everybody's data."""
    stretches = parts(held.start, held.stop, group.size)
    split = _Split(step.where, held.start, held.stop, gathered=False)
    if held.plain is not None:
        mine = held.plain
        received = group.exchange([mine[a - held.start : b - held.start] for a, b in stretches])
        held.plain = _sum(received)
    else:
        coded = _coded(held)
        width = len(coded.leaves) // group.size
        deals = [[c[i * width : (i + 1) * width] for c in coded.contributions] for i in range(group.size)]
        received_frames = _exchange_frames(group, deals)
        leaves = coded.leaves[group.rank * width : (group.rank + 1) * width]
        held.coded = _Coded(leaves, [c for member in received_frames for c in member], coded.shift)
    held.start, held.stop = stretches[group.rank]
    held.splits.append(split)


def _collect(held: _Holding, step: Step, group: Group) -> None:
    """red and gat: the first member gets everybody's data, the others wait."""
    held.splits.append(_Split(step.where, held.start, held.stop, gathered=True))
    nothing: list[None] = [None] * (group.size - 1)
    if held.plain is not None:
        received = group.exchange([held.plain, *nothing])
        held.plain = _sum(received) if group.rank == 0 else None
        return
    coded = _coded(held)
    frames = _exchange_frames(group, [coded.contributions, *nothing])
    if group.rank == 0:
        held.coded = _Coded(coded.leaves, [c for member in frames for c in member], coded.shift)
    else:
        held.coded = None


def _share(held: _Holding, group: Group) -> None:
    """ag of coded data that nobody dealt out: everybody gets everybody's contributions."""
    coded = _coded(held)
    frames = _exchange_frames(group, [coded.contributions] * group.size)
    held.coded = _Coded(coded.leaves, [c for member in frames for c in member], coded.shift)


def _join(held: _Holding, split: _Split, group: Group) -> None:
    """ag and bc as second steps: everybody gets the whole stretch again."""
    if split.gathered:
        _broadcast(held, group)
    elif held.plain is not None:
        received = group.exchange([held.plain] * group.size)
        held.plain = torch.cat([_present(part) for part in received])
    else:
        coded = _coded(held)
        frames = _exchange_frames(group, [coded.contributions] * group.size)
        whole = [[frame for member in frames for frame in member[k]] for k in range(len(coded.contributions))]
        width = len(coded.leaves)
        leaves = [leaf for a, b in parts(split.start, split.stop, group.size) for leaf in parts(a, b, width)]
        held.coded = _Coded(leaves, whole, coded.shift)
    held.start, held.stop = split.start, split.stop


def _broadcast(held: _Holding, group: Group) -> None:
    if group.rank == 0 and held.plain is not None:
        group.exchange([held.plain] * group.size)
        return
    if group.rank == 0:
        coded = _coded(held)
        head = torch.tensor([coded.shift, len(coded.leaves), *(x for leaf in coded.leaves for x in leaf)])
        group.exchange([head] * group.size)
        _exchange_frames(group, [coded.contributions] * group.size)
        return
    first = _present(group.exchange([None] * group.size)[0])
    if first.dtype == torch.float32:
        held.plain = first
        return
    shift, count, *flat = first.tolist()
    leaves = [(flat[2 * i], flat[2 * i + 1]) for i in range(count)]
    held.coded = _Coded(leaves, _exchange_frames(group, [None] * group.size)[0], shift)


def _exchange_frames(group: Group, send: Sequence[list[list[torch.Tensor]] | None]) -> list[list[list[torch.Tensor]]]:
    """Lists of contributions to and from every member; nothing from those that sent None."""
    payloads = [None if lists is None else _pack(lists) for lists in send]
    return [[] if payload is None else _unpack(payload) for payload in group.exchange(payloads)]


def _pack(contributions: list[list[torch.Tensor]]) -> torch.Tensor:
    frames = [frame for contribution in contributions for frame in contribution]
    width = len(contributions[0]) if contributions else 0
    head = torch.tensor([len(contributions), width, *(frame.numel() for frame in frames)])
    return torch.cat([head.view(torch.uint8), *frames])


def _unpack(payload: torch.Tensor) -> list[list[torch.Tensor]]:
    count, width = payload[:16].view(torch.int64).tolist()
    at = 16 + 8 * count * width
    sizes = payload[16:at].view(torch.int64).tolist()
    frames = []
    for size in sizes:
        frames.append(payload[at : at + size])
        at += size
    return [frames[i * width : (i + 1) * width] for i in range(count)]


def _sum(received: Sequence[torch.Tensor | None]) -> torch.Tensor:
    total = _present(received[0]).clone()
    for part in received[1:]:
        total += _present(part)
    return total


def _present(part: torch.Tensor | None) -> torch.Tensor:
    assert part is not None
    return part


def _coded(held: _Holding) -> _Coded:
    assert held.coded is not None
    return held.coded
