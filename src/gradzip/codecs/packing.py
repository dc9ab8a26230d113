"""Small numbers, packed: values of 1 to 8 bits, ternary digits, and ascending positions.

Everything is a handful of whole-tensor operations, so that it runs wherever torch does; bytes are looked up in tables
where that is quicker, and on a GPU a kernel packs and unpacks values of 1 to 8 bits in one pass. Bits fill bytes from
the lowest up. What a packer leaves over in its last byte is zero, and an unpacker refuses anything else.

On CPUs all of them take (and give) rows as well: the last dimension is packed, for each row by itself.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import pad

from ..engines.cuda import pack_select
from ..errors import Corrupt

TRITS_PER_BYTE = 5  # 3^5 = 243 of 256
_GATHERED = 0x0102040810204080


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` values of that many bits take."""
    return (count * bits + 7) // 8


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 values below 2^bits as bytes."""
    if bits == 8:
        return values
    rows, size = values.shape[:-1], packed_bytes(values.shape[-1], bits)
    if values.dim() == 1 and pack_select.serves(values):
        return pack_select.pack_bits(values, bits, size)
    whole = pad(values, (0, -values.shape[-1] % 8))
    if bits == 1:  # each of eight bytes is moved to its place in the highest one, and none of the others gets there
        return (whole.view(torch.int64) * _GATHERED >> 56).to(torch.uint8)[..., :size]
    if 8 % bits == 0:
        return _folded(whole.view(-1, 8 // bits), bits).view(*rows, whole.shape[-1] * bits // 8)[..., :size]
    words = _folded(whole.view(-1, 8).to(torch.int64), bits)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(*rows, whole.shape[-1] * bits // 8)[..., :size]


def _folded(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row of values as one number."""
    folded = groups[:, 0] + 0  # a new tensor without the strides of the column, which a clone of one row keeps
    for place in range(1, groups.shape[1]):
        folded |= groups[:, place] << bits * place
    return folded


def unpack(
    data: torch.Tensor, count: int, bits: int, near: torch.Tensor | None = None, checked: bool = True
) -> torch.Tensor:
    """The inverse of `pack`, for exactly packed_bytes(count, bits) bytes; `near` has the same in the host's memory.

    Unless `checked`, the last byte is not looked at, for which the host would wait.
    """
    rows, stored = data.shape[:-1], data.shape[-1]
    assert stored == packed_bytes(count, bits)
    if bits == 8:
        return data
    if data.dim() == 1 and pack_select.serves(data):
        values = pack_select.unpack_bits(data, count, bits)
    elif 8 % bits == 0:
        words = _by_byte(bits, data.device).index_select(0, data.reshape(-1).int())
        values = words.view(torch.uint8).view(*rows, stored * (8 // bits))
    else:
        groups = pad(data, (0, -stored % bits))
        words = pad(groups.view(-1, bits), (0, 8 - bits)).contiguous().view(torch.int64)
        values = _unfolded(words.view(-1), bits, 8).to(torch.uint8).view(*rows, groups.shape[-1] // bits * 8)
    last = (data if near is None else near)[..., -1:]
    if checked and count * bits % 8 and bool((last >> count * bits % 8).any()):
        raise Corrupt("bits are set behind the last value")
    return values[..., :count]


@cache
def _by_byte(bits: int, device: torch.device) -> torch.Tensor:
    """The values that each byte stands for, as one word."""
    values = _unfolded(torch.arange(256, dtype=torch.uint8), bits, 8 // bits)
    return values.view({1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]).to(device)


def _unfolded(words: torch.Tensor, bits: int, places: int) -> torch.Tensor:
    return torch.stack([words >> bits * place & (1 << bits) - 1 for place in range(places)], 1).view(-1)


def trit_bytes(count: int) -> int:
    return -(-count // TRITS_PER_BYTE)


def pack_trits(values: torch.Tensor) -> torch.Tensor:
    """uint8 values 0, 1 and 2, five to a byte."""
    rows, size = values.shape[:-1], trit_bytes(values.shape[-1])
    groups = pad(values, (0, -values.shape[-1] % TRITS_PER_BYTE)).view(-1, TRITS_PER_BYTE)
    packed = groups[:, 4].clone()
    for place in (3, 2, 1, 0):
        packed.mul_(3).add_(groups[:, place])
    return packed.view(*rows, size)


def unpack_trits(data: torch.Tensor, count: int) -> torch.Tensor:
    assert data.shape[-1] == trit_bytes(count)
    values = trits_of(data)
    if bool((data >= 3**TRITS_PER_BYTE).any()) or bool(values[..., count:].any()):
        raise Corrupt("a byte is no group of five ternary digits")
    return values[..., :count]


def trits_of(data: torch.Tensor) -> torch.Tensor:
    """Five digits for each byte, whatever it is; nothing waits for a GPU."""
    digits = _trits(data.device).index_select(0, data.reshape(-1).int())
    return digits.view(*data.shape[:-1], data.shape[-1] * TRITS_PER_BYTE)


@cache
def _trits(device: torch.device) -> torch.Tensor:
    """The digits of each byte, (256, 5)."""
    powers = 3 ** torch.arange(TRITS_PER_BYTE)
    return (torch.arange(256)[:, None] // powers % 3).to(torch.uint8).to(device)


# -- positions: k different indices below n in ascending order ---------------------------------------------------------
#
# Elias and Fano: of each index the lowest `width` bits as they are, and the rest in a bit vector where the i-th index
# sets bit (index >> width) + i. With width = log2(n/k) that takes less than 2 bits per index over the entropy of the
# choice, and its size follows from n and k. Where many are chosen, a plain bit vector of n bits is smaller.


def _low_width(numel: int, count: int) -> int:
    """Bits of each index that are stored as they are; 0: a plain bit vector."""
    width = (numel // count).bit_length() - 1
    fano = _low_bytes(count, width) + packed_bytes(_upper_bits(numel, count, width), 1)
    return width if fano < packed_bytes(numel, 1) else 0


def _low_bytes(count: int, width: int) -> int:
    return width // 8 * count + packed_bytes(count, width % 8)


def _upper_bits(numel: int, count: int, width: int) -> int:
    return ((numel - 1) >> width) + count


def position_bytes(numel: int, count: int) -> int:
    """Bytes that `count` positions below `numel` take."""
    if count == 0:
        return 0
    width = _low_width(numel, count)
    if width == 0:
        return packed_bytes(numel, 1)
    return _low_bytes(count, width) + packed_bytes(_upper_bits(numel, count, width), 1)


def pack_positions(index: torch.Tensor, numel: int) -> torch.Tensor:
    """Ascending int64 indices below `numel` as bytes."""
    count = index.numel()
    if count == 0:
        return index.new_empty(0, dtype=torch.uint8)
    width = _low_width(numel, count)
    if width == 0:
        return pack(_marked(index, numel), 1)
    parts = [(index >> 8 * plane).to(torch.uint8) for plane in range(width // 8)]
    if width % 8:
        parts.append(pack((index >> width // 8 * 8 & (1 << width % 8) - 1).to(torch.uint8), width % 8))
    upper = (index >> width) + torch.arange(count, device=index.device)
    return torch.cat([*parts, pack(_marked(upper, _upper_bits(numel, count, width)), 1)])


def unpack_positions(
    data: torch.Tensor, numel: int, count: int, near: torch.Tensor | None = None, checked: bool = True
) -> torch.Tensor:
    """The inverse, for position_bytes(numel, count) bytes; Corrupt unless `count` indices ascend below numel.

    Unless `checked`, nothing waits for a GPU, and bytes that nobody has packed become some indices below numel.
    """
    assert data.numel() == position_bytes(numel, count)
    if count == 0:
        return data.new_empty(0, dtype=torch.int64)
    width, near = _low_width(numel, count), data if near is None else near
    start = _low_bytes(count, width) if width else 0
    bits = _upper_bits(numel, count, width) if width else numel
    marks = unpack(data[start:], bits, 1, near[start:], checked)
    marked = marks.nonzero().view(-1) if checked else _places(marks, count)
    if marked.numel() != count:
        raise Corrupt(f"{marked.numel()} positions are marked where {count} values follow")
    if width == 0:
        return marked
    index = (marked - torch.arange(count, device=data.device)) << width
    for plane in range(width // 8):
        index |= data[plane * count : (plane + 1) * count].to(torch.int64) << 8 * plane
    if width % 8:
        low = slice(width // 8 * count, start)
        odd = unpack(data[low], count, width % 8, near[low], checked)
        index |= odd.to(torch.int64) << width // 8 * 8
    if not checked:
        return index.clamp_(0, numel - 1)
    if bool((index.diff() <= 0).any() | (index[-1] >= numel)):
        raise Corrupt(f"the positions do not ascend from 0 to {numel - 1}")
    return index


def _places(marks: torch.Tensor, count: int) -> torch.Tensor:
    """Where the first `count` marks of a vector are."""
    number = marks.cumsum(0, dtype=torch.int64)
    number = torch.where(marks.view(torch.bool) & (number <= count), number - 1, count)
    places = torch.zeros(count + 1, dtype=torch.int64, device=marks.device)  # the last one is for what is no mark
    return places.scatter_(0, number, torch.arange(len(marks), device=marks.device))[:count]


def _marked(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=index.device).index_fill_(0, index, 1)
