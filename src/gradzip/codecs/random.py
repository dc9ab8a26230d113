"""Randomness as a function: the same numbers on every rank, on CPU and GPU, at any time and in any order.

Bits come from hashing (seed, step, name, index) with integer arithmetic. Nothing is drawn from torch's generators,
so a user's own random numbers stay what they were.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from .. import engines, wire
from ..errors import EngineError

Keys = npt.NDArray[np.uint64]


def key_of(seed: int, step: int, name: str) -> int:
    """A 64-bit key that stands for (seed, step, name)."""
    text = f"{seed}/{step}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def keys_of(seed: int, step: int, names: Sequence[str]) -> Keys:
    """`key_of` of each name: about 1 us each, 0.2 by the native engine."""
    native, text = _native(), "".join(names)
    if native is not None and text.isascii():
        sizes = np.fromiter(map(len, names), np.uint64, len(names))
        keys: Keys = native.hash_names(f"{seed}/{step}/".encode(), text.encode(), sizes)
        return keys
    hashed = [hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(hashed), "<u8").astype(np.uint64)


@functools.cache
def _native() -> ModuleType | None:
    try:
        return engines.load("native")
    except EngineError:
        return None


def keyed_bits(key: int, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each index (int64, from 0 to 2^62), as an int64 tensor."""
    return bits_of(key & 0xFFFFFFFF, key >> 32, index)


def bits_of(low: torch.Tensor | int, high: torch.Tensor | int, index: torch.Tensor) -> torch.Tensor:
    """The same of the lower and the upper half of keys, which may be beside the indices."""
    x = wire.mix32((index & 0xFFFFFFFF) ^ low)
    return wire.mix32(((x + (index >> 32)) & 0xFFFFFFFF) ^ high)


def halves(keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper halves of keys, as columns for `bits_of`."""
    low, high = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64), (keys >> np.uint64(32)).astype(np.int64)
    return torch.from_numpy(low)[:, None], torch.from_numpy(high)[:, None]


def hash_bits(seed: int, step: int, name: str, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each index, as an int64 tensor; equal wherever seed, step, name and index are equal."""
    return keyed_bits(key_of(seed, step, name), index)


_CHUNK = 1 << 24  # indices hashed at once: bounded scratch memory, and within one value of the index's upper half
_CHUNK_ON_CPU = 1 << 16  # as many as stay in the cache from one operation to the next


def stream(key: int, numel: int, bits: int, device: torch.device) -> torch.Tensor:
    """The upper `bits` (1 to 31) of keyed_bits for the indices 0 to numel - 1, as an int32 tensor; the fast way."""
    out = torch.empty(numel, dtype=torch.int32, device=device)
    chunk = _CHUNK_ON_CPU if out.device.type == "cpu" else _CHUNK
    for start in range(0, numel, chunk):
        part = out[start : start + chunk]
        low = start & 0xFFFFFFFF
        torch.arange(low - (low >> 31 << 32), low - (low >> 31 << 32) + part.numel(), out=part)
        draw(part, _signed(key), _signed(key >> 32), bits, start >> 32)
    return out


def streams(keys: Keys, numel: int, bits: int) -> torch.Tensor:
    """`stream` for several keys, a row for each, on the CPU; `numel` is below 2^31."""
    index = torch.arange(numel, dtype=torch.int32)
    halves = torch.from_numpy(keys.astype("<u8").view("<i4").reshape(-1, 2))  # the lower ones and the upper ones
    out = torch.empty(len(keys), numel, dtype=torch.int32)
    rows = max(1, _CHUNK_ON_CPU // max(numel, 1))
    for start in range(0, len(keys), rows):
        part, half = out[start : start + rows], halves[start : start + rows]
        part[:] = index
        draw(part, half[:, :1], half[:, 1:], bits)
    return out


def draw(index: torch.Tensor, low: torch.Tensor | int, high: torch.Tensor | int, bits: int, above: int = 0) -> None:
    """Replaces indices by their random bits: int32, as are the lower and the upper half of keys beside them.

    `above`: the upper half of the indices.
    """
    index ^= low
    _mix32(index)
    index += above
    index ^= high
    _mix32(index)
    index.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)


def uniform(key: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """float32 values spread evenly over (-1, 1), never 0; exact arithmetic, so that every device agrees."""
    odd = stream(key, math.prod(shape), 23, device).mul_(2).sub_((1 << 23) - 1)
    return (odd.float() / (1 << 23)).view(shape)


def _mix32(x: torch.Tensor) -> None:
    """wire.mix32 in place on int32: multiplication wraps, and shifts drag the sign along, which is masked off."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= (x >> shift).bitwise_and_((1 << 32 - shift) - 1)
        x *= _signed(factor)
    x ^= (x >> 16).bitwise_and_(0xFFFF)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number."""
    word &= 0xFFFFFFFF
    return word - (word >> 31 << 32)
