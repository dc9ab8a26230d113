"""Randomness as a function: the same numbers on every rank, on CPU and GPU, at any time and in any order.

Bits come from hashing (seed, step, name, index) with integer arithmetic. Nothing is drawn from torch's generators,
so a user's own random numbers stay what they were.
"""

from __future__ import annotations

import hashlib

import torch

from .. import wire


def key_of(seed: int, step: int, name: str) -> int:
    """A 64-bit key that stands for (seed, step, name)."""
    text = f"{seed}/{step}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def keyed_bits(key: int, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each index (int64, from 0 to 2^62), as an int64 tensor."""
    low, high = key & 0xFFFFFFFF, key >> 32
    x = wire.mix32((index & 0xFFFFFFFF) ^ low)
    return wire.mix32(((x + (index >> 32)) & 0xFFFFFFFF) ^ high)


def hash_bits(seed: int, step: int, name: str, index: torch.Tensor) -> torch.Tensor:
    """32 random bits for each index, as an int64 tensor; equal wherever seed, step, name and index are equal."""
    return keyed_bits(key_of(seed, step, name), index)


def uniform(key: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """float32 values spread evenly over (-1, 1), never 0; exact arithmetic, so that every device agrees."""
    numel = 1
    for size in shape:
        numel *= size
    bits = keyed_bits(key, torch.arange(numel, dtype=torch.int64, device=device))
    return (((bits >> 9) * 2 + 1 - (1 << 23)).to(torch.float32) / (1 << 23)).view(shape)
