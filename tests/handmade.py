"""Frames put together by hand after docs/format.md, in plain Python integers and without gradzip's own coders.

They use every feature of the format, and make choices that gradzip's encoder never makes but a decoder must follow:
wider fields than needed, escapes for exponents that have a code, any base, unpruned zeros, a dense block of zeros,
a sparse block that is half full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BLOCK, LANES = 4096, 32
RAW, DENSE, SPARSE = 0, 1, 2
ESCAPE = 256
BITS = {0: (8, 24), 1: (8, 8), 2: (5, 11)}  # by dtype code: exponent bits and field bits


@dataclass(frozen=True)
class Code:
    """A canonical code of (length, symbol) pairs; the escape takes what they leave."""

    lengths: dict[int, int]

    def escape_length(self) -> int:
        left = 256 - sum(256 >> n for n in self.lengths.values())
        return 8 - (left.bit_length() - 1)

    def codes(self) -> dict[int, tuple[int, int]]:
        """Length and code of each symbol, the code with its first bit lowest."""
        everything = self.lengths | {ESCAPE: self.escape_length()}
        result, code, previous = {}, 0, 0
        for symbol, length in sorted(everything.items(), key=lambda item: (item[1], item[0])):
            code <<= length - previous
            previous = length
            result[symbol] = (length, int(format(code, f"0{length}b")[::-1] or "0", 2) if length else 0)
            code += 1
        return result

    def table(self) -> bytes:
        nibbles = [self.lengths.get(s, 0) for s in range(256)]
        return bytes(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, 256, 2))


@dataclass
class Lanes:
    """32 stacks that share a refill stream."""

    x: list[int] = field(default_factory=lambda: [256] * LANES)
    refill: bytearray = field(default_factory=bytearray)

    def push(self, lane: int, bits: int, count: int) -> None:
        if self.x[lane] >= 1 << (16 - count):
            self.refill.append(self.x[lane] & 255)
            self.x[lane] >>= 8
        self.x[lane] = self.x[lane] << count | bits


@dataclass(frozen=True)
class Value:
    """One value of a dense block, and how it is to be coded."""

    exponent: int
    bits: int = 0  # what goes through the lane
    width: int = 0  # so many bits
    byte: Sequence[int] = ()  # what goes to the planes
    escaped: bool = False  # although there may be a code
    level: int | None = None  # paper mode


def dense(values: Sequence[Value], code: Code, base: int, head: int, single: bool = False) -> bytes:
    """A dense block; `head` gives a, r and the pruned flag."""
    lanes, codes, escapes = Lanes(), code.codes(), False
    for row in range((len(values) - 1) // LANES, -1, -1):
        lane = list(enumerate(values[row * LANES : (row + 1) * LANES]))
        for chunk in (2, 1, 0):
            for j, v in lane:
                part = min(max(v.width - 8 * chunk, 0), 8)
                lanes.push(j, v.bits >> (8 * chunk) & ((1 << part) - 1), part)
        for j, v in lane:
            if v.level is not None:
                lanes.push(j, v.level, 2)
        if single:
            continue
        symbols = {j: symbol_of(v.exponent, base) for j, v in lane}
        escaped = {j for j, v in lane if v.escaped or symbols[j] not in code.lengths}
        escapes = escapes or bool(escaped)
        for j, v in lane:
            if j in escaped:
                lanes.push(j, v.exponent, 8)
        for j, _ in lane:
            length, bits = codes[ESCAPE if j in escaped else symbols[j]]
            lanes.push(j, bits, length)
    whole = head & 3
    fielded = [v for v in values if v.exponent or not head >> 5 & 1]
    planes = b"".join(bytes(v.byte[j] for v in fielded) for j in range(whole))
    body = struct.pack("<32H", *lanes.x) + planes + bytes(lanes.refill)
    padding = -len(body) % 4
    head |= escapes << 6 | single << 7 | base << 8 | len(fielded) << 16 | padding << 30
    return struct.pack("<I", head) + body + bytes(padding)


def symbol_of(exponent: int, base: int) -> int:
    return 0 if exponent == 0 else (exponent - base - (exponent <= base)) % 256


def sparse(n: int, values: dict[int, tuple[int, int, int, int]]) -> bytes:
    """A sparse block of (sign, distance, mantissa, its bits) by position."""
    m, low = len(values), (n // len(values)).bit_length() - 1
    lows, highs, unary, mantissas = "", ["0"] * (m + ((n - 1) >> low)), "", ""
    for i, (p, (sign, distance, mantissa, bits)) in enumerate(sorted(values.items())):
        lows += low_first(sign | (p % (1 << low)) << 1, low + 1)
        highs[(p >> low) + i] = "1"
        unary += "0" * distance + "1"
        mantissas += low_first(mantissa, bits)
    total = sum(distance for _, distance, _, _ in values.values())
    data = struct.pack("<HH", m, total) + b"".join(packed(s) for s in (lows, "".join(highs), unary, mantissas))
    return data + bytes(-len(data) % 4)


def low_first(value: int, bits: int) -> str:
    return "".join(str(value >> i & 1) for i in range(bits))


def packed(bits: str) -> bytes:
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def frame(coding: int, dtype: int, numel: int, code: Code | None, book: int, blocks: list[tuple[int, bytes]]) -> bytes:
    index = b"".join(struct.pack("<H", len(data) // 4 | kind << 14) for kind, data in blocks)
    body = bytes([coding, book != 0, 0, 0]) + struct.pack("<I", book)
    body += (code.table() if code else b"") + index + bytes(-len(index) % 4) + b"".join(data for _, data in blocks)
    return b"GZ" + bytes([1, 2, dtype, 0, 0, 0]) + struct.pack("<QQ", numel, len(body)) + body


# -- the frames --------------------------------------------------------------------------------------------------------

CODE = Code({0: 2, 1: 3, 255: 2, 254: 4, 2: 8, 7: 8, 9: 7, 253: 6, 252: 5})
OTHER = Code({0: 1, 3: 4, 200: 4, 5: 3})


@dataclass(frozen=True)
class Frame:
    """A frame with what it must decode to, as bit patterns; `floor` where it is in near mode."""

    dtype: int
    encode: Callable[[], bytes]
    values: Callable[[], list[int]]
    floor: Callable[[], list[int]] | None = None
    book: Code | None = None
    book_id: int = 0


def join(dtype: int, exponent: int, kept: int, width: int) -> int:
    """The bit pattern of an exponent and the upper `width` bits of its field."""
    exponent_bits, field_bits = BITS[dtype]
    value = kept << (field_bits - width)
    return (
        value >> (field_bits - 1) << (exponent_bits + field_bits - 1)
        | exponent << (field_bits - 1)
        | (value & ((1 << (field_bits - 1)) - 1))
    )


def _fixed(dtype: int) -> tuple[list[tuple[int, bytes]], list[int]]:
    """Coding 0: single, escapes with r > 0, all zero, unpruned with planes."""
    top = 120 if dtype < 2 else 12
    blocks: list[tuple[int, bytes]] = []
    values: list[int] = []

    # every exponent is the base, fields of one bit: the sign alone
    signs = [i * i // 7 & 1 for i in range(BLOCK)]
    blocks.append((DENSE, dense([Value(top, s, 1) for s in signs], CODE, top, head=1 << 2 | 1 << 5, single=True)))
    values += [join(dtype, top, s, 1) for s in signs]

    # pruned, r = 3, no planes; exponents without a code, and escapes for some that have one
    exponents = [0 if i % 3 else top + (0, 1, -1, 2, -2, 3)[i * i % 6] - (i % 97 == 0) * 9 for i in range(BLOCK)]
    fields = [i * 5 % 8 for i in range(BLOCK)]
    coded = [Value(e, f if e else 0, 3 if e else 0, (), i % 50 == 1) for i, (e, f) in enumerate(zip(exponents, fields))]
    blocks.append((DENSE, dense(coded, CODE, top, head=3 << 2 | 1 << 5)))
    values += [join(dtype, e, f, 3) if e else 0 for e, f in zip(exponents, fields)]

    # all +0
    blocks.append((SPARSE, b""))
    values += [0] * BLOCK

    # not pruned although it has zeros, among them -0: one plane, and no bit for the lanes but the codes
    exponents = [0 if i % 5 == 0 else top - i % 2 for i in range(BLOCK)]
    planes = [i * 37 % 256 for i in range(BLOCK)]
    coded = [Value(e, 0, 0, (p,)) for e, p in zip(exponents, planes)]
    blocks.append((DENSE, dense(coded, CODE, top - 1, head=1)))
    values += [join(dtype, e, p, 8) for e, p in zip(exponents, planes)]
    return blocks, values


def fixed(dtype: int) -> Frame:
    last = [0x3F8CCCCD * (i + 1) & (0xFFFFFFFF if dtype == 0 else 0xFFFF) for i in range(19)]

    def encode() -> bytes:
        blocks, values = _fixed(dtype)
        raw = struct.pack(f"<19{'I' if dtype == 0 else 'H'}", *last)
        blocks.append((RAW, raw + bytes(-len(raw) % 4)))
        return frame(0, dtype, len(values) + len(last), CODE, 0, blocks)

    return Frame(dtype, encode, lambda: _fixed(dtype)[1] + last)


def full_fields() -> Frame:
    """One short block with a shared book: a = 2, r = 7, although narrower fields would do; 23 of 24 bits."""
    exponents = [0 if i % 9 == 4 else 100 + i % 5 for i in range(77)]
    kept = [(i * 0x2F1B3 + 5) << 4 & 0x7FFFFF for i in range(77)]

    def encode() -> bytes:
        coded = [Value(e, k & 127 if e else 0, 7 if e else 0, (k >> 7 & 255, k >> 15)) for e, k in zip(exponents, kept)]
        return frame(0, 0, 77, None, 0xC0DE, [(DENSE, dense(coded, OTHER, 99, head=2 | 7 << 2 | 1 << 5))])

    values = [join(0, e, k, 23) if e else 0 for e, k in zip(exponents, kept)]
    return Frame(0, encode, lambda: values, book=OTHER, book_id=0xC0DE)


def near() -> Frame:
    """Coding 1: sparse, empty, half full, a dense block of zeros, and one with widths from 1 to 24."""
    floors = [-20] * BLOCK * 4 + [(-128, -40, -12, -7, -3, 5)[i % 6] for i in range(100)]
    few = {p: (p // 7 & 1, p % 5, p * 11 % (1 << p % 5), p % 5) for p in (0, 31, 32, 1000, 4095)}
    many = {p: (p // 7 & 1, p % 5, p * 11 % (1 << p % 5), p % 5) for p in range(1, BLOCK, 2)}
    values = [0] * (4 * BLOCK)
    for start, placed in ((0, few), (2 * BLOCK, many)):
        for p, (s, d, k, _) in placed.items():
            values[start + p] = join(0, 127 - 20 + d, s << d | k, 1 + d)
    coded = []
    for i in range(100):
        floor, exponent = floors[4 * BLOCK + i], 255 if i == 50 else 0 if i % 11 == 3 else 120 + i % 7
        bits = 23 if floor == -128 or exponent == 255 else min(max(exponent - 127 - floor, 0), 23)
        part = (i * 0x9E3779 + 0x155555 >> (23 - bits)) & ((2 << bits) - 1) if exponent else 0
        part = part if exponent != 255 else 1 << 23  # -Inf
        coded.append(Value(exponent, part, 1 + bits if exponent else 0, (), i == 20))
        values.append(join(0, exponent, part, 1 + bits) if exponent else 0)

    def encode() -> bytes:
        blocks = [(SPARSE, sparse(BLOCK, few)), (SPARSE, b""), (SPARSE, sparse(BLOCK, many))]
        blocks.append((DENSE, dense([Value(0)] * BLOCK, CODE, 3, head=1 << 5)))  # the base is of no use
        blocks.append((DENSE, dense(coded, CODE, 122, head=1 << 5)))
        return frame(1, 0, len(values), CODE, 0, blocks)

    return Frame(0, encode, lambda: values, lambda: floors)


def paper() -> Frame:
    """Coding 2: levels as they please, which travel in the stream; a single block and one with escapes."""
    coded, values = [], []
    for i in range(BLOCK + 70):
        level, exponent = i * i % 4, 110 if i < BLOCK else (0 if i % 8 == 1 else 90 + i % 30)
        kept = 23 - 6 * level
        part = (i * 0x51EB851F >> 5) & ((2 << kept) - 1) if i % 64 == 0 or i >= BLOCK else i & 1
        coded.append(Value(exponent, part, 1 + kept, (), False, level) if exponent else Value(0))
        values.append(join(0, exponent, part, 1 + kept) if exponent else 0)
    sparse_levels = [Value(v.exponent, v.bits & ((2 << 5) - 1), 6, (), False, 3) for v in coded[:BLOCK]]
    values[:BLOCK] = [join(0, v.exponent, v.bits, 6) for v in sparse_levels]

    def encode() -> bytes:
        first = dense(sparse_levels, OTHER, 110, head=1 << 5, single=True)
        second = dense(coded[BLOCK:], OTHER, 103, head=1 << 5)
        return frame(2, 0, len(values), OTHER, 0, [(DENSE, first), (DENSE, second)])

    return Frame(0, encode, lambda: values)


HANDMADE = {
    "fixed-float32": fixed(0),
    "fixed-bfloat16": fixed(1),
    "fixed-float16": fixed(2),
    "full-fields-shared-book": full_fields(),
    "near": near(),
    "paper": paper(),
}
