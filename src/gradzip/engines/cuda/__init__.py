"""The GComp body on NVIDIA GPUs. Same bytes as the reference engine.

Works on the current CUDA stream of the calling thread, whatever other threads do on it. `encode` waits once, until the
size is known: the body is there for what follows on the stream. `decode` waits once, to learn whether the payload was
sound. `encode_many` and `decode_many` do so for all their tensors together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ...errors import Corrupt, EngineError, Truncated, Unsupported
from ..layout import (
    BODY_HEAD_BYTES,
    CODINGS,
    FIXED,
    NEAR,
    Floor,
    Job,
    blocks_of,
    blocks_offset,
    float_layout,
    segments_of,
)
from . import launch
from .launch import Key, Part, batches, count_symbols, identity, prepare, recall
from .tables import code_lengths as code_lengths  # part of the engine's interface
from .workspace import Prepared

NAME = "cuda"

FloorLike = torch.Tensor | Floor | None

_FAULTS: list[tuple[int, type[Exception], str]] = [
    (1 << 1, Corrupt, "reserved or contradictory bits in the head of the gcomp body"),
    (1 << 0, Corrupt, "a code table is no complete code"),
    (1 << 2, Corrupt, "the padding behind the block index is not zero"),
    (1 << 4, Truncated, "a block ends behind the end of the payload"),
    (1 << 5, Corrupt, "bytes follow the last block"),
    (1 << 6, Corrupt, "a block of a reserved kind"),
    (1 << 7, Corrupt, "a raw block has the wrong size or padding"),
    (1 << 8, Corrupt, "a dense block ends inside its head"),
    (1 << 9, Corrupt, "the head of a dense block contradicts itself or its length"),
    (
        1 << 10,
        Corrupt,
        "the lanes of a dense block do not end where they began (near mode: or the floors differ from the encoder's)",
    ),
    (1 << 11, Corrupt, "a dense block holds another number of values than its head says"),
    (1 << 12, Corrupt, "a sparse block contradicts itself (or the floors differ from the encoder's)"),
    (1 << 13, Corrupt, "a sparse block in a frame that is not in near mode"),
]
_OTHER_CODING = 1 << 14  # the body has the coding of bits 16 and 17, not the expected one


# --- Interface ---------------------------------------------------------------------------------------------------


def encode(
    x: torch.Tensor, job: Job, out: torch.Tensor, floor: FloorLike = None, lengths: torch.Tensor | None = None
) -> int:
    """Writes the body of flat `x` into uint8 `out` and returns its length in bytes.

    `lengths`, (segments, 256) uint8, are the code lengths to use; by default the encoder samples `x`.
    """
    return encode_many((x,), job, (out,), (floor,), (lengths,))[0]


def encode_many(
    xs: Sequence[torch.Tensor],
    job: Job,
    outs: Sequence[torch.Tensor],
    floors: Sequence[FloorLike] | None = None,
    lengths: Sequence[torch.Tensor | None] | None = None,
) -> list[int]:
    """`encode` of several tensors in as few launches as possible, and one wait."""
    if not xs:
        return []
    floors, lengths = floors or [None] * len(xs), lengths or [None] * len(xs)
    key = "encode", job, *map(identity, xs, outs, floors, lengths)
    run = recall(xs[0].device, key)
    if run is None:
        return _encode_first(xs, job, outs, floors, lengths, key)
    run.run()
    sizes, status = run.finish()
    _raise_bad_lengths(status)
    return sizes


def decode(
    body: torch.Tensor,
    out: torch.Tensor,
    floor: FloorLike = None,
    shift: int = 0,
    add: bool = False,
    book: torch.Tensor | None = None,
) -> None:
    """Reads a body into flat `out`, adding to what is there if `add`. `book`: (segments, 256) lengths of a shared book.

    If the payload proves to be corrupt, `out` has been written to in part.
    """
    decode_many((body,), (out,), (floor,), shift, add, (book,))


def decode_many(
    bodies: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    floors: Sequence[FloorLike] | None = None,
    shift: int = 0,
    add: bool = False,
    books: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """`decode` of several bodies in as few launches as possible, and one wait. No two write to the same place."""
    if not outs:
        return
    floors, books = floors or [None] * len(outs), books or [None] * len(outs)
    key = "decode", shift, add, *map(identity, outs, bodies, floors, books)
    run = recall(outs[0].device, key)
    if run is not None:
        run.run()
        _, status = run.finish()
        if status == 0:
            return
        _raise_faults(status)
    parts = [
        _readable(body, out, floor, book, out if add else None)
        for body, out, floor, book in zip(bodies, outs, floors, books)
    ]
    if run is not None:
        _decode_others(parts, run, shift)
        return
    as_given = all(part.body is body and part.values.numel() for part, body in zip(parts, bodies))
    for batch in batches([part for part in parts if part.values.numel()]):
        _decode_batch(batch, shift, key if as_given and len(batch) == len(parts) else None)


def decode_add_encode(
    body: torch.Tensor,
    local: torch.Tensor,
    job: Job,
    out: torch.Tensor,
    floor: FloorLike = None,
    in_shift: int = 0,
    lengths: torch.Tensor | None = None,
    book: torch.Tensor | None = None,
) -> int:
    """One hop of a ring: the body of local + decoded(body). `lengths` None: the incoming tables.

    Decoding and encoding follow each other on the stream; the host waits once, at the end.
    """
    if local.dtype != torch.float32:
        raise Unsupported(f"sums are formed in float32, not {local.dtype}")
    if local.numel() == 0:
        return encode(local, job, out, floor, lengths)
    total = torch.empty_like(local)
    incoming = _readable(body, total, floor, book, local)
    coding = FIXED if floor is None else NEAR
    prepare([incoming], coding, _shifted(in_shift), encodes=False).run()
    tables = incoming.body if lengths is None and book is None else None
    given = lengths if lengths is not None else book
    room = _aligned_room(out)
    writing = prepare(
        [Part(total, room, floor=floor, lengths=given, tables=tables)], _coding(total, job), job, encodes=True
    )
    writing.run()
    (size,), status = writing.finish()
    _raise_faults(status)
    if status & _OTHER_CODING:
        raise Corrupt("the frame that came in is of another mode than the one that goes out")
    if room is not out:
        out[:size] = room[:size]
    return size


def histogram(x: torch.Tensor, job: Job, floor: FloorLike = None) -> torch.Tensor:
    """Sampled symbol counts of each segment, (segments, 256) int64."""
    counts = torch.zeros(segments_of(x.numel()), 256, dtype=torch.int32, device=x.device)
    if x.numel():
        part = Part(x, floor=_needed_floor(x, job, floor))
        count_symbols([part], _coding(x, job), job, counts)
    return counts.to(torch.int64)


# --- Inside ------------------------------------------------------------------------------------------------------


def _coding(x: torch.Tensor, job: Job) -> int:
    return CODINGS[job.mode] if x.dtype == torch.float32 else FIXED


def _needed_floor(x: torch.Tensor, job: Job, floor: FloorLike) -> FloorLike:
    float_layout(x.dtype)
    if _coding(x, job) == FIXED:
        return None
    if floor is None:
        raise Unsupported(f"gcomp in {job.mode} mode needs floor=")
    if job.shift < 0:
        raise Unsupported(f"floors are shifted up, for sums of several ranks; not by {job.shift}")
    return floor


def _aligned_room(out: torch.Tensor) -> torch.Tensor:
    """`out`, or as much memory where kernels may write words."""
    return out if out.data_ptr() % 4 == 0 else torch.empty_like(out)


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device and tensor.is_contiguous() else tensor.to(device).contiguous()


def _encode_first(
    xs: Sequence[torch.Tensor],
    job: Job,
    outs: Sequence[torch.Tensor],
    floors: Sequence[FloorLike],
    lengths: Sequence[torch.Tensor | None],
    key: Key,
) -> list[int]:
    """What `encode_many` does where nothing is prepared: next time it is, if one launch can code all as they are."""
    parts = [
        Part(x, _aligned_room(out), 0, _needed_floor(x, job, floor), None if given is None else _on(given, x.device))
        for x, out, floor, given in zip(xs, outs, floors, lengths)
    ]
    as_given = all(
        part.values.numel() and part.body is out and part.lengths is given
        for part, out, given in zip(parts, outs, lengths)
    )
    sizes = _encode(parts, job, key if as_given else None)
    for part, out, size in zip(parts, outs, sizes):
        if part.body is not out and part.body is not None:
            out[:size] = part.body[:size]
    return sizes


def _encode(parts: list[Part], job: Job, key: Key | None) -> list[int]:
    """`key`: to recall the launch by, if there is but one."""
    sizes = [BODY_HEAD_BYTES] * len(parts)
    filled = [i for i, part in enumerate(parts) if part.values.numel()]
    at = 0
    for batch in batches([parts[i] for i in filled]):
        own = key if len(batch) == len(parts) else None
        run = prepare(batch, _coding(batch[0].values, job), job, encodes=True, key=own)
        run.run()
        found, status = run.finish()
        _raise_bad_lengths(status)
        for size in found:
            sizes[filled[at]] = size
            at += 1
    for part in parts:
        if part.values.numel() == 0 and part.body is not None:
            head = bytearray([_coding(part.values, job), 1 if job.book else 0, 0, 0]) + job.book.to_bytes(4, "little")
            part.body[:BODY_HEAD_BYTES] = torch.frombuffer(head, dtype=torch.uint8)
    return sizes


def _raise_bad_lengths(status: int) -> None:
    if status & 1:
        raise Unsupported("the code lengths given are no complete code")


def _readable(
    body: torch.Tensor, out: torch.Tensor, floor: FloorLike, book: torch.Tensor | None, addend: torch.Tensor | None
) -> Part:
    """A body that is long enough for its tables, at an address where kernels may read words."""
    float_layout(out.dtype)
    shared, size, numel = 0 if book is None else 1, body.numel(), out.numel()
    if size < BODY_HEAD_BYTES:
        raise Truncated("the gcomp body ends inside its head")
    if size < blocks_offset(numel, shared):
        raise Truncated("the gcomp body ends inside its tables")
    padded = body
    if size % 4 or body.data_ptr() % 4:
        padded = torch.zeros((size + 3) // 4 * 4, dtype=torch.uint8, device=body.device)
        padded[:size] = body
    if numel == 0:
        _check_empty(body, shared)
    if blocks_of(numel) >= 1 << 31:
        raise Unsupported(f"{numel} values are too many for one launch: decode it in parts")
    return Part(out, padded, size, floor if out.dtype == torch.float32 else None, book, None, addend)


def _check_empty(body: torch.Tensor, shared: int) -> None:
    head = body[:BODY_HEAD_BYTES].tolist()
    if head[0] > 2 or head[1] != shared or head[2] or head[3] or any(head[4:]) != bool(shared):
        raise Corrupt("reserved or contradictory bits in the head of the gcomp body")
    if body.numel() != BODY_HEAD_BYTES:
        raise Corrupt(f"{body.numel() - BODY_HEAD_BYTES} bytes follow the last block")


@cache
def _shifted(shift: int) -> Job:
    """All that a decoder has to know."""
    return Job("near", shift=shift)


def _decode(batch: Sequence[Part], coding: int, shift: int, key: Key | None = None) -> Prepared | None:
    """Decodes bodies of that coding; returns the launch if one of them has another."""
    run = prepare(batch, coding, _shifted(shift), encodes=False, key=key)
    run.run()
    _, status = run.finish()
    _raise_faults(status)
    return run if status & _OTHER_CODING else None


def _expected(batch: Sequence[Part]) -> int:
    return FIXED if batch[0].floor is None else NEAR


def _decode_batch(batch: Sequence[Part], shift: int, key: Key | None) -> None:
    refused = _decode(batch, _expected(batch), shift, key)
    if refused is not None:
        _decode_others(batch, refused, shift)


def _decode_others(batch: Sequence[Part], refused: Prepared, shift: int) -> None:
    """Decodes what that launch left because it has another coding; rare enough to take one at a time."""
    expected = _expected(batch)
    for part in batch:
        assert part.body is not None
        coding = int(part.body[0])
        if coding == NEAR != expected:
            raise Unsupported("decoding a frame in near mode needs floor=: gradzip.floors(optimizer) gives them")
        if coding != expected or refused.all_or_nothing:  # what is done is not added once more
            _decode((part,), coding, shift)


def _raise_faults(status: int) -> None:
    for bit, error, message in _FAULTS:
        if status & bit:
            raise error(message)


def require_device() -> None:
    """Raises EngineError where kernels cannot run."""
    if not torch.cuda.is_available() and launch.emulator is None:
        raise EngineError("there is no CUDA device")
