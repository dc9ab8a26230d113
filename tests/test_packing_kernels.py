"""Kernels that pack few-bit codes and select large values, against torch's operations: emulated, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import emulated
import pytest
import torch
from conftest import gradient, special
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradzip.codecs import parse, selection
from gradzip.codecs.packing import pack, packed_bytes, unpack
from gradzip.engines.cuda import launch, pack_select

KINDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(scope="module")
def gpu() -> Iterator[emulated.Emulator]:
    if emulated.COMPILER is None:
        pytest.skip("emulating a GPU needs g++")
    yield emulated.install()
    launch.emulator = None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5000), st.integers(1, 7), st.integers(0, 8))
def test_bits_are_packed_as_torch_packs_them(gpu: emulated.Emulator, count: int, bits: int, skipped: int) -> None:
    rng = torch.Generator().manual_seed(count)
    values = torch.randint(0, 1 << bits, (count + skipped,), dtype=torch.uint8, generator=rng)[skipped:]
    expected = pack(values, bits)
    packed = pack_select.pack_bits(values, bits, packed_bytes(count, bits))
    assert torch.equal(packed, expected)
    assert torch.equal(pack_select.unpack_bits(packed, count, bits), unpack(expected, count, bits))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("numel", [1, 31, 8192, 8193, 50_001])
def test_large_values_are_found_in_order(gpu: emulated.Emulator, dtype: torch.dtype, numel: int) -> None:
    x = gradient(numel, seed=numel)
    x[:40] = special(40)[:numel]
    x = x.to(dtype)
    magnitude = selection.magnitudes(x)
    for share in (0.0, 0.5, 0.99, 1.0):
        least = magnitude.sort().values[int(share * (numel - 1))]
        expected = (magnitude >= least).nonzero().view(-1)
        found = pack_select.select_large(x, least, numel)
        assert found is not None
        assert torch.equal(found, expected)
        too_many = pack_select.select_large(x, least, expected.numel() - 1)
        assert too_many is None, "more than there is room for"


@pytest.mark.parametrize("numel", [70_000, 100_003])
def test_the_largest_are_the_same_with_kernels(
    gpu: emulated.Emulator, monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    x = gradient(numel)
    x[5000:6000] = x[0].abs()  # equal ones: the first count
    expected = selection.largest(x, numel // 100)
    monkeypatch.setattr(pack_select, "serves", lambda tensor: True)
    gpu.launched.clear()
    assert torch.equal(selection.largest(x, numel // 100), expected)
    assert any(kernel.startswith("select_large") for kernel in gpu.launched)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", range(1, 8))
def test_a_gpu_packs_as_a_cpu_does(bits: int) -> None:
    values = torch.randint(0, 1 << bits, (1_000_003,), dtype=torch.uint8)
    assert pack_select.serves(values.cuda())
    packed = pack(values, bits)
    assert torch.equal(pack(values.cuda(), bits).cpu(), packed)
    assert torch.equal(unpack(packed.cuda(), values.numel(), bits).cpu(), values)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("numel", [1, 1000, 70_000, 5_000_003])
def test_a_gpu_selects_as_a_cpu_does(dtype: torch.dtype, numel: int) -> None:
    x = gradient(numel, seed=numel).to(dtype)
    codec = parse("topk:ratio=0.01")
    frame = codec.encode(x)
    assert torch.equal(codec.encode(x.cuda()).cpu(), frame)
    assert torch.equal(codec.decode(frame.cuda()).cpu(), codec.decode(frame))
