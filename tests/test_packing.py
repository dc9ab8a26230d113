"""Bits, ternary digits and positions: packed, unpacked, and refused where they make no sense."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import generator
from hypothesis import given
from hypothesis import strategies as st

from gradzip.codecs import packing
from gradzip.errors import Corrupt


@given(st.integers(1, 8), st.integers(0, 300), st.integers(0, 1000))
def test_bits_come_back(bits: int, count: int, seed: int) -> None:
    values = torch.randint(0, 1 << bits, (count,), generator=generator(seed)).to(torch.uint8)
    data = packing.pack(values, bits)
    assert data.numel() == packing.packed_bytes(count, bits) == math.ceil(count * bits / 8)
    assert torch.equal(packing.unpack(data, count, bits), values)
    number = sum(int(v) << bits * i for i, v in enumerate(values))  # the definition: bits from the lowest up
    assert bytes(data.tolist()) == number.to_bytes(data.numel(), "little")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7])
def test_bits_behind_the_end_are_refused(bits: int) -> None:
    data = packing.pack(torch.zeros(3, dtype=torch.uint8), bits)
    for bit in range(3 * bits, 8 * data.numel()):
        damaged = data.clone()
        damaged[bit // 8] |= 1 << bit % 8
        with pytest.raises(Corrupt, match="behind"):
            packing.unpack(damaged, 3, bits)


@given(st.integers(0, 300), st.integers(0, 1000))
def test_trits_come_back(count: int, seed: int) -> None:
    values = torch.randint(0, 3, (count,), generator=generator(seed)).to(torch.uint8)
    data = packing.pack_trits(values)
    assert data.numel() == packing.trit_bytes(count) == math.ceil(count / 5)
    assert torch.equal(packing.unpack_trits(data, count), values)


@pytest.mark.parametrize(("byte", "count"), [(243, 5), (255, 5), (3, 1), (242, 4)])
def test_bytes_that_are_no_trits_are_refused(byte: int, count: int) -> None:
    with pytest.raises(Corrupt, match="ternary"):
        packing.unpack_trits(torch.tensor([byte], dtype=torch.uint8), count)


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    numel = draw(st.integers(1, 3000) | st.sampled_from([1 << 12, 1 << 20, (1 << 20) + 1]))
    count = draw(st.integers(0, min(numel, 50)) | st.integers(0, min(numel, 3000)))
    index = torch.randperm(numel, generator=generator(draw(st.integers(0, 1000))))[:count].sort().values
    if draw(st.booleans()) and count:  # crowded at the end, where the upper parts are largest
        index = torch.arange(numel - count, numel)
    return numel, index


@given(choices())
def test_positions_come_back(choice: tuple[int, torch.Tensor]) -> None:
    numel, index = choice
    data = packing.pack_positions(index, numel)
    assert data.numel() == packing.position_bytes(numel, index.numel())
    assert torch.equal(packing.unpack_positions(data, numel, index.numel()), index)


@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.05, 0.3, 0.5, 0.99])
def test_positions_are_near_their_entropy(ratio: float) -> None:
    numel = 1_000_000
    count = round(ratio * numel)
    entropy = -(ratio * math.log2(ratio) + (1 - ratio) * math.log2(1 - ratio)) * numel
    bits = 8 * packing.position_bytes(numel, count)
    assert entropy < bits < entropy + 1.6 * count + 16 or bits == numel


@given(choices(), st.data())
def test_damaged_positions_are_refused_or_are_others(choice: tuple[int, torch.Tensor], draw: st.DataObject) -> None:
    numel, index = choice
    data = packing.pack_positions(index, numel).clone()
    if not data.numel():
        return
    bit = draw.draw(st.integers(0, 8 * data.numel() - 1))
    data[bit // 8] ^= 1 << bit % 8
    try:
        other = packing.unpack_positions(data, numel, index.numel())
    except Corrupt:
        return
    assert not torch.equal(other, index)
    assert other.numel() == index.numel()
    assert bool((other.diff() > 0).all())
    assert int(other[0]) >= 0
    assert int(other[-1]) < numel


def test_bits_behind_the_last_value_are_found_where_the_host_sees_them() -> None:
    packed = packing.pack(torch.ones(3, dtype=torch.uint8), 1)
    near = packed | 128
    assert torch.equal(packing.unpack(packed, 3, 1), torch.ones(3, dtype=torch.uint8))
    with pytest.raises(Corrupt):
        packing.unpack(packed, 3, 1, near)
