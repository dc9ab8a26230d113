"""The frame around every payload (docs/format.md, "Frame"): the only file that knows its offsets.

offset  size  field
0       2     magic "GZ"
2       1     format version
3       1     codec id
4       1     dtype code
5       1     flags: bit 0 = a checksum follows the header; the rest are reserved, zero
6       2     reserved, zero
8       8     numel
16      8     body bytes
24      8     checksum, if flag bit 0 is set
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .errors import Corrupt, Truncated, Unsupported

MAGIC = b"GZ"
VERSION = 1  # kept for ever: what it may hold is in docs/format.md, and in tests/golden/v1
HEADER_BYTES = 24
CHECKSUM_BYTES = 8
FLAG_CHECKSUM = 1

_HEADER = struct.Struct("<2sBBBBHQQ")
assert _HEADER.size == HEADER_BYTES

Column = npt.NDArray[np.int64]
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
MAX_NUMEL = 1 << 40


@dataclass(frozen=True)
class Header:
    codec_id: int
    dtype: torch.dtype
    numel: int
    body_bytes: int
    checksum: int | None = None  # the stored one; None when the frame carries none

    @property
    def body_offset(self) -> int:
        return HEADER_BYTES + (CHECKSUM_BYTES if self.checksum is not None else 0)

    @property
    def frame_bytes(self) -> int:
        return self.body_offset + self.body_bytes


def dtype_code(dtype: torch.dtype) -> int:
    try:
        return DTYPE_CODES[dtype]
    except KeyError:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_CODES)
        raise Unsupported(f"cannot encode a tensor of {dtype}: gradzip codes {names}") from None


def body_offset(check: bool) -> int:
    return HEADER_BYTES + (CHECKSUM_BYTES if check else 0)


def pack_header(codec_id: int, dtype: torch.dtype, numel: int, body_bytes: int, check: bool) -> bytes:
    flags = FLAG_CHECKSUM if check else 0
    return _HEADER.pack(MAGIC, VERSION, codec_id, dtype_code(dtype), flags, 0, numel, body_bytes)


def pack_headers(codec_id: int, dtype: torch.dtype, numels: Column, body_bytes: Column) -> npt.NDArray[np.uint8]:
    """Headers without checksums, a row for each frame."""
    one = np.frombuffer(pack_header(codec_id, dtype, 0, 0, False), np.uint8)
    rows = np.tile(one, (len(numels), 1))
    rows[:, 8:].view("<i8")[:] = np.stack([numels, body_bytes], 1)
    return rows


def write_header(
    frame: torch.Tensor, codec_id: int, dtype: torch.dtype, numel: int, body_bytes: int, check: bool
) -> None:
    """Fills the header (and checksum) of `frame`, whose body is already in place."""
    raw = pack_header(codec_id, dtype, numel, body_bytes, check)
    frame[:HEADER_BYTES] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(frame.device)
    if check:
        start = body_offset(True)
        total = checksum(frame[:HEADER_BYTES], 0) + checksum(frame[start : start + body_bytes], HEADER_BYTES // 4)
        stored = struct.pack("<Q", total % (1 << 64))
        frame[HEADER_BYTES:start] = torch.frombuffer(bytearray(stored), dtype=torch.uint8).to(frame.device)


def read_header(payload: torch.Tensor) -> Header:
    """Parses and checks the header; the frame must fill `payload` exactly."""
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise Unsupported(f"a payload is a 1-D uint8 tensor, not {payload.dim()}-D {payload.dtype}")
    if not payload.is_contiguous():
        raise Unsupported("a payload's bytes lie one behind the other: call .contiguous() first")
    return parse_header(payload[: HEADER_BYTES + CHECKSUM_BYTES].cpu().numpy().tobytes(), payload.numel())


def parse_header(head: bytes | memoryview, size: int) -> Header:
    """The same, of a frame of `size` bytes that begins with `head`: as much of it as a header can have."""
    if size < HEADER_BYTES:
        raise Truncated(f"the payload has {size} bytes; a frame header alone has {HEADER_BYTES}")
    magic, version, codec_id, code, flags, reserved, numel, body_bytes = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise Corrupt(f"not a gradzip frame: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        cure = "make the frame anew" if version < VERSION else "install a later gradzip"
        reads = f"this gradzip reads version {VERSION}: {cure}, and use the same gradzip on all ranks"
        raise Corrupt(f"frame of format version {version}; {reads}")
    if code not in _DTYPES:
        raise Corrupt(f"unknown dtype code {code} in the frame header")
    if flags & ~FLAG_CHECKSUM or reserved:
        raise Corrupt("reserved bits are set in the frame header")
    if numel > MAX_NUMEL:
        raise Corrupt(f"the frame header claims {numel} elements")
    stored = None
    if flags & FLAG_CHECKSUM:
        if size < HEADER_BYTES + CHECKSUM_BYTES:
            raise Truncated("the payload ends inside the frame header")
        stored = struct.unpack_from("<Q", head, HEADER_BYTES)[0]
    header = Header(codec_id, _DTYPES[code], numel, body_bytes, stored)
    if size < header.frame_bytes:
        raise Truncated(f"the payload has {size} bytes, its header says {header.frame_bytes}")
    if size > header.frame_bytes:
        raise Corrupt(f"{size - header.frame_bytes} bytes follow the end of the frame")
    return header


def verify_checksum(payload: torch.Tensor, header: Header) -> None:
    """Raises Corrupt when the frame carries a checksum that does not match."""
    if header.checksum is None:
        return
    body = payload[header.body_offset :]
    total = checksum(payload[:HEADER_BYTES], 0) + checksum(body, HEADER_BYTES // 4)
    if total % (1 << 64) != header.checksum:
        raise Corrupt("the frame's checksum does not match its contents: it was damaged on the way")


def checksum(data: torch.Tensor, first_word: int) -> int:
    """Sum over the 32-bit words of mix(word + index * golden): independent of the order of evaluation."""
    padded = data
    if data.numel() % 4:
        padded = torch.zeros((data.numel() + 3) // 4 * 4, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
    elif data.storage_offset() % 4:
        padded = data.clone()
    total = 0
    for start in range(0, padded.numel(), 1 << 24):  # bounded scratch memory
        words = padded[start : start + (1 << 24)].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        index = torch.arange(words.numel(), device=data.device) + (first_word + start // 4)
        total += int(mix32((words + index * 0x9E3779B9) & 0xFFFFFFFF).sum())
    return total


def mix32(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser on an int64 tensor of 32-bit values; the mix of docs/format.md."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        x = _multiply_low32(x, factor)
    return x ^ (x >> 16)


def _multiply_low32(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor mod 2^32 without overflowing int64."""
    low, high = x & 0xFFFF, x >> 16
    return (low * factor + (((high * (factor & 0xFFFF)) & 0xFFFF) << 16)) & 0xFFFFFFFF
