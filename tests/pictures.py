"""Reads PNG files as browsers write them: 8 bits per channel, not interlaced."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np


def read_png(path: Path) -> np.ndarray:
    """The picture as (height, width, 3) bytes."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, head = 8, b"", b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        head, packed = (body if kind == b"IHDR" else head), packed + (body if kind == b"IDAT" else b"")
        at += 12 + length
    width, height, depth, colour, *_, interlaced = struct.unpack(">IIBBBBB", head)
    channels = {2: 3, 6: 4}[colour]
    assert (depth, interlaced) == (8, 0)
    raw, size = zlib.decompress(packed), width * channels
    rows, before = [], bytearray(size)
    for start in range(0, height * (size + 1), size + 1):
        before = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + size]), before, channels)
        rows.append(bytes(before))
    return np.frombuffer(b"".join(rows), np.uint8).reshape(height, width, channels)[..., :3]


def _unfiltered(kind: int, row: bytearray, above: bytearray, step: int) -> bytearray:
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(row, above))
    for i in range(len(row) if kind else 0):
        left, corner = (row[i - step], above[i - step]) if i >= step else (0, 0)
        up = above[i]
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            by_left, by_up, by_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            guess = left if by_left <= by_up and by_left <= by_corner else up if by_up <= by_corner else corner
        row[i] = (row[i] + guess) & 255
    return row
