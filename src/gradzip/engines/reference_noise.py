"""The codec `noise` in plain NumPy, section by section as docs/format.md has it. Slow, and the oracle of all others.

statistics       what the level of a tensor is made of
encode           the body of one frame of many parts, coarser by as many notches as its room asks for
decode           a body into its parts
encode_frames    several frames, with headers, into their slots
decode_frame     the frame in a slot into its parts
decode_means     the same, and the sum of their squares
reduce           the frames of all ranks added in rank order, and the sum as a frame
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from .. import wire
from ..errors import Corrupt, Truncated, Unsupported
from .noise_layout import (
    BLOCK,
    BLOCK_HEAD_BYTES,
    CLASSES,
    CODEC,
    DEEPEST,
    ESCAPE,
    GIANT,
    HEAD_BYTES,
    LANES,
    LARGEST_LEVEL,
    MOST_NOTCH,
    NARROW_MOST,
    NOTCHES,
    POISONED,
    RAW,
    ROW,
    SMALLEST_LEVEL,
    WIDE,
    WIDE_MOST,
    Measured,
    Part,
    Slot,
    Statistics,
    Written,
    blocks_of,
    blocks_offset,
    class_of,
    coarser,
    codes_of,
    index_offset,
    level_of_sum,
    low_bits,
    padded,
    reach_of,
    table_of,
)

NAME = "reference"

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
_HEAD = struct.Struct("<IHHII")  # parts, notch, flags, step, digest
_NAN = np.uint32(0x7FC00000).view(np.float32)


# --- Statistics -------------------------------------------------------------------------------------------------------


def statistics(x: torch.Tensor, shape: torch.Tensor | None = None) -> Statistics:
    """Of a whole flat tensor."""
    values = _floats(x)
    finite = np.isfinite(values)
    squares = np.where(finite, values, 0).astype(np.float64) ** 2
    weights = values.size << 24 if shape is None else sum(1 << 2 * (int(d) - DEEPEST) for d in shape.tolist())
    return Statistics(_ordered_sum(squares), weights, bool(finite.all()))


def statistics_of(parts: Sequence[Part]) -> list[Statistics]:
    """Of many tensors, each of them one whole part."""
    return [statistics(part.values, part.shape) for part in parts]


def measure(parts: Sequence[Part]) -> Measured:
    """The same as arrays."""
    found = statistics_of(parts)
    squares = np.array([one.squares for one in found], np.float64)
    weights = np.array([one.weights for one in found], np.int64)
    return Measured(squares, weights, np.array([one.finite for one in found], np.bool_))


def _ordered_sum(terms: npt.NDArray[np.float64]) -> float:
    """32 lanes, blocks of 4096, then the sums of the blocks in the same way."""
    while terms.size > 1:
        sums = []
        for start in range(0, terms.size, 4096):
            block = terms[start : start + 4096]
            rows = np.pad(block, (0, -block.size % 32)).reshape(-1, 32)  # adding 0.0 to what is not negative is exact
            lanes = np.zeros(32)
            for row in rows:
                lanes = lanes + row
            while lanes.size > 1:
                lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
            sums.append(lanes[0])
        terms = np.array(sums)
    return float(terms[0]) if terms.size else 0.0


class Shaper:
    """Shapes of tensors from their second moments, flat float32 ones."""

    def __init__(self, seconds: Sequence[torch.Tensor], shapes: Sequence[torch.Tensor]) -> None:
        self._seconds, self._shapes = seconds, shapes

    def run(self) -> list[bool]:
        """Writes the shapes; whether each tensor is fit for one."""
        fit = []
        for second, shape in zip(self._seconds, self._shapes):
            bits = second.numpy().view(np.uint32)  # ordered like the values; negative ones are above all others
            most = int(bits.max(initial=0))
            fit.append(0 < most < 0x7F800000)
            if fit[-1]:
                shape.numpy()[:] = np.maximum((bits >> 24).astype(np.int64) - (most >> 24), DEEPEST)
        return fit


# --- Rounding ---------------------------------------------------------------------------------------------------------


def draws(part: Part) -> npt.NDArray[np.int64]:
    """24 random bits for each value."""
    index = (np.arange(part.values.numel(), dtype=np.uint64) + np.uint64(part.start)).astype(np.uint32)
    x = index ^ np.uint32(part.key & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x = x ^ (x >> np.uint32(16))
    x = x + np.uint32(((part.key >> 32) + part.offset) & 0xFFFFFFFF)
    return (x >> np.uint32(8)).astype(np.int64)


def rounded(part: Part, notch: int) -> Floats:
    """The integers of a part as float32, which holds all of them; NaN and infinities stay."""
    values = _floats(part.values)
    level = coarser(part.level, notch)
    if level == 0 or math.isnan(level):
        return np.zeros_like(values)
    with np.errstate(over="ignore", invalid="ignore"):
        t = values * np.float32(1.0 / level)
        if part.shape is not None:
            t = t * _power(-part.shape.numpy().astype(np.int32))
        k = np.floor(t)
        fraction = np.where(np.isfinite(t), (t - k) * np.float32(1 << 24), 0).astype(np.int64)
        q: Floats = k + (fraction + draws(part) >= 1 << 24).astype(np.float32)
    q[q == 0] = 0.0  # -0 as well
    q[np.isnan(q)] = _NAN
    return q


def values_of(q: Floats, level: float, shape: torch.Tensor | None) -> Floats:
    """What integers decode to; `level` is that of the notch."""
    if math.isnan(level):
        return np.full(q.size, _NAN)
    if level == 0:
        return np.zeros(q.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        out: Floats = q * np.float32(level)
        if shape is not None:
            out = out * _power(shape.numpy().astype(np.int32))
    out[np.isnan(out)] = _NAN
    return out


def _power(exponent: npt.NDArray[np.int32]) -> Floats:
    return np.ldexp(np.float32(1), exponent).astype(np.float32)


# --- Blocks -----------------------------------------------------------------------------------------------------------


def encode_block(q: Floats) -> bytes:
    """The integers of one block, a multiple of 32 of them."""
    rows = np.pad(q, (0, -q.size % ROW)).reshape(-1, ROW)
    coded = (rows != 0).any(1)  # NaN too
    if not coded.any():
        return b""
    masked = int((~coded).sum()) >= 2
    used = rows[coded] if masked else rows
    number = _choose(used)
    body = _encode_rows(used, number)
    mask = b""
    if masked:
        mask = sum(1 << int(r) for r in np.flatnonzero(coded)).to_bytes(8, "little")
    lanes, rest = body
    base = min(map(len, lanes))
    spread = max(map(len, lanes)) - base
    width = 0 if spread < 16 else 1 if spread < 256 else 2
    over = [len(lane) - base for lane in lanes]
    packed = sum(value << (4 << width) * i for i, value in enumerate(over)).to_bytes(8 << width, "little")
    head = struct.pack("<BBH", number, width | masked << 2, base)
    planes, tail = rest
    block = head + mask + planes + packed + b"".join(lanes) + tail
    if len(block) >= BLOCK_HEAD_BYTES + 4 * q.size:
        return struct.pack("<BBH", RAW, 0, 0) + q.astype("<f4").tobytes()
    return block


def _choose(rows: Floats) -> int:
    """The class of a block."""
    magnitude = np.where(np.isnan(rows), np.inf, np.abs(rows))
    narrow = class_of(int(np.where(magnitude <= NARROW_MOST, magnitude, NARROW_MOST + 9).sum()), rows.size)
    if narrow < WIDE:
        return narrow
    wide = np.where(magnitude <= WIDE_MOST, magnitude, WIDE_MOST + 1).astype(np.float64)
    return max(WIDE, class_of(int(wide.sum()), rows.size))


def _encode_rows(rows: Floats, number: int) -> tuple[list[bytes], tuple[bytes, bytes]]:
    """The lanes' bytes; planes before them and lists behind them."""
    low, reach, codes = low_bits(number), reach_of(number), codes_of(table_of(number))
    half = 1 << low >> 1
    giant = ~(np.abs(rows) <= _most(number))
    integers = np.where(giant, 0, rows).astype(np.int64)
    h = integers + half >> low
    if number >= WIDE:
        giant |= np.abs(h) > 127
    lows = np.where(giant, 0, (integers + half) & ((1 << low) - 1))
    escaped = giant | (np.abs(h) > reach)
    digit = np.where(escaped, ESCAPE, h + reach)
    pairs = digit[:, 0::2] | digit[:, 1::2] << 4
    lanes = []
    for lane in range(LANES):
        text = "".join(codes[int(pair)] for pair in pairs[:, 4 * lane : 4 * lane + 4].reshape(-1))
        lanes.append(int(text[::-1], 2).to_bytes(-(-len(text) // 8), "little"))
    planes = b"".join(
        np.packbits((row >> bit & 1).astype(np.uint8), bitorder="little").tobytes()
        for row in lows
        for bit in range(low)
    )
    escapes = np.where(giant, GIANT, h)[escaped].astype(np.int8).tobytes()
    return lanes, (planes, escapes + rows[giant].astype("<f4").tobytes())


def _most(number: int) -> float:
    """Integers above this magnitude are giants in any case."""
    return NARROW_MOST if number < WIDE else 128.0 * (1 << low_bits(number))


def decode_block(block: bytes, count: int) -> Floats:
    """The integers of a block of `count` values."""
    if not block:
        return np.zeros(count, np.float32)
    if len(block) < BLOCK_HEAD_BYTES:
        raise Corrupt("a noise block is shorter than its head")
    number, form, base = struct.unpack_from("<BBH", block)
    if number == RAW:
        if form or base or len(block) != BLOCK_HEAD_BYTES + 4 * count:
            raise Corrupt("a raw noise block has the wrong size or head")
        return np.frombuffer(block, "<f4", offset=BLOCK_HEAD_BYTES).copy()
    width, masked = form & 3, form >> 2 & 1
    if number >= CLASSES or form >> 3 or width == 3:
        raise Corrupt("the head of a noise block contradicts itself")
    total = -(-count // ROW)
    at = BLOCK_HEAD_BYTES
    coded = np.ones(total, bool)
    if masked:
        mask = int.from_bytes(block[at : at + 8], "little")
        at += 8
        if not mask or mask >> total:
            raise Corrupt("the mask of a noise block names rows that it does not have")
        coded = np.array([bool(mask >> r & 1) for r in range(total)])
    low, rows = low_bits(number), int(coded.sum())
    planes, at = block[at : at + 16 * low * rows], at + 16 * low * rows
    packed, at = int.from_bytes(block[at : at + (8 << width)], "little"), at + (8 << width)
    lengths = [base + (packed >> (4 << width) * i & ((1 << (4 << width)) - 1)) for i in range(LANES)]
    lists = at + sum(lengths)
    if lists > len(block):
        raise Corrupt("a noise block ends inside its lanes")
    bits = np.unpackbits(np.frombuffer(planes, np.uint8), bitorder="little").reshape(rows, low, ROW)
    lows = sum((bits[:, b].astype(np.int64) << b for b in range(low)), np.zeros((rows, ROW), np.int64))
    pairs = np.empty((rows, ROW // 2), np.int64)
    for lane, length in enumerate(lengths):
        pairs[:, 4 * lane : 4 * lane + 4] = _read_lane(block[at : at + length], table_of(number), rows)
        at += length
    out = np.zeros((total, ROW), np.float32)
    out[coded] = _join(pairs, lows, number, block[lists:])
    return out.reshape(-1)[:count]


def _read_lane(lane: bytes, table: int, rows: int) -> Integers:
    pairs_of = {code: pair for pair, code in codes_of(table).items()}
    text = "".join(format(byte, "08b")[::-1] for byte in lane)
    at, pairs = 0, list[int]()
    while len(pairs) < 4 * rows:
        end = at + 1
        while text[at:end] not in pairs_of:
            end += 1
            if end > len(text):
                raise Corrupt("a lane of a noise block ends inside a code")
        pairs.append(pairs_of[text[at:end]])
        at = end
    if -(-at // 8) != len(lane):
        raise Corrupt("a lane of a noise block is longer than its codes")
    return np.array(pairs).reshape(rows, 4)


def _join(pairs: Integers, lows: Integers, number: int, lists: bytes) -> Floats:
    low, reach = low_bits(number), reach_of(number)
    digit = np.empty((pairs.shape[0], ROW), np.int64)
    digit[:, 0::2], digit[:, 1::2] = pairs & 15, pairs >> 4
    escaped = digit == ESCAPE
    count = int(escaped.sum())
    if count > len(lists):
        raise Corrupt("a noise block has fewer escapes in its list than in its lanes")
    h = digit - reach
    h[escaped] = np.frombuffer(lists[:count], np.int8)
    giant = escaped & (h == GIANT)
    if len(lists) != count + 4 * int(giant.sum()):
        raise Corrupt("a noise block has another number of giants than its list of escapes says")
    q = (h << low) + lows - (1 << low >> 1)
    if number < WIDE and (np.abs(q[escaped & ~giant]) > NARROW_MOST).any():
        raise Corrupt("an escape of a noise block stands for a giant")
    out = q.astype(np.float32)
    out[giant] = np.frombuffer(lists[count:], "<f4")
    return out


# --- Frames -----------------------------------------------------------------------------------------------------------


def encode(
    parts: Sequence[Part], out: torch.Tensor, step: int = 0, digest: int = 0, poisoned: bool = False
) -> tuple[int, int]:
    """Writes the body of a frame into `out`, its slot; returns its bytes and the notch.

    A frame that fits at no notch, because of NaN and infinities, is written as a poisoned one.
    """
    for notch in NOTCHES:
        body = _body(
            [rounded(part, notch) for part in parts], [part.level for part in parts], notch, step, digest, poisoned
        )
        if len(body) <= out.numel():
            out[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            return len(body), notch
    least = blocks_offset([part.values.numel() for part in parts])
    if out.numel() < least:
        raise Unsupported(f"a slot of {out.numel()} bytes is too small: a frame of these parts has at least {least}")
    return encode(parts, out, step, digest, poisoned=True)


def _body(
    integers: Sequence[Floats], levels: Sequence[float], notch: int, step: int, digest: int, poisoned: bool
) -> bytes:
    head = _HEAD.pack(len(levels), notch, POISONED if poisoned else 0, step & 0xFFFFFFFF, digest & 0xFFFFFFFF)
    if poisoned:
        return head
    stored = np.array(levels, "<f4")
    stored[np.isnan(stored)] = _NAN
    q = np.concatenate(
        [np.zeros(0, np.float32), *(np.pad(part, (0, padded(part.size) - part.size)) for part in integers)]
    )
    blocks = [encode_block(q[start : start + BLOCK]) for start in range(0, q.size, BLOCK)]
    index = b"".join(struct.pack("<H", len(block)) for block in blocks)
    return head + stored.tobytes() + index + bytes(-len(index) % 4) + b"".join(blocks)


class Frame:
    """A body that was read: levels and integers of its parts."""

    def __init__(self, body: torch.Tensor, counts: Sequence[int]) -> None:
        data = body.numpy().tobytes()
        if len(data) < HEAD_BYTES:
            raise Truncated("a noise body ends inside its head")
        parts, self.notch, flags, self.step, self.digest = _HEAD.unpack_from(data)
        self.poisoned = bool(flags & POISONED)
        if parts != len(counts) or flags & ~POISONED or self.notch > MOST_NOTCH:
            raise Corrupt(f"the head of a noise body makes no sense, or it has {parts} parts and not {len(counts)}")
        self.integers = [np.zeros(count, np.float32) for count in counts]
        self.levels = [math.nan] * parts
        if self.poisoned:
            if len(data) != HEAD_BYTES:
                raise Corrupt("bytes follow the head of a poisoned noise body")
            return
        start = blocks_offset(counts)
        if len(data) < start:
            raise Truncated("a noise body ends inside its levels or index")
        stored = np.frombuffer(data, "<f4", parts, HEAD_BYTES)
        self.levels = [float(level) for level in stored]
        for level, bits in zip(self.levels, stored.view(np.uint32)):
            if not (SMALLEST_LEVEL <= level <= LARGEST_LEVEL or bits in (0, 0x7FC00000)):
                raise Corrupt(f"{level} is no level of a noise frame")
        total = blocks_of(counts)
        index = np.frombuffer(data, "<u2", total, index_offset(parts))
        if any(data[index_offset(parts) + 2 * total : start]):
            raise Corrupt("the padding behind the index of a noise body is not zero")
        ends = start + np.cumsum(index.astype(np.int64))
        if total and ends[-1] > len(data):
            raise Truncated("a noise block ends behind the end of the body")
        if (ends[-1] if total else start) != len(data):
            raise Corrupt("bytes follow the last noise block")
        values = sum(map(padded, counts))
        blocks = [
            decode_block(data[end - size : end], min(BLOCK, values - BLOCK * i))
            for i, (size, end) in enumerate(zip(index.astype(np.int64), ends))
        ]
        q = np.concatenate([np.zeros(0, np.float32), *blocks])
        at = 0
        for i, count in enumerate(counts):
            self.integers[i] = q[at : at + count]
            at += padded(count)

    def decoded(self, number: int, shape: torch.Tensor | None) -> Floats:
        return values_of(self.integers[number], coarser(self.levels[number], self.notch), shape)


def decode(body: torch.Tensor, parts: Sequence[Part], add: bool = False, divisor: int = 1) -> None:
    """Reads a body into the values of its parts, divided by `divisor`; or adds it to them."""
    frame = Frame(body, [part.values.numel() for part in parts])
    for number, part in enumerate(parts):
        here, decoded = _floats(part.values), frame.decoded(number, part.shape)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            here[:] = here + decoded if add else decoded / np.float32(divisor)


# --- Frames in slots --------------------------------------------------------------------------------------------------


def encode_frames(slots: Sequence[Slot], step: int, digest: int) -> list[Written]:
    """Writes a frame, with its header, into every slot."""
    return [_encode_frame(slot, slot.parts, step, digest, slot.poisoned) for slot in slots]


def _encode_frame(slot: Slot, parts: Sequence[Part], step: int, digest: int, poisoned: bool) -> Written:
    size, notch = encode(parts, slot.out[wire.HEADER_BYTES :], step, digest, poisoned)
    numel = sum(part.values.numel() for part in parts)
    wire.write_header(slot.out, CODEC, torch.float32, numel, size, check=False)
    flags = int(slot.out[wire.HEADER_BYTES + 6])
    return Written(wire.HEADER_BYTES + size, notch, bool(flags & POISONED))


def decode_frame(
    slot: torch.Tensor, parts: Sequence[Part], step: int, digest: int, add: bool = False, divisor: int = 1
) -> None:
    """Reads the frame in a slot into the values of its parts, divided by `divisor`; or adds it to them."""
    decode(_body_of(slot, [part.values.numel() for part in parts], step, digest), parts, add, divisor)


def decode_means(slot: torch.Tensor, parts: Sequence[Part], step: int, digest: int, divisor: int) -> float:
    """`decode_frame`, and the sum of the squares of what it has written; NaN if a value is not finite.

    The last rounding of each value is left out of it, and it has the precision of float32.
    """
    counts = [part.values.numel() for part in parts]
    body = _body_of(slot, counts, step, digest)
    decode(body, parts, divisor=divisor)
    if not all(part.values.isfinite().all() for part in parts):
        return math.nan
    frame, at = Frame(body, counts), 0
    of_blocks = [0.0] * blocks_of(counts)
    for number, part in enumerate(parts):
        level = coarser(frame.levels[number], frame.notch)
        power = np.ones(counts[number]) if part.shape is None else np.ldexp(1.0, part.shape.numpy().astype(np.int32))
        start = 0
        while start < counts[number] and level:
            block = (at + start) // BLOCK
            stop = min(counts[number], (block + 1) * BLOCK - at)
            of_blocks[block] += _squares(frame.integers[number][start:stop], power[start:stop]) * (level * level)
            start = stop
        at += padded(counts[number])
    total = 0.0
    for of_block in of_blocks:
        total += of_block
    return total / (float(divisor) * float(divisor))


def _squares(q: Floats, power: npt.NDArray[np.float64]) -> float:
    """The sum of (q 2^d)^2: in 32 lanes of float32, of which each square is a number; integers above 119 apart."""
    small = np.abs(q) <= NARROW_MOST
    squares = (np.where(small, q, 0) * power) ** 2
    lanes = np.zeros(32, np.float32)
    for row in np.pad(squares, (0, -q.size % 32)).astype(np.float32).reshape(-1, 32):
        lanes += row
    sums, large = lanes.astype(np.float64), 0.0
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    for square in ((q * power) ** 2)[~small].tolist():
        large += square
    return float(sums[0]) + large


def _body_of(slot: torch.Tensor, counts: Sequence[int], step: int, digest: int) -> torch.Tensor:
    """The body of the frame in a slot, of which it need not be all."""
    if slot.numel() < wire.HEADER_BYTES:
        raise Truncated("a noise frame ends inside its header")
    size = int.from_bytes(slot[16:24].numpy().tobytes(), "little")
    expected = wire.pack_header(CODEC, torch.float32, sum(counts), size, check=False)
    if slot[: wire.HEADER_BYTES].numpy().tobytes() != expected or size > slot.numel() - wire.HEADER_BYTES:
        raise Corrupt("the header of a noise frame does not fit its parts or its slot")
    body = slot[wire.HEADER_BYTES : wire.HEADER_BYTES + size]
    if size >= HEAD_BYTES and _HEAD.unpack_from(body.numpy().tobytes())[3:] != (step & 0xFFFFFFFF, digest & 0xFFFFFFFF):
        raise Corrupt("a noise frame of another step or program")
    return body


def reduce(terms: Sequence[torch.Tensor | Sequence[Part]], slot: Slot, step: int, digest: int) -> Written:
    """Adds what all ranks have of some parts, in rank order, and writes the sum into a slot.

    A term is a frame in its slot, or the parts of this rank itself, which count as they are and bring their levels.
    The slot's parts say how to draw for the sums; neither their values nor their levels are used.
    """
    counts = [part.values.numel() for part in slot.parts]
    ranks = [
        Frame(_body_of(term, counts, step, digest), counts) if isinstance(term, torch.Tensor) else term
        for term in terms
    ]
    poisoned = any(isinstance(rank, Frame) and rank.poisoned for rank in ranks)
    sums = list[Part]()
    for number, part in enumerate(slot.parts):
        total, levels = np.zeros(0, np.float32), list[float]()
        for first, rank in enumerate(ranks):
            if isinstance(rank, Frame):
                term, level = rank.decoded(number, part.shape), rank.levels[number]
            else:
                term, level = _floats(rank[number].values), rank[number].level
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + term if first else term.copy()
            levels.append(level)
        sums.append(replace(part, values=torch.from_numpy(total), level=level_of_sum(levels)))
    return _encode_frame(slot, sums, step, digest, poisoned)


def _floats(x: torch.Tensor) -> Floats:
    values: Floats = x.numpy()
    return values
