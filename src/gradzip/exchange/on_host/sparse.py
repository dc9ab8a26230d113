"""Sparse codecs for whole messages on CPUs: the small tensors of a message are coded together (codecs/sparse_batch.py).

The same bytes, sums and residuals that generic.py makes part by part, which codes long parts, and explains what is
wrong with a frame. Frames of sums are unions, whose sizes differ from part to part.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...codecs import Context
from ...codecs.base import Kept, wide
from ...codecs.sparse import SparseFrame, TopK, fewest, scatter, union
from ...codecs.sparse_batch import Batch, Picked, bytes_of, read, write
from ..coding import Frames, Message, Values
from ..parts import Column, Part, Table
from ..program import Hop
from . import streams
from .equal_parts import ENTRY, LONGEST
from .generic import FrameWriter, GenericCoder, GenericOnHost, Places, stage_of
from .residuals import Split


class SparseOnHost(GenericOnHost):
    codec: SparseFrame

    def coder(self, message: Message) -> GenericCoder:
        return GenericCoder(message, self.codec) if streams.current().on_device else SparseCoder(message, self.codec)


@dataclass(frozen=True)
class _Run:
    """Parts that follow each other in an owner's frame, and are coded together or one by one."""

    first: int  # its number among the owner's parts
    count: int
    row: int | None  # of the first one among the small parts; None: they are coded one by one


class SmallParts:
    """Those parts of an owner that are coded together."""

    def __init__(self, parts: Sequence[Part], offsets: Column, longest: int) -> None:
        """`offsets`: where each tensor of the message begins, if they lie one behind the other."""
        found = [number for number, part in enumerate(parts) if part.numel <= longest]
        self.numbers = np.array(found if len(found) > 1 else [], np.int64)
        self.all = parts
        self.parts = [parts[number] for number in self.numbers]
        self.batch = Batch(np.array([part.numel for part in self.parts], np.int64))
        self.fewest = self.batch.by_size(fewest)
        self.names: list[str] = []
        starts = np.array([offsets[part.tensor] + part.start for part in self.parts], np.int64)
        adjoin = starts.size and (starts[1:] == starts[:-1] + self.batch.sizes[:-1]).all()
        self.at = int(starts[0]) if adjoin else None  # where all of them lie in the message, if nothing lies between

    @property
    def values(self) -> int:
        return int(self.batch.sizes.sum())

    @cached_property
    def runs(self) -> list[_Run]:
        """All parts of the owner, in their order."""
        small, runs, first, row = set(self.numbers.tolist()), list[_Run](), 0, 0
        for together, run in itertools.groupby(number in small for number in range(len(self.all))):
            count = len(list(run))
            runs.append(_Run(first, count, row if together else None))
            first, row = first + count, row + count * together
        return runs

    def of(self, of_parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of an owner's tensors that belong to them."""
        return [of_parts[number] for number in self.numbers]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(flat.split_with_sizes(self.batch.sizes.tolist()))


class SparseCoder(GenericCoder):
    codec: SparseFrame

    def _small(self, table: Table, owner: int, hop: Hop) -> SmallParts:
        longest = LONGEST if self._states_are_alike(table, owner, hop) else 0
        return self._parts_up_to(table, owner, longest)

    def _parts_up_to(self, table: Table, owner: int, longest: int) -> SmallParts:
        key, kept = ("small", table.digest, owner, longest), self._own.kept
        if key not in kept:
            sizes = np.array([tensor.numel() for tensor in self._own.tensors], np.int64)
            kept[key] = SmallParts(table.of_owner(owner), np.cumsum(sizes) - sizes, longest)
            kept[key].names = [self._name(part) for part in kept[key].parts]
        small: SmallParts = kept[key]
        return small

    # -- encoding -----------------------------------------------------------------------------------------------

    def _encode(self, table: Table, owner: int, values: Values, hop: Hop, room: torch.Tensor) -> int:
        small, xs = self._small(table, owner, hop), values.parts(table, owner)
        if not len(small.numbers):
            return super()._encode(table, owner, values, hop, room)
        picked = self._picked(small, self._flat(small, values, table, owner), hop)
        codec_id = self.codec.wire_id if hop.own else TopK.wire_id
        writer = FrameWriter(room, len(small.all))
        if len(small.runs) == 1:
            writer.wrote(write(writer.room, codec_id, small.batch, picked))
            return writer.end()
        together, sizes = _frames(codec_id, small.batch, picked)
        padded = _padded(sizes)
        ends = np.cumsum(padded)
        for run in small.runs:
            if run.row is None:
                for number in range(run.first, run.first + run.count):
                    writer.add(self._encode_part(small.all[number], xs[number], hop, writer.room)[0].numel())
                continue
            last = run.row + run.count
            frames = together[int(ends[run.row] - padded[run.row]) : int(ends[last - 1])]
            writer.room[: frames.numel()] = frames
            writer.wrote(sizes[run.row : last])
        return writer.end()

    def _flat(self, small: SmallParts, values: Values, table: Table, owner: int) -> torch.Tensor:
        """The values of small parts one behind the other; without a copy where they lie so."""
        joined = self._joined(small, values)
        return torch.cat(small.of(values.parts(table, owner))) if joined is None else joined

    def _joined(self, small: SmallParts, values: Values) -> torch.Tensor | None:
        """A view of the values of small parts, where nothing lies between them."""
        joined, at = values.joined, small.at
        return None if joined is None or at is None else joined[at : at + small.values]

    def _picked(self, small: SmallParts, x: torch.Tensor, hop: Hop) -> Picked:
        """What is sent of small parts; what that loses is noted."""
        memory, message = self.message.memory, self.message
        if not hop.own:
            return self._union(small, x, hop)
        context = Context("", message.step, message.seed, message.rank, message.world, message.scale)
        context.state = self._states_of(small)
        picked = self.codec.pick(x, small.batch, context)
        if memory is not None and self._feeds_back:
            self._add_lost(small, self._lost_of(wide(x).clone(), picked))
        self._keep_states(small, context.state)
        return picked

    def _union(self, small: SmallParts, x: torch.Tensor, hop: Hop) -> Picked:
        memory = self.message.memory
        if memory is None or not self._feeds_back:
            return union(x, small.batch)
        of_tensors = [self.message.names[part.tensor] for part in small.parts]
        stages = [stage_of(hop, part) for part in small.parts]
        totals = [
            memory.compensated(name, each, self._unit(hop), stage)
            for name, each, stage in zip(of_tensors, small.split(x), stages)
        ]
        total = torch.cat([wide(each) for each in totals])
        picked = union(total.to(x.dtype), small.batch)
        for name, lost, stage in zip(of_tensors, small.split(self._lost_of(total, picked)), stages):
            memory.lost(name, lost, self._unit(hop), stage)
        return picked

    def _lost_of(self, total: torch.Tensor, picked: Picked) -> torch.Tensor:
        """total without what is sent, in place."""
        total[picked.index] -= wide(picked.values)
        return total

    def _add_lost(self, small: SmallParts, lost: torch.Tensor) -> None:
        if small.at is not None and isinstance(self._lost, Split):
            self._lost.flat[small.at : small.at + small.values] += lost
            return
        of_parts = [self._lost[part.tensor][part.start : part.stop] for part in small.parts]
        torch._foreach_add_(of_parts, small.split(lost))

    # -- codec state --------------------------------------------------------------------------------------------

    def _states_of(self, small: SmallParts) -> dict[str, Any]:
        """What the codec keeps of small parts, each field one behind the other."""
        memory = self.message.memory
        if memory is None or not self.codec.state_fields:
            return {}
        if isinstance(kept := memory.kept_by(small, small.names), StatesTogether):
            return dict(kept.fields)
        states = [memory.state(name, self.codec.name) for name in small.names]
        return {field: torch.cat([state[field].view(-1) for state in states]) for field in states[0]}

    def _states_are_alike(self, table: Table, owner: int, hop: Hop) -> bool:
        """Whether all small parts of an owner have a state in the type of sums, or none has."""
        memory, fields = self.message.memory, self.codec.state_fields
        if memory is None or not fields or not hop.own:
            return True
        small = self._parts_up_to(table, owner, LONGEST)
        if not small.names or isinstance(memory.kept_by(small, small.names), StatesTogether):
            return True
        kind, found = torch.promote_types(self.message.dtype, torch.float32), set[tuple[object, ...]]()
        for name in small.names:
            state = memory.state(name, self.codec.name)
            found.add(tuple((state[field].dtype, state[field].device) if field in state else None for field in fields))
        return found in ({(None,) * len(fields)}, {((kind, torch.device("cpu")),) * len(fields)})

    def _keep_states(self, small: SmallParts, state: dict[str, Any]) -> None:
        if self.message.memory is not None and state:
            self.message.memory.keep_all(small, small.names, self.codec.name, StatesTogether(small.batch, state))

    # -- decoding -----------------------------------------------------------------------------------------------

    def decode(
        self, table: Table, owner: int, frames: Frames, own: Values | None, hop: Hop, out: Values, by: int
    ) -> None:
        small = self._small(table, owner, hop)
        if not len(small.numbers):
            super().decode(table, owner, frames, own, hop, out, by)
            return
        terms = [None if frame is None else Places(frame, len(small.all)) for frame in frames]
        kind = torch.promote_types(out.tensors[0].dtype, torch.float32)
        found = [None if term is None else self._read(small, term, hop, kind) for term in terms]
        if any(term is not None and picked is None for term, picked in zip(terms, found)):
            super().decode(table, owner, frames, own, hop, out, by)  # which says what is wrong
            return
        mine, targets = None if own is None else own.parts(table, owner), out.parts(table, owner)
        large = sorted(set(range(len(small.all))).difference(small.numbers.tolist()))
        self._decode_each(large, small.all, terms, mine, hop, targets, by)
        target = self._joined(small, out)
        in_place = target is not None and target.dtype == kind
        total = target if target is not None and in_place else torch.empty(small.values, dtype=kind)
        for place, picked in enumerate(found):
            if picked is not None:
                self._add(picked, total, place > 0)
                continue
            assert own is not None
            term = self._as_decoded_together(small, own, table, owner, hop)
            total.add_(term) if place else total.copy_(term)
        if by > 1:
            total.div_(by)
        if not in_place:
            torch._foreach_copy_(small.of(targets), small.split(total))

    def _read(self, small: SmallParts, term: Places, hop: Hop, kind: torch.dtype) -> Picked | None:
        dtype = kind if hop.wide else self.message.dtype
        known = self.codec.wire_id, TopK.wire_id
        starts, sizes = term.starts[small.numbers], term.sizes[small.numbers]
        return read(term.data, starts, sizes, known, small.batch, small.fewest, dtype)

    def _add(self, picked: Picked, total: torch.Tensor, add: bool) -> None:
        if picked.values.dtype == total.dtype:
            scatter(picked.index, picked.values, total, add)
            return
        decoded = _dense(picked, total.numel())  # zeros are added as well, which makes a difference to -0
        total.add_(decoded) if add else total.copy_(decoded)

    def _as_decoded_together(self, small: SmallParts, own: Values, table: Table, owner: int, hop: Hop) -> torch.Tensor:
        """What others would decode of this rank's own values."""
        x = self._flat(small, own, table, owner)
        return x if hop.ring else _dense(self._picked(small, x, hop), x.numel())


def _dense(picked: Picked, numel: int) -> torch.Tensor:
    out = torch.empty(numel, dtype=picked.values.dtype)
    scatter(picked.index, picked.values, out, add=False)
    return out


def _frames(codec_id: int, batch: Batch, picked: Picked) -> tuple[torch.Tensor, Column]:
    """Frames one behind the other, and their bytes without what fills them up."""
    frames = torch.empty(int(_padded(bytes_of(batch, picked)).sum()), dtype=torch.uint8)
    return frames, write(frames, codec_id, batch, picked)


def _padded(sizes: Column) -> Column:
    found: Column = sizes + -sizes % ENTRY
    return found


class StatesTogether(Kept):
    """What a codec keeps of small parts from step to step."""

    def __init__(self, batch: Batch, fields: Mapping[str, torch.Tensor]) -> None:
        self._batch, self.fields = batch, fields

    @property
    def residuals(self) -> list[torch.Tensor | None]:
        return [None] * len(self._batch.sizes)

    @property
    def states(self) -> list[dict[str, Any]]:
        sizes = self._batch.sizes.tolist()
        split = {field: value.split_with_sizes(sizes) for field, value in self.fields.items()}
        return [{field: of_parts[number] for field, of_parts in split.items()} for number in range(len(sizes))]
