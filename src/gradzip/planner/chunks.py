"""Units as the chunks that the host runner makes of messages: one after the other they go through a program.

The runner cuts the frame of every owner (Table.chunks in exchange/parts.py), or a frame of whole tensors into as many.
Owners' frames are nearly alike, so the tensors one behind the other are cut in their place, which takes no table of
parts for each of a thousand ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..codecs.baseline import Cast
from ..exchange.coding import RAW, MessageCodec
from ..exchange.message_codecs import codec_for_device, message_codec
from ..exchange.on_host.runner import CHUNK_ON_DEVICE, TWO_FROM
from ..routes import FACTORS, Route
from .choices import Choice


class Piece(NamedTuple):
    """The values from `start` to `stop` of one of a unit's tensors."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Cut(NamedTuple):
    """How messages are cut; the words are those of Table.chunks."""

    values: int = MessageCodec.chunk  # for each rank
    cuts: bool = True
    two_from: int | None = None


def cut_of(choice: Choice, on_gpu: bool) -> Cut | None:
    """How the runner cuts messages that go that way; None: not at all, as they are dealt out twice or go in rounds."""
    codec, name = None if choice.codec is None else choice.codec.codec, choice.option.route
    assert name is not None
    if name == FACTORS or (name == "allreduce" and not isinstance(codec, Cast | None)):
        return None
    route = Route.parse(name)
    if route.hierarchical:
        return None
    whole = RAW if codec is None else message_codec(codec)
    if on_gpu and codec is not None:
        whole = codec_for_device(codec, route) or whole
    assert whole is not None
    return Cut(CHUNK_ON_DEVICE, whole.cuttable, TWO_FROM) if on_gpu else Cut(whole.chunk, whole.cuttable)


def chunks(numels: Sequence[int], world: int, cut: Cut | None) -> list[list[Piece]]:
    """Tensors of these sizes in chunks, none of which is empty."""
    whole = [Piece(number, 0, numel) for number, numel in enumerate(numels)]
    total = sum(numels)
    ends = [total] if cut is None else _ends(total, world, cut)
    found: list[list[Piece]] = [[] for _ in ends]
    first = 0
    for piece in whole:
        if cut is not None and not cut.cuts:
            found[min(bisect_right(ends, first), len(ends) - 1)].append(piece)
        else:
            for chunk, (low, high) in enumerate(zip([0, *ends], ends)):
                start, stop = max(low - first, 0), min(high - first, piece.numel)
                if start < stop:
                    found[chunk].append(Piece(piece.tensor, start, stop))
        first += piece.numel
    return [chunk for chunk in found if chunk]


def _ends(total: int, world: int, cut: Cut) -> list[int]:
    """Where chunks end, in values of the whole message."""
    frame = total / world
    count = max(1, round(frame / cut.values))
    if cut.two_from is not None and count <= 2 and cut.cuts:
        return [total * 3 // 5, total] if frame >= cut.two_from else [total]
    return [total * (i + 1) // count for i in range(count)]
