"""GComp: entropy-coded exponents, and as much of the mantissa as the mode keeps (docs/format.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch

from .. import engines, saved, wire
from ..engines.layout import (
    BODY_HEAD_BYTES,
    COARSEST,
    EXACT,
    NEAR,
    PAPER,
    Floor,
    Job,
    blocks_offset,
    body_bound,
    float_layout,
    segments_of,
)
from ..errors import Corrupt, Truncated, Unsupported, nearest
from . import books
from .base import Context, Lossy, check_shift, register
from .local_lossless import LOSSLESS, find_lossless, known_lossless

_MODES = ("near", "lossless", "keep", "paper")
_OWN = ("auto", "near", "lossless")
REFRESH, SHORTEST_REFRESH = 50, 3  # steps: a new book is due two steps after its exponents were counted (refresh.py)


@register
@dataclass(frozen=True)
class GComp(Lossy):
    """Near-lossless float coding; `gcomp` alone is near mode at one ulp."""

    name: ClassVar[str] = "gcomp"
    wire_id: ClassVar[int] = 2
    summary: ClassVar[str] = "Huffman-coded exponents; mantissa exact, rounded, or cut to what the optimizer can feel"
    error: ClassVar[str] = "what cannot move a parameter by an ulp; or none, or rounding, as the mode says"
    fixed_size: ClassVar[bool] = False
    cuttable: ClassVar[bool] = True

    mode: str = "near"
    keep: int | None = None  # mantissa bits; giving it means mode=keep
    round: str = "nearest"  # or truncate, for keep
    ulps: int = 1  # near: how far a parameter may move, in units of its last place; higher = smaller
    own: str = "auto"  # near: a rank's own gradient, before it is summed, goes `near` too, or `lossless`; auto: smaller
    limit: int = 8  # longest Huffman code
    book: str = "frame"  # where the code comes from: tables in the frame, or the shared book
    refresh: int = REFRESH  # steps between two shared books; 50 is GComp's own example

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.mode == "near":
            object.__setattr__(self, "mode", "keep")
        if self.mode not in _MODES:
            raise Unsupported(f"gcomp:mode={self.mode!r}{nearest(self.mode, _MODES)}: choose {', '.join(_MODES)}")
        if (self.keep is not None) != (self.mode == "keep"):
            raise Unsupported("gcomp:keep=0..23 gives the mantissa bits of mode keep, and of no other mode")
        if self.keep is not None and not 0 <= self.keep <= 23:
            raise Unsupported(f"gcomp:keep={self.keep}: a float32 has 0 to 23 mantissa bits to keep")
        if self.round not in ("nearest", "truncate"):
            raise Unsupported(f"gcomp:round={self.round!r}: choose nearest or truncate")
        if self.ulps < 1:
            raise Unsupported(f"gcomp:ulps={self.ulps}: at least 1")
        if self.own not in _OWN:
            raise Unsupported(f"gcomp:own={self.own!r}{nearest(self.own, _OWN)}: choose {', '.join(_OWN)}")
        if self.own != "auto" and self.mode != "near":
            raise Unsupported(f"gcomp:own={self.own} is for sums in near mode, not for mode {self.mode}")
        if not 1 <= self.limit <= 8:
            raise Unsupported(f"gcomp:limit={self.limit}: codes have at most 1 to 8 bits")
        if self.book not in ("frame", "shared"):
            raise Unsupported(f"gcomp:book={self.book!r}: choose frame or shared")
        if self.refresh < SHORTEST_REFRESH:
            raise Unsupported(
                f"gcomp:refresh={self.refresh}: at least {SHORTEST_REFRESH}, as a book is in use from the second step "
                "after its exponents were counted"
            )
        if self.refresh != REFRESH and self.book != "shared":
            raise Unsupported(f"gcomp:refresh={self.refresh} is for book=shared, and this codec has book={self.book}")
        if self.lossless and self.feedback not in ("auto", "false"):
            raise Unsupported(f"gcomp:feedback={self.feedback}: mode lossless loses nothing that could be fed back")

    def __str__(self) -> str:
        text = super().__str__()
        return text.replace("mode=keep,", "") if self.keep is not None else text

    @property
    def lossless(self) -> bool:
        return self.mode == "lossless"

    @property
    def codes_sums(self) -> bool:
        return self.mode == "near"  # sums lie on the grid, means do not

    @property
    def exact(self) -> GComp:
        """The same without losses."""
        return GComp(mode="lossless", limit=self.limit, book=self.book, refresh=self.refresh)

    def own_exact(
        self, xs: Sequence[torch.Tensor], contexts: Sequence[Context], states: Sequence[dict[str, Any]]
    ) -> list[bool]:
        """Which of these flat gradients, a rank's own, are coded by `exact`; all others, and sums, by this codec.

        `states` are what is known of each from step to step.
        """
        if self.mode == "near" and self.own == "auto":
            return find_lossless(xs, contexts, states)
        return [self.own == "lossless"] * len(xs)

    def known_own_exact(
        self, step: int, floors: Sequence[Floor | torch.Tensor | None], states: Sequence[Mapping[str, Any]]
    ) -> list[bool] | None:
        """`own_exact` where that follows from what is known; None: gradients have to be looked at."""
        if self.mode == "near" and self.own == "auto":
            return known_lossless(step, floors, states)
        return [self.own == "lossless"] * len(states)

    def for_own(self, x: torch.Tensor, ctx: Context) -> GComp:
        """What codes this flat gradient, a rank's own, if nothing is known of it before."""
        return self.exact if self.own_exact([x], [ctx], [{}])[0] else self

    @property
    def biased(self) -> bool:
        return (self.mode == "near" and self.ulps > 1) or (self.keep is not None and self.keep < 7)

    @classmethod
    def check_state(cls, field: str, where: str, value: Any, shape: Sequence[int]) -> None:
        if field != LOSSLESS:
            raise Unsupported(f"the state's {where!r} is not a field of gcomp, which keeps {LOSSLESS}: {saved.CURE}")
        saved.counter({where: value}, where, most=1)

    def _job(self, ctx: Context) -> Job:
        book = books.current(ctx).id if self.book == "shared" else 0
        return Job(
            self.mode, 23 if self.keep is None else self.keep, self.round == "truncate", self.limit, ctx.shift, book
        )

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        return body_bound(numel, dtype)

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        check_shift(ctx.shift)
        float_layout(x.dtype)
        job = self._job(ctx)
        floor = None
        if self.mode in ("near", "paper") and x.dtype == torch.float32:
            dtypes = (torch.int8, torch.float32) if self.mode == "paper" else (torch.int8,)
            floor = checked_floor(ctx.floor, x.numel(), x.device, f"gcomp in {self.mode} mode", dtypes)
            if is_reach(floor):
                floor, job = reach_exponents(x, floor, ctx.shift), dataclasses.replace(job, shift=0)
        lengths = _checked_lengths(ctx.lengths, x.numel(), x.device)
        if job.book:
            lengths = books.lengths(job.book, x.numel()).to(x.device)
        return int(engines.pick(x.device).encode(x, job, body, floor, lengths))

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        check_shift(ctx.shift)
        if body.numel() < BODY_HEAD_BYTES:
            raise Truncated("the gcomp body ends inside its head")
        head = body[:BODY_HEAD_BYTES].tolist()
        coding, book_id = head[0], int.from_bytes(bytes(head[4:8]), "little")
        if coding > PAPER or head[1] > 1 or head[2] or head[3] or head[1] != bool(book_id):
            raise Corrupt("reserved or contradictory bits in the head of the gcomp body")
        if out.dtype not in (torch.float32,) and coding in (NEAR, PAPER):
            raise Corrupt(f"a frame of {out.dtype} in a float32-only mode")
        float_layout(out.dtype)
        floor = None
        if coding == NEAR:
            floor = checked_floor(ctx.floor, out.numel(), out.device, "decoding a frame in near mode")
        book = books.lengths(book_id, out.numel()).to(out.device) if book_id else None
        engines.pick(out.device).decode(body, out, floor, ctx.shift, add, book)

    def _check_claim(self, header: wire.Header) -> None:
        if header.numel and header.body_bytes < blocks_offset(header.numel, 1):
            raise Corrupt(f"{header.numel} values cannot be in a body of {header.body_bytes} bytes")


def is_reach(floor: torch.Tensor | Floor | None) -> TypeGuard[torch.Tensor]:
    """Whether these are paper mode's reaches, which an encoder compares with the values themselves."""
    return isinstance(floor, torch.Tensor) and floor.dtype == torch.float32


def paper_levels(x: torch.Tensor, reach: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """GComp's levels 0 to 3 of flat float32 values: how many n of 6, 12 and 18 have |delta| = reach / |x| > 2^n."""
    scaled, reach = x.abs(), reach * 2.0**shift if shift else reach
    level = torch.zeros_like(x, dtype=torch.int8)
    for _ in range(3):
        level += scaled.mul_(2.0**6) < reach  # exact: products only ever overflow, to an infinity that is not below
    return level


def reach_exponents(x: torch.Tensor, reach: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """The int8 reaches for which engines choose the levels above; they know a reach by its exponent alone.

    A value of 2^84 or more may lose fewer bits, as engines take no exponent above COARSEST.
    """
    level = paper_levels(x, reach, shift)
    exponent = ((x.view(torch.int32) >> 23) & 255) - 127
    return torch.where(level > 0, (exponent + 1 + 6 * level).clamp(max=COARSEST), EXACT).to(torch.int8)


def checked_floor(
    floor: torch.Tensor | Floor | None,
    numel: int,
    device: torch.device,
    who: str,
    dtypes: tuple[torch.dtype, ...] = (torch.int8,),
) -> torch.Tensor | Floor:
    if floor is None:
        raise Unsupported(f"{who} needs floor=: gradzip.floors(optimizer) gives one for each parameter")
    if isinstance(floor, Floor):
        parts = (floor.theta,) if floor.second is None else (floor.theta, floor.second)
        if any(p.dtype != torch.float32 or p.device != device or not p.is_contiguous() for p in parts):
            raise Unsupported(f"{who} computes floors from contiguous float32 tensors on {device}")
        if any(p.numel() != numel for p in parts):
            raise Unsupported(f"the floor has {floor.numel()} values, the tensor {numel}")
        return floor
    if floor.dtype not in dtypes or floor.device != device:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise Unsupported(f"a floor is an {wanted} tensor on {device}, not {floor.dtype} on {floor.device}")
    if floor.numel() != numel:
        raise Unsupported(f"the floor has {floor.numel()} values, the tensor {numel}")
    return floor.detach().reshape(-1).contiguous()


def _checked_lengths(lengths: torch.Tensor | None, numel: int, device: torch.device) -> torch.Tensor | None:
    if lengths is None:
        return None
    shape = (segments_of(numel), 256)
    if tuple(lengths.shape) != shape or lengths.dtype != torch.uint8:
        raise Unsupported(
            f"code lengths for {numel} values are a uint8 tensor of shape {shape}, not {tuple(lengths.shape)}"
        )
    return lengths.contiguous()
