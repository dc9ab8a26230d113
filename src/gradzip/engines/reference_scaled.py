"""Block-scaled codes in NumPy, as docs/format.md has them: the oracle of the other engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .scaled_layout import ALIGN, FP8, INT4, LEAST_SCALE, NAN_SCALE, Form, Parts

NAME = "reference"

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_LARGEST = np.finfo(np.float32).max  # what a transform back makes of huge values may be more
_NAN = np.uint32(0x7FC00000).view(np.float32)


def code(parts: Parts, terms: Sequence[torch.Tensor | None], divisor: int = 1, out: torch.Tensor | None = None) -> None:
    """Codes all parts: their own values, or the sum of terms in their order, divided; into a frame, or into `outs`.

    A term is a frame, or None for the own values.
    """
    parts.check([*terms, out])
    frame = None if out is None else out.numpy()
    if frame is not None:
        frame[:] = 0
    with np.errstate(invalid="ignore", over="ignore"):
        for number in range(len(parts.outs)):
            total = _sum(parts, number, terms)
            total = total / np.float32(divisor) if divisor > 1 else total
            if frame is None:
                parts.outs[number].numpy()[:] = _canonical(total)
            else:
                _encode(parts.form, total, parts.array[number], frame)


def _sum(parts: Parts, number: int, terms: Sequence[torch.Tensor | None]) -> Floats:
    total: Floats | None = None
    for term in terms or [None]:
        if term is None:
            values = parts.values[number].numpy()
        else:
            values = _decoded(parts.form, term.numpy(), parts.array[number], parts.outs[number].numel())
        total = values if total is None else _canonical(total + values)
    assert total is not None
    return total


def _encode(form: Form, x: Floats, row: np.void, frame: Bytes) -> None:
    n, start = len(x), int(row["start"])
    for first in range(0, n, form.block):
        block = x[first : first + form.block]
        index = np.uint32((start + first) & 0xFFFFFFFF) + np.arange(len(block), dtype=np.uint32)
        turned = form.hadamard and len(block) == form.block
        if turned:
            block = _hadamard(_signed(block / np.float32(form.block), index, int(row["signs"])))
        scale = _scale(form, block, turned)
        at = 2 * (int(row["scale_at"]) + first // form.block)
        frame[at : at + 2] = np.array([scale], "<u2").view(np.uint8)
        codes = np.zeros(-(-len(block) // ALIGN) * ALIGN, np.uint8)
        if scale not in (0, NAN_SCALE):
            t = block * (np.float32(1) / _bfloat16(scale))
            draws = _draws(index, int(row["key"]), int(row["offset"]))
            codes[: len(block)] = _fp8(t, draws) if form.kind == FP8 else _integers(t, draws, form.most)
        if form.kind == INT4:
            codes = codes[::2] & np.uint8(15) | codes[1::2] << np.uint8(4)
        at = int(row["code_at"]) + first * form.bits // 8
        frame[at : at + len(codes)] = codes


def _decoded(form: Form, frame: Bytes, row: np.void, n: int) -> Floats:
    values = np.empty(n, np.float32)
    for first in range(0, n, form.block):
        count = min(form.block, n - first)
        at = 2 * (int(row["scale_at"]) + first // form.block)
        scale = _bfloat16(int(frame[at : at + 2].view("<u2")[0]))
        at = int(row["code_at"]) + first * form.bits // 8
        raw = frame[at : at + -(-count * form.bits // 8)]
        if form.kind == FP8:
            numbers = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn).float().numpy()
        elif form.kind == INT4:
            numbers = np.stack([raw << 4, raw & 0xF0], 1).reshape(-1)[:count].view(np.int8).astype(np.float32) / 16
        else:
            numbers = raw.view(np.int8).astype(np.float32)
        if form.hadamard and count == form.block:
            index = np.uint32((int(row["start"]) + first) & 0xFFFFFFFF) + np.arange(count, dtype=np.uint32)
            numbers = _signed(_hadamard(numbers), index, int(row["signs"])) + np.float32(0)  # exact; no -0
        values[first : first + count] = _canonical(np.clip(numbers * scale, -_LARGEST, _LARGEST))
    return values


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def _scale(form: Form, block: Floats, turned: bool) -> int:
    """The bfloat16 bits of a block's scale; 0: it decodes to zeros, as a transformed one of subnormals does."""
    magnitude = int((block.view(np.uint32) & np.uint32(0x7FFFFFFF)).max())
    if magnitude >= 0x7F800000:
        return NAN_SCALE
    if magnitude == 0 or (turned and magnitude < 0x00800000):
        return 0
    exact = np.uint32(magnitude).view(np.float32) / np.float32(form.most)
    return min(max(int(exact.view(np.uint32)) + 0xFFFF >> 16, LEAST_SCALE), form.largest_scale)


def _bfloat16(bits: int) -> np.float32:
    value: np.float32 = np.uint32(bits << 16).view(np.float32)
    return value


def _rounded(t: Floats, draws: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """t rounded up or down at random."""
    below = np.floor(t)
    rest = ((t - below) * np.float32(1 << 24)).astype(np.uint32)
    return below.astype(np.int32) + (rest + (draws >> 8) >> 24).astype(np.int32)


def _integers(t: Floats, draws: npt.NDArray[np.uint32], most: float) -> Bytes:
    return _rounded(t, draws).clip(-int(most), int(most)).astype(np.int8).view(np.uint8)


def _fp8(t: Floats, draws: npt.NDArray[np.uint32]) -> Bytes:
    """float8_e4m3fn: a binade has eight numbers, and what lies below 2^-6 has those of the lowest one."""
    field = np.maximum((t.view(np.uint32) >> 23 & 255).astype(np.int32), 127 - 6)
    inverse = (127 + 3 + 127 - field << 23).view(np.float32)  # of the distance of numbers
    q = _rounded(t * inverse, draws)
    magnitude = np.minimum(np.abs(q) + 8 * (field - 121), 126)
    found: Bytes = (magnitude | np.where(q < 0, 128, 0)).astype(np.uint8)
    return found


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x ^ x >> np.uint32(16)


def _draws(index: npt.NDArray[np.uint32], key: int, offset: int) -> npt.NDArray[np.uint32]:
    return _mix32(index ^ np.uint32(key & 0xFFFFFFFF)) + np.uint32((key >> 32) + offset & 0xFFFFFFFF)


def _signed(x: Floats, index: npt.NDArray[np.uint32], key: int) -> Floats:
    words = _draws(index // np.uint32(32), key, 0)
    flips = words >> (index % np.uint32(32)) & np.uint32(1)
    return (x.view(np.uint32) ^ flips << np.uint32(31)).view(np.float32)


def _hadamard(x: Floats) -> Floats:
    """The Walsh-Hadamard transform, without a factor: values 1 apart first, then 2, 4 ..."""
    step = 1
    while step < len(x):
        pairs = x.reshape(-1, 2, step)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        step *= 2
    return x


def _canonical(x: Floats) -> Floats:
    found: Floats = np.where(np.isnan(x), _NAN, x)
    return found
