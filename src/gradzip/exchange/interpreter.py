"""Runs a program for all ranks in one process, in plain torch: what the runners must equal, bit for bit.

Every rank holds whole tensors, filled with NaN where it has no values: a step that reads what its rank does not hold
shows in the result. Frames are lists: for each term of a sum, a frame for each owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .coding import RAW, Coder, Frames, Message, MessageCodec, Values
from .program import (
    VALUES,
    AllGather,
    AllToAll,
    Broadcast,
    Buffer,
    Communicate,
    Copy,
    Decode,
    Encode,
    Gather,
    Pass,
    Program,
    Recode,
    Reduce,
    Step,
    Summing,
)
from .rounds import Rounds, averaging
from .topology import Topology

Tensors = list[torch.Tensor]
Coded = list[list[torch.Tensor]]  # by term and owner


def run_rounds(of_ranks: Sequence[Rounds], topology: Topology) -> list[bool]:
    """An exchange in rounds, of all ranks; what each rank's ended with."""
    for number in itertools.count(1):
        flats, ended = list[torch.Tensor](), list[bool]()
        for rounds in of_ranks:
            try:
                flats.append(next(rounds).view(-1))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            assert not flats, "ranks have different numbers of rounds"
            return ended
        program = averaging(number, flats[0].numel(), flats[0].dtype, topology)
        messages = [Message(program.names, program.dtype, rank, topology.world) for rank in range(topology.world)]
        means = Interpreter(program, RAW, messages).run([[flat] for flat in flats])
        for flat, (mean,) in zip(flats, means):
            flat.copy_(mean)
    raise AssertionError


class Interpreter:
    """`codec` must be that which the program was compiled for; `messages` holds what each rank's coder knows."""

    def __init__(self, program: Program, codec: MessageCodec, messages: Sequence[Message]) -> None:
        self._program, self._codec = program, codec
        self._coders = [codec.coder(message) for message in messages]
        self._raw = [RAW.coder(message) for message in messages]
        self._ranks = range(program.world)
        self._plain: list[dict[str, Tensors]] = []
        self._coded: list[dict[str, Coded]] = [{} for _ in self._ranks]

    def run(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The mean of gradients[rank][tensor], flat ones, as each rank gets it."""
        self._plain = [{VALUES: [tensor.clone() for tensor in of_rank]} for of_rank in gradients]
        for rank in self._ranks:
            self._coders[rank].measure(Values(self._plain[rank][VALUES]))
        for step in self._program.steps:
            ranks = [rank for rank in self._ranks if self._program.takes_part(rank, step)]
            if isinstance(step, Communicate):
                self._communicate(step, ranks)
                continue
            for rank in ranks:
                self._alone(step, rank)
        for coder in self._coders:
            coder.finish()
        return [plain[VALUES] for plain in self._plain]

    # -- coding -------------------------------------------------------------------------------------------------

    def _alone(self, step: Step, rank: int) -> None:
        if isinstance(step, Encode):
            self._encode(step, rank, self._plain[rank][step.source])
        elif isinstance(step, Decode):
            self._plain[rank][step.target] = self._decode(step, rank, self._buffer(step.target))
        elif isinstance(step, Recode):
            self._recode(step, rank)
        else:
            assert isinstance(step, Copy)
            self._plain[rank][step.target] = [tensor.clone() for tensor in self._plain[rank][step.source]]

    def _encode(self, step: Encode | Recode, rank: int, values: Tensors) -> None:
        target = self._buffer(step.target)
        table = self._program.table(rank, target)
        kind = self._kind(target)
        stays = self._program.stays(rank, target)
        owners = [self._program.leaf(rank, target, step)] if target.leaf else list(range(table.owners))
        owners = [owner for owner in owners if owner != stays]
        codec = RAW if target.raw else self._codec
        rooms = [torch.empty(codec.bound(table, owner, kind), dtype=torch.uint8) for owner in owners]
        coder, hop = self._coder(rank, target), self._program.hop(target.name)
        sizes = coder.encode(table, owners, Values(values), hop, rooms)
        frames = [room[:size].clone() for room, size in zip(rooms, sizes)]
        if stays is not None:
            frames.insert(stays, torch.empty(0, dtype=torch.uint8))  # its values stand for it
        self._coded[rank][step.target] = [frames]

    def _recode(self, step: Recode, rank: int) -> None:
        source, target = self._buffer(step.source), self._buffer(step.target)
        table = self._program.table(rank, source)
        owner = self._program.leaf(rank, source, step) if source.leaf else 0
        if source.over == target.over and (source.leaf or table.owners == 1):
            own = None if step.own is None else Values(self._plain[rank][step.own])
            room = torch.empty(self._codec.bound(table, owner, self._kind(target)), dtype=torch.uint8)
            by = self._program.world if step.divide else 1
            terms, hops = self._terms(step, rank, 0), [self._program.hop(name) for name in (step.source, step.target)]
            size = self._coders[rank].recode(table, owner, terms, own, hops[0], by, hops[1], room)
            self._coded[rank][step.target] = [[room[:size].clone()]]
            return
        plain = Buffer("", False, source.within, wide=target.wide)
        self._encode(step, rank, self._decode(step, rank, plain))

    def _decode(self, step: Decode | Recode, rank: int, target: Buffer) -> Tensors:
        source = self._buffer(step.source)
        table = self._program.table(rank, source)
        own = None if step.own is None else Values(self._plain[rank][step.own])
        out = self._nothing(self._kind(target))
        owners = [self._program.leaf(rank, source, step)] if source.leaf else list(range(table.owners))
        by = self._program.world if step.divide else 1
        for number, owner in enumerate(owners):
            terms = self._terms(step, rank, number)
            hop = self._program.hop(step.source)
            self._coder(rank, source).decode(table, owner, terms, own, hop, Values(out), by)
        return out

    def _coder(self, rank: int, frames: Buffer) -> Coder:
        return self._raw[rank] if frames.raw else self._coders[rank]

    def _terms(self, step: Decode | Recode, rank: int, number: int) -> Frames:
        """The frames to be added for an owner; None stands for the rank's own values."""
        source = self._buffer(step.source)
        terms: list[torch.Tensor | None] = [frames[number] for frames in self._coded[rank][step.source]]
        if step.own is not None and source.leaf:
            terms.append(None)
        elif step.own is not None:
            terms[self._program.place_among_terms(rank, source)] = None
        return terms

    # -- communication ------------------------------------------------------------------------------------------

    def _communicate(self, step: Communicate, ranks: Sequence[int]) -> None:
        """All ranks read before any writes: a step may write what another rank still has to read."""
        coded = self._buffer(step.source).coded
        for rank, data in [(rank, self._received(step, rank)) for rank in ranks]:
            if data is not None:
                (self._coded if coded else self._plain)[rank][step.target] = data

    def _received(self, step: Communicate, rank: int) -> Any:
        members = self._program.members(rank)[step.group]
        coded = self._buffer(step.source).coded
        if isinstance(step, Summing):
            return self._summed(step, rank, members.ranks)
        if isinstance(step, Broadcast):
            first = members.ranks[0]
            return self._coded[first][step.source] if coded else self._plain[first][step.source]
        if isinstance(step, Pass):
            return self._coded[members.ranks[members.rank - 1]][step.source]
        if isinstance(step, AllGather) and step.joins:
            return self._joined(step, members.ranks)
        if isinstance(step, Gather) and members.rank > 0:
            return None
        contributions = [term for peer in members.ranks for term in self._coded[peer][step.source]]
        if isinstance(step, AllToAll):
            width = len(contributions[0]) // members.size
            first = members.rank * width
            return [term[first : first + width] for term in contributions]
        return contributions

    def _summed(self, step: Summing, rank: int, peers: Sequence[int]) -> Tensors | None:
        if isinstance(step, Reduce) and rank != peers[0]:
            return None
        target = self._buffer(step.target)
        out = self._nothing(self._kind(target))
        for part in self._program.table(rank, target).parts:
            total: torch.Tensor | None = None
            for peer in peers:
                term = self._plain[peer][step.source][part.tensor][part.start : part.stop]
                term = term.to(torch.promote_types(term.dtype, torch.float32))
                total = term if total is None else total + term
            assert total is not None
            out[part.tensor][part.start : part.stop] = total / self._program.world if step.divide else total
        return out

    def _joined(self, step: AllGather, peers: Sequence[int]) -> Any:
        source = self._buffer(step.source)
        if source.coded:
            each = [self._coded[peer][step.source] for peer in peers]
            return [[frame for member in each for frame in member[term]] for term in range(len(each[0]))]
        out = self._nothing(self._kind(source))
        for peer in peers:
            for part in self._program.table(peer, source).parts:
                out[part.tensor][part.start : part.stop] = self._plain[peer][step.source][part.tensor][
                    part.start : part.stop
                ]
        return out

    # -- buffers ------------------------------------------------------------------------------------------------

    def _buffer(self, name: str) -> Buffer:
        return self._program.buffer(name)

    def _kind(self, buffer: Buffer) -> torch.dtype:
        return torch.promote_types(self._program.dtype, torch.float32) if buffer.wide else self._program.dtype

    def _nothing(self, kind: torch.dtype) -> Tensors:
        return [torch.full((size,), torch.nan, dtype=kind) for size in self._program.sizes]
