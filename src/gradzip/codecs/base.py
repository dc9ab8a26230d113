"""The codec interface, the registry, and the text form `name:key=value,key=value`.

A codec is a frozen dataclass: the configured object is the configuration. `parse(str(codec)) == codec`.
A codec implements `_encode`, `_decode` and `_body_bound` on flat tensors and bodies; this file adds the frame,
the checks and the text form. A codec that needs several rounds of communication (`rounds > 1`) implements
`in_rounds` instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from .. import saved, wire
from ..engines.layout import MOST_SHIFT, Floor
from ..errors import Corrupt, Unsupported, nearest


class Sparse(NamedTuple):
    """Some values of a tensor."""

    places: torch.Tensor  # ascending indices
    values: torch.Tensor


@dataclass
class Context:
    """What a codec may know beside the tensor. The caller keeps one per parameter and codec."""

    name: str = ""  # the parameter's name
    step: int = 0
    seed: int = 0  # equal on all ranks
    rank: int = 0
    world: int = 1  # how many ranks there are
    scale: float = 1.0  # the loss scale that the tensor carries; what is kept in `state` is kept without it
    floor: torch.Tensor | Floor | None = None  # near: an int8 per value, or where to get it; paper: a float32 reach
    shift: int = 0  # added to the floors, for sums of several ranks
    shape: torch.Tensor | None = None  # noise: an int8 per value, -12 to 0: its grid is 2^shape times the level
    lengths: torch.Tensor | None = None  # code lengths to use instead of sampling
    near: torch.Tensor | None = None  # the frame to be decoded in the host's memory, if it lies on a GPU as well
    sent: Sparse | None = None  # by sparse codecs: what the frame that was just encoded holds
    whole: bool = False  # for codecs of several rounds: the tensor only keeps others company, and goes as it is
    # What the codec carries from step to step. It is equal on all ranks, but for keys that start with "own_".
    state: dict[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()  # of each row, where several tensors of one size are coded at once (Codec.codes_rows)

    def __post_init__(self) -> None:
        check_shift(self.shift)


def check_shift(shift: object) -> None:
    if not isinstance(shift, int) or not 0 <= shift <= MOST_SHIFT:
        raise Unsupported(
            f"shift={shift!r}: floors are shifted by a whole number from 0 to {MOST_SHIFT}, towards a coarser grid"
        )


class Reduced(NamedTuple):
    """What `reduce` makes of one tensor."""

    mean: torch.Tensor  # over all ranks, of the tensor's shape; equal on all ranks
    residual: torch.Tensor | None  # what of this rank's own tensor did not get through; None: nothing was lost


class Kept(ABC):
    """What steps keep of tensors that are reduced in place; whoever made it may hold all of it as one."""

    @property
    @abstractmethod
    def residuals(self) -> Sequence[torch.Tensor | None]:
        """As in Reduced, of each tensor, without the scale."""

    @property
    @abstractmethod
    def states(self) -> list[dict[str, Any]]:
        """As in Context, of each tensor."""

    @property
    def sums(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """What was lost of sums that this rank coded, of each tensor by stage (feedback.py); (): nothing."""
        return ()


class Apart(Kept):
    """The same for each tensor by itself."""

    def __init__(self, residuals: list[torch.Tensor | None], states: list[dict[str, Any]]) -> None:
        self._residuals, self._states = residuals, states

    @property
    def residuals(self) -> list[torch.Tensor | None]:
        return self._residuals

    @property
    def states(self) -> list[dict[str, Any]]:
        return self._states


class Left(NamedTuple):
    """What a reduction in place leaves beside the means."""

    kept: Kept
    finite: bool  # whether all means are


class InPlace(ABC):
    """Replaces the tensors that it was made for by their means over all ranks, as long as they stay where they are."""

    @abstractmethod
    def reduce(
        self,
        before: Kept,
        scale: float,
        average: Callable[[torch.Tensor], None],
        enqueued: Callable[[], None],
    ) -> Left:
        """As Codec.reduce, where `scale` times the residual of each tensor is first added to it.

        `enqueued` is called once all that makes the means is on the current stream, maybe still to be done; from then
        on nothing reads them.
        """


@dataclass(frozen=True)
class Codec:
    """Base of all codecs. Class attributes describe it to routes and planner.

    A tensor with a NaN or an infinity decodes to one that has one too, so that no rank steps on where another saw
    the step fail. State is carried in `ctx.state` by putting new tensors there, never by writing into old ones: the
    caller may drop what a step changed.
    """

    name: ClassVar[str]
    wire_id: ClassVar[int]
    summary: ClassVar[str] = ""  # one line for `gradzip codecs`
    error: ClassVar[str] = "none"  # what is lost, in a few words
    summable: ClassVar[bool] = False  # frames can be averaged without decoding them: see addends()
    # The frame's size follows from numel and dtype. Reports, `gradzip codecs` and the planner read this; which runner
    # carries the codec does not follow from it.
    fixed_size: ClassVar[bool] = True
    rounds: ClassVar[int] = 1  # collectives per reduction; above 1: implement in_rounds()
    routes: ClassVar[tuple[str, ...]] = ()  # the only ones that it can take; none: any that codes
    transforms: ClassVar[bool] = False  # what is decoded is meant to be something else than the tensor
    shaped: ClassVar[bool] = False  # rounds by Context.shape; an exchange codes it in whole messages alone
    cuttable: ClassVar[bool] = False  # each value is coded by itself: it does not matter where a tensor is cut
    # On CPUs `_encode` and `_decode` take tensors of one size as rows as well, with a row of the body for each, and
    # all bodies of that size are equally long. Each row is coded as it would be by itself.
    codes_rows: ClassVar[bool] = False

    @property
    def lossless(self) -> bool:
        return False

    @property
    def codes_sums(self) -> bool:
        """Whether sums over ranks are coded as they are and divided at the end; else means are coded."""
        return False

    @property
    def densest(self) -> Codec:
        """The codec of the longest frames that an exchange makes with this one, those of sums included."""
        return self

    def for_sum(self, x: torch.Tensor) -> Codec:
        """What codes x, a sum of decoded frames."""
        return self

    def decoder(self, codec_id: int) -> Codec:
        """What decodes a frame of that codec id in an exchange with this codec; it may be one of a sum."""
        return self

    @property
    def biased(self) -> bool:
        """Whether what is decoded differs from the tensor on average, so that training needs error feedback."""
        return False

    @property
    def error_memory(self) -> str | None:
        """Where what an encode lost waits for the next step: fp32, bf16 or cpu; None: it is forgotten."""
        return "fp32" if self.biased else None

    @property
    def small_form(self) -> str:
        """What tensors too small for compression go by beside this codec, as text."""
        return "identity"

    # -- what a codec implements --------------------------------------------------------------------------------

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        """Writes the body of flat contiguous `x`; returns its bytes."""
        raise Unsupported(f"{self} has no payload of its own: it reduces in {self.rounds} rounds")

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        """Reads a body into flat `out`, adding to it if `add`. Checks before it reads."""
        raise Unsupported(f"{self} has no payload of its own: it reduces in {self.rounds} rounds")

    def _body_bound(self, numel: int, dtype: torch.dtype) -> int:
        raise Unsupported(f"{self} has no payload of its own: it reduces in {self.rounds} rounds")

    def _addends(self, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """For summable codecs: the part of the body that is averaged, as a view of numbers."""
        raise Unsupported(f"frames of {self} cannot be averaged: decode them first")

    @classmethod
    def check_state(cls, field: str, where: str, value: Any, shape: Sequence[int]) -> None:
        """Raises Unsupported if `value`, read from a checkpoint, cannot be that field of Context.state.

        `where` is its key in the checkpoint, for the error; `shape` is that of the tensor it belongs to.
        """
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            saved.floats(where, value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise saved.refuse(where, value, "a finite number")
        elif not isinstance(value, torch.Tensor | int | float):
            raise saved.refuse(where, value, "a tensor or a number")

    def in_rounds(
        self, tensors: list[torch.Tensor], contexts: list[Context]
    ) -> Generator[torch.Tensor, None, list[Reduced]]:
        """For codecs of several rounds: the mean of each tensor over all ranks.

        Yields contiguous tensors; each has been replaced by its mean over all ranks, in one collective, when this goes
        on. No mean of a gradient may be larger than the sum of the magnitudes in all averages: whether it is finite is
        asked of these.
        """
        raise Unsupported(f"{self} has one round: use encode and decode")

    def reduce(
        self, tensors: list[torch.Tensor], contexts: list[Context], average: Callable[[torch.Tensor], None]
    ) -> list[Reduced]:
        """For codecs of several rounds: `in_rounds` with a function that replaces a tensor by its mean."""
        rounds = self.in_rounds(tensors, contexts)
        while True:
            try:
                flat = next(rounds)
            except StopIteration as end:
                results: list[Reduced] = end.value
                return results
            average(flat)

    def in_place(self, tensors: list[torch.Tensor], contexts: list[Context]) -> InPlace | None:
        """What is to be used instead of `reduce` for these tensors, on all ranks; None: nothing."""
        return None

    # -- what everybody calls -----------------------------------------------------------------------------------

    def bound(self, numel: int, dtype: torch.dtype, check: bool = False) -> int:
        """Bytes that a frame of that many elements can have at the most."""
        wire.dtype_code(dtype)
        return wire.body_offset(check) + self._body_bound(numel, dtype)

    def encode(
        self, x: torch.Tensor, ctx: Context | None = None, out: torch.Tensor | None = None, check: bool = False
    ) -> torch.Tensor:
        """A self-describing frame as a 1-D uint8 tensor on x's device; a view of `out` where that is given."""
        flat = x.detach().resolve_neg().reshape(-1).contiguous()  # codecs read memory, which a lazy minus is not in
        bound = self.bound(flat.numel(), flat.dtype, check)
        if out is None:
            out = torch.empty(bound, dtype=torch.uint8, device=flat.device)
        elif out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.device != flat.device:
            raise Unsupported(f"out must be a contiguous 1-D uint8 tensor on {flat.device}")
        elif out.numel() < bound:
            raise Unsupported(f"out has {out.numel()} bytes; {self} may need {bound}: see codec.bound(numel, dtype)")
        start = wire.body_offset(check)
        size = self._encode(flat, ctx or Context(), out[start:])
        wire.write_header(out, self.wire_id, flat.dtype, flat.numel(), size, check)
        return out[: start + size]

    def decode(
        self, payload: torch.Tensor, ctx: Context | None = None, out: torch.Tensor | None = None, add: bool = False
    ) -> torch.Tensor:
        """The flat tensor of a frame; with `out` nothing is allocated, with `add` it is added to `out`."""
        header = wire.read_header(payload if ctx is None or ctx.near is None else ctx.near)
        if header.codec_id != self.wire_id:
            other = BY_ID.get(header.codec_id)
            made_by = f"by {other.name!r}" if other else f"by an unknown codec (id {header.codec_id})"
            raise Corrupt(f"this frame was made {made_by}, not by {self.name!r}")
        wire.verify_checksum(payload, header)
        if out is None:
            if add:
                raise Unsupported("add=True needs out=: there is nothing to add to")
            self._check_claim(header)
            out = torch.empty(header.numel, dtype=header.dtype, device=payload.device)
        elif out.dtype != header.dtype or out.numel() != header.numel or out.device != payload.device:
            raise Unsupported(
                f"the frame holds {header.numel} x {header.dtype}; out is {out.numel()} x {out.dtype} on {out.device}"
            )
        elif not out.is_contiguous() or out.is_neg():
            raise Unsupported("out must be contiguous, and not a view that negates lazily (out.is_neg())")
        elif out.requires_grad and torch.is_grad_enabled():
            raise Unsupported(
                "out requires grad, and decode writes into it without telling autograd: pass out=tensor.detach(), or "
                "decode under torch.no_grad()"
            )
        self._decode(payload[header.body_offset :], ctx or Context(), out.view(-1), add)
        return out.view(-1)

    def addends(self, frame: torch.Tensor) -> torch.Tensor:
        """The numbers inside a frame of a summable codec, as a view.

        Frames of equally shaped tensors, made with equal contexts on all ranks, differ in these numbers only: putting
        their mean in place makes the frame of the mean.
        """
        header = wire.read_header(frame)
        if header.checksum is not None:
            raise Unsupported("a frame with a checksum cannot be averaged: encode it without one")
        return self._addends(frame[header.body_offset :], header.dtype)

    def _check_claim(self, header: wire.Header) -> None:
        """Refuses an element count that the body cannot hold, before memory is allocated for it."""

    # -- text form ----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        options = [
            f"{f.name}={_text(getattr(self, f.name))}"
            for f in sorted(dataclasses.fields(self), key=lambda f: bool(f.kw_only))
            if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(options) if options else "")


FEEDBACK = ("auto", "true", "false", "bf16", "cpu")


@dataclass(frozen=True)
class Lossy(Codec):
    """A codec that loses something, and the one option that all of them have: what becomes of it.

    Error feedback adds what an encode lost to the tensor of the next step. `feedback=auto` does so for biased codecs.
    """

    feedback: str | bool = field(default="auto", kw_only=True)  # bf16 and cpu: on, and kept like that

    def __post_init__(self) -> None:
        if isinstance(self.feedback, bool):
            object.__setattr__(self, "feedback", str(self.feedback).lower())
        if self.feedback not in FEEDBACK:
            hint = nearest(str(self.feedback), FEEDBACK)
            raise Unsupported(f"{self.name}:feedback={self.feedback!r}{hint}: choose {', '.join(FEEDBACK)}")

    @property
    def error_memory(self) -> str | None:
        kept = {"auto": "fp32" if self.biased else None, "true": "fp32", "false": None}
        return kept.get(str(self.feedback), str(self.feedback))


def require_float32(codec: Codec, dtype: torch.dtype) -> None:
    """For codecs whose arithmetic is float32: other types of up to 32 bits are converted, float64 is refused."""
    if dtype.itemsize > 4:
        raise Unsupported(f"{codec.name} codes float32, bfloat16 and float16, not {dtype}: convert the tensor first")


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the type that sums and residuals are formed in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def typed(body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements; a copy only where they are not aligned."""
    if any(place % dtype.itemsize for place in (body.storage_offset(), *body.stride()[:-1])):
        body = body.clone(memory_format=torch.contiguous_format)
    return body.view(dtype)


def deliver(values: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    values = values.to(out.dtype)  # rounded before it is added, so that adding and decoding agree
    out.add_(values) if add else out.copy_(values)


REGISTRY: dict[str, type[Codec]] = {}
BY_ID: dict[int, type[Codec]] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Class decorator: puts a codec into the one registry."""
    assert cls.name not in REGISTRY and cls.wire_id not in BY_ID, f"{cls.name}: name or id taken"
    REGISTRY[cls.name] = cls
    BY_ID[cls.wire_id] = cls
    return cls


# What users write for codecs that have another name here.
ALIASES = dict.fromkeys(("bf16", "bfloat16"), "cast:to=bf16") | dict.fromkeys(
    ("fp16", "float16", "half"), "cast:to=fp16"
)


def similar(name: str) -> str | None:
    """The text form of the codec that somebody may have meant."""
    known = (*REGISTRY, "auto")
    return ALIASES.get(name.lower()) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def parse(text: str | Codec) -> Codec:
    """The codec of a text form such as `topk:ratio=0.01`; a Codec is returned as it is."""
    if isinstance(text, Codec):
        return text
    name, _, options = text.strip().partition(":")
    cls = REGISTRY.get(name)
    if cls is None:
        meant = similar(name)
        hint = f", did you mean {meant!r}?" if meant else ""
        raise Unsupported(f"unknown codec {name!r}{hint}; `gradzip codecs` lists them all")
    known = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and (meant := _completed(name, key, known)):
            raise Unsupported(f"cannot read {item!r} in {text!r}. Did you mean {meant!r}?")
        if key not in known:
            names = ", ".join(known) or "none"
            raise Unsupported(f"codec {name!r} has no option {key!r}{nearest(key, known)}; it has: {names}")
        if not equals or key in values:
            raise Unsupported(f"cannot read {item!r} in {text!r}: write each option once, as {key}=value")
        values[key] = _value(value, str(known[key].type), f"{name}:{key}")
    return cls(**values)


def _completed(name: str, item: str, known: dict[str, dataclasses.Field[Any]]) -> str | None:
    """The option that `topk:0.01` or `gcomp:lossless` may have meant: one that has such a value."""
    if item in known:
        return f"{name}:{item}=true" if str(known[item].type).startswith("bool") else None
    for key in known:
        try:
            meant = parse(f"{name}:{key}={item}")
        except Unsupported:
            continue
        return str(meant) if str(meant) != name else f"{name}:{key}={item}"
    return None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str, kind: str, where: str) -> Any:
    try:
        if kind.startswith("bool"):
            return {"true": True, "false": False}[text.lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        return text
    except (KeyError, ValueError):
        raise Unsupported(f"{where}={text!r} is not a valid {kind.split(' ')[0]}") from None
