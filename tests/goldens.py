"""Frames that are kept: what each is made of, and where it lies (tests/golden/v1).

    python tests/goldens.py     adds those that are missing; refused if one that is there would change

Inputs come from integer arithmetic alone, so that no change of a random generator can touch them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from handmade import HANDMADE

from gradzip import Codec, Context, Floor, engines, parse, wire
from gradzip.codecs import books
from gradzip.codecs.books import Book
from gradzip.codecs.scaled import Scaled
from gradzip.engines import noise_layout
from gradzip.engines.noise_layout import Part, Slot
from gradzip.engines.scaled_layout import Form, Parts

FOLDER = Path(__file__).parent / "golden" / "v1"
LARGEST = 9000  # bytes of a frame: they stay in the repository for ever


def hashed(numel: int, salt: int) -> np.ndarray:
    """32 bits for each index, by the mix of the frame's checksum."""
    x = (np.arange(numel, dtype=np.uint64) * 0x9E3779B9 + salt * 0x85EBCA6B) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> np.uint64(shift)) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return (x ^ x >> np.uint64(16)).astype(np.uint32)


def falling(numel: int, salt: int, top: int, bits: int = 32) -> np.ndarray:
    """Exponent fields like those of gradients: each one below `top` is half as frequent as that above it."""
    noise = hashed(numel, salt).astype(np.int64)
    trailing_zeros = sum((noise % (1 << k) == 0).astype(np.int64) for k in range(1, bits))
    return np.maximum(top - trailing_zeros, 1)


def float32(exponent: np.ndarray, salt: int) -> np.ndarray:
    """Bit patterns with those exponent fields and any sign and mantissa."""
    noise = hashed(exponent.size, salt)
    return (noise & 0x80000000) | (exponent.astype(np.uint32) << 23) | (noise & 0x7FFFFF)


def gradient(numel: int, salt: int) -> np.ndarray:
    bits = float32(falling(numel, salt, 118), salt + 1)
    return np.where(hashed(numel, salt + 2) % 16 == 0, 0, bits).astype(np.uint32)


def mostly_zero(numel: int, salt: int) -> np.ndarray:
    return np.where(hashed(numel, salt) % 64 == 0, gradient(numel, salt), 0).astype(np.uint32)


def odd_ones(numel: int, salt: int) -> np.ndarray:
    """A gradient with what is no ordinary number in it."""
    odd = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFABCDEF, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF], np.uint32)
    picked = odd[hashed(numel, salt + 3) % odd.size]
    return np.where(hashed(numel, salt + 4) % 32 == 0, picked, gradient(numel, salt)).astype(np.uint32)


def tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)


def tensor16(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(dtype)


def halves(numel: int, salt: int) -> np.ndarray:
    """float16 patterns: exponents of 5 bits."""
    noise = hashed(numel, salt)
    return (noise & 0x8000) | falling(numel, salt, 14, bits=12).astype(np.uint32) << 10 | (noise >> 16 & 0x3FF)


def given_floor(numel: int, salt: int, grid: int) -> torch.Tensor:
    floors = grid + (hashed(numel, salt) % 5).astype(np.int64) - 2
    return torch.from_numpy(np.where(hashed(numel, salt + 1) % 50 == 0, -128, floors).astype(np.int8))


def rule(numel: int, salt: int, second: bool) -> Floor:
    theta = tensor(
        np.where(hashed(numel, salt) % 40 == 0, 0, float32(falling(numel, salt, 124), salt)).astype(np.uint32)
    )
    moment = tensor(float32(falling(numel, salt + 5, 90), salt + 6) & 0x7FFFFFFF) if second else None
    return Floor(theta, moment, c0=-134 - (45 if second else 0), c1=1, c2=80)


def given_shape(numel: int, salt: int) -> torch.Tensor:
    return torch.from_numpy((-(hashed(numel, salt).astype(np.int64) % 13)).astype(np.int8))


def fixed_book() -> Book:
    lengths = torch.zeros(256, dtype=torch.uint8)
    lengths[[0, 255, 1, 254, 2, 253]] = torch.tensor([4, 1, 3, 3, 4, 4], dtype=torch.uint8)
    return Book(0xB00C, lengths)


@dataclass(frozen=True)
class Golden:
    codec: str
    x: torch.Tensor
    floor: torch.Tensor | Floor | None = None
    shift: int = 0
    check: bool = False
    shape: torch.Tensor | None = None
    rank: int = 0
    world: int = 1

    def context(self) -> Context:
        ctx = Context(
            "layer.weight", 7, 11, self.rank, self.world, floor=self.floor, shift=self.shift, shape=self.shape
        )
        if "book=shared" in self.codec:
            ctx.state["book"] = fixed_book()
            books.install(fixed_book())
        return ctx

    def parsed(self) -> Codec:
        return parse(self.codec)

    def encode(self) -> bytes:
        return self.parsed().encode(self.x, self.context(), check=self.check).numpy().tobytes()


def goldens() -> dict[str, Golden]:
    lossless, near, paper = "gcomp:mode=lossless", "gcomp", "gcomp:mode=paper"
    exact = gradient(1500, 1)
    two_blocks = gradient(4096 + 300, 2)
    frames = {
        "lossless-float32": Golden(lossless, tensor(exact)),
        "lossless-float32-checked": Golden(lossless, tensor(exact[:500]), check=True),
        "lossless-odd-ones": Golden(lossless, tensor(odd_ones(1500, 3))),
        "lossless-random-bits": Golden(lossless, tensor(hashed(1500, 4))),
        "lossless-one-exponent": Golden(lossless, tensor(float32(np.full(1500, 120), 5))),
        "lossless-zeros": Golden(lossless, torch.zeros(3 * 4096 + 7)),
        "lossless-empty": Golden(lossless, torch.zeros(0)),
        "lossless-one-value": Golden(lossless, tensor(exact[1:2])),
        "lossless-trailing-zero-bits": Golden(lossless, tensor(two_blocks & 0xFFFF0000)),
        "lossless-limit-2": Golden(f"{lossless},limit=2", tensor(exact)),
        "lossless-shared-book": Golden(f"{lossless},book=shared", tensor(exact)),
        "lossless-bfloat16": Golden(lossless, tensor16(two_blocks >> 16, torch.bfloat16)),
        "lossless-float16": Golden(lossless, tensor16(halves(4096 + 100, 6), torch.float16)),
        "lossless-float16-random-bits": Golden(lossless, tensor16(hashed(1501, 7) >> 16, torch.float16)),
        "keep-0": Golden("gcomp:keep=0", tensor(two_blocks)),
        "keep-7": Golden("gcomp:keep=7", tensor(two_blocks)),
        "keep-12-truncate": Golden("gcomp:keep=12,round=truncate", tensor(odd_ones(2000, 8))),
        "keep-23": Golden("gcomp:keep=23", tensor(odd_ones(1500, 9))),
        "near-int8": Golden(near, tensor(two_blocks), given_floor(two_blocks.size, 10, -17)),
        "near-odd-ones": Golden(near, tensor(odd_ones(2000, 11)), given_floor(2000, 12, -16)),
        "near-sparse": Golden(near, tensor(mostly_zero(3 * 4096 + 900, 13)), given_floor(3 * 4096 + 900, 14, -18)),
        "near-coarsest": Golden(near, tensor(float32(falling(1500, 23, 235), 24)), given_floor(1500, 25, 104), shift=1),
        "near-rule": Golden(near, tensor(two_blocks), rule(two_blocks.size, 15, second=False)),
        "near-rule-second-shift": Golden(near, tensor(two_blocks), rule(two_blocks.size, 16, second=True), shift=3),
        "paper-int8": Golden(paper, tensor(odd_ones(2200, 17)), given_floor(2200, 18, 4)),
        "paper-rule": Golden(paper, tensor(gradient(2200, 19)), rule(2200, 20, second=True)),
        "identity": Golden("identity", tensor(exact[:300])),
        "cast-bf16": Golden("cast:to=bf16", tensor(exact[:300])),
        "cast-fp16": Golden("cast:to=fp16", tensor(exact[:300])),
        "topk": Golden("topk:ratio=0.05", tensor(exact)),
        "topk-dense": Golden("topk:ratio=0.5", tensor(exact)),
        "randomk": Golden("randomk:ratio=0.05", tensor(exact)),
        "randomblock": Golden("randomblock:ratio=0.05", tensor(exact)),
        "threshold": Golden("threshold:value=0.003", tensor(exact)),
        "dgc": Golden("dgc:ratio=0.02", tensor(exact)),
        "sign": Golden("sign", tensor(exact)),
        "onebit": Golden("onebit", tensor(exact)),
        "qsgd": Golden("qsgd:bits=5", tensor(exact)),
        "qsgd-bfloat16": Golden("qsgd:bits=2,bucket=64", tensor16(exact >> 16, torch.bfloat16)),
        "terngrad": Golden("terngrad", tensor(exact)),
        "natural": Golden("natural", tensor(exact)),
        "natural-4-bits": Golden("natural:bits=4", tensor(exact)),
        "noise": Golden("noise", tensor(two_blocks), rank=1, world=4),
        "noise-finest": Golden("noise:share=0.01%", tensor(exact)),  # low bits in planes, and giants
        "noise-coarsest": Golden("noise:share=30%", tensor(mostly_zero(3 * 4096 + 900, 26))),  # a mask of rows
        "noise-shape": Golden("noise", tensor(two_blocks), shape=given_shape(two_blocks.size, 27), rank=2, world=4),
        "noise-failed": Golden("noise", tensor(odd_ones(1500, 29))),  # a level of NaN
        "noise-zeros": Golden("noise", torch.zeros(9000)),
        "noise-bfloat16": Golden("noise", tensor16(exact >> 16, torch.bfloat16), check=True),
        "int8": Golden("int8", tensor(exact), rank=1, world=4),
        "int8-hadamard": Golden("int8:block=256,hadamard=true", tensor(exact), rank=3, world=4),
        "int8-odd-ones": Golden("int8:block=64", tensor(odd_ones(1500, 30))),
        "int4": Golden("int4", tensor(exact), check=True),
        "int4-hadamard": Golden("int4:block=64,hadamard=true", tensor16(exact >> 16, torch.bfloat16)),
        "fp8": Golden("fp8", tensor(odd_ones(1500, 31)), rank=1, world=2),
        "fp8-float16": Golden("fp8:block=32", tensor16(halves(1500, 32), torch.float16)),
    }
    return frames


@dataclass(frozen=True)
class Message:
    """A frame of many parts, as an exchange sends it: rank 1's own, or the sum of rank 0's values and that frame."""

    codec: str
    is_sum: bool = False
    levels: tuple[float, ...] = (0.0007, 0.0009, math.nan, 0.0)  # of noise
    slot: int = 0  # bytes of a slot that is too small for these levels; 0: as many as the frame can have
    poisoned: bool = False
    sizes: tuple[int, ...] = (700, 1300, 40, 9)

    def values(self, salt: int) -> list[torch.Tensor]:
        return [tensor(gradient(size, salt + 10 * i)) for i, size in enumerate(self.sizes)]

    def form(self) -> Form:
        codec = parse(self.codec)
        assert isinstance(codec, Scaled)
        return codec.form

    def encode(self) -> bytes:
        frame = self._noise() if self.codec == "noise" else self._scaled()
        return frame.numpy().tobytes()

    def noise_parts(self, rank: int, hop: str = "own") -> list[Part]:
        """The second part is the end of its tensor, and has a shape."""
        shapes, starts = [None, given_shape(self.sizes[1], 44), None, None], [0, 4096, 0, 0]
        offset = noise_layout.offset_of(rank, 2) if hop == "own" else 0
        return [
            Part(x, float(np.float32(level)), shape, start, noise_layout.key_of(11, 7, f"w{i}", hop, start), offset)
            for i, (x, level, shape, start) in enumerate(zip(self.values(40 + rank), self.levels, shapes, starts))
        ]

    def _noise(self) -> torch.Tensor:
        engine, bound = engines.noise("cpu"), wire.HEADER_BYTES + noise_layout.body_bound(self.sizes)
        frame = torch.zeros(self.slot or bound, dtype=torch.uint8)
        (written,) = engine.encode_frames([Slot(self.noise_parts(1), frame, self.poisoned)], 7, DIGEST)
        if self.is_sum:
            slot = Slot(self.noise_parts(0, "sum"), torch.zeros(bound, dtype=torch.uint8))
            written, frame = engine.reduce([self.noise_parts(0), frame], slot, 7, DIGEST), slot.out
        return frame[: written.size]

    def scaled_parts(self, rank: int, hop: str = "own") -> Parts:
        values = self.values(40 + rank)
        keys, signs = (
            [noise_layout.key_of(11, 7, f"w{i}", what, 0) for i in range(len(values))] for what in (hop, "signs")
        )
        offset = noise_layout.offset_of(rank, 2) & 0xFFFFFFFF if hop == "own" else 0
        return Parts(self.form(), values, values, [32 * i for i in range(len(values))]).fill(keys, signs, offset)

    def _scaled(self) -> torch.Tensor:
        engine, parts = engines.scaled("cpu"), self.scaled_parts(1)
        frame = torch.zeros(parts.places.size, dtype=torch.uint8)
        engine.code(parts, [], out=frame)
        if not self.is_sum:
            return frame
        total = torch.zeros_like(frame)
        engine.code(self.scaled_parts(0, "sum"), [None, frame], out=total)
        return total


DIGEST = 0xD16E57  # of no program: any number that frames carry
MESSAGES = {
    "message-noise": Message("noise"),
    "message-noise-sum": Message("noise", is_sum=True),
    "message-noise-raw": Message("noise", levels=(1e-9, 1e-9, 1e-9, 1e-9)),
    "message-noise-notch": Message("noise", slot=2800),
    "message-noise-poisoned": Message("noise", poisoned=True),
    "message-int8": Message("int8"),
    "message-int8-sum": Message("int8:hadamard=true", is_sum=True),
    "message-int4": Message("int4:hadamard=true"),
    "message-int4-sum": Message("int4", is_sum=True),
    "message-fp8-sum": Message("fp8", is_sum=True),
}


def all_frames() -> dict[str, Callable[[], bytes]]:
    """Every file by its name, and what makes it."""
    made: dict[str, Callable[[], bytes]] = {name: golden.encode for name, golden in goldens().items()}
    made |= {name: message.encode for name, message in MESSAGES.items()}
    return made | {f"handmade-{name}": frame.encode for name, frame in HANDMADE.items()}


def write() -> None:
    frames = {FOLDER / f"{name}.bin": encode() for name, encode in all_frames().items()}
    if changed := [path.stem for path, data in frames.items() if path.exists() and path.read_bytes() != data]:
        kept = f"frames of format version {wire.VERSION} are kept for ever"
        sys.exit(f"refused: {kept}, and {', '.join(changed)} would change: that takes a new version")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, data in frames.items():
        print(f"{'same' if path.exists() else 'new':8}{len(data):6} bytes  {path.stem}")
        path.write_bytes(data)


if __name__ == "__main__":
    write()
