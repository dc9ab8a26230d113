"""The codec noise: what docs/codecs.md promises of it, and the arithmetic and frames of docs/format.md."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ZOO, generator, gradient, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradzip
from gradzip import Context, parse, wire
from gradzip.codecs.noise import Noise, read_share
from gradzip.engines import noise_layout as layout
from gradzip.engines import noise_tables, reference_noise
from gradzip.engines.noise_layout import Part
from gradzip.errors import Corrupt, Truncated, Unsupported

ROOT = Path(__file__).parent.parent
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
VALUES = {
    "gauss": lambda n, g: torch.randn(n, generator=g),
    "heavy": lambda n, g: torch.randn(n, generator=g) * torch.exp(2 * torch.randn(n, generator=g)),
    "zeros": lambda n, g: torch.zeros(n),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.02),
    "empty rows": lambda n, g: torch.randn(n, generator=g) * (torch.arange(n) // 300 % 3 == 1),
    "giants": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.01, 1e20, 1.0) * torch.randn(n, generator=g),
    "subnormal": lambda n, g: torch.randn(n, generator=g) * 1e-41,
    "largest": lambda n, g: torch.full((n,), torch.finfo(torch.float32).max),
    "failed": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.01, math.nan, 1.0) * torch.randn(n, generator=g),
    "infinite": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, math.inf, -1.0),
    "nan": lambda n, g: torch.full((n,), math.nan),
    "minus zero": lambda n, g: torch.full((n,), -0.0),
}


def part_of(x: torch.Tensor, share: float = 0.01, *, shape: torch.Tensor | None = None, start: int = 0) -> Part:
    level = layout.level(reference_noise.statistics(x, shape), share, 4)
    return Part(x, level, shape, start, layout.key_of(1, 2, "w", "own", start), layout.offset_of(1, 4))


def encoded(parts: list[Part], slot: int | None = None) -> tuple[torch.Tensor, int]:
    bound = layout.body_bound([part.values.numel() for part in parts])
    room = torch.zeros(bound if slot is None else slot, dtype=torch.uint8)
    size, notch = reference_noise.encode(parts, room, step=7, digest=9)
    return room[:size], notch


def decoded(body: torch.Tensor, parts: list[Part]) -> list[torch.Tensor]:
    outs = [Part(torch.full_like(part.values, 7.0), shape=part.shape) for part in parts]
    reference_noise.decode(body, outs)
    return [part.values for part in outs]


# -- what the option may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), ("30%", 0.3), ("0.01%", 0.0001), ("2.5%", 0.025)]
)
def test_a_share_is_read_with_and_without_per_cent(text: str, share: float) -> None:
    assert parse(f"noise:share={text}") == Noise(share)
    assert parse(str(Noise(text))) == Noise(share)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ("0", "choose 0.01% to 30%.*lossless"),
        ("200%", "share=200%: choose 0.01% to 30%.*feeds on itself"),
        ("one", "'one' is not a number: write a share such as 1%"),
        ("nan", "choose 0.01% to 30%"),
        ("-1%", "choose 0.01% to 30%"),
    ],
)
def test_an_impossible_share_is_refused(share: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        parse(f"noise:share={share}")


def test_a_shape_of_another_size_or_type_is_refused() -> None:
    for shape in (torch.zeros(9, dtype=torch.int8), torch.zeros(10, dtype=torch.int32)):
        with pytest.raises(Unsupported, match=r"a shape of .* for 10 values"):
            Noise().encode(torch.randn(10), Context(shape=shape))


# -- what is promised --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shaped", [False, True])
def test_the_mean_of_many_draws_is_the_tensor(shaped: bool) -> None:
    x = torch.cat([gradient(300, seed=1) * 1e3, torch.zeros(20)])
    shape = torch.randint(-12, 1, (320,), generator=generator(3)).to(torch.int8) if shaped else None
    total, runs = torch.zeros(320, dtype=torch.float64), 200
    for step in range(runs):
        ctx = Context(name="w", step=step, shape=shape)
        total += Noise(0.1).decode(Noise(0.1).encode(x, ctx), ctx).double()
    level = layout.level(reference_noise.statistics(x, shape), 0.1, 1, 1)
    grid = level * torch.exp2(shape.double()) if shape is not None else torch.full((320,), level, dtype=torch.float64)
    deviation = (total / runs - x.double()) / (grid * math.sqrt(0.25 / runs))  # of a coin, at most
    assert float(deviation.abs().max()) < 5
    assert float(deviation.square().mean()) < 1.1


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("world", [1, 4])
def test_the_noise_of_one_hop_is_at_most_its_share(share: float, world: int) -> None:
    """Of the mean over ranks that hold nothing but sampling noise, where the bound is tight."""
    xs = [torch.randn(20_000, generator=generator(rank)) for rank in range(world)]
    back = []
    for rank, x in enumerate(xs):
        ctx = Context(name="w", rank=rank, world=world)
        back.append(Noise(share).decode(Noise(share).encode(x, ctx), ctx))
    noise = (sum(back) - sum(xs)).double().square().sum() / sum(xs).double().square().sum()
    assert 0.9 * share < float(noise) < 1.05 * share


def test_draws_of_ranks_are_spread_evenly() -> None:
    """Equal values on 4 ranks: as many round up as the fraction says, give or take one."""
    x = torch.full((1000,), 0.3)
    up = torch.zeros(1000)
    for rank in range(4):
        part = Part(x, 1.0, None, 0, layout.key_of(0, 0, "w", "own", 0), layout.offset_of(rank, 4))
        up += torch.from_numpy(reference_noise.rounded(part, 0))
    assert set(up.tolist()) == {1.0, 2.0}
    assert float(up.mean()) == pytest.approx(1.2, abs=0.05)


def test_zeros_stay_zero_and_take_no_room() -> None:
    x = torch.zeros(100_000)
    frame = gradzip.encode(x, "noise")
    assert same_bits(gradzip.decode(frame), x)
    assert frame.numel() <= wire.HEADER_BYTES + layout.blocks_offset([100_000])
    mixed = torch.where(torch.arange(5000) % 3 == 0, 0.0, gradient(5000))
    assert bool((gradzip.decode(gradzip.encode(mixed, "noise"))[::3] == 0).all())


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_statistics_are_added_in_the_order_of_the_format() -> None:
    x = gradient(10_000, seed=4)
    blocks = []
    for start in range(0, 10_000, 4096):
        lanes = [0.0] * 32
        for i, value in enumerate(x[start : start + 4096].tolist()):
            lanes[i % 32] += value * value
        for half in (16, 8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        blocks.append(lanes[0])
    lanes = blocks + [0.0] * (32 - len(blocks))
    for half in (16, 8, 4, 2, 1):
        lanes = [lanes[j] + lanes[j + half] for j in range(half)]
    assert reference_noise.statistics(x).squares == lanes[0]


def test_levels() -> None:
    statistics = layout.Statistics(squares=50.0, weights=100 << 24, finite=True)
    assert layout.level(statistics, 0.01, 4) == np.float32(math.sqrt(0.01 * 4.8 * 0.5))
    assert layout.level(statistics, 0.01, 4, hops=1) == np.float32(math.sqrt(0.02 * 4.8 * 0.5))
    assert layout.level(layout.Statistics(0.0, 5 << 24, True), 0.01, 4) == 0
    assert math.isnan(layout.level(layout.Statistics(0.0, 5 << 24, False), 0.01, 4))
    assert layout.level(layout.Statistics(1e-90, 5 << 24, True), 0.01, 4) == 2.0**-126
    assert layout.level(layout.Statistics(4e77, 1 << 24, True), 0.3, 4) == torch.finfo(torch.float32).max
    assert layout.level_of_sum([2.0, 0.0, 2.0, 0.0]) == np.float32(math.sqrt(5 / 8 * 8))
    assert layout.level_of_sum([0.0, 0.0]) == 0
    assert math.isnan(layout.level_of_sum([1.0, math.nan]))
    assert layout.coarser(3.0, 4) == 6
    assert layout.coarser(1.0, 1) == np.float32(2**0.25)


def test_rounding_by_hand() -> None:
    """docs/format.md, "Rounding", with Python's own numbers."""
    x = gradient(2000, seed=2)
    shape = torch.randint(-12, 1, (2000,), generator=generator(5)).to(torch.int8)
    part = part_of(x, shape=shape, start=(1 << 32) - 1000)
    q = reference_noise.rounded(part, 0)
    for i in range(0, 2000, 7):
        index = (part.start + i) % (1 << 32)
        h24 = (int(wire.mix32(torch.tensor([index ^ part.key & 0xFFFFFFFF]))) + (part.key >> 32) + part.offset) % (
            1 << 32
        ) >> 8
        t = np.float32(x[i]) * np.float32(1.0 / part.level) * np.float32(2.0 ** -int(shape[i]))
        k = np.floor(t)
        assert q[i] == k + (int((t - k) * np.float32(1 << 24)) + h24 >= 1 << 24)


def test_keys_by_hand() -> None:
    """docs/format.md, "Draws": the name is hashed once, a step changes the key by integer operations."""

    def mix(x: int) -> int:
        return int(wire.mix32(torch.tensor([x % (1 << 32)])))

    for step in (0, 1, 77, (1 << 32) + 5):
        hashed = hashlib.blake2b(b"3/layer.weight/sum/1", digest_size=8).digest()
        n0, n1 = int.from_bytes(hashed[:4], "little"), int.from_bytes(hashed[4:], "little")
        k0, k1 = mix(n0 ^ mix(step)), mix(n1 + step % (1 << 32) * 0x9E3779B9)
        assert layout.key_of(3, step, "layer.weight", "sum", (1 << 32) + 9) == k1 << 32 | k0
    assert len({layout.key_of(0, step, "w", "own", 0) & 0xFFFFFFFF for step in range(5000)}) == 5000


# -- frames ------------------------------------------------------------------------------------------------------------


def test_the_tables_are_complete_codes_and_as_listed() -> None:
    page = (ROOT / "docs/format.md").read_text()
    header = (ROOT / "native/noise_tables.h").read_text()
    assert len(noise_tables.LENGTHS) == len(noise_tables.REACHES) == 20
    assert len(noise_tables.THRESHOLDS) + 1 == layout.CLASSES == 48
    for table, text in enumerate(noise_tables.LENGTHS):
        lengths = layout.lengths_of(table)
        assert sum(1 << layout.LIMIT - length for length in lengths if length) == 1 << layout.LIMIT
        digits = {*range(2 * noise_tables.REACHES[table] + 1), layout.ESCAPE}
        assert {pair for pair, length in enumerate(lengths) if length} == {a + 16 * b for a in digits for b in digits}
        assert f"\n{table:2} {noise_tables.REACHES[table]} {text[:128]}\n     {text[128:]}\n" in page
        assert ",".join(re.findall("..", text)).replace(",", ",0x").join(("{0x", "}")) in header
    for listed in (
        ", ".join(map(str, noise_tables.THRESHOLDS[:16])),
        ", ".join(map(str, noise_tables.THRESHOLDS[-15:])),
    ):
        assert listed in page
        assert listed in header


@FEW
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(VALUES)), st.integers(0, 300) | st.integers(0, 9000)), min_size=1, max_size=4
    ),
    st.sampled_from([0.0001, 0.001, 0.01, 0.1, 0.3]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_a_frame_holds_what_was_rounded(kinds: list[tuple[str, int]], share: float, shaped: bool, seed: int) -> None:
    rng, parts = generator(seed), []
    for name, count in kinds:
        shape = torch.randint(-12, 1, (count,), generator=rng).to(torch.int8) if shaped else None
        parts.append(part_of(VALUES[name](count, rng).float(), share, shape=shape, start=seed))
    body, notch = encoded(parts)
    assert notch == 0
    assert body.numel() <= layout.body_bound([part.values.numel() for part in parts])
    for part, back in zip(parts, decoded(body, parts)):
        q = reference_noise.rounded(part, 0)
        assert same_bits(back, torch.from_numpy(reference_noise.values_of(q, part.level, part.shape)))
        grid = part.level * (torch.exp2(part.shape.float()) if part.shape is not None else torch.ones_like(back))
        near = part.values.isfinite() & back.isfinite()
        distance = (back - part.values).abs()[near].double()
        assert bool((distance <= grid[near].double() + 1e-6 * part.values[near].abs().double()).all())
        if not math.isnan(part.level):
            assert torch.equal(part.values.isnan(), back.isnan())
        assert bool((back[part.values == 0] == 0).all()) or math.isnan(part.level)


@pytest.mark.parametrize("scale", [0.05, 0.3, 1, 3, 10, 40, 200, 3000, 1e5, 1e9])
def test_every_class_is_decoded(scale: float) -> None:
    """Levels that do not fit the values: blocks of all scales, with low bits, escapes, giants, or raw."""
    x = torch.randn(20_000, generator=generator(1)) * scale
    part = Part(x, 1.0)
    body, _ = encoded([part])
    assert same_bits(decoded(body, [part])[0], torch.from_numpy(reference_noise.rounded(part, 0)))


def test_a_frame_that_does_not_fit_its_slot_is_coarser() -> None:
    parts = [part_of(torch.randn(20_000, generator=generator(1))), part_of(torch.randn(50, generator=generator(2)))]
    whole, _ = encoded(parts)
    for room, least, most in ((0.97, 1, 1), (0.9, 2, 2), (0.5, 8, 12)):
        body, notch = encoded(parts, int(whole.numel() * room))
        assert least <= notch <= most
        for part, back in zip(parts, decoded(body, parts)):
            assert bool(((back - part.values).abs() <= layout.coarser(part.level, notch)).all())
    least = layout.blocks_offset([20_000, 50])
    assert encoded(parts, least)[0].numel() == least
    with pytest.raises(Unsupported, match=f"a slot of {least - 1} bytes is too small.*at least {least}"):
        encoded(parts, least - 1)


def test_a_frame_full_of_nan_that_does_not_fit_is_poisoned() -> None:
    x = torch.where(torch.arange(5000) % 2 == 0, math.nan, 1.0)
    body, _ = encoded([part_of(x)], 2000)
    assert body.numel() == layout.HEAD_BYTES
    assert bool(decoded(body, [part_of(x)])[0].isnan().all())


def test_the_sum_of_frames_is_that_of_their_values_in_rank_order() -> None:
    world, counts = 4, (5000, 33, 0, 700)
    ranks = [
        [part_of(torch.randn(n, generator=generator(rank * 10 + n)) * (1 + rank)) for n in counts]
        for rank in range(world)
    ]
    key = layout.key_of(1, 2, "w", "sum", 0)
    sums = [Part(torch.empty(n), start=0, key=key) for n in counts]
    terms = [parts if rank == 2 else encoded(parts)[0] for rank, parts in enumerate(ranks)]
    room = torch.zeros(layout.body_bound(counts), dtype=torch.uint8)
    size, notch = reference_noise.reduce(terms, sums, room, step=7, digest=9)
    assert notch == 0
    backs = [
        [p.values for p in parts] if rank == 2 else decoded(encoded(parts)[0], parts)
        for rank, parts in enumerate(ranks)
    ]
    expected = []
    for number in range(len(counts)):
        total = backs[0][number].clone()
        for rank in range(1, world):
            total += backs[rank][number]
        level = layout.level_of_sum([parts[number].level for parts in ranks])
        expected.append(Part(total, level, key=key))
    assert torch.equal(room[:size], encoded(expected)[0])
    means = [Part(torch.empty(n)) for n in counts]
    reference_noise.decode(room[:size], means, divisor=world)
    for mean, whole in zip(means, decoded(room[:size], expected)):
        assert same_bits(mean.values, whole / world)


def test_a_poisoned_frame_poisons_the_sum() -> None:
    part = part_of(gradient(100))
    room = torch.zeros(5000, dtype=torch.uint8)
    size, _ = reference_noise.encode([part], room, poisoned=True)
    out = torch.zeros(5000, dtype=torch.uint8)
    written, _ = reference_noise.reduce([room[:size].clone(), [part]], [Part(torch.empty(100))], out)
    assert bool(decoded(out[:written], [part])[0].isnan().all())


def test_damaged_bodies_are_refused_by_name() -> None:
    parts = [part_of(torch.randn(9000, generator=generator(1)))]
    body, _ = encoded(parts)

    def broken(at: int, value: int) -> torch.Tensor:
        other = body.clone()
        other[at] = value
        return other

    first = layout.blocks_offset([9000])
    cases = [
        (body[:10], Truncated, "ends inside its head"),
        (body[:22], Truncated, "levels or index"),
        (body[:-1], Truncated, "behind the end"),
        (torch.cat([body, body[:1]]), Corrupt, "follow the last"),
        (broken(0, 2), Corrupt, "has 2 parts and not 1"),
        (broken(4, 128), Corrupt, "makes no sense"),
        (broken(6, 2), Corrupt, "makes no sense"),
        (broken(6, 1), Corrupt, "poisoned"),
        (broken(19, 255), Corrupt, "no level"),
        (broken(first, 48), Corrupt, "contradicts itself"),
        (broken(first + 1, 3), Corrupt, "contradicts itself"),
        (broken(first, 255), Corrupt, "raw noise block"),
        (broken(first + 3, 200), Corrupt, "ends inside its lanes"),
    ]
    for damaged, error, message in cases:
        with pytest.raises(error, match=message):
            decoded(damaged, parts)


def test_awkward_tensors_of_every_type() -> None:
    for name, x in ZOO.items():
        if x.numel() > 5000:
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            flat = x.to(dtype).reshape(-1)
            back = gradzip.decode(gradzip.encode(x.to(dtype), "noise"))
            assert back.dtype == dtype
            kept = flat.isnan() == back.isnan()
            assert bool(kept.all()) or not bool((flat.isfinite() & (flat != 0)).any()), name
    with pytest.raises(Unsupported, match="float64"):
        gradzip.encode(torch.randn(5).double(), "noise")


def test_read_share_of_numbers() -> None:
    assert read_share(0.02) == 0.02
