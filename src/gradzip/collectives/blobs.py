"""Blobs on the wire: a table of what follows, then the blobs. Whatever lies behind the last one has no meaning."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..errors import Corrupt, PeerError
from .sent import Sent
from .together import ENTRY, Bodies, Frames, Part

_NUMBER = struct.Struct("<q")
HEAD_ROOM = 40  # the table of a single blob
PEEK = 1 << 12  # bytes of a message on a GPU that the host looks at: enough for the tables of most


class Blob(NamedTuple):
    """Coded values: bytes, as many as a multiple of 8. Those that never leave their rank may have none."""

    data: torch.Tensor
    source: int | None = None  # the rank that it came from, for errors
    with_room: torch.Tensor | None = None  # the same with HEAD_ROOM bytes before it, which may be written
    values: Sequence[torch.Tensor] | Bodies | Sent | None = None  # what was coded, where that is at hand
    head: memoryview | None = None  # its first bytes in the host's memory, where the data is on a GPU


def content_of(blob: Blob) -> Part:
    if blob.values is not None:
        assert not isinstance(blob.values, Sent)
        return blob.values
    return blob.data if blob.head is None else Frames(blob.data, blob.head)


def values_of(blob: Blob) -> Sequence[torch.Tensor]:
    """What was coded, piece by piece; nothing if it has to be decoded."""
    known = blob.values
    if isinstance(known, Bodies):
        assert known.decoded is not None
        return known.decoded()
    return () if known is None or isinstance(known, Sent) else known


def pack(contributions: Sequence[Sequence[Blob]], *numbers: int) -> torch.Tensor:
    blobs = [blob.data for contribution in contributions for blob in contribution]
    width = len(contributions[0]) if contributions else 0
    table = [len(contributions), width, len(numbers), *numbers, *(blob.numel() for blob in blobs)]
    packed = struct.pack(f"<{1 + len(table)}q", len(table), *table)
    if len(blobs) == 1 and len(packed) == HEAD_ROOM and (whole := contributions[0][0].with_room) is not None:
        if whole.device.type == "cpu":
            whole.numpy()[:HEAD_ROOM].data[:] = packed
        else:
            whole[:HEAD_ROOM].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        return whole
    head = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    places = {blob.device for blob in blobs}  # routes may code on the CPU and on a GPU
    home = places.pop() if len(places) == 1 else head.device
    if any(blob.is_pinned() for blob in blobs if blob.device.type == "cpu"):
        torch.cuda.current_stream().synchronize()  # frames may still be on their way from a GPU
    return torch.cat([head.to(home), *(blob.to(home) for blob in blobs)])


def unpack(payload: torch.Tensor | None, source: int, head: memoryview | None = None) -> list[list[Blob]]:
    return [] if payload is None else unpack_numbered(payload, source, head)[0]


def unpack_each(received: Sequence[torch.Tensor | None], ranks: Sequence[int]) -> list[list[list[Blob]]]:
    """What each of these ranks packed. The host looks at all that came to a GPU in one go."""
    there = [part[:PEEK] for part in received if part is not None and part.device.type != "cpu"]
    seen = iter(torch.cat(there).cpu().split_with_sizes([part.numel() for part in there]) if there else ())
    messages = []
    for part, source in zip(received, ranks):
        on_host = part is None or part.device.type == "cpu"
        messages.append(unpack(part, source, None if on_host else next(seen).numpy().data))
    return messages


def unpack_numbered(
    payload: torch.Tensor, source: int, head: memoryview | None = None
) -> tuple[list[list[Blob]], list[int]]:
    """What `pack` was given; PeerError if the table does not fit the payload. `head`: its first bytes, if at hand."""
    room, on_host = payload.numel(), payload.device.type == "cpu"
    host = payload.numpy().data if on_host else head if head is not None else payload[:PEEK].cpu().numpy().data
    (length,) = _NUMBER.unpack_from(host) if room >= _NUMBER.size else (-1,)
    at = _NUMBER.size * (length + 1)
    if length < 3 or at > room:
        raise _damaged(source, f"its table has {length} entries in {room} bytes")
    if at > len(host):
        host = payload[: at + PEEK].cpu().numpy().data
    count, width, extra, *rest = struct.unpack_from(f"<{length}q", host, _NUMBER.size)
    numbers, sizes = rest[:extra], rest[extra:]
    if min(count, width, extra) < 0 or extra > len(rest) or count * width != len(sizes):
        raise _damaged(source, f"its table has {len(rest) - extra} sizes for {count} x {width} blobs")
    blobs = []
    for size in sizes:
        if not 0 <= size <= room - at:
            raise _damaged(source, f"a blob of {size} bytes does not fit into the {room - at} that are left")
        blobs.append(Blob(payload[at : at + size], source, head=None if on_host else host[at : at + size]))
        at += size
    return [blobs[i * width : (i + 1) * width] for i in range(count)], numbers


def _damaged(source: int, why: str) -> PeerError:
    return PeerError(f"rank {source} sent a damaged message: {why}")


def on_device(contributions: list[list[Blob]], device: torch.device) -> list[list[Blob]]:
    """The same blobs there, of which the host keeps a view. The copies end with the stream."""
    return [
        [blob._replace(data=blob.data.to(device, non_blocking=True), head=blob.data.numpy().data) for blob in blobs]
        for blobs in contributions
    ]


class Writer:
    """Fills a buffer with the frames of a blob."""

    def __init__(self, buffer: torch.Tensor, count: int) -> None:
        self._buffer, self._sizes = buffer, list[int]()
        self._at = HEAD_ROOM + ENTRY * count

    def write(self, encode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        frame = encode(self._buffer[self._at :])
        end = self._at + frame.numel()
        padded = end + -frame.numel() % ENTRY
        self._buffer[end:padded] = 0
        self._at = padded
        self._sizes.append(frame.numel())
        return frame

    def blob(self) -> Blob:
        table = torch.tensor(self._sizes, dtype=torch.int64).view(torch.uint8)
        self._buffer[HEAD_ROOM : HEAD_ROOM + table.numel()] = table.to(self._buffer.device)
        return Blob(self._buffer[HEAD_ROOM : self._at], None, self._buffer[: self._at])


def places(data: torch.Tensor, count: int) -> list[slice]:
    """Where in a blob's data its frames are."""
    at = ENTRY * count
    sizes = data[:at].cpu().clone().view(torch.int64).tolist() if data.numel() >= at else [-1]
    found = []
    for size in sizes:
        if size < 0 or at + size > data.numel():
            raise Corrupt(f"it does not hold the {count} frames that it should")
        found.append(slice(at, at + size))
        at += size + -size % ENTRY
    if at != data.numel():
        raise Corrupt(f"{data.numel() - at} bytes follow the last frame")
    return found
