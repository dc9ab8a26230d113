"""Blobs on the wire: a table of what follows, then the blobs. Whatever lies behind the last one has no meaning."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import PeerError

_NUMBER = struct.Struct("<q")
HEAD_ROOM = 40  # the table of a single blob


class Blob(NamedTuple):
    """Coded values: bytes, as many as a multiple of 8. Those that never leave their rank may have none."""

    data: torch.Tensor
    source: int | None = None  # the rank that it came from, for errors
    with_room: torch.Tensor | None = None  # the same with HEAD_ROOM bytes before it, which may be written
    values: Sequence[torch.Tensor] | None = None  # what was coded, piece by piece, where that is at hand


def pack(contributions: Sequence[Sequence[Blob]], *numbers: int) -> torch.Tensor:
    blobs = [blob.data for contribution in contributions for blob in contribution]
    width = len(contributions[0]) if contributions else 0
    table = [len(contributions), width, len(numbers), *numbers, *(blob.numel() for blob in blobs)]
    packed = struct.pack(f"<{1 + len(table)}q", len(table), *table)
    if len(blobs) == 1 and len(packed) == HEAD_ROOM and (whole := contributions[0][0].with_room) is not None:
        if whole.device.type == "cpu":
            whole.numpy()[:HEAD_ROOM].data[:] = packed
        else:
            whole[:HEAD_ROOM] = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(whole.device)
        return whole
    head = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    places = {blob.device for blob in blobs}  # routes may code on the CPU and on a GPU
    home = places.pop() if len(places) == 1 else head.device
    return torch.cat([head.to(home), *(blob.to(home) for blob in blobs)])


def unpack(payload: torch.Tensor | None, source: int) -> list[list[Blob]]:
    return [] if payload is None else unpack_numbered(payload, source)[0]


def unpack_numbered(payload: torch.Tensor, source: int) -> tuple[list[list[Blob]], list[int]]:
    """What `pack` was given; PeerError if the table does not fit the payload."""
    room = payload.numel()
    host = payload.cpu().numpy().data
    (length,) = _NUMBER.unpack_from(host) if room >= _NUMBER.size else (-1,)
    at = _NUMBER.size * (length + 1)
    if length < 3 or at > room:
        raise _damaged(source, f"its table has {length} entries in {room} bytes")
    count, width, extra, *rest = struct.unpack_from(f"<{length}q", host, _NUMBER.size)
    numbers, sizes = rest[:extra], rest[extra:]
    if min(count, width, extra) < 0 or extra > len(rest) or count * width != len(sizes):
        raise _damaged(source, f"its table has {len(rest) - extra} sizes for {count} x {width} blobs")
    blobs = []
    for size in sizes:
        if not 0 <= size <= room - at:
            raise _damaged(source, f"a blob of {size} bytes does not fit into the {room - at} that are left")
        blobs.append(Blob(payload[at : at + size], source))
        at += size
    return [blobs[i * width : (i + 1) * width] for i in range(count)], numbers


def _damaged(source: int, why: str) -> PeerError:
    return PeerError(f"rank {source} sent a damaged message: {why}")


def unpack_all(
    received: Sequence[torch.Tensor | None], ranks: Sequence[int], rank: int, own: list[list[Blob]]
) -> list[list[Blob]]:
    """The contributions of all ranks that sent some; `own` are those of this one, which is number `rank` of them."""
    members = [own if i == rank else unpack(part, ranks[i]) for i, part in enumerate(received)]
    return [contribution for member in members for contribution in member]
