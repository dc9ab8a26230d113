"""The messages that the gradients of a bucket form.

DDP hands out the same buckets in every step, so that most of a message is the same as in the step before: it is put
together once, and each step fills in what has changed.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ..codecs import Codec, Context
from ..codecs.lowrank import Fused, PowerSGD
from ..engines.noise_layout import Shapes
from ..routes import FACTORS
from ..sensitivity.shape import SecondMoments
from .averaged_frames import AveragedFrames
from .flattening import flatten
from .message_codecs import stream_codec
from .on_host.runner import HostMessage
from .on_stream.factors import FactorMessage
from .on_stream.runner import StreamMessage
from .topology import Topology
from .way import PLAIN, Way, shares_book

Named = list[tuple[str, torch.Tensor]]
Future = torch.futures.Future[torch.Tensor]


class Whole(HostMessage):
    """Gradients of a bucket that are coded as one message."""

    def __init__(self, way: Way, named: Named) -> None:
        assert way.whole is not None
        super().__init__(way.whole, way.route, [name for name, _ in named], [gradient for _, gradient in named])
        self.kind = way.kind
        self.shares_book = shares_book(way.codec)
        self._shapes: tuple[object, Shapes | None] = None, None

    def shapes(self, source: SecondMoments, version: object) -> Shapes | None:
        """Those of its gradients; looked up anew when the version is another."""
        if self._shapes[0] is not version:
            found = source.of(self.names)
            self._shapes = version, Shapes(found) if any(shape is not None for shape in found) else None
        return self._shapes[1]


class Bucket(Named):
    """The gradients of a bucket, by name; not to be changed."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = (), comes_again: bool = False) -> None:
        """`comes_again`: this object, for as long as DDP leaves its bucket where it is."""
        super().__init__(named)
        self.comes_again = comes_again
        self._ways: Mapping[str, Way] | None = None
        self._parted: tuple[Named, Named, list[Whole]] = [], [], []
        self._wholes: dict[tuple[str, tuple[str, ...]], Whole] = {}  # by kind and names
        self._streamed: tuple[Mapping[str, Way] | None, list[StreamMessage], bool] = None, [], False
        self._done: Future | None = None
        self._soon: tuple[Mapping[str, Way] | None, list[Draft]] = None, []

    def parted(self, ways: Mapping[str, Way]) -> tuple[Named, Named, list[Whole]]:
        """What waits for the last bucket, what does not, and what is coded as whole messages."""
        if self._ways is not ways:
            late = [(name, g) for name, g in self if ways[name].late]
            rest = [(name, g) for name, g in self if not ways[name].late]
            soon = [(name, g) for name, g in rest if ways[name].whole is None]
            together = _together([(name, g) for name, g in rest if ways[name].whole is not None], ways)
            self._parted = late, soon, self._whole_messages(together, ways)
            self._ways = ways
        return self._parted

    def drafts(self, ways: Mapping[str, Way], rank: int, world: int) -> list[Draft]:
        """What does not wait for the last bucket and is not coded as whole messages."""
        if self._soon[0] is not ways:
            self._soon = ways, _drafted(self.parted(ways)[1], ways, rank, world)
        return self._soon[1]

    def _whole_messages(self, together: list[Named], ways: Mapping[str, Way]) -> list[Whole]:
        """Those of the step before where nothing but floors has changed."""
        found: dict[tuple[str, tuple[str, ...]], Whole] = {}
        for named in together:
            way = ways[named[0][0]]
            key = way.kind, tuple(name for name, _ in named)
            found[key] = self._wholes.get(key) or Whole(way, named)
        self._wholes = found
        return list(found.values())

    def streamed(self, ways: Mapping[str, Way], factors: bool = False) -> tuple[list[StreamMessage], bool]:
        """The messages of the stream runner for gradients that have values, and whether some wait for the last bucket.

        They do so where the model has `factors`.
        """
        if self._streamed[0] is not ways:
            late = {name for name, _ in self if factors and ways[name].late}
            together = _together([(name, g) for name, g in self if g.numel() and name not in late], ways)
            self._streamed = ways, [_stream_message(ways[named[0][0]], named) for named in together], bool(late)
        return self._streamed[1:]

    def done(self, buffer: torch.Tensor) -> Future:
        """A future that is the bucket's buffer already; the same in every step."""
        if self._done is None or not self.comes_again:
            self._done = done_future(buffer)
        return self._done


def _together(named: Named, ways: Mapping[str, Way]) -> list[Named]:
    """Gradients of equal codec, route and type, in the order of first appearance."""
    found: dict[tuple[str, torch.dtype], Named] = {}
    for name, gradient in named:
        found.setdefault((ways[name].kind, gradient.dtype), []).append((name, gradient))
    return list(found.values())


def _stream_message(way: Way, named: Named) -> StreamMessage:
    codec = stream_codec(way.codec, way.route)
    assert codec is not None
    tensors = [tensor for _, tensor in named]
    return StreamMessage(way.kind, codec, [name for name, _ in named], [flatten(g, g) for g in tensors], tensors)


def new_future(device: torch.device) -> Future:
    return torch.futures.Future(devices=[device]) if device.type == "cuda" else torch.futures.Future()


def done_future(buffer: torch.Tensor) -> Future:
    future = new_future(buffer.device)
    future.set_result(buffer)
    return future


class Prepared:
    """What is found out once about gradients that travel together by a codec, and stay where they are."""

    def __init__(self, codec: Codec, tensors: list[torch.Tensor], contexts: list[Context]) -> None:
        names = self.names = tuple(ctx.name for ctx in contexts)
        shapes = tuple(t.shape for t in tensors)
        self.codec = str(codec)
        self.in_place = codec.in_place(tensors, contexts) if codec.rounds > 1 else None
        self.averaged = AveragedFrames(codec, names, tensors) if codec.rounds == 1 else None
        self.words = f"layout {_digest(names, shapes, tensors[0].dtype)}"
        if self.in_place is not None:
            self.words += " in place"  # another order of sums: all ranks, or none


@lru_cache(maxsize=4096)  # the messages of a step are cut alike in the next
def _digest(names: tuple[str, ...], shapes: tuple[torch.Size, ...], dtype: torch.dtype) -> str:
    layout = [f"{name}{tuple(shape)}{dtype}" for name, shape in zip(names, shapes)]
    return hashlib.blake2b(repr(layout).encode(), digest_size=4).hexdigest()


@dataclass(eq=False)
class Draft:
    """A message of gradients, without what changes from step to step."""

    kind: str
    codec: Codec
    route: str
    tensors: list[torch.Tensor] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    dated: list[Context] = field(default_factory=list)  # those of them that have to know of the step
    stateful: list[Context] = field(default_factory=list)  # those of them whose codec keeps something there
    forms: dict[str, str | None] = field(default_factory=dict)  # by name
    prepared: Prepared | None = None
    whole: Whole | None = None  # they are coded as one message
    streamed: FactorMessage | None = None  # the same for the stream runner

    @property
    def described(self) -> str:
        """What all ranks must agree on."""
        assert self.prepared is not None
        names = self.prepared.names
        about = f"{names[0]!r} and {len(names) - 1} more, {self.prepared.words}"
        return f"{self.prepared.codec} by {self.route} for {about}"

    def on_stream(self, topology: Topology) -> FactorMessage:
        """What the stream runner makes of it; once."""
        if self.streamed is None:
            assert isinstance(self.codec, PowerSGD) and self.prepared is not None
            fused = self.prepared.in_place
            assert fused is None or isinstance(fused, Fused)
            self.streamed = FactorMessage(self.codec, self.contexts, self.tensors, self.forms, fused, topology)
        return self.streamed


class Late:
    """The drafts of a step; the same as before if its buckets and ways are."""

    def __init__(self) -> None:
        self._buckets: Sequence[Bucket] = []
        self._ways: Mapping[str, Way] | None = None
        self._drafts: list[Draft] = []

    def drafts(self, buckets: Sequence[Bucket], ways: Mapping[str, Way], rank: int, world: int) -> list[Draft]:
        same = ways is self._ways and len(buckets) == len(self._buckets)
        if same and all(map(operator.is_, buckets, self._buckets)):
            return self._drafts
        drafts = _drafted(sorted((item for b in buckets for item in b.parted(ways)[0]), key=_name), ways, rank, world)
        self._buckets, self._ways, self._drafts = [], None, []
        if all(bucket.comes_again for bucket in buckets):  # others would stay in memory with their drafts
            self._buckets, self._ways, self._drafts = buckets, ways, drafts
        return drafts


def _name(item: tuple[str, torch.Tensor]) -> str:
    return item[0]


def _drafted(named: Named, ways: Mapping[str, Way], rank: int, world: int) -> list[Draft]:
    """Gradients of equal codec, route and type together, in the order of first appearance.

    Uncompressed ones travel with factors of their type, as PowerSGD's paper has it: one message, not two.
    """
    drafts: dict[tuple[str, torch.dtype], Draft] = {}
    for name, gradient in named:
        way, key = ways[name], (ways[name].kind, gradient.dtype)
        if key not in drafts:
            drafts[key] = Draft(way.kind, way.codec, way.route)
        draft, context = drafts[key], Context(name, 0, 0, rank, world)
        draft.tensors.append(gradient)
        draft.contexts.append(context)
        draft.forms[name] = way.form
        if way.kind != PLAIN:
            draft.stateful.append(context)
    hosts = {dtype: draft for (_, dtype), draft in reversed(drafts.items()) if draft.route == FACTORS}
    for kind, dtype in list(drafts):
        if kind == PLAIN and dtype in hosts:
            guest, host = drafts.pop((kind, dtype)), hosts[dtype]
            for context in guest.contexts:
                context.whole = True
            host.tensors += guest.tensors
            host.contexts += guest.contexts
            host.forms |= guest.forms
    for draft in drafts.values():
        names = [context.name for context in draft.contexts]
        if (way := ways[names[0]]).whole is not None:
            draft.whole = Whole(way, list(zip(names, draft.tensors)))
            continue
        draft.prepared = Prepared(draft.codec, draft.tensors, draft.contexts)
        draft.dated = draft.contexts
        if draft.codec.codes_rows:  # what takes rows keeps no state, and Memory keeps residuals of rows as one
            draft.stateful = []
        if draft.prepared.in_place is not None:  # it asks for tensors alone, and Memory keeps what it leaves as one
            draft.dated, draft.stateful = draft.contexts[:1], []
    return list(drafts.values())
