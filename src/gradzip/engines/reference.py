"""The GComp body in plain NumPy, in the order of docs/format.md. Slow on purpose: the oracle of the other engines."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import Corrupt, Truncated
from . import huffman
from .layout import (
    BLOCK,
    BODY_HEAD_BYTES,
    DENSE,
    DENSE_HEAD_BYTES,
    ESCAPE,
    FIXED,
    LANES,
    NEAR,
    PAPER,
    RAW,
    SEGMENT,
    SPARSE,
    TABLE_BYTES,
    FloatLayout,
    Floor,
    Job,
    blocks_of,
    blocks_offset,
    float_layout,
    index_offset,
    segments_of,
)
from .reference_sparse import decode_sparse, encode_sparse
from .reference_values import (
    floor_values,
    kept_bits,
    lane_part,
    map_values,
    pad4,
    paper_levels,
    sampled,
    split,
    symbols_of,
)

NAME = "reference"

# --- Two steps: map, then code exactly ---------------------------------------------------------------------------


def encode(
    x: torch.Tensor,
    job: Job,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    lengths: torch.Tensor | None = None,
) -> int:
    """Writes the body of flat `x` into uint8 `out` and returns its length in bytes.

    `lengths`, (segments, 256) uint8, are the code lengths to use; by default the encoder samples `x`.
    """
    layout = float_layout(x.dtype)
    bits = _bits(x)
    floors = floor_values(floor, job)
    mapped = map_values(bits, job, floors) if x.dtype == torch.float32 else bits
    coding = job.coding if x.dtype == torch.float32 else FIXED
    if lengths is None:
        lengths = code_lengths(histogram_of(mapped, layout), job.limit)
    tables = lengths.numpy()

    blob = bytearray([coding, 1 if job.book else 0, 0, 0]) + job.book.to_bytes(4, "little")
    if not job.book:
        for table in tables:
            blob += huffman.pack_table(table).tobytes()
    index, blocks = bytearray(), bytearray()
    for start in range(0, mapped.size, BLOCK):
        values = mapped[start : start + BLOCK]
        block_floors = None if floors is None else floors[start : start + BLOCK]
        kind, block = encode_block(values, layout, coding, tables[start // SEGMENT], block_floors)
        index += (len(block) // 4 | kind << 14).to_bytes(2, "little")
        blocks += block
    blob += pad4(index) + blocks
    out[: len(blob)] = torch.frombuffer(blob, dtype=torch.uint8)
    return len(blob)


def decode(
    body: torch.Tensor,
    out: torch.Tensor,
    floor: torch.Tensor | Floor | None = None,
    shift: int = 0,
    add: bool = False,
    book: torch.Tensor | None = None,
) -> None:
    """Reads a body into flat `out`, adding to what is there if `add`.

    `book`, (segments, 256) uint8, are the code lengths where the frame uses a shared book.
    """
    layout = float_layout(out.dtype)
    data = body.numpy()
    coding, flags, _, tables = read_head(data, out.numel())
    if flags & 1:
        assert book is not None
        tables = list(book.numpy())
    floors = floor_values(floor, Job("near", shift=shift)) if coding == NEAR else None
    index_at, at = index_offset(out.numel(), flags & 1), blocks_offset(out.numel(), flags & 1)
    index = (
        data[index_at : index_at + 2 * blocks_of(out.numel())].view("<u2") if out.numel() else np.empty(0, np.uint16)
    )
    if data[index_at + 2 * index.size : at].any():
        raise Corrupt("the padding behind the block index is not zero")
    ends = at + np.cumsum(4 * (index & 0x3FFF).astype(np.int64))
    if (ends > data.size).any():
        raise Truncated(f"block {int((ends > data.size).argmax())} ends behind the end of the payload")
    if (last := int(ends[-1]) if ends.size else at) != data.size:
        raise Corrupt(f"{data.size - last} bytes follow the last block")
    values = np.zeros(out.numel(), _int_type(layout))
    for number, entry in enumerate(index):
        start = number * BLOCK
        stop = min(start + BLOCK, values.size)
        size = 4 * int(entry & 0x3FFF)
        block_floors = None if floors is None else floors[start:stop]
        values[start:stop] = decode_block(
            data[at : at + size], int(entry) >> 14, stop - start, layout, coding, tables[start // SEGMENT], block_floors
        )
        at += size
    decoded = torch.from_numpy(values.view(_signed(layout))).view(out.dtype)
    if add:
        out.add_(decoded)
        out.masked_fill_(out.isnan(), torch.nan)  # one NaN for all sums
    else:
        out.copy_(decoded)


def histogram(x: torch.Tensor, job: Job, floor: torch.Tensor | Floor | None = None) -> torch.Tensor:
    """Sampled symbol counts of each segment, (segments, 256) int64."""
    layout = float_layout(x.dtype)
    bits = _bits(x)
    mapped = map_values(bits, job, floor_values(floor, job)) if x.dtype == torch.float32 else bits
    return histogram_of(mapped, layout)


def code_lengths(histograms: torch.Tensor, limit: int = 8) -> torch.Tensor:
    """Code lengths for each row of (segments, 256) counts."""
    rows = [huffman.code_lengths(row, limit) for row in histograms.numpy()]
    return torch.from_numpy(np.array(rows, np.uint8).reshape(-1, 256))


def read_head(data: np.ndarray, numel: int) -> tuple[int, int, int, list[np.ndarray]]:
    if data.size < BODY_HEAD_BYTES:
        raise Truncated("the gcomp body ends inside its head")
    coding, flags = int(data[0]), int(data[1])
    book = int(data[4:8].copy().view("<u4")[0])
    if coding > PAPER or flags > 1 or data[2] or data[3] or bool(flags & 1) != bool(book):
        raise Corrupt("reserved or contradictory bits in the head of the gcomp body")
    if data.size < blocks_offset(numel, book):
        raise Truncated("the gcomp body ends inside its tables")
    tables = []
    if not book:
        for i in range(segments_of(numel)):
            at = BODY_HEAD_BYTES + i * TABLE_BYTES
            tables.append(huffman.unpack_table(data[at : at + TABLE_BYTES]))
    return coding, flags, book, tables


# --- Blocks: which kind a block gets -----------------------------------------------------------------------------


def encode_block(
    values: np.ndarray, layout: FloatLayout, coding: int, lengths: np.ndarray, floors: np.ndarray | None
) -> tuple[int, bytes]:
    if not values.any():
        return SPARSE, b""
    raw = pad4(bytearray(values.tobytes()))
    if coding == NEAR:
        assert floors is not None
        sparse = encode_sparse(values, floors, lengths)
        if sparse is not None and len(sparse) < len(raw):
            return SPARSE, sparse
    dense = _encode_dense(values, layout, coding, lengths, floors)
    return (DENSE, bytes(dense)) if len(dense) < len(raw) else (RAW, bytes(raw))


def decode_block(
    data: np.ndarray,
    kind: int,
    n: int,
    layout: FloatLayout,
    coding: int,
    lengths: np.ndarray,
    floors: np.ndarray | None,
) -> np.ndarray:
    if kind == RAW:
        size = n * layout.item_bytes
        if data.size != (size + 3) // 4 * 4 or data[size:].any():
            raise Corrupt("a raw block has the wrong size or padding")
        return data[:size].copy().view(_int_type(layout))
    if kind == DENSE:
        return _decode_dense(data, n, layout, coding, lengths, floors)
    if kind == SPARSE:
        if data.size == 0:
            return np.zeros(n, _int_type(layout))
        if coding != NEAR:
            raise Corrupt("a sparse block in a frame that is not in near mode")
        assert floors is not None
        return decode_sparse(data, n, floors)
    raise Corrupt("a block of a reserved kind")


# --- Dense block -------------------------------------------------------------------------------------------------


def histogram_of(mapped: np.ndarray, layout: FloatLayout) -> torch.Tensor:
    counts = np.zeros((segments_of(mapped.size), 256), np.int64)
    for start in range(0, mapped.size, BLOCK):
        values = mapped[start : start + BLOCK]
        exponent = split(values, layout)[0]
        if sampled(exponent).any():
            symbols, _ = symbols_of(exponent)
            counts[start // SEGMENT] += np.bincount(sampled(symbols), minlength=256)
    return torch.from_numpy(counts)


class _Lanes:
    """32 stacks of bits that share one refill stream."""

    def __init__(self, states: np.ndarray, refill: bytearray):
        self.x = states.astype(np.int64)
        self.refill = refill

    def push(self, bits: np.ndarray, count: np.ndarray) -> None:
        full = self.x >= (1 << (16 - count))
        self.refill += (self.x[full] & 255).astype(np.uint8).tobytes()
        self.x = np.where(full, self.x >> 8, self.x)
        self.x = self.x << count | bits

    def pop(self, count: np.ndarray) -> np.ndarray:
        bits = self.x & ((1 << count) - 1)
        self.x = self.x >> count
        low = self.x < 256
        need = int(low.sum())
        if need > len(self.refill):
            raise Corrupt("a block's refill stream is too short (near mode: or the floors differ from the encoder's)")
        if need:
            taken = np.frombuffer(bytes(self.refill[-need:]), np.uint8)
            del self.refill[-need:]
            self.x[low] = self.x[low] << 8 | taken
        return bits


def _rows(values: np.ndarray) -> np.ndarray:
    """(rows, 32), the last row filled up with zeros."""
    padded = np.zeros(-(-values.size // LANES) * LANES, np.int64)
    padded[: values.size] = values
    return padded.reshape(-1, LANES)


def _field_width(mantissa: np.ndarray, sign: np.ndarray, layout: FloatLayout) -> int:
    combined = int(np.bitwise_or.reduce(mantissa, initial=0))
    if combined == 0:
        return int(sign.any())
    return layout.field_bits - ((combined & -combined).bit_length() - 1)


def _encode_dense(
    values: np.ndarray, layout: FloatLayout, coding: int, lengths: np.ndarray, floors: np.ndarray | None
) -> bytearray:
    exponent, mantissa, sign = split(values, layout)
    symbols, base = symbols_of(exponent)
    single = bool((exponent == exponent[0]).all())

    planes, level = b"", np.zeros(values.size, np.int64)
    if coding == FIXED:
        pruned = not (values[exponent == 0] != 0).any()
        has_field = exponent > 0 if pruned else np.ones(values.size, bool)
        width = _field_width(mantissa[has_field], sign[has_field], layout)
        whole, rest = divmod(width, 8)
        field = sign << (layout.field_bits - 1) | mantissa
        kept = np.where(has_field, field >> (layout.field_bits - width), 0)
        planes = b"".join((kept[has_field] >> (rest + 8 * j) & 255).astype(np.uint8).tobytes() for j in range(whole))
        bits, count = kept & ((1 << rest) - 1), np.where(has_field, rest, 0)
    else:
        assert floors is not None
        pruned, has_field, whole, rest = True, exponent > 0, 0, 0
        bits, count = lane_part(exponent, mantissa, sign, coding, floors)
        level = paper_levels(exponent, floors)

    codes, code_lengths_ = huffman.codes(lengths)
    symbols = np.where(lengths[symbols] > 0, symbols, ESCAPE)
    escapes = bool((symbols == ESCAPE).any()) and not single
    lanes = _Lanes(np.full(LANES, 256), bytearray())
    present = _rows(np.ones(values.size, np.int64))
    table = zip(*(_rows(a)[::-1] for a in (symbols, exponent, bits, count, level)), present[::-1])
    for symbol, e, b, c, lv, here in table:
        for j in (2, 1, 0):
            part = np.clip(c - 8 * j, 0, 8)
            lanes.push(b >> (8 * j) & ((1 << part) - 1), part)
        if coding == PAPER:
            nonzero = here * (e > 0)
            lanes.push(lv * nonzero, 2 * nonzero)
        if not single:
            escaped = here * (symbol == ESCAPE)
            lanes.push(e * escaped, 8 * escaped)
            lanes.push(here * codes[symbol].astype(np.int64), here * code_lengths_[symbol].astype(np.int64))

    body = lanes.x.astype("<u2").tobytes() + planes + bytes(lanes.refill)
    padding = -len(body) % 4
    flags = whole | rest << 2 | pruned << 5 | escapes << 6 | single << 7
    head = flags | base << 8 | int(has_field.sum()) << 16 | padding << 30
    return bytearray(head.to_bytes(4, "little") + body + bytes(padding))


def _decode_dense(
    data: np.ndarray, n: int, layout: FloatLayout, coding: int, lengths: np.ndarray, floors: np.ndarray | None
) -> np.ndarray:
    if data.size < DENSE_HEAD_BYTES:
        raise Corrupt("a dense block ends inside its head")
    head = int(data[:4].copy().view("<u4")[0])
    whole, rest, pruned, escapes, single = head & 3, head >> 2 & 7, head >> 5 & 1, head >> 6 & 1, head >> 7 & 1
    base, fields, padding = head >> 8 & 255, head >> 16 & 0x3FFF, head >> 30
    width = 8 * whole + rest
    refill_at, refill_end = DENSE_HEAD_BYTES + whole * fields, data.size - padding
    if width > layout.field_bits or (coding != FIXED and (width or not pruned)):
        raise Corrupt("a dense block claims an impossible field width")
    if base >> layout.exponent_bits or fields > n or (single and escapes):
        raise Corrupt("the head of a dense block contradicts itself")
    if refill_at > refill_end or data[refill_end:].any():
        raise Corrupt("a dense block is shorter than its head says, or its padding is not zero")
    states = data[4:DENSE_HEAD_BYTES].view("<u2")
    if (states < 256).any():
        raise Corrupt("a lane state of a dense block is below 256")
    lanes = _Lanes(states, bytearray(data[refill_at:refill_end].tobytes()))
    symbol_of, length_of = huffman.decode_table(lengths)

    rows = -(-n // LANES)
    exponent, bits, level = (np.zeros((rows, LANES), np.int64) for _ in range(3))
    present = _rows(np.ones(n, np.int64))
    floor_rows = _rows(floors) if floors is not None else np.zeros((rows, LANES), np.int64)
    for row in range(rows):
        here = present[row]
        if single:
            e = here * base
        else:
            symbol = symbol_of[lanes.x & 255]
            lanes.pop(here * length_of[lanes.x & 255])
            e = symbol + base
            e = np.where(symbol == 0, 0, (e + (e > 255)) & 255)
            escaped = here * (symbol == ESCAPE)
            raw = lanes.pop(8 * escaped)
            if escaped.any() and not escapes:
                raise Corrupt("an escape in a block that says it has none")
            e = here * np.where(symbol == ESCAPE, raw, e)
            if (e >> layout.exponent_bits).any():
                raise Corrupt("an exponent is out of range")
        if coding == FIXED:
            count = here * rest * ((e > 0) | (pruned == 0))
        else:
            nonzero = here * (e > 0)
            if coding == PAPER:
                level[row] = lanes.pop(2 * nonzero)
                kept = 23 - 6 * level[row]
            else:
                kept = kept_bits(e, coding, floor_rows[row])
            count = nonzero * (1 + kept)
        for j in (0, 1, 2):
            bits[row] |= lanes.pop(np.clip(count - 8 * j, 0, 8)) << (8 * j)
        exponent[row] = e
    if (lanes.x != 256).any() or lanes.refill:
        raise Corrupt(
            "the lanes of a dense block do not end where they began (near mode: or floors differ from the encoder's)"
        )

    e, lane_bits = exponent.reshape(-1)[:n], bits.reshape(-1)[:n]
    if coding == FIXED:
        has_field = e > 0 if pruned else np.ones(n, bool)
        if int(has_field.sum()) != fields:
            raise Corrupt("a dense block holds another number of fields than its head says")
        kept = lane_bits
        for j in range(whole):
            at = DENSE_HEAD_BYTES + j * fields
            kept[has_field] |= data[at : at + fields].astype(np.int64) << (rest + 8 * j)
        field = kept << (layout.field_bits - width)
        sign, mantissa = field >> (layout.field_bits - 1), field & ((1 << (layout.field_bits - 1)) - 1)
    else:
        kept = 23 - 6 * level.reshape(-1)[:n] if coding == PAPER else kept_bits(e, coding, floor_rows.reshape(-1)[:n])
        sign, mantissa = lane_bits >> kept, (lane_bits & ((1 << kept) - 1)) << (23 - kept)
        if int((e > 0).sum()) != fields:
            raise Corrupt("a dense block holds another number of values than its head says")
    result = sign << (8 * layout.item_bytes - 1) | e << (layout.field_bits - 1) | mantissa
    return result.astype(_int_type(layout))


# --- Helpers -----------------------------------------------------------------------------------------------------


def _int_type(layout: FloatLayout) -> type[np.unsignedinteger]:
    return np.uint32 if layout.item_bytes == 4 else np.uint16


def _signed(layout: FloatLayout) -> type[np.signedinteger]:
    return np.int32 if layout.item_bytes == 4 else np.int16


def _bits(x: torch.Tensor) -> np.ndarray:
    layout = float_layout(x.dtype)
    return x.detach().view(torch.int32 if layout.item_bytes == 4 else torch.int16).numpy().view(_int_type(layout))
