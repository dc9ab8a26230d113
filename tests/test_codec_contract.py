"""What every codec with a frame promises. A new codec is held to all of it by registering.

Codecs run on the default engine, and gcomp once on each instruction set that this processor has: on one with AVX-512
the code for AVX2 would otherwise never run. tests/test_engines.py shows that engines do not differ.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from conftest import SIZES, ZOO, generator, gradient, random_bits, same_bits, special
from engine_cases import isas, native_on

import gradzip
from gradzip import Codec, Context, parse, wire
from gradzip.codecs import BY_ID, REGISTRY
from gradzip.errors import CodecError, Corrupt, Truncated, Unsupported

SCALED = ("int8:block=32", "int8:hadamard=true", "int4:block=256", "int4:block=64,hadamard=true", "fp8:block=256")
# Beside every codec as it is by default: settings that take other ways through the code.
VARIANTS = [
    *("gcomp:mode=lossless", "gcomp:mode=lossless,book=shared", "gcomp:mode=lossless,limit=2"),
    *("gcomp:keep=0", "gcomp:keep=7", "gcomp:keep=12,round=truncate", "gcomp:mode=paper"),
    *(
        "cast:to=fp16",
        "topk:ratio=0.3",
        "randomk:ratio=0.3",
        "randomk:ratio=0.3,unbiased=true",
        "randomblock:ratio=0.7",
    ),
    *("randomblock:ratio=0.3,unbiased=true", "threshold:value=1e-05", "threshold:value=1", "dgc:ratio=0.3,clip=0.001"),
    *("qsgd:bits=2", "qsgd:bits=3,bucket=100", "qsgd:bits=4,norm=l2", "terngrad:clip=2.5", "natural:bits=3"),
    *("noise:share=0.0001", "noise:share=0.3"),
    *SCALED,
]
# Multiplying by one over a chance, by a norm or scale that itself shrinks or by a level that grows with the noise, or
# cutting at what was cut before changes a tensor again; and a type of 16 bits rounds the multiples of a step, or a
# mean, anew.
NOT_TWICE = {
    *("randomk:ratio=0.3,unbiased=true", "randomblock:ratio=0.3,unbiased=true", "dgc:ratio=0.3,clip=0.001"),
    *("qsgd:bits=4,norm=l2", "terngrad:clip=2.5", "noise", "noise:share=0.0001", "noise:share=0.3"),
    *("int8", "int4", "fp8", *SCALED),
}
NOT_TWICE_IN_HALVES = {"qsgd"}
FRAMED = [name for name, cls in REGISTRY.items() if cls.rounds == 1 and cls.__module__.startswith("gradzip.")]
EXTRAS = {"zstd": "zstandard", "lz4": "lz4.block"}
CASES = [
    pytest.param((spec, isa), id=spec if isa is None else f"{spec} on {isa}")
    for spec in (*FRAMED, *VARIANTS)
    for isa in (isas() if spec.startswith("gcomp") else [None])
]
SMALL = 300  # values in frames that are damaged byte by byte


@pytest.fixture(params=CASES)
def codec(request: pytest.FixtureRequest) -> Iterator[Codec]:
    spec, isa = request.param
    if spec in EXTRAS:
        pytest.importorskip(EXTRAS[spec])
    with nullcontext() if isa is None else native_on(isa):
        yield parse(spec)


def context(numel: int) -> Context:
    """A context with all that a codec may ask for."""
    floor = torch.randint(-24, -8, (numel,), generator=generator(numel)).to(torch.int8)
    return Context(name="layer.weight", step=3, seed=5, floor=floor)


def supported(codec: Codec) -> list[torch.dtype]:
    dtypes = []
    for dtype in wire.DTYPE_CODES:
        try:
            codec.bound(1, dtype)
        except Unsupported:
            continue
        dtypes.append(dtype)
    assert torch.float32 in dtypes, "gradients are float32 at least"
    return dtypes


def encoded(codec: Codec, x: torch.Tensor, check: bool = False) -> torch.Tensor:
    return codec.encode(x, context(x.numel()), check=check)


def decoded(codec: Codec, frame: torch.Tensor, numel: int) -> torch.Tensor:
    return codec.decode(frame, context(numel))


def awkward(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The zoo in that type; 16-bit types also get all their own bit patterns, which no cast gives."""
    tensors = {name: x.to(dtype) for name, x in ZOO.items() if x.numel() < 20_000}
    if dtype.itemsize == 2:
        tensors["every-pattern"] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
        tensors["random-patterns"] = random_bits(5000, seed=3).view(dtype)
    return tensors


# -- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
def test_round_trip(codec: Codec, numel: int) -> None:
    for dtype in supported(codec):
        x = gradient(numel, seed=numel, dtype=dtype)
        before = x.clone()
        frame = encoded(codec, x)
        assert same_bits(x, before), "the input was changed"
        assert (frame.dtype, frame.dim(), frame.device) == (torch.uint8, 1, x.device)
        assert frame.numel() <= codec.bound(numel, dtype)
        header = wire.read_header(frame)
        assert (header.codec_id, header.dtype, header.numel) == (codec.wire_id, dtype, numel)
        y = decoded(codec, frame, numel)
        assert (y.dtype, y.shape) == (dtype, (numel,))
        assert bool(y.isfinite().all())
        if codec.lossless:
            assert same_bits(y, x)


def test_awkward_tensors(codec: Codec) -> None:
    for dtype in supported(codec):
        for name, x in awkward(dtype).items():
            flat = x.reshape(-1)
            frame = encoded(codec, x)
            assert frame.numel() <= codec.bound(x.numel(), dtype), name
            y = decoded(codec, frame, x.numel())
            if codec.lossless:
                assert same_bits(y, flat), name
            if not bool(flat.isfinite().all()):
                assert not bool(y.isfinite().all()), f"{name}: a failed step on one rank must fail on all"


def test_subnormal_tensors(codec: Codec) -> None:
    """Nothing but subnormals: their frames decode, whatever the random numbers were."""
    for dtype in supported(codec):
        tiny = torch.finfo(dtype).tiny
        for numel in (1, 2, 33, 500):
            for seed in range(40):
                share = torch.rand(numel, generator=generator(seed), dtype=torch.float64) * 2 - 1
                x = (share * tiny).to(dtype)
                x = x.masked_fill(x.abs() >= tiny, tiny / 2)
                ctx = context(numel)
                ctx.seed = seed
                y = codec.decode(codec.encode(x, ctx), ctx)
                assert bool(y.isfinite().all())
                if codec.lossless:
                    assert same_bits(y, x)
                elif not codec.transforms:
                    assert float(y.double().abs().max()) <= 2 * tiny / min(getattr(codec, "ratio", 1.0), 1.0)


@pytest.mark.parametrize("name", [name for name, cls in REGISTRY.items() if cls.rounds > 1])
def test_subnormal_tensors_in_codecs_of_several_rounds(name: str) -> None:
    for seed in range(40):
        share = torch.rand(40, 30, generator=generator(seed), dtype=torch.float64) * 2 - 1
        x = (share * torch.finfo(torch.float32).tiny).float()
        ctx = Context(name="layer.weight", seed=seed)
        (reduced,) = parse(name).reduce([x], [ctx], lambda mean: None)
        assert bool(reduced.mean.isfinite().all())
        assert reduced.residual is not None
        assert bool(reduced.residual.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_not_lost(codec: Codec, value: float) -> None:
    for dtype in supported(codec):
        x = gradient(5000, dtype=dtype)
        x[4321] = value
        assert not bool(decoded(codec, encoded(codec, x), 5000).isfinite().all())


def test_what_the_class_says_of_sizes(codec: Codec) -> None:
    for dtype in supported(codec):
        for numel in (0, 1, 77, 4096):
            sizes = {encoded(codec, x.to(dtype)).numel() for x in (torch.zeros(numel), random_bits(numel))}
            assert max(sizes) <= codec.bound(numel, dtype)
            if codec.fixed_size:
                assert sizes == {codec.bound(numel, dtype)}


def test_the_same_bytes_every_time(codec: Codec) -> None:
    for dtype in supported(codec):
        x = torch.cat([gradient(9000, seed=1), special(100)]).to(dtype)
        first = encoded(codec, x).clone()
        gradzip.encode(random_bits(20_000), "gcomp:mode=lossless")  # leaves something else in any scratch memory
        assert torch.equal(first, encoded(codec, x))
        assert torch.equal(first, encoded(parse(str(codec)), x))
        assert same_bits(decoded(codec, first, x.numel()), decoded(codec, first, x.numel()))


def test_decoding_again_changes_nothing(codec: Codec) -> None:
    """What was decoded is coded without further loss: a resumed or re-sent tensor stays what it is."""
    if str(codec) in NOT_TWICE:
        pytest.skip("it changes what it is given every time")
    for dtype in supported(codec):
        if dtype.itemsize == 2 and codec.name in NOT_TWICE_IN_HALVES:
            continue
        once = decoded(codec, encoded(codec, gradient(5000, seed=2, dtype=dtype)), 5000)
        assert same_bits(decoded(codec, encoded(codec, once), 5000), once)


def test_shape_and_strides_do_not_matter(codec: Codec) -> None:
    base = gradient(60 * 70)
    for x in (base.view(60, 70).t(), base[::3], base.view(60, 7, 10)[:, 3], base[:1].expand(33), base[0], base[5]):
        assert torch.equal(encoded(codec, x), encoded(codec, x.contiguous().view(-1)))
    tracked = base.clone().requires_grad_()
    assert torch.equal(encoded(codec, tracked), encoded(codec, base))


def test_lazy_negation_is_encoded(codec: Codec) -> None:
    """A view that negates lazily has the values' opposite in its memory; torch hands out such views of conjugates."""
    x = gradient(5000)
    assert torch.equal(encoded(codec, torch._neg_view(x)), encoded(codec, -x))
    imaginary = torch.complex(x, x).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(encoded(codec, imaginary), encoded(codec, -x))


def test_a_frame_describes_itself(codec: Codec) -> None:
    x = gradient(5000)
    frame = encoded(codec, x)
    assert same_bits(gradzip.decode(frame, floor=context(5000).floor), decoded(codec, frame, 5000))
    default = type(codec)()
    assert same_bits(decoded(default, frame, 5000), decoded(codec, frame, 5000)), "options must travel in the frame"


# -- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 3, 64])
def test_encode_into_a_buffer_writes_nothing_else(codec: Codec, offset: int, check: bool) -> None:
    for dtype in supported(codec):
        for x in (gradient(4097, dtype=dtype), random_bits(1000).to(dtype), gradient(0, dtype=dtype)):
            expected = encoded(codec, x, check)
            bound = codec.bound(x.numel(), dtype, check)
            room = torch.full((offset + bound + 50,), 0xA5, dtype=torch.uint8)
            frame = codec.encode(x, context(x.numel()), room[offset : offset + bound], check)
            assert frame.data_ptr() == room.data_ptr() + offset
            assert torch.equal(frame, expected)
            assert bool((room[:offset] == 0xA5).all())
            assert bool((room[offset + bound :] == 0xA5).all())


@pytest.mark.parametrize("offset", [0, 1, 2, 7])
def test_decode_into_a_buffer_writes_nothing_else(codec: Codec, offset: int) -> None:
    for dtype in supported(codec):
        x = gradient(4097, seed=1, dtype=dtype)
        frame = encoded(codec, x)
        moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), frame])[offset:]  # frames start anywhere
        expected = decoded(codec, frame, 4097)
        room = torch.full((offset + 4097 + 9,), -7.0, dtype=dtype)
        y = codec.decode(moved, context(4097), out=room[offset : offset + 4097])
        assert y.data_ptr() == room[offset:].data_ptr()
        assert same_bits(y, expected)
        assert bool((room[:offset] == -7).all())
        assert bool((room[offset + 4097 :] == -7).all())
    shaped = torch.empty(17, 241)
    assert codec.decode(encoded(codec, gradient(4097)), context(4097), out=shaped).data_ptr() == shaped.data_ptr()


def test_add_adds(codec: Codec) -> None:
    for dtype in supported(codec):
        for x in (gradient(9000, seed=1, dtype=dtype), torch.zeros(5000, dtype=dtype), gradient(0, dtype=dtype)):
            frame = encoded(codec, x)
            there = gradient(x.numel(), seed=2, dtype=dtype)
            there[::7] = -0.0
            expected = there + decoded(codec, frame, x.numel())
            y = codec.decode(frame, context(x.numel()), out=there, add=True)
            assert y.data_ptr() == there.data_ptr()
            assert torch.equal(y, expected)


def test_summable_frames_average(codec: Codec) -> None:
    x, y = ((torch.arange(5000) * k % 127 - 63) / 32 for k in (5, 11))  # sums and halves are exact in any type
    a, b = encoded(codec, x), encoded(codec, y)
    if not codec.summable:
        with pytest.raises(Unsupported, match="decode them first"):
            codec.addends(a)
        return
    mean = (decoded(codec, a, 5000) + decoded(codec, b, 5000)) / 2
    codec.addends(a).add_(codec.addends(b)).div_(2)
    assert torch.equal(decoded(codec, a, 5000), mean)


# -- requests that make no sense ---------------------------------------------------------------------------------------


def test_other_types_are_refused(codec: Codec) -> None:
    others = [d for d in wire.DTYPE_CODES if d not in supported(codec)]
    for dtype in [torch.int32, torch.uint8, torch.bool, torch.complex64, *others]:
        with pytest.raises(Unsupported, match=f"{dtype}.*float32|float32.*{dtype}"):
            encoded(codec, torch.ones(10).to(dtype))
        with pytest.raises(Unsupported, match=str(dtype)):
            codec.bound(10, dtype)


def test_bad_output_of_encode_is_refused(codec: Codec) -> None:
    x, bound = gradient(1000), codec.bound(1000, torch.float32)
    with pytest.raises(Unsupported, match=rf"may need {bound}.*codec\.bound"):
        codec.encode(x, context(1000), out=torch.empty(bound - 1, dtype=torch.uint8))
    for out in (
        torch.empty(bound, dtype=torch.int8),
        torch.empty(2, bound, dtype=torch.uint8),
        torch.empty(2 * bound, dtype=torch.uint8)[::2],
        torch.empty(bound, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(Unsupported, match="contiguous 1-D uint8 tensor on cpu"):
            codec.encode(x, context(1000), out=out)


def test_bad_output_of_decode_is_refused(codec: Codec) -> None:
    frame = encoded(codec, gradient(1000))
    for out in (torch.empty(999), torch.empty(1001), torch.empty(1000).double(), torch.empty(1000, device="meta")):
        with pytest.raises(Unsupported, match=r"holds 1000 x torch.float32; out is"):
            codec.decode(frame, context(1000), out=out)
    with pytest.raises(Unsupported, match="contiguous"):
        codec.decode(frame, context(1000), out=torch.empty(2000)[::2])
    with pytest.raises(Unsupported, match="negates lazily"):
        codec.decode(frame, context(1000), out=torch._neg_view(torch.empty(1000)))
    tracked = torch.zeros(1000, requires_grad=True)
    with pytest.raises(Unsupported, match=r"out requires grad.*detach\(\).*no_grad"):
        codec.decode(frame, context(1000), out=tracked)
    with torch.no_grad():
        assert same_bits(codec.decode(frame, context(1000), out=tracked), decoded(codec, frame, 1000))
    with pytest.raises(Unsupported, match="needs out="):
        codec.decode(frame, context(1000), add=True)


def test_a_payload_with_gaps_is_refused(codec: Codec) -> None:
    frame = encoded(codec, gradient(1000))
    spread = torch.stack([frame, frame], 1)[:, 0]
    with pytest.raises(Unsupported, match="contiguous"):
        codec.decode(spread, context(1000))


def test_a_foreign_frame_is_refused(codec: Codec) -> None:
    frame = encoded(codec, gradient(SMALL))
    for wire_id in range(256):
        frame[3] = wire_id
        if wire_id == codec.wire_id:
            continue
        with pytest.raises(Corrupt, match=f"made by {BY_ID[wire_id].name!r}" if wire_id in BY_ID else "unknown codec"):
            decoded(codec, frame, SMALL)


# -- damaged frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_every_strict_prefix_is_refused(codec: Codec, check: bool) -> None:
    for dtype in supported(codec):
        frame = encoded(codec, gradient(SMALL, dtype=dtype), check)
        for size in range(frame.numel()):
            with pytest.raises((Truncated, Corrupt)):
                decoded(codec, frame[:size].clone(), SMALL)


@pytest.mark.parametrize("check", [False, True])
def test_an_extra_byte_is_refused(codec: Codec, check: bool) -> None:
    for x in (gradient(SMALL), gradient(0), gradient(5000)):
        frame = encoded(codec, x, check)
        for extra in (0, 255):
            with pytest.raises(Corrupt, match="follow the end"):
                decoded(codec, torch.cat([frame, torch.tensor([extra], dtype=torch.uint8)]), x.numel())


def test_a_body_of_another_length_does_no_harm(codec: Codec) -> None:
    """The header agrees with the length here, so only the codec itself can notice."""
    frame = encoded(codec, gradient(SMALL))

    def resized(size: int) -> torch.Tensor:
        other = torch.zeros(size, dtype=torch.uint8)
        other[: min(size, frame.numel())] = frame[:size]
        other[16:24] = _bytes(struct.pack("<Q", size - wire.HEADER_BYTES))
        return other

    for size in [*range(wire.HEADER_BYTES, frame.numel(), 3), frame.numel() + 64]:
        _decode_or_refuse(codec, resized(size))
    with pytest.raises(Corrupt):
        decoded(codec, resized(frame.numel() + 1), SMALL)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_do_no_harm(codec: Codec, seed: int) -> None:
    rng = random.Random(seed)
    for dtype in supported(codec):
        frame = encoded(codec, gradient(SMALL, seed=seed, dtype=dtype))
        for _ in range(200):
            damaged = frame.clone()
            for _ in range(rng.choice((1, 1, 2, 5))):
                bit = rng.randrange(8 * frame.numel())
                damaged[bit // 8] ^= 1 << bit % 8
            _decode_or_refuse(codec, damaged)


def test_random_bodies_do_no_harm(codec: Codec) -> None:
    rng = random.Random(7)
    for dtype in supported(codec):
        for _ in range(100):
            body = rng.randbytes(rng.randrange(2000))
            header = wire.pack_header(codec.wire_id, dtype, rng.choice((0, 1, 7, SMALL)), len(body), check=False)
            _decode_or_refuse(codec, _bytes(header + body))


def test_a_checksum_finds_every_flipped_bit(codec: Codec) -> None:
    frame = encoded(codec, gradient(40), check=True)
    assert frame.numel() <= codec.bound(40, torch.float32, check=True)
    assert same_bits(decoded(codec, frame, 40), decoded(codec, encoded(codec, gradient(40)), 40))
    for bit in range(8 * frame.numel()):
        damaged = frame.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            decoded(codec, damaged, 40)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode_or_refuse(codec: Codec, frame: torch.Tensor) -> None:
    """Any exception but a CodecError fails the test, and so does a crash."""
    out = torch.empty(SMALL)
    for given in (None, out):
        try:
            decoded_numel = codec.decode(frame, context(SMALL), out=given).numel()
        except CodecError:
            continue
        assert decoded_numel == wire.read_header(frame).numel


# -- devices -----------------------------------------------------------------------------------------------------------

# Means and Euclidean norms: a GPU adds in another order, so that their last bit may differ.
ROUNDED_SUMS = ("sign", "onebit", "terngrad:clip", "qsgd:bits=4,norm=l2", "dgc:ratio=0.3,clip")


@pytest.mark.gpu
def test_a_gpu_writes_and_reads_the_same_frames(codec: Codec) -> None:
    if codec.name == "gcomp":
        pytest.skip("tests/test_gpu_engine.py compares its engines")
    for dtype in supported(codec):
        for numel in (0, 1, 77, 5000, 131072 + 5):
            x = gradient(numel, seed=numel, dtype=dtype)
            here = encoded(codec, x)
            ctx = Context(name="layer.weight", step=3, seed=5)
            there = codec.encode(x.cuda(), ctx)
            assert there.is_cuda
            assert there.numel() == here.numel()
            if not str(codec).startswith(ROUNDED_SUMS):
                assert torch.equal(there.cpu(), here)
            again = codec.decode(here.cuda(), ctx)
            assert same_bits(again.cpu(), decoded(codec, here, numel))
    x = gradient(5000)
    x[123] = torch.nan
    assert not bool(codec.decode(codec.encode(x.cuda(), context(0))).isfinite().all())
