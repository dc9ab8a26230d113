"""The codec noise: what docs/codecs.md promises of it, and the arithmetic and frames of docs/format.md."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import numpy as np
import pytest
import torch
from conftest import ZOO, generator, gradient, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noisy import VALUES, part_of

import gradzip
from gradzip import Context, parse, wire
from gradzip.codecs.noise import Noise, read_share
from gradzip.engines import native, native_noise, noise_tables, reference_noise
from gradzip.engines import noise_layout as layout
from gradzip.engines.noise_layout import Part, Slot, Written
from gradzip.errors import Corrupt, Truncated, Unsupported

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def on_all(call: Callable[[ModuleType], T]) -> list[T]:
    """What the reference makes of a call, and then every instruction set of the native engine."""
    results, before = [call(reference_noise)], native.isa()
    try:
        for name in native.available_isas():
            native.set_isa(name)
            results.append(call(native_noise))
    finally:
        native.set_isa(before)
    return results


def encoded(parts: Sequence[Part], room: int | None = None) -> tuple[torch.Tensor, int]:
    """The body of these parts and its notch, after all engines have agreed on them."""
    size = layout.body_bound([part.values.numel() for part in parts]) if room is None else room

    def call(engine: ModuleType) -> tuple[torch.Tensor, int]:
        guarded = torch.full((size + 64,), 0xA5, dtype=torch.uint8)
        used, notch = engine.encode(parts, guarded[:size], step=7, digest=9)
        assert bool((guarded[size:] == 0xA5).all()), "written behind the end"
        return guarded[:used], notch

    first, *others = on_all(call)
    for body, notch in others:
        assert torch.equal(body, first[0])
        assert notch == first[1]
    return first


def decoded(body: torch.Tensor, parts: Sequence[Part], *, add: bool = False, divisor: int = 1) -> list[torch.Tensor]:
    """What all engines agree that a body decodes to, over or added to 7."""

    def call(engine: ModuleType) -> list[torch.Tensor]:
        outs = [Part(torch.full_like(part.values, 7.0), shape=part.shape) for part in parts]
        engine.decode(body, outs, add, divisor)
        return [part.values for part in outs]

    first, *others = on_all(call)
    for values in others:
        for a, b in zip(first, values):
            assert same_bits(a, b)
    return first


def frames(slots: Callable[[], list[Slot]]) -> tuple[list[torch.Tensor], list[Written]]:
    """The slots that all engines fill alike."""

    def call(engine: ModuleType) -> tuple[list[torch.Tensor], list[Written]]:
        made = slots()
        return [slot.out for slot in made], engine.encode_frames(made, 7, 9)

    first, *others = on_all(call)
    for outs, written in others:
        assert written == first[1]
        for a, b, (size, _, _) in zip(first[0], outs, written):
            assert torch.equal(a[:size], b[:size])
    for slot, out in zip(slots(), first[0]):
        for divisor in (3, 4):
            means(out, slot.parts, divisor)
    return first


def means(frame: torch.Tensor, parts: Sequence[Part], divisor: int = 1) -> tuple[list[torch.Tensor], float]:
    """What all engines agree that a frame decodes to, and the sum of its squares."""

    def call(engine: ModuleType) -> tuple[list[torch.Tensor], float]:
        outs = [Part(torch.full_like(part.values, 7.0), shape=part.shape) for part in parts]
        squares = engine.decode_means(frame, outs, 7, 9, divisor)
        again = [Part(torch.full_like(part.values, 8.0), shape=part.shape) for part in parts]
        engine.decode_frame(frame, again, 7, 9, divisor=divisor)
        assert all(same_bits(a.values, b.values) for a, b in zip(outs, again))
        return [part.values for part in outs], squares

    first, *others = on_all(call)
    for values, squares in others:
        assert all(same_bits(a, b) for a, b in zip(first[0], values))
        assert squares == first[1] or (math.isnan(squares) and math.isnan(first[1]))
    assert math.isfinite(first[1]) == all(bool(values.isfinite().all()) for values in first[0])
    if math.isfinite(first[1]):
        exact = math.fsum(float(values.double().square().sum()) for values in first[0])
        assert first[1] == pytest.approx(exact, rel=2e-6, abs=1e-75)
    return first


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
    whole = torch.stack(xs).sum(0)
    noise = (torch.stack(back).sum(0) - whole).double().square().sum() / whole.double().square().sum()
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
    assert {found.squares for found in on_all(lambda engine: engine.statistics(x))} == {lanes[0]}


@FEW
@given(st.sampled_from(sorted(VALUES)), st.integers(0, 20_000), st.booleans(), st.integers(0, 1 << 30))
def test_statistics_are_the_same_on_all_engines(name: str, count: int, shaped: bool, seed: int) -> None:
    x = VALUES[name](count, generator(seed)).float()
    shape = torch.randint(-12, 1, (count,), generator=generator(seed)).to(torch.int8) if shaped else None
    found = on_all(lambda engine: engine.statistics(x, shape))
    assert found == [found[0]] * len(found)
    assert found[0].squares == pytest.approx(float(x[x.isfinite()].double().square().sum()), rel=1e-12)
    assert found[0].finite == bool(x.isfinite().all())
    assert native_noise.statistics_of([Part(x, shape=shape), Part(x)])[0] == found[0]


@pytest.mark.parametrize("start", [0, 1, 65_500, 65_535, (1 << 32) - 40_000])
def test_draws_are_the_same_wherever_the_index_carries(start: int) -> None:
    x = torch.randn(140_000, generator=generator(2))
    encoded([Part(x, 0.2, None, start, layout.key_of(1, 2, "w", "own", start), 12345)])


def test_the_user_s_float_modes_do_not_matter() -> None:
    x = torch.cat([torch.randn(3000, generator=generator(1)) * 1e-39, torch.randn(300, generator=generator(1)) * 1e-37])
    part = part_of(x, 0.001)
    expected, _ = encoded([part])
    back = decoded(expected, [part])[0]
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormals")
        room, out = torch.zeros(20_000, dtype=torch.uint8), Part(torch.empty(3300))
        size, _ = native_noise.encode([part], room, 7, 9)
        native_noise.decode(room[:size], [out])
        found = native_noise.statistics(x)
    finally:
        torch.set_flush_denormal(False)
    assert found == reference_noise.statistics(x)
    assert torch.equal(room[:size], expected)
    assert same_bits(out.values, back)


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


@pytest.mark.parametrize("start", [0, 65_472, 5])
@pytest.mark.parametrize("depth", [None, 0, 5, 12])
def test_values_between_two_draws_round_as_the_format_says(start: int, depth: int | None) -> None:
    """t is up to 2^-24 away from where the draw decides, on either side of 0."""
    count = 4096
    shape = None if depth is None else torch.full((count,), -depth, dtype=torch.int8)
    key = layout.key_of(3, 4, "w", "own", start)
    part = Part(torch.zeros(count), 1.0, shape, start, key, 999)
    draws = reference_noise.draws(part).astype(np.float64)
    for beyond in (-1, -0.5, -0.25, -0.125, 0, 0.125, 0.25, 0.5, 1):
        for t in (beyond - draws, beyond + (1 << 24) - draws):
            x = (t * 2.0 ** -(24 + (depth or 0))).astype(np.float32)
            encoded([Part(torch.from_numpy(x), 1.0, shape, start, key, 999)])


@pytest.mark.parametrize("level", [2.0**-126, 2.0**-92, 2.0**-85, 2.0**-70, 2.0**95, 2.0**110, 2.0**127])
def test_levels_near_the_ends_of_float32_round_as_the_format_says(level: float) -> None:
    count = 4096
    x = (torch.randn(count, generator=generator(3)).double() * level * 3).float()
    encoded([Part(x, level, None, 0, 12345)])
    encoded([Part(x / 4096, level, torch.full((count,), -12, dtype=torch.int8), 0, 12345)])


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


@pytest.mark.parametrize("step", [0, 1, 7, (1 << 32) - 1, 1 << 33])
def test_keys_of_many_tensors_are_those_of_each(step: int) -> None:
    names = [f"layer.{number}" for number in range(50)]
    of_names = np.array([layout.name_key(3, name, "own", 0) for name in names], np.uint64)
    assert layout.keys_in_step(of_names, step).tolist() == [layout.key_of(3, step, name, "own", 0) for name in names]


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


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("divisor", [1, 4, 3])
def test_blocks_of_all_forms_follow_one_another(divisor: int, shaped: bool) -> None:
    """A block may be delivered while the next one is decoded, whatever its form. The output does not fit the cache."""
    block, g = layout.BLOCK, generator(5)
    coded, giants, coarse = torch.randn(3, block, generator=g)
    giants[100], coarse = 1e20, 1e4 * coarse
    rows, raw = coded * (torch.arange(block) // 128 % 3 == 0), torch.full((block,), math.nan)
    order = torch.randint(0, 6, (140,), generator=g).tolist()
    x = torch.cat([(coded, giants, coarse, rows, raw, torch.zeros(block))[form] for form in order])
    shape = torch.randint(-3, 1, (x.numel(),), generator=g).to(torch.int8) if shaped else None
    parts = [Part(x, 0.2, shape, 0, 77), Part(torch.randn(5000, generator=g), 0.2), Part(coded, 0.2)]
    decoded(encoded(parts)[0], parts, divisor=divisor)


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
    for engine in (reference_noise, native_noise):
        with pytest.raises(Unsupported, match=rf"slot.*{least - 1}.*at least {least}"):
            engine.encode(parts, torch.zeros(least - 1, dtype=torch.uint8))


def test_a_frame_full_of_nan_that_does_not_fit_is_poisoned() -> None:
    x = torch.where(torch.arange(5000) % 2 == 0, math.nan, 1.0)
    body, _ = encoded([part_of(x)], 2000)
    assert body.numel() == layout.HEAD_BYTES
    assert bool(decoded(body, [part_of(x)])[0].isnan().all())


def test_the_sum_of_frames_is_that_of_their_values_in_rank_order() -> None:
    world, counts = 4, (5000, 33, 0, 700, 9000)
    shapes = [torch.randint(-12, 1, (n,), generator=generator(n)).to(torch.int8) for n in counts]
    ranks = []
    for rank in range(world):
        rng = generator(rank)
        values = [torch.randn(n, generator=rng) * (1 + rank) for n in counts]
        values[0][5] = math.inf if rank == 1 else 1e25
        values[3][:] = 0 if rank != 3 else math.nan
        ranks.append([part_of(x, shape=shape) for x, shape in zip(values, shapes)])
    key = layout.key_of(1, 2, "w", "sum", 0)
    sums = [Part(torch.empty(n), shape=shape, key=key) for n, shape in zip(counts, shapes)]
    room = layout.body_bound(counts) + wire.HEADER_BYTES
    sent, _ = frames(lambda: [Slot(parts, torch.full((room,), 0xA5, dtype=torch.uint8)) for parts in ranks])
    terms = [ranks[2] if rank == 2 else sent[rank] for rank in range(world)]

    def call(engine: ModuleType) -> tuple[torch.Tensor, Written]:
        out = torch.full((room,), 0x5A, dtype=torch.uint8)
        return out, engine.reduce(terms, Slot(sums, out), 7, 9)

    (frame, written), *others = on_all(call)
    for other, same in others:
        assert same == written
        assert torch.equal(other[: written.size], frame[: written.size])
    backs = []
    for rank, parts in enumerate(ranks):
        outs = [Part(torch.empty(n), shape=shape) for n, shape in zip(counts, shapes)]
        reference_noise.decode_frame(sent[rank], outs, 7, 9)
        backs.append([part.values for part in (parts if rank == 2 else outs)])
    expected = []
    for number, part in enumerate(sums):
        total = backs[0][number].clone()
        for rank in range(1, world):
            total += backs[rank][number]
        level = layout.level_of_sum([parts[number].level for parts in ranks])
        expected.append(Part(total, level, part.shape, key=key))
    body, _ = encoded(expected)
    assert torch.equal(frame[wire.HEADER_BYTES : written.size], body)
    for mean, whole in zip(decoded(body, expected, divisor=world), decoded(body, expected)):
        assert same_bits(mean, whole / world)
    for more, whole in zip(decoded(body, expected, add=True), decoded(body, expected)):
        assert same_bits(more, 7 + whole)


@FEW
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=3), st.sampled_from([1, 3, 8]), st.integers(0, 1 << 30))
def test_means_know_their_squares_and_whether_they_are_finite(counts: list[int], divisor: int, seed: int) -> None:
    """Blocks with and without shape, giants, integers of many bits, and values that overflow or are not finite."""
    g = generator(seed)
    parts = []
    for number, count in enumerate(counts):
        x = torch.randn(count, generator=g) * 10.0 ** int(torch.randint(-3, 4, (), generator=g))
        x[torch.rand(count, generator=g) < 1e-3] = 1e9
        if seed % 4 == 0:
            x[torch.rand(count, generator=g) < 1e-4] = [math.inf, math.nan, -math.inf][number % 3]
        shape = torch.randint(-12, 1, (count,), generator=g).to(torch.int8) if (seed >> number) & 8 else None
        level = [0.3, 0.0, 3e38, 1e-3, math.nan, 2.0**-126][
            int(torch.randint(0, 6 if seed % 3 == 0 else 1, (), generator=g))
        ]
        parts.append(Part(x, level, shape, 0, layout.key_of(0, 0, str(number), "own", 0)))
    room = layout.body_bound(counts) + wire.HEADER_BYTES
    (frame,), _ = frames(lambda: [Slot(parts, torch.zeros(room, dtype=torch.uint8))])
    means(frame, parts, divisor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 8191, 8192, 30_000, 36_864])
def test_a_single_value_that_is_not_finite_is_seen_in_the_means(at: int, bad: float) -> None:
    x = torch.randn(36_865, generator=generator(at))
    room = layout.body_bound([x.numel()]) + wire.HEADER_BYTES
    for there in (False, True):
        x[at] = bad if there else x[at]
        part = Part(x, 0.1)
        (frame,), _ = frames(lambda part=part: [Slot([part], torch.zeros(room, dtype=torch.uint8))])  # type: ignore[misc]
        assert math.isfinite(means(frame, [part], 4)[1]) == (not there)


def test_a_poisoned_frame_poisons_the_sum() -> None:
    part = part_of(gradient(100))
    (bad, good), written = frames(
        lambda: [Slot([part], torch.zeros(500, dtype=torch.uint8), poisoned) for poisoned in (True, False)]
    )
    assert [frame.poisoned for frame in written] == [True, False]
    assert written[0].size == wire.HEADER_BYTES + layout.HEAD_BYTES

    def call(engine: ModuleType) -> torch.Tensor:
        out, values = torch.zeros(500, dtype=torch.uint8), Part(torch.empty(100))
        assert engine.reduce([bad, [part], good], Slot([part], out), 7, 9).poisoned
        engine.decode_frame(out, [values], 7, 9)
        return values.values

    for values in on_all(call):
        assert bool(values.isnan().all())


def test_a_frame_of_another_step_program_or_size_is_refused() -> None:
    part = part_of(gradient(1000))
    ((slot,), _) = frames(lambda: [Slot([part], torch.zeros(5000, dtype=torch.uint8))])
    short, other = Part(torch.empty(999)), slot.clone()
    other[3] = 2
    cases = [
        (slot, part, 8, 9, "another step or program"),
        (slot, part, 7, 8, "another step or program"),
        (slot, short, 7, 9, "does not fit its parts"),
        (other, part, 7, 9, "does not fit its parts"),
        (slot[:300], part, 7, 9, "or its slot"),
    ]
    for frame, into, step, digest, message in cases:
        for engine in (reference_noise, native_noise):
            with pytest.raises(Corrupt, match=message):
                engine.decode_frame(frame, [Part(torch.empty_like(into.values))], step, digest)
            with pytest.raises(Corrupt, match=message):
                engine.reduce([frame], Slot([into], torch.zeros(5000, dtype=torch.uint8)), step, digest)
    with pytest.raises(native_noise.DamagedTerm) as caught:
        native_noise.reduce([slot, other], Slot([part], torch.zeros(5000, dtype=torch.uint8)), 7, 9)
    assert caught.value.number == 1


@FEW
@given(st.sampled_from(sorted(VALUES)), st.integers(1, 600), st.integers(0, 1 << 30))
def test_all_engines_refuse_the_same_damaged_bodies(name: str, count: int, seed: int) -> None:
    rng, numbers = generator(seed), random.Random(seed)
    part = part_of(VALUES[name](count, rng).float(), numbers.choice([0.0001, 0.01, 0.3]))
    body, _ = encoded([part])
    for _ in range(8):
        damaged = body.clone()
        for _ in range(numbers.choice((1, 1, 3))):
            bit = numbers.randrange(8 * body.numel())
            damaged[bit // 8] ^= 1 << bit % 8
        if numbers.random() < 0.2:
            damaged = damaged[: numbers.randrange(body.numel())].clone()

        def call(engine: ModuleType, damaged: torch.Tensor = damaged) -> torch.Tensor | str:
            out = Part(torch.empty(count))
            try:
                engine.decode(damaged, [out])
            except (Corrupt, Truncated) as error:
                return type(error).__name__
            return out.values

        first, *others = on_all(call)
        for other in others:
            if isinstance(first, str) or isinstance(other, str):
                assert first == other
            else:
                assert same_bits(first, other)


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
            reference_noise.decode(damaged, parts)
        with pytest.raises(error):
            native_noise.decode(damaged, parts)


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
