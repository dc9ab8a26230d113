"""The measurements: the entropy bound by hand, and a harness that does not time what is wrong."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import floor_for, gradient

from gradzip import Codec, Context, engines, parse
from gradzip.bench import codec as bench
from gradzip.bench.entropy import WINDOW, bound_bits
from gradzip.bench.sample import Sample
from gradzip.capture import ModelSize, train
from gradzip.errors import Unsupported


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample.of(train(ModelSize(width=32, blocks=1, batch=1), steps=5, at=(1.0,))[0])


# -- entropy bound ---------------------------------------------------------------------------------------------------

LOSSLESS = parse("gcomp:mode=lossless")


def test_one_exponent_costs_sign_and_mantissa() -> None:
    assert bound_bits(LOSSLESS, torch.full((1000,), 1.5)) == 24
    assert bound_bits(parse("gcomp:keep=7"), torch.full((1000,), 1.5)) == 8
    assert bound_bits(parse("cast:to=bf16"), torch.full((1000,), 1.5)) == 8


def test_zeros_cost_nothing_of_their_own() -> None:
    assert bound_bits(LOSSLESS, torch.zeros(1000)) == 0
    half = torch.tensor([0.0, 1.5]).repeat(500)
    assert bound_bits(LOSSLESS, half) == 1 + 24 / 2
    assert bound_bits(LOSSLESS, -torch.zeros(1000)) == 24, "-0 is not +0"


def test_four_equal_exponents_cost_two_bits() -> None:
    assert bound_bits(LOSSLESS, torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(100)) == 2 + 24


def test_each_window_has_its_own_statistics() -> None:
    x = torch.cat([torch.full((WINDOW,), 1.0), torch.full((WINDOW,), 2.0)])
    assert bound_bits(LOSSLESS, x) == 24


def test_near_mode_keeps_what_lies_above_the_floor() -> None:
    near = parse("gcomp")
    x = torch.full((100,), 1.0)  # exponent 0
    assert bound_bits(near, x, torch.full((100,), -5, dtype=torch.int8)) == 1 + 5
    assert bound_bits(near, x, torch.full((100,), -60, dtype=torch.int8)) == 1 + 23
    assert bound_bits(near, x, torch.full((100,), -128, dtype=torch.int8)) == 1 + 23
    assert bound_bits(near, x, torch.full((100,), 3, dtype=torch.int8)) == 1


def test_paper_mode_pays_for_its_levels() -> None:
    paper = parse("gcomp:mode=paper")
    x = torch.full((100,), 1.0)
    for reach, level in ((6, 0), (7, 1), (13, 2), (19, 3), (100, 3), (-128, 0)):
        assert bound_bits(paper, x, torch.full((100,), reach, dtype=torch.int8)) == 1 + 2 + 23 - 6 * level


def test_other_codecs_have_no_bound() -> None:
    assert bound_bits(parse("topk"), torch.ones(100)) is None
    assert bound_bits(LOSSLESS, torch.zeros(0)) is None


@pytest.mark.parametrize("spec", ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp"])
def test_gcomp_comes_near_its_bound(spec: str) -> None:
    x = gradient(1 << 17)
    codec, floor = parse(spec), floor_for(x)
    with engines.use("reference"):
        frame = codec.encode(x, Context(floor=floor))
        decoded = codec.decode(frame, Context(floor=floor))
    bound = bound_bits(codec, decoded, floor)
    assert bound is not None
    assert bound < 8 * frame.numel() / x.numel() < 1.06 * bound


# -- samples ---------------------------------------------------------------------------------------------------------


def test_samples_from_files(tmp_path: Path) -> None:
    x = gradient(100).numpy()
    np.save(tmp_path / "a.npy", x.reshape(4, 25))
    x.tofile(tmp_path / "a.f32")
    for name in ("a.npy", "a.f32"):
        assert np.array_equal(Sample.load(tmp_path / name).values.numpy(), x)
        assert np.array_equal(Sample.load(tmp_path / name, limit=7).values.numpy(), x[:7])


def test_unfit_files_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "double.npy", np.ones(3))
    (tmp_path / "empty.f32").touch()
    (tmp_path / "broken.npy").write_bytes(b"nonsense")
    for name in ("double.npy", "empty.f32", "broken.npy", "absent.f32"):
        with pytest.raises(Unsupported, match=name):
            Sample.load(tmp_path / name)


def test_floors_come_from_the_snapshot(sample: Sample) -> None:
    assert sample.floor(LOSSLESS) is None
    coarse, fine = sample.floor(parse("gcomp:ulps=256")), sample.floor(parse("gcomp"))
    assert coarse is not None
    assert fine is not None
    assert coarse.numel() == fine.numel() == sample.values.numel()
    bare = Sample("a file", sample.values)
    with pytest.raises(Unsupported, match="holds no optimizer state"):
        bare.floor(parse("gcomp"))


# -- harness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp", "gcomp:ulps=4096", "gcomp:mode=paper", "identity", "cast", "zlib"],
)
def test_measure_fills_every_column(spec: str, sample: Sample, engine: str) -> None:
    small = Sample(sample.name, sample.values[:9000], sample.snapshot)
    result = bench.measure(parse(spec), small, rounds=1)
    assert result.codec == str(parse(spec))
    assert result.values == 9000
    assert math.isclose(result.ratio, 32 / result.bits)
    assert min(result.encode_gbps, result.decode_gbps, result.memcpy_gbps) > 0
    assert (result.max_error == 0) == parse(spec).lossless
    assert result.l2_error <= result.max_error
    if spec.startswith("gcomp"):
        assert result.engine.split("/")[0] == engine
        assert result.bound is not None
        assert result.over is not None
        assert math.isclose(result.bits, result.bound * (1 + result.over / 100))


@pytest.mark.parametrize(
    ("spec", "damage"),
    [
        ("identity", lambda x: x + 1e-9),
        ("identity", lambda x: torch.where(x == 0, -0.0, x)),
        ("gcomp:mode=lossless", lambda x: x * 1.0001),
        ("gcomp:keep=7", lambda x: x * 1.02),
        ("gcomp", lambda x: x * 1.02),
        ("gcomp:keep=7", lambda x: torch.where(x > 0, math.inf, x)),
    ],
)
def test_a_wrong_round_trip_is_not_timed(
    spec: str, damage: object, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Codec.decode

    def wrong(self: Codec, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        out.copy_(damage(real(self, payload, ctx)))  # type: ignore[operator]
        return out

    small = Sample(sample.name, sample.values[:5000], sample.snapshot)
    monkeypatch.setattr(Codec, "decode", wrong)
    monkeypatch.setattr(bench, "_best_times", lambda *_: pytest.fail("timed"))
    with engines.use("reference"), pytest.raises(bench.WrongRoundTrip):
        bench.measure(parse(spec), small)


def test_codecs_of_several_rounds_are_refused(sample: Sample) -> None:
    with pytest.raises(Unsupported, match="rounds"):
        bench.measure(parse("powersgd"), sample)


def test_slow_codecs_get_fewer_rounds() -> None:
    calls = []
    x = gradient(100)
    with engines.use("reference"):
        bench._best_times(lambda: calls.append("e"), lambda: None, x, rounds=9, patience=0.0)
    assert len(calls) == 3


def test_one_core_is_undone() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with engines.use("reference"), contextlib.suppress(KeyError), bench.one_core():
        assert len(os.sched_getaffinity(0)) == 1
        assert torch.get_num_threads() == 1
        raise KeyError
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


def test_errors_are_relative() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, math.inf, math.nan])
    assert bench.errors(x, x) == (0, 0)
    largest, whole = bench.errors(x, torch.tensor([1.0, -1.5, 0.0, math.inf, math.nan]))
    assert largest == 0.25
    assert math.isclose(whole, 0.5 / math.sqrt(5))
