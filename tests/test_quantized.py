"""What the quantised codecs mean: exact values where they are defined, and the right mean where they draw lots."""

from __future__ import annotations

import pytest
import torch
from conftest import generator, gradient, same_bits, special

import gradzip
from gradzip import Context, parse
from gradzip.codecs import quantized, random
from gradzip.codecs.quantized import QSGD, Natural, TernGrad
from gradzip.errors import Corrupt, Unsupported
from gradzip.wire import HEADER_BYTES

DRAWS = 800
UNBIASED = [
    *("qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=8", "qsgd:bits=3,bucket=7", "qsgd:bits=4,norm=l2"),
    *("terngrad", "natural", "natural:bits=4"),
    *("randomk:ratio=0.3,unbiased=true", "randomblock:ratio=0.3,unbiased=true"),
]


@pytest.mark.parametrize("spec", UNBIASED)
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_the_mean_over_many_draws_is_the_tensor(spec: str, scale: float) -> None:
    """Within 6 standard errors for each of 50 values, the deviation measured over the same draws."""
    codec = parse(spec)
    assert not codec.biased
    assert codec.error_memory is None
    x = gradient(50, seed=1) * scale
    draws = torch.stack([gradzip.decode(codec.encode(x, Context("w", step=step))) for step in range(DRAWS)]).double()
    spread = draws.std(0) / DRAWS**0.5
    off = (draws.mean(0) - x.double()).abs()
    # what is almost never drawn has no spread to be measured: one draw's share of the largest value covers it
    assert bool((off <= 6 * spread + 3 * x.abs().max() / DRAWS).all())
    assert float(spread.max()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 39, 40, 41, 1000, 1601])
@pytest.mark.parametrize("spec", ["sign", "onebit", "terngrad:clip=2.5", "natural:bits=3", *UNBIASED[:-2]])
def test_pieces_that_fit_the_cache_give_the_bits_of_the_whole(
    spec: str, numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, x, context = parse(spec), gradient(numel, seed=numel).to(dtype), Context("w", step=3)
    found = []
    for at_once in (40, 1 << 20):
        monkeypatch.setattr(quantized, "_AT_ONCE", at_once)
        frame = codec.encode(x, context)
        decoded, added = codec.decode(frame), codec.decode(frame, out=x.clone(), add=True)
        found.append((frame, decoded, added))
    (pieces, *values), (whole, *expected) = found
    assert torch.equal(pieces, whole)
    assert all(map(same_bits, values, expected))


@pytest.mark.parametrize("spec", UNBIASED[:-2])
def test_ranks_and_steps_draw_differently_and_repeatably(spec: str) -> None:
    x, codec = gradient(2000), parse(spec)
    first = codec.encode(x, Context("w", step=3, rank=0))
    assert torch.equal(first, codec.encode(x, Context("w", step=3, rank=0)))
    for other in (Context("w", step=3, rank=1), Context("w", step=4), Context("v", step=3), Context("w", 3, seed=1)):
        assert not torch.equal(first, codec.encode(x, other))


def test_sign_is_the_mean_magnitude() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 5.0])
    assert gradzip.decode(gradzip.encode(x, "sign")).tolist() == [2, -2, 2, 2]
    assert gradzip.encode(torch.ones(800), "sign").numel() == HEADER_BYTES + 4 + 100


def test_onebit_is_two_means() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 5.0, -4.0])
    assert gradzip.decode(gradzip.encode(x, "onebit")).tolist() == [2, -3, 2, 2, -3]
    assert gradzip.decode(gradzip.encode(-torch.ones(9), "onebit")).tolist() == [-1] * 9
    assert gradzip.decode(gradzip.encode(torch.ones(9), "onebit")).tolist() == [1] * 9


@pytest.mark.parametrize("bits", range(2, 9))
def test_qsgd_is_within_a_step_and_exact_on_levels(bits: int) -> None:
    x = gradient(5000, seed=2)
    levels = (1 << bits - 1) - 1
    step = torch.stack([row.abs().max() for row in x.split(512)]).repeat_interleave(512)[:5000] / levels
    y = gradzip.decode(gradzip.encode(x, QSGD(bits)))
    assert bool(((y - x).abs() <= step * 1.0001).all())
    assert bool((y[x == 0] == 0).all())
    exact = torch.arange(-levels, levels + 1) * 0.125
    assert torch.equal(gradzip.decode(gradzip.encode(exact, QSGD(bits))), exact)


def test_qsgd_sizes() -> None:
    for bits in (2, 3, 8):
        assert QSGD(bits).bound(1024, torch.float32) == HEADER_BYTES + 8 + 2 * 4 + 1024 * bits // 8


@pytest.mark.parametrize("spec", ["qsgd:bits=2", "qsgd", "qsgd:norm=l2", "terngrad", "natural", "sign", "onebit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_stay_finite(spec: str, dtype: torch.dtype) -> None:
    x = torch.tensor([1, -1, 0.9, 0, 1e-4] * 200) * torch.finfo(dtype).max
    y = gradzip.decode(gradzip.encode(x.to(dtype), spec))
    assert bool(y.isfinite().all())


@pytest.mark.parametrize(
    "spec", ["qsgd", "terngrad", "terngrad:clip=2.5", "natural", "natural:bits=3", "sign", "onebit"]
)
def test_zeros_give_zeros(spec: str) -> None:
    for zeros in (torch.zeros(1000), -torch.zeros(1000)):
        assert torch.equal(gradzip.decode(gradzip.encode(zeros, spec)), torch.zeros(1000))


def test_terngrad_clips_at_standard_deviations() -> None:
    x = torch.randn(10_000, generator=generator(3))
    values = gradzip.decode(gradzip.encode(x, TernGrad(clip=2.5))).unique().abs().unique()
    assert torch.allclose(values, torch.tensor([0, 2.5 * float(x.std(correction=0))]))
    assert TernGrad(clip=2.5).biased
    assert TernGrad().bound(1000, torch.float32) == HEADER_BYTES + 4 + 200


def test_natural_takes_a_power_of_two_next_to_the_value() -> None:
    x = special().nan_to_num(0, 0, 0)
    x = x[x.abs() < 2.0**127]
    y = gradzip.decode(gradzip.encode(x, Natural()))
    large = y.abs().max() * 2.0**-126
    assert bool((y[x == 0] == 0).all())
    near = x.abs() >= large
    assert bool((y[near].sign() == x[near].sign()).all())
    assert bool((y[near].abs() / 2 < x[near].abs()).all())
    assert bool((x[near].abs() < y[near].abs() * 2).all())
    assert bool((y[y != 0].abs().log2() % 1 == 0).all())


def test_natural_with_few_bits_ends_in_zero() -> None:
    x = torch.tensor([1.0, 0.5, 0.25, 0.01, -0.01])
    for step in range(50):
        y = gradzip.decode(Natural(bits=3).encode(x, Context(step=step)))
        assert y[:3].tolist() == [1, 0.5, 0.25]
        assert set(y[3:].abs().tolist()) <= {0, 0.25}


def test_subnormals_are_rounded_without_bias_too() -> None:
    x = torch.full((4000,), 2.0**-149 * (1 << 21))  # a quarter of the smallest power that is normal
    share = (gradzip.decode(gradzip.encode(x, "natural")) > 0).double().mean()
    assert abs(float(share) - 0.25) < 0.04  # 6 standard deviations


@pytest.mark.parametrize(
    ("spec", "at", "value", "message"),
    [
        ("qsgd", 0, 9, "head"),
        ("qsgd", 0, 1, "head"),
        ("qsgd", 1, 1, "head"),
        ("qsgd:bucket=100", 4, 7, "do not fit"),  # another bucket
        ("qsgd:bits=4", 0, 5, "do not fit"),
        ("qsgd:bits=2", 12, 255, "level is above 1"),
        ("natural", 0, 2, "head"),
        ("natural", 0, 9, "head"),
        ("natural", 3, 1, "head"),
        ("natural", 4, 128, "no power"),
        ("natural", 1, 3, "no power"),
        ("terngrad", 4, 250, "ternary"),
    ],
)
def test_damaged_bodies_are_refused(spec: str, at: int, value: int, message: str) -> None:
    frame = gradzip.encode(gradient(300), spec)
    frame[HEADER_BYTES + at] = value
    with pytest.raises(Corrupt, match=message):
        gradzip.decode(frame)


@pytest.mark.parametrize("spec", ["sign", "onebit", "qsgd", "terngrad", "natural"])
def test_huge_claims_are_refused(spec: str) -> None:
    frame = gradzip.encode(gradient(300), spec)
    frame[8:16] = torch.tensor([1 << 38]).view(torch.uint8)
    with pytest.raises(Corrupt, match="cannot be in"):
        gradzip.decode(frame)


@pytest.mark.parametrize(
    "spec",
    [
        *("qsgd:bits=1", "qsgd:bits=9", "qsgd:bucket=0", "qsgd:norm=l1", "natural:bits=2", "natural:bits=9"),
        *("terngrad:clip=-1", "terngrad:clip=nan", "terngrad:clip=inf"),
    ],
)
def test_nonsense_is_refused(spec: str) -> None:
    with pytest.raises(Unsupported):
        parse(spec)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("names", [[], [""], ["", "w", ""], ["w" * n for n in range(300)], ["gewicht", "größe"]])
def test_keys_of_many_names_are_those_of_each(native: bool, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(random, "_native", lambda: None)
    for seed, step in ((0, 0), (123456789, 987654321)):
        assert random.keys_of(seed, step, names).tolist() == [random.key_of(seed, step, name) for name in names]


def test_natural_decodes_infinities_of_both_signs() -> None:
    x = torch.tensor([float("inf"), 1.0, -float("inf"), 0.0])
    assert gradzip.decode(gradzip.encode(x, "natural")).tolist()[::2] == [float("inf"), -float("inf")]


def test_the_users_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    for spec in UNBIASED:
        gradzip.encode(gradient(500), spec)
    assert torch.equal(before, torch.get_rng_state())
