"""Programs: an exchange as a list of steps, compiled once from a route and a message's layout.

A program says what every rank does with a message until all ranks have its mean. It is data: the interpreter and the
runners run it, the planner prices its steps, and ranks compare its digest before they start.

Steps read and write named buffers. A buffer holds plain values or frames, of the part of the message that a rank has
at that moment. Which part that is follows from groups, not from the rank's number, so one program serves all ranks:

    within   the groups that have dealt the message out so far; a rank holds the part of its place in each of them
    over     the groups among whose members that part is dealt out further: there is a frame for each combination
    terms    the groups whose members' frames are collected and still to be added, innermost first
    only     the groups of which the first member alone holds anything; other ranks skip the step

Sums are formed in float32, in the order of ranks within each group.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..collectives.terms import Members
from ..collectives.topology import Topology
from ..routes import Route
from ..routes import Step as RouteStep
from .parts import Table

VALUES = "values"  # the buffer with a rank's gradients, where their mean ends up
Groups = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """What all steps have: the buffer that is read, the buffer that is written, and who takes part."""

    source: str
    target: str
    only: Groups

    @property
    def name(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        words = [f"{self.name}{self._words()}", f"{self.source} -> {self.target}"]
        return " ".join([*words, *(f"(first of {group} only)" for group in self.only)])

    def _words(self) -> str:
        return ""


@dataclass(frozen=True)
class Coding(Step):
    """A step in which a rank codes by itself; `device` is where the route wants that."""

    device: str

    def _words(self) -> str:
        return f".{self.device}"


@dataclass(frozen=True)
class Encode(Coding):
    """Encodes plain values.

    With `leaf`, it makes one frame instead of one for each owner: that of the member so many places further on.
    """

    number: int  # of this encode in the route
    summed: int  # ranks in the sum that is encoded
    own: bool  # the rank's own gradients, as DDP gave them
    leaf: int | None = None

    def _words(self) -> str:
        leaf = "" if self.leaf is None else f" for member {self.leaf:+d}"
        return f".{self.device} {'own' if self.own else f'sum of {self.summed}'}{leaf}"


@dataclass(frozen=True)
class Decode(Coding):
    """Decodes frames and adds them up, in the order of `terms`.

    `own` names plain values of this rank. They stand for the frame that it would have sent to itself; in a ring
    (`leaf`, as in Encode) they are added to the one frame that came.
    """

    own: str | None
    divide: bool  # the sum is complete: divide by the number of ranks, round to the gradients' type
    leaf: int | None = None

    def _words(self) -> str:
        own = "" if self.own is None else f" and {self.own}"
        leaf = "" if self.leaf is None else f" for member {self.leaf:+d}"
        return f".{self.device}{own}{leaf}{', divide' if self.divide else ''}"


@dataclass(frozen=True)
class Recode(Coding):
    """Decode and Encode as one step, so that a codec may do both in one pass: the sum is not kept."""

    own: str | None
    divide: bool
    number: int
    summed: int
    leaf: int | None = None  # of what is decoded and of what is encoded

    def _words(self) -> str:
        own = "" if self.own is None else f" and {self.own}"
        leaf = "" if self.leaf is None else f" for member {self.leaf:+d}"
        return f".{self.device} sum of {self.summed}{own}{leaf}{', divide' if self.divide else ''}"


@dataclass(frozen=True)
class Communicate(Step):
    """A step in which the members of a group exchange data."""

    group: str

    def _words(self) -> str:
        return f".{self.group}"


@dataclass(frozen=True)
class Summing(Communicate):
    """Adds up plain values, in the order of ranks."""

    divide: bool

    def _words(self) -> str:
        return f".{self.group}{', divide' if self.divide else ''}"


class AllReduce(Summing):
    """Every member gets the sum."""


class ReduceScatter(Summing):
    """Every member gets the sum of its part."""


class Reduce(Summing):
    """The first member gets the sum."""


class AllToAll(Communicate):
    """Every member gets the frames for its part from all members."""


@dataclass(frozen=True)
class AllGather(Communicate):
    """Every member gets what all members hold: their parts (`joins`), or all frames of the same part."""

    joins: bool


class Gather(Communicate):
    """The first member gets the frames of all."""


class Broadcast(Communicate):
    """Every member gets what the first one holds."""


class Pass(Communicate):
    """Every member sends its frame to the next one, and gets that of the one before."""


@dataclass(frozen=True)
class Copy(Step):
    """Plain values are put into another buffer: in a ring of one member they are its sum."""


@dataclass(frozen=True)
class Buffer:
    """What a buffer holds; the words are explained at the head of this file."""

    name: str
    coded: bool
    within: Groups
    over: Groups = ()
    terms: Groups = ()
    wide: bool = False  # values are sums in float32, not of the gradients' own type
    leaf: bool = False  # one frame, of the part of some member of the last group of `over`


Bound = Callable[[Table, int, bool], int]  # bytes of a frame for an owner; the flag is Buffer.wide


@dataclass(frozen=True)
class Program:
    """A compiled exchange of one message. The same on all ranks."""

    codec: str
    route: Route
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    hosts: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]

    def __str__(self) -> str:
        count, values = len(self.names), sum(self.sizes)
        head = f"{self.codec} by {self.route}: {count} tensors, {values} x {str(self.dtype).removeprefix('torch.')}"
        hosts = f"hosts {' '.join(','.join(map(str, host)) for host in self.hosts)}"
        return "\n".join([f"{head}, {hosts}", *(f"  {step}" for step in self.steps)])

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ where programs do."""
        said = repr((str(self), self.names, self.sizes, self.buffers))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    @property
    def world(self) -> int:
        return sum(map(len, self.hosts))

    def buffer(self, name: str) -> Buffer:
        return self._by_name[name]

    def members(self, rank: int) -> dict[str, Members]:
        """The groups that a rank is in, by name."""
        return self._members[rank]

    def takes_part(self, rank: int, step: Step) -> bool:
        return all(self._members[rank][group].rank == 0 for group in step.only)

    def table(self, rank: int, buffer: Buffer) -> Table:
        """The parts that a rank's buffer has a frame for, one owner each; for plain values, one owner has it all."""
        key = self._place(rank, buffer.within), buffer.within, buffer.over
        if key not in self._tables:
            sizes = [self._size(group) for group in buffer.within]
            over = [self._size(group) for group in buffer.over]
            self._tables[key] = Table.of(self.names, self.sizes, sizes).within(key[0], over)
        return self._tables[key]

    def terms(self, buffer: Buffer) -> int:
        """How many frames there are of each part: as many are to be added."""
        count = 1
        for group in buffer.terms:
            count *= self._size(group)
        return count

    def place_among_terms(self, rank: int, buffer: Buffer) -> int:
        """Which of the frames to be added is the rank's own."""
        place, count = 0, 1
        for group in buffer.terms:
            place += self._members[rank][group].rank * count
            count *= self._size(group)
        return place

    def leaf(self, rank: int, buffer: Buffer, step: Encode | Decode | Recode) -> int:
        """The owner whose frame is meant by a step of a ring."""
        members = self._members[rank][buffer.over[-1]]
        return (members.rank + (step.leaf or 0)) % members.size

    def size(self, rank: int, buffer: Buffer, bound: Bound) -> int:
        """Bytes that a rank's buffer needs: values, or as many as its frames can have at the most."""
        table = self.table(rank, buffer)
        if not buffer.coded:
            itemsize = 4 if buffer.wide and self.dtype.itemsize < 4 else self.dtype.itemsize
            return sum(map(table.numel, range(table.owners))) * itemsize
        sizes = [bound(table, owner, buffer.wide) for owner in range(table.owners)]
        return max(sizes) if buffer.leaf else self.terms(buffer) * sum(sizes)

    def _place(self, rank: int, groups: Groups) -> int:
        place = 0
        for group in groups:
            place = place * self._size(group) + self._members[rank][group].rank
        return place

    def _size(self, group: str) -> int:
        return self._members[0][group].size

    @cached_property
    def _members(self) -> list[dict[str, Members]]:
        return [Topology(rank, self.hosts).groups() for rank in range(self.world)]

    @cached_property
    def _by_name(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def _tables(self) -> dict[tuple[int, Groups, Groups], Table]:
        return {}


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
