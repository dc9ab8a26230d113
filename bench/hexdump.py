"""The worked example of docs/format.md: writes it (`python bench/hexdump.py`), or checks it (`--check`).

Forty values in near mode are encoded by the reference engine. The frame is then taken apart here, byte by byte, by a
decoder of its own that follows the page and shares no code with the engines.
"""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

import gradzip
from gradzip import engines

PAGE = Path(__file__).parent.parent / "docs/format.md"
START, END = "<!-- example: made by bench/hexdump.py -->", "<!-- /example -->"
VALUES, FLOOR, LANES = 40, -6, 32
ESCAPE = 256


def gradient() -> torch.Tensor:
    """Forty numbers around a zero, and at the end one that is far larger."""
    values = [(11 * i % 41 - 20) * 0.0151 for i in range(VALUES - 1)]
    return torch.tensor([*values, 100.0])


def frame() -> bytes:
    floors = torch.full((VALUES,), FLOOR, dtype=torch.int8)
    with engines.use("reference"):
        return bytes(gradzip.encode(gradient(), "gcomp", floor=floors).tolist())


class Dump:
    """Bytes with remarks, in order and without a hole."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.lines = data, 0, ["offset  bytes" + " " * 44 + "meaning"]

    def take(self, size: int, remark: str) -> bytes:
        part = self.data[self.at : self.at + size]
        assert len(part) == size, "the frame ends too early"
        rows = [part[i : i + 16] for i in range(0, size, 16)]
        for i, row in enumerate(rows):
            offset, note = self.at + 16 * i, remark if i == 0 else ""
            if 0 < i < len(rows) - 1 and not any(row):
                if any(rows[i - 1]) or i == 1:
                    self.lines.append("*" + " " * 56 + "zeros")
                continue
            self.lines.append(f"{offset:04x}    {row.hex(' '):47}  {note}".rstrip())
        self.at += size
        return part


def codes(table: bytes) -> dict[int, tuple[int, int]]:
    """Symbol -> (length, code as it lies in a state: bit-reversed)."""
    lengths = {s: table[s // 2] >> 4 * (s % 2) & 15 for s in range(256)}
    left = 256 - sum(1 << 8 - n for n in lengths.values() if n)
    lengths[ESCAPE] = 8 - (left.bit_length() - 1)
    result, code, previous = {}, 0, 0
    for symbol in sorted((s for s, n in lengths.items() if n), key=lambda s: (lengths[s], s)):
        code <<= lengths[symbol] - previous
        previous = lengths[symbol]
        result[symbol] = previous, int(f"{code:0{previous}b}"[::-1], 2)
        code += 1
    return result


class Lanes:
    """The stacks of a dense block; each remembers what it did, a line per value."""

    def __init__(self, states: bytes, refill: bytes) -> None:
        self.x, self.refill = list(struct.unpack("<32H", states)), list(refill)
        self.story: list[list[str]] = [[] for _ in range(LANES)]

    def say(self, lane: int, text: str) -> None:
        self.story[lane][-1] += text

    def pop(self, wanted: dict[int, int]) -> dict[int, int]:
        """One phase: lane -> bits to pop."""
        popped = {}
        for lane, bits in wanted.items():
            popped[lane] = self.x[lane] & (1 << bits) - 1
            self.x[lane] >>= bits
            self.say(lane, f"; pop {popped[lane]:0{bits}b}, state {self.x[lane]:x}")
        needy = [lane for lane in sorted(wanted) if self.x[lane] < 256]
        left = len(self.refill) - len(needy)
        for lane, byte in zip(needy, self.refill[left:], strict=True):
            self.x[lane] = self.x[lane] << 8 | byte
            self.say(lane, f" -> {self.x[lane]:x}")
        del self.refill[left:]
        return popped


def decode_rows(lanes: Lanes, book: dict[int, tuple[int, int]], base: int) -> Iterator[list[float]]:
    """The values of each row."""
    for start in range(0, VALUES, LANES):
        present = range(min(LANES, VALUES - start))
        symbols = {}
        for lane in present:
            x = lanes.x[lane]
            symbols[lane] = next(s for s, (n, code) in book.items() if x & (1 << n) - 1 == code)
            lanes.story[lane].append(f"value {start + lane:2}: state {x:x}")
        lanes.pop({lane: book[symbol][0] for lane, symbol in symbols.items()})
        for lane, symbol in symbols.items():
            lanes.say(lane, ", escape" if symbol == ESCAPE else f", symbol {symbol}")
        raw = lanes.pop({lane: 8 for lane, symbol in symbols.items() if symbol == ESCAPE})
        exponents, kept = {}, {}
        for lane, symbol in symbols.items():
            e = raw[lane] if lane in raw else 0 if symbol == 0 else symbol + base
            exponents[lane] = e = (e + (e > 255)) & 255
            if e:
                kept[lane] = min(23, e - 127 - FLOOR)
            lanes.say(lane, f", e = {e}" + (f", k = {kept[lane]}" if e else ""))
        bits = dict.fromkeys(kept, 0)
        for j in (0, 8, 16):
            parts = {lane: min(8, k + 1 - j) for lane, k in kept.items() if k + 1 > j}
            for lane, part in lanes.pop(parts).items():
                bits[lane] |= part << j
        row = []
        for lane in present:
            value = 0.0
            if lane in kept:
                k = kept[lane]
                sign, mantissa = bits[lane] >> k, bits[lane] & (1 << k) - 1
                value = (-1) ** sign * (1 + mantissa / (1 << k)) * 2.0 ** (exponents[lane] - 127)
            lanes.say(lane, f"; q = {value:.9g}")
            row.append(value)
        yield row


def walk(data: bytes) -> tuple[list[str], list[str]]:
    """The annotated bytes, and what a few lanes do."""
    dump = Dump(data)
    dump.take(2, 'magic "GZ"')
    dump.take(1, "version 1")
    dump.take(1, "codec 2, gcomp")
    dump.take(1, "dtype 0, float32")
    dump.take(1, "flags: no checksum")
    dump.take(2, "reserved")
    numel = struct.unpack("<Q", dump.take(8, f"numel = {VALUES}"))[0]
    size = struct.unpack("<Q", dump.take(8, f"body_bytes = {len(data) - 24}"))[0]
    assert (numel, size) == (VALUES, len(data) - 24)
    dump.take(1, "coding 1, near")
    dump.take(1, "flags: no shared book")
    dump.take(2, "reserved")
    dump.take(4, "book 0: the table is in the frame")
    table = dump.data[dump.at : dump.at + 128]
    book = codes(table)
    listed = ", ".join(f"{code:0{n}b}"[::-1] + (" escape" if s == ESCAPE else f" {s}") for s, (n, code) in book.items())
    dump.take(128, "table: two lengths a byte, low nibble first")
    entry = struct.unpack("<H", data[dump.at : dump.at + 2])[0]
    dump.take(2, f"index: kind {entry >> 14} (dense), {entry & 0x3FFF} words")
    dump.take(2, "padding")
    head = struct.unpack("<I", data[dump.at : dump.at + 4])[0]
    base, count, padding = head >> 8 & 255, head >> 16 & 0x3FFF, head >> 30
    flags = ["pruned"] * (head >> 5 & 1) + ["escapes"] * (head >> 6 & 1) + ["single"] * (head >> 7 & 1)
    remark = (
        f"head: a = {head & 3}, r = {head >> 2 & 7}, {', '.join(flags)}, base {base}, m = {count}, padding {padding}"
    )
    dump.take(4, remark)
    states = dump.take(64, "states of lanes 0 to 31")
    refill = dump.take(len(data) - padding - dump.at, "refill, read from its end")
    dump.take(padding, "padding")
    assert dump.at == len(data)
    dump.lines += ["", f"codes, first bit first, and their symbols: {listed}"]

    lanes = Lanes(states, refill)
    decoded = [value for row in decode_rows(lanes, book, base) for value in row]
    assert lanes.x == [256] * LANES, "the lanes do not end where they began"
    assert not lanes.refill, "the refill stream is not used up"
    assert decoded == [round(float(x) * 64) / 64 for x in gradient()], "the grid of the example is 1/64"
    shown = sorted({0, decoded.index(0.0) % LANES, (VALUES - 1) % LANES})
    return dump.lines, [f"lane {lane:2}, {line}" for lane in shown for line in lanes.story[lane]]


def example() -> str:
    data = frame()
    dump, lanes = walk(data)
    return "\n".join(
        [
            START,
            f"{VALUES} values in near mode: x_i = (11 i mod 41 - 20) · 0.0151, but x_39 = 100. All floors are {FLOOR}, "
            f"so the grid is 1/64. The frame has {len(data)} bytes.",
            "```",
            *dump,
            "```",
            "What the lanes of the first value, the zero and the last value do. States are hexadecimal, popped bits "
            "binary; `->` is a refill.",
            "```",
            *lanes,
            "```",
            END,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    check = parser.parse_args().check
    page, made = PAGE.read_text(), example()
    if made in page:
        return
    if check:
        raise SystemExit(f"{PAGE.name} does not show what the codec writes: run python bench/hexdump.py")
    text, found = re.subn(f"{START}.*?{END}", lambda _: made, page, flags=re.DOTALL)
    assert found == 1, f"{PAGE} has no place for the example: write {START} and {END} there"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
