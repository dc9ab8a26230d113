"""The codec `noise` on a GPU, by kernels/noise*.cuh; docs/format.md, "Noise", is what they follow.

Tables in device memory describe parts, frames and blocks. They are made once for a layout; a launch then serves all of
them, and passes the step's number and nothing else. `noise_message` builds on this for whole messages; the functions
here code single bodies, as reference_noise does, and wait for the GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...errors import Corrupt, Unsupported
from .. import noise_layout as layout
from ..noise_layout import BLOCK, ESCAPE, HEAD_BYTES, MOST_NOTCH, NOTCHES, Part, Statistics
from ..noise_tables import LENGTHS, REACHES, THRESHOLDS
from .launch import StepCall

NAME = "cuda"
SQUARES = 4096  # as in noise.cuh
ENCODERS, OPENERS, MEASURERS, SHAPERS, DECODERS = 128, 256, 64, 128, 64  # threads of a group
_MEASURED = 4  # blocks of a group, as in noise.cuh
GROUPS = {"noise_encode": 9, "noise_decode": 8}  # per multiprocessor, that registers must suffice for
_CANDIDATES = len(NOTCHES)
_ROOTS, _LONG = 1024, 256  # entries of a table to decode with
HALVES = 2, 4, 8  # halves of warps in a group that adds frames up: one for each rank, as far as they go
_TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}

TENSOR = np.dtype([(name, "<u8") for name in ("values", "shape", "numel", "first")])
PART = np.dtype(
    [(name, "<u8") for name in ("values", "shape", "key", "start", "place", "length")]
    + [(name, "<u4") for name in ("level", "padding")]
)
FRAME = np.dtype(
    [(name, "<u8") for name in ("slot", "room", "values", "numel")]
    + [(name, "<u4") for name in ("first_part", "parts", "first_block", "blocks")]
)
RESULT = np.dtype([("bytes", "<u8"), ("notch", "<u4"), ("poisoned", "<u4")])

WRONG = {
    1: "the head of a noise frame makes no sense here",
    2: "a noise frame is of another step or program",
    4: "a noise frame has a number that is no level",
    8: "the index of a noise frame contradicts its size",
    16: "a noise block is damaged",
}


class Arguments(NamedTuple):
    """The struct Noise of noise.cuh, field by field."""

    tensors: int = 0
    tiles: int = 0
    squares: int = 0
    marks: int = 0
    parts: int = 0
    frames: int = 0
    blocks: int = 0
    levels: int = 0
    tables: int = 0
    progress: int = 0
    left: int = 0
    retries: int = 0
    offsets: int = 0
    states: int = 0
    results: int = 0
    verdicts: int = 0
    status: int = 0
    sums: int = 0
    sum_levels: int = 0
    length: int = 0
    factor: float = 0.0
    step: int = 0
    digest: int = 0
    offset: int = 0
    prefix: int = 0
    rank: int = 0
    world: int = 1
    poisonous: int = 0
    all_blocks: int = 0
    divisor: float = 1.0
    times: float = 1.0


def addressed(names: Sequence[str], tensors: Sequence[torch.Tensor], numbers: Arguments) -> Arguments:
    """Arguments with the addresses of tensors; names that have none keep what they are."""
    return Arguments(**{**numbers._asdict(), **{name: tensor.data_ptr() for name, tensor in zip(names, tensors)}})


_ARGS = struct.Struct("<20Qd8I2f")
_STEP_AT = 20 * 8 + 8


def times_of(divisor: int) -> float:
    """The reciprocal of a divisor where multiplying by it is the same; else 0."""
    return 1.0 / divisor if divisor & (divisor - 1) == 0 else 0.0


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """An array's bytes on a device; at least one byte, so that there is an address."""
    return write(torch.empty(max(array.nbytes, 16), dtype=torch.uint8, device=device), array)


def write(table: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    """Copies an array's bytes into a table on the current stream. The host does not wait: the copy is pinned."""
    data = torch.frombuffer(bytearray(array.tobytes()) or bytearray(16), dtype=torch.uint8)
    data = data.pin_memory() if table.device.type == "cuda" else data
    table[: data.numel()].copy_(data, non_blocking=True)
    return table


@cache
def tables(device: torch.device) -> torch.Tensor:
    """NoiseTables of noise.cuh."""
    encode = np.zeros((len(LENGTHS), 256), "<u4")
    decode = np.zeros((len(LENGTHS), _ROOTS + _LONG), "<u2")
    for number, reach in enumerate(REACHES):
        codes = layout.codes_of(number)
        whole = np.zeros(1 << layout.LIMIT, "<u2")  # by 12 bits
        for pair, code in codes.items():
            whole[int(code[::-1], 2) :: 1 << len(code)] = pair & 15 | pair >> 4 << 8 | len(code) << 12
        roots = whole.reshape(-1, _ROOTS)
        long = np.flatnonzero((roots >> 12).max(0) > 10)
        decode[number, :_ROOTS] = roots[0]
        decode[number, long] = np.arange(len(long))
        decode[number, _ROOTS : _ROOTS + 4 * len(long)] = roots[:, long].T.ravel()
        digits = [digit if digit <= 2 * reach else ESCAPE for digit in range(16)]  # what is out of reach is escaped
        for first in range(16):
            for second in range(16):
                code = codes[digits[first] | digits[second] << 4]
                escapes = (digits[first] == ESCAPE) + (digits[second] == ESCAPE)
                encode[number, first | second << 4] = len(code) | escapes << 5 | int(code[::-1], 2) << 8
    thresholds = np.full(64, 0xFFFFFFFF, "<u4")
    thresholds[: len(THRESHOLDS)] = THRESHOLDS
    notches = np.array([2.0 ** (notch / 4) for notch in range(MOST_NOTCH + 1)], "<f4")
    parts = (encode, decode, thresholds, notches, np.array(REACHES, "<u4"))
    # All streams read them: the host waits until they are there.
    return torch.frombuffer(bytearray(b"".join(part.tobytes() for part in parts)), dtype=torch.uint8).to(device)


# --- Launches ---------------------------------------------------------------------------------------------------------


class Call(StepCall):
    """A kernel of this codec with its arguments."""

    def __init__(
        self,
        device: torch.device,
        kernel: str,
        groups: int,
        threads: int,
        arguments: Arguments,
        persistent: bool = False,
    ) -> None:
        least = next((groups for name, groups in GROUPS.items() if kernel.startswith(name)), 1)
        super().__init__(device, kernel, groups, threads, _ARGS.pack(*arguments), _STEP_AT, least)
        self._groups = min(groups, self.resident) if persistent else groups


def float_name(dtype: torch.dtype) -> str:
    if dtype not in _TYPES:
        raise Unsupported(f"noise on a GPU codes float32, bfloat16 and float16, not {dtype}")
    return _TYPES[dtype]


class Measurer:
    """Levels of whole tensors, as (level, reciprocal) in `levels`."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Tensor | None],
        factor: float,
        levels: torch.Tensor,
        told: torch.Tensor | None = None,
    ) -> None:
        device = levels.device
        rows, tiles = _tiled(tensors, shapes)
        total = len(tiles)
        self._kept = [
            to_device(rows, device),
            to_device(tiles, device),
            torch.empty(max(total, 1), dtype=torch.float64, device=device),
            torch.zeros(2 * max(len(tensors), 1), dtype=torch.int64, device=device),
        ]
        numbers = Arguments(
            levels=levels.data_ptr(), sum_levels=0 if told is None else told.data_ptr(), length=total, factor=factor
        )
        arguments = addressed(("tensors", "tiles", "squares", "marks"), self._kept, numbers)
        kernel = f"noise_measure<{float_name(tensors[0].dtype)}>"
        self.call = Call(device, kernel, -(-total // _MEASURED), MEASURERS, arguments)

    def run(self, step: int = 0) -> None:
        self.call(step)


class Shaper:
    """Shapes of tensors from their second moments, flat float32 ones: two launches for all of them."""

    def __init__(self, seconds: Sequence[torch.Tensor], shapes: Sequence[torch.Tensor]) -> None:
        device = seconds[0].device
        rows, tiles = _tiled(seconds, shapes)
        self._marks = torch.zeros(len(seconds), dtype=torch.int64, device=device)
        self._kept = [to_device(rows, device), to_device(tiles, device), self._marks]
        arguments = addressed(("tensors", "tiles", "marks"), self._kept, Arguments(length=len(tiles)))
        groups = -(-len(tiles) // 4)
        self._calls = [Call(device, name, groups, SHAPERS, arguments) for name in ("noise_exponents", "noise_shape")]

    def run(self) -> None:
        self._marks.zero_()
        for call in self._calls:
            call(0)


def _tiled(
    tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Tensor | None]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
    """Rows of tensors, and the blocks of their values that warps work on."""
    rows = np.zeros(len(tensors), TENSOR)
    counts = np.array([-(-tensor.numel() // SQUARES) for tensor in tensors], np.int64)
    rows["values"] = [tensor.data_ptr() for tensor in tensors]
    rows["shape"] = [0 if shape is None else shape.data_ptr() for shape in shapes]
    rows["numel"] = [tensor.numel() for tensor in tensors]
    rows["first"] = np.cumsum(counts) - counts
    tiles = np.zeros((int(counts.sum()), 2), np.uint32)
    tiles[:, 0] = np.repeat(np.arange(len(tensors)), counts)
    tiles[:, 1] = np.arange(len(tiles)) - np.repeat(rows["first"].astype(np.int64), counts)
    return rows, tiles


class Geometry:
    """Frames that follow each other, with parts and blocks; addresses of slots are filled in by who uses it."""

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        """`counts`: the values of each part of each frame."""
        self.frames = np.zeros(len(counts), FRAME)
        blocks: list[npt.NDArray[np.uint32]] = []
        self.places = list[int]()
        parts = first_block = 0
        for number, of_frame in enumerate(counts):
            lengths = np.array(of_frame, np.int64)
            room = -(-lengths // layout.ALIGN) * layout.ALIGN
            places = np.cumsum(room) - room
            self.places += places.tolist()
            values = int(room.sum())
            count = -(-values // BLOCK)
            entries = np.zeros((max(count, 1), 2), np.uint32)  # an empty frame has one too: a group writes its head
            entries[:, 0] = number
            starts = np.arange(max(count, 1)) * BLOCK
            found = np.searchsorted(places, starts, side="right") - 1 if len(places) else np.zeros(1, np.int64)
            entries[:, 1] = parts + np.maximum(found, 0)
            frame = self.frames[number]
            frame["values"], frame["numel"] = values, int(lengths.sum())
            frame["first_part"], frame["parts"] = parts, len(of_frame)
            frame["first_block"], frame["blocks"] = first_block, count
            blocks.append(entries)
            parts, first_block = parts + len(of_frame), first_block + len(entries)
        self.blocks = np.concatenate(blocks) if blocks else np.zeros((0, 2), np.uint32)

    def least(self, number: int) -> int:
        """Bytes of a body before its blocks."""
        frame = self.frames[number]
        return HEAD_BYTES + 4 * int(frame["parts"]) + -(-2 * int(frame["blocks"]) // 4) * 4


class Encoder:
    """Encodes parts into frames: three launches.

    Groups of threads tell each other of blocks in memory that belongs to the encoder: its launches must come one after
    the other, on one stream or on streams that wait for each other.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        geometry: Geometry,
        parts: npt.NDArray[np.void],
        levels: torch.Tensor,
        prefix: int,
        digest: int,
        offset: int,
        poisonous: torch.Tensor | None = None,
        rank: int = 0,
    ) -> None:
        count, frames = len(geometry.blocks), len(geometry.frames)
        for number in range(frames):
            room, least = int(geometry.frames[number]["room"]), prefix + geometry.least(number)
            if room < least:
                raise Unsupported(f"a slot of {room} bytes is too small: a frame of these parts has at least {least}")
        self.results = torch.zeros(frames * RESULT.itemsize, dtype=torch.uint8, device=device)
        self.frames = to_device(geometry.frames, device)
        self._kept = [
            to_device(np.append(parts, np.zeros(1, PART)), device), self.frames,
            to_device(geometry.blocks, device), levels, tables(device),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count * _CANDIDATES, dtype=torch.int16, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.zeros(8 * frames, dtype=torch.int32, device=device), self.results,
        ]  # fmt: skip
        if poisonous is not None:
            self._kept.append(poisonous)
        names = (
            *("parts", "frames", "blocks", "levels", "tables", "progress"),
            *("left", "retries", "offsets", "states", "results", "verdicts"),
        )
        arguments = addressed(
            names,
            self._kept,
            Arguments(
                digest=digest, offset=offset, prefix=prefix, rank=rank, all_blocks=count,
                poisonous=0 if poisonous is None else poisonous.numel(),
            ),
        )  # fmt: skip
        kind = float_name(dtype)
        self.calls = [
            Call(device, f"noise_encode<{kind}>", count, ENCODERS, arguments),
            Call(device, f"noise_coarsen<{kind}>", count, ENCODERS, arguments, persistent=True),
            Call(device, f"noise_place<{kind}>", count, ENCODERS, arguments, persistent=True),
        ]

    def run(self, step: int) -> None:
        for call in self.calls:
            call(step)


class Decoder:
    """Decodes frames into the values of their parts, divided: two launches."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        geometry: Geometry,
        parts: npt.NDArray[np.void],
        prefix: int,
        digest: int,
        divisor: int,
        status: torch.Tensor,
        squares: torch.Tensor | None = None,
    ) -> None:
        """`squares` gets the sum of squares of each block's values; float64."""
        count, frames = len(geometry.blocks), len(geometry.frames)
        self.frames = to_device(geometry.frames, device)
        self._kept = [
            to_device(np.append(parts, np.zeros(1, PART)), device), self.frames,
            to_device(geometry.blocks, device), tables(device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.zeros(frames, dtype=torch.int32, device=device), status,
        ]  # fmt: skip
        if squares is not None:
            self._kept.append(squares)
        names = ("parts", "frames", "blocks", "tables", "offsets", "verdicts", "status", "squares")
        numbers = Arguments(
            digest=digest, prefix=prefix, all_blocks=count, divisor=float(divisor), times=times_of(divisor)
        )
        arguments = addressed(names, self._kept, numbers)
        self.calls = [
            Call(device, "noise_open", frames, OPENERS, arguments),
            Call(device, f"noise_decode<{float_name(dtype)}>", -(-count // 4), DECODERS, arguments, persistent=True),
        ]

    def run(self, step: int) -> None:
        for call in self.calls:
            call(step)


# --- Single bodies ----------------------------------------------------------------------------------------------------


def statistics(x: torch.Tensor, shape: torch.Tensor | None = None) -> Statistics:
    """Of a whole flat tensor."""
    if x.numel() == 0:
        return Statistics(0.0, 0, True)
    levels = torch.empty(2, device=x.device)
    told = torch.empty(3, dtype=torch.int64, device=x.device)
    Measurer([x], [shape], 1.0, levels, told).run()
    squares, weights, finite = told.cpu().numpy()
    return Statistics(float(squares.view(np.float64)), int(weights), bool(finite))


def _part_rows(parts: Sequence[Part], geometry: Geometry, step: int) -> npt.NDArray[np.void]:
    rows = np.zeros(len(parts), PART)
    rows["values"] = [part.values.data_ptr() for part in parts]
    rows["shape"] = [0 if part.shape is None else part.shape.data_ptr() for part in parts]
    rows["key"] = [layout.name_key_of(part.key, step) for part in parts]
    rows["start"] = [part.start for part in parts]
    rows["place"] = geometry.places
    rows["length"] = [part.values.numel() for part in parts]
    rows["level"] = np.arange(len(parts))
    return rows


def _in_one_slot(parts: Sequence[Part], slot: torch.Tensor) -> Geometry:
    geometry = Geometry([[part.values.numel() for part in parts]])
    geometry.frames["slot"], geometry.frames["room"] = slot.data_ptr(), slot.numel()
    return geometry


def levels_of(parts: Sequence[Part], device: torch.device) -> torch.Tensor:
    """Levels and their reciprocals, as kernels take them."""
    found = np.zeros((max(len(parts), 1), 2), np.float32)
    for number, part in enumerate(parts):
        found[number] = part.level, 1.0 / part.level if part.level > 0 else 0.0
    return torch.from_numpy(found).to(device)


def encode(parts: Sequence[Part], out: torch.Tensor, step: int = 0, digest: int = 0) -> tuple[int, int]:
    """Writes the body of a frame into `out`, its slot; returns its bytes and the notch."""
    room = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    geometry = _in_one_slot(parts, room)
    offsets = {part.offset for part in parts} or {0}
    if len(offsets) > 1:
        raise Unsupported("parts of one body have the same offset: they are of one rank")
    encoder = Encoder(
        out.device, parts[0].values.dtype if parts else torch.float32, geometry, _part_rows(parts, geometry, step),
        levels_of(parts, out.device), 0, digest, offsets.pop(),
    )  # fmt: skip
    encoder.run(step)
    ((size, notch, _),) = encoder.results.cpu().numpy().view(RESULT).tolist()
    if room is not out:
        out[:size] = room[:size]
    return int(size), int(notch)


def decode(body: torch.Tensor, parts: Sequence[Part], add: bool = False, divisor: int = 1) -> None:
    """Reads a body into the values of its parts, divided by `divisor`; or adds it to them."""
    body = body if body.data_ptr() % 4 == 0 else body.clone()
    out = parts if not add else [Part(torch.empty_like(part.values), shape=part.shape) for part in parts]
    geometry = _in_one_slot(parts, body)
    status = torch.zeros(1, dtype=torch.int32, device=body.device)
    dtype = parts[0].values.dtype if parts else torch.float32
    Decoder(body.device, dtype, geometry, _part_rows(out, geometry, 0), 0, 0, divisor, status).run(0)
    found = int(status)
    wrong = [text for bit, text in WRONG.items() if found & bit]
    if wrong:
        raise Corrupt(", ".join(wrong))
    if add:
        for part, decoded in zip(parts, out):
            part.values.add_(decoded.values)
