"""The C++ engine (native/gradzip.h) behind the interface of engines/reference.py."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import Corrupt, EngineError, Truncated, Unsupported
from .layout import Floor, Job, float_layout, segments_of

NAME = "native"
VERSION = 9  # of native/gradzip.h and planner.h

_MODES = {"lossless": 0, "keep": 1, "near": 2, "paper": 3}

_TRUNCATED = {
    -1: "the gcomp body ends inside its head, tables or index",
    -2: "a block ends behind the end of the payload",
}
_CORRUPT = {
    -3: "reserved or contradictory bits in the head of the gcomp body",
    -4: "a code table is no complete code",
    -5: "the padding behind the block index is not zero",
    -6: "bytes follow the last block",
    -7: "a block of a reserved kind, or a sparse block in a frame that is not in near mode",
    -8: "a raw block has the wrong size or padding",
    -9: "the head of a dense block contradicts itself",
    -10: "the lanes of a dense block do not end where they began (near mode: or the floors differ from the encoder's)",
    -11: "a dense block holds another number of fields than its head says",
    -12: "a sparse block contradicts itself (or the floors differ from the encoder's)",
}
_BAD_LENGTHS = -4


class _Job(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("dtype", "mode", "keep", "truncate", "limit", "shift")] + [
        ("book", ctypes.c_uint32)
    ]


class _Floor(ctypes.Structure):
    _fields_ = [
        ("given", ctypes.c_void_p),
        ("theta", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("c0", ctypes.c_int32),
        ("c1", ctypes.c_int32),
        ("c2", ctypes.c_int32),
    ]


# A row for each piece (gz_piece): addresses, the number of values, the floor as in _Floor.
PIECE = np.dtype(
    [(name, "<u8") for name in ("values", "n", "given", "theta", "second")]
    + [(name, "<i4") for name in ("c0", "c1", "c2", "_")]
    + [(name, "<u8") for name in ("lengths", "lost")]
    + [(name, "<i4") for name in ("exact", "__")]
)
Pieces = npt.NDArray[np.void]
_PART = struct.Struct("<3Q")  # gz_part


def _load() -> ctypes.CDLL:
    """GRADZIP_LIBRARY names a library built by hand; otherwise it is the one installed with the package."""
    path = os.environ.get("GRADZIP_LIBRARY")
    if path is None:
        installed = resources.files("gradzip") / "libgradzip.so"
        if not installed.is_file():
            raise ImportError(
                "libgradzip.so is not installed: run `make setup`, or build it with CMake and set GRADZIP_LIBRARY"
            )
        path = str(installed)
    elif not Path(path).is_file():
        raise ImportError(f"GRADZIP_LIBRARY={path} is not a file")
    library = ctypes.CDLL(path)
    if not hasattr(library, "gz_version") or library.gz_version() != VERSION:
        raise ImportError(
            f"{path} was built from another version of gradzip's source: build it again (`make native` or `make setup`)"
        )
    i32, u32, i64, u64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
    pointer = ctypes.c_void_p
    signatures = {
        "gz_encode": (i64, [pointer, pointer, u64, pointer, pointer, pointer, u64, i32]),
        "gz_decode": (i64, [pointer, u64, i32, u64, pointer, i32, pointer, i32, pointer, i32]),
        "gz_decode_add_encode": (
            i64,
            [pointer, u64, i32, pointer, pointer, pointer, u64, pointer, pointer, pointer, u64],
        ),
        "gz_encode_frames": (i64, [pointer, pointer, u64, i32, ctypes.c_float, pointer, u64, i32]),
        "gz_lost": (i64, [pointer, pointer, u64, ctypes.c_float]),
        "gz_sum_frames": (i64, [pointer, pointer, u64, pointer, u64, i32, i32, u32, i32, pointer]),
        "gz_histogram": (i64, [pointer, pointer, u64, pointer, pointer]),
        "gz_code_lengths": (i64, [pointer, u64, i32, pointer]),
        "gz_floors": (None, [pointer, u64, pointer]),
        "gz_strided_sums": (None, [pointer, u64, pointer]),
        "gz_hash_names": (None, [pointer, u64, pointer, pointer, u64, pointer]),
        "gz_checksum": (u64, [pointer, u64, u64]),
        "gz_isa": (ctypes.c_char_p, []),
        "gz_available_isas": (ctypes.c_char_p, []),
        "gz_set_isa": (i64, [ctypes.c_char_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()
_threads = 1


def available_isas() -> list[str]:
    return str(_library.gz_available_isas().decode()).split(",")


def isa() -> str:
    return str(_library.gz_isa().decode())


def set_isa(name: str) -> None:
    """Chooses the instruction set; GRADZIP_ISA does the same at import."""
    if _library.gz_set_isa(name.encode()) < 0:
        raise EngineError(
            f"instruction set {name!r} is not available here: choose one of {', '.join(available_isas())}"
        )


def threads() -> int:
    return _threads


def set_threads(count: int) -> None:
    """Threads for large tensors (1 by default: the exchange runs beside the user's own computation)."""
    global _threads
    if count < 1:
        raise Unsupported(f"{count} threads: at least 1")
    _threads = count


if "GRADZIP_ISA" in os.environ:
    set_isa(os.environ["GRADZIP_ISA"])
if "GRADZIP_THREADS" in os.environ:
    set_threads(int(os.environ["GRADZIP_THREADS"]))


def encode(
    x: torch.Tensor,
    job: Job,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    lengths: torch.Tensor | None = None,
) -> int:
    """Writes the body of flat `x` into uint8 `out` and returns its length in bytes."""
    table = None if lengths is None else lengths.data_ptr()
    size = _library.gz_encode(
        ctypes.byref(_job(x.dtype, job)),
        x.data_ptr(),
        x.numel(),
        _floor(floor),
        table,
        out.data_ptr(),
        out.numel(),
        _threads,
    )
    return _checked_encode(size)


def decode(
    body: torch.Tensor,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    shift: int = 0,
    add: bool = False,
    book: torch.Tensor | None = None,
) -> None:
    """Reads a body into flat `out`, adding to what is there if `add`."""
    table = None if book is None else book.data_ptr()
    code = float_layout(out.dtype).code
    _checked_decode(
        _library.gz_decode(
            body.data_ptr(), body.numel(), code, out.numel(), _floor(floor), shift, table, add, out.data_ptr(), _threads
        )
    )


def decode_add_encode(
    body: torch.Tensor,
    local: torch.Tensor,
    job: Job,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    in_shift: int = 0,
    lengths: torch.Tensor | None = None,
    book: torch.Tensor | None = None,
) -> int:
    """One hop of a ring: the body of local + decoded(body), block by block. `lengths` None: the incoming tables."""
    table = None if lengths is None else lengths.data_ptr()
    incoming = None if book is None else book.data_ptr()
    size = _library.gz_decode_add_encode(
        body.data_ptr(), body.numel(), in_shift, incoming, ctypes.byref(_job(local.dtype, job)), local.data_ptr(),
        local.numel(), _floor(floor), table, out.data_ptr(), out.numel(),
    )  # fmt: skip
    if size < 0:
        _checked_decode(size)
    return _checked_encode(size)


# --- Several tensors in one call, each with a frame of its own; see gz_encode_frames for how they lie in memory ---

Floors = Sequence[torch.Tensor | Floor | None]


class DamagedFrames(Exception):
    """A part of a sum that cannot be decoded; `part` is its number."""

    def __init__(self, part: int) -> None:
        super().__init__(f"part {part} cannot be decoded")
        self.part = part


def encode_pieces(
    pieces: Pieces, dtype: torch.dtype, job: Job, codec: int, out: torch.Tensor, scale: float = 1.0
) -> int:
    """Writes a frame for each row of PIECE; returns the bytes written.

    `codec` is the frames' codec id. What is lost of each tensor, divided by `scale`, goes where its row says.
    """
    size = _library.gz_encode_frames(
        ctypes.byref(_job(dtype, job)), pieces.ctypes.data, len(pieces), codec, scale, out.data_ptr(), out.numel(),
        _threads,
    )  # fmt: skip
    return _checked_encode(size)


def note_lost_pieces(pieces: Pieces, dtype: torch.dtype, job: Job, scale: float = 1.0) -> None:
    """What encoding the float32 values of each row would lose, divided by `scale`, to where the row says."""
    _checked_encode(_library.gz_lost(ctypes.byref(_job(dtype, job)), pieces.ctypes.data, len(pieces), scale))


def sum_pieces(
    parts: Sequence[torch.Tensor | npt.NDArray[np.int64]],
    pieces: Pieces,
    dtype: torch.dtype,
    job: Job,
    codec: int,
    add: bool = False,
    divisor: int = 1,
) -> None:
    """The sum of all parts, in their order, into the values of each row, or added to what is there; then divided.

    A part is what encode_pieces wrote, or the addresses of values that count as if they had been coded and decoded.
    DamagedFrames if one cannot be decoded; the rows' values are anything then.
    """
    packed = bytearray()
    for part in parts:
        if isinstance(part, torch.Tensor):
            packed += _PART.pack(part.data_ptr(), part.numel(), 0)
        else:
            packed += _PART.pack(0, 0, part.ctypes.data)
    failed = ctypes.c_uint64()
    code = _library.gz_sum_frames(
        ctypes.byref(_job(dtype, job)), bytes(packed), len(parts), pieces.ctypes.data, len(pieces), codec, add,
        divisor, _threads, ctypes.byref(failed),
    )  # fmt: skip
    if code < 0:
        raise DamagedFrames(failed.value)


def floor_columns(floors: Floors) -> dict[str, npt.NDArray[np.int64]]:
    """What PIECE says of floors."""
    columns = {name: np.zeros(len(floors), np.int64) for name in ("given", "theta", "second", "c0", "c1", "c2")}
    for number, floor in enumerate(floors):
        if isinstance(floor, Floor):
            columns["theta"][number] = floor.theta.data_ptr()
            columns["second"][number] = 0 if floor.second is None else floor.second.data_ptr()
            columns["c0"][number], columns["c1"][number], columns["c2"][number] = floor.c0, floor.c1, floor.c2
        elif floor is not None:
            columns["given"][number] = floor.data_ptr()
    return columns


def histogram(x: torch.Tensor, job: Job, floor: torch.Tensor | Floor | None = None) -> torch.Tensor:
    """Sampled symbol counts of each segment, (segments, 256) int64."""
    counts = torch.zeros(segments_of(x.numel()), 256, dtype=torch.int64)
    _checked_encode(
        _library.gz_histogram(
            ctypes.byref(_job(x.dtype, job)), x.data_ptr(), x.numel(), _floor(floor), counts.data_ptr()
        )
    )
    return counts


def code_lengths(histograms: torch.Tensor, limit: int = 8) -> torch.Tensor:
    """Code lengths for each row of (segments, 256) counts."""
    counts = histograms.to("cpu", torch.int64).contiguous()
    lengths = torch.empty(counts.shape, dtype=torch.uint8)
    if _library.gz_code_lengths(counts.data_ptr(), counts.shape[0], limit, lengths.data_ptr()) < 0:
        raise Unsupported(f"codes of at most {limit} bits: choose 1 to 8")
    return lengths


def floors(rule: Floor) -> torch.Tensor:
    """The floors of a rule, (n,) int8."""
    out = torch.empty(rule.numel(), dtype=torch.int8)
    _library.gz_floors(_floor(rule), rule.numel(), out.data_ptr())
    return out


def strided_sums(
    first: npt.NDArray[np.int64], count: npt.NDArray[np.int64], stride: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Of each row the sum of so many int32, every stride-th from an address on."""
    rows, sums = np.stack([first, count, stride], 1), np.zeros(len(first), np.int64)
    _library.gz_strided_sums(rows.ctypes.data, len(rows), sums.ctypes.data)
    return sums


def hash_names(prefix: bytes, names: bytes, sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Of each name the first 8 bytes of its digest by blake2b, with the prefix; the names lie one behind the other."""
    digests = np.empty(len(sizes), np.uint64)
    _library.gz_hash_names(prefix, len(prefix), names, sizes.ctypes.data, len(sizes), digests.ctypes.data)
    return digests


def checksum(data: torch.Tensor, first_word: int) -> int:
    return int(_library.gz_checksum(data.data_ptr(), data.numel(), first_word))


def _job(dtype: torch.dtype, job: Job) -> _Job:
    return _Job(float_layout(dtype).code, _MODES[job.mode], job.keep, job.truncate, job.limit, job.shift, job.book)


def _floor(floor: torch.Tensor | Floor | None) -> ctypes._Pointer[_Floor] | None:
    if floor is None:
        return None
    if isinstance(floor, Floor):
        second = None if floor.second is None else floor.second.data_ptr()
        return ctypes.pointer(_Floor(None, floor.theta.data_ptr(), second, floor.c0, floor.c1, floor.c2))
    return ctypes.pointer(_Floor(floor.data_ptr(), None, None, 0, 0, 0))


def _checked_encode(size: int) -> int:
    if size == _BAD_LENGTHS:
        raise Unsupported("the code lengths given are no complete code")
    if size < 0:
        raise Unsupported(f"the native encoder refused its arguments (code {size})")
    return size


def _checked_decode(code: int) -> None:
    if code in _TRUNCATED:
        raise Truncated(_TRUNCATED[code])
    if code in _CORRUPT:
        raise Corrupt(_CORRUPT[code])
    if code < 0:
        raise Unsupported(f"the native decoder refused its arguments (code {code})")
