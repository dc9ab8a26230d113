"""What the engines of the codec `noise` share: constants, levels and draws of docs/format.md, "Noise"."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from ..errors import Unsupported
from .noise_tables import LENGTHS, REACHES, THRESHOLDS

CODEC = 17  # its id in frames
BLOCK = 8192  # values
ROW = 128  # values; a lane holds 8 of them
LANES = 16
ALIGN = 32  # every part starts at a multiple of so many values
HEAD_BYTES = 16  # of a body
BLOCK_HEAD_BYTES = 4
LIMIT = 12  # bits of the longest code
ESCAPE = 15
RAW = 255  # the class of a block that is not coded
CLASSES = len(THRESHOLDS) + 1
WITHOUT_LOW_BITS = 16  # classes below this one have no low bits
WIDE = WITHOUT_LOW_BITS + 12  # the first class with 4 low bits
NARROW_MOST = 119  # |q| up to which a value is no giant in a class below WIDE
WIDE_MOST = 32767  # what a giant's magnitude counts as, less 1, in the other classes
GIANT = -128  # stands for a giant in the list of escapes
MOST_NOTCH = 127
NOTCHES = (0, 1, 2, 3, *range(4, MOST_NOTCH + 1, 4))  # those that an encoder tries, in this order
POISONED = 1  # flag: everything decodes to NaN
SMALLEST_LEVEL = 2.0**-126
LARGEST_LEVEL = float(np.finfo(np.float32).max)
DEEPEST = -12  # of a shape
STRIDE = 1 << 32  # draws of a tensor have another key after so many values


def low_bits(number: int) -> int:
    """The raw low bits of a class."""
    return 0 if number < WITHOUT_LOW_BITS else 1 + (number - WITHOUT_LOW_BITS) // 4


def table_of(number: int) -> int:
    return number if number < WITHOUT_LOW_BITS else WITHOUT_LOW_BITS + (number - WITHOUT_LOW_BITS) % 4


def reach_of(number: int) -> int:
    return REACHES[table_of(number)]


def class_of(total: int, count: int) -> int:
    """The class of `count` integers whose magnitudes add up to `total`."""
    return sum(256 * total >= threshold * count for threshold in THRESHOLDS)


def lengths_of(table: int) -> list[int]:
    """Code lengths of the 256 pairs."""
    return [byte >> shift & 15 for byte in bytes.fromhex(LENGTHS[table]) for shift in (0, 4)]


def codes_of(table: int) -> dict[int, str]:
    """The canonical code of each pair that has one, as bits, the first one first."""
    lengths = lengths_of(table)
    code, last, codes = 0, 0, dict[int, str]()
    for length, pair in sorted((length, pair) for pair, length in enumerate(lengths) if length):
        code <<= length - last
        codes[pair] = format(code, f"0{length}b")
        code, last = code + 1, length
    return codes


def padded(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def blocks_of(counts: Sequence[int]) -> int:
    """Blocks of a frame whose parts have so many values."""
    return -(-sum(map(padded, counts)) // BLOCK)


def index_offset(parts: int) -> int:
    return HEAD_BYTES + 4 * parts


def blocks_offset(counts: Sequence[int]) -> int:
    return index_offset(len(counts)) + -(-2 * blocks_of(counts) // 4) * 4


def body_bound(counts: Sequence[int]) -> int:
    """No body is longer: every block raw."""
    return blocks_offset(counts) + BLOCK_HEAD_BYTES * blocks_of(counts) + 4 * sum(map(padded, counts))


@dataclass(frozen=True)
class Statistics:
    """What a level is made of."""

    squares: float  # sum of the squares of the finite values, in the order that docs/format.md gives
    weights: int  # sum of 4^(d + 12); without a shape 4^12 for each value
    finite: bool  # whether all values are


class Measured(NamedTuple):
    """The statistics of many tensors."""

    squares: npt.NDArray[np.float64]
    weights: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Part:
    """Values of one tensor that lie in a frame one behind the other, and how to draw for them."""

    values: torch.Tensor  # flat float32: what is encoded, or where decoded values go
    level: float = 0.0  # nominal; decoders take it from the frame
    shape: torch.Tensor | None = None  # flat int8, -12 to 0; None: all 0
    start: int = 0  # index of the first value in its tensor
    key: int = 0  # see key_of
    offset: int = 0  # added to the draws: see offset_of


# A part as native/gradzip.h has it.
_PART = np.dtype(
    [
        ("values", "<u8"),
        ("n", "<u8"),
        ("shape", "<u8"),
        ("start", "<u8"),
        ("key", "<u8"),
        ("offset", "<u4"),
        ("level", "<f4"),
    ]
)


class Shapes:
    """The shapes of some tensors, with their addresses; None: a tensor has none."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tensors
        self.addresses = np.array([0 if shape is None else shape.data_ptr() for shape in tensors], np.uint64)


_WITHOUT = Shapes([])


class PackedParts(Sequence[Part]):
    """Parts that stay where they are, as an array that is made once and filled in again in each step."""

    def __init__(
        self, values: Sequence[torch.Tensor], tensors: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
    ) -> None:
        """`tensors` and `starts` tell of which tensor the values of each part are, and from where on."""
        self._values, self._tensors, self._shapes = values, tensors, _WITHOUT
        self.array = np.zeros(len(values), _PART)
        self.array["values"] = [part.data_ptr() for part in values]
        self.array["n"] = [part.numel() for part in values]
        self.array["start"] = starts

    def fill(
        self,
        keys: npt.NDArray[np.uint64],
        offset: int = 0,
        levels: npt.NDArray[np.float32] | None = None,
        shapes: Shapes | None = None,
    ) -> PackedParts:
        """Takes what changes from step to step; keys, levels and shapes are those of whole tensors."""
        self.array["key"] = keys[self._tensors]
        self.array["offset"] = offset
        self.array["level"] = 0 if levels is None else levels[self._tensors]
        shapes = shapes or _WITHOUT
        if shapes is not self._shapes:
            found = shapes.addresses[self._tensors] if shapes.tensors else np.zeros(len(self), np.uint64)
            self.array["shape"] = np.where(found > 0, found + self.array["start"], 0)
            self._shapes = shapes
        return self

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, number: int) -> Part: ...
    @overload
    def __getitem__(self, number: slice) -> list[Part]: ...
    def __getitem__(self, number: int | slice) -> Part | list[Part]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        row, values = self.array[number], self._values[number]
        start = int(row["start"])
        whole = self._shapes.tensors[self._tensors[number]] if row["shape"] else None
        shape = None if whole is None else whole[start : start + values.numel()]
        return Part(values, float(row["level"]), shape, start, int(row["key"]), int(row["offset"]))


@dataclass(frozen=True)
class Slot:
    """Room for one frame in a message."""

    parts: Sequence[Part]
    out: torch.Tensor  # uint8
    poisoned: bool = False  # everything shall decode to NaN


class Written(NamedTuple):
    """A frame in its slot."""

    size: int  # bytes, with the header
    notch: int
    poisoned: bool


def name_key(seed: int, name: str, hop: str, index: int) -> int:
    """What the keys of a tensor have in common in all steps: 64 bits, made once."""
    text = f"{seed}/{name}/{hop}/{index >> 32}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def key_in_step(of_name: int, step: int) -> int:
    """The key of a step: a few integer operations, so that a GPU makes the keys of all tensors by itself."""
    step &= 0xFFFFFFFF
    k0 = _mix32(of_name & 0xFFFFFFFF ^ _mix32(step))
    k1 = _mix32((of_name >> 32) + step * 0x9E3779B9 & 0xFFFFFFFF)
    return k1 << 32 | k0


def keys_in_step(of_names: npt.NDArray[np.uint64], step: int) -> npt.NDArray[np.uint64]:
    """The same for many tensors at once."""
    low, high, shift = of_names.astype(np.uint32), (of_names >> np.uint64(32)).astype(np.uint32), np.uint64(32)
    step &= 0xFFFFFFFF
    k0 = _mix32s(low ^ np.uint32(_mix32(step)))
    k1 = _mix32s(high + np.uint32(step * 0x9E3779B9 & 0xFFFFFFFF))
    return k1.astype(np.uint64) << shift | k0


def name_key_of(key: int, step: int) -> int:
    """What `key_in_step` made a key from, for engines that take keys of names; every step of it can be undone."""
    step &= 0xFFFFFFFF
    n0 = _unmix32(key & 0xFFFFFFFF) ^ _mix32(step)
    n1 = _unmix32(key >> 32) - step * 0x9E3779B9 & 0xFFFFFFFF
    return n1 << 32 | n0


def key_of(seed: int, step: int, name: str, hop: str, index: int) -> int:
    """The key of the draws for the values around `index` of a tensor."""
    return key_in_step(name_key(seed, name, hop, index), step)


def _mix32(x: int) -> int:
    """wire.mix32 of one number."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x ^ x >> 16


def _mix32s(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _unmix32(x: int) -> int:
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
    return x ^ x >> 16


def offset_of(rank: int, world: int) -> int:
    """What spreads the draws of `world` ranks evenly."""
    return (rank << 32) // world


def level(statistics: Statistics, share: float, world: int, hops: int = 2) -> float:
    """The level of a tensor of this rank: `hops` lossy hops on the way to the mean add up to `share` at most."""
    if statistics.squares == 0:
        return 0.0 if statistics.finite else math.nan
    weights = statistics.weights / 4.0**12
    value = ((share * (12.0 / hops * world / (world + 1))) * statistics.squares) / weights
    return _as_level(math.sqrt(value))


def levels(measured: Measured, share: float, world: int) -> npt.NDArray[np.float32]:
    """The same for many tensors at once, whose means take two lossy hops."""
    squares, weights, finite = measured
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = ((share * (12.0 / 2 * world / (world + 1))) * squares) / (weights / 4.0**12)
        found = np.clip(np.sqrt(values).astype(np.float32), np.float32(SMALLEST_LEVEL), np.float32(LARGEST_LEVEL))
    return np.where(squares > 0, found, np.where(finite, np.float32(0), np.float32(np.nan)))


def level_of_sum(levels: Sequence[float]) -> float:
    """The level of the sum over ranks, from the levels of all ranks in their order."""
    world, total = len(levels), 0.0
    for own in levels:
        total += own * own
    if math.isnan(total):
        return math.nan
    return _as_level(math.sqrt((world + 1) / (2.0 * world) * total)) if total else 0.0


def coarser(nominal: float, notch: int) -> float:
    """The level in use at a notch: 2^(notch / 4) times the nominal one."""
    if not 0 <= notch <= MOST_NOTCH:
        raise Unsupported(f"notch {notch}: 0 to {MOST_NOTCH}")
    factor = np.float32(2.0 ** (notch / 4))
    with np.errstate(over="ignore"):
        return min(float(np.float32(nominal) * factor), LARGEST_LEVEL) if nominal == nominal else nominal


def _as_level(value: float) -> float:
    with np.errstate(over="ignore"):
        return min(max(float(np.float32(value)), SMALLEST_LEVEL), LARGEST_LEVEL)
