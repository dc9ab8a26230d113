"""The codecs to beat: identity, casts, and the general-purpose compressors."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import ZOO, gradient, same_bits
from hypothesis import given
from hypothesis import strategies as st

import gradzip
from gradzip import Codec, codecs, parse
from gradzip.codecs.baseline import ByteCodec
from gradzip.errors import CodecError, Corrupt, Unsupported

LOSSLESS = ["identity", "zlib", "zlib:level=0", "zlib:level=9", "zstd", "zstd:level=-5", "lz4"]
CASTS = {"cast:to=bf16": torch.bfloat16, "cast:to=fp16": torch.float16}
EXTRAS = {"zstd": "zstandard", "lz4": "lz4.block"}


@pytest.fixture(params=LOSSLESS)
def lossless(request: pytest.FixtureRequest) -> Codec:
    codec = parse(request.param)
    if codec.name in EXTRAS:
        pytest.importorskip(EXTRAS[codec.name])
    return codec


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_lossless_baselines_give_back_every_bit(lossless: Codec, name: str, dtype: torch.dtype) -> None:
    x = ZOO[name].to(dtype)
    frame = lossless.encode(x)
    assert frame.numel() <= lossless.bound(x.numel(), dtype)
    assert same_bits(lossless.decode(frame), x)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("spec", CASTS)
def test_casts_are_torch_casts(spec: str, name: str) -> None:
    x = ZOO[name]
    decoded = gradzip.decode(gradzip.encode(x, spec))
    assert torch.equal(decoded.nan_to_num(nan=7.0), x.to(CASTS[spec]).to(x.dtype).reshape(-1).nan_to_num(nan=7.0))


@pytest.mark.parametrize("spec", [*LOSSLESS, *CASTS])
def test_decode_adds_to_what_is_there(spec: str) -> None:
    if parse(spec).name in EXTRAS:
        pytest.importorskip(EXTRAS[parse(spec).name])
    x, there = gradient(5000, seed=1), gradient(5000, seed=2)
    frame = gradzip.encode(x, spec)
    out = there.clone()
    assert gradzip.decode(frame, out=out, add=True).data_ptr() == out.data_ptr()
    assert torch.equal(out, there + gradzip.decode(frame))


def test_out_is_used_and_checked(lossless: Codec) -> None:
    x = gradient(1000)
    buffer = torch.empty(lossless.bound(1000, x.dtype) + 9, dtype=torch.uint8)
    frame = lossless.encode(x, out=buffer)
    assert frame.data_ptr() == buffer.data_ptr()
    with pytest.raises(Unsupported, match="may need"):
        lossless.encode(x, out=buffer[:100])
    with pytest.raises(Unsupported, match="out is"):
        lossless.decode(frame, out=torch.empty(999))


@pytest.mark.parametrize("spec", CASTS)
def test_summable_codecs_sum(spec: str) -> None:
    """What `summable` says: payload bodies may be added where they are."""
    x = torch.tensor([1.0, -2.0, 0.5])
    frames = [gradzip.encode(part, spec) for part in (x, 2 * x)]
    body = frames[0][24 + 4 :].clone().view(CASTS[spec]) + frames[1][24 + 4 :].clone().view(CASTS[spec])
    summed = torch.cat([frames[0][:28], body.view(torch.uint8)])
    assert torch.equal(gradzip.decode(summed), 3 * x)


def test_a_cast_to_an_unknown_type_is_corrupt() -> None:
    frame = gradzip.encode(gradient(10), "cast")
    frame[24] = 0  # float32 is not a 16-bit type
    with pytest.raises(Corrupt, match="target type"):
        gradzip.decode(frame)


@given(st.sampled_from(["zlib", "zstd", "lz4"]), st.data())
def test_damaged_streams_raise_and_never_crash(spec: str, draw: st.DataObject) -> None:
    if spec in EXTRAS:
        pytest.importorskip(EXTRAS[spec])
    x = gradient(300)
    frame = gradzip.encode(x, spec)
    at = draw.draw(st.integers(24, frame.numel() - 1))
    frame[at] = draw.draw(st.integers(0, 255))
    try:
        decoded = gradzip.decode(frame)
    except CodecError:
        return
    assert decoded.shape == x.shape  # without a checksum a changed value may pass, a changed size may not


@pytest.mark.parametrize("spec", EXTRAS)
def test_a_missing_extra_says_what_to_install(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("zstandard", "lz4", "lz4.block"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unsupported, match=r"pip install 'gradzip\[baselines\]'"):
        gradzip.encode(gradient(10), spec)


@pytest.mark.parametrize("name", [n for n, c in codecs.REGISTRY.items() if issubclass(c, ByteCodec)])
def test_expansion_covers_the_most_compressible_data(name: str) -> None:
    """A limit on what a frame may claim must not refuse what the compressor itself made."""
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    x = torch.zeros(1 << 22)
    assert same_bits(gradzip.decode(gradzip.encode(x, name)), x)
