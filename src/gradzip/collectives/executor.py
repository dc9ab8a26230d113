"""Runs any Route on a chunk of a message. The executor itself sends nothing: it says what is to be exchanged.

`run` is a generator. It yields an Exchange whenever data has to go to other ranks and is resumed with what came from
them, so that whoever drives it decides how bytes travel and what happens in the meantime.

What a rank holds at any moment is a layout, either as plain values (the sum over the ranks that have been added so far)
or as coded contributions that are still to be added. Sums are formed in float32 and in the order of ranks within each
group, so every rank that forms a sum forms the same one. A sum that is sent back is used by its own rank as it was
coded, like by all others: replicas stay bit-identical.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch

from ..codecs.base import wide
from ..exchange.topology import Members
from ..routes import Route, Step
from ..spans import span
from .blobs import HEAD_ROOM, Blob, on_device, pack, unpack, unpack_each
from .held import Coded, Held, Split, as_bytes, coded_of, describe, present, understand
from .layout import Layout, deal, joined, numel, subviews, views
from .terms import Coder, Exchange, How, Parts, Steps

_SOME_WAIT = ("red", "gat", "bc")  # steps at which some ranks have nothing to do, and may skip others with it
EXCHANGES_PER_STEP = 256  # at the most: those of a ring


class Executor:
    """A route on a chunk; `steps` is the generator."""

    def __init__(
        self,
        route: Route,
        layout: Layout,
        coder: Coder,
        groups: Mapping[str, Members],
        world: int,
        crossing: list[object] | None = None,
        carried: bool = False,
    ) -> None:
        """`crossing` gets what lives on across an exchange, where the next stage works on another stream: see Job.

        `carried`: the chunk is large enough for a carrier, where there is one.
        """
        self._carried = carried and not any(step.kind in _SOME_WAIT for step in route.steps)
        self._route, self._coder, self._groups, self._world = route, coder, groups, world
        self._crossing = crossing
        self._held = Held(layout)
        self._decoded_on: str | None = None  # right after the step that is under way

    def steps(self) -> Steps:
        held, steps = self._held, self._route.steps
        held.values = self._coder.load(held.layout)
        for number, (step, joins) in enumerate(zip(steps, self._route.joins)):
            rest = steps[number + 1 :]
            held.exchange = number * EXCHANGES_PER_STEP
            if step.kind == "enc":
                if not (rest and rest[0].kind == "ring"):  # a ring encodes as it goes
                    self._encode(self._dealt_sizes(rest), step.where, self._stays(rest))
                else:
                    yield from self._ring(rest[0], step.where)
            elif step.kind == "dec":
                self._decode(step.where, last=not rest)
            elif step.kind != "ring":
                self._decoded_on = rest[0].where if rest and rest[0].kind == "dec" else None
                yield from self._communicate(step, joins)
        assert held.values is not None and not held.splits
        self._settle()
        if not held.stored:
            self._coder.store(held.layout, held.plain)

    # -- coding -------------------------------------------------------------------------------------------------

    def _dealt_sizes(self, steps: Sequence[Step]) -> list[int]:
        """The sizes of the groups among which coded data will be dealt out before it is decoded: no blob is cut."""
        sizes = []
        for step in steps:
            if step.kind == "dec":
                break
            if step.kind == "a2a":
                sizes.append(self._groups[step.where].size)
        return sizes

    def _stays(self, steps: Sequence[Step]) -> int | None:
        """The number of the leaf that this rank will decode itself and nobody else; None: there may be no such one."""
        number = 0
        for step in steps:
            if step.kind == "dec":
                return number
            if step.kind != "a2a":
                return None
            number = number * self._groups[step.where].size + self._groups[step.where].rank
        return None

    def _how(self, device: str, summed: int) -> How:
        """The first rounding, and that of the whole sum, may go to a grid as coarse as the ranks in the sum allow.

        Sums on the way lie on the first one's grid: on that they are coded exactly (docs/design.md, near mode).
        """
        held = self._held
        if held.shift is None or summed == self._world:
            held.shift = summed.bit_length() - 1
        held.encodes += 1
        return How(device, held.encodes - 1, summed, held.shift, held.mean)

    def _encode(self, dealt: list[int], device: str, stays: int | None = None) -> None:
        held = self._held
        if held.values is None:
            held.encodes += 1
            return
        if not self._coder.exact_grid:
            self._settle()
        leaves = [held.layout]
        for size in dealt:
            leaves = [part for leaf in leaves for part in deal(leaf, size)]
        how = self._how(device, held.summed)
        with span("encode"):
            blobs = self._coder.encode(leaves, [held.plain_parts(leaf) for leaf in leaves], how, stays)
        held.values, held.coded = None, Coded(leaves, [blobs], how)

    def _decode(self, device: str, last: bool) -> None:
        held = self._held
        if held.coded is None:
            return
        coded = held.coded
        how = coded.how._replace(device=device)
        targets = self._coder.targets(held.layout) if last and len(coded.contributions) == 1 else None
        if targets is None:
            dtype = torch.promote_types(self._coder.dtype, torch.float32)
            total = self._coder.scratch(numel(held.layout), dtype)
        if targets is None:
            outs = [views(total, held.layout, leaf) for leaf in coded.leaves]
        else:
            outs = [subviews(targets, held.layout, leaf) for leaf in coded.leaves]
        with span("decode"):
            self._coder.decode(coded.leaves, coded.contributions, how, outs, add=False)
        held.coded, held.mean = None, how.mean
        if targets is None:
            held.values, held.own_memory = total, True
        else:
            held.stored, held.values = True, torch.empty(0)
            if not held.mean:
                for target in targets:
                    target.div_(self._world)
                held.mean = True

    def _settle(self) -> None:
        """Divides the sum over all ranks, once it is there; 16-bit gradients travel on in 16 bits."""
        held = self._held
        if held.values is None or held.mean or held.summed != self._world:
            return
        if held.own_memory and held.plain.dtype == self._coder.dtype:
            held.plain.div_(self._world)
        else:
            held.values = (wide(held.plain) / self._world).to(self._coder.dtype)
        held.mean = True

    # -- communication ------------------------------------------------------------------------------------------

    def _communicate(self, step: Step, joins: bool) -> Steps:
        held, group = self._held, self._groups[step.where]
        mine = bool(held.splits) and held.splits[-1].group == step.where  # the split that this step closes
        if held.waits and not (joins and mine):
            pass  # the members of this group all wait for a broadcast in another one
        elif joins:
            yield from self._join(held.splits.pop(), step.where, group)
        elif step.kind == "ar":
            yield from self._deal(step.where, group)
            if held.summed * group.size == self._world and not self._coder.exact_grid:  # it may be coded yet
                held.summed = self._world
                self._settle()
                held.summed //= group.size
            yield from self._join(held.splits.pop(), step.where, group)
        elif step.kind == "ag":
            yield from self._share(step.where, group)
        elif step.kind in ("rs", "a2a"):
            yield from self._deal(step.where, group)
        else:
            yield from self._collect(step.where, group)
        if not joins:
            held.summed *= group.size

    def _note_plain(self, leaves: Sequence[Layout], group: Members) -> None:
        """Own values that were never coded go out: what coding loses later is lost of sums."""
        if group.size > 1 and self._held.summed == 1 and self._held.shift is None:
            for leaf in leaves:
                self._coder.goes_plainly(leaf)

    def _contributions(
        self, where: str, send: Sequence[torch.Tensor | None], most: Sequence[int | None], coded: Coded
    ) -> Generator[Exchange, Parts, list[list[list[Blob]]]]:
        """An exchange of coded data: what each member sent, unpacked; nothing for this rank itself."""
        group, landed = self._groups[where], dict[int, list[list[Blob]]]()
        wanted = self._exchange(where, send, most)
        there = self._decoded_on
        if there is not None and self._coder.lands(coded.how._replace(device=there)) and not wanted.carried:

            def land(rank: int, part: torch.Tensor) -> None:
                landed[rank] = on_device(unpack(part, rank), self._coder.home)

            wanted.landing = land
        received = yield wanted
        rest = [None if i == group.rank or rank in landed else received[i] for i, rank in enumerate(group.ranks)]
        return [landed.get(rank, found) for rank, found in zip(group.ranks, unpack_each(rest, group.ranks))]

    def _exchange(self, where: str, send: Sequence[torch.Tensor | None], most: Sequence[int | None] | None) -> Exchange:
        self._held.exchange += 1
        if self._crossing is not None:
            self._crossing.append((self._held.values, self._held.coded, send))
        coded = self._held.coded
        there = coded is None or coded.how.device != "cpu" or self._coder.home.type == "cpu"
        return Exchange(where, send, most, self._held.exchange - 1, self._carried and there)

    def _most(self, coded: Coded, leaves: Sequence[Layout]) -> int:
        """How long a message can be with these leaves of all contributions."""
        blobs = len(coded.contributions) * len(leaves)
        return 8 * (4 + blobs) + len(coded.contributions) * sum(map(self._coder.bound, leaves))

    def _deal(self, where: str, group: Members) -> Steps:
        """rs and a2a: each member gets its part of everybody's data."""
        held = self._held
        stretches = deal(held.layout, group.size)
        held.splits.append(Split(where, held.layout, gathered=False))
        if held.values is not None:
            self._note_plain([held.layout], group)
            plain = [as_bytes(joined(held.plain_parts(part))) for part in stretches]
            kind = held.kind
            size = numel(stretches[group.rank]) * kind.itemsize
            received = yield self._exchange(where, plain, [size] * group.size)
            held.values = self._sum(received, kind)
        else:
            coded = coded_of(held)
            width = len(coded.leaves) // group.size
            deals = [[c[i * width : (i + 1) * width] for c in coded.contributions] for i in range(group.size)]
            leaves = coded.leaves[group.rank * width : (group.rank + 1) * width]
            most = [self._most(coded, leaves)] * group.size
            send = [None if i == group.rank else pack(lists) for i, lists in enumerate(deals)]
            members = yield from self._contributions(where, send, most, coded)
            members[group.rank] = deals[group.rank]
            held.coded = Coded(leaves, _all_of(members), coded.how)
        held.layout = stretches[group.rank]

    def _collect(self, where: str, group: Members) -> Steps:
        """red and gat: the first member gets everybody's data, the others wait."""
        held = self._held
        held.splits.append(Split(where, held.layout, gathered=True))
        nothing: list[None] = [None] * (group.size - 1)
        if held.values is not None:
            self._note_plain([held.layout], group)
            kind = held.kind
            size = held.plain.numel() * kind.itemsize if group.rank == 0 else None
            received = yield self._exchange(where, [as_bytes(held.plain), *nothing], [size] * group.size)
            held.values = self._sum(received, kind) if group.rank == 0 else None
            return
        coded = coded_of(held)
        first = group.rank == 0
        most = self._most(coded, coded.leaves) if first else None
        sent = None if first else pack(coded.contributions)
        members = yield from self._contributions(where, [sent, *nothing], [most] * group.size, coded)
        members[0] = coded.contributions
        held.coded = Coded(coded.leaves, _all_of(members), coded.how) if first else None

    def _share(self, where: str, group: Members) -> Steps:
        """ag of coded data that nobody dealt out: everybody gets everybody's contributions."""
        coded = coded_of(self._held)
        most = self._most(coded, coded.leaves)
        members = yield from self._contributions(where, _to_others(coded, group), [most] * group.size, coded)
        members[group.rank] = coded.contributions
        self._held.coded = Coded(coded.leaves, _all_of(members), coded.how)

    def _join(self, split: Split, where: str, group: Members) -> Steps:
        """ag and bc as second steps: everybody gets the whole stretch again."""
        held = self._held
        if split.gathered:
            yield from self._broadcast(where, group)
        elif held.values is not None:
            if not self._coder.exact_grid:
                self._settle()
            kind = held.kind
            sizes = [numel(part) * kind.itemsize for part in deal(split.layout, group.size)]
            received = yield self._exchange(where, [as_bytes(held.plain)] * group.size, sizes)
            held.values = torch.empty(numel(split.layout), dtype=kind, device=self._coder.home)
            for part, leaf in zip(received, deal(split.layout, group.size)):
                values = present(part).view(kind)
                for view, piece in zip(views(held.values, split.layout, leaf), views(values, leaf, leaf)):
                    view.copy_(piece)
        else:
            coded = coded_of(held)
            width = len(coded.leaves)
            leaves = [deal(part, width) for part in deal(split.layout, group.size)]
            most = [self._most(coded, of_member) for of_member in leaves]
            members = yield from self._contributions(where, _to_others(coded, group), most, coded)
            members[group.rank] = coded.contributions
            whole = [[blob for member in members for blob in member[k]] for k in range(len(coded.contributions))]
            held.coded = Coded([leaf for of_member in leaves for leaf in of_member], whole, coded.how)
        held.layout = split.layout

    def _broadcast(self, where: str, group: Members) -> Steps:
        """From the first member to those that waited, who do not know yet what they get."""
        held = self._held
        if group.rank == 0:
            if held.values is not None and not self._coder.exact_grid:
                self._settle()
            yield self._exchange(where, [None, *[describe(held)] * (group.size - 1)], None)
            return
        received = yield self._exchange(where, [None] * group.size, None)
        understand(held, present(received[0]), group.ranks[0], self._coder)

    def _ring(self, step: Step, device: str) -> Steps:
        """Partial sums go round: each member adds its own values to what the one before sent, and codes them again."""
        held, group = self._held, self._groups[step.where]
        if held.values is None:  # all members wait for a broadcast in another group
            held.summed *= group.size
            return
        held.splits.append(Split(step.where, held.layout, gathered=False))
        leaves = deal(held.layout, group.size)
        mine, before = group.rank, (group.rank - 1) % group.size
        after = (group.rank + 1) % group.size
        total: torch.Tensor | list[torch.Tensor] = held.plain_parts(leaves[mine])
        if group.size > 1:
            start = leaves[before]
            self._note_plain([leaf for leaf in leaves if leaf is not start], group)
            (blob,) = self._coder.encode([start], [held.plain_parts(start)], self._how(device, held.summed))
            for hop in range(group.size - 1):
                send: list[torch.Tensor | None] = [None] * group.size
                send[after] = pack([[blob]])
                leaf = leaves[(before - 1 - hop) % group.size]
                most: list[int | None] = [None] * group.size
                most[before] = HEAD_ROOM + self._coder.bound(leaf)
                received = yield self._exchange(step.where, send, most)
                ((arrived,),) = unpack(received[before], group.ranks[before])
                values = held.plain_parts(leaf)
                how = How(device, held.encodes, held.summed * (2 + hop), held.shift or 0)
                if hop < group.size - 2:
                    blob = self._coder.hop(leaf, arrived, values, how)
                else:
                    total = wide(joined(values)).clone()
                    self._coder.decode([leaf], [[arrived]], how, [views(total, leaf, leaf)], add=True)
            held.encodes += 1
        held.layout, held.values = leaves[mine], total
        held.summed *= group.size
        self._encode([], device)

    def _sum(self, received: Sequence[torch.Tensor | None], kind: torch.dtype) -> torch.Tensor:
        home = self._coder.home
        total = wide(present(received[0]).view(kind).to(home))
        total = total.clone() if total.dtype == kind else total
        for part in received[1:]:
            total += present(part).view(kind).to(home)
        return total


def _all_of(members: Sequence[list[list[Blob]]]) -> list[list[Blob]]:
    return [contribution for member in members for contribution in member]


def _to_others(coded: Coded, group: Members) -> list[torch.Tensor | None]:
    """The same message for every other member."""
    message = pack(coded.contributions) if group.size > 1 else None
    return [None if i == group.rank else message for i in range(group.size)]
