"""The codec `noise` of the C++ engine, behind the interface of engines/reference_noise.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import Corrupt, Truncated, Unsupported
from . import native
from .noise_layout import Measured, PackedParts, Part, Slot, Statistics, Written, blocks_offset

NAME = "native"

_library = native._library

_TRUNCATED = {
    -1: "a noise body ends inside its head, levels or index",
    -2: "a noise block ends behind the end of the body",
}
_CORRUPT = {
    -5: "the padding behind the index of a noise body is not zero",
    -6: "bytes follow the last noise block",
    -16: "the header of a noise frame does not fit its parts or its slot",
    -17: "the head of a noise body makes no sense, or it has another number of parts",
    -18: "a number is no level of a noise frame",
    -19: "the head of a noise block contradicts itself",
    -20: "a noise block ends inside its lanes, or a lane does not end with its last code",
    -21: "a noise block has other escapes or giants than its lanes say",
    -22: "a raw noise block has the wrong size or head",
    -23: "a noise frame of another step or program",
}
_NO_ROOM = -13


class _Part(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_void_p),
        ("n", ctypes.c_uint64),
        ("shape", ctypes.c_void_p),
        ("start", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("offset", ctypes.c_uint32),
        ("level", ctypes.c_float),
    ]


_STATISTICS = np.dtype([("squares", "<f8"), ("weights", "<i8"), ("finite", "<i4"), ("padding", "<i4")])


class _Frame(ctypes.Structure):
    _fields_ = [
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("slot", ctypes.c_uint64),
        ("framed", ctypes.c_int32),
        ("poisoned", ctypes.c_int32),
        ("notch", ctypes.c_int32),
        ("size", ctypes.c_uint64),
    ]


class _Id(ctypes.Structure):
    _fields_ = [("step", ctypes.c_uint32), ("digest", ctypes.c_uint32)]


class _Term(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("framed", ctypes.c_int32),
        ("parts", ctypes.c_void_p),
    ]


def _declare() -> None:
    i32, i64, u32, u64, pointer = (
        ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p,
    )  # fmt: skip
    signatures = {
        "gz_noise_statistics_of": [pointer, u64, pointer, i32],
        "gz_noise_shapes": [pointer, pointer, pointer, pointer, u64, i32],
        "gz_noise_encode": [pointer, u64, u32, u32, i32],
        "gz_noise_decode": [pointer, u64, i32, pointer, pointer, u64, i32, u32, pointer, i32],
        "gz_noise_reduce": [pointer, u64, pointer, pointer, u32, u32, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(_library, name)
        function.restype, function.argtypes = i64, arguments


_declare()


class DamagedTerm(Corrupt):
    """A term of a sum that cannot be decoded; `number` is its place among the terms."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def statistics(x: torch.Tensor, shape: torch.Tensor | None = None) -> Statistics:
    """Of a whole flat tensor."""
    return statistics_of([Part(x, shape=shape)])[0]


def statistics_of(parts: Sequence[Part]) -> list[Statistics]:
    """Of many tensors, each of them one whole part."""
    return [Statistics(a, b, c) for a, b, c in zip(*(column.tolist() for column in measure(parts)))]


def measure(parts: Sequence[Part]) -> Measured:
    """The same as arrays."""
    out = np.zeros(len(parts), _STATISTICS)
    _checked(_library.gz_noise_statistics_of(_parts(parts), len(parts), out.ctypes.data, native.threads()))
    return Measured(out["squares"], out["weights"], out["finite"] != 0)


class Shaper:
    """Shapes of tensors from their second moments, flat float32 ones, for as long as all stay where they are."""

    def __init__(self, seconds: Sequence[torch.Tensor], shapes: Sequence[torch.Tensor]) -> None:
        self._held = seconds, shapes
        self._seconds = np.array([second.data_ptr() for second in seconds], np.uint64)
        self._shapes = np.array([shape.data_ptr() for shape in shapes], np.uint64)
        self._counts = np.array([second.numel() for second in seconds], np.uint64)
        self._fit = np.zeros(len(seconds), np.uint8)

    def run(self) -> list[bool]:
        """Writes the shapes; whether each tensor is fit for one."""
        seconds, shapes = self._seconds.ctypes.data, self._shapes.ctypes.data
        _checked(
            _library.gz_noise_shapes(
                seconds, self._counts.ctypes.data, shapes, self._fit.ctypes.data, len(self._fit), native.threads()
            )
        )
        fit: list[bool] = self._fit.astype(bool).tolist()
        return fit


def encode(
    parts: Sequence[Part], out: torch.Tensor, step: int = 0, digest: int = 0, poisoned: bool = False
) -> tuple[int, int]:
    """Writes the body of a frame into `out`; returns its bytes and the notch."""
    (written,) = _encode([Slot(parts, out, poisoned)], step, digest, framed=False)
    return written.size, written.notch


def decode(body: torch.Tensor, parts: Sequence[Part], add: bool = False, divisor: int = 1) -> None:
    """Reads a body into the values of its parts, divided by `divisor`; or adds it to them."""
    _checked(
        _library.gz_noise_decode(
            body.data_ptr(), body.numel(), False, None, _parts(parts), len(parts), add, divisor, None, native.threads()
        )
    )


def encode_frames(slots: Sequence[Slot], step: int, digest: int) -> list[Written]:
    """Writes a frame, with its header, into every slot."""
    return _encode(slots, step, digest, framed=True)


def decode_frame(
    slot: torch.Tensor, parts: Sequence[Part], step: int, digest: int, add: bool = False, divisor: int = 1
) -> None:
    """Reads the frame in a slot into the values of its parts, divided by `divisor`; or adds it to them."""
    _decode_frame(slot, parts, step, digest, add, divisor, None)


def decode_means(slot: torch.Tensor, parts: Sequence[Part], step: int, digest: int, divisor: int) -> float:
    """`decode_frame`, and the sum of the squares of what it has written; NaN if a value is not finite.

    The last rounding of each value is left out of it, and it has the precision of float32.
    """
    squares = ctypes.c_double()
    _decode_frame(slot, parts, step, digest, False, divisor, ctypes.byref(squares))
    return squares.value


def _decode_frame(
    slot: torch.Tensor, parts: Sequence[Part], step: int, digest: int, add: bool, divisor: int, squares: object
) -> None:
    expected = ctypes.byref(_id(step, digest))
    _checked(
        _library.gz_noise_decode(
            slot.data_ptr(), slot.numel(), True, expected, _parts(parts), len(parts), add, divisor, squares,
            native.threads(),
        )
    )  # fmt: skip


def reduce(terms: Sequence[torch.Tensor | Sequence[Part]], slot: Slot, step: int, digest: int) -> Written:
    """Adds what all ranks have of some parts, in rank order, and writes the sum into a slot.

    A term is a frame in its slot, or the parts of this rank itself, which count as they are and bring their levels.
    The slot's parts say how to draw for the sums; neither their values nor their levels are used.
    """
    packed, kept = (_Term * len(terms))(), list[object]()
    for number, term in enumerate(terms):
        if isinstance(term, torch.Tensor):
            packed[number] = _Term(term.data_ptr(), term.numel(), True, None)
        else:
            kept.append(_parts(term))
            packed[number] = _Term(None, 0, True, ctypes.addressof(kept[-1]))  # type: ignore[arg-type]
    parts, expected, failed = _parts(slot.parts), _id(step, digest), ctypes.c_uint64()
    frame = _Frame(ctypes.addressof(parts), len(slot.parts), slot.out.data_ptr(), slot.out.numel(), True, 0, 0, 0)
    code = _library.gz_noise_reduce(
        packed, len(terms), ctypes.byref(expected), ctypes.byref(frame), expected.step, expected.digest,
        ctypes.byref(failed),
    )  # fmt: skip
    if code in _CORRUPT or code in _TRUNCATED:
        raise DamagedTerm(f"term {failed.value} of a sum: {_CORRUPT.get(code) or _TRUNCATED[code]}", failed.value)
    _checked(code, [slot])
    return Written(frame.size, frame.notch, bool(frame.poisoned))


def _encode(slots: Sequence[Slot], step: int, digest: int, framed: bool) -> list[Written]:
    frames, kept = (_Frame * len(slots))(), list[object]()
    for number, slot in enumerate(slots):
        parts = _parts(slot.parts)
        kept.append(parts)
        frames[number] = _Frame(
            ctypes.addressof(parts), len(slot.parts), slot.out.data_ptr(), slot.out.numel(), framed, slot.poisoned, 0, 0
        )
    expected = _id(step, digest)
    code = _library.gz_noise_encode(frames, len(slots), expected.step, expected.digest, native.threads())
    _checked(code, slots)
    return [Written(frame.size, frame.notch, bool(frame.poisoned)) for frame in frames]


def _parts(parts: Sequence[Part]) -> ctypes.Array[_Part]:
    if isinstance(parts, PackedParts):
        return (_Part * len(parts)).from_buffer(parts.array.data) if len(parts) else (_Part * 0)()
    packed = (_Part * len(parts))()
    for number, part in enumerate(parts):
        shape = None if part.shape is None else part.shape.data_ptr()
        packed[number] = _Part(
            part.values.data_ptr(), part.values.numel(), shape, part.start, part.key, part.offset, part.level
        )
    return packed


def _id(step: int, digest: int) -> _Id:
    return _Id(step & 0xFFFFFFFF, digest & 0xFFFFFFFF)


def _checked(code: int, slots: Sequence[Slot] = ()) -> None:
    if code in _TRUNCATED:
        raise Truncated(_TRUNCATED[code])
    if code in _CORRUPT:
        raise Corrupt(_CORRUPT[code])
    if code == _NO_ROOM:
        least = [blocks_offset([part.values.numel() for part in slot.parts]) for slot in slots]
        sizes = ", ".join(f"{slot.out.numel()} of at least {need}" for slot, need in zip(slots, least))
        raise Unsupported(f"a slot is too small for its frame at any level; bytes, without headers: {sizes}")
    if code < 0:
        raise Unsupported(f"the native engine of noise refused its arguments (code {code})")
