"""Programs: an exchange as a list of steps, compiled once from a route and a message's layout.

A program says what every rank does with a message until all ranks have its mean. It is data: the interpreter and the
host runner run it step by step, the stream runner takes layout and digest from it, and ranks compare its digest.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ..routes import Route
from .parts import Table
from .topology import Members, Topology

VALUES = "values"  # the buffer with a rank's gradients, where their mean ends up
REDUCE_SCATTER = "reduce_scatter"  # each rank gets the mean of the tensors that it owns, and nothing of the others
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
    raw: bool = False  # frames are values as they are, whatever the codec: see compiler.py


class Hop(NamedTuple):
    """What the frames of an encode hold."""

    number: int  # of this encode in the route
    summed: int  # ranks in the sum
    own: bool  # a rank's own gradients, as DDP gave them
    wide: bool  # sums in float32; else values of the gradients' own type
    first: int = 1  # ranks in the sum of the program's first encode: later sums lie on its grid
    ring: bool = False  # frames of partial sums, to which ranks add their own values as they are


Bound = Callable[[Table, int, bool], int]  # bytes of a frame for an owner; the flag is Buffer.wide


@dataclass(frozen=True)
class Program:
    """A compiled exchange of one message. The same on all ranks."""

    codec: str
    route: Route | str  # what it was compiled from: a route, or REDUCE_SCATTER
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    hosts: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    # Where the message is not dealt out by `Table.of`: a part of it (see `chunked`), or tensors with given owners.
    chunk: Table | None = None

    def __str__(self) -> str:
        count, values = len(self.names), sum(self.sizes)
        head = f"{self.codec} by {self.route}: {count} tensors, {values} x {str(self.dtype).removeprefix('torch.')}"
        hosts = f"hosts {' '.join(','.join(map(str, host)) for host in self.hosts)}"
        return "\n".join([f"{head}, {hosts}", *(f"  {step}" for step in self.steps)])

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ where programs do."""
        said = repr((str(self), self.names, self.sizes, self.buffers, self.chunk and self.chunk.digest))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    @property
    def hops(self) -> int:
        """How often a value is encoded on its way."""
        return sum(isinstance(step, Encode | Recode) for step in self.steps)

    @property
    def divisor(self) -> int:
        """What a sum is divided by, in the end."""
        return self.world if any(getattr(step, "divide", False) for step in self.steps) else 1

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
            self._tables[key] = self._table(*key)
        return self._tables[key]

    def _table(self, place: int, within: Groups, over: Groups) -> Table:
        if self.chunk is None:
            table = Table.of(self.names, self.sizes, [self._size(group) for group in within])
            return table.within(place, [self._size(group) for group in over])
        if within:
            return self.chunk.within(place, [])
        return self.chunk if over else self.chunk.joined()

    def hop(self, buffer: str) -> Hop:
        """The encode that made the frames in a buffer."""
        return self._hops[buffer]

    def chunked(self, values: int, cuts: bool = True, two_from: int | None = None) -> list[Program]:
        """Programs for parts of the message, with about so many values for each rank, that together are this one.

        A message that is dealt out twice stays whole; without `cuts` no part is cut; `two_from`: see Table.chunks.
        """
        groups = {step.group for step in self.steps if isinstance(step, Communicate)}
        if groups != {"flat"}:
            return [self]
        table = self.dealt
        ranks = self.world // table.owners  # that an owner's frame is for
        two_from = None if two_from is None else two_from * ranks
        return [replace(self, chunk=chunk) for chunk in table.chunks(values * ranks, cuts, two_from)]

    @cached_property
    def dealt(self) -> Table:
        """The message, dealt out to all ranks at once; whole tensors with one owner where no rank owns a part."""
        if self.chunk is not None:
            return self.chunk
        joins = any(isinstance(step, AllReduce) or (isinstance(step, AllGather) and step.joins) for step in self.steps)
        return Table.of(self.names, self.sizes, [self.world] if joins else [])

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

    def stays(self, rank: int, buffer: Buffer) -> int | None:
        """The owner of the frame that a rank neither sends nor decodes, as its own values stand for it; None: none."""
        groups = self._stays.get(buffer.name)
        return None if groups is None else self._place(rank, groups)

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
    def _stays(self) -> dict[str, Groups]:
        """Buffers of frames of which a rank's own stays where it is, with the groups that exchange the others."""
        scattered: dict[str, tuple[str, Groups]] = {}  # by buffer: that of the encode, and the groups since then
        stays: dict[str, Groups] = {}
        for step in self.steps:
            if isinstance(step, AllToAll):
                encoded, groups = scattered.get(step.source, (step.source, ()))
                scattered[step.target] = encoded, (*groups, step.group)
            elif isinstance(step, Decode | Recode) and step.own is not None and step.source in scattered:
                encoded, groups = scattered[step.source]
                stays[encoded] = groups
        return stays

    @cached_property
    def _hops(self) -> dict[str, Hop]:
        found: dict[str, Hop] = {}
        first: int | None = None
        for step in self.steps:
            if isinstance(step, Encode | Recode):
                target, own = self.buffer(step.target), isinstance(step, Encode) and step.own
                first = step.summed if first is None and not target.raw else first
                found[step.target] = Hop(step.number, step.summed, own, target.wide, first or 1, target.leaf)
            elif isinstance(step, Communicate) and self.buffer(step.source).coded:
                found[step.target] = found[step.source]
        return found

    @cached_property
    def _tables(self) -> dict[tuple[int, Groups, Groups], Table]:
        return {}
