"""Compiles routes into programs, and programs into those of the host runner.

The compiler walks over a route once and keeps track of what ranks hold: which part of the message, as values or as
frames, and whose sum it is. What each step means is said in program.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..routes import Route
from ..routes import Step as RouteStep
from .parts import Table
from .program import (
    REDUCE_SCATTER,
    VALUES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Buffer,
    Communicate,
    Copy,
    Decode,
    Encode,
    Gather,
    Groups,
    Pass,
    Program,
    Recode,
    Reduce,
    ReduceScatter,
    Step,
    Summing,
)
from .topology import Topology


def compile_route(
    codec: str,
    route: Route,
    names: Sequence[str],
    sizes: Sequence[int],
    dtype: torch.dtype,
    topology: Topology,
    codes_sums: bool = False,
) -> Program:
    """The program of a route for a message of these tensors.

    `codes_sums`: the codec wants to code sums as they are, so that they are divided when they are decoded for the last
    time; others code means. `codec` is the codec's text form, which ranks compare.
    """
    topology.check(route)
    compiler = _Compiler(route, topology, codes_sums)
    compiler.run()
    steps, buffers = tuple(compiler.steps), tuple(compiler.buffers)
    return Program(codec, route, tuple(names), tuple(sizes), dtype, topology.hosts, steps, buffers)


def compile_reduce_scatter(
    codec: str,
    names: Sequence[str],
    sizes: Sequence[int],
    owners: Sequence[int],
    dtype: torch.dtype,
    topology: Topology,
    divide: bool = True,
) -> Program:
    """The program that leaves each rank with the mean, or the sum, of the tensors that it owns.

    Of all other tensors a rank keeps its own values.
    """
    sent = Buffer("frames1", True, (), over=("flat",))
    came = replace(sent, name="frames2", within=("flat",), over=(), terms=("flat",))
    steps = (
        Encode(VALUES, sent.name, (), "cpu", 0, 1, True),
        AllToAll(sent.name, came.name, (), "flat"),
        Decode(came.name, VALUES, (), "cpu", VALUES, divide),
    )
    buffers, table = (Buffer(VALUES, False, ()), sent, came), Table.owned(names, sizes, owners, topology.world)
    about = tuple(names), tuple(sizes), dtype, topology.hosts
    return Program(codec, REDUCE_SCATTER, *about, steps, buffers, table)


def lowered(program: Program) -> Program:
    """The same exchange in which nothing but frames travels: plain values do so as frames of the codec `raw`."""
    return _Lowering(program).program


class _Compiler:
    """Walks over a route and keeps track of what ranks hold."""

    def __init__(self, route: Route, topology: Topology, codes_sums: bool) -> None:
        self._route, self._codes_sums = route, codes_sums
        self._sizes = {name: members.size for name, members in topology.groups().items()}
        self._world = topology.world
        self._held = Buffer(VALUES, False, ())
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = [self._held]
        self._made = 0  # buffers so far
        self._only: Groups = ()
        self._summed, self._divided, self._encodes = 1, False, 0
        self._own: str | None = None  # plain values that the held frames were made of, while they may stand for them
        self._is_own = True  # the plain values are gradients as DDP gave them
        self._encodes_follow = False  # after the step that is compiled

    def run(self) -> None:
        steps = self._route.steps
        for number, (step, joins) in enumerate(zip(steps, self._route.joins)):
            rest = steps[number + 1 :]
            self._encodes_follow = any(later.kind == "enc" for later in rest)
            if step.kind == "enc":
                if rest[0].kind == "ring":
                    self._ring(rest[0].where, step.where)
                else:
                    over = tuple(later.where for later in _before_decoding(rest) if later.kind == "a2a")
                    self._encode(step.where, over)
            elif step.kind == "dec":
                self._decode(step.where, last=not rest)
            elif step.kind != "ring":
                self._communicate(step.kind, step.where, joins)
        if self._held.name != VALUES:
            self.steps[-1] = replace(self.steps[-1], target=VALUES)
            self.buffers.remove(self._held)
        assert self._divided and not self._only

    # -- coding -------------------------------------------------------------------------------------------------

    def _encode(self, device: str, over: Groups, leaf: int | None = None) -> None:
        source = self._held
        wide = not (self._is_own or self._divided)
        target = self._new(replace(source, coded=True, over=over, terms=(), wide=wide, leaf=leaf is not None))
        fused = self._fused(device, source, target)
        self._own = source.name if fused is None else None
        own, number, summed = self._is_own, self._encodes, self._summed
        self._add(fused or Encode(source.name, target.name, self._only, device, number, summed, own, leaf))
        self._held = target
        self._is_own = False
        self._encodes += 1

    def _fused(self, device: str, source: Buffer, target: Buffer) -> Recode | None:
        """A Decode right before an Encode becomes one step with it.

        In a ring they are of different parts, and before an all-to-all a rank keeps the sum: it stands for a frame.
        """
        last = self.steps[-1] if self.steps else None
        same_part = isinstance(last, Decode) and last.leaf is None and last.target == source.name
        if not isinstance(last, Decode) or not same_part or last.device != device or target.over:
            return None
        self.steps.pop()
        self.buffers.remove(source)
        number, summed = self._encodes, self._summed
        return Recode(last.source, target.name, self._only, device, last.own, last.divide, number, summed)

    def _decode(self, device: str, last: bool) -> None:
        source, divide = self._held, self._completes()
        own = self._own if source.terms and not source.over else None
        plain = replace(source, coded=False, over=(), terms=(), wide=not self._divided, leaf=False)
        self._held = self.buffers[0] if last else self._new(plain)
        self._add(Decode(source.name, self._held.name, self._only, device, own, divide))

    def _completes(self) -> bool:
        """Whether the sum that is formed now is to be divided."""
        divide = not self._divided and self._summed == self._world and not (self._codes_sums and self._encodes_follow)
        self._divided |= divide
        return divide

    # -- communication ------------------------------------------------------------------------------------------

    def _communicate(self, kind: str, group: str, joins: bool) -> None:
        held = self._held
        if not joins:
            self._summed *= self._sizes[group]
        if kind == "ar":
            self._sum(AllReduce, group, held.within)
        elif kind == "rs":
            self._sum(ReduceScatter, group, (*held.within, group))
        elif kind == "red":
            self._sum(Reduce, group, held.within)
            self._only = (*self._only, group)
        elif kind == "a2a":
            terms, within = (*held.terms, group), (*held.within, group)
            target = self._new(replace(held, within=within, over=held.over[1:], terms=terms))
            self._move(AllToAll(held.name, target.name, self._only, group), target)
        elif kind == "gat":
            target = self._new(replace(held, terms=(*held.terms, group)))
            self._move(Gather(held.name, target.name, self._only, group), target)
            self._only, self._own = (*self._only, group), None
        elif kind == "bc":
            self._only = tuple(other for other in self._only if other != group)
            self._own = None
            target = self._new(held)
            self._move(Broadcast(held.name, target.name, self._only, group), target)
        elif joins:
            assert held.within[-1] == group
            over = (group, *held.over) if held.coded else ()
            self._own = None
            target = self._new(replace(held, within=held.within[:-1], over=over))
            self._move(AllGather(held.name, target.name, self._only, group, True), target)
        else:
            self._own = None
            target = self._new(replace(held, terms=(*held.terms, group)))
            self._move(AllGather(held.name, target.name, self._only, group, False), target)

    def _sum(self, kind: type[Summing], group: str, within: Groups) -> None:
        source, divide = self._held, self._completes()
        target = self._new(Buffer("", False, within, wide=not self._divided))
        self._is_own = False
        self._move(kind(source.name, target.name, self._only, group, divide), target)

    def _ring(self, group: str, device: str) -> None:
        """Partial sums go round: each member adds its own values to what came, and codes the sum again."""
        values, size, summed, number = self._held, self._sizes[group], self._summed, self._encodes
        self._encodes_follow = True  # that of the whole sum
        if size > 1:
            self._encode(device, (group,), leaf=-1)
        for hop in range(size - 1):
            passed = self._new(self._held)
            self._add(Pass(self._held.name, passed.name, self._only, group))
            self._summed, leaf = summed * (2 + hop), -2 - hop
            if hop < size - 2:
                self._held = self._new(replace(passed, wide=True))
                ends = passed.name, self._held.name
                self._add(Recode(*ends, self._only, device, values.name, False, number, self._summed, leaf))
            else:
                divide = self._completes()
                self._held = self._new(Buffer("", False, (*values.within, group), wide=not self._divided))
                ends = passed.name, self._held.name
                self._add(Decode(*ends, self._only, device, values.name, divide, leaf))
        if size == 1:
            self._held = self._new(replace(values, within=(*values.within, group)))
            self._add(Copy(values.name, self._held.name, self._only))
        self._encode(device, ())

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _new(self, like: Buffer) -> Buffer:
        self._made += 1
        made = replace(like, name=f"{'frames' if like.coded else 'sum'}{self._made}")
        self.buffers.append(made)
        return made

    def _add(self, step: Step) -> None:
        self.steps.append(step)

    def _move(self, step: Communicate, target: Buffer) -> None:
        self._add(step)
        self._held = target


def _before_decoding(steps: Sequence[RouteStep]) -> list[RouteStep]:
    return list(itertools.takewhile(lambda step: step.kind != "dec", steps))


class _Lowering:
    """Replaces steps on plain values by an encode of raw frames, their exchange, and a decode."""

    def __init__(self, program: Program) -> None:
        self._program, self._steps, self._buffers = program, list[Step](), list(program.buffers)
        for step in program.steps:
            if isinstance(step, Communicate) and not program.buffer(step.source).coded:
                self._lower(step)
            else:
                self._steps.append(step)
        self.program = replace(program, steps=tuple(self._steps), buffers=tuple(self._buffers))

    def _lower(self, step: Communicate) -> None:
        source, target, group = self._program.buffer(step.source), self._program.buffer(step.target), step.group
        divide = isinstance(step, Summing) and step.divide
        if isinstance(step, AllReduce):
            part = replace(target, name=f"{target.name}.part", within=(*source.within, group))
            self._buffers.append(part)
            self._scatter(step, source, part, divide)
            self._gather(step, part, target)
        elif isinstance(step, ReduceScatter):
            self._scatter(step, source, target, divide)
        elif isinstance(step, Reduce):
            sent = self._sent(source, over=())
            came = replace(sent, name=f"{sent.name}.came", terms=(group,))
            self._through(step.only, source, sent, Gather, group, came)
            first = (*step.only, group)
            self._steps.append(Decode(came.name, target.name, first, "cpu", source.name, divide))
        elif isinstance(step, Broadcast):
            sent = self._sent(source, over=())
            came = replace(sent, name=f"{sent.name}.came")
            self._steps.append(self._encode(source, sent, (*step.only, group)))
            self._buffers.append(came)
            self._steps.append(Broadcast(sent.name, came.name, step.only, group))
            self._steps.append(Decode(came.name, target.name, step.only, "cpu", None, False))
        else:
            self._gather(step, source, target)

    def _scatter(self, step: Communicate, source: Buffer, target: Buffer, divide: bool) -> None:
        sent = self._sent(source, over=(step.group,))
        came = replace(sent, name=f"{sent.name}.came", within=(*sent.within, step.group), over=(), terms=(step.group,))
        self._through(step.only, source, sent, AllToAll, step.group, came)
        self._steps.append(Decode(came.name, target.name, step.only, "cpu", source.name, divide))

    def _gather(self, step: Communicate, source: Buffer, target: Buffer) -> None:
        sent = self._sent(source, over=())
        came = replace(sent, name=f"{sent.name}.came", within=sent.within[:-1], over=(step.group,))
        self._steps.append(self._encode(source, sent, step.only))
        self._buffers.append(came)
        self._steps.append(AllGather(sent.name, came.name, step.only, step.group, True))
        self._steps.append(Decode(came.name, target.name, step.only, "cpu", None, False))

    def _through(
        self, only: Groups, source: Buffer, sent: Buffer, kind: type[Communicate], group: str, came: Buffer
    ) -> None:
        self._steps.append(self._encode(source, sent, only))
        self._buffers.append(came)
        self._steps.append(kind(sent.name, came.name, only, group))

    def _sent(self, source: Buffer, over: Groups) -> Buffer:
        name = f"{source.name}.sent{len(self._buffers)}"
        made = replace(source, name=name, coded=True, over=over, raw=True)
        self._buffers.append(made)
        return made

    def _encode(self, source: Buffer, sent: Buffer, only: Groups) -> Encode:
        return Encode(source.name, sent.name, only, "cpu", -1, 1, False)
