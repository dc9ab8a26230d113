"""One format, several engines: the reference and every instruction set write and read the same bytes."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import gradient, random_bits, same_bits
from engine_cases import (
    DTYPES,
    FLOORS,
    KINDS,
    MODES,
    Case,
    Recipe,
    check_damaged,
    check_identity,
    damage,
    decode,
    encode,
    isas,
    make,
    mapped,
    native_on,
    prove,
    with_payloads,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradzip import Context, Floor, engines, parse, wire
from gradzip.engines import reference
from gradzip.engines.layout import BLOCK, DENSE, RAW, SEGMENT, SPARSE, Job, blocks_of, index_offset, segments_of
from gradzip.engines.reference_values import symbols_of
from gradzip.errors import CodecError, Corrupt, EngineError, Unsupported

native = engines.load("native")

MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

recipes = st.builds(
    Recipe,
    blocks=st.lists(st.sampled_from(KINDS), max_size=4).map(tuple),
    tail=st.integers(0, 130) | st.integers(0, BLOCK - 1),
    last=st.sampled_from(KINDS),
    dtype=st.sampled_from(sorted(DTYPES)),
    mode=st.sampled_from(MODES),
    keep=st.integers(0, 23),
    truncate=st.booleans(),
    limit=st.integers(1, 8),
    floor=st.sampled_from(FLOORS),
    depth=st.integers(-3, 30),
    shift=st.integers(0, 30),
    code=st.sampled_from(["sampled", "given", "shared"]),
    seed=st.integers(0, 1 << 30),
)


def kinds_of(body: torch.Tensor, numel: int) -> list[tuple[int, int]]:
    """Kind and length in words of every block of a body with tables."""
    at = index_offset(numel, 0)
    index = body[at : at + 2 * blocks_of(numel)].numpy().view("<u2")
    return [(int(entry) >> 14, int(entry) & 0x3FFF) for entry in index]


# -- identity ----------------------------------------------------------------------------------------------------------


@MANY
@given(recipes)
def test_all_engines_agree(recipe: Recipe) -> None:
    check_identity(make(recipe))


@MANY
@given(recipes, st.integers(0, 1 << 30))
def test_all_engines_agree_on_damaged_bodies(recipe: Recipe, seed: int) -> None:
    case = make(replace(recipe, blocks=recipe.blocks[:1], tail=recipe.tail % 400))
    body, rng = encode(reference, case), random.Random(seed)
    for _ in range(5):
        check_damaged(case, damage(body, rng))


@pytest.mark.parametrize("mode", MODES)
def test_all_engines_agree_on_every_truncation(mode: str) -> None:
    """Two blocks, of which a cut may damage the first and lose the second: all give the same class of error."""
    case = make(Recipe(("gradient",), 40, "few special", mode=mode, seed=3))
    body = encode(reference, case)
    for size in [*range(0, 300), *range(300, body.numel(), 97), *range(body.numel() - 60, body.numel())]:
        assert not check_damaged(case, body[:size])
        changed = body[:size].clone()
        changed[size // 2 : size // 2 + 1] ^= 0x55
        check_damaged(case, changed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_nans_are_one_nan(dtype: str, mode: str) -> None:
    """NaN + NaN, NaN + number and infinity - infinity: the same bits from every engine and instruction set."""
    if dtype != "float32" and mode != "lossless":
        pytest.skip("16-bit types are coded losslessly")
    case = make(Recipe(("few special",), 700, "few special", dtype=dtype, mode=mode, seed=9))
    case.x[::3] = with_payloads(case.x[::3])
    check_identity(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_mode(mode: str, kind: str) -> None:
    """Five blocks of a kind: enough for those that are decoded in lockstep, and one beyond."""
    for dtype in ("float32", *(DTYPES if mode == "lossless" else ())):
        check_identity(make(Recipe((kind,) * 4, 97, kind, dtype=dtype, mode=mode, seed=5)))


@pytest.mark.parametrize("keep", range(24))
def test_every_keep(keep: int) -> None:
    for truncate in (False, True):
        check_identity(make(Recipe((), 1500, "few special", mode="keep", keep=keep, truncate=truncate, seed=keep)))


@pytest.mark.parametrize("limit", range(1, 9))
def test_every_limit(limit: int) -> None:
    case = make(Recipe(("wide",), 100, "gradient", limit=limit, seed=limit))
    body = check_identity(case)
    table = body[8 : 8 + 128]
    assert int((table & 15).max()) <= limit
    assert int((table >> 4).max()) <= limit


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("depth", [-2, 0, 3, 12, 23, 40])
def test_every_floor(floor: str, depth: int) -> None:
    for shift in (0, 2, 126):
        check_identity(make(Recipe(("rare",), 800, "few special", mode="near", floor=floor, depth=depth, shift=shift)))


@pytest.mark.parametrize("zeros", [0.0, 0.7])
@pytest.mark.parametrize("exponent", [-127, -126, -125, -120])
def test_subnormals_on_the_finest_grids(exponent: int, zeros: float) -> None:
    """A step of the grid is about the smallest normal number: subnormals count as zeros before they are rounded."""
    rng = torch.Generator().manual_seed(exponent)
    numel = 5 * BLOCK
    x = torch.randn(numel, generator=rng) * 2.0**exponent
    x[torch.rand(numel, generator=rng) < zeros] = 0.0
    floor = torch.randint(-128, -122, (numel,), generator=rng).to(torch.int8)
    check_identity(Case(x, Job("near"), floor, None, None))


@pytest.mark.parametrize("c", [0, 1 << 17])
def test_rules_with_large_numbers(c: int) -> None:
    """Numbers that 16 bits do not hold, but whose floors are ordinary ones."""
    theta, second = gradient(4 * BLOCK, seed=1), gradient(4 * BLOCK, seed=2).square()
    rule = Floor(theta, second, c0=-190 - c // 2, c1=c, c2=c)
    check_identity(Case(gradient(4 * BLOCK, seed=3), Job("near"), rule, None, None))


@pytest.mark.parametrize("isa", isas())
def test_the_float_mode_of_the_caller(isa: str) -> None:
    """Neither does it matter, nor is it changed."""
    case = make(Recipe(("gradient", "rare", "tiny"), 0, "tiny", mode="near", depth=5))
    body = encode(reference, case)
    with native_on(isa) as native:
        try:
            for flush in (True, False):
                assert torch.set_flush_denormal(flush)
                assert torch.equal(encode(native, case), body)
                product = torch.full((1,), 2.0**-100) * 2.0**-40
                assert (product.view(torch.int32).item() == 0) == flush
        finally:
            torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(mode="lossless"),
        Recipe(mode="near", depth=6),
        Recipe(mode="paper", floor="theta and second", depth=8),
        Recipe(mode="keep", code="given"),
        Recipe(dtype="bfloat16", code="shared"),
    ],
    ids=lambda r: f"{r.mode}-{r.dtype}-{r.code}",
)
def test_across_a_segment(recipe: Recipe) -> None:
    kinds = ("gradient", "rare", "zeros", "one exponent", "half", "cut")
    blocks = tuple(kinds[i * 7 % len(kinds)] for i in range(32))
    case = make(replace(recipe, blocks=blocks, tail=5, last="gradient", seed=9))
    assert case.x.numel() == SEGMENT + 5
    check_identity(case)


def test_blocks_of_every_kind_occur() -> None:
    """The cases above would prove little if they all ended in one kind of block."""
    exact = check_identity(make(Recipe(("gradient", "bits", "zeros"), 700, "bits")))
    assert [kind for kind, _ in kinds_of(exact, 3 * BLOCK + 700)] == [DENSE, RAW, SPARSE, RAW]
    sparse = check_identity(make(Recipe(("rare", "zeros", "half"), 700, "rare", mode="near")))
    near = kinds_of(sparse, 3 * BLOCK + 700)
    assert [kind for kind, _ in near] == [SPARSE, SPARSE, DENSE, SPARSE]
    assert [words > 0 for _, words in near] == [True, False, True, True]


@pytest.mark.parametrize("tail", [1, 15, 16, 17, 63, 64, 65, 100])
def test_an_earlier_block_leaves_no_trace(tail: int) -> None:
    """Vectors reach beyond a short block, into what a longer one left in the scratch memory."""
    loud = [make(Recipe(("bits",) * 4, 0, "bits", mode=mode, floor="coarse", seed=20)) for mode in MODES]
    for mode in MODES:
        for kind in ("constant", "zeros", "rare", "few special"):
            for case in loud:
                decode(native, encode(native, case), case)
            for depth in (-3, 2):
                check_identity(make(Recipe((), tail, kind, mode=mode, depth=depth, seed=tail)))


@pytest.mark.parametrize("mode", MODES)
def test_threads_do_not_matter(mode: str) -> None:
    numel = 5 * SEGMENT + 5
    x = torch.where(torch.arange(numel) % 40000 < 13000, 0.0, gradient(numel))
    floor = torch.full((numel,), -14, dtype=torch.int8)
    case = Case(x, Job(mode, keep=7), floor, None, None)
    body = encode(native, case)
    for threads in (2, 3, 16):
        native.set_threads(threads)
        try:
            assert torch.equal(encode(native, case), body)
            assert same_bits(decode(native, body, case), mapped(case))
            damaged = body.clone()
            damaged[index_offset(numel, 0) + 2 * blocks_of(numel) - 1] |= 0xC0  # the last block, of a reserved kind
            with pytest.raises(Corrupt, match="kind"):
                decode(native, damaged, case)
        finally:
            native.set_threads(1)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("mode", MODES)
def test_outputs_larger_than_the_cache(mode: str, isa: str) -> None:
    """These are written past the cache, where alignment matters."""
    numel = (1 << 20) + 4099
    x = gradient(numel, seed=3)
    case = Case(x, Job(mode, keep=9), torch.full((numel,), -16, dtype=torch.int8), None, None)
    with native_on(isa):
        body = encode(native, case)
        for offset in (0, 1, 16):
            room = torch.full((numel + 32,), 7.0)
            native.decode(body, room[offset : offset + numel], case.floor)
            assert same_bits(room[offset : offset + numel], mapped(case))
            assert bool((room[:offset] == 7).all())
            assert bool((room[offset + numel :] == 7).all())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    line = prove(10_000, seed=1)
    with capsys.disabled():
        print(f"\n{line}")


# -- parts of the native engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", isas())
@given(
    numel=st.integers(0, 5000),
    c0=st.integers(-400, 100),
    c1=st.integers(-200, 200),
    c2=st.integers(-200, 300),
    second=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_floors_follow_the_rule(isa: str, numel: int, c0: int, c1: int, c2: int, second: bool, seed: int) -> None:
    theta, moment = random_bits(numel, seed), random_bits(numel, seed + 1).abs()
    rule = Floor(theta, moment if second else None, c0, c1, c2)
    with native_on(isa):
        assert torch.equal(native.floors(rule), rule.tensor())


@given(st.binary(max_size=400), st.integers(0, 1 << 40), st.integers(0, 3))
def test_checksums_are_those_of_the_frame(data: bytes, first_word: int, offset: int) -> None:
    room = torch.frombuffer(bytearray(offset) + bytearray(data) + b"\0", dtype=torch.uint8)
    part = room[offset : offset + len(data)]
    assert native.checksum(part, first_word) == wire.checksum(part, first_word)


@pytest.mark.parametrize("code", ["given", "shared"])
@pytest.mark.parametrize("engine", [reference, native], ids=lambda e: e.NAME)
def test_incomplete_codes_are_refused(engine: ModuleType, code: str) -> None:
    case = make(Recipe((), 100, code=code, seed=3))
    for lengths in ([1, 1], [9], [2, 2, 3], [8] * 256):
        table = torch.zeros(1, 256, dtype=torch.uint8)
        table[0, : len(lengths)] = torch.tensor(lengths, dtype=torch.uint8)
        with pytest.raises(CodecError, match=r"complete code|above 8"):
            encode(engine, replace(case, lengths=table))


@pytest.mark.parametrize(("base", "symbol", "exponent"), [(10, 245, 255), (250, 6, 1)])
def test_codes_of_exponents_that_symbols_reach_by_wrapping_round(base: int, symbol: int, exponent: int) -> None:
    bits = torch.full((2 * BLOCK + 77,), base << 23, dtype=torch.int32)
    bits[40::64] = exponent << 23  # in none of the rows that the base comes from
    lengths = torch.zeros(1, 256, dtype=torch.uint8)
    lengths[0, [255, symbol]] = torch.tensor([1, 2], dtype=torch.uint8)
    case = Case(bits.view(torch.float32), Job("lossless"), None, lengths, None)
    symbols, found = symbols_of((bits[:BLOCK] >> 23).numpy())
    assert found == base
    assert symbol in symbols
    check_identity(case)


def test_a_code_that_consists_of_the_escape_alone() -> None:
    case = make(Recipe((), BLOCK + 100, seed=3))
    check_identity(replace(case, lengths=torch.zeros(segments_of(case.x.numel()), 256, dtype=torch.uint8)))


# -- which engine runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "native"])
def test_the_engine_asked_for_is_the_one_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def watched(module: ModuleType, work: str) -> Callable[..., Any]:
        original = getattr(module, work)

        def run(*arguments: Any) -> Any:
            ran.append(module.NAME)
            return original(*arguments)

        return run

    for module in (reference, native):
        for work in ("encode", "decode"):
            monkeypatch.setattr(module, work, watched(module, work))
    x, codec = gradient(5000), parse("gcomp:mode=lossless")
    with engines.use(name):
        assert same_bits(codec.decode(codec.encode(x)), x)
    assert ran == [name, name]
    ran.clear()
    monkeypatch.setenv("GRADZIP_ENGINE", name)
    assert same_bits(codec.decode(codec.encode(x)), x)
    assert ran == [name, name]


def test_cpu_tensors_go_to_the_native_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADZIP_ENGINE", raising=False)
    assert engines.pick("cpu") is native
    assert native.isa() in isas()


def test_every_instruction_set_of_this_processor_is_tested() -> None:
    """Tests run on each of `isas()`: one that is missing there would be tested nowhere without a word."""
    if "GRADZIP_NO_SIMD" in os.environ:  # `make test-no-simd` says so
        assert isas() == ["scalar"]
        return
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", cpuinfo.read_text())) if cpuinfo.exists() else set()
    needed = {
        "scalar": set[str](),
        "avx2": {"avx2", "bmi2"},
        "avx512": {"avx512vbmi", "avx512_vbmi2", "avx512bw", "avx512vl", "avx512dq"},
    }
    assert isas() == [isa for isa, instructions in needed.items() if instructions <= flags]


@pytest.mark.parametrize("name", [None, "reference", "native"])
@pytest.mark.parametrize("device", ["meta", "cuda:0"])
def test_no_engine_takes_the_addresses_of_another_device(
    name: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is None and device.startswith("cuda"):
        pytest.skip("that is the GPU engine's")
    monkeypatch.delenv("GRADZIP_ENGINE", raising=False)
    with engines.use(name), pytest.raises(Unsupported, match="to the CPU first"):
        engines.pick(device)
    if device == "meta":
        with engines.use(name), pytest.raises(Unsupported, match="to the CPU first"):
            parse("gcomp:mode=lossless").encode(torch.empty(100, device="meta"))


def test_unknown_names_are_named() -> None:
    with pytest.raises(EngineError, match="unknown engine 'fast'"):
        engines.load("fast")
    with pytest.raises(EngineError, match="'sse9' is not available here: choose one of scalar"):
        native.set_isa("sse9")
    with pytest.raises(Unsupported, match="at least 1"):
        native.set_threads(0)


@pytest.mark.parametrize("shift", [-1, 128])
def test_impossible_shifts_are_refused(shift: int) -> None:
    x, near = gradient(100), parse("gcomp")
    floor = torch.full((100,), -20, dtype=torch.int8)
    frame = near.encode(x, Context(floor=floor))
    with pytest.raises(Unsupported, match=f"shift={shift}"):
        near.encode(x, Context(floor=floor, shift=shift))
    with pytest.raises(Unsupported, match=f"shift={shift}"):
        near.decode(frame, Context(floor=floor, shift=shift))


def test_other_floors_are_noticed() -> None:
    """Not always, but where they change how many bits a value has."""
    x = gradient(5000)
    floor = torch.full((5000,), -20, dtype=torch.int8)
    frame = parse("gcomp").encode(x, Context(floor=floor))
    for engine in ("reference", "native"):
        with engines.use(engine), pytest.raises(CodecError, match="floors differ"):
            parse("gcomp").decode(frame, Context(floor=floor + 1))


def test_segments_have_codes_of_their_own() -> None:
    x = torch.cat([gradient(SEGMENT), gradient(SEGMENT) * torch.exp2(torch.arange(SEGMENT) % 20)])
    lengths = native.code_lengths(native.histogram(x, Job("lossless")))
    assert lengths.shape == (segments_of(x.numel()), 256)
    assert not torch.equal(lengths[0], lengths[1])
