"""GComp frames of all pieces of a leaf in one call of the native engine, during which other threads run.

The same bytes and the same sums that codec.encode and codec.decode give piece by piece. What only this rank would
decode is rounded instead, to what decoding would give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import torch

from .. import engines
from ..codecs import Context, books
from ..codecs.gcomp import GComp, checked_floor
from ..engines.layout import SEGMENT, Floor, Job, segments_of
from .layout import Piece


class Together:
    """The gradients of one message, all of them float32 on the CPU."""

    def __init__(self, codec: GComp, contexts: Sequence[Context], engine: ModuleType, sizes: Sequence[int]) -> None:
        self._codec, self._engine, self._job = codec, engine, codec._job(contexts[0])
        self._floors: list[torch.Tensor | Floor | None] = [None] * len(sizes)
        if codec.mode in ("near", "paper"):
            who = f"gcomp in {codec.mode} mode"
            self._floors = [checked_floor(c, size, torch.device("cpu"), who) for c, size in zip(contexts, sizes)]

    @classmethod
    def of(
        cls, codec: object, tensors: Sequence[torch.Tensor], contexts: Sequence[Context], sizes: Sequence[int]
    ) -> Together | None:
        """None where pieces have to be coded one by one."""
        if not isinstance(codec, GComp) or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
            return None
        if any(context.lengths is not None for context in contexts):
            return None  # they are for whole tensors
        if codec.book == "shared" and len({books.current(context).id for context in contexts}) > 1:
            return None
        engine = engines.pick("cpu")
        return cls(codec, contexts, engine, sizes) if hasattr(engine, "sum_frames") else None

    def encode(
        self,
        pieces: Sequence[Piece],
        xs: Sequence[torch.Tensor],
        shift: int,
        out: torch.Tensor,
        lost: Sequence[torch.Tensor] | None,
        scale: float,
    ) -> int:
        """Writes the frames to `out` and what they lose, divided by `scale`, to `lost`; the bytes written."""
        job, floors = self._job_at(shift), self._floors_of(pieces)
        size = self._engine.encode_frames(
            xs, job, self._codec.wire_id, out, floors, self._book(pieces, job), lost, scale
        )
        return int(size)

    def note_lost(
        self,
        pieces: Sequence[Piece],
        xs: Sequence[torch.Tensor],
        shift: int,
        lost: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        self._engine.note_lost(xs, self._job_at(shift), self._floors_of(pieces), lost, scale)

    def add_up(
        self,
        pieces: Sequence[Piece],
        parts: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        shift: int,
        outs: Sequence[torch.Tensor],
        add: bool,
    ) -> int | None:
        """The sum of frames, or of values as they would be decoded; the number of a part that is damaged."""
        job, floors = self._job_at(shift), self._floors_of(pieces)
        try:
            self._engine.sum_frames(parts, job, self._codec.wire_id, outs, floors, add, self._book(pieces, job))
        except self._engine.DamagedFrames as damage:
            return int(damage.part)
        return None

    def _job_at(self, shift: int) -> Job:
        return self._job if shift == 0 else dataclasses.replace(self._job, shift=shift)

    def _floors_of(self, pieces: Sequence[Piece]) -> list[torch.Tensor | Floor | None]:
        found = []
        for piece in pieces:
            floor = self._floors[piece.tensor]
            found.append(None if floor is None else floor[piece.start : piece.stop])
        return found

    def _book(self, pieces: Sequence[Piece], job: Job) -> torch.Tensor | None:
        if not job.book:
            return None
        return books.lengths(job.book, SEGMENT * sum(segments_of(piece.numel) for piece in pieces))
