"""Sparse codecs, and the hash that random places come from."""

from __future__ import annotations

import pytest
import torch
from conftest import generator, gradient, same_bits

import gradzip
from gradzip import Context, parse
from gradzip.codecs import random, selection
from gradzip.codecs.random import hash_bits, key_of, keyed_bits, stream, uniform
from gradzip.codecs.selection import largest, sample
from gradzip.codecs.sparse import RandomBlock, RandomK, SparseFrame, Threshold, TopK
from gradzip.errors import CodecError, Corrupt, Truncated, Unsupported
from gradzip.wire import HEADER_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CPU = torch.device("cpu")


def test_hash_is_fixed_for_ever() -> None:
    """Resumed runs and other devices must find the same numbers, so these may never change."""
    assert hash_bits(0, 0, "", torch.arange(3)).tolist() == HASH_OF_NOTHING
    assert hash_bits(7, 123, "layer.weight", torch.tensor([5, 2**32 + 5, 2**40])).tolist() == HASH_OF_SOMETHING


HASH_OF_NOTHING = [3271300603, 2330467530, 3384083767]
HASH_OF_SOMETHING = [1195294955, 2823809452, 1407578661]


def test_hash_depends_on_everything() -> None:
    index = torch.arange(1000)
    variants = [
        hash_bits(s, t, n, index + o) for s, t, n, o in [(0, 0, "a", 0), (1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0)]
    ]
    for i, one in enumerate(variants):
        assert all((one != other).float().mean() > 0.99 for other in variants[:i])
        assert one.unique().numel() > 990


def test_hash_bits_are_balanced() -> None:
    bits = hash_bits(3, 5, "w", torch.arange(1 << 16))
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 32
    share = torch.stack([(bits >> i & 1).double().mean() for i in range(32)])
    assert float((share - 0.5).abs().max()) < 0.01  # 5 standard deviations


def test_uniform_is_spread_and_never_zero() -> None:
    x = uniform(key_of(0, 0, "w"), (100, 100), CPU)
    assert x.shape == (100, 100)
    assert bool((x != 0).all())
    assert float(x.abs().max()) < 1
    assert abs(float(x.mean())) < 0.03
    assert abs(float(x.var()) - 1 / 3) < 0.02


def test_the_users_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    gradzip.encode(gradient(5000), "randomk:ratio=0.1")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("codec", [TopK, RandomK, RandomBlock])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 99, 101, 5000])
def test_decoded_plus_residual_is_the_input(
    codec: type[TopK | RandomK | RandomBlock], ratio: float, dtype: torch.dtype, numel: int
) -> None:
    x = gradient(numel, dtype=dtype)
    chosen = codec(ratio=ratio)
    frame = chosen.encode(x)
    assert frame.numel() == chosen.bound(numel, dtype)
    y = gradzip.decode(frame)
    assert y.dtype == dtype
    assert torch.equal(y + (x - y), x)
    assert bool(((y == x) | (y == 0)).all())
    assert int((y != 0).sum()) <= chosen.kept(numel)
    total = torch.ones_like(x)
    chosen.decode(frame, out=total, add=True)
    assert torch.equal(total, 1 + y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_keeps_the_largest(dtype: torch.dtype) -> None:
    x = (torch.randperm(5000, generator=generator(1)) - 2500).to(dtype) / 4096
    kept = gradzip.decode(gradzip.encode(x, "topk:ratio=0.01"))
    assert int((kept != 0).sum()) == 50
    assert float(kept[kept != 0].abs().min()) >= float(x[kept == 0].abs().max())


def test_topk_takes_the_first_of_equals() -> None:
    x = torch.tensor([1.0, -1.0, 0.5, 1.0, 2.0, 1.0, -1.0])
    assert largest(x, 3).tolist() == [0, 1, 4]
    assert largest(x, 5).tolist() == [0, 1, 3, 4, 5]
    assert largest(torch.zeros(9), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("codec", ["topk:ratio=0.01", "randomk:ratio=0.01", "randomblock:ratio=0.01"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(codec: str, value: float) -> None:
    x = gradient(3000)
    x[1234] = value
    assert not bool(gradzip.decode(gradzip.encode(x, codec)).isfinite().all())


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (10, 3), (1000, 10), (1000, 999), (1000, 1000), (123457, 1234)])
def test_sample_is_without_replacement(numel: int, k: int) -> None:
    index, length = sample(key_of(0, 1, "w"), numel, k, CPU)
    assert index.numel() == k
    assert int(length.sum()) == numel
    assert bool((index.diff() > 0).all())
    assert int(index[0]) >= 0
    assert int(index[-1]) < numel


def test_sample_reaches_every_place_equally_often() -> None:
    counts = torch.zeros(300)
    for step in range(2000):
        counts[sample(key_of(0, step, "w"), 300, 30, CPU)[0]] += 1
    assert float((counts - 200).abs().max()) < 80  # about 6 standard deviations of 13


@pytest.mark.parametrize("codec", [RandomK(ratio=0.1), RandomBlock(ratio=0.1)])
def test_frames_of_random_places_add_up(codec: RandomK | RandomBlock) -> None:
    """The mean of the numbers in the frames of several ranks is the frame of the mean."""
    tensors = [gradient(5000, seed=s) for s in range(4)]
    ctx = Context(name="w", step=9, seed=4)
    frames = [codec.encode(x, ctx) for x in tensors]
    mean = torch.stack([codec.addends(f) for f in frames]).mean(0)
    codec.addends(frames[0]).copy_(mean)
    assert same_bits(codec.decode(frames[0], ctx), codec.decode(codec.encode(torch.stack(tensors).mean(0), ctx)))


def test_randomk_picks_by_step_and_name() -> None:
    x = torch.ones(1000)
    picks = [RandomK().encode(x, Context(name=n, step=s)) for n, s in [("a", 0), ("a", 1), ("b", 0)]]
    places = [gradzip.decode(p) for p in picks]
    assert not torch.equal(places[0], places[1])
    assert not torch.equal(places[0], places[2])


@pytest.mark.parametrize("codec", ["topk:ratio=0.01", "randomk:ratio=0.01", "randomblock:ratio=0.01"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_sizes_are_noticed(codec: str, dtype: torch.dtype) -> None:
    frame = gradzip.encode(gradient(1500, dtype=dtype), codec)
    for size in range(frame.numel()):
        with pytest.raises(Truncated):
            gradzip.decode(frame[:size])
    with pytest.raises(Corrupt):
        gradzip.decode(torch.cat([frame, frame[:1]]))
    for fewer in (1, 3, 5):  # bytes, with a header that agrees
        cut = frame[: frame.numel() - fewer].clone()
        cut[16:24] = torch.tensor([cut.numel() - HEADER_BYTES]).view(torch.uint8)
        with pytest.raises(Corrupt):
            gradzip.decode(cut)


@pytest.mark.parametrize("codec", ["topk", "randomk", "randomblock", "threshold", "dgc"])
def test_a_claim_that_no_ratio_allows_is_refused(codec: str) -> None:
    frame = gradzip.encode(gradient(1500), codec)
    for claim in (1 << 38, 10_000 * frame.numel()):
        frame[8:16] = torch.tensor([claim]).view(torch.uint8)
        with pytest.raises(Corrupt, match="claims"):
            gradzip.decode(frame)


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, 1e-5, float("nan")])
@pytest.mark.parametrize("codec", [TopK, RandomK])
def test_senseless_ratios_are_refused(codec: type[TopK | RandomK], ratio: float) -> None:
    with pytest.raises(Unsupported, match="ratio"):
        codec(ratio=ratio)


def test_stream_is_the_hash() -> None:
    key = key_of(1, 2, "w")
    for bits in (1, 23, 24, 31):
        assert torch.equal(stream(key, 5000, bits, CPU).long(), keyed_bits(key, torch.arange(5000)) >> 32 - bits)


def test_stream_goes_on_behind_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stream(5, 5000, 24, CPU)
    monkeypatch.setattr(random, "_CHUNK", 1024)
    assert torch.equal(stream(5, 5000, 24, CPU), whole)


@pytest.mark.parametrize("kind", ["normal", "equal", "few-large", "sorted"])
@pytest.mark.parametrize("k", [1, 10, 1000, 8000, 60_000, 100_000])
def test_the_guess_does_not_change_what_is_largest(kind: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold guessed from a sample narrows the search; here it is sometimes much too high or too low."""
    monkeypatch.setattr(selection, "_SEARCHED", 30_000)
    x = torch.randn(100_000, generator=generator(1))
    if kind == "equal":
        x = torch.ones(100_000)
    elif kind == "few-large":
        x[::6] *= 1e6  # the sample takes every sixth value
    elif kind == "sorted":
        x = x.sort().values
    order = x.abs().sort(descending=True, stable=True).indices[:k]
    assert torch.equal(largest(x, k), order.sort().values)
    x[:50:7], x[3] = torch.nan, -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        magnitude = selection.magnitudes(x.to(dtype))
        assert torch.equal(selection.largest_by_sorting(magnitude, k), selection._largest(magnitude, k)), "as on a GPU"


@pytest.mark.parametrize("value", [1e-6, 1e-3, 1.0])
def test_threshold_sends_what_reaches_it(value: float) -> None:
    x = gradient(50_000)
    y = gradzip.decode(gradzip.encode(x, Threshold(value)))
    few = largest(x, 5)
    expected = torch.where(x.abs() >= value, x, 0)
    expected[few] = x[few]  # one in ten thousand at least
    assert torch.equal(y, expected)
    scaled = Threshold(value).encode(x * 1024, Context(scale=1024.0))
    assert torch.equal(gradzip.decode(scaled), y * 1024)


def test_threshold_of_negative_values() -> None:
    """Magnitudes count: all-negative tensors are no special case."""
    x = -torch.arange(1.0, 101.0)
    assert torch.equal(gradzip.decode(gradzip.encode(x, "threshold:value=50")), torch.where(x <= -50, x, 0))


def test_blocks_start_everywhere_equally_often() -> None:
    counts = torch.zeros(100)
    for step in range(2000):
        frame = RandomBlock(ratio=0.1).encode(torch.ones(100), Context(step=step))
        counts += gradzip.decode(frame)
    assert float((counts - 200).abs().max()) < 80  # 6 standard deviations of 13.4


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_senseless_thresholds_are_refused(value: float) -> None:
    with pytest.raises(Unsupported, match="value"):
        Threshold(value)


@pytest.mark.parametrize("codec", ["topk:ratio=0.01", "topk:ratio=0.3", "threshold:value=1.0", "sign", "qsgd:bits=3"])
def test_what_the_host_can_see_is_not_fetched_from_a_gpu(codec: str) -> None:
    """Headers, counts and last bytes come from the host's copy: those on the GPU are made illegible here."""
    x = torch.randn(3001, generator=generator(4))
    frame = parse(codec).encode(x, Context())
    there = frame.clone()
    there[:HEADER_BYTES] = 0
    if isinstance(parse(codec), SparseFrame):
        there[HEADER_BYTES : HEADER_BYTES + 8] = 255
    found = parse(codec).decode(there, Context(near=frame))
    assert same_bits(found, parse(codec).decode(frame, Context()))
    with pytest.raises(CodecError):
        parse(codec).decode(frame, Context(near=frame[:-1]))
